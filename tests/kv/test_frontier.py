"""The frontier of recompute groups: against its definition, over all points that hypothesis can think of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkin.kv.frontier import Point, choose, pareto, point, snap, useful
from kvkin.kv.plan import LayerGroup

LAYERS, KV, E = 8, 16, 24

GROUPS = [None, *(LayerGroup(start, stop) for start in range(LAYERS) for stop in range(start + 1, LAYERS + 1))]
POINTS = st.lists(
    st.builds(point, st.sampled_from(GROUPS), st.sampled_from([-0.02, 0.0, 0.01, 0.02, 0.05, 0.3, 1.0])), max_size=12
)


def pulled(one: Point) -> int:
    return (LAYERS - one.layers) * KV + (E if one.start else 0)


def beats(one: Point, other: Point) -> bool:
    """At least as good in layers and loss, and better in one of them."""
    return (
        (one.layers, one.loss) != (other.layers, other.loss) and one.layers <= other.layers and one.loss <= other.loss
    )


@given(POINTS)
def test_the_frontier_is_what_no_point_beats(points: list[Point]) -> None:
    frontier = pareto(points)
    assert set(frontier) <= set(points)
    for one in points:
        beaten = any(beats(other, one) for other in points)
        alike = [kept for kept in frontier if (kept.layers, kept.loss) == (one.layers, one.loss)]
        assert len(alike) == (0 if beaten else 1)
        # among equals the one that pulls least: the smaller start, where 0 needs no hidden states
        assert all(kept.start <= one.start for kept in alike)
    assert [one.layers for one in frontier] == sorted({one.layers for one in frontier})
    assert [one.loss for one in frontier] == sorted({one.loss for one in frontier}, reverse=True)


@given(POINTS, st.sampled_from([-1.0, 0.0, 0.02, 0.05, 0.5, 2.0]))
def test_the_choice_has_the_fewest_layers_within_the_bound(points: list[Point], max_loss: float) -> None:
    chosen = choose(points, max_loss)
    allowed = [one for one in points if one.loss <= max_loss]
    if chosen is None:
        assert not allowed
        return
    assert chosen in allowed
    assert chosen.layers == min(one.layers for one in allowed)
    assert chosen.loss == min(one.loss for one in allowed if one.layers == chosen.layers)
    # nothing is lost by choosing on the frontier
    again = choose(pareto(points), max_loss)
    assert again is not None
    assert (again.layers, again.loss) == (chosen.layers, chosen.loss)


def test_full_reuse_is_an_answer_and_nothing_is_another() -> None:
    full = point(None, 0.01)
    assert (full.layers, full.start) == (0, 0)
    assert choose([point(LayerGroup(0, 2), 0.0), full], 0.05) == full
    assert choose([full], 0.001) is None
    assert choose([], 1.0) is None
    assert pareto([]) == snap([], [2]) == useful([], LAYERS, KV, E) == ()


def test_of_equals_the_smaller_start_stays() -> None:
    points = [point(LayerGroup(4, 6), 0.02), point(LayerGroup(2, 4), 0.02), point(LayerGroup(0, 2), 0.02)]
    assert pareto(points) == (points[2],)
    assert pareto(points[:2]) == (points[1],)
    assert choose(points, 0.05) == points[2]


@given(POINTS, st.sets(st.integers(1, LAYERS - 1), max_size=3))
def test_what_can_run_starts_where_hidden_states_are_kept(points: list[Point], layers: set[int]) -> None:
    assert list(snap(points, layers)) == [
        one for one in points if one.group is None or one.group.start == 0 or one.group.start in layers
    ]


@given(POINTS)
def test_what_is_useful_online_is_what_no_point_beats_on_any_link(points: list[Point]) -> None:
    kept = useful(points, LAYERS, KV, E)
    assert set(kept) <= set(points)
    assert set(map(_figures, pareto(points))) <= set(map(_figures, kept))
    assert [one.layers for one in kept] == sorted(one.layers for one in kept)
    for one in points:
        better = [
            other
            for other in points
            if other.layers <= one.layers and other.loss <= one.loss and pulled(other) <= pulled(one)
        ]
        # some kept point is at least as good as every point, and none that is kept is beaten
        assert any(other in kept for other in better)
        if one in kept:
            assert all(_figures(other) == _figures(one) for other in better)


def _figures(one: Point) -> tuple[int, float, int]:
    return one.layers, one.loss, pulled(one)


@pytest.mark.parametrize(("seconds_per_byte", "best"), [(0.0, None), (0.01, LayerGroup(0, 4)), (0.2, LayerGroup(0, 7))])
def test_a_slower_link_makes_a_larger_group_the_fastest(seconds_per_byte: float, best: LayerGroup | None) -> None:
    # full reuse loses nothing here, and is still not always the fastest
    points = [point(None, 0.0), point(LayerGroup(0, 4), 0.01), point(LayerGroup(0, 7), 0.02)]
    assert pareto(points) == (points[0],)
    kept = useful(points, LAYERS, KV, E)
    fastest = min(kept, key=lambda one: max(one.layers * 0.2, pulled(one) * seconds_per_byte))
    assert fastest.group == best
