"""From the timed runs of ``kvkin bench engine`` to the JSON values that it prints. Pure.

Comparisons are medians of paired ratios, the runs of one round, with 95 % bootstrap intervals (docs/design.md section 11), as
``[median, low, high]``; the bounds are null where there was one round only.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvkin.tools.bench_engine_messages import Event, Reused, Stalled, Timed
from kvkin.tools.bench_pipeline_result import Ratio, ideal_s, ratio

MOST_OVERHEAD = 1.08
"""kvkin's aim: private plans cost at most 8 % over plain vLLM, the whole interval."""
WORK = ("prefill", "decode")

# One round of the part overhead: (arm, work) -> what was measured.
OverheadRound = Mapping[tuple[str, str], Timed]
# One round of the part stall: event -> what was measured.
StallRound = Mapping[Event, Stalled]


# --- overhead ----------------------------------------------------------------------------------------------------------------


def overhead_result(rounds: Sequence[OverheadRound], arms: Sequence[str], seed: int) -> dict[str, Any]:
    """Tokens/s by arm and work, and how much longer kvkin takes than vLLM by itself, and each than transformers."""
    speeds = {
        arm: {f"{work}_tokens_per_s": round(statistics.median(_speeds(rounds, arm, work)), 2) for work in WORK}
        for arm in arms
    }
    overhead = {work: _times(rounds, "kvkin", "plain", work, seed) for work in WORK}
    return {
        "rounds": len(rounds),
        "arms": speeds,
        "runs_s": {arm: {work: [round(one[arm, work].seconds, 4) for one in rounds] for work in WORK} for arm in arms},
        "kvkin_over_plain": overhead,
        "within": {work: within(found) for work, found in overhead.items()},
        "transformers_over_plain": {work: _times(rounds, "transformers", "plain", work, seed) for work in WORK}
        if "transformers" in arms
        else None,
    }


def within(found: Ratio, most: float = MOST_OVERHEAD) -> bool | None:
    """Whether the whole interval keeps the aim; null where there is none."""
    return None if found[2] is None else found[2] <= most


def _times(rounds: Sequence[OverheadRound], over: str, under: str, work: str, seed: int) -> Ratio:
    """Seconds a token of one arm over those of another."""
    return ratio(_speeds(rounds, under, work), _speeds(rounds, over, work), seed)


def _speeds(rounds: Sequence[OverheadRound], arm: str, work: str) -> list[float]:
    return [one[arm, work].num_tokens / one[arm, work].seconds for one in rounds]


# --- stall -------------------------------------------------------------------------------------------------------------------


def stall_result(rounds: Sequence[StallRound], seed: int) -> dict[str, Any]:
    """The time between tokens by event, over all rounds, and the partial plan's against the prefill's, round by round."""
    events = {name: [one[name] for one in rounds] for name in rounds[0]}
    p99 = {name: [_percentile(run.gaps_s, 99) for run in runs] for name, runs in events.items()}
    compared = ratio(p99["partial"], p99["prefill"], seed)
    return {
        "rounds": len(rounds),
        "events": {name: _gaps(runs) for name, runs in events.items()},
        "p99_ms_by_round": {name: [round(value * 1e3, 2) for value in values] for name, values in p99.items()},
        "partial_over_prefill": compared,
        # worse beyond noise: the whole interval is above 1, the one round where there is no interval
        "partial_worse": _lowest(compared) > 1.0,
    }


def _gaps(runs: Sequence[Stalled]) -> dict[str, Any]:
    every = [gap for run in runs for gap in run.gaps_s]
    return {
        "gaps": len(every),
        **{f"p{share}_ms": round(_percentile(every, share) * 1e3, 2) for share in (50, 99)},
        "max_ms": round(max(every) * 1e3, 2),
        "event_ms": round(statistics.median(run.event_s for run in runs) * 1e3, 2),
    }


def _percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(np.asarray(values), share))


def _lowest(found: Ratio) -> float:
    return next(value for value in (found[1], found[0], 1.0) if value is not None)


# --- ttft --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TtftRound:
    """One context once: vLLM's prefill, and the plans by shape."""

    prefill: Timed
    reused: Mapping[str, Reused]


def ideal_of(run: Reused) -> float:
    """Seconds to the first token under the ideal schedule (docs/design.md section 11)."""
    return ideal_s(run.transfer_s, run.states_s, run.compute_s, run.last_layer_s)


