"""Means, medians and paired comparisons of scores with 95 % bootstrap intervals (Efron and Tibshirani, 1993: percentiles).

Used by ``kvkin profile`` and ``kvkin evaluate``. Pure: every function is a function of its arguments, seed included. Arms of a
comparison are measured on the same cases, so cases are what is resampled: a case that is hard for both arms then widens
neither the difference nor the ratio. Cases that share something (several questions about one context) are not independent:
where ``clusters`` names what they share, whole clusters are resampled.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Statistic = Literal["difference", "ratio of means"]
Floats = NDArray[np.float64]
Clusters = Sequence[Hashable]  # a name for each case; cases of one name are resampled together

LOW, HIGH = 2.5, 97.5  # percentiles of a 95 % interval
_CHUNK_DRAWS = 1 << 21  # indices drawn at once: 16 MB


@dataclass(frozen=True)
class Interval:
    """An estimate from ``n`` cases with its 95 % interval. NaN is what cannot be said: everything at n = 0, the bounds at n = 1."""

    estimate: float
    low: float
    high: float
    n: int

    def as_dict(self) -> dict[str, float | int | None]:
        """JSON values, rounded to 6 digits; null for what cannot be said or is not finite."""
        return {
            "estimate": _json(self.estimate),
            "low": _json(self.low),
            "high": _json(self.high),
            "n": self.n,
        }

    def excludes(self, value: float) -> bool:
        """Whether ``value`` lies outside: a difference whose interval excludes 0 is there."""
        return value < self.low or value > self.high

    def __str__(self) -> str:
        if math.isnan(self.estimate):
            return f"- (n={self.n})"
        bounds = "" if math.isnan(self.low) else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{self.estimate:.3f}{bounds} (n={self.n})"


def paired_bootstrap(
    a: Sequence[float] | Floats,
    b: Sequence[float] | Floats,
    *,
    seed: int,
    samples: int = 10_000,
    statistic: Statistic = "difference",
    clusters: Clusters | None = None,
) -> Interval:
    """mean(a) - mean(b), or mean(a) / mean(b), of scores ``a`` and ``b`` of the same cases, by resampling the cases.

    A ratio to a mean of 0 cannot be said; a resample in which only that of ``b`` is 0 counts as infinite. Raises ValueError if the
    lengths differ or the statistic is unknown.
    """
    first, second = _scores(a), _scores(b)
    if len(first) != len(second):
        raise ValueError(f"{len(first)} scores against {len(second)}: not the same cases")
    if statistic == "difference":
        return bootstrap_mean(first - second, seed=seed, samples=samples, clusters=clusters)
    if statistic != "ratio of means":
        raise ValueError(f"no statistic {statistic!r} (allowed: difference, ratio of means)")
    if len(first) == 0 or not second.mean():
        return Interval(math.nan, math.nan, math.nan, len(first))
    # both have the same cases in every resample, so the ratio of sums is that of means
    above, below, _ = _resampled_sums((first, second), clusters, seed, samples)
    with np.errstate(all="ignore"):  # infinite where the mean of ``b`` is 0 or next to it, no number where both are 0
        estimate, ratios = float(first.mean() / second.mean()), above / below
    return _interval(estimate, ratios[~np.isnan(ratios)], len(first), _number(first, clusters))


def bootstrap_mean(
    values: Sequence[float] | Floats, *, seed: int, samples: int = 10_000, clusters: Clusters | None = None
) -> Interval:
    """The mean of ``values`` with its interval."""
    scores = _scores(values)
    if len(scores) == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    sums, sizes = _resampled_sums((scores,), clusters, seed, samples)
    return _interval(float(scores.mean()), sums / sizes, len(scores), _number(scores, clusters))


def bootstrap_median(values: Sequence[float] | Floats, *, seed: int, samples: int = 10_000) -> Interval:
    """The median of ``values`` with its interval: for times, whose mean a busy moment spoils."""
    scores = _scores(values)
    if len(scores) == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    drawn = np.concatenate([np.median(scores[chosen], axis=1) for chosen in _resamples(len(scores), seed, samples)])
    return _interval(float(np.median(scores)), drawn, len(scores), len(scores))


def isotonic(x: Sequence[float] | Floats, y: Sequence[float] | Floats) -> Floats:
    """The values nearest to ``y`` (least squares) that never fall as ``x`` rises: pool adjacent violators (Ayer et al., 1955).

    In the order of the arguments; equal ``x`` get one value. Raises ValueError if the lengths differ.
    """
    places, values = _scores(x), _scores(y)
    if len(places) != len(values):
        raise ValueError(f"{len(places)} places for {len(values)} values")
    _, owners = np.unique(places, return_inverse=True)
    pools: list[tuple[float, int, int]] = []  # sum, values, distinct places
    for total, count in zip(np.bincount(owners, weights=values), np.bincount(owners), strict=True):
        pool = (float(total), int(count), 1)
        while pools and pools[-1][0] * pool[1] > pool[0] * pools[-1][1]:  # the mean before is higher
            before = pools.pop()
            pool = (before[0] + pool[0], before[1] + pool[1], before[2] + pool[2])
        pools.append(pool)
    fitted = np.concatenate([np.full(width, total / count) for total, count, width in pools]) if pools else values
    return fitted[owners] if pools else values


def _scores(values: Sequence[float] | Floats) -> Floats:
    scores = np.asarray(values, dtype=np.float64)
    if scores.ndim != 1 or not np.isfinite(scores).all():
        raise ValueError("scores must be a flat sequence of finite numbers")
    return scores


def _resampled_sums(
    columns: Sequence[Floats], clusters: Clusters | None, seed: int, samples: int
) -> tuple[Floats, ...]:
    """Sums of each column over resamples of the clusters, and how many cases each resample has; each (samples,)."""
    owners = np.arange(len(columns[0])) if clusters is None else _owners(clusters, len(columns[0]))
    totals = [np.bincount(owners, weights=column) for column in (*columns, np.ones(len(owners)))]
    drawn = [[total[chosen].sum(1) for total in totals] for chosen in _resamples(len(totals[0]), seed, samples)]
    return tuple(np.concatenate(parts) for parts in zip(*drawn, strict=True))


def _owners(clusters: Clusters, n: int) -> NDArray[np.int64]:
    """The number of each case's cluster, by first appearance."""
    if len(clusters) != n:
        raise ValueError(f"clusters: {len(clusters)} for {n} scores")
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(cluster, len(numbers)) for cluster in clusters], dtype=np.int64)


def _number(scores: Floats, clusters: Clusters | None) -> int:
    """What there is to resample."""
    return len(scores) if clusters is None else len(set(clusters))


def _resamples(n: int, seed: int, samples: int) -> Iterator[NDArray[np.int64]]:
    """Indices of ``samples`` resamples of ``n`` cases, some rows at a time, each (rows, n)."""
    if samples < 1:
        raise ValueError(f"{samples} resamples (allowed: 1 or more)")
    rng = np.random.default_rng(seed)
    rows = max(1, _CHUNK_DRAWS // n)
    for start in range(0, samples, rows):
        yield rng.integers(0, n, size=(min(rows, samples - start), n))


def _interval(estimate: float, drawn: Floats, n: int, units: int) -> Interval:
    """``n`` cases, of which ``units`` were resampled as a whole each."""
    if units < 2 or len(drawn) == 0:
        return Interval(estimate, math.nan, math.nan, n)
    # nearest ranks: interpolating between a finite and an infinite ratio would give no number
    low, high = np.percentile(drawn, (LOW, HIGH), method="nearest")
    return Interval(estimate, float(low), float(high), n)


def _json(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
