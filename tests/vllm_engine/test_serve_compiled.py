"""A plain ``vllm serve`` that compiles its model, as it does unless it is told not to: taps, units and stores next to vLLM's graph."""

from __future__ import annotations

from pathlib import Path

import pytest
from serve_checks import check_exact, check_partial
from serve_harness import (
    ARGUMENTS,
    BASE,
    TUNE,
    Plain,
    Server,
    family_cluster,
    serving,
    transfer_config,
    write_cluster,
    write_family,
)

openai = pytest.importorskip("openai", reason="it comes with vLLM")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_compiled_server(tmp_path: Path) -> None:
    checkpoints = write_family(tmp_path / "models")
    plain = Plain(checkpoints)
    file = write_cluster(tmp_path, checkpoints, attached={"vllm-tune": [TUNE]}, decode=(BASE, TUNE), answer_s=30.0)
    compiled = [argument for argument in ARGUMENTS if argument != "--enforce-eager"]
    with family_cluster(file) as cluster:
        config = transfer_config(file, "vllm-tune")
        with serving(Server(checkpoints[TUNE], config, tmp_path / "server.log", common=compiled)) as server:
            cluster.until(lambda status: cluster.attached("vllm-tune", status), "server")
            assert "enforce_eager=False" in server.text()
            check_partial(cluster, server, plain, TUNE, 10)
            check_exact(cluster, server, "vllm-tune", plain, TUNE, 20)
