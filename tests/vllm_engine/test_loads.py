"""Loads of the vLLM engine, without vLLM: which writes and units are ordered, in which order, how much at a time."""

from __future__ import annotations

import itertools
import random

import pytest
from engine_harness import NUM_LAYERS, computed, exact, partial, plan_of, token_wise
from hypothesis import given
from hypothesis import strategies as st

from kvkin.engines.vllm.loads import Load, LoadState, LoadTable, load_stop, rows_of
from kvkin.engines.vllm.orders import BeginLoad, EndLoad, RunUnit, SwapIn, WriteData
from kvkin.kv.execution import PlanExecution, UnitMode
from kvkin.kv.plan import ReusePlan
from kvkin.kv.pulls import E_LAYER

CHUNK, CONTEXT, TOTAL = 8, 40, 53
PARTIAL = plan_of(partial(0, CONTEXT, (1, 3), "sender"), computed(CONTEXT, TOTAL))
MIXED = plan_of(
    exact(0, 8, "twin"),
    computed(8, 24),
    partial(24, 32, (2, NUM_LAYERS), "other"),
    token_wise(32, CONTEXT, [32, 34, 39], "sender"),
    computed(CONTEXT, TOTAL),
)
PLANS = {
    "partial": PARTIAL,
    "exact": plan_of(exact(0, CONTEXT, "twin"), computed(CONTEXT, TOTAL)),
    "mixed": MIXED,
    "two computed segments at the end": plan_of(exact(0, 16, "twin"), computed(16, CONTEXT), computed(CONTEXT, TOTAL)),
}


def load_of(plan: ReusePlan, key: str = "k") -> Load:
    return Load(key, plan, range(TOTAL), 0, NUM_LAYERS, CHUNK)


def pairs_of(load: Load, plan: ReusePlan) -> list[tuple[int, int]]:
    execution = PlanExecution(plan, NUM_LAYERS, CHUNK)
    return [pair for number in range(len(plan.segments)) for pair in execution.pull_pairs(number)]


def start(load: Load, cached: int = 0) -> LoadTable:
    table = LoadTable(CHUNK, NUM_LAYERS)
    load.allocated(range(1, 9), cached)
    table.add(load, "vllm-id")
    return table


def drain(table: LoadTable, limit: int = 1000) -> list[object]:
    """Orders of step after step until a step has none."""
    orders: list[object] = []
    for _ in range(limit):
        step = table.orders()
        if not step:
            return orders
        orders += step
    raise AssertionError("it never comes to rest")


@pytest.mark.parametrize(
    ("plan", "stop"),
    [
        (plan_of(computed(0, TOTAL)), 0),
        (plan_of(computed(0, 16), computed(16, TOTAL)), 0),
        (PARTIAL, CONTEXT),
        (MIXED, CONTEXT),
        (PLANS["two computed segments at the end"], 16),
    ],
)
def test_the_load_ends_with_the_last_segment_that_reuses(plan: ReusePlan, stop: int) -> None:
    load = load_of(plan)
    assert load_stop(plan) == load.stop == stop
    assert load.state is (LoadState.QUEUED if stop else LoadState.DONE)
    assert load.later_chunks[0].start == stop
    assert len(load.own_chunks) + len(load.later_chunks) == len(load.chunks)


