"""The engine contract, part four: what watching for drift needs (decode_nodes/drift.py).

The distribution of the first token as the model has it, and a run that gives way to another one at the next step.
"""

from __future__ import annotations

import oracle
import torch
from check_engine import TOLERANCE
from check_engine_steps import PARTIAL, PRIVATE, TOTAL, Run
from engine_harness import MakeEngine, contexts, greedy, prompt, request, run_until_idle
from tiny_models import VOCAB_SIZE

from kvkin.kv.errors import Cancelled
from kvkin.kv.generation import Sampling
from kvkin.kv.plan import ReusePlan


def check_first_distribution(make_engine: MakeEngine, arch: str, plan: ReusePlan, sampling: Sampling) -> None:
    """Natural log probabilities over the whole vocabulary, those of the oracle, whatever is sampled from them."""
    run = Run(make_engine, arch)
    execution = run.submit("r", plan, sampling=sampling, first_distribution=True)
    run.feed("r", run.data("r", execution))
    run_until_idle(run.bench)
    _assert_first(run, "r", plan)


def check_first_distribution_after_a_replan(make_engine: MakeEngine, arch: str) -> None:
    """A source failed half-way: the distribution is the private run's."""
    run = Run(make_engine, arch)
    data = run.data("r", run.submit("r", first_distribution=True))
    run.feed("r", data[:-1])
    run_until_idle(run.bench)
    run.bench.engine.replan("r", PRIVATE)
    run_until_idle(run.bench)
    _assert_first(run, "r", PRIVATE)


def check_first_distribution_only_on_request(make_engine: MakeEngine, arch: str) -> None:
    run = Run(make_engine, arch)
    run.submit("plain", PRIVATE)
    run.submit("order", PRIVATE, sampling=None, first_distribution=True)
    run_until_idle(run.bench)
    for name in ("plain", "order"):
        result = run.recorder.of(name).result
        assert result is not None
        assert result.first_logprobs is None


def _assert_first(run: Run, name: str, plan: ReusePlan) -> None:
    model, token_ids, _, seed = run.submitted[name]
    result = run.recorder.of(name).result
    assert result is not None, run.recorder.of(name).error
    found = result.first_logprobs
    assert found is not None
    assert (found.shape, found.dtype.name) == ((VOCAB_SIZE,), "float32")
    state = oracle.execute(run.models[model], token_ids, plan, contexts(run.arch, len(token_ids), seed))
    wanted = torch.log_softmax(state.logits, dim=-1)
    bound = TOLERANCE * max(1.0, float(wanted.abs().max()))
    assert float((torch.from_numpy(found) - wanted).abs().max()) <= bound


def check_gives_way(make_engine: MakeEngine, arch: str, steps: int) -> None:
    """A run that was cancelled ``steps`` steps after its start leaves no trace in the one that is submitted right then: it
    takes the same steps in the same order as alone, and nothing runs in between."""
    alone = Run(make_engine, arch)
    alone.feed("real", alone.data("real", alone.submit("real")))
    run_until_idle(alone.bench)

    run = Run(make_engine, arch)
    run.submit("idle", PRIVATE, seed=3, sampling=greedy(8))
    for _ in range(steps):
        assert run.bench.step(), "the run is over before it can give way"
    before = len(run.recorder.sequence)
    run.bench.engine.cancel("idle", "a request arrived")
    run.feed("real", run.data("real", run.submit("real")))
    run_until_idle(run.bench)
    assert isinstance(run.recorder.of("idle").error, Cancelled)
    after = run.recorder.sequence[before:]
    assert after == [("idle", "end"), *alone.recorder.sequence]
    assert run.recorder.of("real").units == alone.recorder.of("real").units
    assert run.recorder.of("real").tokens == alone.recorder.of("real").tokens
    run.assert_result("real", PARTIAL)
    # its id is free, and a second try is not disturbed by the first
    run.bench.engine.submit(request("idle-2", prompt(TOTAL), PRIVATE), run.recorder)
    run_until_idle(run.bench)
    assert run.recorder.of("idle-2").result is not None
