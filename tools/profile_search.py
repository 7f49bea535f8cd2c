"""Which recompute groups ``kvkin profile`` measures: the grid of all groups, and the few of them for which answers are worth
generating. Pure.

Divergence (of the answer tokens' distributions from a full prefill's) is cheap for every group of the grid, answers are not. So
only groups that could lie on the frontier are generated for: of each number of layers the least divergent ones. Quality is not
monotonic in that number and a group in the middle can be worse than none, hence some groups are measured whatever their
divergence: none at all, groups that start at layer 0 (they need no hidden states), and groups that end at the last layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvkin.kv.plan import LayerGroup

Group = LayerGroup | None  # None: full reuse, nothing is recomputed

PER_SIZE = 1  # least divergent groups of each number of layers: of many noisy scores the best one is the luckiest
EDGE_SHARES = (0.2, 0.35, 0.5)  # sizes, as shares of the layers, at which groups at either end are always measured
LARGEST_SHARE = 0.6  # of the layers; beyond it a group saves too little to be worth an answer


def grid(num_layers: int, group_size: int) -> tuple[list[int], list[int]]:
    """Starts and stops of the grid: every ``group_size``-th layer, the last stop being ``num_layers``."""
    starts = list(range(0, num_layers, group_size))
    return starts, [*starts[1:], num_layers]


def all_groups(starts: Iterable[int], stops: Iterable[int], num_layers: int) -> list[Group]:
    """Full reuse and every group of the grid but the one of all layers, which is a full prefill."""
    stops = list(stops)
    pairs = [LayerGroup(a, b) for a in starts for b in stops if a < b and b - a < num_layers]
    return [None, *pairs]


def select(
    divergences: Mapping[Group, Sequence[float]], num_layers: int, transition_layers: Sequence[int] = ()
) -> list[Group]:
    """The groups to generate answers for, from their divergences on every case (module docstring); in a stable order.

    ``transition_layers`` are those that the family already taps: the best groups that can start there now are measured too.
    """
    mean = {group: float(np.mean(values)) for group, values in divergences.items()}
    sized: dict[int, list[LayerGroup]] = {}
    for group in mean:
        if group is not None and len(group) <= max(LARGEST_SHARE * num_layers, 1):
            sized.setdefault(len(group), []).append(group)
    chosen: set[Group] = {None}
    for groups in sized.values():
        chosen.update(sorted(groups, key=lambda group: (mean[group], group.start))[:PER_SIZE])
    for share in EDGE_SHARES:
        for edge in (_starting(sized, 0), _ending(sized, num_layers)):
            chosen.update(_nearest(edge, share * num_layers))
    for layer in transition_layers:
        there = sorted(_starting(sized, layer), key=len)
        chosen.update(_improving(there, mean))
    return sorted(chosen, key=order)


def order(group: Group) -> tuple[int, int]:
    """Sort key: full reuse first, then by number of layers, then by start."""
    return (0, 0) if group is None else (len(group), group.start)


def name(group: Group) -> str:
    """``none`` or ``10-20``: how groups are written in files and on the command line (half-open)."""
    return "none" if group is None else f"{group.start}-{group.stop}"


def parse(text: str) -> Group:
    """The group that ``name`` wrote. Raises ValueError."""
    if text == "none":
        return None
    start, dash, stop = text.partition("-")
    if not (dash and start.isdecimal() and stop.isdecimal() and int(start) < int(stop)):
        raise ValueError(f"{text!r} is no group: write none, or A-B with A < B (B not included)")
    return LayerGroup(int(start), int(stop))


def stability(sensitivities: Sequence[Sequence[float]]) -> float:
    """How alike inputs rank the layers: mean Spearman correlation of each input's per-layer sensitivity with the mean of
    the others (1: the same order for every input). Needs two inputs and two layers; nan otherwise."""
    table = np.asarray(sensitivities, dtype=np.float64)
    if table.ndim != 2 or min(table.shape) < 2:
        return float("nan")
    total = table.sum(axis=0)
    correlations = []
    for row in table:
        if np.ptp(row) > 0 and np.ptp(total - row) > 0:
            correlations.append(float(np.corrcoef(_ranks(row), _ranks(total - row))[0, 1]))
    return float(np.mean(correlations)) if correlations else float("nan")


def _ranks(values: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(np.float64)


def _starting(sized: Mapping[int, Sequence[LayerGroup]], layer: int) -> list[LayerGroup]:
    return [group for groups in sized.values() for group in groups if group.start == layer]


def _ending(sized: Mapping[int, Sequence[LayerGroup]], layer: int) -> list[LayerGroup]:
    return [group for groups in sized.values() for group in groups if group.stop == layer]


def _nearest(groups: Sequence[LayerGroup], size: float) -> list[LayerGroup]:
    return sorted(groups, key=lambda group: (abs(len(group) - size), len(group)))[:1]


def _improving(groups: Sequence[LayerGroup], mean: Mapping[Group, float]) -> list[LayerGroup]:
    """Of groups by rising size those that diverge less than every smaller one."""
    kept: list[LayerGroup] = []
    for group in groups:
        if not kept or mean[group] < mean[kept[-1]]:
            kept.append(group)
    return kept
