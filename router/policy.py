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
_MAX_LINKED = 4  # of the other nodes, those whose best reuse is estimated: the ones with the fastest links,
_MAX_SHARING = 3  # and the least busy of those that hold other models' blocks
_MAX_CONSIDERED = 6  # alternatives of a decision that are shown


def choose(
    request: PolicyRequest, matches: Sequence[Match], view: ClusterView, settings: PolicySettings = _DEFAULTS
) -> Decision:
    """The best plan within the request's quality bound. Raises NodeUnavailable if no decode node can run the model."""
    family = view.families[request.family]
    desk = Desk(request, facts_of(request.model, request.lineage, family), view.nodes, settings)
    receivers = [Receiver(node, desk) for node in _receiving(request, view.nodes)]
    if request.reuse is Reuse.OFF or desk.max_blocks == 0:
        receiver = min(receivers, key=lambda one: desk.alone_s(one, 0))
        why = "reuse is off" if request.reuse is Reuse.OFF else "the prompt is shorter than one block"
        nothing = desk.nothing(receiver)
        return _decision(desk, [nothing], nothing, why)
    search = Search(desk, matches)
    for receiver in _promising(search, receivers):
        search.on(receiver)
    best = search.settle()
    ordering = None if desk.only_own else order_for(desk, family, search.base, best)
    if ordering is None:
        return _decision(desk, search.weighed, best)
    live = search.live(ordering, best)
    if live is not None:
        order = msgspec.structs.replace(ordering.request, background=False)
        return _decision(desk, search.weighed, live, ordering=ordering, live_order=order)
    if ordering.background:
        return _decision(desk, search.weighed, best, ordering=ordering, background_order=ordering.request)
    return _decision(desk, search.weighed, best)


def _receiving(request: PolicyRequest, nodes: Mapping[str, NodeView]) -> list[NodeView]:
    """Nodes that may run the request: those of its model, or the one that asks for itself, busy or not."""
    model = request.model
    if request.receiver:
        return [nodes[request.receiver]]
    serving = [node for node in nodes.values() if node.role == "decode" and model in node.models]
    usable = [node for node in serving if node.usable]
    if not usable:
        states = ", ".join(f"{node.name} is {'draining' if node.alive else 'dead'}" for node in serving)
        attached = [node.name for node in nodes.values() if node.role == "attached" and model in node.models]
        asked = f"; {' and '.join(attached)} serves it to clients of its own, over HTTP" if attached else ""
        raise NodeUnavailable(f"no decode node can take {model} now ({states or 'none has registered'}{asked})")
    return usable


def _promising(search: Search, receivers: Sequence[Receiver]) -> list[Receiver]:
    """Receivers worth a look: those that hold much of the context, the least busy of the others, and the one that would do best by
    reusing what others computed."""
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
    others += _reuser(search, ranked, [*holders[:_MAX_RECEIVERS], *others])
    if holders:
        # a request leaves its cache only for a real advantage; each request by itself, so that a hot node keeps the others
        for one in others:
            one.penalty_s = desk.policy.spill_s
    return holders[:_MAX_RECEIVERS] + others


def _reuser(search: Search, ranked: Sequence[Receiver], chosen: Sequence[Receiver]) -> list[Receiver]:
    """Besides the ``chosen`` the receiver that would do best by reusing others' blocks: a fast link, or blocks that are there
    already, may be worth more than a short queue.

    None where little can be reused, or where some chosen one is as fast, as free and as well linked as each of the others.
    """
    if search.reach < _HOLDER * search.desk.max_blocks:
        return []
    held, front = search.held, list[Receiver]()
    for one in ranked:
        blocks, rivals = held.get(one.name, 0), (*chosen, *front)
        # what it holds of other models' blocks is an advantage that rivals lack
        beaten = any(held.get(rival.name, 0) >= blocks and rival.covers(one) for rival in rivals)
        if one not in chosen and (one.name in search.sharing or not beaten):
            front.append(one)
    if len(front) > 1:
        linked = sorted(front, key=lambda one: one.view.rates.pull_bytes_per_s, reverse=True)[:_MAX_LINKED]
        sharing = [one for one in front if one.name in search.sharing][:_MAX_SHARING]
        return [min(dict.fromkeys([*linked, *sharing]), key=search.hope)]
    return front


