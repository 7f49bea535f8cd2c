"""The policy: what it chooses in plain situations, and what it must never do in any."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_world import (
    BLOCK,
    FAMILY,
    LAYERS,
    LAYOUT,
    LINEAGES,
    SETTINGS,
    TRANSITIONS,
    exact,
    family,
    held,
    node,
    request,
    run,
    view,
)

from kvkin.kv.cost import estimate, plan_work
from kvkin.kv.errors import NodeUnavailable
from kvkin.kv.lineage import shared_transition
from kvkin.kv.plan import LayerGroup, PlanKind, provenances
from kvkin.kv.provenance import Provenance, Quality, approximate, computed_after
from kvkin.router.index import Match, Run
from kvkin.router.policy import Decision, PolicyRequest, choose
from kvkin.router.policy_types import ClusterView, GroupChoice, PolicySettings
from kvkin.transport.messages import Reuse

TAINTED = approximate(exact("full"), 20 * BLOCK, b"shape", LINEAGES["full"].id, 0.02)
ANSWER = computed_after(TAINTED, 40 * BLOCK, LINEAGES["full"].id)
FOREIGN_TAINT = approximate(exact("other"), 0, b"shape", LINEAGES["other"].id, 0.04)
PREFILL = node("p", "base", role="prefill")


def shape(decision: Decision) -> list[tuple[str, int, int, str]]:
    """(kind, first block, block after the last, node) of the reused segments."""
    return [
        (one.kind.value, one.start // BLOCK, one.stop // BLOCK, one.nodes[0])
        for one in decision.plan.segments
        if one.sources
    ]


def decide(
    asked: PolicyRequest, matches: list[Match], cluster: ClusterView, settings: PolicySettings = SETTINGS
) -> Decision:
    decision = choose(asked, matches, cluster, settings)
    check(asked, decision, cluster)
    return decision


def check(asked: PolicyRequest, decision: Decision, cluster: ClusterView) -> None:
    """What holds for every decision."""
    plan, lineage = decision.plan, asked.lineage
    plan.validate(LAYERS)
    assert plan.num_tokens == asked.num_tokens
    chosen = cluster.nodes[decision.node]
    assert chosen.usable
    assert chosen.role == "decode"
    assert asked.model in chosen.models
    final = provenances(plan, lineage.id)[-1]
    assert (decision.quality, decision.loss) == (final.quality, final.loss)
    if asked.reuse is Reuse.OFF:
        assert plan.kind is PlanKind.PRIVATE
    if asked.reuse is Reuse.OWN:
        assert {segment.kind for segment in plan.segments} <= {PlanKind.EXACT, PlanKind.PRIVATE}
        assert {name for segment in plan.segments for name in segment.nodes} <= {decision.node}
        assert decision.live_order is decision.background_order is None
        assert decision.estimate.pull_s == decision.pull_bytes_per_s == 0.0
    if asked.reuse in (Reuse.EXACT, Reuse.OFF, Reuse.OWN):
        assert final.exact
    if asked.reuse is Reuse.BOUNDED:
        assert final.exact or final.loss <= (asked.max_loss if asked.max_loss >= 0 else 0.0) + 1e-12
        assert math.isfinite(final.loss)
    by_id = FAMILY.lineages
    for segment in plan.segments[:-1]:
        assert segment.start % BLOCK == segment.stop % BLOCK == 0
        assert all(cluster.nodes[name].alive for name in segment.nodes)
        for source in segment.sources:
            provenance = source.holder.provenance
            if segment.kind is PlanKind.EXACT:
                assert provenance.key == lineage.id
            if segment.kind is PlanKind.SHARED_PREFIX:
                assert provenance.exact
                shared = shared_transition(by_id[provenance.lineage_id], lineage)
                assert source.layers.stop <= shared
                assert segment.e_layer is not None
                assert segment.e_layer <= shared
    assert decision.live_order is None or decision.background_order is None
    assert [one.chosen for one in decision.considered] == [True] + [False] * (len(decision.considered) - 1)
    ours = decision.considered[0]
    assert (ours.node, ours.loss, ours.ttft_s) == (decision.node, decision.loss, decision.estimate.ttft_s)
    target_s = (
        None if asked.slo_s is None else min(asked.slo_s, math.inf if asked.deadline_s is None else asked.deadline_s)
    )
    if target_s is not None and ours.ttft_s <= target_s:
        # nothing that was weighed keeps the target with less loss
        assert not any(one.ttft_s <= target_s and one.loss < ours.loss for one in decision.considered)


# --- plain situations ---------------------------------------------------------------------------------------------------


def test_nothing_held_is_private() -> None:
    decision = decide(request("full"), [], view(node("d", "full")))
    assert decision.plan.kind is PlanKind.PRIVATE
    assert decision.quality is Quality.EXACT
    assert "no usable KV" in decision.reason


@pytest.mark.parametrize(
    ("tail", "reused"), [(8, 100), (0, 99)], ids=["unaligned", "an exact multiple leaves its last block to compute"]
)
def test_own_exact_blocks(tail: int, reused: int) -> None:
    decision = decide(request("full", tail=tail), [held("d", "full", 100)], view(node("d", "full")))
    assert shape(decision) == [("exact", 0, reused, "d")]
    assert decision.estimate.pull_s == 0.0


def test_prompt_below_one_block_is_private() -> None:
    decision = decide(request("full", blocks=0, tail=5), [], view(node("d", "full")))
    assert decision.plan.kind is PlanKind.PRIVATE


def test_exact_blocks_are_pulled_from_another_node_and_from_equal_weights_under_another_name() -> None:
    cluster = view(node("d", "copy"), node("e", "base"))
    assert shape(decide(request("copy"), [held("e", "base", 100)], cluster)) == [("exact", 0, 100, "e")]


def test_local_blocks_first_then_the_rest_over_the_wire() -> None:
    cluster = view(node("d", "full"), node("e", "full", queued_tokens=1e5))
    decision = decide(request("full"), [held("e", "full", 90), held("d", "full", 40)], cluster)
    assert shape(decision) == [("exact", 0, 40, "d"), ("exact", 40, 90, "e")]


def test_shared_prefix_pulls_up_to_the_deepest_transition_layer_and_is_exact() -> None:
    decision = decide(request("upper", reuse=Reuse.EXACT), [held("p", "base", 100)], view(node("d", "upper"), PREFILL))
    assert shape(decision) == [("shared-prefix", 0, 100, "p")]
    segment = decision.plan.segments[0]
    assert (segment.e_layer, segment.recompute) == (4, LayerGroup(4, LAYERS))
    assert decision.quality is Quality.EXACT


def test_without_hidden_states_there_is_no_shared_prefix() -> None:
    cluster = view(node("d", "upper"), PREFILL)
    assert shape(decide(request("upper"), [held("p", "base", 100, ())], cluster)) == []
    assert decide(request("upper"), [held("p", "base", 100, (2,))], cluster).plan.segments[0].e_layer == 2


def test_a_shorter_run_with_deeper_hidden_states_may_win() -> None:
    matches = [held("p", "base", 100, ()), held("p", "base", 95, TRANSITIONS)]
    assert shape(decide(request("upper"), matches, view(node("d", "upper"), PREFILL))) == [
        ("shared-prefix", 0, 95, "p")
    ]


@pytest.mark.parametrize(
    ("reuse", "max_loss", "group"),
    [
        (Reuse.ANY, 0.0, LayerGroup(4, 6)),
        (Reuse.BOUNDED, 0.1, LayerGroup(4, 6)),
        (Reuse.BOUNDED, 0.05, LayerGroup(2, 6)),
        (Reuse.BOUNDED, 0.01, None),
        (Reuse.BOUNDED, math.nan, None),
        (Reuse.BOUNDED, -1.0, None),
        (Reuse.EXACT, 1.0, None),
        (Reuse.OFF, 1.0, None),
    ],
)
def test_partial_reuse_keeps_the_bound(reuse: Reuse, max_loss: float, group: LayerGroup | None) -> None:
    asked = request("full", reuse=reuse, max_loss=max_loss)
    decision = decide(asked, [held("p", "base", 100)], view(node("d", "full"), PREFILL))
    assert decision.plan.segments[0].recompute == group
    if group is not None:
        assert decision.plan.kind is PlanKind.PARTIAL
        assert decision.plan.segments[0].e_layer == group.start
        assert decision.quality is Quality.BOUNDED


FULL_REUSE = {("base", "full"): (GroupChoice(None, 0.03), GroupChoice(LayerGroup(2, 6), 0.02))}


@pytest.mark.parametrize("max_loss", [0.03, 0.02])
def test_full_reuse_is_a_group_like_the_others(max_loss: float) -> None:
    cluster = view(node("d", "full"), PREFILL, family=family(FULL_REUSE))
    asked = request("full", reuse=Reuse.BOUNDED, max_loss=max_loss)
    decision = decide(asked, [held("p", "base", 100, ())], cluster)
    if max_loss < 0.03:
        assert decision.plan.kind is PlanKind.PRIVATE, "the smaller group needs hidden states that are not there"
        return
    segment = decision.plan.segments[0]
    assert (segment.kind, segment.recompute, segment.e_layer, segment.loss) == (PlanKind.PARTIAL, None, None, 0.03)
    assert segment.pulled_layers() == list(range(LAYERS))
    assert decision.quality is Quality.BOUNDED
    assert decision.loss == 0.03
    # what follows is tainted by it, and never offered as exact
    final = provenances(decision.plan, LINEAGES["full"].id)
    assert not any(one.exact for one in final)
    chosen = decision.considered[0]
    assert (chosen.kind, chosen.group, chosen.sources) == (PlanKind.PARTIAL, None, ("p",))


def test_full_reuse_of_blocks_that_the_node_holds_itself_keeps_its_loss() -> None:
    """Another model's blocks on the very node: nothing moves, nothing is computed, and still it is not exact."""
    cluster = view(node("d", "full", "base"), family=family(FULL_REUSE))
    decision = decide(request("full"), [held("d", "base", 100)], cluster)
    assert shape(decision) == [("partial", 0, 100, "d")]
    assert (decision.loss, decision.plan.loss, decision.quality) == (0.03, 0.03, Quality.BOUNDED)


