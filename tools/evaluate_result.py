"""From the records of all cases to the JSON object that ``kvkin evaluate`` prints and writes. Pure.

All comparisons are paired: the same cases in every arm (docs/design.md section 11). Scores are means, times are medians; intervals
are 95 % bootstrap intervals over contexts: questions about the same one are not independent.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvkin.tools.evaluate_arms import Arm
from kvkin.tools.statistics import Floats, bootstrap_mean, bootstrap_median, paired_bootstrap

Records = Mapping[str, Mapping[str, Any]]  # case -> what ``measure_context`` found


def summarize(records: Records, arms: Sequence[Arm], *, seed: int, head: Mapping[str, Any]) -> dict[str, Any]:
    """The result as JSON values: ``head`` (what was compared, on what, how), then ``arms`` and ``equal_latency``."""
    cases = list(records.values())
    contexts = [case["context"] for case in cases]
    full = _column(cases, "full", "score"), _column(cases, "full", "ttft_s")
    found = []
    for arm in arms:
        score, ttft = _column(cases, arm.name, "score"), _column(cases, arm.name, "ttft_s")
        low, high = np.percentile(ttft * 1e3, (10, 90))
        tokens = _column(cases, arm.name, "layer_tokens")
        found.append(
            {
                "name": arm.name,
                "kind": arm.kind,
                "group": None if arm.group is None else [arm.group.start, arm.group.stop],
                "ratio": arm.ratio,
                "score": bootstrap_mean(score, seed=seed, clusters=contexts).as_dict(),
                "difference": paired_bootstrap(score, full[0], seed=seed, clusters=contexts).as_dict(),
                "kept": paired_bootstrap(
                    score, full[0], seed=seed, statistic="ratio of means", clusters=contexts
                ).as_dict(),
                "ttft_ms": bootstrap_median(_by_context(ttft * 1e3, contexts), seed=seed).as_dict()
                | {"p10": round(float(low), 3), "p90": round(float(high), 3)},
                "speedup": bootstrap_median(_by_context(full[1] / ttft, contexts), seed=seed).as_dict(),
                "bytes_mean": round(float(_column(cases, arm.name, "bytes").mean())),
                "layer_tokens_mean": round(float(tokens.mean()), 1),
                "compute_share": round(float(tokens.sum() / _column(cases, "full", "layer_tokens").sum()), 4),
            }
        )
    context = np.array([case["tokens"] for case in cases])
    sizes = {"min": int(context.min()), "p50": int(np.median(context)), "mean": round(float(context.mean()), 1)}
    return {
        **head,
        "cases": len(cases),
        "contexts": len(set(contexts)),
        "context_tokens": sizes | {"max": int(context.max())},
        "suffix_tokens_mean": round(float(np.mean([case["suffix_tokens"] for case in cases])), 1),
        "arms": found,
        "equal_latency": equal_latency(cases, arms, seed),
    }


def equal_latency(cases: Sequence[Mapping[str, Any]], arms: Sequence[Arm], seed: int) -> list[dict[str, Any]]:
    """Each group, and full reuse, against CacheBlend at the same median time to first token.

    ``nearest`` is the ratio that was measured whose median is nearest. ``interpolated`` lies between the ratios whose medians enclose
    the arm's: each case's score is interpolated between its scores at both by the place of the arm's median between theirs;
    null where the arm is faster or slower than every ratio.
    """
    contexts = [case["context"] for case in cases]
    ttft = {arm.name: float(np.median(_by_context(_column(cases, arm.name, "ttft_s"), contexts))) * 1e3 for arm in arms}
    blends = sorted((arm for arm in arms if arm.kind == "blend"), key=lambda arm: ttft[arm.name])
    found: list[dict[str, Any]] = []
    for arm in (arm for arm in arms if arm.kind in ("reuse", "group") and blends):
        mine, score = ttft[arm.name], _column(cases, arm.name, "score")
        nearest = min(blends, key=lambda blend: abs(ttft[blend.name] - mine))
        interpolated = None
        for faster, slower in itertools.pairwise(blends):
            before, after = ttft[faster.name], ttft[slower.name]
            if before <= mine <= after:
                share = (mine - before) / (after - before) if after > before else 0.0
                mixed = (1 - share) * _column(cases, faster.name, "score") + share * _column(
                    cases, slower.name, "score"
                )
                assert faster.ratio is not None
                assert slower.ratio is not None
                interpolated = {
                    "ratio": round((1 - share) * faster.ratio + share * slower.ratio, 4),
                    "between": [faster.ratio, slower.ratio],
                    "difference": paired_bootstrap(score, mixed, seed=seed, clusters=contexts).as_dict(),
                }
                break
        theirs = _column(cases, nearest.name, "score")
        found.append(
            {
                "name": arm.name,
                "kind": arm.kind,
                "group": None if arm.group is None else [arm.group.start, arm.group.stop],
                "ttft_ms": round(mine, 3),
                "nearest": {
                    "ratio": nearest.ratio,
                    "ttft_ms": round(ttft[nearest.name], 3),
                    "difference": paired_bootstrap(score, theirs, seed=seed, clusters=contexts).as_dict(),
                },
                "interpolated": interpolated,
            }
        )
    return found


def _column(cases: Sequence[Mapping[str, Any]], arm: str, key: str) -> Floats:
    return np.array([case["arms"][arm][key] for case in cases], dtype=np.float64)


def _by_context(values: Floats, contexts: Sequence[str]) -> Floats:
    """One value a context, the median of its cases: the context's states were timed once for all of them."""
    found: dict[str, list[float]] = {}
    for context, value in zip(contexts, values, strict=True):
        found.setdefault(context, []).append(value)
    return np.array([np.median(each) for each in found.values()], dtype=np.float64)
