"""Chooses node and reuse plan of a request: pure, called once a request by the router process (DESIGN.md section 5).

Every decode node of the model that is worth a look gets candidates: nothing reused, its own blocks, others' exact blocks, other
models' blocks under a recompute group, and combinations of them. The best by time to first token and node-seconds wins, exact
ones first where it is close. A prefix that nobody holds may be ordered from the family's prefill nodes (router/ordering.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import msgspec

from kvkin.kv.errors import NodeUnavailable
from kvkin.kv.plan import PlanKind, provenances
from kvkin.kv.provenance import quality_of
from kvkin.router.candidates import Candidate, Desk
from kvkin.router.chains import Match
from kvkin.router.facts import facts_of
from kvkin.router.ordering import Ordering, live_ready_s, order_for
from kvkin.router.policy_types import (
    ClusterView,
    Considered,
    Decision,
    FamilyView,
    GroupChoice,
    NodeView,
    OrderRequest,
    PolicyRequest,
    PolicySettings,
)
from kvkin.router.search import Search
from kvkin.transport.messages import Reuse

__all__ = [
    "ClusterView",
    "Considered",
    "Decision",
    "FamilyView",
    "GroupChoice",
    "NodeView",
    "OrderRequest",
    "PolicyRequest",
    "PolicySettings",
    "choose",
]

_DEFAULTS = PolicySettings()
_MAX_RECEIVERS = 3  # holders of the context that are weighed against each other
_HOLDER = 0.125  # share of the context that a node must hold to count as one
_MAX_CONSIDERED = 8


def choose(
    request: PolicyRequest, matches: Sequence[Match], view: ClusterView, settings: PolicySettings = _DEFAULTS
) -> Decision:
    """The best plan within the request's quality bound. Raises NodeUnavailable if no decode node can run the model."""
    family = view.families[request.family]
    desk = Desk(request, facts_of(request.model, request.lineage, family), view.nodes, settings)
    receivers = _receivers(request.model, view.nodes)
    if request.reuse is Reuse.OFF or desk.max_blocks == 0:
        node = min(receivers, key=lambda receiver: desk.alone_s(receiver, 0))
        why = "reuse is off" if request.reuse is Reuse.OFF else "the prompt is shorter than one block"
        return _decision(desk, [desk.price(desk.nothing(node))], why)
    usable = [match for match in matches if _usable(match, view.nodes)]
    desk.ready_s = live_ready_s(usable, desk)
    search = Search(desk, usable)
    for receiver, penalty_s in _promising(desk, receivers, usable):
        search.on(receiver, penalty_s)
    best = search.best
    ordering = order_for(desk, family, usable, best)
    if ordering is None:
        return _decision(desk, search.weighed, "")
    if search.live(ordering, best):
        order = msgspec.structs.replace(ordering.request, background=False)
        return _decision(desk, search.weighed, "", ordering, live_order=order)
    if ordering.background:
        return _decision(desk, search.weighed, "", ordering, background_order=ordering.request)
    return _decision(desk, search.weighed, "")


def _receivers(model: str, nodes: Mapping[str, NodeView]) -> list[NodeView]:
    serving = [node for node in nodes.values() if node.role == "decode" and model in node.models]
    usable = [node for node in serving if node.usable]
    if not usable:
        states = ", ".join(f"{node.name} is {'draining' if node.alive else 'dead'}" for node in serving)
        raise NodeUnavailable(f"no decode node can take {model} now ({states or 'none has registered'})")
    return usable


def _usable(match: Match, nodes: Mapping[str, NodeView]) -> bool:
    """A draining node takes no work but still serves what it holds; what it has not finished yet it may never."""
    node = nodes.get(match.node)
    return node is not None and node.alive and not (node.draining and match.runs[-1].order_id)


