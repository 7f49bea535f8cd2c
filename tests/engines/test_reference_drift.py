"""The reference engine and what watching for drift needs: the fourth part of the engine contract."""

from __future__ import annotations

import check_engine_drift as drift
import pytest
from check_engine_steps import CONTEXT, PARTIAL, PRIVATE, TOTAL
from engine_harness import computed, exact, greedy, plan_of, token_wise
from reference_bench import make_reference
from tiny_models import ARCHITECTURES

from kvkin.kv.generation import Sampling

REST = computed(CONTEXT, TOTAL)
PLANS = {
    "private": PRIVATE,
    "partial": PARTIAL,
    "full reuse": plan_of(exact(0, CONTEXT, "sender"), REST),
    "token-wise": plan_of(token_wise(0, CONTEXT, [0, 7, 39], "sender"), REST),
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("plan", PLANS)
def test_first_distribution(arch: str, plan: str) -> None:
    drift.check_first_distribution(make_reference, arch, PLANS[plan], greedy(3))


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=1.7, top_k=2, top_p=0.3, seed=1, max_tokens=2), Sampling(max_tokens=1, logprobs=1)],
    ids=["filtered", "one token"],
)
def test_first_distribution_is_the_models_own(sampling: Sampling) -> None:
    drift.check_first_distribution(make_reference, "llama", PARTIAL, sampling)


def test_first_distribution_after_a_replan() -> None:
    drift.check_first_distribution_after_a_replan(make_reference, "llama")


def test_first_distribution_only_on_request() -> None:
    drift.check_first_distribution_only_on_request(make_reference, "llama")


@pytest.mark.parametrize("steps", [0, 1, 9, 36])
def test_gives_way(steps: int) -> None:
    """Before its first step, early, in the middle of its prefill (35 units), between its tokens."""
    drift.check_gives_way(make_reference, "llama", steps)
