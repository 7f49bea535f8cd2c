"""A profiled frontier online: the plan moves along it with queues, links and targets, always within the request's bound."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_world import BLOCK, LAYERS, LAYOUT, SETTINGS, family, held, request, view

from kvkin.kv.cost import NodeRates
from kvkin.kv.frontier import point, snap, useful
from kvkin.kv.layout import KVLayout, Plane
from kvkin.kv.lineage import LayerWeights, fold_lineage
from kvkin.kv.plan import LayerGroup, PlanKind
from kvkin.kv.provenance import exact_provenance
from kvkin.router.index import Match, Run
from kvkin.router.policy import Decision, choose
from kvkin.router.policy_types import ClusterView, FamilyView, GroupChoice, NodeView, PolicyRequest, PolicySettings
from kvkin.transport.messages import Reuse

BLOCKS = 100
SPEED = 1e5  # layer-tokens a second: 1,600 tokens are private in 0.13 s
FRONTIER = (
    GroupChoice(None, 0.04),
    GroupChoice(LayerGroup(4, 6), 0.03),
    GroupChoice(LayerGroup(4, 8), 0.02),
    GroupChoice(LayerGroup(0, 6), 0.01),
)
PROFILED = family({("base", "full"): FRONTIER})
HELD = [held("p", "base", BLOCKS)]


def world(bytes_per_s: float = 1e9, queued_tokens: float = 0.0, family: FamilyView = PROFILED) -> ClusterView:
    decode = NodeView("d", "decode", ("full",), NodeRates(SPEED, bytes_per_s, queued_tokens))
    return view(decode, NodeView("p", "prefill", ("base",), NodeRates(SPEED, bytes_per_s)), family=family)


def plan(
    cluster: ClusterView,
    slo_s: float | None = None,
    max_loss: float = 0.05,
    reuse: Reuse = Reuse.BOUNDED,
    settings: PolicySettings = SETTINGS,
) -> Decision:
    return choose(request("full", BLOCKS, reuse=reuse, max_loss=max_loss, slo_s=slo_s), HELD, cluster, settings)


def recomputed(decision: Decision) -> int:
    """Layers that the context costs the receiver: all of them without reuse."""
    segment = decision.plan.segments[0]
    return len(segment.recomputed_layers(LAYERS)) if segment.sources else LAYERS


# --- without a target: the fastest within the bound ---------------------------------------------------------------------


def test_a_slower_link_favours_recompute_and_in_the_end_private() -> None:
    rates = [10 ** (exponent / 4) for exponent in range(40, 14, -1)]
    decisions = [plan(world(rate)) for rate in rates]
    layers = [recomputed(one) for one in decisions]
    assert layers == sorted(layers), "each slower link recomputes as much or more"
    assert set(layers) == {0, 2, 4, 6, LAYERS}, "and every point has its range of bandwidths"
    assert decisions[-1].plan.kind is PlanKind.PRIVATE
    assert decisions[-1].loss == 0.0
    # each choice is the fastest that the bound allows
    for rate, one in zip(rates, decisions, strict=True):
        rivals = [plan(world(rate, family=family({("base", "full"): (choice,)}))) for choice in FRONTIER]
        # ties prefer exact plans by a tenth
        assert one.estimate.ttft_s <= 1.1 * min(rival.estimate.ttft_s for rival in rivals) + 1e-9


# docs/log.md, Pipeline: SmolLM2-135M, 1,024 + 32 tokens; ms to the first token at a rate in Gbit/s
MEASURED = {
    0.1: {"reuse_only": 3781, "pipelined": 2711, "private": 2234},
    0.39: {"reuse_only": 979, "pipelined": 923, "private": 2325},
    2.0: {"reuse_only": 246, "pipelined": 875, "private": 2254},
}
GROUP_OF = {"reuse_only": None, "pipelined": LayerGroup(10, 20)}


@pytest.mark.parametrize("gbit_per_s", MEASURED)
def test_the_plan_is_the_one_that_was_measured_to_be_fastest(gbit_per_s: float) -> None:
    """The policy on the geometry and the rates of docs/log.md, where 0.1 Gbit/s is too slow for any reuse."""
    layers, tokens, measured = 30, 1056, MEASURED[gbit_per_s]
    layout = KVLayout(layers, (Plane("k", 3, 64), Plane("v", 3, 64)), 576, "float32", BLOCK)
    sender, receiver = (
        fold_lineage(b"root", b"float32", [LayerWeights(name, name, b"geometry")] * layers) for name in (b"base", b"qa")
    )
    choices = tuple(GroupChoice(group, 0.01) for group in GROUP_OF.values())
    smollm2 = FamilyView(
        "f",
        "base",
        layout,
        {sender.id: sender, receiver.id: receiver},
        {sender.id: ("base",), receiver.id: ("qa",)},
        {("base", "qa"): choices},
        (10,),
    )
    rates = NodeRates(1e3 * tokens * layers / measured["private"], gbit_per_s * 1e9 / 8)
    cluster = view(NodeView("d", "decode", ("qa",), rates), NodeView("p", "prefill", ("base",), rates), family=smollm2)
    asked = PolicyRequest(
        model="qa",
        family="f",
        lineage=receiver,
        num_tokens=tokens,
        block_size=BLOCK,
        num_blocks=tokens // BLOCK,
        num_layers=layers,
    )
    run = Run(exact_provenance(sender.id), 0, 1024 // BLOCK, layers, (10,))
    decision = choose(asked, [Match("p", (run,))], cluster, SETTINGS)
    fastest = min(measured, key=measured.__getitem__)
    segment = decision.plan.segments[0]
    if fastest == "private":
        assert decision.plan.kind is PlanKind.PRIVATE
    else:
        assert (decision.plan.kind, segment.recompute) == (PlanKind.PARTIAL, GROUP_OF[fastest])
    # and the estimate is no fantasy
    assert 1e3 * decision.estimate.ttft_s == pytest.approx(measured[fastest], rel=0.1, abs=60)


@pytest.mark.parametrize(("max_loss", "layers"), [(0.05, 0), (0.04, 0), (0.03, 2), (0.025, 4), (0.01, 6), (0.0, 8)])
def test_the_bound_decides_where_the_frontier_may_be_entered(max_loss: float, layers: int) -> None:
    decision = plan(world(), max_loss=max_loss)
    assert recomputed(decision) == layers
    assert decision.loss <= max_loss


# --- with a target: the least loss that keeps it --------------------------------------------------------------------------


def test_a_longer_queue_moves_the_plan_towards_reuse() -> None:
    decisions = [plan(world(queued_tokens=tokens), slo_s=0.2) for tokens in range(0, 2600, 20)]
    losses, layers = [one.loss for one in decisions], [recomputed(one) for one in decisions]
    assert losses == sorted(losses)
    assert layers == sorted(layers, reverse=True)
    assert [*dict.fromkeys(losses)] == [0.0, 0.01, 0.02, 0.03, 0.04], "point by point, from private to full reuse"
    kept = [one.estimate.ttft_s <= 0.2 for one in decisions]
    assert kept == sorted(kept, reverse=True)
    assert not kept[-1]
    # beyond the target there is no reason to lose time: the fastest
    assert decisions[-1].estimate.ttft_s == plan(world(queued_tokens=2580.0)).estimate.ttft_s


def test_a_target_follows_the_link_as_well() -> None:
    """Under a target that computing misses, a slower link means more recompute and less loss, then nothing that keeps it."""
    rates = [10 ** (exponent / 8) for exponent in range(80, 44, -1)]
    decisions = [plan(world(rate), slo_s=0.05) for rate in rates]
    kept = [one for one in decisions if one.estimate.ttft_s <= 0.05]
    assert kept
    assert [recomputed(one) for one in kept] == sorted(recomputed(one) for one in kept)
    assert [one.loss for one in kept] == sorted((one.loss for one in kept), reverse=True)
    assert decisions[-1].plan.kind is PlanKind.PRIVATE


@pytest.mark.parametrize(
    ("slo_s", "layers"),
    [(10.0, 8), (0.13, 8), (0.1, 6), (0.07, 4), (0.04, 2), (0.02, 0), (0.001, 0), (0.0, 0), (-5.0, 0)],
)
def test_the_target_buys_quality_with_time(slo_s: float, layers: int) -> None:
    decision = plan(world(), slo_s=slo_s)
    assert recomputed(decision) == layers
    if slo_s >= 0.02:
        assert decision.estimate.ttft_s <= slo_s
        assert "the least loss for the target" in decision.reason
    else:
        assert "the fastest, which is too late" in decision.reason


def test_the_bound_holds_under_a_target_that_only_more_loss_would_keep() -> None:
    decision = plan(world(), slo_s=0.02, max_loss=0.02)
    assert (recomputed(decision), decision.loss) == (4, 0.02)
    assert decision.estimate.ttft_s > 0.02


def test_a_deadline_before_the_target_is_the_target() -> None:
    asked = request("full", BLOCKS, reuse=Reuse.BOUNDED, slo_s=1.0, deadline_s=0.05)
    decision = choose(asked, HELD, world(), SETTINGS)
    assert recomputed(decision) == 2
    assert decision.estimate.ttft_s <= 0.05


def test_a_profiled_plan_is_preferred_to_an_unprofiled_one_that_is_as_timely() -> None:
    both = family({("base", "full"): (GroupChoice(None), GroupChoice(LayerGroup(4, 6), 0.03))})
    assert plan(world(family=both), slo_s=0.05, reuse=Reuse.ANY).loss == 0.03
    assert plan(world(family=both), slo_s=0.02, reuse=Reuse.ANY).loss == math.inf


def test_among_equal_losses_the_cheapest() -> None:
    """A measured gain counts as no loss: then full reuse keeps a target as well as private does, and costs less."""
    fine = family({("base", "full"): (GroupChoice(None, 0.0),)})
    assert recomputed(plan(world(family=fine), slo_s=1.0)) == 0
    assert recomputed(plan(world(family=fine), slo_s=1.0, reuse=Reuse.EXACT)) == LAYERS


def test_another_node_may_keep_what_the_holder_misses() -> None:
    busy = NodeView("d", "decode", ("full",), NodeRates(SPEED, 1e9, 3000.0))
    idle = NodeView("e", "decode", ("full",), NodeRates(SPEED, 1e9))
    cluster = view(busy, idle, family=PROFILED)
    matches = [held("d", "full", BLOCKS)]
    assert choose(request("full", BLOCKS, reuse=Reuse.EXACT), matches, cluster, SETTINGS).node == "d"
    moved = choose(request("full", BLOCKS, reuse=Reuse.EXACT, slo_s=0.1), matches, cluster, SETTINGS)
    assert moved.node == "e"
    assert moved.estimate.ttft_s <= 0.1


def test_a_live_order_may_keep_a_target() -> None:
    """Nothing is held and computing is too late, but a prefill node is fast enough to be pulled from while it computes."""
    decode = NodeView("d", "decode", ("full",), NodeRates(SPEED, 1e9))
    prefill = NodeView("p", "prefill", ("base",), NodeRates(20 * SPEED, 1e9))
    cluster = view(decode, prefill, family=PROFILED)
    asked = request("full", BLOCKS, reuse=Reuse.BOUNDED, order_id="o1", slo_s=0.12)
    decision = choose(asked, [], cluster, SETTINGS)
    assert decision.live_order is not None
    assert decision.estimate.ttft_s <= 0.12
    relaxed = choose(request("full", BLOCKS, reuse=Reuse.BOUNDED, order_id="o1", slo_s=1.0), [], cluster, SETTINGS)
    assert relaxed.live_order is None, "where the target is kept without loss, nothing approximate is waited for"
    assert relaxed.plan.kind is PlanKind.PRIVATE


def test_the_decision_shows_what_it_went_by() -> None:
    decision = plan(world(queued_tokens=100.0), slo_s=0.05)
    assert decision.pull_bytes_per_s == 1e9
    assert decision.layer_tokens_per_s == SPEED
    assert decision.estimate.queue_s == pytest.approx(100 * LAYERS / SPEED)
    groups = {(one.kind, one.group, one.loss) for one in decision.considered}
    assert (PlanKind.PRIVATE, None, 0.0) in groups
    assert len([one for one in decision.considered if one.kind is PlanKind.PARTIAL]) >= 2
    assert decision.considered[0].group == LayerGroup(4, 6)


# --- anything -----------------------------------------------------------------------------------------------------------

GROUPS = [None, *(LayerGroup(start, stop) for start in (0, 2, 4) for stop in range(start + 1, LAYERS + 1))]


@settings(max_examples=150, deadline=None)
@given(
    losses=st.dictionaries(st.sampled_from(GROUPS), st.sampled_from([0.0, 0.01, 0.02, 0.03, 0.05, 0.2]), min_size=1),
    rate=st.floats(5.0, 10.0).map(lambda exponent: 10**exponent),
    queued=st.sampled_from([0.0, 500.0, 3000.0]),
    slo_s=st.sampled_from([None, 0.01, 0.03, 0.08, 0.2, 1.0]),
    max_loss=st.sampled_from([0.0, 0.02, 0.05, 1.0]),
)
def test_no_group_that_was_measured_would_have_been_better(
    losses: dict[LayerGroup | None, float], rate: float, queued: float, slo_s: float | None, max_loss: float
) -> None:
    """Against every measured group tried by itself, those included that are not offered because others beat them."""
    points = [point(group, loss) for group, loss in losses.items()]
    usable = [one for one in snap(points, (2, 4)) if one.layers < LAYERS]
    offered = useful(usable, LAYERS, LAYOUT.kv_token_bytes, LAYOUT.hidden_size * LAYOUT.dtype_bytes)

    def decide(choices: list[GroupChoice]) -> Decision:
        return plan(world(rate, queued, family({("base", "full"): tuple(choices)})), slo_s, max_loss)

    decision = decide([GroupChoice(one.group, one.loss) for one in offered])
    rivals = [decide([GroupChoice(one.group, one.loss)]) for one in usable]
    if slo_s is None:
        best = min((rival.considered[0].objective_s for rival in rivals), default=math.inf)
        # an exact plan may be a tenth slower; a pull that hides behind compute is priced at a hundredth
        assert decision.considered[0].objective_s <= 1.1 * best * 1.02
        return
    kept = [rival.loss for rival in rivals if rival.estimate.ttft_s <= slo_s]
    if kept:
        assert decision.estimate.ttft_s <= slo_s
        assert decision.loss <= min(kept)
    else:
        assert decision.estimate.ttft_s <= min((rival.estimate.ttft_s for rival in rivals), default=math.inf) + 1e-9
