"""``make demo ENGINE=vllm`` as a user runs it: the demo family on vLLM, compared with plain transformers by the demo itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from smollm2_models import ADAPTERS, ROOT, adapter_path, base_folder

from kvkin.configs.vllm_install import installed_vllm
from kvkin.tools.demo_workload import Names, workload

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_the_demo(tmp_path: Path) -> None:
    if installed_vllm() is None:
        pytest.skip("vLLM is not installed here (make install ENGINE=vllm)")
    base_folder()
    for name in ADAPTERS:
        adapter_path(name)
    out = tmp_path / "demo.json"
    done = subprocess.run(
        [sys.executable, "-m", "kvkin.tools.cli", "demo", "--engine", "vllm", "--out", str(out)],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "9 of 9 answers have the very tokens of plain transformers" in done.stdout
    report = json.loads(out.read_text())
    assert report["failures"] == []
    assert report["peak_memory_bytes"] < 8 << 30
    requests = {request["name"]: request for request in report["requests"]}
    assert [request["plan"] for request in report["requests"]] == [step.expect.value for step in workload(Names())]
    for name, request in requests.items():
        loaded = request["prompt_tokens"] - request["tokens_cached"] - request["tokens_computed"]
        assert 0 <= loaded <= request["tokens_reused"], name
    # who goes on with its own context finds it in vLLM's cache, who has not seen one does not
    assert requests["follow-up"]["tokens_cached"] > 1000
    assert requests["cold"]["tokens_cached"] == requests["unseen"]["tokens_cached"] == 0
    assert requests["other-question"]["ttft_ms"] < requests["other-question"]["private_ttft_ms"] / 3
