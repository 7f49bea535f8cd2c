"""Checks for drift on real nodes: they say what the oracle says, run in idle time only, give way, and leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from node_harness import (
    LAYERS,
    Member,
    ScriptedRouter,
    exact_plan,
    greedy,
    partial_plan,
    pulled,
    running,
    until_clean,
)
from transformers import AutoModelForCausalLM

from kvkin.decode_nodes import drift_checks
from kvkin.decode_nodes.drift import MAX_TRIES
from kvkin.decode_nodes.drift_records import Records
from kvkin.decode_nodes.running import LoopSink
from kvkin.engines.api import EngineRequest
from kvkin.kv.plan import LayerGroup, LayerSource, PlanKind, ReusePlan, Segment, private_plan
from kvkin.transport.node_messages import Done, Drain, DriftCheck, DriftSample, DriftSource, Generated
from kvkin.transport.node_runtime import CheckSettings

TOKENS = tuple(int(t) for t in torch.randint(3, 320, (101,), generator=torch.Generator().manual_seed(5)))
CONTEXT = 96
NODE, PREFILL = "decode-tune", "prefill-0"
SOON = CheckSettings(idle_s=0.05)


class Cluster:
    """A prefill node that holds the base's context, and a decode node of the fine-tune."""

    def __init__(self, members: dict[str, Member], router: ScriptedRouter, prefill: Any, node: Any) -> None:
        self.base, self.tune = members["base"], members["tune"]
        self.router, self.prefill, self.node = router, prefill, node

    def asked(self, tokens: int = 6, group: tuple[int, int] | None = (1, 3)) -> DriftCheck:
        return DriftCheck(tokens, (DriftSource(self.base.lineage.id, "base", PlanKind.PARTIAL, group),))

    def plan(self, start: int = 1, stop: int = 3) -> ReusePlan:
        return partial_plan(pulled(self.base, PREFILL), CONTEXT, len(TOKENS), start, stop)

    async def execute(self, request_id: str, plan: ReusePlan | None = None, **how: Any) -> Done:
        check = how.pop("check", self.asked())
        return await self.router.execute(NODE, request_id, "tune", TOKENS, plan or self.plan(), check=check, **how)

    async def sample(self, request_id: str) -> DriftSample:
        found = await self.router.until(lambda: self.router.of(DriftSample, request_id))
        assert len(found) == 1
        sample: DriftSample = found[0]
        return sample

    @contextlib.asynccontextmanager
    async def busy(self) -> AsyncIterator[None]:
        """A request that runs for as long as the block does: its pull of the last layer waits."""
        transport = self.node.runtime.transport
        transport.hold(LAYERS - 1)
        try:
            await self.router.start(NODE, "stuck", "tune", TOKENS, self.plan(), publish=False)
            await transport.holding.wait()
            yield
        finally:
            transport.release()
        await self.router.ended("stuck")


@contextlib.asynccontextmanager
async def cluster(members: dict[str, Member], router: ScriptedRouter, **changes: Any) -> AsyncIterator[Cluster]:
    """Both nodes, checked for leaks at the end; ``changes`` are settings of the decode node."""
    base, tune = members["base"], members["tune"]
    async with contextlib.AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(running("prefill", PREFILL, [base], router))
        node = await stack.enter_async_context(running("decode", NODE, [tune], router, **{"checks": SOON, **changes}))
        await router.order(PREFILL, "order", "base", TOKENS)
        yield Cluster(members, router, prefill, node)
        await until_clean(router, prefill, node)


class Oracle:
    """What unmodified transformers say of a plan on the fine-tune and of its private run."""

    def __init__(self, base: Member, tune: Member, plan: ReusePlan, tokens: int) -> None:
        model, sender = (
            AutoModelForCausalLM.from_pretrained(one.path, dtype=torch.float32).eval() for one in (tune, base)
        )
        held = {PREFILL: oracle.private(sender, TOKENS)}
        reused, private = oracle.execute(model, TOKENS, plan, held), oracle.private(model, TOKENS)
        first = [torch.log_softmax(state.logits.double(), -1) for state in (private, reused)]
        self.divergence = float(torch.sum(first[0].exp() * (first[0] - first[1])))
        self.first_token = bool(first[0].argmax() == first[1].argmax())
        answers = [oracle.generate(model, state, tokens)[1] for state in (private, reused)]
        common = next((n for n, pair in enumerate(zip(*answers, strict=True)) if pair[0] != pair[1]), tokens)
        self.agreement = common / tokens


def full_reuse(holder: Any) -> ReusePlan:
    source = LayerSource(LayerGroup(0, LAYERS), holder)
    segment = Segment(0, CONTEXT, (source,), kind=PlanKind.PARTIAL, loss=float("inf"))
    return ReusePlan((segment, Segment(CONTEXT, len(TOKENS))))


