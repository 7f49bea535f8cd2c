"""What a tainted block's loss is: what the profiles that the router has now say, whatever a node remembers of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_world import BLOCK, GROUPS, LINEAGES, exact, family, held, node, request, run, view

from kvkin.kv.plan import LayerGroup, PlanKind, ReusePlan, provenances
from kvkin.kv.provenance import Provenance
from kvkin.router import policy, taint_origins
from kvkin.router.drift import DriftWatch
from kvkin.router.drift_types import DriftBound, DriftSettings
from kvkin.router.index import Match
from kvkin.router.policy_types import GroupChoice
from kvkin.transport.messages import Reuse
from kvkin.transport.node_messages import DriftSample, DriftSource

PARTIAL, PRIVATE = PlanKind.PARTIAL, PlanKind.PRIVATE
IDS = {name: lineage.id for name, lineage in LINEAGES.items()}
GROUP = LayerGroup(2, 6)


def router(loss: float = 0.02, group: LayerGroup = GROUP) -> DriftWatch:
    """A router's process whose profile gives base -> full this one group and loss."""
    settings = DriftSettings(min_samples=2, bound=DriftBound(min_agreement=0.9))
    return DriftWatch(settings, {"f": family({**GROUPS, ("base", "full"): (GroupChoice(group, loss),)})})


def decide(
    watching: DriftWatch, matches: Sequence[Match], blocks: int = 100, model: str = "full", **how: object
) -> policy.Decision:
    nodes = view(node("d0", model), node("d1", "base"), node("d2", "other"), family=watching.families["f"])
    return policy.choose(request(model, blocks, **how), watching.usable(matches), nodes)


def kept(plan: ReusePlan, model: str = "full", name: str = "d0") -> Match:
    """What ``model`` holds after it executed a plan: one run for each segment with whole blocks, as its node names it."""
    runs = []
    for segment, provenance in zip(plan.segments, provenances(plan, IDS[model]), strict=True):
        start, stop = segment.start // BLOCK, segment.stop // BLOCK
        if stop > start:
            runs.append(run(provenance, start, stop))
    return Match(name, tuple(runs))


def made(watching: DriftWatch, matches: Sequence[Match], **how: object) -> Match:
    """The blocks of a plan that this router made and dispatched."""
    plan = decide(watching, matches, **how).plan
    watching.dispatched(plan, IDS["full"])
    assert plan.kind is PARTIAL
    return kept(plan)


BOUNDED = {"reuse": Reuse.BOUNDED, "max_loss": 0.05}


@pytest.mark.parametrize("tail", [8, 640], ids=["reused", "and computed after it"])
def test_a_block_of_an_older_profile_has_todays_loss(tail: int) -> None:
    """The pair was profiled again while the node kept its blocks: 0.02 then, 0.2 now."""
    old = made(router(0.02), [held("d1", "base", 100)], blocks=100, tail=tail, **BOUNDED)
    assert {one.provenance.loss for one in old.runs} == {0.02}
    today = router(0.2)
    within = decide(today, [old], **BOUNDED)
    assert (within.plan.kind, within.loss) == (PRIVATE, 0.0)
    beyond = decide(today, [old], reuse=Reuse.BOUNDED, max_loss=0.3)
    assert (beyond.plan.kind, beyond.loss, beyond.plan.loss) == (PARTIAL, 0.2, 0.2)
    anything = decide(today, [old], reuse=Reuse.ANY)
    assert anything.plan.reused_tokens == 100 * BLOCK
    # and what it leaves behind says so, too
    assert {one.loss for one in provenances(beyond.plan, IDS["full"])} == {0.2}


def test_a_better_profile_makes_older_blocks_better() -> None:
    old = made(router(0.2), [held("d1", "base", 100)], reuse=Reuse.ANY)
    assert decide(router(0.01), [old], **BOUNDED).loss == 0.01


def test_over_a_restart_with_the_same_profile_nothing_is_lost() -> None:
    first = router()
    old = made(first, [held("d1", "base", 100)], **BOUNDED)
    for watching in (first, router()):
        assert list(watching.usable([old])) == [old]
        assert decide(watching, [old], **BOUNDED).plan.reused_tokens == 100 * BLOCK


