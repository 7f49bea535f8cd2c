"""Recompute groups weighed against their loss: the Pareto frontier of a profile and the choices on it (docs/design.md section 5).

Pure. The profile tool draws the frontier with :func:`pareto` and picks from it with :func:`choose`; the router offers online
what :func:`snap` and :func:`useful` leave. DroidSpeak (NSDI'26) section 4.2 calls the frontier's points configurations.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvkin.kv.plan import LayerGroup


class Point(msgspec.Struct, frozen=True):
    """A measured way to reuse a sender's KV: ``group`` is recomputed (None: nothing, full reuse), ``layers`` says how many
    layers that are, ``loss`` what it costs in quality (below 0 where the measurement came out better than a full prefill)."""

    group: LayerGroup | None
    loss: float
    layers: int

    @property
    def start(self) -> int:
        """First recomputed layer; 0 for full reuse, which needs no hidden states either."""
        return 0 if self.group is None else self.group.start


def point(group: LayerGroup | None, loss: float) -> Point:
    """The point of a group."""
    return Point(group, loss, 0 if group is None else len(group))


def pareto(points: Iterable[Point]) -> tuple[Point, ...]:
    """The points that no other beats in recomputed layers and loss, by rising layers and so by falling loss.

    Of points with equal layers and loss the one with the smaller start stays: from layer 0 on no hidden states are pulled.
    """
    frontier: list[Point] = []
    for one in sorted(points, key=_by_layers):
        if not frontier or one.loss < frontier[-1].loss:
            frontier.append(one)
    return tuple(frontier)


def choose(points: Iterable[Point], max_loss: float) -> Point | None:
    """The point with the fewest recomputed layers whose loss is at most ``max_loss``; None if there is none.

    Full reuse is a point like the others (its ``group`` is None), so that it is never mistaken for no answer.
    """
    return min((one for one in points if one.loss <= max_loss), key=_by_layers, default=None)


def snap(points: Iterable[Point], transition_layers: Iterable[int]) -> tuple[Point, ...]:
    """The points that can run in a cluster whose nodes keep hidden states at ``transition_layers`` only, order kept.

    Those are full reuse and the groups that start at layer 0 or at a transition layer.
    """
    starts = {0, *transition_layers}
    return tuple(one for one in points if one.start in starts)


def useful(points: Iterable[Point], num_layers: int, kv_bytes: int, e_bytes: int) -> tuple[Point, ...]:
    """The points that no other beats in recomputed layers, loss *and* bytes pulled, by rising layers.

    More than :func:`pareto` keeps: on a slow link a group that recomputes more and pulls less may be the fastest one within
    a bound although a smaller group loses less. ``kv_bytes`` are those of one layer's KV, ``e_bytes`` those of one layer's
    hidden states, for the same number of tokens.
    """

    def pulled(one: Point) -> int:
        return (num_layers - one.layers) * kv_bytes + (e_bytes if one.start else 0)

    kept: list[Point] = []
    for one in sorted(points, key=lambda point: (point.layers, point.loss, pulled(point), point.start)):
        # those kept so far have at most as many layers
        if not any(other.loss <= one.loss and pulled(other) <= pulled(one) for other in kept):
            kept.append(one)
    return tuple(kept)


def _by_layers(one: Point) -> tuple[int, float, int]:
    return one.layers, one.loss, one.start
