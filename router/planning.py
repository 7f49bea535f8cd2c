"""From a prepared prompt to a decision: asks index and policy, and words the messages that carry the decision out.

Pure; the core's only way to the policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kvkin.kv.plan import ReusePlan
from kvkin.router.drift import DriftWatch
from kvkin.router.index import Match, PrefixIndex
from kvkin.router.membership import Membership
from kvkin.router.orders import Order
from kvkin.router.policy_types import (
    ClusterView,
    Considered,
    Decision,
    OrderRequest,
    PolicyRequest,
    PolicySettings,
)
from kvkin.router.prompts import Prompt
from kvkin.router.requests import Request
from kvkin.router.settings import RouterSettings
from kvkin.transport.messages import Alternative, DecisionInputs, Generate, Reuse
from kvkin.transport.node_messages import Execute, Planned, PrefillOrder

Choose = Callable[[PolicyRequest, Sequence[Match], ClusterView, PolicySettings], Decision]


class Planner:
    """Binds index, membership, policy and the watch for drift together for one router."""

    def __init__(
        self,
        settings: RouterSettings,
        index: PrefixIndex,
        membership: Membership,
        choose: Choose,
        drift: DriftWatch,
    ) -> None:
        self._settings, self._index, self._membership, self._choose = settings, index, membership, choose
        self._drift = drift
        self._lineage_ids = {name: model.lineage.id for name, model in settings.models.items()}

    def decide(self, request: Request, order_id: str, now: float) -> Decision:
        """Raises NodeUnavailable if no node can run the request now."""
        prompt, message = prompt_of(request), request.message
        model, family = self._settings.models[message.model], self._settings.family_of(message.model)
        reusing = message.reuse is not Reuse.OFF
        sharing = reusing and message.reuse is not Reuse.OWN
        fan_out = self._index.fan_out(family.name, model.name, prompt.hashes, now) if sharing else ()
        if request.attempt == 0 and sharing and message.publish:
            # a request that neither hits nor publishes is a measurement, not a sign of what is popular
            self._index.observe(family.name, model.name, prompt.hashes, now)
        slo_s = self._slo_s(message)
        asked = PolicyRequest(
            model=model.name,
            family=family.name,
            lineage=model.lineage,
            num_tokens=len(prompt.token_ids),
            block_size=family.layout.block_size,
            num_blocks=len(prompt.hashes),
            num_layers=family.layout.num_layers,
            reuse=message.reuse,
            max_loss=message.max_loss,
            publish=message.publish,
            share_hint=message.share_hint,
            fan_out=fan_out,
            order_id=order_id,
            deadline_s=request.deadline_at - now,
            slo_s=None if slo_s is None else request.received_at + slo_s - now,
            receiver=request.receiver,
        )
        matches = self._index.match(prompt.hashes, prompt.root) if reusing else []
        view = ClusterView(self._membership.views(now, request.failed_on), self._drift.families)
        decision = self._choose(asked, self._drift.usable(matches), view, self._settings.policy)
        return self._drift.explained(decision, asked, matches)

    def inputs(self, request: Request, decision: Decision) -> DecisionInputs:
        """What the decision went by, for the report of ``request``."""
        return DecisionInputs(
            max_loss=request.message.max_loss,
            slo_s=self._slo_s(request.message),
            ttft_s=decision.estimate.ttft_s,
            queue_s=decision.estimate.queue_s,
            pull_bytes_per_s=decision.pull_bytes_per_s,
            prefill_layer_tokens_per_s=decision.layer_tokens_per_s,
            considered=tuple(map(_alternative, decision.considered)),
        )

    def _slo_s(self, message: Generate) -> float | None:
        """The target for the first token, counted from the request's arrival: the client's, or else the cluster's."""
        return self._settings.policy.ttft_slo_s if message.ttft_slo_s is None else message.ttft_slo_s

    def execute(self, request: Request, decision: Decision, now: float) -> Execute:
        """The message to the decode node; ``request.attempt_id`` names it."""
        prompt, message = prompt_of(request), request.message
        receiver = self._lineage_ids[message.model]
        self._drift.dispatched(decision.plan, receiver)
        return Execute(
            request_id=request.attempt_id,
            model=message.model,
            token_ids=prompt.token_ids,
            root=prompt.root,
            plan=decision.plan,
            sampling=message.sampling,
            publish=message.publish,
            deadline_s=request.deadline_at - now,
            source_addresses=self._addresses(decision.plan),
            hash_ms=prompt.hash_ms,
            route_ms=request.route_ms,
            check=self._drift.check_of(request.request_id, decision.plan, receiver),
            engine_cache=message.reuse is not Reuse.OFF,
        )

    def planned(self, request: Request, decision: Decision) -> Planned:
        """The answer to the attached server that asked for ``request``."""
        self._drift.dispatched(decision.plan, self._lineage_ids[request.message.model])
        plan = decision.plan
        return Planned(request.message.id, prompt_of(request).root, plan, self._addresses(plan))

    def _addresses(self, plan: ReusePlan) -> dict[str, str]:
        """Where layer streams of the plan's nodes are opened."""
        nodes = {node for segment in plan.segments for node in segment.nodes}
        members = [member for member in map(self._membership.member, sorted(nodes)) if member is not None]
        return {member.name: member.registration.source_address for member in members}

    def order(self, request: Request, wanted: OrderRequest, now: float) -> tuple[Order, PrefillOrder] | None:
        """The order's record and message, already announced to the index; None if its node is gone by now."""
        member = self._membership.member(wanted.node)
        if member is None or self._membership.member_of(member.peer) is None:
            return None
        prompt = prompt_of(request)
        block_size = self._settings.family_of(request.message.model).layout.block_size
        hashes = prompt.hashes[: wanted.num_blocks]
        self._index.announce(wanted.node, wanted.order_id, hashes, wanted.provenance, wanted.kv_layers, wanted.e_layers)
        deadline_s = self._settings.timeouts.order_s
        context = context_of(request, wanted)
        record = Order(wanted.order_id, wanted.node, member.peer, context, now + deadline_s, wanted.background)
        message = PrefillOrder(
            order_id=wanted.order_id,
            model=wanted.model,
            token_ids=prompt.token_ids[: wanted.num_blocks * block_size],
            root=prompt.root,
            deadline_s=deadline_s,
            background=wanted.background,
        )
        member.dispatched(len(message.token_ids), now)
        return record, message


def _alternative(one: Considered) -> Alternative:
    return Alternative(
        node=one.node,
        kind=one.kind,
        group=None if one.group is None else (one.group.start, one.group.stop),
        loss=one.loss if math.isfinite(one.loss) else None,
        ttft_s=one.ttft_s,
        sources=tuple(dict.fromkeys(one.sources)),
        chosen=one.chosen,
    )


def context_of(request: Request, wanted: OrderRequest) -> tuple[str, bytes]:
    """What an order computes: two orders of the same context are one."""
    return wanted.model, prompt_of(request).hashes[wanted.num_blocks - 1]


def prompt_of(request: Request) -> Prompt:
    assert request.prompt is not None, f"{request.request_id} is not prepared"
    return request.prompt
