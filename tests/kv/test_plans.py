"""Segments and plans: what is valid, what they say of themselves, how they travel."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_strategies import holder, plans

from kvkin.kv.plan import LayerGroup, LayerSource, PlanKind, ReusePlan, Segment, TokenRows, private_plan

NUM_LAYERS = 4


def source(start: int, stop: int, node: str = "a") -> LayerSource:
    return LayerSource(LayerGroup(start, stop), holder(node))


SUFFIX = Segment(8, 12)
PARTIAL: dict[str, Any] = {
    "start": 0,
    "stop": 8,
    "sources": (source(0, 1), source(3, 4)),
    "e_layer": 1,
    "e_holder": holder("a"),
    "recompute": LayerGroup(1, 3),
}
WHOLE: dict[str, Any] = {"start": 0, "stop": 8, "sources": (source(0, 4),)}


@given(st.integers(1, 5).flatmap(lambda layers: st.tuples(st.just(layers), plans(layers))))
def test_valid_plans_are_accepted_and_travel(case: tuple[int, ReusePlan]) -> None:
    num_layers, plan = case
    plan.validate(num_layers)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=ReusePlan) == plan
    assert plan.num_tokens == sum(segment.num_tokens for segment in plan.segments)
    assert plan.reused_tokens == sum(segment.num_tokens for segment in plan.segments if segment.sources)
    for segment in plan.segments:
        covered = {*segment.pulled_layers(), *segment.recomputed_layers(num_layers)}
        assert covered == set(range(num_layers))


INVALID: dict[str, tuple[tuple[Segment, ...], str]] = {
    "no segment": ((), "at least one segment"),
    "does not start at 0": ((Segment(1, 9),), r"segment 0 \[1, 9\) does not continue at token 0"),
    "gap": ((Segment(0, 7), SUFFIX), r"segment 1 \[8, 12\) does not continue at token 7"),
    "overlap": ((Segment(0, 9), SUFFIX), "does not continue at token 9"),
    "empty segment": ((Segment(0, 0), Segment(0, 4)), "does not continue at token 0"),
    "backwards": ((Segment(0, -1),), "does not continue"),
    "last is reused": ((Segment(**WHOLE),), "last segment must be computed"),
    "layer missing": ((Segment(0, 8, (source(0, 3),)), SUFFIX), "cover every layer once"),
    "layer twice": ((Segment(0, 8, (source(0, 3), source(2, 4))), SUFFIX), "overlap"),
    "layers out of order": ((Segment(0, 8, (source(2, 4), source(0, 2))), SUFFIX), "out of order"),
    "layer too high": ((Segment(0, 8, (source(0, 5),)), SUFFIX), "exceed 4 layers"),
    "layer negative": ((Segment(0, 8, (source(-1, 4),)), SUFFIX), "exceed 4 layers"),
    "pulled and recomputed": ((Segment(**{**PARTIAL, "sources": (source(0, 2), source(3, 4))}), SUFFIX), "cover"),
    "neither pulled nor recomputed": (
        (Segment(**{**PARTIAL, "sources": (source(3, 4),)}), SUFFIX),
        "cover every layer",
    ),
    "empty group": ((Segment(**{**PARTIAL, "recompute": LayerGroup(1, 1)}), SUFFIX), "recompute group"),
    "group backwards": ((Segment(**{**PARTIAL, "recompute": LayerGroup(3, 1)}), SUFFIX), "recompute group"),
    "group too high": ((Segment(**{**PARTIAL, "recompute": LayerGroup(1, 5)}), SUFFIX), "outside of 0 .. 4"),
    "group negative": ((Segment(**{**PARTIAL, "recompute": LayerGroup(-1, 3)}), SUFFIX), "outside of 0 .. 4"),
    "no E": ((Segment(**{**PARTIAL, "e_layer": None, "e_holder": None}), SUFFIX), "hidden states are pulled exactly"),
    "no holder of E": ((Segment(**{**PARTIAL, "e_holder": None}), SUFFIX), "hidden states are pulled exactly"),
    "E of another layer": ((Segment(**{**PARTIAL, "e_layer": 2}), SUFFIX), "e_layer 2 is not the first"),
    "E without need": ((Segment(**WHOLE, e_layer=1, e_holder=holder("a")), SUFFIX), "hidden states are pulled exactly"),
    "E of a computed segment": ((Segment(0, 8, e_layer=0, e_holder=holder("a")), SUFFIX), "hidden states are pulled"),
    "rows without all KV": ((Segment(0, 8, (source(0, 3),), recompute=TokenRows((1,))), SUFFIX), "KV of all layers"),
    "rows without any KV": ((Segment(0, 8, recompute=TokenRows((1,))), SUFFIX), "KV of all layers"),
    "rows outside": ((Segment(**WHOLE, recompute=TokenRows((1, 8))), SUFFIX), "rows must ascend and lie inside"),
    "rows before": ((Segment(0, 8), Segment(8, 9, (source(0, 4),), recompute=TokenRows((7,))), Segment(9, 10)), "rows"),
    "rows descend": ((Segment(**WHOLE, recompute=TokenRows((5, 2))), SUFFIX), "rows must ascend"),
    "row twice": ((Segment(**WHOLE, recompute=TokenRows((2, 2))), SUFFIX), "rows must ascend"),
    "rows with E": (
        (Segment(**WHOLE, recompute=TokenRows((2,)), e_layer=1, e_holder=holder("a")), SUFFIX),
        "takes no hidden states",
    ),
    "computed in part": ((Segment(0, 8, recompute=LayerGroup(0, 3)), SUFFIX), "cover every layer"),
}


@pytest.mark.parametrize("name", INVALID)
def test_what_cannot_run_is_refused_and_named(name: str) -> None:
    segments, why = INVALID[name]
    with pytest.raises(ValueError, match=why):
        ReusePlan(segments).validate(NUM_LAYERS)


def test_the_error_names_the_segment() -> None:
    plan = ReusePlan((Segment(**WHOLE), Segment(8, 16, (source(0, 3),)), Segment(16, 17)))
    with pytest.raises(ValueError, match=r"segment 1 \[8, 16\)"):
        plan.validate(NUM_LAYERS)


def test_kind_is_that_of_most_reused_tokens() -> None:
    partial = Segment(**PARTIAL, kind=PlanKind.PARTIAL, loss=0.5)
    exact = Segment(8, 18, (source(0, 4),), kind=PlanKind.EXACT)
    plan = ReusePlan((partial, exact, Segment(18, 40)))
    assert (plan.kind, plan.loss, plan.reused_tokens) == (PlanKind.EXACT, 0.5, 18)
    assert ReusePlan((partial, SUFFIX)).kind is PlanKind.PARTIAL
    assert private_plan(5).kind is PlanKind.PRIVATE
    private_plan(5).validate(NUM_LAYERS)


def test_groups_are_half_open() -> None:
    group = LayerGroup(1, 3)
    assert [layer for layer in range(5) if layer in group] == [1, 2]
    assert len(group) == 2
    assert "1" not in group


def test_nodes_in_order_of_first_use() -> None:
    segment = Segment(0, 8, (source(0, 1, "b"), source(2, 4, "a")), e_layer=1, e_holder=holder("c"))
    assert segment.nodes == ("c", "b", "a")


def test_shape_holds_everything_that_is_approximate() -> None:
    """Provenance is made of it: two segments of equal shape over equal KV are the same KV."""
    base = Segment(**PARTIAL)
    others = [
        {"sources": (source(0, 1, "b"), source(3, 4))},
        {"e_holder": holder("b")},
        {"recompute": LayerGroup(1, 2), "sources": (source(0, 1), source(2, 4))},
        {"source_first_position": 3},
        {**WHOLE, "e_layer": None, "e_holder": None, "recompute": None},
        {**WHOLE, "e_layer": None, "e_holder": None, "recompute": TokenRows((1, 2))},
        {**WHOLE, "e_layer": None, "e_holder": None, "recompute": TokenRows((1, 3))},
    ]
    shapes = {Segment(**{**PARTIAL, **changed}).shape() for changed in others}
    assert len({base.shape(), *shapes}) == len(others) + 1
    # neither the node's name nor a running order changes the KV
    moved = (LayerSource(LayerGroup(0, 1), msgspec.structs.replace(holder("a"), node="z", order_id="7")), source(3, 4))
    assert Segment(**{**PARTIAL, "sources": moved}).shape() == base.shape()