class Gate:
    """Holds the engine inside a step of a check, and sees every unit of both kinds of run in order.

    The first ``runs`` checks are held at unit number ``hold_at``, each until ``release``.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.units: list[tuple[str, int, int]] = []
        self.hold_at, self.runs = 0, 1
        self.entered = threading.Event()
        self._open = threading.Event()
        original = LoopSink.unit_done

        def real(sink: Any, request_id: str, unit: Any, space: Any) -> None:
            self.units.append((request_id, unit.chunk, unit.layer))
            original(sink, request_id, unit, space)

        def check(sink: Any, request_id: str, unit: Any, space: Any) -> None:
            self.units.append((request_id, unit.chunk, unit.layer))
            if self.runs and len(self.of(request_id)) == self.hold_at:
                self.runs -= 1
                opened = self._open = threading.Event()
                self.entered.set()
                assert opened.wait(60)

        monkeypatch.setattr(LoopSink, "unit_done", real)
        monkeypatch.setattr(drift_checks._RunSink, "unit_done", check)

    def release(self) -> None:
        self.entered.clear()
        self._open.set()

    def of(self, request_id: str) -> list[tuple[int, int]]:
        return [(chunk, layer) for name, chunk, layer in self.units if name == request_id]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.release()


async def inside(gate: Gate, router: ScriptedRouter) -> None:
    """Until the engine is held inside a check's step; heartbeats come from the loop, which goes on."""
    await router.until(gate.entered.is_set)


# --- what a check says -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [(1, 3), (0, 2), (2, 4), None], ids=str)
async def test_a_check_says_what_the_oracle_says(
    members: dict[str, Member], router: ScriptedRouter, group: tuple[int, int] | None
) -> None:
    async with cluster(members, router) as c:
        plan = full_reuse(pulled(c.base, PREFILL)) if group is None else c.plan(*group)
        asked = c.asked(6, group)
        await c.execute("r", plan, check=asked, max_tokens=9)
        sample = await c.sample("r")
        wanted = Oracle(c.base, c.tune, plan, 6)
        assert 0.01 < wanted.divergence < 19, "the pair must differ, and by less than what is cut off"
        assert sample.divergence == pytest.approx(wanted.divergence, rel=1e-3)
        assert (sample.agreement, sample.first_token, sample.tokens) == (wanted.agreement, wanted.first_token, 6)
        assert (sample.receiver, sample.sources, sample.inherited) == (c.tune.lineage.id, asked.sources, False)


async def test_a_run_that_is_private_anyway_agrees_with_itself(
    members: dict[str, Member], router: ScriptedRouter
) -> None:
    """Exact reuse of the same weights, as if it had been chosen: full agreement, no divergence."""
    async with cluster(members, router) as c:
        tune = private_plan(len(TOKENS))
        await c.execute("first", tune, check=None)
        own = exact_plan(pulled(c.tune, NODE), CONTEXT, len(TOKENS))
        await c.execute("r", own, check=c.asked())
        sample = await c.sample("r")
        assert (sample.agreement, sample.first_token) == (1.0, True)
        assert sample.divergence < 1e-6


async def test_of_a_sampled_request_the_first_distribution_is_compared(
    members: dict[str, Member], router: ScriptedRouter
) -> None:
    async with cluster(members, router) as c:
        await c.execute("r", temperature=3.0, seed=4, max_tokens=9)
        sample = await c.sample("r")
        wanted = Oracle(c.base, c.tune, c.plan(), 1)
        assert sample.divergence == pytest.approx(wanted.divergence, rel=1e-3)
        assert (sample.first_token, sample.agreement) == (wanted.first_token, float(wanted.first_token))
        assert sample.tokens == 1


async def test_no_more_is_compared_than_was_answered(members: dict[str, Member], router: ScriptedRouter) -> None:
    async with cluster(members, router) as c:
        await c.execute("r", check=c.asked(50), max_tokens=2)
        assert (await c.sample("r")).tokens == 2


# --- what it reads and leaves ----------------------------------------------------------------------------------------------