def _promising(desk: Desk, receivers: Sequence[NodeView], matches: Sequence[Match]) -> list[tuple[NodeView, float]]:
    """Receivers worth a look, with the seconds by which they must be better: holders, and the least busy of the others."""
    own, local = dict[str, int](), set[str]()
    for match in matches:
        local.add(match.node)
        if match.runs[0].provenance.lineage_id == desk.facts.lineage_id:
            own[match.node] = max(own.get(match.node, 0), min(match.num_blocks, desk.max_blocks))
    alone_s = {node.name: desk.alone_s(node, own.get(node.name, 0)) for node in receivers}
    ranked = sorted(receivers, key=lambda node: alone_s[node.name])
    holders = [node for node in ranked if own.get(node.name, 0) >= _HOLDER * desk.max_blocks]
    others = [node for node in ranked if node not in holders]
    found = [(node, 0.0) for node in holders[:_MAX_RECEIVERS]]
    # a request leaves its cache only for a real advantage; each request by itself, so that a hot node keeps the others
    penalty_s = desk.policy.spill_s if found else 0.0
    found += [(node, penalty_s) for node in others[:1]]
    # a node that holds other models' blocks has them without a pull
    found += [(node, penalty_s) for node in [node for node in others[1:] if node.name in local][:1]]
    return found


def _decision(
    desk: Desk,
    weighed: Sequence[Candidate],
    why: str,
    ordering: Ordering | None = None,
    live_order: OrderRequest | None = None,
    background_order: OrderRequest | None = None,
) -> Decision:
    """Word the best of the candidates as a decision; its quality is what folding the plan's provenance says."""
    chosen = min(weighed, key=lambda candidate: candidate.rank)
    reason = why or _reason(chosen, weighed)
    estimate = chosen.estimate
    if ordering is not None:
        reason += (
            f"; {'live' if live_order else 'background'} prefill of {ordering.request.num_blocks} blocks ordered from "
        )
        reason += ordering.request.node
        estimate = msgspec.structs.replace(estimate, saving_s=ordering.saving_s)
    plan = desk.plan(chosen, reason)
    final = provenances(plan, desk.facts.lineage_id)[-1]
    assert final.exact == chosen.exact, f"the plan is not as exact as it was priced: {plan}"
    return Decision(
        node=chosen.node.name,
        plan=plan,
        estimate=estimate,
        quality=final.quality,
        loss=final.loss,
        reason=reason,
        live_order=live_order,
        background_order=background_order,
        considered=_considered(chosen, weighed),
    )


def _reason(chosen: Candidate, weighed: Sequence[Candidate]) -> str:
    if chosen.legs:
        return f"{label(chosen)}, {chosen.estimate.ttft_s:.3f} s"
    others = [candidate for candidate in weighed if candidate.legs]
    if not others:
        return "no usable KV of the context is held"
    best = min(others, key=lambda candidate: candidate.rank)
    return f"computing is estimated at {chosen.estimate.ttft_s:.3f} s, {label(best)} at {best.estimate.ttft_s:.3f} s"


def _considered(chosen: Candidate, weighed: Sequence[Candidate]) -> tuple[Considered, ...]:
    found = []
    for candidate in heapq.nsmallest(_MAX_CONSIDERED, weighed, key=lambda candidate: candidate.rank):
        found.append(
            Considered(
                node=candidate.node.name,
                label=label(candidate),
                quality=quality_of(candidate.loss, candidate.exact),
                loss=candidate.loss,
                reused_blocks=candidate.stop,
                ttft_s=candidate.estimate.ttft_s,
                objective_s=candidate.objective,
                chosen=candidate is chosen,
            )
        )
    return tuple(found)


def label(candidate: Candidate) -> str:
    """A candidate in a few words: what of how many blocks comes from where."""
    if not candidate.legs:
        return PlanKind.PRIVATE.value
    return " + ".join(
        f"{leg.option.kind.value} {leg.start}-{leg.stop} of {leg.node}{' (live)' if leg.run.order_id else ''}"
        for leg in candidate.legs
    )