def _decision(
    desk: Desk,
    weighed: Sequence[Candidate],
    chosen: Candidate,
    why: str = "",
    ordering: Ordering | None = None,
    live_order: OrderRequest | None = None,
    background_order: OrderRequest | None = None,
) -> Decision:
    """Word the chosen candidate as a decision."""
    reason = why or _reason(desk, chosen, weighed)
    estimate = desk.estimate(chosen)
    if ordering is not None:
        reason += (
            f"; {'live' if live_order else 'background'} prefill of {ordering.request.num_blocks} blocks ordered from "
        )
        reason += ordering.request.node
        estimate = msgspec.structs.replace(estimate, saving_s=ordering.saving_s)
    alternatives = _alternatives(chosen, weighed)
    return Decision(
        node=chosen.receiver.name,
        plan=desk.plan(chosen, reason),
        estimate=estimate,
        quality=quality_of(chosen.loss, chosen.exact),
        loss=chosen.loss,
        reason=reason,
        live_order=live_order,
        background_order=background_order,
        considered=tuple([_considered(candidate, candidate is chosen) for candidate in alternatives]),
        pull_bytes_per_s=_pull_bytes_per_s(desk, alternatives),
        layer_tokens_per_s=chosen.receiver.rate,
    )


def _reason(desk: Desk, chosen: Candidate, weighed: Sequence[Candidate]) -> str:
    target = ""
    if desk.slo_s is not None:
        kept = chosen.ttft_s <= desk.slo_s
        target = (
            f"; {'the least loss' if kept else 'the fastest, which is too late'} for the target of {desk.slo_s:.3f} s"
        )
    if chosen.legs:
        return f"{label(chosen)}, {chosen.ttft_s:.3f} s{target}"
    others = [candidate for candidate in weighed if candidate.legs]
    if not others:
        return "no usable KV of the context is held"
    best = min(others, key=rank_of)
    return f"computing is estimated at {chosen.ttft_s:.3f} s, {label(best)} at {best.ttft_s:.3f} s{target}"


def _alternatives(chosen: Candidate, weighed: Sequence[Candidate]) -> list[Candidate]:
    """The chosen one and the best of each other kind, by rank."""
    # plans that differ only in where they run, pull from and end are of one kind
    kinds = {tuple([leg.option for leg in chosen.legs])}
    found = [chosen]
    for candidate in sorted(weighed, key=rank_of):
        kind = tuple([leg.option for leg in candidate.legs])
        if kind not in kinds:
            kinds.add(kind)
            found.append(candidate)
            if len(found) == _MAX_CONSIDERED:
                break
    return found


def _considered(candidate: Candidate, chosen: bool) -> Considered:
    legs = candidate.legs
    kind, group, longest = PlanKind.PRIVATE, None, 0
    for leg in legs:
        kind = leg.option.kind
        if kind is PlanKind.PARTIAL and leg.stop - leg.start > longest:
            group, longest = leg.option.group, leg.stop - leg.start
    return Considered(
        candidate.receiver.name,
        kind,
        tuple([leg.node for leg in legs]),
        quality_of(candidate.loss, candidate.exact),
        candidate.loss,
        candidate.stop,
        candidate.ttft_s,
        candidate.objective,
        chosen,
        group,
    )


def _pull_bytes_per_s(desk: Desk, alternatives: Sequence[Candidate]) -> float:
    """The rate at which the chosen plan pulls, or else the best alternative that pulls."""
    for candidate in alternatives:
        for leg in candidate.legs:
            if leg.node != candidate.receiver.name:
                return candidate.receiver.bytes_per_s(leg.node, desk)
    return 0.0


def label(candidate: Candidate) -> str:
    """A candidate in a few words: what of how many blocks comes from where."""
    if not candidate.legs:
        return PlanKind.PRIVATE
    return " + ".join(
        f"{leg.option.kind} {leg.start}-{leg.stop} of {leg.node}{' (live)' if leg.run.order_id else ''}"
        for leg in candidate.legs
    )
