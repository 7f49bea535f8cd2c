"""Questions of attached servers: which plan suits a request that they have already? (docs/vllm.md)

The policy is asked as for any other request, with the server that asks as the only receiver; orders to prefill nodes that a
decision holds are placed. After its answer the router knows nothing of the request any more. Pure, like the core.
"""

from __future__ import annotations

from collections.abc import Callable

from kvkin.kv.errors import CapacityError, InvalidRequest, KvkinError, NodeUnavailable
from kvkin.router.events import PreparePrompt, PromptFailed, PromptReady
from kvkin.router.membership import Member, Membership, NodeLost
from kvkin.router.outbox import Outbox
from kvkin.router.requests import Request
from kvkin.router.serving import Serving
from kvkin.router.settings import ATTACHED, RouterSettings
from kvkin.router.validation import check_request
from kvkin.transport.messages import Generate, Sampling
from kvkin.transport.node_messages import AskPlan, PlanDone, PlanRefused


class Questions:
    """All questions whose prompts are being hashed, by the router's id."""

    def __init__(
        self,
        settings: RouterSettings,
        outbox: Outbox,
        membership: Membership,
        serving: Serving,
        new_id: Callable[[], str],
    ) -> None:
        self._settings, self._out, self._membership, self._serving = settings, outbox, membership, serving
        self._new_id = new_id
        self._open: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._open)

    def node_said(self, peer: bytes, message: AskPlan | PlanDone) -> None:
        """``peer`` is a living member's connection."""
        member = self._membership.member_of(peer)
        assert member is not None, "only members are asked"
        if member.registration.role != ATTACHED:
            self._out.count("bad_messages")
            self._out.note("warning", "only attached servers ask for plans", node=member.name)
        elif isinstance(message, AskPlan):
            self._ask(member, message)
        else:
            self._out.count("attached_requests")
            self._out.count("fallbacks", int(bool(message.fallback)))
            self._out.count("prompt_tokens", message.prompt_tokens)
            self._out.count("cached_tokens", message.tokens_reused)

    def _ask(self, member: Member, message: AskPlan) -> None:
        self._out.count("questions")
        asked = Generate(
            message.question_id,
            message.model,
            token_ids=message.token_ids,
            # the server's own limits bound its answers: what counts here is that the prompt has a next token
            sampling=Sampling(max_tokens=1),
            stream=False,
            reuse=message.reuse,
            max_loss=message.max_loss,
            publish=message.publish,
            share_hint=message.share_hint,
            deadline_s=message.deadline_s,
        )
        try:
            self._check(member, asked)
        except KvkinError as error:
            self._refuse(member.peer, message.question_id, error.code, str(error))
            return
        now = self._out.now
        deadline_s = min(message.deadline_s, self._settings.timeouts.request_s)
        request = Request(self._new_id(), member.peer, asked, now, now + deadline_s, member.name)
        self._open[request.request_id] = request
        self._out.add(PreparePrompt(request.request_id, asked))

    def _check(self, member: Member, asked: Generate) -> None:
        """Raise KvkinError unless the question may be worked on."""
        check_request(asked, self._settings)
        if asked.model not in member.models:
            raise InvalidRequest(
                f"model: {asked.model!r} is not on {member.name} (allowed: {', '.join(member.models)})"
            )
        if self._serving.stopping:
            raise NodeUnavailable("the router is stopping")
        most = self._settings.limits.max_running
        if len(self._open) >= most:
            raise CapacityError(f"{most} questions are being worked on; no more are taken")

    def prepared(self, event: PromptReady | PromptFailed) -> bool:
        """Answer the question that the prompt is of; False if it is of none."""
        request = self._open.pop(event.request_id, None)
        if request is None:
            return False
        if isinstance(event, PromptFailed):
            self._refuse(request.client, request.message.id, event.code, event.problem)
            return True
        request.prompt = event.prompt
        member = self._membership.member(request.receiver)
        assert member is not None, f"{request.receiver} asked and never registered"
        try:
            decision = self._serving.planner.decide(request, self._new_id(), self._out.now)
        except Exception as error:  # noqa: BLE001 - a fault of the policy costs one request, not the router
            self._out.note("error", "policy failed", request_id=request.request_id, error=repr(error))
            self._refuse(request.client, request.message.id, KvkinError.code, f"the router's policy failed: {error!r}")
            return True
        self._serving.place_orders(request, decision)
        plan = decision.plan
        member.dispatched(plan.num_tokens - plan.reused_tokens, self._out.now)
        self._out.count(f"plan_{plan.kind}")
        self._out.note(
            "debug",
            "planned",
            request_id=request.request_id,
            model=request.message.model,
            node=request.receiver,
            plan=str(plan.kind),
            reused_tokens=plan.reused_tokens,
            prompt_tokens=plan.num_tokens,
            reason=decision.reason,
        )
        self._out.tell(request.client, self._serving.planner.planned(request, decision))
        return True

    def node_lost(self, lost: NodeLost) -> None:
        """Nobody waits for these answers any more."""
        self._open = {key: one for key, one in self._open.items() if one.receiver != lost.node}

    def tick(self) -> None:
        for key, request in list(self._open.items()):
            if self._out.now >= request.deadline_at:
                del self._open[key]

    def _refuse(self, peer: bytes, question_id: str, code: str, problem: str) -> None:
        self._out.count("questions_refused")
        self._out.note("warning", "no plan", question_id=question_id, code=code, problem=problem)
        self._out.tell(peer, PlanRefused(question_id, code, problem))
