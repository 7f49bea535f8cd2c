"""Choosing tokens, against an independent numpy implementation of temperature, top-k and top-p."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvkin.engines.sampling import Sampler
from kvkin.kv.generation import Sampling

VOCAB = 12
# a grid, so that two logits are equal in single precision exactly if they are in double
LOGITS = st.lists(st.integers(-64, 64).map(lambda value: value / 8), min_size=VOCAB, max_size=VOCAB, unique=True)


def probabilities(logits: NDArray[np.float64], sampling: Sampling) -> NDArray[np.float64]:
    """What each token's chance is, by definition, in double precision."""
    scaled = logits / sampling.temperature
    chance = np.exp(scaled - scaled.max())
    order = np.argsort(-logits, kind="stable")
    if sampling.top_k:
        chance[order[sampling.top_k :]] = 0
    chance /= chance.sum()
    total = 0.0
    for token in order:
        # the smallest set of most likely tokens that reaches top_p
        if total >= sampling.top_p:
            chance[token] = 0
        else:
            total += chance[token]
    return np.asarray(chance / chance.sum())


def draw(logits: list[float], sampling: Sampling, count: int) -> NDArray[np.int64]:
    sampler = Sampler(sampling)
    tensor = torch.tensor(logits, dtype=torch.float32)
    return np.array([sampler.choose(tensor)[0] for _ in range(count)])


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.5, "top_k": 5, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 100},
        {"temperature": 0.7, "top_p": 0.05},
    ],
    ids=str,
)
def test_frequencies(options: dict[str, float]) -> None:
    """3,000 draws: every token's share within five standard deviations (and three draws) of its chance, impossible ones never."""
    logits = np.random.default_rng(3).normal(0, 1.5, VOCAB).astype(np.float32)
    sampling = Sampling(**options, seed=11)  # type: ignore[arg-type]
    wanted = probabilities(logits.astype(np.float64), sampling)
    shares = np.bincount(draw(logits.tolist(), sampling, 3000), minlength=VOCAB) / 3000
    assert (shares[wanted == 0] == 0).all()
    assert (np.abs(shares - wanted) <= 5 * np.sqrt(wanted * (1 - wanted) / 3000) + 3 / 3000).all()


@settings(max_examples=60)
@given(LOGITS, st.floats(0.1, 3), st.integers(0, VOCAB + 3), st.floats(0.05, 1), st.integers(0, 2**63))
def test_only_possible_tokens_are_drawn(
    logits: list[float], temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    wanted = probabilities(np.array(logits, dtype=np.float64), sampling)
    # at the very edge of the set, single and double precision may differ
    edge = np.cumsum(np.sort(wanted)[::-1])
    if np.abs(edge - top_p).min() < 1e-5:
        return
    assert (wanted[draw(logits, sampling, 20)] > 0).all()


@given(LOGITS)
def test_greedy_is_the_most_likely(logits: list[float]) -> None:
    best = int(np.argmax(logits))
    for sampling in (Sampling(), Sampling(top_k=3, top_p=0.2), Sampling(temperature=1.0, top_k=1, seed=1)):
        assert set(draw(logits, sampling, 5)) == {best}
    assert set(draw(logits, Sampling(temperature=1.0, top_p=1e-9, seed=1), 5)) == {best}


def test_a_seed_repeats_and_another_does_not() -> None:
    logits = [0.0] * VOCAB
    runs = [draw(logits, Sampling(temperature=1.0, seed=seed), 40).tolist() for seed in (7, 7, 8)]
    assert runs[0] == runs[1] != runs[2]
    free = [draw(logits, Sampling(temperature=1.0), 40).tolist() for _ in range(2)]
    assert free[0] != free[1]


def test_samplers_do_not_share_a_generator() -> None:
    """One request's draws do not depend on what others draw between them, nor on torch's global seed."""
    logits = torch.zeros(VOCAB)
    alone = draw([0.0] * VOCAB, Sampling(temperature=1.0, seed=5), 20).tolist()
    mine, other = Sampler(Sampling(temperature=1.0, seed=5)), Sampler(Sampling(temperature=1.0, seed=6))
    mixed = []
    for index in range(20):
        torch.manual_seed(index)
        other.choose(logits)
        mixed.append(mine.choose(logits)[0])
    assert mixed == alone


@given(LOGITS, st.integers(0, VOCAB + 4), st.sampled_from([0.0, 0.7]))
def test_log_probabilities_are_the_models_own(logits: list[float], count: int, temperature: float) -> None:
    """Before temperature and filters: what is likely does not change with how one chooses."""
    sampler = Sampler(Sampling(temperature=temperature, top_k=2, logprobs=count, seed=3))
    token, told = sampler.choose(torch.tensor(logits, dtype=torch.float32))
    single = np.array(logits, dtype=np.float32).astype(np.float64)
    wanted = single - single.max() - math.log(np.exp(single - single.max()).sum())
    assert told is not None
    assert told.token_id == token
    assert told.logprob == pytest.approx(wanted[token], abs=1e-5)
    best = np.argsort(-single, kind="stable")[:count]
    assert [each for each, _ in told.top] == best.tolist()
    assert [value for _, value in told.top] == pytest.approx(wanted[best].tolist(), abs=1e-5)


def test_no_log_probabilities_unless_asked_for() -> None:
    assert Sampler(Sampling()).choose(torch.zeros(VOCAB))[1] is None


def test_impossible_tokens_stay_impossible() -> None:
    logits = [float("-inf")] * (VOCAB - 2) + [1.0, 0.0]
    assert set(draw(logits, Sampling(temperature=5.0, seed=1), 60)) == {VOCAB - 2, VOCAB - 1}
