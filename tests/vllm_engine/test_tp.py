"""Two ranks in processes of their own pass the engine contract on a Llama family of LoRA adapters, and share a node's arena.

What holds with one rank (``test_llama.py``) holds here, but for when units are announced: with the end of their step.
"""

from __future__ import annotations

from collections.abc import Iterator

import check_engine_drift as drift
import check_engine_steps as steps
import check_engine_turns as turns
import numpy as np
import pytest
import torch
from check_engine import GEOMETRIES, SHAPES, check_shape
from check_engine_steps import BLOCK, CONTEXT, PARTIAL, PRIVATE, TOTAL, Run
from engine_harness import (
    NUM_LAYERS,
    TAPS,
    computed,
    contexts,
    e_bytes,
    exact,
    greedy,
    kv_bytes,
    partial,
    plan_of,
    run_until_idle,
    step_until,
    token_wise,
)
from vllm_bench import SharedEngine, lora_family, still_running, worker_processes
from vllm_checks import check_batch_in_pieces, check_leaves_nothing

from kvkin.engines.api import Arrival
from kvkin.engines.arena_copies import arrival_from, store_layer, store_states
from kvkin.engines.vllm.orders import StoreE, StoreKV
from kvkin.kv.pulls import E_LAYER
from kvkin.transport.arena import Arena, place_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

