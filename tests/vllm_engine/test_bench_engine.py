"""``kvkin bench engine`` on a tiny random family: every part end to end, with real processes, and Ctrl-C in the middle.

Times are never judged here: the figures' arithmetic is tested in ``tests/tools/test_bench_engine_result.py``.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from tiny_models import make_tiny, make_tiny_lora
from vllm_bench import WIDE

from kvkin.tools.cli import main
from kvkin.tools.docs_evaluation import engine_text

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(500)]

LAYERS = 6
BASE, LOW, HIGH = "wide-base", "wide-low", "wide-high"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cluster file of a base and two fine-tunes with heads that vLLM's attention on CPUs takes."""
    folder = tmp_path_factory.mktemp("bench-engine")
    base = make_tiny("llama", folder / "base", num_layers=LAYERS, max_position_embeddings=2048, **WIDE)
    adapters = {
        name: make_tiny_lora(base, folder / name, layers, seed=seed)
        for name, layers, seed in ((LOW, range(LAYERS), 1), (HIGH, range(3, LAYERS), 2))
    }
    models = {BASE: {"checkpoint": str(base)}}
    models |= {name: {"checkpoint": str(base), "adapter": str(path)} for name, path in adapters.items()}
    family = {
        "base": BASE,
        "models": models,
        "engine": "vllm",
        "transition_layers": [2],
        "chunk_tokens": 64,
        "recompute_groups": [{"group": [2, 4]}],
        "vllm": {"max_num_batched_tokens": 256},
    }
    small = {"port": 0, "kv_bytes": "16MiB", "e_bytes": "8MiB", "threads": 1}
    config = {
        "state_dir": str(folder / "state"),
        "families": {"wide": family},
        "nodes": {
            "router-0": {"role": "router"},
            "prefill-0": {"role": "prefill", "models": [BASE], **small},
            **{f"decode-{name}": {"role": "decode", "models": [name], **small} for name in models},
        },
        "router": {"policy": {"bypass_tokens": 0, "min_reuse_tokens": 16, "min_order_tokens": 16}},
        "transport": {"backend": "tcp"},
    }
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    return file


