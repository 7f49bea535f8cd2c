"""``kvkin bench engine`` without vLLM: options, what is measured inside a child, children that fail, and the bench's cluster file."""

from __future__ import annotations

import asyncio
import itertools
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import tyro
from tiny_cluster import BASE, FULL, make_cluster
from vllm_fakes import install_fake_vllm

from kvkin.configs import vllm_install
from kvkin.configs.loader import load_cluster
from kvkin.kv.errors import ConfigError, DeadlineExceeded, KvkinError, NodeUnavailable
from kvkin.kv.execution import DataArrived, PlanExecution
from kvkin.kv.layout import KVLayout, Plane
from kvkin.kv.plan import LayerGroup
from kvkin.tools.bench_engine import BenchEngine
from kvkin.tools.bench_engine_arms import Clocked
from kvkin.tools.bench_engine_children import Child, running
from kvkin.tools.bench_engine_messages import (
    Answered,
    Asked,
    Decode,
    Generate,
    Prefill,
    Ready,
    Reuse,
    Setup,
    Stall,
    Stalled,
    Timed,
)
from kvkin.tools.bench_engine_options import DEFAULTS, ModelOptions, sizes_of
from kvkin.tools.bench_engine_parts import TokenIds, check_alike
from kvkin.tools.bench_engine_result import Answer
from kvkin.tools.bench_engine_setup import Shape, arrange, checkpoint_config, chosen_group, user_config
from kvkin.tools.bench_engine_stall import Beats, arrivals_in_memory, partial_plan
from kvkin.tools.bench_engine_systems import in_flight
from kvkin.tools.bench_engine_ttft import pair_of


def options(typed: str) -> BenchEngine:
    return tyro.cli(BenchEngine, args=shlex.split(typed))


# --- options -----------------------------------------------------------------------------------------------------------------


def test_every_part_has_its_own_defaults() -> None:
    assert options("").part == "overhead"
    for part, defaults in DEFAULTS.items():
        assert sizes_of(options(part)) == defaults
    given = sizes_of(options("stall --context 64 --budget 32 --requests 3 --repeats 1 --mode eager --threads 1"))
    assert (given.context, given.budget, given.requests, given.repeats, given.threads) == ((64,), 32, 3, 1, 1)
    assert not given.compiled
    assert given.suffix == DEFAULTS["stall"].suffix


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("overhead --suffix 3", r"--suffix: given, and overhead has no use for it \(allowed: for stall, ttft, disagg"),
        ("ttft --requests 3", "--requests: given, and ttft has no use for it"),
        ("overhead --budget 64", "--budget: given, and overhead has no use for it"),
        ("stall --documents 2", "--documents: given, and stall has no use for it"),
        ("stall --sender a", "--sender: given, and stall has no use for it"),
        ("disaggregated --group 1 2", "--group: given, and disaggregated has no use for it"),
        ("ttft --checkpoint x", "--checkpoint: given, and ttft has no use for it"),
        ("overhead --checkpoint x --config y", "--checkpoint: given next to --config"),
        ("overhead --repeats 0", r"--repeats: 0 is too small \(allowed: 1 or more\)"),
        ("overhead --new-tokens 0", "--new-tokens: 0 is too small"),
        ("stall --requests 0", "--requests: 0 is too small"),
        ("overhead --threads 0", "--threads: 0 is too small"),
        ("overhead --seed -1", "--seed: -1 is too small"),
        ("overhead --context 16 32", r"--context: 2 are given \(allowed: one; ttft takes several\)"),
        ("ttft --context 32 32", "--context: 32, 32"),
        ("overhead --context 0", "--context: 0"),
        ("overhead --out no/such/folder/x.json", r"--out: no/such/folder/x\.json cannot be written"),
    ],
)
def test_options_that_are_refused(typed: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sizes_of(options(typed))


def test_the_command_says_what_was_typed_without_paths() -> None:
    typed = "stall --checkpoint /somewhere/tiny --group 1 3 --context 64 --mode eager --seed 4"
    assert options(typed).command() == f"kvkin bench engine {typed.replace('/somewhere/', '')}"
    assert options("overhead --json").command() == "kvkin bench engine overhead"
    again = options("ttft --context 32 64 --repeats 2 --json")
    assert options(again.command().removeprefix("kvkin bench engine ")) == without_output(again)


def without_output(command: BenchEngine) -> BenchEngine:
    """The command without its output options, which are not part of what is measured."""
    return BenchEngine(command.part, command.models, command.sizes, command.runs)


# --- what is run -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cluster(tmp_path_factory.mktemp("engine"))


@pytest.fixture
def with_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_vllm(tmp_path / "site", monkeypatch)


def test_without_vllm_it_says_so(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_install, "installed_vllm", lambda: None)
    with pytest.raises(ConfigError, match="vLLM"):
        BenchEngine(models=ModelOptions(config=cluster)).run()


@pytest.mark.usefixtures("with_vllm")
def test_all_arms_are_nodes_of_one_file(cluster: Path) -> None:
    config = user_config(ModelOptions(config=cluster))
    shape = Shape(200, 600, 4, 2, compiled=False, chunk_tokens=64, step_tokens=128)
    bench = arrange(config, "tiny", (BASE, FULL), shape)
    written = load_cluster(bench.file)
    assert written == bench.config
    family = written.families["tiny"]
    assert (family.engine, family.chunk_tokens, family.max_context_tokens) == ("vllm", 64, 200)
    layout = bench.family.layout
    kv_bytes = (600 + 256) * layout.num_layers * layout.kv_token_bytes
    assert family.vllm == {
        "enforce_eager": True,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
        "kv_cache_memory_bytes": kv_bytes,
    }
    workers = written.prefill_nodes | written.decode_nodes
    assert {(node.kv_bytes, node.threads, node.port) for node in workers.values()} == {(kv_bytes, 2, 0)}
    assert [node.models for node in written.prefill_nodes.values()] == [(BASE,)]
    assert bench.decode_node(FULL) == f"decode-{FULL}"
    assert written.drift.share == 0.0


@pytest.mark.usefixtures("with_vllm")
def test_contexts_that_no_model_has_room_for(cluster: Path) -> None:
    config = user_config(ModelOptions(config=cluster))
    with pytest.raises(ConfigError, match="--context: requests of 5000 tokens, and tiny takes 2048"):
        arrange(config, "tiny", (BASE,), Shape(5000, 5000, 1, 1, compiled=False))


@pytest.mark.usefixtures("with_vllm")
def test_a_checkpoint_instead_of_a_cluster_file(cluster: Path, tmp_path: Path) -> None:
    config = checkpoint_config(cluster.parent / "base")
    (family,) = config.families.values()
    assert family.transition_layers == (2,)
    assert family.recompute_groups[0].group == (2, 4)
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="--checkpoint"):
            checkpoint_config(folder)


