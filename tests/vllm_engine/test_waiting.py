"""A forward waits for the last layers of a context where its request is alone; and what happens if they do not come."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from check_engine_steps import CONTEXT, PARTIAL, PRIVATE, TOTAL, Run
from engine_harness import NUM_LAYERS, Recorder, computed, exact, greedy, plan_of, run_until_idle, step_until
from vllm_bench import SharedEngine, lora_family

from kvkin.engines.api import Arrival
from kvkin.kv.errors import Cancelled

pytestmark = pytest.mark.vllm

EXACT = plan_of(exact(0, CONTEXT, "twin"), computed(CONTEXT, TOTAL))
SUFFIX_CHUNK = 5
LONG_S, SHORT_S = 30.0, 0.05


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    family = lora_family("llama", tmp_path_factory.mktemp("family"))
    engine = SharedEngine(family, enable_prefix_caching=True)
    yield engine
    engine.close()


def new_run(shared: SharedEngine, sync_wait_s: float, tag: str = "") -> Run:
    lineages = {name: f"{name} {tag}".encode() for name in shared.family.members} if tag else None
    return Run(shared.make, shared.family.name, sync_wait_s=sync_wait_s, lineages=lineages)


def feed_but(run: Run, name: str, held: Callable[[Arrival], bool], plan: Any = EXACT, **options: Any) -> list[Arrival]:
    """Submit, and feed everything but what is held back; returns that."""
    data = run.data(name, run.submit(name, plan, sampling=greedy(6), **options))
    run.feed(name, [arrival for arrival in data if not held(arrival)])
    return [arrival for arrival in data if held(arrival)]


def when_computed(run: Run, name: str, layer: int, action: Callable[[], None]) -> None:
    """Have ``action`` happen once the suffix has gone through ``layer`` inside the forward."""
    recorder, heard = run.recorder, Recorder.unit_done

    def unit_done(request_id: str, unit: Any, space: Any) -> None:
        heard(recorder, request_id, unit, space)
        if (request_id, unit.chunk, unit.layer) == (name, SUFFIX_CHUNK, layer):
            action()

    recorder.unit_done = unit_done  # type: ignore[method-assign]


def last_layer(arrival: Arrival) -> bool:
    return arrival.layer == NUM_LAYERS - 1


@pytest.mark.parametrize("computed_layer", [0, 2, NUM_LAYERS - 2])
def test_the_suffix_is_computed_before_the_last_layer_is_there(shared: SharedEngine, computed_layer: int) -> None:
    run = new_run(shared, LONG_S)
    missing = feed_but(run, "r", last_layer)
    seen = []

    def arrive() -> None:
        seen.append(len(run.recorder.of("r").units))
        run.feed("r", missing)

    when_computed(run, "r", computed_layer, arrive)
    run_until_idle(run.bench)
    assert len(seen) == 1, "the layer below ran while the last one had not come"
    run.assert_result("r")
    assert run.recorder.of("r").counters.wait_s < LONG_S


@pytest.mark.parametrize("seed", range(4))
def test_layers_come_one_by_one(shared: SharedEngine, seed: int) -> None:
    """Each layer's data comes when the suffix has gone through the one below, its chunks in any order."""
    run = new_run(shared, LONG_S)
    missing = feed_but(run, "r", lambda arrival: arrival.layer > 0)
    random.Random(seed).shuffle(missing)

    def feed(layer: int) -> None:
        run.feed("r", [arrival for arrival in missing if arrival.layer == layer])

    when = {layer: layer + 1 for layer in range(NUM_LAYERS - 1)}
    recorder, heard = run.recorder, Recorder.unit_done

    def unit_done(request_id: str, unit: Any, space: Any) -> None:
        heard(recorder, request_id, unit, space)
        if unit.chunk == SUFFIX_CHUNK and unit.layer in when:
            feed(when.pop(unit.layer))

    recorder.unit_done = unit_done  # type: ignore[method-assign]
    run_until_idle(run.bench)
    assert not when
    run.assert_result("r")


def test_what_does_not_come_in_time_costs_the_forward_and_nothing_else(shared: SharedEngine) -> None:
    """Its blocks are found by nobody: the same prompt again, under the same lineage, loads and computes all of it."""
    run = new_run(shared, SHORT_S, tag="late")
    missing = feed_but(run, "r", last_layer)
    run_until_idle(run.bench)
    heard = run.recorder.of("r")
    assert not heard.ends
    assert not heard.tokens, "what was computed on KV that did not come"
    again = run.data("again", run.submit("again", EXACT, sampling=greedy(6)))
    run.feed("again", again)
    run_until_idle(run.bench)
    run.assert_result("again")
    assert run.recorder.of("again").counters.cached_tokens == 0
    run.feed("r", missing)
    run_until_idle(run.bench)
    run.assert_result("r")
    assert heard.prefilled == 1


@pytest.mark.parametrize("phase", ["before", "in the forward"])
def test_a_replan_while_the_forward_waits(shared: SharedEngine, phase: str) -> None:
    run = new_run(shared, LONG_S)
    missing = feed_but(run, "r", last_layer)

    def replan() -> None:
        run.bench.engine.replan("r", PRIVATE)
        run.feed("r", missing)  # of a plan that was given up

    if phase == "before":
        replan()
    else:
        when_computed(run, "r", 1, replan)
    run_until_idle(run.bench)
    run.recorder.of("r").written.clear()
    run.assert_result("r", PRIVATE)


def test_a_cancel_while_the_forward_waits(shared: SharedEngine) -> None:
    shared.settle()
    free = shared.free_blocks()
    run = new_run(shared, LONG_S)
    feed_but(run, "r", last_layer)
    when_computed(run, "r", 1, lambda: run.bench.engine.cancel("r", "nobody listens"))
    run_until_idle(run.bench)
    assert isinstance(run.recorder.of("r").error, Cancelled)
    assert shared.free_blocks() == free
    assert not shared.served()


def test_nobody_else_is_held_up(shared: SharedEngine) -> None:
    """With another request there, the load is waited for as ever: outside."""
    run = new_run(shared, LONG_S)
    run.submit("other", PRIVATE, "other", seed=5, sampling=greedy(30))
    step_until(run.bench, lambda: len(run.recorder.of("other").tokens) >= 2)
    missing = feed_but(run, "r", last_layer)
    step_until(run.bench, lambda: bool(run.recorder.of("other").ends) or bool(run.recorder.of("r").units))
    assert not run.recorder.of("r").units, "the other one ran to its end without it"
    run.feed("r", missing)
    run_until_idle(run.bench)
    for name in ("other", "r"):
        run.assert_result(name)


def test_plans_that_compute_are_never_waited_for_inside(shared: SharedEngine) -> None:
    run = new_run(shared, LONG_S)
    missing = feed_but(run, "r", last_layer, PARTIAL)
    run_until_idle(run.bench)
    assert not any(unit.chunk == SUFFIX_CHUNK for unit in run.recorder.of("r").units)
    run.feed("r", missing)
    run_until_idle(run.bench)
    run.assert_result("r")


def test_without_leave_nothing_is_waited_for_inside(shared: SharedEngine) -> None:
    run = new_run(shared, 0.0)
    missing = feed_but(run, "r", last_layer)
    run_until_idle(run.bench)
    assert not run.recorder.of("r").units
    run.feed("r", missing)
    run_until_idle(run.bench)
    run.assert_result("r")
