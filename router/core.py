"""RouterCore: everything a router decides, as a pure state machine (DESIGN.md sections 2 and 10).

``handle(event, now)`` returns instructions; ``node.py`` carries them out and feeds back what happens. The core reads no clock,
touches no socket and never raises for what a client or a node sent. Each request ends in exactly one terminal reply.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from kvkin.kv.errors import Cancelled, CapacityError, DuplicateRequest, KvkinError, NodeUnavailable
from kvkin.router import policy
from kvkin.router.events import (
    ClientAsked,
    ClientLost,
    ClientSentGarbage,
    Event,
    Instruction,
    NodeSaid,
    NodeSentGarbage,
    Note,
    PeerLost,
    PreparePrompt,
    PromptFailed,
    PromptReady,
    RememberAnswer,
    Reply,
    Stop,
    StopAsked,
    TellNode,
    TimePassed,
)
from kvkin.router.index import PrefixIndex
from kvkin.router.membership import Fact, HoldingsInOrder, Membership, NodeJoined, NodeLost, Tell
from kvkin.router.orders import Orders, orders_of
from kvkin.router.planning import Choose, Planner, context_of, prompt_of
from kvkin.router.policy_types import Decision, OrderRequest
from kvkin.router.requests import Failure, Phase, Request
from kvkin.router.settings import RouterSettings
from kvkin.transport.messages import (
    Accepted,
    AskStatus,
    Cancel,
    ClientReply,
    Error,
    Finished,
    Generate,
    ListModels,
    ModelEntry,
    Models,
    Ping,
    Pong,
    StatusReply,
    Tokens,
    Usage,
)
from kvkin.transport.node_messages import (
    Abort,
    Done,
    Failed,
    Generated,
    Heartbeat,
    Holdings,
    Leave,
    NodeToRouter,
    OrderDone,
    Refused,
    Register,
    RouterToNode,
)


class RouterCore:
    """State of one router process. ``choose`` is the policy, ``new_id`` makes ids, ``stopwatch`` measures the policy."""

    def __init__(
        self,
        settings: RouterSettings,
        incarnation: str,
        new_id: Callable[[], str],
        *,
        started_at: float = 0.0,
        choose: Choose = policy.choose,
        stopwatch: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._settings, self._incarnation, self._new_id, self._stopwatch = settings, incarnation, new_id, stopwatch
        self._started_at, self._now = started_at, started_at
        self.index = PrefixIndex(settings.index_max_blocks, settings.fan_out_half_life_s)
        self.membership = Membership(settings, incarnation)
        self.orders = Orders()
        self.counters: Counter[str] = Counter()
        self._planner = Planner(settings, self.index, self.membership, choose)
        self._requests: dict[str, Request] = {}
        self._by_key: dict[tuple[bytes, str], Request] = {}
        self._by_attempt: dict[str, Request] = {}
        self._by_client: dict[bytes, set[str]] = {}
        self._pinged_at: dict[bytes, float] = {}
        self._stopping = self._stopped = False
        self._out: list[Instruction] = []

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def decided(self) -> list[Instruction]:
        """What the last ``handle`` decided, even if it failed half-way: replies that are owed are still sent."""
        return self._out

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """What to do about ``event``, in this order."""
        self._out, self._now = [], now
        match event:
            case ClientAsked():
                self._client_asked(event.client, event.message)
            case ClientSentGarbage():
                self.counters["bad_messages"] += 1
                self._note("info", "bad message of a client", code=event.code, problem=event.problem)
                self._reply(event.client, Error(event.id, event.code, event.problem))
            case ClientLost():
                self._client_lost(event.client, event.reason)
            case PromptReady():
                self._prompt_ready(event)
            case PromptFailed():
                request = self._requests.get(event.request_id)
                if request is not None:
                    self._fail(request, Failure(event.code, event.problem, event.retryable))
            case NodeSaid():
                self._node_said(event.peer, event.message)
            case NodeSentGarbage():
                self._node_sent_garbage(event.peer, event.problem)
            case PeerLost():
                self._apply(self.membership.peer_lost(event.peer))
            case TimePassed():
                self._time_passed()
            case StopAsked():
                self._stop_asked(event.at_once)
        if self._stopping and not self._requests and not self._stopped:
            self._stopped = True
            self._out.append(Stop())
        return self._out

    # --- clients -----------------------------------------------------------------------------------------------------

    def _client_asked(self, client: bytes, message: Generate | Cancel | ListModels | AskStatus | Ping) -> None:
        if client in self._pinged_at:
            self._pinged_at[client] = self._now
        match message:
            case Generate():
                self._generate(client, message)
            case Cancel():
                request = self._by_key.get((client, message.id))
                if request is not None:  # cancelling what has ended, twice or never existed is no error
                    self._fail(request, Failure.of(Cancelled("cancelled by the client")), "cancelled by the client")
            case ListModels():
                self._reply(client, Models(message.id, self._models()))
            case AskStatus():
                self._reply(client, self._status(message.id))
            case Ping():
                self._ping(client, message)

    def _generate(self, client: bytes, message: Generate) -> None:
        self.counters["requests"] += 1
        refusal = self._refusal(client, message)
        if refusal is not None:
            self.counters[f"error_{refusal.code}"] += 1
            self._reply(client, Error(message.id, refusal.code, str(refusal), refusal.retryable))
            return
        allowed_s = self._settings.timeouts.request_s
        deadline_s = allowed_s if message.deadline_s is None else min(message.deadline_s, allowed_s)
        request = Request(self._new_id(), client, message, self._now, self._now + deadline_s)
        self._requests[request.request_id] = self._by_key[request.key] = request
        self._by_client.setdefault(client, set()).add(request.request_id)
        self._out.append(PreparePrompt(request.request_id, message))

    def _refusal(self, client: bytes, message: Generate) -> KvkinError | None:
        limits = self._settings.limits
        if (client, message.id) in self._by_key:
            return DuplicateRequest(f"a request with id {message.id!r} is running; it goes on")
        if self._stopping:
            return NodeUnavailable("the router is stopping")
        if client not in self._by_client and len(self._by_client) >= limits.max_clients:
            return CapacityError(f"{limits.max_clients} clients have running requests; no more are taken")
        if len(self._requests) >= limits.max_running:
            return CapacityError(f"{limits.max_running} requests are running; no more are taken")
        if len(self._requests) >= limits.max_queue and self._num_queued() >= limits.max_queue:
            return CapacityError(f"{limits.max_queue} requests are waiting in the router; no more are queued")
        return None

    def _num_queued(self) -> int:
        return sum(request.phase in (Phase.PREPARING, Phase.WAITING) for request in self._requests.values())

    def _ping(self, client: bytes, message: Ping) -> None:
        self._pinged_at[client] = self._now
        for request_id in message.running:
            if (client, request_id) not in self._by_key:
                problem = "the router does not know this request: it was restarted, or the request ended"
                self._reply(client, Error(request_id, NodeUnavailable.code, problem, NodeUnavailable.retryable))
        self._reply(client, Pong(message.id, self._settings.name, self._incarnation))

    def _client_lost(self, client: bytes, reason: str) -> None:
        self._pinged_at.pop(client, None)
        for request_id in sorted(self._by_client.get(client, ())):
            self.counters["client_lost"] += 1
            self._end(self._requests[request_id], reason, abandon=True)

    def _models(self) -> tuple[ModelEntry, ...]:
        serving = self.membership.serving
        return tuple(
            ModelEntry(model.name, model.family, model.max_context_tokens, serving(model.name))
            for model in self._settings.models.values()
        )

    def _status(self, message_id: str) -> StatusReply:
        return StatusReply(
            id=message_id,
            router=self._settings.name,
            uptime_s=self._now - self._started_at,
            running=len(self._requests),
            nodes=self.membership.status(self._now),
            index_blocks=len(self.index),
            counters=dict(self.counters) | {"orders_open": len(self.orders)},
        )

    # --- a request's way -----------------------------------------------------------------------------------------------

    def _prompt_ready(self, event: PromptReady) -> None:
        request = self._requests.get(event.request_id)
        if request is None:  # cancelled, expired or its client gone in the meantime
            return
        request.prompt = event.prompt
        self._accept(request)
        self._route(request)

    def _accept(self, request: Request) -> None:
        accepted = Accepted(request.message.id, request.request_id, len(prompt_of(request).token_ids))
        self._send(request, accepted)

    def _route(self, request: Request) -> None:
        started = self._stopwatch()
        try:
            decision = self._planner.decide(request, self._new_id(), self._now)
        except NodeUnavailable as error:
            self._wait_for_node(request, error)
            return
        except Exception as error:  # noqa: BLE001 - a fault of the policy costs one request, not the router
            self._note("error", "policy failed", request_id=request.request_id, error=repr(error))
            self._fail(request, Failure("internal", f"the router's policy failed: {error!r}", retryable=False))
            return
        request.route_ms = 1e3 * (self._stopwatch() - started)
        self._dispatch(request, decision)

    def _wait_for_node(self, request: Request, error: NodeUnavailable) -> None:
        if request.failure is not None and request.failure.code != NodeUnavailable.code:
            self._fail(request, request.failure)  # a node that is there said why, and there is no other
            return
        if request.phase is not Phase.WAITING:
            request.waiting_until = self._now + self._settings.timeouts.node_wait_s
        request.failure = request.failure or Failure.of(error)
        request.move(Phase.WAITING, self._now, str(error))

    def _dispatch(self, request: Request, decision: Decision) -> None:
        member = self.membership.member(decision.node)
        assert member is not None, f"the policy chose {decision.node}, which never registered"
        for wanted in (decision.live_order, decision.background_order):
            if wanted is not None:
                self._order(request, wanted)
        attempt_id = request.begin_attempt(decision.node, member.peer)
        self._by_attempt[attempt_id] = request
        for order_id in orders_of(decision.plan):
            order = self.orders.get(order_id)
            if order is not None:
                order.users.add(request.request_id)
                request.orders.add(order_id)
        request.move(Phase.RUNNING, self._now, f"on {decision.node} as {attempt_id}: {decision.plan.kind}")
        member.dispatched(len(prompt_of(request).token_ids) - decision.plan.reused_tokens, self._now)
        self.counters[f"plan_{decision.plan.kind}"] += 1
        self._note(
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
        self._tell(member.peer, self._planner.execute(request, decision, self._now))

    def _order(self, request: Request, wanted: OrderRequest) -> None:
        context = context_of(request, wanted)
        if wanted.background and self.orders.of_context(context) is not None:
            return
        placed = self._planner.order(request, wanted, self._now)
        if placed is None:
            return
        record, message = placed
        self.orders.add(record)
        self.counters["orders"] += 1
        self._note("info", "ordered", order_id=record.order_id, node=record.node, tokens=len(message.token_ids))
        self._tell(record.peer, message)

    def _attempt_failed(self, request: Request, incarnation: str, failure: Failure) -> None:
        """Once more on another node, unless the client has seen tokens or it was tried often enough."""
        self._by_attempt.pop(request.attempt_id, None)
        request.failed_on.add((request.node, incarnation))
        request.failure = failure
        unseen = request.phase is Phase.RUNNING
        if failure.retryable and unseen and request.attempt < self._settings.max_attempts and not self._stopping:
            self.counters["retries"] += 1
            self._note("warning", "retried", request_id=request.attempt_id, reason=failure.message)
            self._leave_orders(request, abandon=False)
            self._route(request)
        else:
            self._fail(request, failure)

    def _fail(self, request: Request, failure: Failure, why: str = "") -> None:
        """The bad end."""
        self.counters[f"error_{failure.code}"] += 1
        self._send(request, Error(request.message.id, failure.code, failure.message, failure.retryable))
        self._end(request, why or failure.message, abandon=True)

    def _end(self, request: Request, why: str, abandon: bool) -> None:
        """Forget a request; ``abandon``: its node may still be working on it."""
        if abandon and request.attempt_id in self._by_attempt:
            self._tell(request.peer, Abort(request.attempt_id, why))
        self._leave_orders(request, abandon)
        request.move(Phase.ENDED, self._now, why)
        self._by_attempt.pop(request.attempt_id, None)
        del self._requests[request.request_id], self._by_key[request.key]
        of_client = self._by_client[request.client]
        of_client.discard(request.request_id)
        if not of_client:
            del self._by_client[request.client]

    def _leave_orders(self, request: Request, abandon: bool) -> None:
        """An order that somebody waited for and nobody waits for any more is aborted; background orders have no users."""
        for order_id in sorted(request.orders):
            order = self.orders.get(order_id)
            if order is not None:
                order.users.discard(request.request_id)
                if abandon and not order.users:
                    self._tell(order.peer, Abort(order_id, "nobody waits for it any more"))
                    self._forget_order(order_id, "orders_aborted")
        request.orders.clear()

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _node_said(self, peer: bytes, message: NodeToRouter) -> None:
        membership = self.membership
        match message:
            case Register():
                self._apply(membership.register(peer, message, self._now))
            case Heartbeat():
                self._apply(membership.heartbeat(peer, message, self._now))
            case Holdings():
                self._apply(membership.holdings(peer, message, self._now))
            case Leave():
                self._apply(membership.leave(peer, message))
            case Generated() | Done() | Failed() | OrderDone():
                if not membership.alive(peer, self._now):
                    self._apply(membership.stranger(peer, None, self._now))
                    return
                self._work_said(peer, message)

    def _work_said(self, peer: bytes, message: Generated | Done | Failed | OrderDone) -> None:
        if isinstance(message, OrderDone):
            if self._order_of(peer, message.order_id):
                self._forget_order(message.order_id, "orders_done")
            return
        if isinstance(message, Failed) and self._order_of(peer, message.request_id):
            self._note(
                "warning", "order failed", order_id=message.request_id, code=message.code, problem=message.message
            )
            self._forget_order(message.request_id, "orders_failed")
            return
        request = self._by_attempt.get(message.request_id)
        if request is None or request.peer != peer:
            self.counters["late_messages"] += 1
            if isinstance(message, Generated):  # nobody listens (we were restarted, or our abort is on its way)
                self._tell(peer, Abort(message.request_id, "unknown to the router"))
        elif isinstance(message, Generated):
            self._generated(request, message)
        elif isinstance(message, Done):
            self._done(request, message)
        else:
            member = self.membership.member(request.node)
            incarnation = member.incarnation if member is not None else ""
            self._attempt_failed(request, incarnation, Failure(message.code, message.message, message.retryable))

    def _order_of(self, peer: bytes, order_id: str) -> bool:
        order = self.orders.get(order_id)
        return order is not None and order.peer == peer

    def _generated(self, request: Request, message: Generated) -> None:
        stop = message.index + len(message.token_ids)
        if stop <= request.num_tokens and message.token_ids:
            self.counters["late_messages"] += 1
            return
        if message.index != request.num_tokens:
            self._lost_messages(request, message)
            return
        if request.first_token_at is None:
            request.first_token_at = self._now
        request.num_tokens = stop
        request.text_chars += len(message.text)
        if request.message.stream:
            if request.phase is Phase.RUNNING:
                request.move(Phase.STREAMING, self._now, "first token")
            tokens = Tokens(request.message.id, message.index, message.token_ids, message.text, message.logprobs)
            self._send(request, tokens)

    def _lost_messages(self, request: Request, message: Generated) -> None:
        self._note("warning", "tokens lost", request_id=message.request_id, index=message.index, had=request.num_tokens)
        self._tell(request.peer, Abort(message.request_id, "tokens were lost on the way"))
        lost = NodeUnavailable(
            f"tokens {request.num_tokens} to {message.index} were lost on the way from {request.node}"
        )
        self._attempt_failed(request, "", Failure.of(lost))

    def _done(self, request: Request, message: Done) -> None:
        prompt = prompt_of(request)
        if request.message.stream:
            self._send_rest(request, message)
        first_token_at = self._now if request.first_token_at is None else request.first_token_at
        timings = msgspec.structs.replace(
            message.timings,
            hash_ms=prompt.hash_ms,
            route_ms=request.route_ms,
            ttft_ms=1e3 * (first_token_at - request.received_at),
            total_ms=1e3 * (self._now - request.received_at),
        )
        usage = Usage(len(prompt.token_ids), len(message.token_ids), message.report.tokens_reused)
        self.counters["finished"] += 1
        self.counters["fallbacks"] += bool(message.report.fallback)
        self.counters["prompt_tokens"] += usage.prompt_tokens
        self.counters["cached_tokens"] += usage.cached_tokens
        if prompt.tail is not None and message.token_ids:
            self._out.append(RememberAnswer(request.message.model, prompt.tail, message.text, message.token_ids))
        self._send(
            request,
            Finished(
                id=request.message.id,
                text=message.text,
                token_ids=message.token_ids,
                finish_reason=message.finish_reason,
                usage=usage,
                timings=timings,
                report=message.report,
                logprobs=message.logprobs,
                node=request.node,
            ),
        )
        self._end(request, "finished", abandon=False)

    def _send_rest(self, request: Request, message: Done) -> None:
        """What the stream did not bring yet, so that the tokens seen and the tokens of ``finished`` are always the same."""
        ids, text = message.token_ids[request.num_tokens :], message.text[request.text_chars :]
        if ids or text:
            logprobs = message.logprobs[request.num_tokens :]
            self._send(request, Tokens(request.message.id, request.num_tokens, ids, text, logprobs))

    def _node_sent_garbage(self, peer: bytes, problem: str) -> None:
        self.counters["bad_messages"] += 1
        self._note("warning", "bad message of a node", problem=problem)
        if self.membership.member_of(peer) is None:  # a stranger of another version, or no node at all
            self._tell(peer, Refused("protocol", problem))

    def _apply(self, facts: Iterable[Fact]) -> None:
        for fact in facts:
            match fact:
                case Tell():
                    if isinstance(fact.message, Refused):
                        self.counters["nodes_refused"] += 1
                        self._note("error", "node refused", code=fact.message.code, problem=fact.message.message)
                    self._tell(fact.peer, fact.message)
                case NodeJoined():
                    self._note("info", "node joined", node=fact.node)
                    for request in [one for one in self._requests.values() if one.phase is Phase.WAITING]:
                        self._route(request)
                case NodeLost():
                    self._node_lost(fact)
                case HoldingsInOrder():
                    apply = self.index.apply_snapshot if fact.snapshot else self.index.apply_delta
                    apply(fact.node, fact.holdings)

    def _node_lost(self, fact: NodeLost) -> None:
        self.counters["nodes_lost"] += 1
        self._note("warning", "node lost", node=fact.node, incarnation=fact.incarnation, reason=fact.reason)
        self.index.drop_node(fact.node)
        for order in self.orders.on_node(fact.node):
            self._forget_order(order.order_id, "orders_failed")
        lost = Failure.of(NodeUnavailable(f"node {fact.node} was lost: {fact.reason}"))
        for request in [one for one in self._by_attempt.values() if one.node == fact.node]:
            self._attempt_failed(request, fact.incarnation, lost)

    def _forget_order(self, order_id: str, counter: str) -> None:
        if self.orders.remove(order_id) is not None:
            self.counters[counter] += 1
            self.index.withdraw(order_id)

    # --- time --------------------------------------------------------------------------------------------------------

    def _time_passed(self) -> None:
        timeouts = self._settings.timeouts
        self._apply(self.membership.tick(self._now))
        for client in [one for one, at in self._pinged_at.items() if self._now - at > timeouts.client_dead_s]:
            self._client_lost(client, "the client fell silent")
        for order in self.orders.expired(self._now):
            self._tell(order.peer, Abort(order.order_id, "its deadline passed"))
            self._forget_order(order.order_id, "orders_failed")
        for request in list(self._requests.values()):
            if self._now >= request.deadline_at:
                allowed_s = request.deadline_at - request.received_at
                self._fail(request, Failure.of(Cancelled(f"the deadline of {allowed_s:g} s passed")))
            elif request.phase is Phase.WAITING and self._now >= request.waiting_until:
                assert request.failure is not None
                self._fail(request, request.failure)
            elif request.prompt is not None and self._now - request.last_sent_at >= timeouts.sign_of_life_s:
                self._accept(request)

    def _stop_asked(self, at_once: bool) -> None:
        if not self._stopping:
            self._note("info", "stopping", running=len(self._requests), at_once=at_once)
        self._stopping = True
        if at_once:
            for request in list(self._requests.values()):
                self._fail(request, Failure.of(NodeUnavailable("the router is stopping")))

    # --- out ---------------------------------------------------------------------------------------------------------

    def _send(self, request: Request, message: ClientReply) -> None:
        request.last_sent_at = self._now
        self._reply(request.client, message)

    def _reply(self, client: bytes, message: ClientReply) -> None:
        self._out.append(Reply(client, message))

    def _tell(self, peer: bytes, message: RouterToNode) -> None:
        self._out.append(TellNode(peer, message))

    def _note(self, level: str, event: str, **fields: object) -> None:
        self._out.append(Note(level, event, fields))