@pytest.mark.usefixtures("with_vllm")
def test_models_and_groups_that_are_refused(cluster: Path) -> None:
    config = user_config(ModelOptions(config=cluster))
    assert pair_of(config, ModelOptions()) == ("tiny", BASE, FULL)
    for models, said in (
        (ModelOptions(model="nobody"), "--model: no model 'nobody' in this cluster file"),
        (ModelOptions(model=FULL, sender="nobody"), "--sender: nobody is not of the family tiny"),
        (ModelOptions(model=BASE), f"--model: {BASE} is the sender too"),
    ):
        with pytest.raises(ConfigError, match=said):
            pair_of(config, models)
    family = arrange(config, "tiny", (BASE, FULL), Shape(100, 100, 1, 1, compiled=False)).family
    assert chosen_group(family, BASE, FULL, None) == LayerGroup(2, 5)
    assert chosen_group(family, BASE, FULL, (1, 2)) == LayerGroup(1, 2)
    for group in ((0, 8), (3, 3), (5, 9)):
        with pytest.raises(ConfigError, match="--group"):
            chosen_group(family, BASE, FULL, group)


def test_engines_that_differ_are_not_compared() -> None:
    alike = dict.fromkeys(("compiled", "max_num_seqs", "block_size"), 1)
    check_alike({"plain": alike, "kvkin": {**alike, "taps": [1]}, "transformers": {"dtype": "float32"}})
    with pytest.raises(KvkinError, match="differ in block_size"):
        check_alike({"plain": alike, "kvkin": {**alike, "block_size": 2}})


def test_prompts_differ_and_repeat_with_the_seed() -> None:
    first, again = TokenIds(5000, 3), TokenIds(5000, 3)
    prompts = [first.take(16) for _ in range(4)]
    assert prompts == [again.take(16) for _ in range(4)]
    assert len(set(prompts)) == 4
    assert all(100 <= token < 5000 for prompt in prompts for token in prompt)
    assert set(TokenIds(8, 0).take(50)) == {7}