async def test_the_run_is_private_and_leaves_nothing(
    members: dict[str, Member], router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Own tainted blocks of the very same prompt lie in the store meanwhile: they are not read, and nothing is added."""
    async with cluster(members, router) as c:
        submitted: list[EngineRequest] = []
        fed: list[str] = []
        engine = c.node._engine
        submit, arrived = engine.submit, engine.arrived
        monkeypatch.setattr(
            engine, "submit", lambda request, sink: (submitted.append(request), submit(request, sink))[1]
        )
        monkeypatch.setattr(engine, "arrived", lambda name, arrival: (fed.append(name), arrived(name, arrival))[1])
        done = await c.execute("r")
        store = c.node.runtime.store
        before = {(block.key, block.refs) for block in store.blocks()}
        assert before
        told = len(router.holdings[NODE])
        slots = (store.kv_pool.used, store.e_pool.used)
        await c.sample("r")
        real, check = submitted
        assert (real.request_id, check.request_id) == ("r", "drift/r/1")
        assert check.plan == private_plan(len(TOKENS), check.plan.reason)
        assert (check.token_ids, check.taps) == (TOKENS, ())
        assert set(fed) == {"r"}
        assert {(block.key, block.refs) for block in store.blocks()} == before
        assert (store.kv_pool.used, store.e_pool.used) == slots
        await router.beats(NODE, 2)
        assert len(router.holdings[NODE]) == told
        assert engine._requests == {}
        assert not router.of(Generated, "drift/r/1")
        load = router.load(NODE)
        assert (load.checks_done, load.checks_waiting, load.checks_running, load.checks_dropped) == (1, 0, 0, 0)
        assert (load.finished, load.failed, load.running) == (1, 0, 0), "a check is no request"
        # the blocks that the request left are as good as before
        assert done.report.kind is PlanKind.PARTIAL


async def test_requests_that_are_not_chosen_cost_nothing(
    members: dict[str, Member], router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(members, router) as c:
        submitted: list[EngineRequest] = []
        submit = c.node._engine.submit
        monkeypatch.setattr(
            c.node._engine, "submit", lambda request, sink: (submitted.append(request), submit(request, sink))[1]
        )
        await c.execute("r", check=None)
        await router.beats(NODE, 4)
        assert [(one.request_id, one.first_distribution) for one in submitted] == [("r", False)]
        assert c.node.checks.core.waiting == router.load(NODE).checks_done == 0


async def test_a_fallback_is_not_checked(members: dict[str, Member], router: ScriptedRouter) -> None:
    """It was private in the end: comparing it would praise the pair for nothing."""
    async with cluster(members, router) as c:
        gone = partial_plan(pulled(c.base, "nobody"), CONTEXT, len(TOKENS), 1, 3)
        done = await c.execute("r", gone)
        assert done.report.fallback
        await router.beats(NODE, 4)
        load = router.load(NODE)
        assert (load.checks_waiting, load.checks_done, load.checks_dropped) == (0, 0, 0)


# --- when it runs ----------------------------------------------------------------------------------------------------------


async def test_a_check_waits_for_an_idle_node_and_the_oldest_goes_when_too_many_wait(
    members: dict[str, Member], router: ScriptedRouter
) -> None:
    async with cluster(members, router, checks=CheckSettings(idle_s=0.05, max_pending=2)) as c:
        async with c.busy():
            for name in ("a", "b", "c"):
                # pulls nothing of the layer that is held back
                await c.execute(name, c.plan(1, LAYERS))
            await router.beats(NODE, 5)
            load = router.load(NODE)
            assert (load.checks_waiting, load.checks_running, load.checks_done) == (2, 0, 0)
            assert load.checks_dropped == 1
        for name in ("b", "c"):
            await c.sample(name)
        assert not router.of(DriftSample, "a")


async def test_a_draining_node_begins_no_check(members: dict[str, Member], router: ScriptedRouter) -> None:
    async with cluster(members, router) as c:
        await router.send(NODE, Drain())
        await router.until(lambda: NODE in router.heartbeats and router.heartbeats[NODE].draining)
        await c.execute("r")
        await router.beats(NODE, 5)
        load = router.load(NODE)
        assert (load.checks_waiting, load.checks_running, load.checks_done) == (1, 0, 0)


async def test_a_check_gives_way_to_a_request_before_the_next_step(
    members: dict[str, Member], router: ScriptedRouter, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request's tokens and its order of steps are those of a node without a check; the check comes later, and is right."""
    async with cluster(members, router) as c:
        await c.execute("alone", private_plan(len(TOKENS)), check=None, publish=False)
        gate.hold_at = 5
        await c.execute("r")
        await inside(gate, router)
        told: list[tuple[str, str]] = []
        engine = c.node._engine
        submit, cancel = engine.submit, engine.cancel
        monkeypatch.setattr(
            engine,
            "submit",
            lambda request, sink: (told.append(("submit", request.request_id)), submit(request, sink))[1],
        )
        monkeypatch.setattr(engine, "cancel", lambda name, why: (told.append(("cancel", name)), cancel(name, why))[1])
        await router.start(NODE, "real", "tune", TOKENS, private_plan(len(TOKENS)), publish=False)
        await router.until(lambda: router.load(NODE).running == 1)
        assert told == [("cancel", "drift/r/1"), ("submit", "real")], "the engine hears of the cancel first"
        assert (router.load(NODE).checks_waiting, router.load(NODE).checks_running) == (1, 0)
        gate.release()
        done = await router.ended("real")
        assert isinstance(done, Done)
        assert list(done.token_ids) == greedy(c.tune, TOKENS, 6)
        assert gate.of("real") == gate.of("alone")
        assert len(gate.of("drift/r/1")) == 5, "the step that ran, and no further one"
        names = [name for name, _, _ in gate.units]
        assert names.index("real") == len(names) - 1 - names[::-1].index("drift/r/1") + 1
        sample = await c.sample("r")
        assert sample.divergence == pytest.approx(Oracle(c.base, c.tune, c.plan(), 1).divergence, rel=1e-3)
        assert gate.of("drift/r/2") == gate.of("alone")


async def test_a_check_that_never_gets_through_is_dropped(
    members: dict[str, Member], router: ScriptedRouter, gate: Gate
) -> None:
    async with cluster(members, router) as c:
        gate.hold_at, gate.runs = 2, MAX_TRIES
        await c.execute("r")
        for attempt in range(MAX_TRIES):
            await inside(gate, router)
            name = f"real-{attempt}"
            await router.start(NODE, name, "tune", TOKENS, private_plan(len(TOKENS)), publish=False)
            await router.until(lambda: router.load(NODE).running == 1)
            gate.release()
            await router.ended(name)
        await router.until(lambda: router.load(NODE).checks_dropped == 1)
        await router.beats(NODE, 4)
        assert not router.of(DriftSample, "r")
        assert c.node._engine._requests == {}


async def test_a_node_that_stops_in_the_middle_of_a_check_stops_at_once(
    members: dict[str, Member], router: ScriptedRouter, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(members, router) as c:
        gate.hold_at = 3
        await c.execute("r")
        await inside(gate, router)
        close = c.node._engine.close
        monkeypatch.setattr(c.node._engine, "close", lambda: (gate.release(), close()))
    # the block's end stops the node and looks for leaks
    assert not router.of(DriftSample, "r")
    assert len(gate.of("drift/r/1")) == 3


async def test_an_engine_that_fails_a_check_harms_nobody(
    members: dict[str, Member], router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(members, router) as c:

        def broken(*arguments: Any) -> None:
            raise MemoryError("no room for a check")

        monkeypatch.setattr(drift_checks._RunSink, "unit_done", broken)
        await c.execute("r")
        await router.until(lambda: router.load(NODE).checks_dropped == 1)
        monkeypatch.undo()
        await c.execute("again")
        await c.sample("again")


# --- several routers, records ----------------------------------------------------------------------------------------------


async def test_every_router_hears_of_it(members: dict[str, Member], router: ScriptedRouter) -> None:
    other = ScriptedRouter(router.context)
    try:
        async with cluster(members, router, routers=(router.address, other.address)) as c:
            await other.until(lambda: NODE in other.holdings)
            await c.execute("r")
            sample = await c.sample("r")
            assert (await other.until(lambda: other.of(DriftSample, "r")))[0] == sample
    finally:
        await other.close()


async def test_no_prompt_is_kept_by_default(
    members: dict[str, Member], router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []
    monkeypatch.setattr(Records, "add", lambda self, record: written.append(record))
    async with cluster(members, router) as c:
        await c.execute("r")
        await c.sample("r")
        await router.beats(NODE, 2)
    assert written == []


async def test_prompts_are_kept_but_never_those_of_who_wants_to_leave_nothing(
    members: dict[str, Member], router: ScriptedRouter, tmp_path: Path
) -> None:
    folder = tmp_path / "recorded"
    async with cluster(members, router, checks=CheckSettings(idle_s=0.05, record=folder)) as c:
        await c.execute("hidden", publish=False)
        await c.sample("hidden")
        await c.execute("kept")
        await c.sample("kept")
    (line,) = (folder / "base-tune.jsonl").read_text().splitlines()
    wanted = {"token_ids": list(TOKENS), "suffix_start": CONTEXT, "sender": "base", "receiver": "tune"}
    assert json.loads(line) == wanted


async def test_a_disk_that_takes_nothing_costs_the_record_only(
    members: dict[str, Member], router: ScriptedRouter, tmp_path: Path
) -> None:
    (tmp_path / "blocked").write_text("a file, no folder")
    async with cluster(members, router, checks=CheckSettings(idle_s=0.05, record=tmp_path / "blocked" / "in")) as c:
        await c.execute("r")
        await c.sample("r")
        await c.execute("on")
        await c.sample("on")
