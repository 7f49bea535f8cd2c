"""From the records of all cases to a ``Profile``: means, intervals, the frontier and the choice. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from kvkin.configs.profiles import (
    Divergence,
    LayerSensitivity,
    Made,
    MeasuredGroup,
    Profile,
    ProfileData,
    ProfiledModel,
    Quality,
    Score,
    Scores,
    TokenStats,
    layer_group,
    profile_point,
)
from kvkin.kv.errors import ConfigError
from kvkin.kv.frontier import choose, pareto, point
from kvkin.tools.profile_search import Group, name, order, parse
from kvkin.tools.statistics import Interval, bootstrap_mean, isotonic, paired_bootstrap

Records = Mapping[str, Mapping[str, Any]]  # case -> what was measured


def divergences(search: Records) -> dict[Group, list[float]]:
    """Of every group of the grid: its divergence on each case."""
    found: dict[Group, list[float]] = {}
    for record in search.values():
        for key, value in record["divergences"].items():
            found.setdefault(parse(key), []).append(value)
    return found


def build_profile(
    sender: ProfiledModel,
    receiver: ProfiledModel,
    search: Records,
    answers: Records,
    seconds: Mapping[str, float],
    *,
    metric: str,
    data_name: str,
    data_digest: str,
    split: str,
    group_size: int,
    max_loss: float,
    settings: Mapping[str, str | int | float | bool | None],
    versions: Mapping[str, str],
    seed: int,
) -> Profile:
    """The profile of a pair. ``answers`` hold all cases, ``search`` some of them; ``seconds`` the recompute time by group.

    Raises ConfigError if the receiver's full prefill scores nothing at all: there is no quality to lose then.
    """
    full = [record["full"] for record in answers.values()]
    if sum(full) <= 0:
        raise ConfigError("metric", f"{receiver.name} scores 0 on all {len(full)} cases", "data that it is good at")
    contexts = [record.get("context", case) for case, record in answers.items()]
    scores: dict[Group, list[float]] = {}
    agreement: dict[Group, list[float]] = {}
    # a run that was stopped and went on with other groups has cases that know more of them than others do
    common = set.intersection(*(set(record["scores"]) for record in answers.values()))
    for record in answers.values():
        for key in common:
            scores.setdefault(parse(key), []).append(record["scores"][key])
            agreement.setdefault(parse(key), []).append(record["agreement"][key])
    measured = [
        MeasuredGroup(
            group=None if group is None else (group.start, group.stop),
            divergence=_divergence(values),
            quality=_quality(scores[group], full, contexts, seed) if group in scores else None,
            recompute_s=seconds.get(name(group)),
            first_token_agreement=_share_above_zero(agreement[group]) if group in agreement else None,
        )
        for group, values in sorted(divergences(search).items(), key=lambda item: order(item[0]))
    ]
    measured = steadied(measured)
    points = [point(layer_group(one.group), one.loss) for one in measured if one.loss is not None]
    best = choose(points, max_loss)
    none = next(one for one in measured if one.group is None)
    assert none.loss is not None, "full reuse is always measured"
    tokens = [record["tokens"] for record in answers.values()]
    return Profile(
        sender=sender,
        receiver=receiver,
        metric=metric,
        data=ProfileData(
            name=data_name,
            digest=data_digest,
            split=split,
            samples=len(answers),
            context_tokens=TokenStats(
                min=min(tokens), p50=int(np.median(tokens)), mean=float(np.mean(tokens)), max=max(tokens)
            ),
        ),
        group_size=group_size,
        max_loss=max_loss,
        scores=Scores(
            full=_score(bootstrap_mean(full, seed=seed, clusters=contexts)),
            sender=_score(
                bootstrap_mean([record["sender"] for record in answers.values()], seed=seed, clusters=contexts)
            ),
            full_reuse=_score(bootstrap_mean(scores[None], seed=seed, clusters=contexts)),
        ),
        full_reuse_is_fine=none.loss <= max_loss,
        chosen=None if best is None else profile_point(best),
        frontier=tuple(map(profile_point, pareto(points))),
        sensitivity=_sensitivity([record["sensitivity"] for record in search.values()]),
        groups=tuple(measured),
        made=Made(
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            settings=dict(settings),
            versions=dict(versions),
        ),
    )


def steadied(groups: Sequence[MeasuredGroup]) -> list[MeasuredGroup]:
    """The groups with their ``expected_loss``: the measured losses, made never to fall as the divergence rises.

    A group's divergence is measured on every token of every answer, its loss by one score an answer: much noisier, and the
    lowest of many such losses is lower than what it estimates. What diverges more loses more, so the least-squares fit that
    says so (isotonic regression) lends each group the answers of its neighbours. A full prefill diverges by 0 and loses 0,
    hence none is below 0.
    """
    answered = [one for one in groups if one.quality is not None and one.divergence is not None]
    fitted = isotonic(
        [one.divergence.mean for one in answered if one.divergence is not None],
        [one.quality.loss for one in answered if one.quality is not None],
    )
    expected = {one.group: max(0.0, float(loss)) for one, loss in zip(answered, fitted, strict=True)}
    return [msgspec.structs.replace(one, expected_loss=expected.get(one.group)) for one in groups]


def _divergence(values: Sequence[float]) -> Divergence:
    low, high = np.percentile(values, (10, 90))
    return Divergence(mean=float(np.mean(values)), p10=float(low), p90=float(high), n=len(values))


def _quality(scores: Sequence[float], full: Sequence[float], contexts: Sequence[str], seed: int) -> Quality:
    """Loss = 1 - mean / full's mean; the interval comes from resampling the contexts, both arms alike."""
    kept = paired_bootstrap(scores, full, seed=seed, statistic="ratio of means", clusters=contexts)
    return Quality(
        score=float(np.mean(scores)),
        loss=1.0 - kept.estimate,
        loss_low=1.0 - _finite(kept.high, kept.estimate),
        loss_high=1.0 - _finite(kept.low, kept.estimate),
        n=kept.n,
    )


def _score(interval: Interval) -> Score:
    return Score(
        mean=interval.estimate,
        low=_finite(interval.low, interval.estimate),
        high=_finite(interval.high, interval.estimate),
        n=interval.n,
    )


def _finite(value: float, otherwise: float) -> float:
    """A bound, or the estimate itself where there is none (a single case)."""
    return value if np.isfinite(value) else otherwise


def _sensitivity(table: Sequence[Sequence[float]]) -> tuple[LayerSensitivity, ...]:
    values = np.asarray(table, dtype=np.float64)  # (cases, layers)
    low, middle, high = np.percentile(values, (10, 50, 90), axis=0)
    return tuple(
        LayerSensitivity(
            layer=layer,
            mean=float(values[:, layer].mean()),
            p10=float(low[layer]),
            p50=float(middle[layer]),
            p90=float(high[layer]),
            n=len(values),
        )
        for layer in range(values.shape[1])
    )


def _share_above_zero(agreement: Sequence[float]) -> float:
    return float(np.mean([value > 0 for value in agreement]))