# --- inside a child ----------------------------------------------------------------------------------------------------------


def ticking(*times: float) -> Callable[[], float]:
    return iter(times).__next__


def test_decoding_counts_from_the_last_first_token() -> None:
    clocked = Clocked(2, ticking(1.0, 2.0, 3.0, 5.0, 9.0))
    for key, count in (("a", 1), ("a", 2), ("b", 1), ("a", 0), ("b", 3), ("a", 1)):
        clocked.tokens(key, count)
    assert clocked.timed(7) == Timed(seconds=6.0, num_tokens=4, cached_tokens=7)


def test_gaps_are_those_that_the_event_touches() -> None:
    beats = Beats(2, ticking(0.0, 0.1, 1.0, 1.5, 4.0, 4.5, 5.0, 5.5))
    for key in ("a", "b") * 4:
        beats.beat(key, 1)
    beats.wait(4, lambda: False)
    # a: 0, 1, 4, 5; b: 0.1, 1.5, 4.5, 5.5; what ends before the event or starts after it does not count
    assert sorted(beats.gaps(1.2, 4.2)) == pytest.approx(sorted([3.0, 1.0, 1.4, 3.0]))


def test_decoding_requests_that_end_are_noticed() -> None:
    beats = Beats(1, itertools.count().__next__)
    beats.beat("a", 1)
    with pytest.raises(NodeUnavailable, match="ended before the event did"):
        beats.wait(2, lambda: True)


@pytest.mark.parametrize(("group", "states"), [(LayerGroup(2, 4), True), (LayerGroup(0, 3), False)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_everything_that_a_partial_plan_pulls_is_in_memory(group: LayerGroup, states: bool, dtype: str) -> None:
    layout = KVLayout(6, (Plane("keys", 2, 8), Plane("values", 2, 8)), 32, dtype, 16)
    plan = partial_plan(96, 101, 6, group)
    execution = PlanExecution(plan, 6, 64)
    execution.start()
    arrivals = arrivals_in_memory(PlanExecution(plan, 6, 64), layout, seed=1)
    assert [arrival.layer == -1 for arrival in arrivals[:3]] == [states, states, False]
    for arrival in arrivals:
        assert execution.expects(arrival.chunk, arrival.layer)
        execution.handle(DataArrived(arrival.chunk, arrival.layer))
        ((start, data),) = arrival.parts
        chunk = execution.chunks[arrival.chunk]
        size = layout.e_block_bytes if arrival.layer == -1 else layout.kv_block_bytes
        assert (start, len(data)) == (chunk.start, (chunk.stop - chunk.start) // 16 * size)
    assert execution.missing == 0


# --- messages and children ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        Prefill((1, 2)),
        Decode(((1,), (2,)), 3),
        Stall(((1,),), 9, "partial", (1, 2), 1, LayerGroup(1, 2), 3, 4),
        Reuse(64, "exact"),
        Generate((1,), 2, {"do_remote_decode": True, "remote_host": None}),
    ],
)
def test_commands_survive_the_line(command: Any) -> None:
    line = msgspec.json.encode(Asked(3, command))
    assert b"\n" not in line
    assert msgspec.json.decode(line, type=Asked) == Asked(3, command)


FAKE = """
import sys, msgspec
from kvkin.tools.bench_engine_messages import *
say = lambda number, reply: print(msgspec.json.encode(Answered(number, reply)).decode(), flush=True)
print("loading", file=sys.stderr, flush=True)
{start}
for line in sys.stdin:
    asked = msgspec.json.decode(line, type=Asked)
    {answer}
"""


def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str, answer: str = "pass") -> Child:
    """A child that is this script instead of an engine."""
    script = tmp_path / "fake_child.py"
    script.write_text(FAKE.format(start=start, answer=answer))
    real = asyncio.create_subprocess_exec

    async def instead(*arguments: Any, **how: Any) -> Any:
        return await real(sys.executable, str(script), **how)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", instead)
    return Child("plain", Setup("plain", "cluster.yaml", "decode-0"), 1, tmp_path / "logs" / "plain.log")


READY = 'say(0, Ready({"block_size": 32}))'


async def test_a_child_answers_under_the_number_of_the_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = "say(asked.number + 1000, Timed(9, 9)); say(asked.number, Timed(0.5, len(asked.command.token_ids)))"
    child = fake(tmp_path, monkeypatch, READY, answer)
    async with running([child], 60):
        assert child.settings == {"block_size": 32}
        process = psutil.Process(child.pid)
        assert await child.ask(Prefill((1, 2, 3)), Timed, 60) == Timed(0.5, 3)
        assert await child.ask(Prefill((1,)), Timed, 60) == Timed(0.5, 1)
    assert not process.is_running()