@pytest.mark.parametrize("reuse", [Reuse.EXACT, Reuse.OWN, Reuse.OFF])
def test_full_reuse_is_approximate(reuse: Reuse) -> None:
    cluster = view(node("d", "full", "base"), family=family(FULL_REUSE))
    assert decide(request("full", reuse=reuse), [held("d", "base", 100)], cluster).plan.kind is PlanKind.PRIVATE


# --- own ----------------------------------------------------------------------------------------------------------------


def test_own_is_what_an_engines_prefix_cache_does() -> None:
    cluster = view(node("d", "full"), node("e", "full", queued_tokens=1e5), PREFILL)
    matches = [held("d", "full", 40), held("e", "full", 90), held("p", "base", 100)]
    asked = request("full", reuse=Reuse.OWN, order_id="o1", share_hint=9.0)
    assert shape(decide(asked, matches, cluster)) == [("exact", 0, 40, "d")]
    # the same request goes further where it may
    exact_plan = decide(request("full", reuse=Reuse.EXACT), matches, cluster)
    assert shape(exact_plan) == [("exact", 0, 40, "d"), ("exact", 40, 90, "e")]


def test_own_takes_neither_shared_layers_nor_tainted_blocks() -> None:
    cluster = view(node("d", "upper", "base"), PREFILL)
    assert shape(decide(request("upper", reuse=Reuse.OWN), [held("d", "base", 100)], cluster)) == []
    chain = Match("d", (run(exact("full"), 0, 20), run(TAINTED, 20, 40), run(ANSWER, 40, 90)))
    decision = decide(request("full", reuse=Reuse.OWN), [chain], view(node("d", "full")))
    assert shape(decision) == [("exact", 0, 20, "d")]