@pytest.mark.parametrize("name", PLANS)
def test_everything_is_ordered_once_and_in_an_order_that_works(name: str) -> None:
    """The orders are those of a plan execution; what a unit needs was ordered before it; the end comes last, once."""
    plan = PLANS[name]
    load = load_of(plan)
    table = start(load)
    pairs = pairs_of(load, plan)
    for pair in pairs:
        assert load.arrived(*pair)
    orders = drain(table)
    assert [order for order in orders if isinstance(order, EndLoad)] == [orders[-1]] == [EndLoad("k", "vllm-id")]
    writes = [(order.chunk, order.layer) for order in orders if isinstance(order, WriteData)]
    assert sorted(writes) == sorted(pairs)
    units = [order.unit for order in orders if isinstance(order, RunUnit)]
    expected = {
        (chunk.index, layer)
        for chunk in load.own_chunks
        if chunk.rows is None or chunk.rows
        for layer in range(chunk.first_layer, chunk.stop_layer)
    }
    assert len(units) == len(expected)
    assert {(unit.chunk, unit.layer) for unit in units} == expected
    assert all(unit.mode is not UnitMode.LAST_ROW for unit in units)
    _assert_ready_in_order(load, orders)
    assert not len(table)
    assert load.state is LoadState.ENDED


def _assert_ready_in_order(load: Load, orders: list[object]) -> None:
    """Before a unit runs, all earlier chunks have KV of its layer, and what enters it is there."""
    kv: set[tuple[int, int]] = set()
    entered: dict[int, int] = {chunk.index: 0 for chunk in load.chunks if chunk.e_layer is None}
    for order in orders:
        match order:
            case WriteData(_, chunk, layer) if layer == E_LAYER:
                entered[chunk] = load.chunks[chunk].e_layer or 0
            case WriteData(_, chunk, layer):
                kv.add((chunk, layer))
            case RunUnit(_, unit):
                assert all((before, unit.layer) in kv for before in range(unit.chunk)), unit
                assert entered[unit.chunk] == unit.layer, unit
                if unit.rows is not None:
                    assert (unit.chunk, unit.layer) in kv, unit
                kv.add((unit.chunk, unit.layer))
                entered[unit.chunk] = unit.layer + 1


@given(st.lists(st.sampled_from(sorted(PLANS)), min_size=1, max_size=3), st.integers(0, 2**32))
def test_slices_are_bounded_whenever_data_comes(names: list[str], seed: int) -> None:
    """Over all loads a step computes at most a chunk's rows and writes about a chunk's KV; every load ends once."""
    source = random.Random(seed)
    loads = {f"k{index}": load_of(PLANS[name], f"k{index}") for index, name in enumerate(names)}
    table = LoadTable(CHUNK, NUM_LAYERS)
    waiting = []
    for (key, load), name in zip(loads.items(), names, strict=True):
        load.allocated(range(1, 9), 0)
        table.add(load, key)
        waiting += [(key, pair) for pair in pairs_of(load, PLANS[name])]
    source.shuffle(waiting)
    ended = []
    for _ in range(10_000):
        if waiting:
            for _ in range(source.randrange(7)):
                if waiting:
                    key, pair = waiting.pop()
                    assert loads[key].arrived(*pair)
        orders = table.orders()
        units = [order for order in orders if isinstance(order, RunUnit)]
        rows = {(order.key, order.unit.chunk): len(rows_of(order.unit, 0)) for order in units}
        assert sum(rows.values()) <= CHUNK
        written = sum(isinstance(order, WriteData) for order in orders)
        assert written <= NUM_LAYERS, "each write here is of a whole chunk"
        ended += [order.key for order in orders if isinstance(order, EndLoad)]
        if not orders and not waiting:
            break
    assert sorted(ended) == sorted(loads)


def test_loads_take_turns() -> None:
    plan = plan_of(partial(0, CONTEXT, (0, 2), "sender"), computed(CONTEXT, TOTAL))
    loads = [load_of(plan, key) for key in "abc"]
    table = LoadTable(CHUNK, NUM_LAYERS)
    for load in loads:
        load.allocated(range(1, 9), 0)
        table.add(load, load.key)
    # "w" has nothing to do: it must not cost the others their turn, nor give one of them more
    waits = load_of(PARTIAL, "w")
    waits.allocated(range(1, 9), 0)
    table.add(waits, "w")
    steps = [{order.key for order in table.orders() if isinstance(order, RunUnit)} for _ in range(6)]
    assert steps == [{"a"}, {"b"}, {"c"}, {"a"}, {"b"}, {"c"}]


