"""Bootstrap intervals: what they cover on data whose truth is known, what pairing is worth, and what cannot be said."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvkin.tools.statistics import Interval, bootstrap_mean, bootstrap_median, isotonic, paired_bootstrap

SCORES = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=30)


def _same(left: Interval, right: Interval) -> bool:
    return np.array_equal(
        [left.estimate, left.low, left.high, left.n], [right.estimate, right.low, right.high, right.n], equal_nan=True
    )


@pytest.mark.parametrize("statistic", ["difference", "ratio of means"])
def test_intervals_cover_the_truth_about_as_often_as_they_say(statistic: str) -> None:
    rng = np.random.default_rng(5)
    truth = {"difference": -0.1, "ratio of means": 0.8}[statistic]
    covered = 0
    for trial in range(300):
        hard = rng.uniform(0, 0.3, 60)  # of both arms: a case's own difficulty
        a = 0.4 + hard - 0.15 + rng.normal(0, 0.1, 60)
        b = 0.5 + hard - 0.15 + rng.normal(0, 0.1, 60)
        found = paired_bootstrap(a, b, seed=trial, samples=1000, statistic=statistic)  # type: ignore[arg-type]
        covered += found.low <= truth <= found.high
    # 285 are expected, with a standard deviation of 4; percentiles of 60 cases cover a little less than they say
    assert 270 <= covered <= 296


@pytest.mark.parametrize("statistic", ["difference", "ratio of means"])
def test_clusters_keep_the_promise_where_cases_share_a_context(statistic: str) -> None:
    """Four questions a context, whose difference is mostly the context's: single cases as units promise far too much."""
    rng = np.random.default_rng(8)
    contexts = [f"context {number // 4}" for number in range(200)]
    truth = {"difference": -0.1, "ratio of means": 0.8}[statistic]
    covered = {"clusters": 0, "cases": 0}
    for trial in range(300):
        shared = np.repeat(rng.normal(0, 0.1, 50), 4)
        a, b = 0.4 + shared + rng.normal(0, 0.02, 200), 0.5 + rng.normal(0, 0.02, 200)
        for unit, clusters in (("clusters", contexts), ("cases", None)):
            found = paired_bootstrap(a, b, seed=trial, samples=600, statistic=statistic, clusters=clusters)  # type: ignore[arg-type]
            covered[unit] += found.low <= truth <= found.high
            assert found.n == 200
    assert 270 <= covered["clusters"] <= 297
    assert covered["cases"] < 240


def test_clusters_of_one_case_are_cases() -> None:
    a, b = np.linspace(0, 1, 30), np.linspace(1, 0.5, 30)
    for statistic in ("difference", "ratio of means"):
        plain = paired_bootstrap(a, b, seed=2, samples=300, statistic=statistic)  # type: ignore[arg-type]
        assert paired_bootstrap(a, b, seed=2, samples=300, statistic=statistic, clusters=range(30)) == plain  # type: ignore[arg-type]
    one = bootstrap_mean(a, seed=2, clusters=["the same"] * 30)
    assert one.estimate == pytest.approx(0.5)
    assert math.isnan(one.low)  # nothing to resample
    with pytest.raises(ValueError, match="clusters: 2 for 30 scores"):
        bootstrap_mean(a, seed=0, clusters=["a", "b"])


def test_median_interval_covers_the_truth() -> None:
    rng = np.random.default_rng(6)
    covered = 0
    for trial in range(200):
        found = bootstrap_median(rng.lognormal(0, 1, 50), seed=trial, samples=500)
        covered += found.low <= 1.0 <= found.high
    assert 178 <= covered <= 199


def test_pairing_narrows_the_interval() -> None:
    rng = np.random.default_rng(7)
    hard = rng.uniform(0, 1, 100)
    a, b = hard + rng.normal(0, 0.05, 100), hard + 0.02 + rng.normal(0, 0.05, 100)
    paired = paired_bootstrap(a, b, seed=0)
    shuffled = paired_bootstrap(a, rng.permutation(b), seed=0)
    assert paired.estimate == pytest.approx(shuffled.estimate)
    assert paired.high - paired.low < 0.3 * (shuffled.high - shuffled.low)
    assert paired.excludes(0.0)
    assert not shuffled.excludes(0.0)


@example([(0.0, 0.0), (1.0, 2e-311)], "ratio of means")
@given(SCORES, st.sampled_from(["difference", "ratio of means"]))
def test_estimates_are_the_plain_ones_and_lie_in_their_interval(
    scores: list[tuple[float, float]], statistic: str
) -> None:
    a, b = [one for one, _ in scores], [other for _, other in scores]
    found = paired_bootstrap(a, b, seed=1, samples=200, statistic=statistic)  # type: ignore[arg-type]
    mean_a, mean_b = math.fsum(a) / len(a), math.fsum(b) / len(b)
    assert found.n == len(scores)
    if statistic == "difference":
        assert found.estimate == pytest.approx(mean_a - mean_b, abs=1e-9)
        differences = [one - other for one, other in scores]
        assert min(differences) - 1e-9 <= found.low <= found.high <= max(differences) + 1e-9
    elif np.mean(b) == 0:
        assert math.isnan(found.estimate)
    else:
        assert found.estimate == pytest.approx(mean_a / mean_b, rel=1e-6)
        assert found.low <= found.high


@given(SCORES)
def test_swapping_the_arms_mirrors_the_difference(scores: list[tuple[float, float]]) -> None:
    a, b = [one for one, _ in scores], [other for _, other in scores]
    there, back = paired_bootstrap(a, b, seed=3, samples=400), paired_bootstrap(b, a, seed=3, samples=400)
    assert there.estimate == pytest.approx(-back.estimate)
    # the nearest ranks of 400 draws are the 11th from either end
    assert there.low == pytest.approx(-back.high, abs=1e-9)
    assert there.high == pytest.approx(-back.low, abs=1e-9)