def test_own_prefers_the_node_that_has_the_context() -> None:
    cluster = view(node("d", "full", queued_tokens=500), node("e", "full"))
    assert decide(request("full", reuse=Reuse.OWN), [held("d", "full", 100)], cluster).node == "d"


@pytest.mark.parametrize("max_loss", [1.0, math.inf])
def test_unprofiled_groups_run_under_any_only(max_loss: float) -> None:
    matches, cluster = [held("o", "other", 100)], view(node("d", "full"), node("o", "other"))
    assert decide(request("full"), matches, cluster).quality is Quality.UNPROFILED
    bounded = request("full", reuse=Reuse.BOUNDED, max_loss=max_loss)
    assert decide(bounded, matches, cluster).plan.kind is PlanKind.PRIVATE


def test_a_group_from_layer_0_needs_no_hidden_states() -> None:
    decision = decide(request("other"), [held("d", "full", 100, ())], view(node("o", "other"), node("d", "full")))
    segment = decision.plan.segments[0]
    assert (segment.recompute, segment.e_layer) == (LayerGroup(0, 4), None)


def test_own_context_then_another_agents_answer_then_new_text() -> None:
    matches = [held("o", "other", 95), held("d", "full", 60)]
    decision = decide(request("full"), matches, view(node("d", "full"), node("o", "other")))
    assert shape(decision) == [("exact", 0, 60, "d"), ("partial", 60, 95, "o")]
    assert decision.plan.segments[-1].start == 95 * BLOCK


