"""RouterCore: everything a router decides, as a pure state machine (docs/design.md sections 2 and 10).

``handle(event, now)`` returns instructions; ``node.py`` carries them out and feeds back what happens. The core reads no clock,
touches no socket and never raises for what a client or a node sent. This module knows what arrives; ``serving.py`` what becomes
of a request, ``membership.py`` what becomes of a node.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from kvkin.kv.errors import Cancelled, CapacityError, DeadlineExceeded, DuplicateRequest, KvkinError, NodeUnavailable
from kvkin.router import policy
from kvkin.router.drift import DriftWatch, SwitchedOff
from kvkin.router.events import (
    ClientAsked,
    ClientLost,
    ClientSentGarbage,
    Event,
    Instruction,
    NodeSaid,
    NodeSentGarbage,
    PeerLost,
    PreparePrompt,
    PromptFailed,
    PromptReady,
    RememberDrift,
    Stop,
    StopAsked,
    TimePassed,
)
from kvkin.router.index import PrefixIndex
from kvkin.router.membership import LEFT, Fact, HoldingsInOrder, Membership, NodeJoined, NodeLost, Tell
from kvkin.router.outbox import Outbox
from kvkin.router.planning import Choose
from kvkin.router.questions import Questions
from kvkin.router.requests import Failure, Phase
from kvkin.router.serving import Serving
from kvkin.router.settings import RouterSettings, family_views
from kvkin.transport.messages import (
    AskStatus,
    Cancel,
    ClientRequest,
    Error,
    Generate,
    ListModels,
    ModelEntry,
    Models,
    Ping,
    Pong,
    StatusReply,
)
from kvkin.transport.node_messages import (
    AskPlan,
    Done,
    DriftSample,
    Failed,
    Generated,
    Heartbeat,
    Holdings,
    Leave,
    NodeToRouter,
    OrderDone,
    PlanDone,
    Refused,
    Register,
)


class RouterCore:
    """State of one router process. ``choose`` is the policy, ``new_id`` makes ids, ``stopwatch`` measures the policy.

    ``switched_off`` are the pairs that an earlier process of this router switched off for drift.
    """

    def __init__(
        self,
        settings: RouterSettings,
        incarnation: str,
        new_id: Callable[[], str],
        *,
        started_at: float = 0.0,
        choose: Choose = policy.choose,
        stopwatch: Callable[[], float] = time.perf_counter,
        switched_off: Sequence[SwitchedOff] = (),
    ) -> None:
        self._settings, self._incarnation, self._started_at = settings, incarnation, started_at
        self._out = Outbox(started_at)
        self.counters = self._out.counters
        self.index = PrefixIndex(settings.index_max_blocks, settings.fan_out_half_life_s)
        self.membership = Membership(settings, incarnation)
        logits = {name: model.logits_digest for name, model in settings.models.items()}
        self.drift = DriftWatch(settings.drift, family_views(settings), switched_off, started_at, logits)
        self.serving = Serving(settings, self._out, self.membership, self.index, new_id, choose, stopwatch, self.drift)
        self.questions = Questions(settings, self._out, self.membership, self.serving, new_id)
        self._pinged_at: dict[bytes, float] = {}
        self._stopped = False

    @property
    def num_requests(self) -> int:
        return len(self.serving.requests)

    @property
    def decided(self) -> list[Instruction]:
        """What the last ``handle`` decided, even if it failed half-way: replies that are owed are still sent."""
        return self._out.instructions

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """What to do about ``event``, in this order."""
        self._out.begin(now)
        match event:
            case ClientAsked():
                self._client_asked(event.client, event.message)
            case ClientSentGarbage():
                self._out.count("bad_messages")
                self._out.note("info", "bad message of a client", code=event.code, problem=event.problem)
                self._out.reply(event.client, Error(event.id, event.code, event.problem))
            case ClientLost():
                self._client_lost(event.client, event.reason)
            case PromptReady() | PromptFailed():
                self._prepared(event)
            case NodeSaid():
                self._node_said(event.peer, event.message)
            case NodeSentGarbage():
                self._node_sent_garbage(event.peer, event.problem)
            case PeerLost():
                self._apply(self.membership.peer_lost(event.peer))
            case TimePassed():
                self._time_passed(event.stood_still_s)
            case StopAsked():
                self._stop_asked(event.at_once)
        if self.serving.stopping and not self.serving.requests and not self._stopped:
            self._stopped = True
            self._out.add(Stop())
        return self._out.instructions

    # --- clients -----------------------------------------------------------------------------------------------------

    def _client_asked(self, client: bytes, message: ClientRequest) -> None:
        if client in self._pinged_at:
            self._pinged_at[client] = self._out.now
        match message:
            case Generate():
                self._generate(client, message)
            case Cancel():
                request = self.serving.by_key.get((client, message.id))
                if request is not None:  # cancelling what has ended, twice or never existed is no error
                    self.serving.fail(request, Failure.of(Cancelled("cancelled by the client")))
            case ListModels():
                self._out.reply(client, Models(message.id, self._models()))
            case AskStatus():
                self._out.reply(client, self._status(message.id))
            case Ping():
                self._ping(client, message)

    def _generate(self, client: bytes, message: Generate) -> None:
        self._out.count("requests")
        refusal = self._refusal(client, message)
        if refusal is not None:
            self._out.count(f"error_{refusal.code}")
            self._out.reply(client, Error(message.id, refusal.code, str(refusal), refusal.retryable))
            return
        allowed_s = self._settings.timeouts.request_s
        deadline_s = allowed_s if message.deadline_s is None else min(message.deadline_s, allowed_s)
        request = self.serving.add(client, message, deadline_s)
        self._out.add(PreparePrompt(request.request_id, message))

    def _refusal(self, client: bytes, message: Generate) -> KvkinError | None:
        limits, serving = self._settings.limits, self.serving
        if (client, message.id) in serving.by_key:
            return DuplicateRequest(f"a request with id {message.id!r} is running; it goes on")
        if serving.stopping:
            return NodeUnavailable("the router is stopping")
        if client not in serving.by_client and len(serving.by_client) >= limits.max_clients:
            return CapacityError(f"{limits.max_clients} clients have running requests; no more are taken")
        if self.num_requests >= limits.max_running:
            return CapacityError(f"{limits.max_running} requests are running; no more are taken")
        if self.num_requests >= limits.max_queue:  # only then it is worth counting
            queued = len(serving.in_phase(Phase.PREPARING, Phase.WAITING))
            if queued >= limits.max_queue:
                return CapacityError(f"{queued} requests are waiting in the router; no more are queued")
        return None

    def _ping(self, client: bytes, message: Ping) -> None:
        self._pinged_at[client] = self._out.now
        for request_id in message.running:
            if (client, request_id) not in self.serving.by_key:
                problem = "the router does not know this request: it was restarted, or the request ended"
                self._out.reply(client, Error(request_id, NodeUnavailable.code, problem, NodeUnavailable.retryable))
        self._out.reply(client, Pong(message.id, self._settings.name, self._incarnation))

    def _client_lost(self, client: bytes, reason: str) -> None:
        self._pinged_at.pop(client, None)
        for request_id in sorted(self.serving.by_client.get(client, ())):
            self._out.count("client_lost")
            self.serving.end(self.serving.requests[request_id], reason, abandon=True)

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
            uptime_s=self._out.now - self._started_at,
            running=self.num_requests,
            nodes=self.membership.status(self._out.now, self.index.num_held),
            index_blocks=len(self.index),
            counters=dict(self.counters) | {"orders_open": len(self.serving.orders)},
            drift=self.drift.status(self._out.now),
            pairs=self._settings.pairs,
        )

    def _prepared(self, event: PromptReady | PromptFailed) -> None:
        if self.questions.prepared(event):
            return
        request = self.serving.requests.get(event.request_id)
        if request is None:  # cancelled, expired or its client gone in the meantime
            return
        if isinstance(event, PromptFailed):
            self.serving.fail(request, Failure(event.code, event.problem, event.retryable))
            return
        request.prompt = event.prompt
        self.serving.accept(request)
        self.serving.route(request)

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _node_said(self, peer: bytes, message: NodeToRouter) -> None:
        membership, now = self.membership, self._out.now
        match message:
            case Register():
                self._apply(membership.register(peer, message, now))
            case Heartbeat():
                self._apply(membership.heartbeat(peer, message, now))
            case Holdings():
                self._apply(membership.holdings(peer, message, now))
            case Leave():
                self._apply(membership.leave(peer, message))
            case DriftSample():
                if membership.alive(peer, now):
                    self._drifted(peer, message)
                else:
                    self._apply(membership.stranger(peer, None, now))
            case Generated() | Done() | Failed() | OrderDone() | AskPlan() | PlanDone():
                if not membership.alive(peer, now):
                    self._apply(membership.stranger(peer, None, now))
                elif isinstance(message, AskPlan | PlanDone):
                    self.questions.node_said(peer, message)
                else:
                    self.serving.node_said(peer, message)

    def _drifted(self, peer: bytes, sample: DriftSample) -> None:
        member = self.membership.member_of(peer)
        assert member is not None, "only members are asked"
        problem = self.drift.problem(sample)
        if not problem and not member.serves(sample.receiver):
            problem = "the node does not serve the receiver"
        if problem:
            self._out.count("bad_messages")
            self._out.note("warning", "bad sample of drift", node=member.name, problem=problem)
            return
        self._out.count("drift_samples")
        switched = self.drift.sampled(sample, self._out.now)
        for pair in switched:
            self._out.count("drift_switched_off")
            self._out.note(
                "warning", "pair switched off for drift", request_id=sample.request_id, **msgspec.structs.asdict(pair)
            )
        if switched:
            self._out.add(RememberDrift(self.drift.records(self._out.now)))

    def _node_sent_garbage(self, peer: bytes, problem: str) -> None:
        self._out.count("bad_messages")
        self._out.note("warning", "bad message of a node", problem=problem)
        if self.membership.member_of(peer) is None:  # a stranger of another version, or no node at all
            self._out.tell(peer, Refused("protocol", problem))

    def _apply(self, facts: Iterable[Fact]) -> None:
        for fact in facts:
            match fact:
                case Tell():
                    if isinstance(fact.message, Refused):
                        self._out.count("nodes_refused")
                        self._out.note("error", "node refused", code=fact.message.code, problem=fact.message.message)
                    self._out.tell(fact.peer, fact.message)
                case NodeJoined():
                    self._out.note("info", "node joined", node=fact.node)
                    for request in self.serving.in_phase(Phase.WAITING):
                        self.serving.route(request)
                case NodeLost():
                    self._out.count("nodes_lost")
                    level = "info" if fact.reason == LEFT else "warning"
                    self._out.note(level, "node lost", node=fact.node, reason=fact.reason)
                    self.index.drop_node(fact.node)
                    self.serving.node_lost(fact)
                    self.questions.node_lost(fact)
                case HoldingsInOrder():
                    apply = self.index.apply_snapshot if fact.snapshot else self.index.apply_delta
                    apply(fact.node, fact.holdings)

    # --- time --------------------------------------------------------------------------------------------------------

    def _time_passed(self, stood_still_s: float) -> None:
        now, timeouts = self._out.now, self._settings.timeouts
        if stood_still_s:
            self._out.note("warning", "the router itself stood still", seconds=round(stood_still_s, 1))
            self.membership.overlook(stood_still_s, now)
            for client, at in self._pinged_at.items():
                self._pinged_at[client] = min(now, at + stood_still_s)
        self._apply(self.membership.tick(now))
        for client in [one for one, at in self._pinged_at.items() if now - at > timeouts.client_dead_s]:
            self._client_lost(client, "the client fell silent")
        self.questions.tick()
        for order in self.serving.orders.expired(now):
            self.serving.expire(order)
        for request in list(self.serving.requests.values()):
            if now >= request.deadline_at:
                allowed_s = request.deadline_at - request.received_at
                self.serving.fail(request, Failure.of(DeadlineExceeded(f"the deadline of {allowed_s:g} s passed")))
            elif request.phase is Phase.WAITING and now >= request.waiting_until:
                assert request.failure is not None, "a request waits because something failed"
                self.serving.fail(request, request.failure)
            elif request.prompt is not None and now - request.last_sent_at >= timeouts.sign_of_life_s:
                self.serving.accept(request)

    def _stop_asked(self, at_once: bool) -> None:
        if not self.serving.stopping:
            self._out.note("info", "stopping", running=self.num_requests, at_once=at_once)
        self.serving.stopping = True
        if at_once:
            for request in list(self.serving.requests.values()):
                self.serving.fail(request, Failure.of(NodeUnavailable("the router is stopping")))
