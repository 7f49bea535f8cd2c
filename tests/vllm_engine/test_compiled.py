"""vLLM with its default compile settings: taps in the graph, units on eager modules next to it, and no stale graph of other taps."""

from __future__ import annotations

from pathlib import Path

import pytest
from check_engine import GEOMETRIES, Tally, check_shape, run_tiny
from check_engine_steps import CONTEXT, TOTAL, Run
from engine_harness import computed, greedy, partial, plan_of, run_until_idle
from vllm_bench import OPTIONS, SharedEngine, plain_family

from kvkin.engines.vllm.engine import VllmEngine, VllmModel

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_compiled(tmp_path: Path) -> None:
    family = plain_family("llama", tmp_path)
    shared = SharedEngine(family, enforce_eager=False)
    try:
        for shape in ("private", "partial_middle", "token_wise_some", "agent_turn"):
            check_shape(shared.make, family.name, shape, GEOMETRIES[:2])
        tally = Tally()
        run_tiny(shared.make, family.name, "exact_reuse", GEOMETRIES[2], tally, 0)
        tally.close()
        run = Run(shared.make, family.name)
        plans = {
            "private": plan_of(computed(0, TOTAL)),
            "partial": plan_of(partial(0, CONTEXT, (2, 4), "sender"), computed(CONTEXT, TOTAL)),
            "lowest": plan_of(partial(0, CONTEXT, (0, 2), "other"), computed(CONTEXT, TOTAL)),
        }
        for seed, (name, plan) in enumerate(plans.items()):
            run.feed(name, run.data(name, run.submit(name, plan, seed=seed, sampling=greedy(10))))
        run_until_idle(run.bench)
        for name in plans:
            run.assert_result(name)
    finally:
        shared.close()
    _assert_taps_of_another_engine(family.checkpoint, family.models["receiver"])


def _assert_taps_of_another_engine(checkpoint: Path, model: object) -> None:
    """Same model, same settings, other transition layers: vLLM's compile cache must not answer with the graph from before."""
    import oracle
    from engine_harness import Recorder, prompt, request

    engine = VllmEngine(
        {"receiver": VllmModel(checkpoint, None, None, frozenset())},
        block_size=8,
        chunk_tokens=64,
        transition_layers=(3,),
        options=OPTIONS | {"enforce_eager": False},
        start=False,
    )
    try:
        recorder = Recorder()
        tokens = prompt(TOTAL)
        engine.submit(request("r", tokens, plan_of(computed(0, TOTAL)), taps=(3,)), recorder)
        while engine.step():
            pass
        space = recorder.of("r").space
        assert space.has_e(3, 0, TOTAL)
        wanted = oracle.private(model, tokens).hidden[3]
        assert float((space.states(3, 0, TOTAL) - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())
    finally:
        engine.close()