def test_two_other_agents_one_after_the_other() -> None:
    matches = [held("p", "base", 95), held("o", "other", 80), held("d", "full", 60)]
    both = {**FAMILY.groups, ("base", "full"): (GroupChoice(LayerGroup(4, 6), 0.5),)}
    cluster = view(node("d", "full"), node("o", "other"), PREFILL, family=family(both))
    assert shape(decide(request("full"), matches, cluster)) == [("exact", 0, 60, "d"), ("partial", 60, 95, "p")]


def test_own_tainted_blocks_keep_their_provenance() -> None:
    chain = Match("d", (run(exact("full"), 0, 20), run(TAINTED, 20, 40), run(ANSWER, 40, 90)))
    decision = decide(request("full"), [chain], view(node("d", "full")))
    assert shape(decision) == [("exact", 0, 20, "d"), ("partial", 20, 40, "d"), ("partial", 40, 90, "d")]
    folded = provenances(decision.plan, LINEAGES["full"].id)
    # going on computing after one's own answer keeps its provenance: the next turn hits both
    assert [one.key for one in folded] == [exact("full").key, TAINTED.key, ANSWER.key, ANSWER.key]
    assert decision.loss == pytest.approx(0.02)
    assert decision.plan.loss == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("reuse", "max_loss", "expected"),
    [(Reuse.BOUNDED, 0.05, 90), (Reuse.BOUNDED, 0.01, 20), (Reuse.EXACT, 1.0, 20)],
)
def test_own_tainted_blocks_count_against_the_bound(reuse: Reuse, max_loss: float, expected: int) -> None:
    chain = Match("d", (run(exact("full"), 0, 20), run(TAINTED, 20, 40), run(ANSWER, 40, 90)))
    decision = decide(request("full", reuse=reuse, max_loss=max_loss), [chain], view(node("d", "full")))
    assert decision.plan.segments[-1].start == expected * BLOCK


def test_tainted_blocks_of_another_model_pass_their_loss_on() -> None:
    groups = {("other", "full"): (GroupChoice(LayerGroup(2, 5), 0.03),)}
    matches = [Match("o", (run(FOREIGN_TAINT, 0, 100),))]
    cluster = view(node("d", "full"), node("o", "other"), family=family(groups))
    assert decide(request("full"), matches, cluster).loss == pytest.approx(0.07)
    bounded = request("full", reuse=Reuse.BOUNDED, max_loss=0.05)
    assert decide(bounded, matches, cluster).plan.kind is PlanKind.PRIVATE


def test_tainted_blocks_never_give_a_shared_prefix() -> None:
    tainted = approximate(exact("base"), 0, b"shape", LINEAGES["base"].id, 0.0)
    matches = [Match("p", (run(tainted, 0, 100),))]
    for reuse in (Reuse.EXACT, Reuse.ANY):
        decision = decide(request("upper", reuse=reuse), matches, view(node("d", "upper"), PREFILL))
        assert decision.plan.kind is PlanKind.PRIVATE


def test_a_tie_prefers_exact() -> None:
    matches = [held("p", "base", 100), held("e", "full", 96)]
    decision = decide(request("full"), matches, view(node("d", "full"), node("e", "full", queued_tokens=1e5), PREFILL))
    assert decision.plan.kind is PlanKind.EXACT