def test_a_group_that_is_no_longer_measured_is_for_those_who_ask_for_any() -> None:
    old = made(router(), [held("d1", "base", 100)], **BOUNDED)
    today = router(0.02, LayerGroup(4, 6))
    assert decide(today, [old], **BOUNDED).plan.kind is PRIVATE
    found = decide(today, [old], reuse=Reuse.ANY)
    assert found.plan.reused_tokens == 100 * BLOCK, "KV that is there and costs nothing"
    assert (found.loss, found.quality) == (math.inf, "unprofiled")


def test_what_a_node_says_of_a_loss_is_not_believed() -> None:
    watching = router(0.02)
    old = made(watching, [held("d1", "base", 100)], **BOUNDED)
    (first,) = old.runs
    lie = Match("d0", (msgspec.structs.replace(first, provenance=msgspec.structs.replace(first.provenance, loss=0.0)),))
    for router_ in (watching, router(0.02)):
        assert decide(router_, [lie], reuse=Reuse.BOUNDED, max_loss=0.01).plan.kind is PRIVATE
        assert decide(router_, [lie], **BOUNDED).loss == 0.02
    stranger = Provenance(b"x" * 16, IDS["full"], 0.0, IDS["full"], 0)
    assert decide(watching, [Match("d0", (run(stranger, 0, 100),))], **BOUNDED).plan.kind is PRIVATE


def test_exact_blocks_before_a_block_of_unknown_loss_are_used() -> None:
    stranger = Provenance(b"x" * 16, IDS["full"], 0.0, IDS["full"], 60 * BLOCK)
    match = Match("d0", (run(exact("full"), 0, 60), run(stranger, 60, 100)))
    found = decide(router(), [match], **BOUNDED)
    assert (found.plan.kind, found.quality, found.plan.reused_tokens) == (PlanKind.EXACT, "exact", 60 * BLOCK)


def test_of_blocks_made_by_another_process_the_pair_is_known() -> None:
    """So blocks of a pair that is well go on while another pair of the family is off, after a restart as well."""
    old = made(router(), [held("d1", "base", 100)], **BOUNDED)
    today = router()
    assert list(today.usable([old])) == [old]
    switch_off(today, "other")
    assert list(today.usable([old])) == [old]
    switch_off(today, "base")
    assert list(today.usable([old])) == []


def switch_off(watching: DriftWatch, sender: str) -> None:
    bad = DriftSample("r", IDS["full"], (DriftSource(IDS[sender], sender, PARTIAL, (2, 6)),), False, 0.0, 9.0, 8)
    while not watching.sampled(bad, 1.0):
        pass


@given(st.lists(st.sampled_from([20, 30, 50, 70]), min_size=1, max_size=3, unique=True), st.booleans())
def test_every_name_that_the_policy_gives_is_understood(stops: list[int], exact_first: bool) -> None:
    """Turn by turn with blocks of two senders: a router that made none of the plans reads the same losses and steps."""
    making, reading = router(), router()
    mine: list[Match] = [held("d0", "full", 10)] if exact_first else []
    for number, stop in enumerate(sorted(stops)):
        sender = ("base", "other")[number % 2]
        others = [held("d1" if sender == "base" else "d2", sender, stop)]
        found = decide(making, [*mine, *others], stop + 5, reuse=Reuse.ANY)
        making.dispatched(found.plan, IDS["full"])
        mine = [kept(found.plan)]
    (match,) = mine
    assert not match.runs[-1].provenance.exact
    assert list(making.usable(mine)) == mine
    assert list(reading.usable(mine)) == mine
    switch_off(reading, "upper")
    assert list(reading.usable(mine)) == mine, "what is unknown would be left out now"


def test_a_name_is_searched_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stranger, too: one look-up must not cost every group of every sender each time."""
    tried: list[object] = []
    real = taint_origins.segment_provenance
    monkeypatch.setattr(taint_origins, "segment_provenance", lambda *how: (tried.append(how), real(*how))[1])
    watching = router()
    stranger = Match("d0", (run(Provenance(b"x" * 16, IDS["full"], 0.0, IDS["full"], 0), 0, 100),))
    old = made(router(), [held("d1", "base", 100)], **BOUNDED)
    for matches in ([stranger], [old]):
        before = len(tried)
        watching.usable(matches)
        first = len(tried)
        assert first > before
        watching.usable(matches)
        assert len(tried) == first
