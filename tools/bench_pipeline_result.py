"""From the timed runs of ``kvkin bench pipeline`` to the JSON values that it prints. Pure.

Comparisons are medians of paired ratios, the runs of one round, with 95 % bootstrap intervals (docs/design.md section 11), as
``[median, low, high]``; the bounds are null where there was one round only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvkin.kv.plan import PlanKind
from kvkin.router.policy_types import PolicySettings
from kvkin.tools.bench_pipeline_policy import Situation, layer_tokens_per_s, policy_choice
from kvkin.tools.statistics import bootstrap_median

SCHEDULES = ("naive", "reuse_only", "pipelined", "private", "ideal")
# The schedule that a plan's kind was measured as.
MEASURED_AS = {PlanKind.PARTIAL: "pipelined", PlanKind.PRIVATE: "private"}

Ratio = list[float | None]


@dataclass(frozen=True)
class Measured:
    """One round at one rate: seconds by schedule, bytes that came for each that ran by itself, and parts of the ideal: ``transfer_s``
    and ``compute_s`` of the partial plan alone, of which ``recompute_s`` are the group's."""

    seconds: Mapping[str, float]
    bytes_pulled: Mapping[str, int]
    transfer_s: float
    compute_s: float
    recompute_s: float


@dataclass(frozen=True)
class LinkRuns:
    """The rounds at one rate. ``balanced``: the rate at which the transfer takes as long as the recompute."""

    gbit_per_s: float
    balanced: bool
    runs: Sequence[Measured]


def ideal_s(transfer_s: float, states_s: float, compute_s: float, last_layer_s: float) -> float:
    """Seconds to the first token under the ideal schedule, of parts that ran alone (docs/design.md section 11)."""
    return max(transfer_s, states_s + compute_s) + last_layer_s


def ratio(over: Sequence[float], under: Sequence[float], seed: int) -> Ratio:
    """[median, low, high] of the ratios of what was measured together."""
    found = bootstrap_median([one / other for one, other in zip(over, under, strict=True)], seed=seed)
    return [round(value, 4) if math.isfinite(value) else None for value in (found.estimate, found.low, found.high)]


def compare(runs: Sequence[Measured], name: str, seed: int) -> Ratio:
    """``A_over_B`` of two schedules; ``compute`` is the partial plan's compute with everything in memory."""
    over, under = name.split("_over_")
    return ratio(_column(runs, over), _column(runs, under), seed)


def context_result(
    situation: Situation, links: Sequence[LinkRuns], policy: PolicySettings, seed: int
) -> dict[str, Any]:
    """Everything about one context; one of ``links`` is the balanced one."""
    balanced = next(link for link in links if link.balanced)
    runs = balanced.runs
    every = [run for link in links for run in link.runs]
    private_s = statistics.median(_column(every, "private"))
    names = (
        "private_over_pipelined",
        "private_over_ideal",
        "private_over_compute",
        "pipelined_over_ideal",
        "naive_over_pipelined",
        "pipelined_over_private",
    )
    return {
        "context_tokens": situation.context_tokens,
        "suffix_tokens": situation.suffix_tokens,
        "group": [situation.group.start, situation.group.stop],
        "balanced_gbit_per_s": round(balanced.gbit_per_s, 6),
        "transfer_over_recompute": round(statistics.median(run.transfer_s / run.recompute_s for run in runs), 3),
        "bytes_pulled": dict(runs[0].bytes_pulled),
        "layer_tokens_per_s": round(layer_tokens_per_s(situation, private_s, policy.cost), 1),
        **{name: compare(runs, name, seed) for name in names},
        "results": [_row(link, schedule) for link in links for schedule in SCHEDULES],
        "rates": [rate_result(situation, link, private_s, policy, seed) for link in links],
    }


def rate_result(
    situation: Situation, link: LinkRuns, private_s: float, policy: PolicySettings, seed: int
) -> dict[str, Any]:
    """One link: the medians, whether overlapping pays, and what the policy would do. ``private_s`` says how fast the receiver is.

    ``choice_over_other`` compares the plan that the policy chooses with the one that it does not, as measured: at most 1 where it
    chose the faster one, else how much slower its choice was.
    """
    runs = link.runs
    choice = policy_choice(situation, private_s, link.gbit_per_s * 1e9 / 8, policy)
    chosen = MEASURED_AS[choice.kind]
    other = next(schedule for schedule in MEASURED_AS.values() if schedule != chosen)
    over_other = compare(runs, f"{chosen}_over_{other}", seed)
    faster = over_other[0] is not None and over_other[0] <= 1.0
    naive = compare(runs, "naive_over_pipelined", seed)
    return {
        "gbit_per_s": round(link.gbit_per_s, 6),
        "balanced": link.balanced,
        "runs": len(runs),
        "ttft_ms": {schedule: _median_ms(runs, schedule) for schedule in SCHEDULES},
        "naive_over_pipelined": naive,
        # worse beyond noise: the whole interval is below 1, the one round where there is no interval
        "pipelined_worse": _highest(naive) < 1.0,
        "pipelined_over_ideal": compare(runs, "pipelined_over_ideal", seed),
        "private_over_pipelined": compare(runs, "private_over_pipelined", seed),
        "policy": {
            "choice": choice.kind.value,
            "reused_tokens": choice.reused_tokens,
            "estimate_ms": {
                "partial": None if choice.partial_s is None else round(choice.partial_s * 1e3, 2),
                "private": round(choice.private_s * 1e3, 2),
            },
            "reason": choice.reason,
            "was_faster": faster,
            "choice_over_other": over_other,
        },
    }


def _row(link: LinkRuns, schedule: str) -> dict[str, Any]:
    return {
        "schedule": schedule,
        "ttft_ms": _median_ms(link.runs, schedule),
        "gbit_per_s": round(link.gbit_per_s, 6),
        "runs": len(link.runs),
        "runs_ms": [round(run.seconds[schedule] * 1e3, 2) for run in link.runs],
    }


def _highest(found: Ratio) -> float:
    return next(value for value in (found[2], found[0], 1.0) if value is not None)


def _median_ms(runs: Sequence[Measured], schedule: str) -> float:
    return round(statistics.median(_column(runs, schedule)) * 1e3, 2)


def _column(runs: Sequence[Measured], schedule: str) -> list[float]:
    return [run.compute_s if schedule == "compute" else run.seconds[schedule] for run in runs]