def test_a_short_context_is_not_pulled() -> None:
    cluster = view(node("d", "full"), node("e", "full", queued_tokens=1e6))
    assert shape(decide(request("full", blocks=3), [held("e", "full", 3)], cluster)) == []


def test_a_slow_wire_makes_computing_the_better_choice() -> None:
    settings = PolicySettings(cost=SETTINGS.cost)
    cluster = view(node("d", "full"), node("e", "full", queued_tokens=1e6, leases=500.0))
    decision = decide(request("full"), [held("e", "full", 100)], cluster, settings)
    assert decision.plan.kind is PlanKind.PRIVATE
    assert "computing is estimated" in decision.reason


# --- nodes --------------------------------------------------------------------------------------------------------------


def test_affinity_and_spill_are_decided_request_by_request() -> None:
    matches = [held("d", "full", 100)]
    cool = view(node("d", "full", queued_tokens=2000), node("e", "full"))
    hot = view(node("d", "full", queued_tokens=50_000), node("e", "full"))
    assert decide(request("full"), matches, cool).node == "d"
    spilled = decide(request("full"), matches, hot)
    # the hot node still serves its KV
    assert (spilled.node, shape(spilled)) == ("e", [("exact", 0, 100, "d")])


def test_holders_share_their_streams() -> None:
    matches = [held("a", "base", 100), held("b", "base", 100)]
    cluster = view(node("d", "full"), node("a", "base", leases=9.0), node("b", "base", leases=1.0))
    assert shape(decide(request("full"), matches, cluster))[0][3] == "b"


def test_dead_and_draining_nodes_get_no_work() -> None:
    matches = [held("d", "full", 100), held("p", "base", 100)]
    cluster = view(node("d", "full", draining=True), node("e", "full"), node("p", "base", role="prefill", alive=False))
    decision = decide(request("full"), matches, cluster)
    # a draining node still serves, a dead one does not
    assert (decision.node, shape(decision)) == ("e", [("exact", 0, 100, "d")])


def test_no_decode_node_is_a_clear_error() -> None:
    cluster = view(node("d", "full", draining=True), node("e", "full", alive=False), node("p", "full", role="prefill"))
    with pytest.raises(NodeUnavailable, match=r"full now \(d is draining, e is dead\)"):
        choose(request("full"), [], cluster, SETTINGS)
    with pytest.raises(NodeUnavailable, match=r"none has registered\)"):
        choose(request("full"), [], view(), SETTINGS)
    attached = view(node("s", "full", role="attached"))
    with pytest.raises(NodeUnavailable, match="none has registered; s serves it to clients of its own"):
        choose(request("full"), [], attached, SETTINGS)


def test_least_busy_node_runs_what_nobody_holds() -> None:
    cluster = view(node("d", "full", queued_tokens=3000), node("e", "full", queued_tokens=2000))
    for reuse in (Reuse.ANY, Reuse.OFF):
        assert decide(request("full", reuse=reuse), [], cluster).node == "e"


def test_a_deadline_moves_a_request() -> None:
    cluster = view(node("d", "full", queued_tokens=6000), node("e", "full"))
    matches = [held("d", "full", 100)]
    assert decide(request("full"), matches, cluster).node == "d"
    assert decide(request("full", deadline_s=0.3), matches, cluster).node == "e"


# --- orders -------------------------------------------------------------------------------------------------------------


def cold(**changes: object) -> PolicyRequest:
    return request("full", **({"order_id": "o1"} | changes))


def test_cold_prefix_with_expected_company_is_ordered_in_the_background() -> None:
    decision = decide(cold(share_hint=3.0), [], view(node("d", "full"), PREFILL))
    assert decision.plan.kind is PlanKind.PRIVATE
    order = decision.background_order
    assert order is not None
    assert (order.order_id, order.node, order.model, order.num_blocks) == ("o1", "p", "base", 100)
    assert (order.provenance, order.e_layers) == (exact("base"), TRANSITIONS)
    assert decision.estimate.saving_s > 0.0


def test_fan_out_decides_how_much_is_ordered() -> None:
    decision = decide(cold(fan_out=((20, 9.0), (40, 8.0), (64, 1.5), (96, 0.2))), [], view(node("d", "full"), PREFILL))
    assert decision.background_order is not None
    assert decision.background_order.num_blocks == 40