@pytest.mark.parametrize(
    ("start", "answer", "raised", "said"),
    [
        ("sys.exit(2)", "pass", NodeUnavailable, "plain ended with exit code 2; the end of .*plain.log:\nloading"),
        (READY, "sys.exit(3)", NodeUnavailable, "plain ended with exit code 3; the end of .*plain.log:\nloading"),
        (READY, 'say(asked.number, Failed("no room"))', KvkinError, "plain: no room; the end of .*plain.log"),
        (READY, "pass", DeadlineExceeded, "plain did not answer within 0.2 s; the end of .*plain.log"),
    ],
)
async def test_a_child_that_fails_is_reported_with_its_log(
    start: str, answer: str, raised: type[KvkinError], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = fake(tmp_path, monkeypatch, start, answer)
    with pytest.raises(raised, match=said):
        async with running([child], 60):
            await child.ask(Prefill((1,)), Timed, 0.2 if raised is DeadlineExceeded else 60)
    assert not psutil.pid_exists(child.pid)


async def test_one_child_that_cannot_start_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = fake(tmp_path, monkeypatch, READY)
    bad = Child("kvkin", good.setup, 1, tmp_path / "logs" / "kvkin.log")
    async with running([good], 60):
        monkeypatch.undo()
        # a cluster file that is not there ends the real child, with a line that says so
        with pytest.raises(NodeUnavailable, match=r"(?s)kvkin ended with exit code 2.*cluster\.yaml: no such file"):
            async with running([bad], 60):
                pytest.fail("it must not get here")
        assert psutil.pid_exists(good.pid)
    assert not psutil.pid_exists(good.pid)


def test_replies_survive_the_line() -> None:
    for reply in (Ready({"a": [1, None]}), Timed(0.25, 3), Stalled((0.5, 0.25), 1.5)):
        assert msgspec.json.decode(msgspec.json.encode(Answered(1, reply)), type=Answered).reply == reply


# --- systems -----------------------------------------------------------------------------------------------------------------


class FakeSystem:
    """Answers when it is told to; remembers what was asked in which order, and how much ran at a time."""

    def __init__(self, fails_on: str = "") -> None:
        self.asked: list[tuple[str, float]] = []
        self.engines: dict[str, Any] = {}
        self.processes: dict[str, int] = {}
        self.running = self.most = self.cancelled = 0
        self._fails_on = fails_on

    async def ask(self, model: str, token_ids: Sequence[int], new_tokens: int, share_hint: float) -> Answer:
        self.asked.append((model, share_hint))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for _ in range(3):
                await asyncio.sleep(0)
            if model == self._fails_on:
                raise NodeUnavailable(f"{model} is gone")
            return Answer(model, len(token_ids), (1,) * new_tokens, 0.1, 0.2, 0, "exact")
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def settle(self) -> None: ...


async def test_sessions_in_flight_are_bounded_and_their_requests_come_in_turn() -> None:
    system = FakeSystem()
    sessions = [[(f"{name}{turn}", (1, 2)) for turn in range(3)] for name in "abcd"]
    answers, seconds = await in_flight(system, sessions, 2, 4)
    assert [answer.model for answer in answers] == [model for session in sessions for model, _ in session]
    assert all(answer.token_ids == (1, 1, 1, 1) for answer in answers)
    assert (system.most, system.running) == (2, 0)
    assert seconds > 0
    for name in "abcd":
        assert [(model, hint) for model, hint in system.asked if model[0] == name] == [
            (f"{name}0", 2.0),
            (f"{name}1", 1.0),
            (f"{name}2", 0.0),
        ]


async def test_a_request_by_itself_announces_nothing() -> None:
    system = FakeSystem()
    await in_flight(system, [[("a", (1,))], [("b", (1,))]], 1, 1)
    assert (system.asked, system.most) == ([("a", -1.0), ("b", -1.0)], 1)


async def test_a_request_that_fails_ends_the_others() -> None:
    system = FakeSystem(fails_on="b")
    with pytest.raises(NodeUnavailable, match="b is gone"):
        await in_flight(system, [[("a", (1,))] * 50, [("b", (1,))]], 2, 1)
    assert (system.running, system.cancelled) == (0, 1)
