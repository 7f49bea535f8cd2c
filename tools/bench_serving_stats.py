"""Figures of a serving benchmark: percentiles, goodput, and the rate at which an arm's p95 TTFT crosses the objective. Pure.

Latencies are those of finished requests. A request that did not finish never met an objective: it counts against goodput, and as
an endless TTFT where the p95 decides on throughput, so an arm cannot look fast by failing.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from kvkin.tools.load_records import SENT, Outcome, RequestRecord
from kvkin.tools.report_view import PHASES

RESAMPLES = 2000


class Spread(msgspec.Struct, frozen=True):
    """Of ``count`` values in milliseconds."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float


class Counts(msgspec.Struct, frozen=True):
    """How the planned requests ended: ``planned`` is the sum of all but ``sent``, which is the sum of those that were sent."""

    planned: int
    sent: int
    finished: int
    failed: dict[str, int]
    timed_out: int
    cut_off: int
    not_sent: int
    abandoned: int
    never_due: int


class GroupFigures(msgspec.Struct, frozen=True):
    """Finished requests of one plan kind or model."""

    finished: int
    ttft_ms: Spread | None
    tbt_ms: Spread | None
    e2e_ms: Spread | None
    tokens_reused: int
    bytes_pulled: int
    fallbacks: int


class Late(msgspec.Struct, frozen=True):
    """Requests that the generator itself sent more than ``bound_ms`` too late, of all that were sent."""

    bound_ms: float
    count: int
    max_ms: float


class Objective(msgspec.Struct, frozen=True):
    """What a request must meet: time to first token, and mean time between tokens. None: no bound."""

    ttft_ms: float | None = None
    tbt_ms: float | None = None

    def met(self, record: RequestRecord) -> bool:
        if record.outcome is not Outcome.FINISHED or record.ttft_ms is None:
            return False
        in_time = self.ttft_ms is None or record.ttft_ms <= self.ttft_ms
        return in_time and (self.tbt_ms is None or record.mean_gap_ms <= self.tbt_ms)


class PointFigures(msgspec.Struct, frozen=True):
    """One (arm, rate, repeat). Everything but ``warm_up_counts``, ``late`` and ``offered_per_s`` is of measured requests only.

    ``span_s`` runs from the first measured arrival to the last measured end; ``achieved_per_s`` (finished) and ``goodput_per_s``
    (finished within the objective) are per second of it. ``ttft_p95_all_ms`` counts requests that did not finish as
    endless; None: endless. ``loss_mean`` is of the ``loss_known`` requests whose plan has a profiled loss (exact: 0).
    """

    counts: Counts
    warm_up_counts: Counts
    late: Late
    horizon_s: float
    span_s: float
    offered_per_s: float
    achieved_per_s: float
    goodput_per_s: float
    objective_met: int
    ttft_ms: Spread | None
    ttft_p95_all_ms: float | None
    tbt_ms: Spread | None
    e2e_ms: Spread | None
    by_kind: dict[str, GroupFigures]
    by_model: dict[str, GroupFigures]
    by_quality: dict[str, int]
    loss_known: int
    loss_mean: float | None
    phases_ms: dict[str, float]
    fallbacks: int
    bytes_pulled: int
    tokens_reused: int
    prompt_tokens: int


