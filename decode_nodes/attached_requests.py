"""The requests of an attached server, as its link has them: from a question to a router to the publication of what was computed.

Runs on the loop of the link's thread (``attached.py``). What runs here is what runs in decode nodes: ``PlanSources`` and ``Publisher``.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

import msgspec
import structlog

from kvkin.decode_nodes.attached_stores import OrderedRows, Stores
from kvkin.decode_nodes.publication import Publisher
from kvkin.decode_nodes.sources import PlanSources, faster
from kvkin.engines.api import Arrival
from kvkin.engines.vllm.serving import (
    Covered,
    LinkEvent,
    PartsArrived,
    PlanReady,
    Published,
    Question,
    SourcesFailed,
)
from kvkin.kv.errors import KvkinError
from kvkin.kv.execution import PlanExecution
from kvkin.kv.hashing import block_hashes
from kvkin.kv.plan import ReusePlan, private_plan, provenances
from kvkin.transport.arena import place_of
from kvkin.transport.messages import NodeLoad
from kvkin.transport.node_messages import AskPlan, Drain, PlanDone, Planned, PlanRefused, RouterToNode
from kvkin.transport.node_runtime import NodeRuntime
from kvkin.transport.router_link import RouterLink

log = structlog.get_logger()

SILENCE_S = 5.0
"""A router that did not answer in time is asked again after so long, or as soon as it says anything."""


@dataclass
class _Asked:
    """A request of the server. ``plan`` once one was given, ``root`` once a router said on what its blocks hang."""

    question: Question
    link: RouterLink | None
    plan: ReusePlan | None = None
    root: bytes | None = None
    sources: PlanSources | None = None
    publisher: Publisher | None = None
    overdue: asyncio.TimerHandle | None = None
    # what is published comes in order, and not before it is known on what it hangs
    publishing: asyncio.Future[None] | None = None
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False


class AttachedRequests:
    """All requests of the server that ask or publish. ``events`` is what vLLM's thread takes; ``runtime`` is set before anything is asked."""

    runtime: NodeRuntime

    def __init__(self, plan_s: float, events: deque[LinkEvent]) -> None:
        self._plan_s, self._events = plan_s, events
        self._asked: dict[str, _Asked] = {}
        self._stores = Stores(events)
        self._silent: dict[RouterLink, float] = {}
        self._pull_rate = 0.0
        self._finished = self._fallbacks = 0

    def stop(self) -> None:
        """The link ends: nothing waits any more, nothing is pulled any more."""
        for asked in self._asked.values():
            asked.answered.set()
            if asked.sources is not None:
                asked.sources.stop()
        self._stores.stop()

    def load(self) -> NodeLoad:
        return msgspec.structs.replace(
            self.runtime.memory_load(),
            running=len(self._asked),
            pull_bytes_per_s=self._pull_rate,
            finished=self._finished,
            fallbacks=self._fallbacks,
        )

    # --- plans -------------------------------------------------------------------------------------------------------------

    def ask(self, question: Question) -> None:
        link = next((one for one in self.runtime.routers.links if self._answers(one)), None)
        asked = self._asked[question.key] = _Asked(question, link)
        if link is None:
            self._answer(asked, private_plan(len(question.token_ids), "no router is there"))
            return
        wishes = question.wishes
        link.send(
            AskPlan(
                question_id=question.key,
                model=question.model,
                token_ids=question.token_ids,
                reuse=wishes.reuse,
                max_loss=wishes.max_loss,
                publish=wishes.publish,
                share_hint=wishes.share_hint,
                deadline_s=self._plan_s,
            )
        )
        asked.overdue = asyncio.get_running_loop().call_later(self._plan_s, self._overdue, asked)

    def _answers(self, link: RouterLink) -> bool:
        """Whether a question to this router is worth waiting for: it lets no more than one request in a while find out."""
        since = self._silent.get(link)
        if since is None or link.heard_at > since or time.monotonic() - since > SILENCE_S:
            self._silent.pop(link, None)
            return link.registered.is_set()
        return False

    def _overdue(self, asked: _Asked) -> None:
        if asked.link is not None:
            self._silent[asked.link] = time.monotonic()
        if asked.plan is None:
            log.warning("no plan came in time", request=asked.question.key, plan_s=self._plan_s)
            why = f"no plan came within timeouts.plan_s = {self._plan_s:g} s"
            self._answer(asked, private_plan(len(asked.question.token_ids), why))

    def on_message(self, link: RouterLink, message: RouterToNode) -> None:
        match message:
            case Planned():
                self._planned(message)
            case PlanRefused(key, code, why):
                log.warning("the router has no plan", request=key, code=code, why=why)
                asked = self._asked.get(key)
                if asked is not None and asked.plan is None:
                    self._answer(asked, private_plan(len(asked.question.token_ids), f"{code}: {why}"))
            case Drain():
                self.runtime.routers.drain()
            case _:
                log.warning("message is not for an attached server", kind=type(message).__name__)

    def _planned(self, message: Planned) -> None:
        asked = self._asked.get(message.question_id)
        if asked is None or asked.root is not None:
            return  # the request is over, or this was said before
        asked.root = message.root
        if asked.question.wishes.publish:
            asked.publisher = Publisher(self.runtime, asked.question.model, message.root)
        asked.answered.set()
        if asked.plan is not None:
            return  # too late to pull anything, in time to publish
        plan, num_tokens = message.plan, len(asked.question.token_ids)
        try:
            plan.validate(self.runtime.settings.layout.num_layers)
            if plan.num_tokens != num_tokens:
                raise ValueError(f"the plan covers {plan.num_tokens} of {num_tokens} tokens")
            execution = PlanExecution(plan, self.runtime.settings.layout.num_layers, self.runtime.settings.chunk_tokens)
        except ValueError as error:
            log.warning("a plan that cannot be executed", request=message.question_id, why=str(error))
            self._answer(asked, private_plan(num_tokens, str(error)))
            return
        self._answer(asked, plan)
        if plan.reused_tokens:
            self._pull(asked, execution, message.source_addresses)

    def _answer(self, asked: _Asked, plan: ReusePlan) -> None:
        asked.plan = plan
        asked.answered.set()
        if asked.overdue is not None:
            asked.overdue.cancel()
        question = asked.question
        final = provenances(plan, self.runtime.settings.lineage(question.model).id)[-1]
        self._events.append(PlanReady(question.key, plan, final, asked.publisher is not None))

    def _pull(self, asked: _Asked, execution: PlanExecution, addresses: dict[str, str]) -> None:
        key, question = asked.question.key, asked.question
        assert asked.root is not None
        asked.sources = PlanSources(
            self.runtime,
            key,
            question.model,
            block_hashes(question.token_ids, asked.root, self.runtime.settings.layout.block_size),
            execution,
            addresses,
            lambda arrival: self._arrived(key, arrival),
            lambda why: self._lost(key, why),
        )
        try:
            asked.sources.start()
        except KvkinError as error:
            self._lost(key, str(error))

    def _arrived(self, key: str, arrival: Arrival) -> None:
        parts = []
        for start, data in arrival.parts:
            place = place_of(data)
            assert place is not None, "pulled blocks lie in the node's arena"
            parts.append((start, place))
        self._events.append(PartsArrived(key, arrival.chunk, arrival.layer, tuple(parts)))

    def _lost(self, key: str, why: str) -> None:
        log.warning("falling back to a private prefill", request=key, why=why)
        self._events.append(SourcesFailed(key, why))

    def unneeded(self, key: str) -> None:
        asked = self._asked.get(key)
        if asked is not None and asked.sources is not None:
            asked.sources.stop()

    # --- publication -------------------------------------------------------------------------------------------------------

    def computed(self, key: str, plan: ReusePlan, token_ids: tuple[int, ...], covered: Covered, last: bool) -> None:
        asked = self._asked.get(key)
        if asked is None:
            self._events.append(Published(key))
            return
        asked.publishing = asyncio.ensure_future(self._publish(asked, plan, token_ids, covered, last, asked.publishing))
        self.runtime.keep(asked.publishing)

    async def _publish(
        self,
        asked: _Asked,
        plan: ReusePlan,
        token_ids: tuple[int, ...],
        covered: Covered,
        last: bool,
        before: asyncio.Future[None] | None,
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        await asked.answered.wait()
        key, sources = asked.question.key, asked.sources
        try:
            if asked.publisher is not None:
                # scratch of a plan that was given up is no part of what was computed
                scratch = sources.scratch if sources is not None and plan is asked.plan and sources.complete else {}
                rows = OrderedRows(self._stores, key, covered, self.runtime.settings.layout.block_size)
                await asked.publisher.publish(token_ids, plan, scratch, rows)
        except Exception as error:  # noqa: BLE001 - costs others the blocks of one request
            log.error("a request's blocks could not be published", request=key, error=repr(error))
        finally:
            if sources is not None:
                sources.stop()
            if last:
                self._events.append(Published(key))
            if asked.over:
                self._forget(asked)

    def stored(self, ticket: int, why: str) -> None:
        self._stores.stored(ticket, why)

    def ended(self, key: str, tokens_reused: int, fallback: str) -> None:
        asked = self._asked.get(key)
        if asked is None or asked.over:
            return
        asked.over = True
        self._finished += 1
        self._fallbacks += bool(fallback)
        pulled, sources = 0, asked.sources
        if sources is not None:
            pulled = sources.total_bytes
            self._pull_rate = faster(self._pull_rate, [sources])
        plan = asked.plan
        log.info(
            "served",
            request=key,
            model=asked.question.model,
            plan="none" if plan is None else str(plan.kind),
            prompt_tokens=len(asked.question.token_ids),
            reused_tokens=tokens_reused,
            pulled_bytes=pulled,
            sources=[] if plan is None else sorted({node for segment in plan.segments for node in segment.nodes}),
            fallback=fallback,
            reason="" if plan is None else plan.reason,
        )
        if asked.link is not None and asked.link.registered.is_set():
            asked.link.send(PlanDone(key, len(asked.question.token_ids), tokens_reused, fallback))
        if asked.publishing is None or asked.publishing.done():
            self._forget(asked)

    def _forget(self, asked: _Asked) -> None:
        self._asked.pop(asked.question.key, None)
        if asked.overdue is not None:
            asked.overdue.cancel()
        if asked.sources is not None:
            asked.sources.stop()