@pytest.mark.parametrize(
    "changes",
    [
        {"share_hint": 0.0, "fan_out": ((100, 9.0),)},
        {"share_hint": 0.5},
        {"share_hint": 3.0, "publish": False},
        {"share_hint": 3.0, "reuse": Reuse.OFF},
        {"share_hint": 3.0, "blocks": 15},
        {"share_hint": 3.0, "order_id": ""},
        {},
    ],
)
def test_no_order_without_a_reason(changes: dict[str, object]) -> None:
    decision = decide(cold(**changes), [], view(node("d", "full"), PREFILL))
    assert decision.background_order is decision.live_order is None


@pytest.mark.parametrize(
    "pool",
    [
        node("p", "base", role="prefill", queued_tokens=1e6),
        node("p", "base", role="prefill", draining=True),
        node("p", "other", role="prefill"),
    ],
    ids=["overloaded", "draining", "another model"],
)
def test_no_order_without_a_node_for_it(pool: object) -> None:
    decision = decide(cold(share_hint=9.0), [], view(node("d", "full"), pool))  # type: ignore[arg-type]
    assert decision.background_order is None


def test_base_model_publishes_its_own_context() -> None:
    asked = request("base", order_id="o1", share_hint=9.0)
    assert decide(asked, [], view(node("d", "base"), PREFILL)).background_order is None


def test_what_is_ordered_already_is_pulled_live_and_not_ordered_again() -> None:
    announced = held("p", "base", 100, order_id="o0")
    cluster = view(node("d", "full"), node("p", "base", role="prefill", queued_tokens=200))
    decision = decide(cold(share_hint=9.0), [announced], cluster)
    assert decision.background_order is decision.live_order is None
    assert decision.plan.segments[0].sources[0].holder.order_id == "o0"
    # too far behind in the queue: privately, but still no second order
    busy = view(node("d", "full"), node("p", "base", role="prefill", queued_tokens=9000))
    late = decide(cold(share_hint=9.0), [announced], busy)
    assert late.plan.kind is PlanKind.PRIVATE
    assert late.background_order is late.live_order is None


def test_live_order_where_the_pool_is_faster() -> None:
    cluster = view(node("d", "full"), node("p", "base", role="prefill", speed=8.0))
    decision = decide(cold(), [], cluster)
    order = decision.live_order
    assert order is not None
    assert not order.background
    assert decision.background_order is None
    assert shape(decision) == [("partial", 0, 100, "p")]
    assert decision.plan.segments[0].sources[0].holder.order_id == "o1"
    only_exact = decide(cold(reuse=Reuse.EXACT), [], cluster)
    assert only_exact.live_order is None
    # the base model itself gets an exact result that way
    base = decide(
        request("base", order_id="o1", reuse=Reuse.EXACT),
        [],
        view(node("d", "base"), node("p", "base", role="prefill", speed=8.0)),
    )
    assert shape(base) == [("exact", 0, 100, "p")]
    assert base.live_order is not None


