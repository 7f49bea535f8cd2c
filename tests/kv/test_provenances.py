"""Provenance: what keeps exactness, what taints, and how losses add up; segment by segment."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_strategies import plans

from kvkin.kv.plan import (
    Holder,
    LayerGroup,
    LayerSource,
    PlanKind,
    ReusePlan,
    Segment,
    TokenRows,
    private_plan,
    provenances,
    segment_provenance,
)
from kvkin.kv.provenance import Provenance, Quality, approximate, computed_after, exact_provenance, quality_of

MINE, OTHER = exact_provenance(b"mine"), exact_provenance(b"other")


def pulled(start: int, stop: int, held: Provenance, kind: PlanKind = PlanKind.EXACT, loss: float = 0.0) -> Segment:
    sources = (LayerSource(LayerGroup(0, 4), Holder("node", held)),)
    return Segment(start, stop, sources, start, kind=kind, loss=loss)


def partial(start: int, stop: int, held: Provenance = OTHER, loss: float = math.inf) -> Segment:
    sources = (LayerSource(LayerGroup(0, 1), Holder("node", held)), LayerSource(LayerGroup(3, 4), Holder("node", held)))
    group = LayerGroup(1, 3)
    return Segment(start, stop, sources, start, 1, Holder("node", held), group, PlanKind.PARTIAL, loss)


TAINTED = segment_provenance(partial(0, 16, loss=0.1), MINE, b"mine")


def test_private_is_exact() -> None:
    assert provenances(private_plan(40), b"mine") == [MINE]
    assert MINE.exact
    assert MINE.quality is Quality.EXACT


def test_exact_and_shared_prefix_stay_exact() -> None:
    shared = Segment(
        16,
        32,
        (LayerSource(LayerGroup(0, 2), Holder("node", OTHER)),),
        16,
        2,
        Holder("node", OTHER),
        LayerGroup(2, 4),
        PlanKind.SHARED_PREFIX,
    )
    plan = ReusePlan((pulled(0, 16, OTHER), shared, Segment(32, 40)))
    assert provenances(plan, b"mine") == [MINE] * 3


def test_everything_after_a_partial_segment_is_tainted() -> None:
    plan = ReusePlan((pulled(0, 16, MINE), partial(16, 32), Segment(32, 48), pulled(48, 64, MINE), Segment(64, 70)))
    found = provenances(plan, b"mine")
    assert [provenance.exact for provenance in found] == [True, False, False, False, False]
    assert len({provenance.key for provenance in found}) == 5
    assert [provenance.computed for provenance in found] == [False, False, True, False, True]
    assert all(provenance.lineage_id == b"mine" for provenance in found)


def test_full_reuse_of_another_model_taints() -> None:
    """Nothing is recomputed, all is pulled from one holder of exact blocks, and still it is not what the model computes."""
    full = pulled(0, 16, OTHER, PlanKind.PARTIAL, loss=0.03)
    first, computed = provenances(ReusePlan((full, Segment(16, 40))), b"mine")
    assert not first.exact
    assert first.quality is Quality.BOUNDED
    assert first.loss == computed.loss == 0.03
    assert first.key not in (MINE.key, OTHER.key)
    # the name tells full reuse of one model from that of another, and from a recompute group
    third = segment_provenance(pulled(0, 16, exact_provenance(b"third"), PlanKind.PARTIAL, 0.03), MINE, b"mine")
    assert len({first.key, third.key, TAINTED.key}) == 3
    # even a loss of 0 is no exactness
    assert not segment_provenance(pulled(0, 16, OTHER, PlanKind.PARTIAL), MINE, b"mine").exact


@given(plans(4))
def test_the_taint_never_goes_away(plan: ReusePlan) -> None:
    found = provenances(plan, b"mine")
    exact = [provenance.exact for provenance in found]
    assert exact == sorted(exact, reverse=True)
    losses = [provenance.loss for provenance in found]
    assert losses == sorted(losses)
    for provenance, segment in zip(found, plan.segments, strict=True):
        assert provenance.exact == (provenance.key == b"mine")
        assert not provenance.exact or segment.kind in (PlanKind.PRIVATE, PlanKind.EXACT, PlanKind.SHARED_PREFIX)
        assert provenance.quality is quality_of(provenance.loss, provenance.exact)


def test_a_claimed_exact_segment_of_tainted_blocks_is_not_exact() -> None:
    assert not segment_provenance(pulled(0, 16, TAINTED), MINE, b"other").exact
    shared = segment_provenance(pulled(0, 16, TAINTED, PlanKind.SHARED_PREFIX), MINE, b"other")
    assert not shared.exact
    assert shared.loss == pytest.approx(0.1)


def test_tainted_hidden_states_taint() -> None:
    shared = Segment(
        0,
        16,
        (LayerSource(LayerGroup(0, 2), Holder("node", OTHER)),),
        0,
        2,
        Holder("node", TAINTED),
        LayerGroup(2, 4),
        PlanKind.SHARED_PREFIX,
    )
    assert not segment_provenance(shared, MINE, b"mine").exact


def test_own_tainted_blocks_keep_their_name() -> None:
    """The next turn over the same blocks finds them again, and computing goes on under the same name."""
    first = ReusePlan((partial(0, 16), Segment(16, 40)))
    reused, computed = provenances(first, b"mine")
    second = ReusePlan((pulled(0, 16, reused), pulled(16, 32, computed), Segment(32, 60)))
    assert provenances(second, b"mine") == [reused, computed, computed]


def test_own_tainted_blocks_elsewhere_do_not() -> None:
    """After other blocks than those they were made after they are another approximation."""
    other_start = segment_provenance(partial(0, 16, exact_provenance(b"third"), loss=0.2), MINE, b"mine")
    moved = segment_provenance(pulled(16, 32, TAINTED), other_start, b"mine")
    assert moved not in (TAINTED, other_start)
    assert not moved.exact
    assert moved.loss == pytest.approx(0.3)


def test_another_models_tainted_blocks_do_not_become_mine() -> None:
    found = segment_provenance(pulled(0, 16, TAINTED), OTHER, b"other")
    assert (found.lineage_id, found.exact) == (b"other", False)
    assert found.key != TAINTED.key


def test_losses_add_up() -> None:
    plan = ReusePlan((partial(0, 16, loss=0.1), partial(16, 32, loss=0.2), Segment(32, 40)))
    first, second, suffix = provenances(plan, b"mine")
    assert (first.loss, second.loss, suffix.loss) == pytest.approx((0.1, 0.3, 0.3))
    assert suffix.quality is Quality.BOUNDED
    inherited = segment_provenance(partial(0, 16, TAINTED, loss=0.2), MINE, b"mine")
    assert inherited.loss == pytest.approx(0.3)
    unprofiled = segment_provenance(partial(16, 32), first, b"mine")
    assert unprofiled.quality is Quality.UNPROFILED


def test_keys_depend_on_everything_that_matters() -> None:
    base = approximate(MINE, 16, b"shape", b"mine", 0.1)
    keys = {
        base.key,
        approximate(OTHER, 16, b"shape", b"mine", 0.1).key,
        approximate(MINE, 32, b"shape", b"mine", 0.1).key,
        approximate(MINE, 16, b"shape2", b"mine", 0.1).key,
        approximate(MINE, 16, b"shape", b"other", 0.1).key,
        computed_after(base, 16, b"mine").key,
        computed_after(base, 32, b"mine").key,
        computed_after(base, 32, b"other").key,
    }
    assert len(keys) == 8
    assert approximate(MINE, 16, b"shape", b"mine", 0.7).key == base.key  # a loss is knowledge, not identity
    rows = [
        segment_provenance(
            Segment(0, 16, pulled(0, 16, OTHER).sources, 0, recompute=TokenRows(chosen), kind=PlanKind.TOKEN_WISE),
            MINE,
            b"mine",
        ).key
        for chosen in ((), (1,), (1, 2))
    ]
    assert len(set(rows)) == 3


def test_golden_key() -> None:
    """Nodes and routers of different versions must name the same blocks alike."""
    assert TAINTED.key.hex() == "c93988da26d22ba78494c01488e4fde4"


@given(st.integers(0, 100), st.integers(0, 100))
def test_follows(position: int, other: int) -> None:
    taint = approximate(MINE, position, b"shape", b"mine", 0.0)
    assert taint.follows(MINE, position)
    assert taint.follows(taint, other)
    assert taint.follows(MINE, other) == (other == position)
    assert not taint.follows(OTHER, position)
    assert MINE.follows(MINE, other)
    assert not MINE.follows(taint, other)
