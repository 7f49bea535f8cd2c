"""PlanExecution against an independent naive model: random plans, random arrival orders, every event in every state."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_strategies import holder, plans

from kvkin.kv.execution import (
    Cancel,
    ComputeUnit,
    DataArrived,
    GiveUp,
    Instruction,
    PlanExecution,
    PrefillFinished,
    SourceFailed,
    State,
    Unit,
    UnitDone,
    UnitMode,
)
from kvkin.kv.plan import LayerGroup, LayerSource, ReusePlan, Segment, TokenRows, private_plan
from kvkin.kv.pulls import E_LAYER

CASES = st.integers(1, 5).flatmap(lambda layers: st.tuples(st.just(layers), plans(layers), st.integers(1, 10)))
Pair = tuple[int, int]


@dataclass
class Part:
    """A chunk as the naive model sees it, cut anew from the plan's words."""

    segment: Segment
    start: int
    stop: int
    layers: range
    pulled: set[int]
    rows: tuple[int, ...] | None


@dataclass
class Naive:
    """What may run, by the words of docs/design.md section 5, on sets of facts."""

    num_layers: int
    parts: list[Part]
    arrived: set[Pair] = field(default_factory=set)
    done: set[Pair] = field(default_factory=set)

    @property
    def wanted(self) -> set[Pair]:
        """Every (chunk, layer) that somebody has to compute."""
        return {(index, layer) for index, part in enumerate(self.parts) for layer in part.layers}

    @property
    def pulls(self) -> set[Pair]:
        pairs = {(index, layer) for index, part in enumerate(self.parts) for layer in part.pulled}
        return pairs | {(index, E_LAYER) for index, part in enumerate(self.parts) if part.segment.e_layer is not None}

    def kv_final(self, index: int, layer: int) -> bool:
        """Whether the KV of a chunk's layer will not change any more and is there."""
        part = self.parts[index]
        if layer in part.layers:
            return (index, layer) in self.done
        return (index, layer) in self.arrived

    def may_run(self, index: int, layer: int) -> bool:
        part = self.parts[index]
        if layer not in part.layers or (index, layer) in self.done:
            return False
        if layer == part.layers.start:
            entered = part.segment.e_layer is None or (index, E_LAYER) in self.arrived
        else:
            entered = (index, layer - 1) in self.done
        # token rows are written over the pulled KV of their own chunk
        below_rows = layer not in part.pulled or (index, layer) in self.arrived
        return entered and below_rows and all(self.kv_final(before, layer) for before in range(index))

    @property
    def complete(self) -> bool:
        return self.done == self.wanted and self.arrived == self.pulls


def naive(plan: ReusePlan, num_layers: int, chunk_tokens: int) -> Naive:
    parts = []
    for segment in plan.segments:
        for start in range(segment.start, segment.stop, chunk_tokens):
            stop = min(start + chunk_tokens, segment.stop)
            pulled = {layer for source in segment.sources for layer in range(source.layers.start, source.layers.stop)}
            rows = None
            layers = range(num_layers) if not segment.sources else range(0)
            if isinstance(segment.recompute, LayerGroup):
                layers = range(segment.recompute.start, segment.recompute.stop)
            elif isinstance(segment.recompute, TokenRows):
                rows = tuple(row for row in segment.recompute.rows if start <= row < stop)
                layers = range(num_layers) if rows else range(0)
            parts.append(Part(segment, start, stop, layers, pulled, rows))
    return Naive(num_layers, parts)