def test_order_continues_what_the_pool_holds() -> None:
    cluster = view(node("d", "full"), node("p", "base", role="prefill", speed=8.0), node("q", "base", role="prefill"))
    decision = decide(cold(), [held("p", "base", 30)], cluster)
    assert decision.live_order is not None
    assert [(one.start // BLOCK, one.stop // BLOCK) for one in decision.plan.segments] == [
        (0, 30),
        (30, 100),
        (100, 100),
    ]


# --- anything -----------------------------------------------------------------------------------------------------------

MODELS = tuple(LINEAGES)
NODES = ("d0", "d1", "d2", "d3", "p0")


@st.composite
def chains(draw: st.DrawFn) -> Match:
    """A chain as the index offers it: perhaps exact, then perhaps tainted, then perhaps computed."""
    model = draw(st.sampled_from(MODELS))
    lineage_id = LINEAGES[model].id
    cuts = sorted(draw(st.sets(st.integers(1, 40), min_size=1, max_size=3)))
    e_layers = draw(st.sampled_from([(), (2,), (4,), TRANSITIONS]))
    kv_layers = draw(st.sampled_from([LAYERS, LAYERS, LAYERS, 4]))
    current = exact(model)
    runs: list[Run] = []
    start = 0
    for number, stop in enumerate(cuts):
        if draw(st.booleans()):
            loss = draw(st.sampled_from([0.0, 0.02, math.inf]))
            current = approximate(current, start * BLOCK, bytes([number]), lineage_id, loss)
        else:
            current = computed_after(current, start * BLOCK, lineage_id)
        if runs and runs[-1].provenance == current:
            runs[-1] = Run(current, runs[-1].start_block, stop, kv_layers, e_layers)
        else:
            runs.append(Run(current, start, stop, kv_layers, e_layers))
        start = stop
    name = draw(st.sampled_from(NODES))
    if len(runs) == 1 and runs[0].provenance.exact and draw(st.booleans()):
        runs = [Run(current, 0, start, kv_layers, e_layers, "o0")]
    return Match(name, tuple(runs))


REQUESTS = st.builds(
    lambda model, blocks, **rest: request(model, blocks, **rest),
    st.sampled_from(MODELS),
    st.integers(0, 44),
    tail=st.integers(0, 15).map(lambda tail: tail or 0),
    reuse=st.sampled_from(Reuse),
    max_loss=st.sampled_from([0.0, 0.02, 0.05, 1.0, math.inf, math.nan]),
    publish=st.booleans(),
    share_hint=st.sampled_from([-1.0, 0.0, 5.0]),
    fan_out=st.sampled_from([(), ((20, 3.0), (30, 1.0)), ((400, 3.0),)]),
    order_id=st.sampled_from(["", "new"]),
    deadline_s=st.sampled_from([None, 0.0, 0.1, 10.0]),
    slo_s=st.sampled_from([None, None, -1.0, 0.02, 0.1, 0.2, 5.0]),
).filter(lambda asked: asked.num_tokens > 0)


@st.composite
def clusters(draw: st.DrawFn) -> ClusterView:
    nodes = [
        node(
            name,
            *draw(st.sets(st.sampled_from(MODELS), min_size=1, max_size=3)),
            role="prefill" if name == "p0" else "decode",
            queued_tokens=draw(st.sampled_from([0.0, 500.0, 1e5])),
            leases=draw(st.sampled_from([0.0, 3.0])),
            speed=draw(st.sampled_from([0.0, 1.0, 10.0])),
            alive=draw(st.integers(0, 5)) > 0,
            draining=draw(st.integers(0, 5)) == 0,
        )
        for name in NODES
    ]
    return view(*nodes)


@settings(max_examples=200, deadline=None)
@given(asked=REQUESTS, matches=st.lists(chains(), max_size=6), cluster=clusters())
def test_every_decision_is_valid_and_within_the_bound(
    asked: PolicyRequest, matches: list[Match], cluster: ClusterView
) -> None:
    try:
        decision = decide(asked, matches, cluster)
    except NodeUnavailable:
        assert not any(
            one.usable and one.role == "decode" and asked.model in one.models for one in cluster.nodes.values()
        )
        return
    if decision.background_order is not None or decision.live_order is not None:
        assert asked.publish
    offered = {(match.node, one.provenance, one.order_id) for match in matches for one in match.runs}
    if decision.live_order is not None:
        order = decision.live_order
        offered.add((order.node, order.provenance, order.order_id))
    for segment in decision.plan.segments:
        for source in segment.sources:
            holder = source.holder
            assert (holder.node, holder.provenance, holder.order_id) in offered
    # what the policy added up leg by leg is what the cost model says of the plan
    ready = {"o0": 0.0}
    if not any(holder_id for _, _, holder_id in offered):
        work = plan_work(
            decision.plan,
            decision.node,
            {name: one.rates for name, one in cluster.nodes.items()},
            LAYOUT,
            SETTINGS.cost,
            ready,
        )
        again = estimate(work, cluster.nodes[decision.node].rates, LAYERS, SETTINGS.cost)
        assert again.ttft_s == pytest.approx(decision.estimate.ttft_s)
        assert again.node_s == pytest.approx(decision.estimate.node_s)


def test_provenance_of_another_family_is_of_no_use() -> None:
    stranger = Provenance(b"stranger", b"stranger")
    decision = decide(request("full"), [Match("d", (run(stranger, 0, 100),))], view(node("d", "full")))
    assert decision.plan.kind is PlanKind.PRIVATE
