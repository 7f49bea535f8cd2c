"""``kvkin bench pipeline`` on a tiny family: a real holder process and real tcp links; what it prints, leaves behind and refuses.

Times are never judged here: the figures' arithmetic is tested in ``test_bench_pipeline_result.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tiny_cluster import BASE, FULL, LAYERS, UPPER, make_cluster

from kvkin.configs.families import resolve_family
from kvkin.configs.loader import load_cluster
from kvkin.engines.api import EngineRequest, EngineSink
from kvkin.kv.errors import ConfigError, KvkinError, NodeUnavailable, SourceLost
from kvkin.kv.execution import PlanExecution
from kvkin.kv.plan import LayerGroup
from kvkin.tools import bench_pipeline
from kvkin.tools.bench_pipeline import BenchPipeline, policy_of
from kvkin.tools.bench_pipeline_open import open_bench
from kvkin.tools.bench_pipeline_result import SCHEDULES
from kvkin.tools.cli import main

WAIT_S = 240.0
LAYER_BYTES, STATE_BYTES = 2 * 2 * 16 * 4, 64 * 4  # of a token: two planes of two heads of 16; hidden states of 64


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cluster(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    """The command sets the threads of its process, which here is the tests'."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def children() -> list[psutil.Process]:
    """The holders that run below this process."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # gone meanwhile, or a zombie
            if "kvkin.tools.bench_holder" in child.cmdline():
                found.append(child)
    return found


def arguments(cluster: Path, *more: str) -> list[str]:
    words = ["bench", "pipeline", "--config", str(cluster), "--sender", BASE, "--receiver", FULL]
    return [*words, "--threads", "1", "--suffix", "8", *more]


# --- measuring ---------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_json_of_two_contexts(cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "pipeline.json"
    sweep = ["--rates", "2", "0.5", "--repeats", "2", "--sweep-repeats", "1"]
    words = arguments(cluster, "--context", "128", "64", *sweep, "--json", "--out", str(out))
    assert main(words) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert json.loads(out.read_text()) == result
    settings, made = result["settings"], result["made"]
    assert (settings["sender"], settings["receiver"], settings["group"]) == (BASE, FULL, [2, 5])
    assert settings["policy"]["min_pull_tokens"] == 16  # the cluster file's
    assert (made["device"], made["dtype"], made["threads"]) == ("cpu", "float32", 1)
    assert {"date", "versions"} <= set(made)
    assert [context["context_tokens"] for context in result["contexts"]] == [128, 64]
    for context in result["contexts"]:
        check_context(context, pulled_layers=5, states=True)
        assert context["group"] == [2, 5]
    assert "[bench pipeline] 2/2: 64 + 8 tokens at " in captured.err
    assert "[bench pipeline] 2/2: rounds: 4/4" in captured.err
    assert children() == []


def check_context(context: dict[str, Any], *, pulled_layers: int, states: bool) -> None:
    """Shape and sanity of one context with two runs at the balanced rate, and one at each of 2 and 0.5 Gbit/s."""
    tokens = context["context_tokens"]
    partial = tokens * (pulled_layers * LAYER_BYTES + states * STATE_BYTES)
    assert context["bytes_pulled"] == {
        "naive": partial,
        "reuse_only": tokens * LAYERS * LAYER_BYTES,
        "pipelined": partial,
        "private": 0,
    }
    balanced = context["balanced_gbit_per_s"]
    links = [(balanced, 2), (2.0, 1), (0.5, 1)]
    rows = [(row["gbit_per_s"], row["schedule"], row["runs"], len(row["runs_ms"])) for row in context["results"]]
    assert rows == [(rate, schedule, runs, runs) for rate, runs in links for schedule in SCHEDULES]
    assert all(row["ttft_ms"] > 0 and min(row["runs_ms"]) > 0 for row in context["results"])
    assert [(rate["gbit_per_s"], rate["runs"], rate["balanced"]) for rate in context["rates"]] == [
        (balanced, 2, True),
        (2.0, 1, False),
        (0.5, 1, False),
    ]
    for name in ("private_over_pipelined", "pipelined_over_ideal", "private_over_ideal", "private_over_compute"):
        middle, low, high = context[name]
        assert 0 < low <= middle <= high
    for rate in context["rates"]:
        middle, low, high = rate["naive_over_pipelined"]
        assert (low is None, high is None) == (rate["runs"] == 1,) * 2
        assert middle > 0
        policy = rate["policy"]
        assert policy["choice"] in ("partial", "private")
        assert policy["reused_tokens"] == (tokens if policy["choice"] == "partial" else 0)
        assert policy["estimate_ms"]["private"] == pytest.approx(
            (tokens + 8) * LAYERS * (1 + (tokens + 8) / 2 / 4096) / context["layer_tokens_per_s"] * 1e3, rel=1e-3
        )


@pytest.mark.timeout(300)
def test_tables_of_a_group_at_layer_0_without_a_sweep(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = arguments(cluster, "--context", "64", "--group", "0", "3", "--repeats", "1", "--sweep-repeats", "0")
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert f"{FULL} on the KV of {BASE}, layers [0, 3) of {LAYERS} recomputed" in shown
    assert shown.count("(balanced)") == 2
    assert children() == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("group", [LayerGroup(0, 3), LayerGroup(5, LAYERS)])
async def test_naive_computes_once_everything_is_here(
    cluster: Path, group: LayerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = resolve_family(load_cluster(cluster), "tiny", models=(BASE, FULL))
    sizes = {"context_tokens": 128, "suffix_tokens": 8, "threads": 1, "seed": 0}
    async with open_bench(family, BASE, FULL, group, slowest_gbit_per_s=1.0, **sizes) as bench:
        arms = bench.arms(128)
        await bench.set_rate(0)
        there: list[int] = []
        submit = bench.engine.submit

        def watched(request: EngineRequest, sink: EngineSink) -> PlanExecution:
            there.append(bench.runtime.transport.pulled_bytes)
            return submit(request, sink)

        monkeypatch.setattr(bench.engine, "submit", watched)
        measured = await arms.measure_all(reverse=False)
        # naive, reuse_only, pipelined, private, the compute alone
        partial, every = arms.bytes_of(arms.partial), arms.bytes_of(arms.reuse_all)
        assert there == [partial, partial, partial + every, 2 * partial + every, 3 * partial + every]
        states = 128 * STATE_BYTES if group.start else 0
        assert partial == 128 * (LAYERS - len(group)) * LAYER_BYTES + states
        assert bench.runtime.transport.pulled_bytes == there[-1] + states
        assert set(measured.seconds) == set(SCHEDULES)
        # nothing is held once a round is over
        store = bench.runtime.store
        assert (store.kv_pool.used, store.e_pool.used) == (0, 0)
    assert children() == []


@pytest.mark.timeout(300)
async def test_a_holder_that_dies_ends_the_run_with_its_reason(cluster: Path) -> None:
    family = resolve_family(load_cluster(cluster), "tiny", models=(BASE, UPPER))
    sizes = {"context_tokens": 64, "suffix_tokens": 8, "threads": 1, "seed": 0}
    async with open_bench(family, BASE, UPPER, LayerGroup(4, LAYERS), slowest_gbit_per_s=1.0, **sizes) as bench:
        arms = bench.arms(64)
        await arms.warm_up()
        bench.holder.process.kill()
        await bench.holder.process.wait()
        with pytest.raises(SourceLost):
            await arms.measure_all(reverse=False)
        with pytest.raises(NodeUnavailable, match="has ended"):
            await bench.set_rate(1.0)
    assert children() == []


@pytest.mark.timeout(300)
def test_a_holder_that_cannot_start_is_one_line(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert main(arguments(cluster, "--context", "64")) == 2
    captured = capsys.readouterr()
    assert captured.err.endswith("kvkin: the holder process has ended\n")
    assert captured.out == ""


# --- Ctrl-C ------------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(400)
@pytest.mark.parametrize("stage", ["the holder computes", "1/2: 64 + 8 tokens at"])
def test_ctrl_c_leaves_no_process_and_prints_nothing(cluster: Path, tmp_path: Path, stage: str) -> None:
    """While the holder starts, and in the middle of a measurement."""
    words = arguments(cluster, "--context", "64", "128", "--repeats", "100000", "--json", "--out", str(tmp_path / "o"))
    program = (
        # a suite that was started in the background has SIGINT ignored, and hands that down
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"from kvkin.tools import cli; sys.exit(cli.main({words!r}))"
    )
    out, err = tmp_path / "stdout", tmp_path / "stderr"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=os.environ
        )
    try:
        deadline = time.monotonic() + WAIT_S
        while stage not in err.read_text(encoding="utf-8") or not children():
            assert child.poll() is None, err.read_text(encoding="utf-8")
            assert time.monotonic() < deadline, err.read_text(encoding="utf-8")
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.05)
        holders = children()
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 130, err.read_text(encoding="utf-8")
        assert not [one for one in holders if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    finally:
        child.kill()
        child.wait(10)
    assert out.read_bytes() == b""
    assert not (tmp_path / "o").exists()
    said = err.read_text(encoding="utf-8")
    assert said.endswith("[bench pipeline] stopped, nothing is reported\n")
    assert "Traceback" not in said


# --- what it refuses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--context", "100"], "context: 100 is not a multiple of the block size (allowed: k x 16, k >= 1)"),
        (["--context", "64", "0"], "context: 0 is not a multiple of the block size"),
        (["--context", "64", "-16"], "context: -16 is not a multiple of the block size"),
        (["--context", "64", "64"], "context: one of them is given twice (allowed: each once)"),
        (["--context", "2048"], "context: 2048 with a suffix of 8 and an answer exceed the models' 2048 tokens"),
        (["--sender", "nobody"], "sender: no model 'nobody' in this cluster file (allowed: tiny-base, "),
        (["--receiver", "nobody"], "receiver: no model 'nobody' in this cluster file (allowed: tiny-base, "),
        (["--receiver", BASE], f"receiver: {BASE} is the sender too"),
        (["--rates", "1", "0"], "rates: 0 cannot be paced (allowed: 0.000001 to 17 Gbit/s)"),
        (["--rates", "nan"], "rates: nan cannot be paced"),
        (["--rates", "18"], "rates: 18 cannot be paced"),
        (["--rates", "1", "1"], "rates: one of them is given twice"),
        (["--repeats", "0"], "repeats: 0 is too small (allowed: 1 or more)"),
        (["--repeats", "-1"], "repeats: -1 is too small (allowed: 1 or more)"),
        (["--sweep-repeats", "-1"], "sweep_repeats: -1 is too small (allowed: 0 or more)"),
        (["--suffix", "0"], "suffix: 0 is too small"),
        (["--threads", "0"], "threads: 0 is too small"),
        (["--seed", "-1"], "seed: -1 is too small"),
        (
            ["--group", "2", "9"],
            "group: [2, 9) of 8 layers (allowed: START STOP with 0 <= START < STOP <= 8, and not all",
        ),
        (["--group", "5", "5"], "group: [5, 5) of 8 layers"),
        (["--group", "-1", "3"], "group: [-1, 3) of 8 layers"),
        (["--group", "0", "8"], "group: [0, 8) of 8 layers"),
        (["--out", "no/such/folder/o.json"], "out: no/such/folder/o.json cannot be written"),
        (["--config", "no/such.yaml"], "no/such.yaml: no such file"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_2(
    cluster: Path, typed: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(cluster, *typed)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"kvkin: {said}"), captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("key", ["context", "rates"])
def test_an_empty_list_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="none is given") as refused:
        BenchPipeline(**{key: ()}).check()  # type: ignore[arg-type]
    assert (refused.value.key, refused.value.allowed.split(";")[0]) == (key, "one or more")


def test_a_pair_without_a_group_is_refused(tmp_path: Path) -> None:
    file = make_cluster(tmp_path)
    config = load_cluster(file)
    text = file.read_text().replace(f"receiver: {FULL}", f"receiver: {UPPER}")
    assert text != file.read_text()
    file.write_text(text)
    family = resolve_family(load_cluster(file), "tiny", models=(BASE, FULL))
    with pytest.raises(KvkinError, match="no group for this pair"):
        BenchPipeline(sender=BASE, receiver=FULL).chosen_group(family)
    assert BenchPipeline(sender=BASE, receiver=FULL, group=(1, 2)).chosen_group(family) == LayerGroup(1, 2)
    assert policy_of(config).min_pull_tokens == 16


def test_the_command_measures_the_same_again() -> None:
    import tyro

    typed = BenchPipeline(
        config=Path("/somewhere/cluster.yaml"),
        receiver="other",
        context=(512, 1504),
        group=(10, 20),
        rates=(0.1, 0.25),
        sweep_repeats=5,
        json=True,
        out=Path("/somewhere/out.json"),
    )
    words = typed.command().split()
    assert words[:3] == ["kvkin", "bench", "pipeline"]
    again = tyro.cli(bench_pipeline.BenchPipeline, args=words[3:])
    assert again == BenchPipeline(
        config=Path("cluster.yaml"),
        receiver="other",
        context=(512, 1504),
        group=(10, 20),
        rates=(0.1, 0.25),
        sweep_repeats=5,
    )
    assert BenchPipeline().command() == "kvkin bench pipeline"
