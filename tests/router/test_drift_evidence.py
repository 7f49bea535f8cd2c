"""The sequential test behind switching off: a pair that keeps its bound stays on at the promised rate, one that does not goes soon."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_world import FAMILY, LINEAGES

from kvkin.kv.plan import PlanKind
from kvkin.router.drift import DriftWatch
from kvkin.router.drift_evidence import STAKES, Evidence, above, below
from kvkin.router.drift_types import DriftBound, DriftSettings
from kvkin.transport.node_messages import DriftSample, DriftSource

IDS = {name: lineage.id for name, lineage in LINEAGES.items()}
SOURCE = DriftSource(IDS["base"], "base", PlanKind.PARTIAL, (2, 6))
MEASURED = DriftBound(by_group=(((2, 6), 0.8),))
ALL = DriftBound(0.8, 0.7, 0.5)

Draw = Callable[[random.Random], DriftSample]


def sample(first: bool = True, agreement: float = 1.0, divergence: float = 0.0) -> DriftSample:
    return DriftSample("r", IDS["full"], (SOURCE,), first, agreement, divergence, 8)


def agreeing(share: float) -> Draw:
    """A pair whose first token is the private one in so many cases."""
    return lambda dice: sample(dice.random() < share)


def on_the_edge(dice: random.Random) -> DriftSample:
    """Every figure exactly at its bound of ``ALL`` on average, as scattered as it can be."""
    first, agreement, divergence = dice.random() < 0.8, float(dice.random() < 0.7), 20.0 * (dice.random() < 0.025)
    return sample(first, agreement, divergence)


def off_after(draw: Draw, dice: random.Random, most: int, bound: DriftBound = MEASURED, rate: float = 0.01) -> float:
    """After how many checks a pair is switched off; infinite if it is still on after ``most``."""
    watching = DriftWatch(DriftSettings(min_samples=16, false_alarms=rate, bound=bound), {"f": FAMILY})
    return next((n for n in range(1, most + 1) if watching.sampled(draw(dice), 1.0)), math.inf)


# --- false alarms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.2, 0.05])
@pytest.mark.parametrize(
    ("draw", "bound"), [(agreeing(0.8), MEASURED), (on_the_edge, ALL)], ids=["one bound", "all bounds"]
)
def test_a_pair_that_just_keeps_its_bounds_is_switched_off_at_most_at_the_promised_rate(
    draw: Draw, bound: DriftBound, rate: float
) -> None:
    """The worst case that is still fine: at its bounds. Over as many checks as a year of a small cluster has."""
    dice, pairs = random.Random(7), 60
    off = sum(off_after(draw, dice, 2000, bound, rate) < math.inf for _ in range(pairs))
    # more than that has a probability of less than one in a thousand where the rate holds
    assert off <= pairs * rate + 3.1 * math.sqrt(pairs * rate * (1 - rate))


def test_a_pair_that_is_a_little_better_than_its_bound_stays_on_for_thousands_of_checks() -> None:
    dice = random.Random(3)
    assert [off_after(agreeing(0.85), dice, 4000, rate=0.05) for _ in range(25)] == [math.inf] * 25


@given(st.floats(0.01, 1.0), st.floats(0, 1), st.floats(0, 1), st.lists(st.floats(-1, 20), max_size=20))
def test_no_bet_is_favourable_where_a_share_keeps_its_bound(
    least: float, low: float, high: float, past: list[float]
) -> None:
    """Of all distributions with a mean the bet's expectation is that of the mean; capital then grows by what enters at most."""
    mean = least + (1.0 - least) * low
    before = Evidence()
    for gain in past:
        before = before.after(gain)
    # two values, 0 and one that is at least the mean, with the weights that give the mean
    value = mean + (1.0 - mean) * high
    weight = mean / value
    expected = weight * before.after(below(value, least)).value + (1 - weight) * before.after(below(0.0, least)).value
    entering = 1.0 / ((before.rounds + 1) * (before.rounds + 2))
    assert expected <= (before.value + entering) * (1 + 1e-9)


@given(st.floats(0.01, 20), st.floats(0, 1), st.floats(1, 1000))
def test_no_bet_is_favourable_where_a_divergence_keeps_its_bound(most: float, part: float, times: float) -> None:
    mean = most * part
    expected = (1 / times) * Evidence().after(above(mean * times, most)).value
    expected += (1 - 1 / times) * Evidence().after(above(0.0, most)).value
    assert expected <= 0.5 * (1 + 1e-9)


@given(st.lists(st.one_of(st.just(-1.0), st.floats(-1, 1e6)), max_size=80))
def test_capital_is_finite_and_never_lost_for_good(gains: list[float]) -> None:
    evidence = Evidence()
    for gain in gains:
        evidence = evidence.after(gain)
        assert all(0 < one < math.inf for one in evidence.capital)
    assert evidence.rounds == len(gains)
    assert len(evidence.capital) == len(STAKES)


def test_what_enters_is_one_in_sum() -> None:
    """Without a gain or a loss, capital is what has entered so far: n / (n + 1)."""
    evidence = Evidence()
    for count in range(1, 2000):
        evidence = evidence.after(0.0)
        assert evidence.value == pytest.approx(count / (count + 1))


# --- what is found ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "checks"), [(0.0, 16), (0.3, 40), (0.5, 100), (0.65, 400)])
def test_a_pair_beyond_its_bound_is_switched_off_soon(share: float, checks: int) -> None:
    """The further beyond its bound of 0.8, the sooner; as a median of 25 pairs, and not one is missed."""
    dice = random.Random(11)
    found = [off_after(agreeing(share), dice, 10 * checks) for _ in range(25)]
    assert statistics.median(found) <= checks
    assert max(found) < math.inf


def test_agreement_and_divergence_are_found_as_well() -> None:
    dice = random.Random(5)
    for draw in (
        lambda dice: sample(agreement=dice.choice((0.0, 0.25, 0.5, 1.0))),
        lambda dice: sample(divergence=dice.expovariate(1 / 1.5)),
    ):
        assert max(off_after(draw, dice, 300, ALL) for _ in range(10)) < 150


def drifting(fine: int, share: float) -> Draw:
    counted = iter(range(1_000_000))
    return lambda dice: sample(dice.random() < (0.9 if next(counted) < fine else share))


def test_a_pair_that_drifts_after_years_is_found_nearly_as_soon() -> None:
    """All that was fine before is no credit: a test over all samples would need thousands more."""
    dice = random.Random(2)
    found = [off_after(drifting(3000, 0.4), dice, 3300) - 3000 for _ in range(10)]
    assert min(found) > 0
    assert statistics.median(found) <= 80


def test_the_wait_for_the_least_number_of_checks_loses_nothing() -> None:
    """What was seen before counts: the pair is off with the first check that may switch it off."""

    def bad() -> Iterator[DriftSample]:
        while True:
            yield sample(False)

    watching = DriftWatch(DriftSettings(min_samples=16, bound=MEASURED), {"f": FAMILY})
    switched = [bool(watching.sampled(one, 1.0)) for one, _ in zip(bad(), range(16), strict=False)]
    assert switched == [False] * 15 + [True]