REST = computed(CONTEXT, TOTAL)
PLANS = {
    "private": PRIVATE,
    "exact": plan_of(exact(0, CONTEXT, "twin"), REST),
    "partial": PARTIAL,
    "lowest": plan_of(partial(0, CONTEXT, (0, 2), "sender"), REST),
    "token-wise": plan_of(token_wise(0, CONTEXT, [1, 7, 8, 20, 39], "sender"), REST),
    "computed between": plan_of(exact(0, 8, "twin"), computed(8, 24), partial(24, CONTEXT, (2, 4), "other"), REST),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    family = lora_family("llama", tmp_path_factory.mktemp("family"))
    engine = SharedEngine(family, tensor_parallel_size=2)
    processes = worker_processes(engine.runtime)
    assert len(processes) == 2
    yield engine
    engine.close()
    assert not still_running(processes), "no rank outlives its engine"


@pytest.mark.parametrize("shape", SHAPES)
def test_plan_shape(shared: SharedEngine, shape: str) -> None:
    check_shape(shared.make, shared.family.name, shape, GEOMETRIES[:2])


def test_requests_with_different_plans_and_adapters(shared: SharedEngine) -> None:
    check_batch_in_pieces(shared, PLANS, ["receiver", "other", "sender", "other", "receiver", "upper"])


@pytest.mark.parametrize("phase", ["waiting", "computing"])
def test_cancel(shared: SharedEngine, phase: str) -> None:
    steps.check_cancel(shared.make, shared.family.name, phase)


@pytest.mark.parametrize("phase", ["waiting", "computing"])
def test_replan_after_a_failed_source(shared: SharedEngine, phase: str) -> None:
    steps.check_replan(shared.make, shared.family.name, phase)


def test_prefill_order(shared: SharedEngine) -> None:
    steps.check_prefill_order(shared.make, shared.family.name, chunk_by_chunk=False)


def test_ends_and_errors(shared: SharedEngine) -> None:
    steps.check_ends(shared.make, shared.family.name)
    steps.check_refusals(shared.make, shared.family.name)
    steps.check_errors_stay_inside(shared.make, shared.family.name)
    steps.check_close(shared.make, shared.family.name)


def test_three_turns_of_two_agents(shared: SharedEngine) -> None:
    turns.check_three_turns_of_two_agents(shared.make, shared.family.name)


def test_first_distribution(shared: SharedEngine) -> None:
    """It is the sampling rank's, and no rank keeps one that nobody took."""
    for plan in ("private", "partial"):
        drift.check_first_distribution(shared.make, shared.family.name, PLANS[plan], greedy(3))
    drift.check_first_distribution_after_a_replan(shared.make, shared.family.name)


@pytest.mark.parametrize("phase", ["queued", "computing", "decoding"])
def test_what_ends_early_leaves_nothing(shared: SharedEngine, phase: str) -> None:
    check_leaves_nothing(shared, phase)


# --- a node's arena ----------------------------------------------------------------------------------------------------------


class Node:
    """What a node does with its arena: pulled data lies in it, and what was computed is copied to it."""

    def __init__(self, run: Run) -> None:
        layout = run.bench.engine.layout("receiver")
        self.arena = Arena(layout, 8, 8, shared=True)

    def arrivals(self, data: list[Arrival]) -> list[Arrival]:
        """The same data, lying in the arena in slots of which some follow each other."""
        slots, placed = [5, 0, 1, 7, 3, 4], []
        for arrival in data:
            parts = sorted(arrival.parts, key=lambda part: part[0])
            whole, start = np.concatenate([part for _, part in parts]), parts[0][0]
            size = self.arena.layout.e_block_bytes if arrival.layer == E_LAYER else self.arena.layout.kv_block_bytes
            mine = slots[start // BLOCK : start // BLOCK + len(whole) // size]
            for slot, block in zip(mine, whole.reshape(-1, size), strict=True):
                target = (
                    self.arena.e_block(slot) if arrival.layer == E_LAYER else self.arena.kv_block(arrival.layer, slot)
                )
                target[:] = block
            made = arrival_from(self.arena, arrival.chunk, arrival.layer, start, mine)
            assert all(place_of(part) is not None for _, part in made.parts)
            placed.append(made)
        return placed

    def assert_stored(self, run: Run, name: str, slots: list[int], e_slots: list[int]) -> None:
        model, _, plan, _ = run.submitted[name]
        wanted = run.expected(name, plan)
        layout, tolerance = self.arena.layout, 1e-4
        for index, slot in enumerate(slots):
            start = index * BLOCK
            for layer in range(NUM_LAYERS):
                found = self.arena.kv_block(layer, slot).view(np.float32)
                right = kv_bytes(wanted, layer, start, start + BLOCK, layout).view(np.float32)
                assert np.abs(found - right).max() <= tolerance * max(1.0, np.abs(right).max()), (model, layer, index)
        for index, slot in enumerate(e_slots):
            found = self.arena.e_block(slot).view(np.float32)
            right = e_bytes(wanted, TAPS[1], index * BLOCK, (index + 1) * BLOCK, layout).view(np.float32)
            assert np.abs(found - right).max() <= tolerance * max(1.0, np.abs(right).max()), index


def test_pulls_land_in_an_arena_and_what_was_computed_goes_back_to_it(shared: SharedEngine) -> None:
    run = Run(shared.make, shared.family.name, chunk_tokens=16)
    node = Node(run)
    run.feed("r", node.arrivals(run.data("r", run.submit("r"))))
    run_until_idle(run.bench)
    run.assert_result("r")
    space = run.recorder.of("r").space
    blocks = TOTAL // BLOCK
    slots, e_slots = [5, 0, 1, 2, 7, 3], [4, 5, 0]
    node.arena.buffer[:] = 0
    for layer in range(NUM_LAYERS):
        store_layer(node.arena, space, layer, 0, slots)
    assert len(slots) == blocks
    run.submit("private", PRIVATE)
    run_until_idle(run.bench)
    node.assert_stored(run, "r", slots, [])
    own = run.recorder.of("private").space
    store_states(node.arena, own, TAPS[1], 0, e_slots)
    for layer in range(NUM_LAYERS):
        store_layer(node.arena, own, layer, 0, slots)
    node.assert_stored(run, "private", slots, e_slots)
    node.arena.close()


def test_stores_by_order(shared: SharedEngine) -> None:
    """As a scheduler side orders them that has no other way to the ranks."""
    run = Run(shared.make, shared.family.name)
    node = Node(run)
    description = node.arena.description
    assert description is not None
    run.submit("r", PRIVATE)
    run_until_idle(run.bench)
    scheduler = shared.runtime.scheduler
    (key,) = scheduler.entries
    slots, e_slots = (6, 2, 3, 4, 0, 1), (7, 1, 2)
    said: dict[int, str] = {}
    kv = StoreKV(1, tuple(scheduler.blocks(key)), 0, range(NUM_LAYERS), description, slots)
    scheduler.store(kv, lambda why: said.__setitem__(1, why))
    scheduler.store(StoreE(2, key, 0, TAPS[1], description, e_slots), lambda why: said.__setitem__(2, why))
    run_until_idle(run.bench)
    assert said == {1: "", 2: ""}
    node.assert_stored(run, "r", list(slots), list(e_slots))
    node.arena.close()
    gone = StoreKV(3, tuple(scheduler.blocks(key)), 0, range(NUM_LAYERS), description, slots)
    other = Arena(node.arena.layout, 1, 1, shared=True)  # its descriptor may have the number of the one that was closed
    scheduler.store(gone, lambda why: said.__setitem__(3, why))
    unknown = StoreE(4, "nobody", 0, TAPS[1], description, e_slots)
    scheduler.store(unknown, lambda why: said.__setitem__(4, why))
    run_until_idle(run.bench)
    assert "KeyError" in said[4]
    other.close()


def test_data_that_the_ranks_cannot_read_fails_its_request_only(shared: SharedEngine) -> None:
    """The arena is closed before they have mapped it: units of that load still run on every rank, and nothing of them is used."""
    run = Run(shared.make, shared.family.name)
    run.submit("bystander", PRIVATE, "other", seed=5, sampling=greedy(20))
    step_until(run.bench, lambda: len(run.recorder.of("bystander").tokens) >= 2)
    node = Node(run)
    run.feed("r", node.arrivals(run.data("r", run.submit("r"))))
    run.bench.engine._loop.take_in()
    node.arena.close()
    run_until_idle(run.bench)
    heard = run.recorder.of("r")
    assert heard.result is None
    assert "LocalTransportError" in str(heard.error)
    run.assert_result("bystander")
    run.feed("again", run.data("again", run.submit("again")))
    run_until_idle(run.bench)
    run.assert_result("again")


def test_a_layout_has_the_heads_of_all_ranks(shared: SharedEngine) -> None:
    run = Run(shared.make, shared.family.name)
    layout = run.bench.engine.layout("receiver")
    config = shared.family.models["receiver"].config
    assert [plane.kv_heads for plane in layout.planes] == [config.num_key_value_heads] * 2
    assert shared.runtime.workers.shape.num_ranks == 2
    run.submit("r", PRIVATE)
    run_until_idle(run.bench)
    keys, _ = run.recorder.of("r").space.read(0, 0, TOTAL)
    wanted = contexts(run.arch, TOTAL)["receiver"].keys[0]
    assert torch.allclose(keys[:TOTAL], wanted, atol=1e-4 * float(wanted.abs().max()))