def test_late_and_repeated_data_is_ignored() -> None:
    load = load_of(PARTIAL)
    table = start(load)
    assert load.arrived(0, 0)
    assert not load.arrived(0, 0)
    assert not load.arrived(0, 1)  # computed, not pulled
    assert not load.arrived(99, 0)
    drain(table)
    assert not load.arrived(0, 0)
    for pair in pairs_of(load, PARTIAL):
        load.arrived(*pair)
    drain(table)
    assert load.state is LoadState.ENDED
    assert not load.arrived(0, 0)


@pytest.mark.parametrize("cached", [0, 5, 8, 12, 39])
def test_rows_in_vllms_own_cache_are_not_computed(cached: int) -> None:
    load = load_of(MIXED)
    table = start(load, cached)
    for pair in pairs_of(load, MIXED):
        load.arrived(*pair)
    orders = drain(table)
    computed_rows = {
        (row, order.unit.layer) for order in orders if isinstance(order, RunUnit) for row in rows_of(order.unit, cached)
    }
    assert all(row >= cached for row, _ in computed_rows)
    whole = load_of(MIXED)
    table = start(whole)
    for pair in pairs_of(whole, MIXED):
        whole.arrived(*pair)
    everything = {
        (row, order.unit.layer)
        for order in drain(table)
        if isinstance(order, RunUnit)
        for row in rows_of(order.unit, 0)
    }
    assert computed_rows == {(row, layer) for row, layer in everything if row >= cached}


def test_a_load_that_is_covered_waits_for_its_data() -> None:
    """The node adopts what it pulls as blocks once the prompt is prefilled, so all of it must have landed by then."""
    load = load_of(PARTIAL)
    pairs = pairs_of(load, PARTIAL)
    for pair in pairs[:-1]:
        load.arrived(*pair)
    assert not load.all_arrived
    load.arrived(*pairs[-1])
    assert load.all_arrived
    load.covered([1, 2])
    assert load.state is LoadState.DONE
    assert load.cached == load.stop


def test_after_a_preemption_the_copy_is_written_back() -> None:
    load = load_of(PARTIAL)
    table = start(load)
    for pair in pairs_of(load, PARTIAL):
        load.arrived(*pair)
    drain(table)
    load.state = LoadState.DONE
    load.swapped = True
    orders = load.allocated([7, 8], 32)
    assert orders == [BeginLoad("k", (7, 8), 32, tuple(range(CONTEXT)), 0), SwapIn("k")]
    table.add(load, "again")
    assert drain(table) == [EndLoad("k", "again")]


def test_a_removed_load_is_not_ordered_any_more() -> None:
    load, other = load_of(PARTIAL), load_of(PARTIAL, "other")
    table = start(load)
    other.allocated(range(1, 9), 0)
    table.add(other, "id")
    for pair in pairs_of(load, PARTIAL):
        load.arrived(*pair)
        other.arrived(*pair)
    table.orders()
    table.remove(load)
    assert load.end("vllm-id") == EndLoad("k", "vllm-id")
    assert {order.key for order in drain(table)} == {"other"}


def test_rows_of_a_unit() -> None:
    load = load_of(MIXED)
    units = {chunk.index: chunk for chunk in load.chunks}
    first = next(chunk for chunk in units.values() if chunk.rows)
    assert first.rows == (32, 34, 39)
    table = start(load)
    for pair in pairs_of(load, MIXED):
        load.arrived(*pair)
    by_chunk = {order.unit.chunk: order.unit for order in drain(table) if isinstance(order, RunUnit)}
    assert rows_of(by_chunk[first.index], 33) == (34, 39)
    assert rows_of(by_chunk[1], 11) == range(11, 16)
    assert rows_of(by_chunk[1], 100) == range(16, 16)
    assert list(itertools.chain(rows_of(by_chunk[1], 0))) == list(range(8, 16))
