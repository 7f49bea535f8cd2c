"""Checks of one shared vLLM engine that hold on any family and on any number of ranks."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import check_engine_steps as steps
from check_engine_steps import CONTEXT, PARTIAL, TOTAL, Run
from engine_harness import computed, exact, greedy, partial, plan_of, run_until_idle, token_wise
from vllm_bench import SharedEngine

from kvkin.kv.errors import Cancelled
from kvkin.kv.plan import ReusePlan

_REST = computed(CONTEXT, TOTAL)
ONE_OF_EACH = {
    "decode": plan_of(computed(0, 9)),
    "partial": PARTIAL,
    "lowest": plan_of(partial(0, CONTEXT, (0, 2), "sender"), _REST),
    "rows": plan_of(token_wise(0, CONTEXT, [3, 4, 30], "sender"), _REST),
    "exact": plan_of(exact(0, CONTEXT, "twin"), _REST),
}
"""A short prompt, and a plan of each kind that needs no other model than the family's sender and twin."""


def check_batch(shared: SharedEngine, plans: Mapping[str, ReusePlan], max_tokens: int) -> None:
    """Requests with different plans at once; each equals its plan's oracle."""
    run = Run(shared.make, shared.family.name)
    for seed, (name, plan) in enumerate(plans.items()):
        run.feed(name, run.data(name, run.submit(name, plan, seed=seed, sampling=greedy(max_tokens))))
    run_until_idle(run.bench)
    for name in plans:
        run.assert_result(name)


def check_batch_in_pieces(shared: SharedEngine, plans: Mapping[str, ReusePlan], models: Sequence[str]) -> None:
    """The same with a model for each, and data that comes in pieces and in any order between the steps."""
    run = Run(shared.make, shared.family.name)
    source = random.Random(5)
    waiting: list[tuple[str, Any]] = []
    for seed, (name, plan) in enumerate(plans.items()):
        execution = run.submit(name, plan, models[seed], seed=seed, sampling=greedy(12))
        waiting += [(name, arrival) for arrival in run.data(name, execution)]
    source.shuffle(waiting)
    while waiting:
        for name, arrival in [waiting.pop() for _ in range(min(5, len(waiting)))]:
            run.feed(name, [arrival])
        run.bench.step()
    run_until_idle(run.bench)
    for name in plans:
        run.assert_result(name)


def check_leaves_nothing(shared: SharedEngine, phase: str) -> None:
    """A request that is cancelled in ``phase`` leaves no block, however late its data."""
    shared.settle()
    free = shared.free_blocks()
    run = Run(shared.make, shared.family.name)
    data = steps._bring_to(run, "r", phase)
    if phase != "queued":
        assert shared.free_blocks() < free
    run.bench.engine.cancel("r", "nobody listens")
    run_until_idle(run.bench)
    run.feed("r", data)
    run_until_idle(run.bench)
    assert isinstance(run.recorder.of("r").error, Cancelled)
    assert shared.free_blocks() == free
    assert not shared.runtime.scheduler.entries
    assert not shared.served()