class Driver:
    """Runs an execution and the naive model side by side."""

    def __init__(self, plan: ReusePlan, num_layers: int, chunk_tokens: int, want_logits: bool = True) -> None:
        self.model = naive(plan, num_layers, chunk_tokens)
        self.execution = PlanExecution(plan, num_layers, chunk_tokens, want_logits=want_logits)
        self.want_logits = want_logits
        self.running: Unit | None = None
        self.finished = 0
        self.ran: list[Unit] = []
        self.take(self.execution.start())

    def take(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case ComputeUnit(unit):
                    assert self.running is None, "one unit at a time"
                    assert self.model.may_run(unit.chunk, unit.layer), f"{unit} may not run yet"
                    self.check_unit(unit)
                    self.running = unit
                case PrefillFinished():
                    assert self.model.complete
                    self.finished += 1
                case other:
                    raise AssertionError(other)
        self.check_rest()

    def check_unit(self, unit: Unit) -> None:
        part = self.model.parts[unit.chunk]
        assert (unit.start, unit.stop, unit.rows) == (part.start, part.stop, part.rows)
        assert unit.first == (unit.layer == part.layers.start)
        assert unit.recompute == bool(part.segment.sources)
        mode = UnitMode.FULL
        if unit.layer == part.layers.stop - 1:
            last = unit.chunk == len(self.model.parts) - 1 and self.want_logits
            mode = UnitMode.LAST_ROW if last else UnitMode.KV_ONLY
        assert unit.mode is mode

    def check_rest(self) -> None:
        """Nothing that may run waits, and what the execution says of itself is true."""
        execution, model = self.execution, self.model
        if self.running is None and not self.finished:
            assert not any(model.may_run(*pair) for pair in model.wanted), "something could run and does not"
        assert execution.missing == len(model.pulls - model.arrived)
        for pair in model.pulls:
            assert execution.expects(*pair) == (pair not in model.arrived and not self.finished)
        assert not execution.expects(len(model.parts), 0)
        state = State.FINISHED if self.finished else State.COMPUTING if self.running else State.WAITING
        assert execution.state is state

    def arrive(self, pair: Pair) -> None:
        self.model.arrived.add(pair)
        self.take(self.execution.handle(DataArrived(*pair)))

    def finish_unit(self) -> None:
        assert self.running is not None
        unit, self.running = self.running, None
        self.ran.append(unit)
        self.model.done.add((unit.chunk, unit.layer))
        self.take(self.execution.handle(UnitDone(unit)))

    def step(self, data: st.DataObject, remaining: list[Pair]) -> bool:
        """One random event: an arrival (perhaps a repeated one) or the running unit's end; False if there is none."""
        choices = ["arrive"] * bool(remaining) + ["done"] * (self.running is not None)
        choices += ["repeat"] * bool(self.model.arrived)
        if choices in ([], ["repeat"]):
            return False
        match data.draw(st.sampled_from(choices)):
            case "arrive":
                self.arrive(remaining.pop(data.draw(st.integers(0, len(remaining) - 1))))
            case "repeat":
                self.arrive(data.draw(st.sampled_from(sorted(self.model.arrived))))
            case _:
                self.finish_unit()
        return True


@settings(max_examples=120)
@given(CASES, st.booleans(), st.data())
def test_every_unit_runs_once_and_only_when_it_may(
    case: tuple[int, ReusePlan, int], want_logits: bool, data: st.DataObject
) -> None:
    num_layers, plan, chunk_tokens = case
    driver = Driver(plan, num_layers, chunk_tokens, want_logits)
    remaining = sorted(driver.model.pulls)
    pairs = [pair for number in range(len(plan.segments)) for pair in driver.execution.pull_pairs(number)]
    assert sorted(pairs) == remaining
    while driver.step(data, remaining):
        pass
    assert driver.finished == 1, "everything arrived, so it must end"
    assert sorted((unit.chunk, unit.layer) for unit in driver.ran) == sorted(driver.model.wanted)
    assert driver.execution.handle(DataArrived(0, 0)) == driver.execution.handle(Cancel("late")) == []
    assert driver.execution.state is State.FINISHED


@settings(max_examples=80)
@given(CASES, st.booleans(), st.data())
def test_failure_and_cancel_in_every_state(case: tuple[int, ReusePlan, int], cancel: bool, data: st.DataObject) -> None:
    """One GiveUp, then silence: late arrivals, the running unit's end and further failures are ignored."""
    num_layers, plan, chunk_tokens = case
    driver = Driver(plan, num_layers, chunk_tokens)
    remaining = sorted(driver.model.pulls)
    for _ in range(data.draw(st.integers(0, 12))):
        if not driver.step(data, remaining):
            break
    if driver.finished:
        return
    event = Cancel("why") if cancel else SourceFailed("why")
    assert driver.execution.handle(event) == [GiveUp("why", cancelled=cancel)]
    assert driver.execution.state is (State.CANCELLED if cancel else State.FAILED)
    late = [DataArrived(*pair) for pair in driver.model.pulls]
    late += [Cancel("again"), SourceFailed("again"), *([UnitDone(driver.running)] if driver.running else [])]
    for each in late:
        assert driver.execution.handle(each) == []
    assert not any(driver.execution.expects(*pair) for pair in driver.model.pulls)


def source(start: int, stop: int) -> LayerSource:
    return LayerSource(LayerGroup(start, stop), holder("a"))


PARTIAL = ReusePlan(
    (
        Segment(0, 8, (source(0, 2), source(4, 6)), 0, 2, holder("a"), LayerGroup(2, 4)),
        Segment(8, 12),
    )
)


@pytest.mark.parametrize("held", [0, 1, 4, 5])
def test_a_held_back_layer_stops_only_the_suffix_from_there_on(held: int) -> None:
    """The recompute of [2, 4) is done, and the suffix's layers below the one that is missing."""
    driver = Driver(PARTIAL, 6, 4)
    for pair in sorted(driver.model.pulls - {(1, held)}):
        driver.arrive(pair)
    while driver.running:
        driver.finish_unit()
    recompute = {(chunk, layer) for chunk in (0, 1) for layer in (2, 3)}
    assert driver.model.done == recompute | {(2, layer) for layer in range(held)}
    driver.arrive((1, held))
    while driver.running:
        driver.finish_unit()
    assert driver.finished


def test_the_recompute_starts_when_e_is_there() -> None:
    driver = Driver(PARTIAL, 6, 4)
    assert driver.running is None
    driver.arrive((0, E_LAYER))
    assert driver.running is not None
    assert (driver.running.chunk, driver.running.layer, driver.running.first) == (0, 2, True)


def test_chunks_start_at_their_segment() -> None:
    """A chunk never straddles two segments; the tail of each is its own."""
    plan = ReusePlan((Segment(0, 5, (source(0, 2),)), Segment(5, 12)))
    execution = PlanExecution(plan, 2, 4)
    assert [(chunk.segment, chunk.start, chunk.stop) for chunk in execution.chunks] == [
        (0, 0, 4),
        (0, 4, 5),
        (1, 5, 9),
        (1, 9, 12),
    ]


def test_a_prefill_order_needs_no_last_row() -> None:
    driver = Driver(private_plan(3), 1, 8, want_logits=False)
    assert driver.running is not None
    assert driver.running.mode is UnitMode.KV_ONLY


def test_invalid_plans_never_start() -> None:
    with pytest.raises(ValueError, match="last segment"):
        PlanExecution(ReusePlan((Segment(0, 4, (source(0, 2),)),)), 2, 4)


def test_our_own_bugs_tell_the_requests_story() -> None:
    """An impossible event is an assertion that prints what happened so far."""
    execution = PlanExecution(PARTIAL, 6, 4)
    execution.start()
    execution.handle(DataArrived(1, 0))
    with pytest.raises(AssertionError, match=r"(?s)not running.*state waiting.*DataArrived\(chunk=1, layer=0\)"):
        execution.handle(UnitDone(Unit(0, 2, 0, 4, UnitMode.FULL, True, True)))
    with pytest.raises(AssertionError, match="does not pull layer 3"):
        execution.handle(DataArrived(0, 3))
    with pytest.raises(AssertionError, match="pulls no E"):
        execution.handle(DataArrived(2, E_LAYER))
