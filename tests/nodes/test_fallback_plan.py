"""What a decode node keeps of a plan once a source has failed: its own exact blocks, and nothing that is approximate."""

from __future__ import annotations

import pytest
from engine_harness import NUM_LAYERS, computed, exact, partial, plan_of
from hypothesis import given
from plan_strategies import plans

from kvkin.decode_nodes.report import fallback_plan
from kvkin.kv.plan import PlanKind, ReusePlan, Segment, provenances
from kvkin.kv.provenance import exact_provenance

ME = "me"
MINE = exact_provenance(ME.encode()).lineage_id


def full_reuse(start: int, stop: int, node: str) -> Segment:
    """Another model's KV of all layers, with nothing recomputed."""
    sources = exact(start, stop, node).sources
    return Segment(start, stop, sources, start, kind=PlanKind.PARTIAL, loss=0.03)


def test_own_exact_blocks_are_kept() -> None:
    plan = plan_of(exact(0, 16, ME), exact(16, 32, "other"), computed(32, 40))
    kept = fallback_plan(plan, ME, "lost")
    assert kept.segments == (plan.segments[0], Segment(16, 40))
    assert kept.reason == "lost"


@pytest.mark.parametrize(
    "first",
    [full_reuse(0, 16, ME), partial(0, 16, (1, 3), ME), exact(0, 16, "other")],
    ids=["full", "partial", "remote"],
)
def test_what_is_approximate_or_elsewhere_is_computed(first: Segment) -> None:
    plan = plan_of(first, exact(16, 32, ME), computed(32, 40))
    assert fallback_plan(plan, ME, "lost").segments == (Segment(0, 40),)


@given(plans(NUM_LAYERS))
def test_what_is_left_is_exact_and_covers_the_prompt(plan: ReusePlan) -> None:
    # node "a" runs model a: only its own blocks of its own model are exact to it
    left = fallback_plan(plan, "a", "lost")
    left.validate(NUM_LAYERS)
    assert left.num_tokens == plan.num_tokens
    assert {name for segment in left.segments for name in segment.nodes} <= {"a"}
    assert all(one.exact for one in provenances(left, b"a"))