def ttft_result(rounds: Mapping[int, Sequence[TtftRound]], seed: int) -> dict[str, Any]:
    """By context: medians, how many times as fast as vLLM's prefill each shape is, and would be at the ideal."""
    return {"contexts": [_context(tokens, runs, seed) for tokens, runs in rounds.items()]}


def _context(tokens: int, rounds: Sequence[TtftRound], seed: int) -> dict[str, Any]:
    prefill = [one.prefill.seconds for one in rounds]
    return {
        "context_tokens": tokens,
        "rounds": len(rounds),
        "prefill_ms": _median_ms(prefill),
        "prefill_runs_ms": _runs_ms(prefill),
        "shapes": {name: _shape([one.reused[name] for one in rounds], prefill, seed) for name in rounds[0].reused},
    }


def _shape(runs: Sequence[Reused], prefill: Sequence[float], seed: int) -> dict[str, Any]:
    took, ideal = [run.seconds for run in runs], [ideal_of(run) for run in runs]
    return {
        "ttft_ms": _median_ms(took),
        "runs_ms": _runs_ms(took),
        "ideal_ms": _median_ms(ideal),
        "parts_ms": {
            name: _median_ms([getattr(run, f"{name}_s") for run in runs])
            for name in ("transfer", "states", "compute", "last_layer")
        },
        "bytes_pulled": runs[0].bytes_pulled,
        "prefill_over_ttft": ratio(prefill, took, seed),
        "prefill_over_ideal": ratio(prefill, ideal, seed),
        "ttft_over_ideal": ratio(took, ideal, seed),
    }


def _median_ms(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 2)


def _runs_ms(seconds: Sequence[float]) -> list[float]:
    return [round(each * 1e3, 2) for each in seconds]


# --- disaggregated -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """One answer: seconds to its first and last token, and how many of the prompt's tokens came from KV that was there or computed elsewhere."""

    model: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    first_s: float
    last_s: float
    reused_tokens: int
    kind: str


@dataclass(frozen=True)
class SystemRound:
    """One workload once on one system: its answers in the order in which they were asked for, and seconds until the last one."""

    answers: tuple[Answer, ...]
    seconds: float

    @property
    def first_s(self) -> float:
        """Median time to the first token."""
        return statistics.median(answer.first_s for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return sum(len(answer.token_ids) for answer in self.answers) / self.seconds


def disaggregated_result(rounds: Mapping[str, Sequence[Mapping[str, SystemRound]]], seed: int) -> dict[str, Any]:
    """By workload: medians of both systems, and vLLM's against kvkin's, round by round."""
    return {"workloads": {name: _workload(runs, seed) for name, runs in rounds.items()}}


def _workload(rounds: Sequence[Mapping[str, SystemRound]], seed: int) -> dict[str, Any]:
    runs = {name: [one[name] for one in rounds] for name in ("kvkin", "vllm")}
    first = {name: [run.first_s for run in each] for name, each in runs.items()}
    speed = {name: [run.tokens_per_s for run in each] for name, each in runs.items()}
    pairs = [
        (ours, theirs) for one in rounds for ours, theirs in zip(one["kvkin"].answers, one["vllm"].answers, strict=True)
    ]
    return {
        "rounds": len(rounds),
        "requests": len(rounds[0]["kvkin"].answers),
        "systems": {
            name: {
                "ttft_ms": _median_ms(first[name]),
                "ttft_runs_ms": _runs_ms(first[name]),
                "tokens_per_s": round(statistics.median(speed[name]), 2),
                "tokens_per_s_runs": [round(each, 2) for each in speed[name]],
                "reused_share": round(_reused_share(each), 4),
                "kinds": dict(sorted(Counter(answer.kind for run in each for answer in run.answers).items())),
            }
            for name, each in runs.items()
        },
        # above 1: kvkin is faster
        "ttft_vllm_over_kvkin": ratio(first["vllm"], first["kvkin"], seed),
        "throughput_kvkin_over_vllm": ratio(speed["kvkin"], speed["vllm"], seed),
        # approximate reuse may change an answer: that is what its loss is about
        "same_answers": round(sum(ours.token_ids == theirs.token_ids for ours, theirs in pairs) / len(pairs), 4),
    }


def _reused_share(runs: Sequence[SystemRound]) -> float:
    answers = [answer for run in runs for answer in run.answers]
    return sum(answer.reused_tokens for answer in answers) / sum(answer.prompt_tokens for answer in answers)
