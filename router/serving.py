"""Serving: a request's way from its prompt to its one terminal reply, and the prefill orders on its side.

The part of the router's core that knows what requests do; ``core.py`` knows what arrives. Pure, like the core.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvkin.kv.errors import NodeUnavailable
from kvkin.router.drift import DriftWatch
from kvkin.router.events import RememberAnswer
from kvkin.router.index import PrefixIndex
from kvkin.router.membership import Membership, NodeLost
from kvkin.router.orders import Order, Orders, orders_of
from kvkin.router.outbox import Outbox
from kvkin.router.planning import Choose, Planner, context_of, prompt_of
from kvkin.router.policy_types import Decision, OrderRequest
from kvkin.router.requests import Failure, Phase, Request
from kvkin.router.settings import RouterSettings
from kvkin.transport.messages import Accepted, ClientReply, Error, Finished, Generate, Tokens, Usage
from kvkin.transport.node_messages import Abort, Done, Failed, Generated, OrderDone


class Serving:
    """All running requests and open orders of one router."""

    def __init__(
        self,
        settings: RouterSettings,
        outbox: Outbox,
        membership: Membership,
        index: PrefixIndex,
        new_id: Callable[[], str],
        choose: Choose,
        stopwatch: Callable[[], float],
        drift: DriftWatch,
    ) -> None:
        self._settings, self._out, self._membership, self._index = settings, outbox, membership, index
        self._new_id, self._stopwatch = new_id, stopwatch
        self.planner = Planner(settings, index, membership, choose, drift)
        self.stopping = False
        self.orders = Orders()
        self.requests: dict[str, Request] = {}
        self.by_key: dict[tuple[bytes, str], Request] = {}
        self.by_client: dict[bytes, set[str]] = {}
        self.by_attempt: dict[str, Request] = {}

    def in_phase(self, *phases: Phase) -> list[Request]:
        return [request for request in self.requests.values() if request.phase in phases]

    # --- a request's way -----------------------------------------------------------------------------------------------

    def add(self, client: bytes, message: Generate, deadline_s: float) -> Request:
        now = self._out.now
        request = Request(self._new_id(), client, message, now, now + deadline_s)
        self.requests[request.request_id] = self.by_key[request.key] = request
        self.by_client.setdefault(client, set()).add(request.request_id)
        return request

    def accept(self, request: Request) -> None:
        accepted = Accepted(request.message.id, request.request_id, len(prompt_of(request).token_ids))
        self._send(request, accepted)

    def route(self, request: Request) -> None:
        started = self._stopwatch()
        try:
            decision = self.planner.decide(request, self._new_id(), self._out.now)
        except NodeUnavailable as error:
            self._wait_for_node(request, error)
            return
        except Exception as error:  # noqa: BLE001 - a fault of the policy costs one request, not the router
            self._out.note("error", "policy failed", request_id=request.request_id, error=repr(error))
            self.fail(request, Failure("internal", f"the router's policy failed: {error!r}", retryable=False))
            return
        request.route_ms = 1e3 * (self._stopwatch() - started)
        request.decision = decision
        self._dispatch(request, decision)

    def _wait_for_node(self, request: Request, error: NodeUnavailable) -> None:
        if request.failure is not None and request.failure.code != NodeUnavailable.code:
            self.fail(request, request.failure)  # a node that is there said why, and there is no other
            return
        if request.phase is not Phase.WAITING:
            request.waiting_until = self._out.now + self._settings.timeouts.node_wait_s
        request.failure = request.failure or Failure.of(error)
        request.move(Phase.WAITING, self._out.now, str(error))

    def _dispatch(self, request: Request, decision: Decision) -> None:
        member = self._membership.member(decision.node)
        assert member is not None, f"the policy chose {decision.node}, which never registered"
        self.place_orders(request, decision)
        attempt_id = request.begin_attempt(decision.node, member.peer)
        self.by_attempt[attempt_id] = request
        for order_id in orders_of(decision.plan):
            order = self.orders.get(order_id)
            if order is not None:
                order.users.add(request.request_id)
                request.orders.add(order_id)
        request.move(Phase.RUNNING, self._out.now, f"on {decision.node} as {attempt_id}: {decision.plan.kind}")
        member.dispatched(len(prompt_of(request).token_ids) - decision.plan.reused_tokens, self._out.now)
        self._out.count(f"plan_{decision.plan.kind}")
        self._out.note(
            "debug",
            "routed",
            request_id=attempt_id,
            model=request.message.model,
            node=decision.node,
            plan=str(decision.plan.kind),
            reused_tokens=decision.plan.reused_tokens,
            prompt_tokens=decision.plan.num_tokens,
            reason=decision.reason,
        )
        execute = self.planner.execute(request, decision, self._out.now)
        self._out.count("drift_checks", int(execute.check is not None))
        self._out.tell(member.peer, execute)

    def place_orders(self, request: Request, decision: Decision) -> None:
        """Place what a decision wants prefilled, unless it is placed already or its node is gone."""
        for wanted in (decision.live_order, decision.background_order):
            if wanted is not None:
                self._order(request, wanted)

    def _order(self, request: Request, wanted: OrderRequest) -> None:
        context = context_of(request, wanted)
        if wanted.background and self.orders.of_context(context) is not None:
            return
        placed = self.planner.order(request, wanted, self._out.now)
        if placed is None:
            return
        record, message = placed
        self.orders.add(record)
        self._out.count("orders")
        self._out.note("info", "ordered", order_id=record.order_id, node=record.node, tokens=len(message.token_ids))
        self._out.tell(record.peer, message)

    def _attempt_failed(self, request: Request, incarnation: str, failure: Failure) -> None:
        """Once more on another node, unless the client has seen tokens or it was tried often enough."""
        self.by_attempt.pop(request.attempt_id, None)
        request.failed_on.add((request.node, incarnation))
        request.failure = failure
        unseen = request.phase is Phase.RUNNING
        if failure.retryable and unseen and request.attempt < self._settings.max_attempts and not self.stopping:
            self._out.count("retries")
            self._out.note("warning", "retried", request_id=request.attempt_id, reason=failure.message)
            self._leave_orders(request, abandon=False)
            self.route(request)
        else:
            self.fail(request, failure)

    def fail(self, request: Request, failure: Failure) -> None:
        """The bad end."""
        self._out.count(f"error_{failure.code}")
        self._send(request, Error(request.message.id, failure.code, failure.message, failure.retryable))
        self.end(request, failure.message, abandon=True)

    def end(self, request: Request, why: str, abandon: bool) -> None:
        """Forget a request; ``abandon``: its node may still be working on it."""
        if abandon and request.attempt_id in self.by_attempt:
            self._out.tell(request.peer, Abort(request.attempt_id, why))
        self._leave_orders(request, abandon)
        request.move(Phase.ENDED, self._out.now, why)
        self.by_attempt.pop(request.attempt_id, None)
        del self.requests[request.request_id], self.by_key[request.key]
        of_client = self.by_client[request.client]
        of_client.discard(request.request_id)
        if not of_client:
            del self.by_client[request.client]

    def _leave_orders(self, request: Request, abandon: bool) -> None:
        """An order that was placed for a request is aborted once every request that pulls from it was given up."""
        for order_id in sorted(request.orders):
            order = self.orders.get(order_id)
            if order is not None:
                order.users.discard(request.request_id)
                if abandon and not order.users and not order.background:
                    self._out.tell(order.peer, Abort(order_id, "nobody waits for it any more"))
                    self._forget_order(order_id, "orders_aborted")
        request.orders.clear()

    # --- what its node says ------------------------------------------------------------------------------------------

    def node_said(self, peer: bytes, message: Generated | Done | Failed | OrderDone) -> None:
        if isinstance(message, OrderDone):
            if self._order_of(peer, message.order_id):
                self._forget_order(message.order_id, "orders_done")
            return
        if isinstance(message, Failed) and self._order_of(peer, message.request_id):
            self._out.note(
                "warning", "order failed", order_id=message.request_id, code=message.code, problem=message.message
            )
            self._forget_order(message.request_id, "orders_failed")
            return
        request = self.by_attempt.get(message.request_id)
        if request is None or request.peer != peer:
            self._out.count("late_messages")
            if isinstance(message, Generated):  # nobody listens (we were restarted, or our abort is on its way)
                self._out.tell(peer, Abort(message.request_id, "unknown to the router"))
        elif isinstance(message, Generated):
            self._generated(request, message)
        elif isinstance(message, Done):
            self._done(request, message)
        else:
            member = self._membership.member(request.node)
            incarnation = member.incarnation if member is not None else ""
            self._attempt_failed(request, incarnation, Failure(message.code, message.message, message.retryable))

    def _order_of(self, peer: bytes, order_id: str) -> bool:
        order = self.orders.get(order_id)
        return order is not None and order.peer == peer

    def _generated(self, request: Request, message: Generated) -> None:
        stop = message.index + len(message.token_ids)
        if stop <= request.num_tokens and message.token_ids:
            self._out.count("late_messages")
            return
        if message.index != request.num_tokens:
            self._lost_messages(request, message)
            return
        if request.first_token_at is None:
            request.first_token_at = self._out.now
        request.num_tokens = stop
        request.text_chars += len(message.text)
        if request.message.stream:
            if request.phase is Phase.RUNNING:
                request.move(Phase.STREAMING, self._out.now, "first token")
            tokens = Tokens(request.message.id, message.index, message.token_ids, message.text, message.logprobs)
            self._send(request, tokens)

    def _lost_messages(self, request: Request, message: Generated) -> None:
        self._out.note(
            "warning", "tokens lost", request_id=message.request_id, index=message.index, had=request.num_tokens
        )
        self._out.tell(request.peer, Abort(message.request_id, "tokens were lost on the way"))
        lost = NodeUnavailable(
            f"tokens {request.num_tokens} to {message.index} were lost on the way from {request.node}"
        )
        self._attempt_failed(request, "", Failure.of(lost))

    def _done(self, request: Request, message: Done) -> None:
        prompt = prompt_of(request)
        if request.message.stream:
            self._send_rest(request, message)
        first_token_at = self._out.now if request.first_token_at is None else request.first_token_at
        timings = msgspec.structs.replace(
            message.timings,
            hash_ms=prompt.hash_ms,
            route_ms=request.route_ms,
            ttft_ms=1e3 * (first_token_at - request.received_at),
            total_ms=1e3 * (self._out.now - request.received_at),
        )
        assert request.decision is not None, f"{request.request_id} is done and was never routed"
        report = msgspec.structs.replace(message.report, inputs=self.planner.inputs(request, request.decision))
        # what the node's engine had in its own prefix cache was reused as well; an older node does not tell
        reused = max(report.tokens_reused, report.tokens_cached + report.tokens_loaded)
        usage = Usage(len(prompt.token_ids), len(message.token_ids), reused)
        self._out.count("finished")
        self._out.count("fallbacks", int(bool(report.fallback)))
        self._out.count("prompt_tokens", usage.prompt_tokens)
        self._out.count("cached_tokens", usage.cached_tokens)
        if prompt.tail is not None and message.token_ids and request.message.publish:
            self._out.add(RememberAnswer(request.message.model, prompt.tail, message.text, message.token_ids))
        self._send(
            request,
            Finished(
                id=request.message.id,
                text=message.text,
                token_ids=message.token_ids,
                finish_reason=message.finish_reason,
                usage=usage,
                timings=timings,
                report=report,
                logprobs=message.logprobs,
                node=request.node,
            ),
        )
        self.end(request, "finished", abandon=False)

    def _send_rest(self, request: Request, message: Done) -> None:
        """What the stream did not bring yet, so that the tokens seen and the tokens of ``finished`` are always the same."""
        ids, text = message.token_ids[request.num_tokens :], message.text[request.text_chars :]
        if ids or text:
            logprobs = message.logprobs[request.num_tokens :]
            self._send(request, Tokens(request.message.id, request.num_tokens, ids, text, logprobs))

    def node_lost(self, lost: NodeLost) -> None:
        """Everything that ran on the node is retried or fails; its orders are offered no more."""
        for order in self.orders.on_node(lost.node):
            self._forget_order(order.order_id, "orders_failed")
        failure = Failure.of(NodeUnavailable(f"node {lost.node} was lost: {lost.reason}"))
        for request in [one for one in self.by_attempt.values() if one.node == lost.node]:
            self._attempt_failed(request, lost.incarnation, failure)

    def expire(self, order: Order) -> None:
        self._out.tell(order.peer, Abort(order.order_id, "its deadline passed"))
        self._forget_order(order.order_id, "orders_failed")

    def _forget_order(self, order_id: str, counter: str) -> None:
        if self.orders.remove(order_id) is not None:
            self._out.count(counter)
            self._index.withdraw(order_id)

    def _send(self, request: Request, message: ClientReply) -> None:
        request.last_sent_at = self._out.now
        self._out.reply(request.client, message)
