"""``kvkin bench serving`` as a whole: on a tiny cluster over real sockets, when a node dies, on Ctrl-C, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import yaml
from mock_node import MockNode, choose_privately, make_settings, until
from tiny_cluster import BASE, FULL, UPPER, make_cluster

from kvkin.configs.loader import load_cluster
from kvkin.kv.errors import ConfigError, NodeUnavailable
from kvkin.router.node import RouterNode
from kvkin.router.settings import Timeouts
from kvkin.tools import bench_serving as bench
from kvkin.tools import bench_serving_options as options
from kvkin.tools import bench_serving_plan as plan
from kvkin.tools import bench_serving_sweep, out_folder, plots
from kvkin.tools.bench_serving_sweep import Room, SweepSettings, asking_for, plan_points
from kvkin.tools.cli import main
from kvkin.tools.load_runner import Asking
from kvkin.tools.local import LocalCluster
from kvkin.transport.messages import ModelEntry, NodeLoad, NodeStatus, Reuse, StatusReply
from kvkin.transport.node_messages import Abort, Execute

WAIT_S = 150.0
MODELS = (BASE, FULL, UPPER)
LOST = ("timed_out", "cut_off", "not_sent", "abandoned", "never_due")


def command_for(address: str, out: Path | None = None, **parts: Any) -> bench.BenchServing:
    """Four short sessions at a rate that makes them overlap."""
    agents: dict[str, Any] = {
        "sessions": 4,
        "session_turns": "3",
        "system_tokens": 16,
        "context_tokens": "64-128",
        "new_tokens": "8",
        "output_tokens": "4",
    }
    if "trace" in parts:
        agents = {}
    return bench.BenchServing(
        cluster=options.ClusterOptions(address=address),
        load=options.LoadOptions(**{"rates": (20.0,)} | parts.get("load", {})),
        models=options.ModelOptions(**{"vocab": (3, 250), "salt": "s"} | parts.get("models", {})),
        agents=options.AgentOptions(**agents | parts.get("agents", {})),
        trace=options.TraceOptions(**parts.get("trace", {})),
        compare=options.CompareOptions(**{"reuse": "any", "slo_ttft_s": 60.0} | parts.get("compare", {})),
        limits=options.LimitOptions(**parts.get("limits", {})),
        output=options.OutputOptions(json=True, out=out),
    )


def settings_of(command: bench.BenchServing) -> SweepSettings:
    return plan.check_options(command).settings


async def run(command: bench.BenchServing) -> int:
    return await bench.Bench(command, plan.check_options(command)).run()


def json_lines(printed: pytest.CaptureFixture[str] | str) -> list[dict[str, Any]]:
    """The objects that were printed: the nodes of this process log to standard output as well."""
    text = printed if isinstance(printed, str) else printed.readouterr().out
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def check_accounts(point: dict[str, Any]) -> None:
    for counts in (point["counts"], point["warm_up_counts"]):
        failed = sum(counts["failed"].values())
        assert counts["sent"] == counts["finished"] + failed + counts["timed_out"] + counts["cut_off"]
        assert counts["planned"] == counts["finished"] + failed + sum(counts[name] for name in LOST)


# --- a tiny cluster over real sockets ------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
async def test_three_arms_on_a_tiny_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    async with LocalCluster(load_cluster(make_cluster(tmp_path))) as cluster:
        command = command_for(cluster.router.client_address, out, compare={"repeats": 2, "warm_up": "1"})
        assert await run(command) == 0
        replay = tmp_path / "trace.jsonl"
        lines = [
            {"timestamp": 0, "input_length": 1600, "output_length": 64, "hash_ids": [0, 1, 2, 3]},
            {"timestamp": 0, "input_length": 900, "output_length": 1, "hash_ids": [9, 8]},
            {"timestamp": 3000, "input_length": 2500, "output_length": 99999, "hash_ids": [0, 1, 2, 5, 6]},
        ]
        replay.write_text("\n".join(map(json.dumps, lines)))
        traced = command_for(
            cluster.router.client_address,
            trace={"trace": replay, "speed_up": (30.0,), "max_output_tokens": 6},
            load={"rates": ()},
            compare={"arms": ("sharing",)},
        )
        assert await run(traced) == 0
    agents, trace = json_lines(capsys)
    check_agents(agents)
    check_trace(trace)

    assert json.loads((out / "results.json").read_text()) == agents
    rows = list(csv.DictReader((out / "requests.csv").open()))
    assert len(rows) == 6 * 12
    assert {row["outcome"] for row in rows} == {"finished"}
    # no arm and no repeat finds anything of another one: the first of all turns starts from nothing
    for arm in ("sharing", "own", "off"):
        for repeat in ("0", "1"):
            mine = [row for row in rows if (row["arm"], row["repeat"]) == (arm, repeat)]
            first = min(mine, key=lambda row: float(row["intended_s"]))
            assert (first["kind"], first["tokens_reused"]) == ("private", "0")
    assert {path.name for path in out.iterdir()} == {
        "results.json",
        "requests.csv",
        *(f"{name}.{suffix}" for name in ("ttft", "goodput", "phases") for suffix in ("svg", "png")),
    }


def check_agents(whole: dict[str, Any]) -> None:
    assert whole["settings"]["complete"] is True
    assert whole["settings"]["models"] == list(MODELS)
    assert {node["name"] for node in whole["settings"]["nodes"]} == {
        "prefill-0",
        "decode-base",
        "decode-full",
        "decode-upper",
    }
    assert [(point["repeat"], point["arm"]) for point in whole["points"]] == [
        (0, "sharing"),
        (0, "own"),
        (0, "off"),
        (1, "own"),
        (1, "off"),
        (1, "sharing"),
    ]
    for point in whole["points"]:
        check_accounts(point)
        assert (point["counts"]["planned"], point["counts"]["finished"]) == (11, 11)
        assert point["warm_up_counts"]["finished"] == 1
        assert sum(group["finished"] for group in point["by_kind"].values()) == 11
        assert sum(group["finished"] for group in point["by_model"].values()) == 11
        assert set(point["by_model"]) == set(MODELS)
        assert point["router"]["requests"] == point["router"]["finished"] == 12
        assert (point["objective_met"], point["fallbacks"]) == (11, 0)
        # four tokens an answer: three gaps
        assert point["tbt_ms"]["count"] == 33
        match point["arm"]:
            case "off":
                assert set(point["by_kind"]) == {"private"}
                assert (point["tokens_reused"], point["bytes_pulled"]) == (0, 0)
            case "own":
                # the models take turns and each has its own context, so there is something to find from the fourth turn on only
                assert set(point["by_kind"]) <= {"private", "exact"}
                assert point["bytes_pulled"] == 0
                assert "orders" not in point["router"]
            case "sharing":
                assert point["tokens_reused"] > 0
                assert point["bytes_pulled"] > 0
                assert set(point["by_kind"]) > {"private"}
    summary = whole["summary"]
    assert set(summary["arms"]) == {"sharing", "own", "off"}
    for arm in summary["arms"].values():
        assert [(row["rate"], row["repeats"], row["requests"]) for row in arm["curve"]] == [(20.0, 2, 22)]
        assert arm["throughput_at_p95_ttft"] == {"rate": 20.0, "bound": "above"}
    assert set(summary["throughput_ratios_at_p95_ttft"]) == {"sharing/own", "sharing/off", "own/off"}


def check_trace(whole: dict[str, Any]) -> None:
    (point,) = whole["points"]
    check_accounts(point)
    assert point["counts"]["finished"] == 3
    # 1 of 4, 1, and 6 of a bounded answer
    assert point["tbt_ms"]["count"] == 3 + 0 + 5
    assert point["prompt_tokens"] == 3 * 32 + 4 + 32 + 24 + 4 * 32 + 28
    # the third continues the first: 3 blocks of 512 tokens, 96 here
    assert point["tokens_reused"] >= 96


async def test_a_node_that_is_gone_and_models_that_are_none(tmp_path: Path) -> None:
    async with RouterNode(make_settings(tmp_path), choose=choose_privately) as router:
        address = router.client_address
        with pytest.raises(ConfigError, match="no node serves any model"):
            await run(command_for(address))
        async with MockNode(router.node_address, "d0", answer=(10, 11, 12, 13)):
            with pytest.raises(ConfigError, match=r"--models: the cluster has no model 'bas' .*did you mean 'base'"):
                await run(command_for(address, models={"models": ("bas",)}))
            with pytest.raises(ConfigError, match="--context-tokens: a prompt with its answer has"):
                await run(command_for(address, agents={"context_tokens": "500"}))
            with pytest.raises(
                ConfigError, match="--duration: at 20 requests/s 12 requests arrive, 12 of them in the warm-up"
            ):
                await run(command_for(address, compare={"warm_up": "12"}))
            with pytest.raises(ConfigError, match=r"--models: no decode node serves tuned now \(allowed: base\)"):
                await run(command_for(address, models={"models": ("base", "tuned")}))


async def test_a_busy_cluster_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with (
        RouterNode(make_settings(tmp_path), choose=choose_privately) as router,
        MockNode(router.node_address, "d0", answer=(10, 11, 12, 13)) as node,
    ):
        node.load = NodeLoad(running=1)
        with pytest.raises(NodeUnavailable, match=r"not idle within 0\.3 s.*d0 1 running.*does somebody else use it"):
            await run(command_for(router.client_address, limits={"idle_s": 0.3}))
    assert not json_lines(capsys)


async def test_a_router_too_busy_to_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_serving_sweep, "IDLE_POLL_S", 0.0)
    answers = iter(
        [NodeUnavailable("does not answer"), StatusReply("", "r", 1.0, 1, (), 0, {}), NodeUnavailable("not now")]
    )
    idle = StatusReply("", "r", 1.0, 0, (), 0, {})

    class Busy:
        async def status(self) -> StatusReply:
            answer = next(answers, idle)
            if isinstance(answer, NodeUnavailable):
                raise answer
            return answer

    settings = settings_of(bench.BenchServing())
    sweep: Any = bench_serving_sweep.Sweep(Busy(), None, (), settings, None)
    assert await sweep._idle() is idle


@pytest.mark.parametrize(
    ("load", "orders", "idle"),
    [
        (NodeLoad(), 0, True),
        (NodeLoad(running=1), 0, False),
        (NodeLoad(waiting=1), 0, False),
        (NodeLoad(), 1, False),
    ],
)
@pytest.mark.parametrize("state", ["alive", "draining", "dead"])
def test_idle_is_nothing_running_waiting_or_ordered(load: NodeLoad, orders: int, idle: bool, state: str) -> None:
    node = NodeStatus("d", "decode", state, "one", (), load, 0, 0.0)
    status = StatusReply("", "r", 1.0, 0, (node,), 0, {"orders_open": orders})
    # what a dead node was doing will not end any more
    assert bench_serving_sweep.is_idle(status) is (idle or (state == "dead" and not orders))
    assert not bench_serving_sweep.is_idle(msgspec.structs.replace(status, running=1))


async def test_points_before_a_failure_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with (
        RouterNode(make_settings(tmp_path), choose=choose_privately) as router,
        MockNode(router.node_address, "d0", answer=(10, 11, 12, 13)) as node,
    ):
        out = tmp_path / "out"
        command = command_for(router.client_address, out, limits={"idle_s": 3.0}, compare={"arms": ("off", "own")})
        running = asyncio.create_task(run(command))
        # busy for ever once the first point is there
        await until(lambda: (out / "results.json").exists() or running.done())
        node.load = NodeLoad(running=1)
        with pytest.raises(NodeUnavailable, match="not idle"):
            await running
    (whole,) = json_lines(capsys)
    assert whole["settings"]["complete"] is False
    assert [point["arm"] for point in whole["points"]] == ["off"]


async def test_ctrl_c_cancels_what_is_in_flight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with (
        RouterNode(make_settings(tmp_path, timeouts=Timeouts(tick_s=0.02)), choose=choose_privately) as router,
        MockNode(router.node_address, "d0", answer=(10, 11, 12, 13)) as node,
    ):
        woken = 3  # one answer an arm
        command = command_for(router.client_address, compare={"arms": ("off", "own", "sharing")})
        running = asyncio.create_task(run(command))
        await until(lambda: node.count(Execute) == woken)
        node.mode = "stream"
        await until(lambda: node.count(Execute) == woken + 4)  # the first turns of four sessions
        os.kill(os.getpid(), signal.SIGINT)
        assert await running == bench.EXIT_INTERRUPTED
        await until(lambda: node.count(Abort) == 4)
    captured = capsys.readouterr()
    (whole,) = json_lines(captured.out)
    assert whole["points"] == []
    assert "not complete: 0 points are reported" in captured.err


# --- a cluster that it starts itself -------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(*arguments: str, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path, Path]]:
    """The command as a child; its files of stdout and stderr. Nothing of it is left afterwards, or the test fails."""
    out, err = folder / "stdout", folder / "stderr"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-m", "kvkin.tools.cli", "bench", "serving", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    family: set[psutil.Process] = set()
    try:
        yield child, out, err
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            family |= set(psutil.Process(child.pid).children(recursive=True))
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(40)
        if child.poll() is None:
            child.kill()
            child.wait(5)
        _, left = psutil.wait_procs(family, timeout=15)
        for process in left:
            process.kill()
    assert not left


def wait_for(child: subprocess.Popen[bytes], file: Path, fits: Callable[[str], bool]) -> str:
    deadline = time.monotonic() + WAIT_S
    while not fits(text := file.read_text(encoding="utf-8")):
        assert child.poll() is None, text
        assert time.monotonic() < deadline, text
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.05)
    return text


@pytest.mark.timeout(400)
def test_a_node_dies_and_ctrl_c_ends_a_started_cluster(tmp_path: Path) -> None:
    """A decode node is killed in the middle of the first point, Ctrl-C comes in the middle of the second."""
    file = make_cluster(tmp_path)
    arguments = ["--config", str(file), "--start", "--json", "--arms", "off", "own", "--rates", "4", "--sessions", "8"]
    arguments += ["--session-turns", "3", "--arrivals", "fixed", "--context-tokens", "64", "--output-tokens", "4"]
    with started(*arguments, folder=tmp_path) as (child, out, err):
        wait_for(child, err, lambda text: "1/2 off at 4/s, repeat 1: 24 requests" in text)
        nodes = psutil.Process(child.pid).children(recursive=True)
        assert len(nodes) == 5
        next(one for one in nodes if "decode-full" in one.cmdline()).kill()
        wait_for(child, err, lambda text: "2/2 own at 4/s, repeat 1: 24 requests" in text)
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 130, err.read_text()
        assert not [one for one in nodes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    whole = json.loads(out.read_text())
    assert whole["settings"]["complete"] is False
    (point,) = whole["points"]
    check_accounts(point)
    counts = point["counts"]
    assert counts["planned"] == 24
    # whoever asked the dead node, or would have gone on with its answer, and nobody else
    assert set(counts["failed"]) == {"node_unavailable"}
    lost = counts["failed"]["node_unavailable"] + counts["abandoned"]
    assert counts["finished"] + lost == 24
    assert set(point["by_model"]) >= {BASE, UPPER}
    assert point["router"]["nodes_lost"] == 1
    assert "stopping the cluster" in err.read_text()


# --- what it refuses -----------------------------------------------------------------------------------------------------


ONE_REQUEST = '{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}\n'


def refused(typed: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line and exit code 2."""
    assert main(["bench", "serving", *typed]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"kvkin: {said}"), captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever would start or ask a cluster fails the test."""

    def never(*arguments: Any, **named: Any) -> Any:
        pytest.fail("a cluster was started or asked")

    for name in ("ClusterProcesses", "AsyncClient"):
        monkeypatch.setattr(bench, name, never)


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--rates", "0"], "--rates: (0.0,) (allowed: above 0)"),
        (["--rates", "1", "1"], "--rates: one of them is given twice"),
        (["--rates", "nan"], "--rates"),
        (["--rates", "1e9"], "--rates: about 6e+10 requests would arrive in a point (allowed: up to 100000"),
        (["--rates", "9", "--duration", "1e9"], "--rates: about 9e+09 requests"),
        (["--sessions", "90000", "--session-turns", "4"], "--sessions: about 3.6e+05 requests"),
        (["--sessions", "0"], "--sessions: 0 (allowed: 1 to 100000)"),
        (["--session-turns", "4-2"], "--session-turns: '4-2' is no range"),
        (["--session-turns", "4-99999"], "--session-turns: '4-99999' is no range"),
        (["--system-tokens", "-1"], "--system-tokens: -1 (allowed: 0 to 1048576)"),
        (["--context-tokens", "many"], "--context-tokens: 'many' is neither a number nor a range"),
        (["--context-tokens", "9" * 5000], "--context-tokens: '999"),
        (["--new-tokens", "0"], "--new-tokens: '0' is no range"),
        (["--output-tokens", "8-"], "--output-tokens: '8-' is neither"),
        (["--documents", "-1"], "--documents: -1"),
        (["--arms", "off", "off"], "--arms: one of them is given twice"),
        (["--repeats", "0"], "--repeats: 0 (allowed: 1 to 1000)"),
        (["--repeats", "1000000000"], "--repeats: 1000000000"),
        (["--duration", "0"], "--duration: 0.0 (allowed: seconds above 0)"),
        (["--timeout", "inf"], "--timeout: inf"),
        (["--deadline", "-2"], "--deadline: -2.0"),
        (["--idle", "0"], "--idle: 0.0"),
        (["--drain", "nan"], "--drain: nan"),
        (["--late-ms", "-1"], "--late-ms: -1.0"),
        (["--max-loss", "nan"], "--max-loss: nan"),
        (["--share-hint", "inf"], "--share-hint: inf"),
        (["--slo-ttft", "-1"], "--slo-ttft: -1.0"),
        (["--slo-tbt", "0"], "--slo-tbt: 0.0"),
        (["--send-slo"], "--send-slo: given without --slo-ttft"),
        (["--think", "-1"], "--think: -1.0 (allowed: 0 or more)"),
        (["--max-in-flight", "0"], "--max-in-flight: 0"),
        (["--warm-up", "soon"], "--warm-up: 'soon' (allowed: requests such as 8, or seconds such as 8s)"),
        (["--seed", str(2**64)], "--seed: 18446744073709551616"),
        (["--models", "a", "b", "a"], "--models: one of them is given twice"),
        (["--vocab", "9", "3"], "--vocab: 9 3 (allowed: start and stop of at least 16 ids, from 0 on)"),
        (["--workload", "trace"], "--trace: not given with --workload trace"),
        (["--workload", "agents", "--trace", "x"], "--trace: given with --workload agents"),
        (["--speed-up", "2"], "--speed-up: given without --trace"),
        (["--bursts"], "--bursts: given without --trace"),
        (["--requests", "9"], "--requests: given without --trace"),
        (["--max-output-tokens", "9"], "--max-output-tokens: given without --trace"),
        (["--trace", "x", "--speed-up", "2", "--rates", "1"], "--speed-up: given with --rates"),
        (["--trace", "x", "--speed-up", "0"], "--speed-up: (0.0,)"),
        (["--trace", "x", "--tokens-per-hash", "0"], "--tokens-per-hash: 0"),
        (["--trace", "x", "--requests", "0"], "--requests: 0"),
        (["--trace", "x", "--session-turns", "9"], "--session-turns: given with a trace"),
        (["--trace", "x", "--arrivals", "fixed"], "--arrivals: given with a trace"),
        (["--trace", "no/such.jsonl"], "--trace: no/such.jsonl: no such file"),
        (["--address", "127.0.0.1:1"], "--address: given without --vocab"),
        (["--address", "127.0.0.1:1", "--vocab", "3", "99", "--start"], "--address: given with --start"),
        (
            ["--address", "127.0.0.1:1", "--vocab", "3", "99", "--config", "x"],
            "--address: given together with --config",
        ),
        (["--config", "no/such.yaml"], "no/such.yaml: no such file"),
        (["--config", "no/such.yaml", "--start"], "no/such.yaml: no such file"),
        (["--overwrite"], "--overwrite: given without --out"),
        (["--out", "/dev/null"], "--out: /dev/null is no folder"),
        (["--out", "/dev/null/results"], "--out: /dev/null is no folder"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_2_before_a_cluster_is_asked(
    typed: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(typed, said, capsys)


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", " has no requests"),
        ("{}\n", ", line 1: not a request: "),
        (ONE_REQUEST + "[]\n", ", line 2: not a request: "),
        (ONE_REQUEST.replace("[0, 1]", "[0]"), ", line 1: 1 hash_ids for input_length 600"),
        (ONE_REQUEST.replace("600", "0"), ", line 1: a length or the timestamp is too small"),
        ("\ud800", ", line 1: not a request: "),
    ],
)
@pytest.mark.parametrize("start", [False, True])
def test_a_trace_is_read_before_a_cluster_is_asked(
    text: str, said: str, start: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(text.encode(errors="surrogatepass"))
    key = f"{file}" if "line" in said else f"--trace: {file}"
    refused(["--trace", str(file), *(["--start"] if start else [])], f"{key}{said}", capsys)


@pytest.mark.usefixtures("no_cluster")
def test_an_output_folder_is_tried_before_a_cluster_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "results.json").touch()
    refused(["--out", str(out)], f"--out: {out} already holds results.json (allowed: --overwrite, or another", capsys)
    # the next thing to be refused is another one
    refused(["--out", str(out), "--overwrite", "--config", "no/such.yaml"], "no/such.yaml: no such file", capsys)
    assert [one.name for one in out.iterdir()] == ["results.json"]
    refused(["--out", str(tmp_path / "new" / "er"), "--config", "no/such.yaml"], "no/such.yaml: no such file", capsys)
    assert not (tmp_path / "new").exists()

    def full(*arguments: Any, **named: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(out_folder.tempfile, "TemporaryDirectory", full)
        refused(["--out", str(tmp_path / "new")], f"--out: {tmp_path / 'new'} cannot be written: No space left", capsys)
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    refused(["--out", str(tmp_path / "new")], "plot: figures need the package matplotlib", capsys)


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("typed", "edit", "said"),
    [
        (
            ["--models", "tiny-bas"],
            {},
            "--models: the cluster has no model 'tiny-bas' (allowed: did you mean 'tiny-base'",
        ),
        (["--models", FULL], {"decode-full": None}, f"--models: no decode node serves {FULL} now"),
        (["--vocab", "3", "999"], {}, "--vocab: tiny has 320 tokens (allowed: ids from 0 up to 320)"),
        (["--context-tokens", "3000"], {}, "--context-tokens: a prompt with its answer has 3"),
        (["--output-tokens", "20"], {"limits": {"max_new_tokens": 10}}, "--output-tokens: an answer has 20 tokens"),
        (["--system-tokens", "700"], {"limits": {"max_prompt_tokens": 600}}, "--context-tokens: a prompt has 1"),
        (["--warm-up", "1000s"], {}, "--duration: at 0.2 requests/s"),
        ([], {"state_dir": "/dev/null"}, "state_dir: /dev/null is no folder"),
        ([], {"router-0": {"role": "router", "host": "192.0.2.1"}}, "--start: not on this host: router-0"),
        ([], {"checkpoint": "./no/such"}, "families.tiny.models.tiny-base.checkpoint: no such folder: no/such"),
    ],
)
def test_what_the_file_tells_is_checked_before_its_cluster_is_started(
    typed: list[str], edit: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = make_cluster(tmp_path)
    cluster = yaml.safe_load(file.read_text())
    cluster["transport"]["insecure"] = True
    for name, value in edit.items():
        if name == "checkpoint":
            cluster["families"]["tiny"]["models"][BASE]["checkpoint"] = value
        elif name in cluster["nodes"]:
            cluster["nodes"][name] = value
        else:
            cluster[name] = value
    cluster["nodes"] = {name: node for name, node in cluster["nodes"].items() if node is not None}
    file.write_text(yaml.safe_dump(cluster, sort_keys=False))
    refused(["--config", str(file), "--start", *typed], said, capsys)


def test_options_that_need_the_cluster_are_checked_too(tmp_path: Path) -> None:
    entries = [ModelEntry("a", "x", 100, ("d0",)), ModelEntry("b", "y", 50, ("d1",)), ModelEntry("c", "x", 80, ())]
    assert [entry.name for entry in plan.choose_models((), entries[:1] + entries[2:])] == ["a"]
    served = [*entries[:2], ModelEntry("c", "x", 80, ("d2",))]
    assert [entry.name for entry in plan.choose_models(("c", "a"), served)] == ["c", "a"]
    for wanted, said in (((), "of the families x, y"), (("c",), "no decode node serves c"), (("z",), "no model 'z'")):
        with pytest.raises(ConfigError, match=said):
            plan.choose_models(wanted, entries)
    assert plan.room_of(entries, None) == Room(50, 49, 49)

    def workload(agents: dict[str, Any], **trace: Any) -> Any:
        command = bench.BenchServing(
            cluster=options.ClusterOptions(address="somewhere"),
            models=options.ModelOptions(vocab=(0, 20)),
            agents=options.AgentOptions(**agents),
            trace=options.TraceOptions(**trace),
        )
        return plan.plan_load(command, plan.check_options(command), entries[:1], None).workload

    small = {"system_tokens": 1, "context_tokens": "1", "new_tokens": "1", "output_tokens": "1"}
    assert workload(small).rates == plan.DEFAULT_RATES
    assert workload(small).common.duration_s == plan.DEFAULT_DURATION_S
    assert workload(small | {"sessions": 3}).common.duration_s is None
    file = tmp_path / "trace.jsonl"
    file.write_text(ONE_REQUEST)
    with pytest.raises(ConfigError, match=r"--max-output-tokens: 100 is too long an answer here \(allowed: 1 to 99\)"):
        workload({}, trace=file, max_output_tokens=100)
    assert workload({}, trace=file, max_output_tokens=90).load(1.0, 0, "s").requests[0].truncated == 27


def test_arms_ask_for_what_they_are_named_after() -> None:
    compare = options.CompareOptions(reuse="exact", max_loss=0.1, share_hint=2.0, slo_ttft_s=3.0, send_slo=True)
    settings = settings_of(bench.BenchServing(compare=compare, limits=options.LimitOptions(deadline_s=9.0)))
    assert asking_for("sharing", settings) == Asking(Reuse.EXACT, 0.1, True, 2.0, 9.0, 3.0)
    assert asking_for("own", settings) == Asking(Reuse.OWN, deadline_s=9.0)
    assert asking_for("off", settings) == Asking(Reuse.OFF, publish=False, deadline_s=9.0)
    silent = settings_of(bench.BenchServing(compare=options.CompareOptions(slo_ttft_s=3.0)))
    assert asking_for("sharing", silent).ttft_slo_s is None


def test_every_rate_runs_every_arm_and_the_order_rotates() -> None:
    points = plan_points(("sharing", "own", "off"), (0.5, 1.0), 3)
    assert [point.place for point in points] == list(range(18))
    assert len({(point.arm, point.rate, point.repeat) for point in points}) == 18
    groups = [points[start : start + 3] for start in range(0, 18, 3)]
    for group in groups:
        assert len({(point.rate, point.repeat) for point in group}) == 1
    assert Counter(group[0].arm for group in groups) == {"sharing": 2, "own": 2, "off": 2}
    # of each rate as well, not only in all
    assert {group[0].arm for group in groups if group[0].rate == 0.5} == {"sharing", "own", "off"}
