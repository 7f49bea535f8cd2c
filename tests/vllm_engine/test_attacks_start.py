"""A node on vLLM that is ended while it starts: its ranks are other processes by then, and none of them stays."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import yaml
from tiny_cluster import BASE, make_family
from vllm_bench import WIDE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

WAIT_S = 120.0


def cluster_file(folder: Path) -> Path:
    family = make_family(folder, **WIDE)
    ranks = {"tensor_parallel_size": 2, "enforce_eager": True, "kv_cache_memory_bytes": "64MiB"}
    family["tiny"] |= {"engine": "vllm", "device": "cpu", "compute_dtype": "float32", "vllm": ranks}
    node = {"role": "prefill", "models": [BASE], "kv_bytes": "24MiB", "e_bytes": "24MiB", "threads": 2, "port": 0}
    cluster = {
        "state_dir": str(folder / "state"),
        "families": family,
        "nodes": {"router-0": {"role": "router"}, "prefill-0": node},
        "transport": {"backend": "tcp"},
    }
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster, sort_keys=False))
    return file


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cluster_file(tmp_path_factory.mktemp("start"))


def ranks_of(node: psutil.Process) -> list[psutil.Process]:
    found = []
    for each in node.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):  # gone meanwhile
            if "spawn_main" in " ".join(each.cmdline()):
                found.append(each)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_node_that_is_ended_while_its_ranks_start(file: Path, tmp_path: Path, number: signal.Signals) -> None:
    log, ready = tmp_path / "log", tmp_path / "ready"
    command = [sys.executable, "-m", "kvkin.tools.cli", "prefill", "--config", str(file), "--node", "prefill-0"]
    with log.open("wb") as output:
        child = subprocess.Popen(
            [*command, "--ready-file", str(ready)],
            stdout=output,
            stderr=output,
            env=os.environ,
            # a shell's background jobs, this suite perhaps, ignore it
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - one call, no lock
        )
    node = psutil.Process(child.pid)
    below: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + WAIT_S
        while len(ranks_of(node)) < 2:
            assert child.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "no ranks"
            threading.Event().wait(0.05)
        below = node.children(recursive=True)
        assert not ready.exists(), "the test is about its start"
        child.send_signal(number)
        code = child.wait(WAIT_S)
        gone, alive = psutil.wait_procs(below, timeout=WAIT_S)
        assert not alive, [" ".join(each.cmdline()) for each in alive]
        assert len(gone) == len(below)
    finally:
        for process in (node, *below):
            if process.is_running():
                process.kill()
        child.wait()
    assert not ready.exists()
    if number is signal.SIGKILL:
        assert code == -signal.SIGKILL
    else:
        # a rank that is left alone comes to its end when it says that it is ready, to nobody: with a trace
        assert (code, "Traceback" in log.read_text()) == (0, False), log.read_text()