def quantile(values: Iterable[float], q: float) -> float:
    """Linear between neighbours, as numpy's default; endless values are allowed and sort last. NaN for no value."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    share = place - below
    if share == 0 or ordered[below] == ordered[above]:
        return ordered[below]
    # not low + share * (high - low): that may leave [low, high] by a rounding
    return ordered[below] * (1 - share) + ordered[above] * share


def spread(values: Sequence[float]) -> Spread | None:
    """None for no value."""
    if not values:
        return None
    p50, p95, p99 = (quantile(values, q) for q in (0.5, 0.95, 0.99))
    return Spread(len(values), math.fsum(values) / len(values), p50, p95, p99)


def count(records: Sequence[RequestRecord]) -> Counts:
    by_outcome = Counter(record.outcome for record in records)
    return Counts(
        planned=len(records),
        sent=sum(by_outcome[outcome] for outcome in SENT),
        finished=by_outcome[Outcome.FINISHED],
        failed=dict(sorted(Counter(one.code for one in records if one.outcome is Outcome.FAILED).items())),
        timed_out=by_outcome[Outcome.TIMED_OUT],
        cut_off=by_outcome[Outcome.CUT_OFF],
        not_sent=by_outcome[Outcome.NOT_SENT],
        abandoned=by_outcome[Outcome.ABANDONED],
        never_due=by_outcome[Outcome.NEVER_DUE],
    )


def point_figures(
    records: Sequence[RequestRecord], horizon_s: float, objective: Objective, late_bound_ms: float
) -> PointFigures:
    """All figures of one point. ``horizon_s`` is until when requests arrived."""
    measured = [record for record in records if not record.warm_up]
    finished = [record for record in measured if record.outcome is Outcome.FINISHED]
    whole = _group(finished)
    span_s = _span_s(measured)
    met = sum(objective.met(record) for record in measured)
    p95 = quantile(ttft_all_ms(measured), 0.95)
    losses = [record.loss for record in finished if record.loss is not None]
    lateness_ms = [record.late_s * 1e3 for record in records if record.outcome in SENT]
    return PointFigures(
        counts=count(measured),
        warm_up_counts=count([record for record in records if record.warm_up]),
        late=Late(late_bound_ms, sum(one > late_bound_ms for one in lateness_ms), max(lateness_ms, default=0.0)),
        horizon_s=horizon_s,
        span_s=span_s,
        offered_per_s=_per_second(len(records), horizon_s),
        achieved_per_s=_per_second(len(finished), span_s),
        goodput_per_s=_per_second(met, span_s),
        objective_met=met,
        ttft_ms=whole.ttft_ms,
        ttft_p95_all_ms=p95 if math.isfinite(p95) else None,
        tbt_ms=whole.tbt_ms,
        e2e_ms=whole.e2e_ms,
        by_kind=grouped(finished, lambda record: record.kind),
        by_model=grouped(finished, lambda record: record.model),
        by_quality=dict(sorted(Counter(record.quality for record in finished).items())),
        loss_known=len(losses),
        loss_mean=math.fsum(losses) / len(losses) if losses else None,
        phases_ms=mean_phases(finished),
        fallbacks=whole.fallbacks,
        bytes_pulled=whole.bytes_pulled,
        tokens_reused=whole.tokens_reused,
        prompt_tokens=sum(record.prompt_tokens for record in finished),
    )


def ttft_all_ms(measured: Iterable[RequestRecord]) -> list[float]:
    """One TTFT for each request; endless for one that did not finish."""
    return [
        record.ttft_ms if record.outcome is Outcome.FINISHED and record.ttft_ms is not None else math.inf
        for record in measured
    ]


def _group(finished: Sequence[RequestRecord]) -> GroupFigures:
    return GroupFigures(
        finished=len(finished),
        ttft_ms=spread([record.ttft_ms for record in finished if record.ttft_ms is not None]),
        tbt_ms=spread([gap * 1e3 for record in finished for gap in record.gaps_s]),
        e2e_ms=spread([record.e2e_ms for record in finished if record.e2e_ms is not None]),
        tokens_reused=sum(record.tokens_reused for record in finished),
        bytes_pulled=sum(record.bytes_pulled for record in finished),
        fallbacks=sum(bool(record.fallback) for record in finished),
    )


def grouped(finished: Sequence[RequestRecord], name: Callable[[RequestRecord], str]) -> dict[str, GroupFigures]:
    """Figures of finished requests by what ``name`` says of them."""
    names = sorted({name(record) for record in finished})
    return {one: _group([record for record in finished if name(record) == one]) for one in names}


def mean_phases(finished: Sequence[RequestRecord]) -> dict[str, float]:
    """Mean milliseconds of each phase as the nodes measured it, and ``other``. All but ``pull`` add up to the mean TTFT."""
    if not finished:
        return {}
    sums = {phase: math.fsum(record.phases_ms.get(phase, 0.0) for record in finished) for phase in PHASES}
    sums["other"] = math.fsum(record.other_ms for record in finished)
    return {phase: total / len(finished) for phase, total in sums.items()}


def _span_s(measured: Sequence[RequestRecord]) -> float:
    begins = [record.intended_s for record in measured if record.intended_s is not None]
    ends = [record.ended_s for record in measured if record.ended_s is not None]
    return max(ends) - min(begins) if begins and ends else 0.0


def _per_second(number: int, seconds: float) -> float:
    return number / seconds if seconds > 0 else 0.0


# --- throughput at equal p95 TTFT ----------------------------------------------------------------------------------------


class Crossing(msgspec.Struct, frozen=True):
    """The rate (requests/s) at which a curve crosses the objective. ``at``: between two measured rates; ``above``: not up to the
    highest measured rate, which is ``rate``; ``below``: already at the lowest one."""

    rate: float
    bound: str


class Ratio(msgspec.Struct, frozen=True):
    """Throughput of one arm over that of another at the same p95 TTFT. ``bound``: ``exact``, ``at least``, ``at most``, or ``unknown`` (then
    there is no value). ``low`` and ``high`` are a 95 % bootstrap interval over repeats, None for a single one."""

    value: float | None
    bound: str
    low: float | None = None
    high: float | None = None


def crossing(curve: Mapping[float, float], objective_ms: float) -> Crossing:
    """Where the p95 (ms, by rate) first exceeds ``objective_ms``: linear between the measured rates around it.

    Of a curve that comes back below the objective the first crossing counts; a p95 without end lies above everything, and
    then the last rate that held the objective is the answer.
    """
    rates = sorted(curve)
    if curve[rates[0]] > objective_ms:
        return Crossing(rates[0], "below")
    for slower, faster in itertools.pairwise(rates):
        if curve[faster] > objective_ms:
            # towards a p95 without end the share is 0
            share = (objective_ms - curve[slower]) / (curve[faster] - curve[slower])
            return Crossing(slower + share * (faster - slower), "at")
    return Crossing(rates[-1], "above")


def compare(over: Crossing, under: Crossing) -> Ratio:
    """How many times the throughput of ``under`` the other one has."""
    match over.bound, under.bound:
        case "at", "at":
            bound = "exact"
        case ("at" | "above", "at" | "below"):
            bound = "at least"
        case ("at" | "below", "at" | "above"):
            bound = "at most"
        case _:
            return Ratio(None, "unknown")
    return Ratio(over.rate / under.rate, bound)


TtftByRepeat = Mapping[float, Sequence[Sequence[float]]]
"""Rate -> for each repeat the TTFTs of its requests in milliseconds, endless ones included."""


def curve_of(ttft: TtftByRepeat, repeats: Sequence[int]) -> dict[float, float]:
    """The p95 by rate over all requests of the given repeats together (a repeat may be given several times)."""
    return {
        rate: quantile((one for repeat in repeats for one in by_repeat[repeat]), 0.95)
        for rate, by_repeat in ttft.items()
    }


def throughput_ratio(
    over: TtftByRepeat, under: TtftByRepeat, objective_ms: float, seed: int, resamples: int = RESAMPLES
) -> Ratio:
    """The ratio at equal p95 TTFT, with a bootstrap interval over repeats.

    Both arms saw the same arrivals in a repeat, so a resample takes the same repeats of both. Crossings beyond the measured rates
    enter at the last measured one. Needs every rate in every repeat; raises AssertionError otherwise.
    """
    sizes = {len(by_repeat) for ttft in (over, under) for by_repeat in ttft.values()}
    assert len(sizes) == 1, f"repeats differ: {sizes}"
    repeats = range(sizes.pop())
    whole = compare(crossing(curve_of(over, repeats), objective_ms), crossing(curve_of(under, repeats), objective_ms))
    if len(repeats) < 2 or whole.value is None or not resamples:
        return whole
    generator = random.Random(seed)
    values = []
    for _ in range(resamples):
        chosen = generator.choices(repeats, k=len(repeats))
        values.append(
            crossing(curve_of(over, chosen), objective_ms).rate / crossing(curve_of(under, chosen), objective_ms).rate
        )
    return msgspec.structs.replace(whole, low=quantile(values, 0.025), high=quantile(values, 0.975))