def test_an_arm_against_itself_is_no_different() -> None:
    scores = list(np.random.default_rng(0).uniform(0, 1, 40))
    assert paired_bootstrap(scores, scores, seed=0) == Interval(0.0, 0.0, 0.0, 40)
    ratio = paired_bootstrap(scores, scores, seed=0, statistic="ratio of means")
    assert (ratio.estimate, ratio.low, ratio.high) == (1.0, 1.0, 1.0)


def test_many_cases_are_drawn_in_pieces() -> None:
    scores = np.random.default_rng(0).normal(0.5, 0.1, 5000)
    found = bootstrap_mean(scores, seed=0, samples=1000)  # 5,000,000 indices: three pieces
    assert found.high - found.low == pytest.approx(2 * 1.96 * 0.1 / math.sqrt(5000), rel=0.1)


def test_same_seed_same_interval() -> None:
    scores = list(np.random.default_rng(0).uniform(0, 1, 40))
    assert bootstrap_mean(scores, seed=4) == bootstrap_mean(scores, seed=4)
    assert bootstrap_mean(scores, seed=4) != bootstrap_mean(scores, seed=5)
    assert bootstrap_median(scores, seed=4) == bootstrap_median(scores, seed=4)


def test_what_cannot_be_said_is_not_a_number() -> None:
    nothing = Interval(math.nan, math.nan, math.nan, 0)
    assert _same(paired_bootstrap([], [], seed=0), nothing)
    assert _same(paired_bootstrap([], [], seed=0, statistic="ratio of means"), nothing)
    assert _same(bootstrap_mean([], seed=0), nothing)
    assert _same(bootstrap_median([], seed=0), nothing)
    assert _same(paired_bootstrap([0.5], [0.25], seed=0), Interval(0.25, math.nan, math.nan, 1))
    one = paired_bootstrap([0.5], [0.25], seed=0, statistic="ratio of means")
    assert _same(one, Interval(2.0, math.nan, math.nan, 1))
    assert _same(bootstrap_median([3.0], seed=0), Interval(3.0, math.nan, math.nan, 1))
    assert math.isnan(paired_bootstrap([0.5, 0.1], [0.0, 0.0], seed=0, statistic="ratio of means").estimate)
    # excludes() of an interval that is not known
    assert not Interval(0.5, math.nan, math.nan, 1).excludes(0.0)


def test_a_mean_that_may_be_zero_has_a_ratio_without_an_upper_bound() -> None:
    found = paired_bootstrap([1.0, 0.0, 1.0], [0.0, 0.0, 0.1], seed=0, statistic="ratio of means")
    assert found.estimate == pytest.approx(20)
    assert found.high == math.inf
    assert found.as_dict()["high"] is None


def test_as_json_and_as_text() -> None:
    known = Interval(0.12345678, -0.5, 0.5, 9)
    assert json.loads(json.dumps(known.as_dict())) == {"estimate": 0.123457, "low": -0.5, "high": 0.5, "n": 9}
    assert str(known) == "0.123 [-0.500, 0.500] (n=9)"
    assert Interval(math.nan, math.nan, math.nan, 0).as_dict() == {"estimate": None, "low": None, "high": None, "n": 0}
    assert str(Interval(math.nan, math.nan, math.nan, 0)) == "- (n=0)"
    assert str(Interval(0.5, math.nan, math.nan, 1)) == "0.500 (n=1)"


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="2 scores against 1"):
        paired_bootstrap([1, 2], [1], seed=0)
    with pytest.raises(ValueError, match=r"no statistic 'median' \(allowed: difference, ratio of means\)"):
        paired_bootstrap([1, 2], [1, 2], seed=0, statistic="median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="finite"):
        bootstrap_mean([1.0, math.nan], seed=0)
    with pytest.raises(ValueError, match="flat"):
        bootstrap_mean([[1.0]], seed=0)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="0 resamples"):
        bootstrap_mean([1.0, 2.0], seed=0, samples=0)


# --- isotonic ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 6), st.floats(-1, 1)), min_size=1, max_size=12))
def test_isotonic_rises_and_is_the_nearest_that_does(points: list[tuple[int, float]]) -> None:
    x, y = np.array([one for one, _ in points], dtype=float), np.array([one for _, one in points])
    fitted = isotonic(x, y)
    order = np.argsort(x, kind="stable")
    assert (np.diff(fitted[order]) >= -1e-9).all()
    assert all(len({round(value, 9) for value in fitted[x == place]}) == 1 for place in set(x))
    # of a projection onto a convex cone: the rest is orthogonal to the fit, and no rising function lies on its side
    assert (y - fitted) @ fitted == pytest.approx(0, abs=1e-6)
    for place in set(x):
        assert (y - fitted) @ (x >= place).astype(float) <= 1e-6


def test_isotonic_keeps_what_rises_and_pools_what_falls() -> None:
    assert isotonic([1, 2, 3], [0.1, 0.2, 0.3]) == pytest.approx([0.1, 0.2, 0.3])
    assert isotonic([3, 1, 2], [0.0, 0.0, 0.6]) == pytest.approx([0.3, 0.0, 0.3])
    assert isotonic([1, 1], [0.0, 1.0]) == pytest.approx([0.5, 0.5])
    assert len(isotonic([], [])) == 0
    with pytest.raises(ValueError, match="2 places for 1 values"):
        isotonic([1, 2], [1])