def left_behind(pid: int | None = None) -> list[str]:
    """Command lines of kvkin's processes below this one (or ``pid``)."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # gone meanwhile, or a zombie
            line = " ".join(child.cmdline())
            if "kvkin" in line:
                found.append(line)
    return found


def run(cluster: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str) -> dict[str, Any]:
    out = tmp_path / "engine.json"
    common = ["--mode", "eager", "--threads", "1", "--json", "--out", str(out)]
    assert main(["bench", "engine", words[0], "--config", str(cluster), *words[1:], *common]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert json.loads(out.read_text()) == found
    assert found["part"] == words[0]
    assert left_behind() == []
    # what a document would show of it
    assert found["settings"]["command"] in engine_text(found)
    return found


def test_overhead(cluster: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ["--context", "96", "--requests", "3", "--new-tokens", "6", "--repeats", "2"]
    found = run(cluster, capsys, tmp_path, "overhead", "--model", LOW, *sizes)
    results, engines = found["results"], found["engines"]
    assert results["rounds"] == 2
    for arm in ("plain", "kvkin", "transformers"):
        assert results["arms"][arm]["prefill_tokens_per_s"] > 0
        assert results["arms"][arm]["decode_tokens_per_s"] > 0
        assert engines[arm]["threads"] == 1
    for work in ("prefill", "decode"):
        middle, low, high = results["kvkin_over_plain"][work]
        assert 0 < low <= middle <= high
    assert engines["kvkin"]["taps"] == [2]
    assert not engines["plain"]["compiled"]
    assert engines["plain"]["prefix_caching"] is engines["kvkin"]["prefix_caching"] is True
    assert (engines["plain"]["max_num_batched_tokens"], engines["plain"]["max_num_seqs"]) == (256, 3)
    assert found["settings"]["model"] == LOW


def test_stall(cluster: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ["--context", "256", "--requests", "3", "--new-tokens", "4", "--budget", "64", "--repeats", "2"]
    found = run(cluster, capsys, tmp_path, "stall", *sizes)
    events = found["results"]["events"]
    # 288 tokens in chunks of 61 beside three that decode: five steps at least, of each of which each of the three has a gap
    assert events["prefill"]["gaps"] >= 2 * 3 * 5
    assert events["alone"]["gaps"] >= 2 * 3 * 4
    assert events["partial"]["gaps"] >= 2 * 3 * 2
    assert all(0 < each["p50_ms"] <= each["p99_ms"] <= each["max_ms"] for each in events.values())
    assert found["settings"]["group"] == [2, 4]
    assert found["engines"]["kvkin"]["chunk_tokens"] == found["engines"]["kvkin"]["max_num_batched_tokens"] == 64


def test_first_token(cluster: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ["--context", "128", "64", "--suffix", "8", "--repeats", "2"]
    found = run(cluster, capsys, tmp_path, "ttft", "--model", HIGH, "--group", "2", "5", *sizes)
    layer, states = 2 * 2 * 32 * 4, 128 * 4  # bytes of a token: two planes of two heads of 32; hidden states of 128
    for context, tokens in zip(found["results"]["contexts"], (128, 64), strict=True):
        assert context["context_tokens"] == tokens
        shapes = context["shapes"]
        assert shapes["exact"]["bytes_pulled"] == tokens * LAYERS * layer
        assert shapes["partial"]["bytes_pulled"] == tokens * (3 * layer + states)
        for shape in shapes.values():
            assert len(shape["runs_ms"]) == 2
            assert shape["ideal_ms"] > 0
        assert shapes["exact"]["parts_ms"]["states"] == 0
        assert shapes["partial"]["parts_ms"]["states"] > 0
    assert not found["engines"]["plain"]["prefix_caching"]
    assert not found["engines"]["receiver"]["prefix_caching"]


@pytest.mark.alone
def test_disaggregated(cluster: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ["--context", "128", "--suffix", "16", "--new-tokens", "4", "--documents", "2", "--repeats", "1"]
    found = run(cluster, capsys, tmp_path, "disaggregated", *sizes)
    engines, workloads = found["engines"], found["results"]["workloads"]
    assert engines["kvkin"]["processes"] == {"router": 1, "prefill": 1, "decode": 3}
    assert engines["vllm"]["processes"] == {"proxy": 0, "prefill": 3, "decode": 3}
    assert {each["requests"] for each in workloads.values()} == {6}
    # exact on both sides: the same answers, whoever prefilled
    assert workloads["one model"]["same_answers"] == 1.0
    shared = workloads["shared"]["systems"]
    # what is worth sharing is the policy's to say, and this model is computed about as fast as it is pulled
    assert sum(shared["kvkin"]["kinds"].values()) == 6
    assert 0 <= shared["kvkin"]["reused_share"] <= 1
    assert shared["vllm"]["kinds"] == {"remote prefill": 6}
    for workload in workloads.values():
        assert workload["ttft_vllm_over_kvkin"][0] > 0
        assert workload["throughput_kvkin_over_vllm"][0] > 0


def test_a_checkpoint_that_vllm_refuses_ends_it_with_the_log(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = make_tiny(
        "llama", tmp_path / "narrow", num_layers=4
    )  # heads of 16, which vLLM's CPU attention does not take
    words = ["bench", "engine", "overhead", "--checkpoint", str(narrow), "--mode", "eager", "--context", "32"]
    with contextlib.chdir(tmp_path):
        assert main([*words, "--requests", "2", "--new-tokens", "2"]) == 2
    said = capsys.readouterr().err
    assert "ended with exit code" in said
    assert "the end of " in said
    assert "head_dim=16" in said
    assert left_behind() == []


def test_ctrl_c_leaves_nothing(cluster: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvkin.tools.cli", "bench", "engine", "overhead", "--config", str(cluster)]
    process = subprocess.Popen(
        [*command, "--mode", "eager", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # a shell's background jobs, this suite perhaps, ignore it, and so would their children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - one call, no lock
    )
    try:
        deadline = time.monotonic() + 120
        while len(left_behind(process.pid)) < 3:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            threading.Event().wait(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    assert out == b""
    assert b"stopped, nothing is reported" in err
    assert psutil.wait_procs(children, timeout=30)[1] == []
