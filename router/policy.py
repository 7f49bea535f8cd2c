"""Chooses node and reuse plan of a request: pure, called once a request by the router process (docs/design.md section 5).

Every decode node of the model that is worth a look gets candidates: nothing reused, its own blocks, others' exact blocks, other
models' blocks under a recompute group, and combinations of them. The best by time to first token and node-seconds wins, exact
ones first where it is close. A prefix that nobody holds may be ordered from the family's prefill nodes (router/ordering.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvkin.kv.errors import NodeUnavailable
from kvkin.kv.plan import PlanKind
from kvkin.kv.provenance import quality_of
from kvkin.router.candidates import Candidate, Desk, Receiver
from kvkin.router.chains import Match
from kvkin.router.facts import facts_of
from kvkin.router.ordering import Ordering, order_for
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
from kvkin.router.search import Search, rank_of
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
_MAX_CONSIDERED = 4


def choose(
    request: PolicyRequest, matches: Sequence[Match], view: ClusterView, settings: PolicySettings = _DEFAULTS
) -> Decision:
    """The best plan within the request's quality bound. Raises NodeUnavailable if no decode node can run the model."""
    family = view.families[request.family]
    desk = Desk(request, facts_of(request.model, request.lineage, family), view.nodes, settings)
    receivers = [Receiver(node, desk) for node in _receiving(request.model, view.nodes)]
    if request.reuse is Reuse.OFF or desk.max_blocks == 0:
        receiver = min(receivers, key=lambda one: desk.alone_s(one, 0))
        why = "reuse is off" if request.reuse is Reuse.OFF else "the prompt is shorter than one block"
        return _decision(desk, [desk.nothing(receiver)], why)
    search = Search(desk, matches)
    for receiver in _promising(search, receivers):
        search.on(receiver)
    best = search.best
    ordering = order_for(desk, family, search.base, best)
    if ordering is None:
        return _decision(desk, search.weighed, "")
    if search.live(ordering, best):
        order = msgspec.structs.replace(ordering.request, background=False)
        return _decision(desk, search.weighed, "", ordering, live_order=order)
    if ordering.background:
        return _decision(desk, search.weighed, "", ordering, background_order=ordering.request)
    return _decision(desk, search.weighed, "")


def _receiving(model: str, nodes: Mapping[str, NodeView]) -> list[NodeView]:
    serving = [node for node in nodes.values() if node.role == "decode" and model in node.models]
    usable = [node for node in serving if node.usable]
    if not usable:
        states = ", ".join(f"{node.name} is {'draining' if node.alive else 'dead'}" for node in serving)
        raise NodeUnavailable(f"no decode node can take {model} now ({states or 'none has registered'})")
    return usable


def _promising(search: Search, receivers: Sequence[Receiver]) -> list[Receiver]:
    """Receivers worth a look: those that hold much of the context, and the least busy of the others."""
    desk, held = search.desk, search.held
    ranked = sorted(receivers, key=lambda one: desk.alone_s(one, held.get(one.name, 0)))
    enough = _HOLDER * desk.max_blocks
    holders, others = list[Receiver](), list[Receiver]()
    for one in ranked:
        blocks, shares = held.get(one.name, 0), one.name in search.sharing
        if blocks >= enough:
            # another one that holds as much and is at least as fast and as free does everything better
            if shares or not any(held[better.name] >= blocks and better.covers(one) for better in holders):
                holders.append(one)
        elif not others or (shares and len(others) == 1):
            # the least busy, and one that holds other models' blocks: it has them without a pull
            others.append(one)
    if holders:
        # a request leaves its cache only for a real advantage; each request by itself, so that a hot node keeps the others
        for one in others:
            one.penalty_s = desk.policy.spill_s
    return holders[:_MAX_RECEIVERS] + others


def _decision(
    desk: Desk,
    weighed: Sequence[Candidate],
    why: str,
    ordering: Ordering | None = None,
    live_order: OrderRequest | None = None,
    background_order: OrderRequest | None = None,
) -> Decision:
    """Word the best of the candidates as a decision."""
    chosen = min(weighed, key=rank_of)
    reason = why or _reason(chosen, weighed)
    estimate = desk.estimate(chosen)
    if ordering is not None:
        reason += (
            f"; {'live' if live_order else 'background'} prefill of {ordering.request.num_blocks} blocks ordered from "
        )
        reason += ordering.request.node
        estimate = msgspec.structs.replace(estimate, saving_s=ordering.saving_s)
    return Decision(
        node=chosen.receiver.name,
        plan=desk.plan(chosen, reason),
        estimate=estimate,
        quality=quality_of(chosen.loss, chosen.exact),
        loss=chosen.loss,
        reason=reason,
        live_order=live_order,
        background_order=background_order,
        considered=_considered(chosen, weighed),
    )


def _reason(chosen: Candidate, weighed: Sequence[Candidate]) -> str:
    if chosen.legs:
        return f"{label(chosen)}, {chosen.ttft_s:.3f} s"
    others = [candidate for candidate in weighed if candidate.legs]
    if not others:
        return "no usable KV of the context is held"
    best = min(others, key=rank_of)
    return f"computing is estimated at {chosen.ttft_s:.3f} s, {label(best)} at {best.ttft_s:.3f} s"


def _considered(chosen: Candidate, weighed: Sequence[Candidate]) -> tuple[Considered, ...]:
    return tuple(
        Considered(
            node=candidate.receiver.name,
            kind=candidate.legs[-1].option.kind if candidate.legs else PlanKind.PRIVATE,
            sources=tuple([leg.node for leg in candidate.legs]),
            quality=quality_of(candidate.loss, candidate.exact),
            loss=candidate.loss,
            reused_blocks=candidate.stop,
            ttft_s=candidate.ttft_s,
            objective_s=candidate.objective,
            chosen=candidate is chosen,
        )
        for candidate in sorted(weighed, key=rank_of)[:_MAX_CONSIDERED]
    )


def label(candidate: Candidate) -> str:
    """A candidate in a few words: what of how many blocks comes from where."""
    if not candidate.legs:
        return PlanKind.PRIVATE
    return " + ".join(
        f"{leg.option.kind} {leg.start}-{leg.stop} of {leg.node}{' (live)' if leg.run.order_id else ''}"
        for leg in candidate.legs
    )
