"""The scheduler side of a plain ``vllm serve`` (docs/vllm.md): requests come from vLLM's own clients, plans from the family's routers.

Runs where vLLM's scheduler runs, on its thread. A request waits in vLLM's queue until the link has a plan for it (bounded), then it is a
load like any other (``scheduler_side.py``). What cannot be loaded is computed by vLLM. At its end its full blocks are stored into the
arena, and vLLM gets its blocks back.

vLLM's own prefix cache finds blocks by tokens and salt. What a plan makes exactly has no salt, as what vLLM computes itself; what it makes
approximately has its provenance for a salt, so that it is found under the same plan only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import structlog
from vllm.v1.request import RequestStatus

from kvkin.engines.vllm import compat
from kvkin.engines.vllm.entries import Entry, StepPlan
from kvkin.engines.vllm.loads import LoadState
from kvkin.engines.vllm.orders import Serve, StoreE, StoreKV
from kvkin.engines.vllm.scheduler_side import SchedulerSide
from kvkin.engines.vllm.serving import (
    Link,
    PartsArrived,
    PlanReady,
    Published,
    Question,
    SourcesFailed,
    StoreWanted,
    Wishes,
)
from kvkin.engines.vllm.serving_requests import Asked, adapter_of, computed_tokens, is_plain, told, wishes_in
from kvkin.kv.errors import ConfigError
from kvkin.kv.plan import ReusePlan, private_plan
from kvkin.transport.messages import Reuse

log = structlog.get_logger()

ANSWER_GRACE_S = 1.0
"""The link answers by itself when its deadline is over; should it hang, a request waits so much longer."""
HOLD_S = 30.0
"""Longest that blocks of a finished request are kept for their publication."""
_PUBLISHED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class ServingSide(SchedulerSide):
    """``wishes`` are those of requests that say nothing. ``consumes``: plans are asked for; ``produces``: blocks are published."""

    def __init__(
        self,
        block_size: int,
        num_ranks: int,
        link: Link,
        *,
        wishes: Wishes,
        plan_s: float,
        consumes: bool,
        produces: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(block_size, num_ranks)
        self.link = link
        self._wishes, self._plan_s, self._consumes, self._produces = wishes, plan_s, consumes, produces
        self._clock = clock
        self._asked: dict[str, Asked] = {}
        self._apart: dict[str, str] = {}  # why a request shares nothing
        self._just_prefilled: list[Asked] = []
        self._held_since: dict[str, float] = {}
        self._holds = 0
        self.configure(link.chunk_tokens, link.layout.num_layers)

    @property
    def has_orders(self) -> bool:
        """Whether steps are wanted although vLLM has no request: blocks are kept until they are stored."""
        return bool(self._orders or self._held or self._stores)

    # --- from vLLM's scheduler -----------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        why, model = "", self.link.model_of(adapter_of(request))
        try:
            wishes = wishes_in(request, self._wishes)
        except ConfigError as error:
            log.warning(
                "a request's wishes cannot be read: it shares nothing", request=request.request_id, why=str(error)
            )
            why = str(error)
        if not self.link.alive:
            why = "the link to the family is down"
        elif model is None:
            why = "its adapter is none of the node's models"
        elif not is_plain(request):
            why = "it has a cache_salt of its own, or inputs or outputs beside tokens"
        if why or model is None:
            self._apart[request.request_id] = why
            return
        # of a prompt without a whole block and a token behind it nothing can be reused
        whole = len(request.prompt_token_ids) > self.link.layout.block_size
        asking = self._consumes and whole and wishes.reuse is not Reuse.OFF
        if not (asking or wishes.publish):
            self._apart[request.request_id] = "nothing is asked for, and nothing published"
            return
        deadline = self._clock() + self._plan_s + ANSWER_GRACE_S
        asked = Asked(request, model, wishes, deadline, self._fall_back)
        self._asked[asked.key] = asked
        if not asking:
            # a router is asked all the same: it says on which root the blocks hang
            wishes = msgspec.structs.replace(wishes, reuse=Reuse.OFF)
            self._plan(asked, private_plan(asked.num_tokens, "nothing is asked for"), None)
        self.link.ask(Question(asked.key, model, tuple(request.prompt_token_ids), wishes))

    def matched_tokens(self, request: Any, cached: int) -> tuple[int | None, bool]:
        asked = self._asked.get(request.request_id)
        if asked is None:
            return 0, False
        self._take_events()
        if asked.plan is None:
            if self.link.alive and self._clock() < asked.deadline:
                return None, False
            asked.fallback = "the link to the family did not answer"
            self._plan(asked, private_plan(asked.num_tokens, asked.fallback), None)
        load = None if asked.entry is None else asked.entry.load
        if load is not None and load.stop and load.state is LoadState.DONE and not load.swapped:
            # an operator's reset takes blocks without a word: there is no copy of the load
            asked.fallback = asked.fallback or "vLLM took back the blocks"
            self._replace(asked)
        if compat.use_salt(request, asked.salt):
            return None, False  # vLLM looked its cache up under another name: once more
        load = None if asked.entry is None else asked.entry.load
        if load is not None and load.state is LoadState.QUEUED and load.stop <= cached:
            self.link.unneeded(asked.key)
            return 0, False
        if asked.holding:
            return None, False
        return super().matched_tokens(request, cached)

    def plan_step(self, output: Any) -> StepPlan:
        self._take_events()
        for asked in self._just_prefilled:
            if self._asked.get(asked.key) is asked and asked.publishable:
                self._publish(asked, last=False)
        self._just_prefilled = []
        step = super().plan_step(output)
        for progress in step.progress:
            begun = self._asked.get(progress.key)
            if begun is not None and not begun.prefilled and progress.stop >= begun.num_tokens:
                begun.prefilled = True
                self._just_prefilled.append(begun)
        for key, since in list(self._held_since.items()):
            if not self.link.alive or self._clock() - since > HOLD_S:
                self._give_back(key)
        return step

    def received(self, request_ids: set[str]) -> None:
        super().received(request_ids)
        for request_id in request_ids:
            asked = self._asked.get(request_id)
            if asked is None:
                continue
            if asked.failing:
                asked.failing = False
                self._replace(asked)
            elif not asked.publishable:
                # it is all in vLLM's cache; what is to be published stays where it landed
                self.link.unneeded(asked.key)

    def finished(self, request: Any, block_ids: tuple[list[int], ...]) -> bool:
        self._apart.pop(request.request_id, None)
        asked = self._asked.pop(request.request_id, None)
        if asked is None:
            return False
        entry, held = asked.entry, False
        if entry is not None:
            # one that did not wait for an answer may have ended before it
            coming = not asked.answered and self._produces and asked.wishes.publish and self.link.alive
            entry.hold = (asked.publishable or coming) and not asked.failing and request.status in _PUBLISHED
            held = super().finished(request, block_ids)
        if held:
            self._held_since[asked.key] = self._clock()
            self._publish(asked, last=True)
        self.link.ended(asked.key, asked.tokens_reused, asked.fallback)
        return held

    def answered(self, request: Any) -> dict[str, Any] | None:
        """What a client is told of its request at the end, before it is ``finished``."""
        asked, why = self._asked.get(request.request_id), self._apart.get(request.request_id)
        if why is not None and request.prompt_token_ids:
            return told(private_plan(len(request.prompt_token_ids), why))
        return None if asked is None else asked.said

    def close(self) -> None:
        self.link.close()

    # --- from the link -------------------------------------------------------------------------------------------------------

    def _take_events(self) -> None:
        while (event := self.link.take()) is not None:
            match event:
                case Published(key):
                    self._give_back(key)
                case StoreWanted():
                    self._store(event)
                case PlanReady(key) | PartsArrived(key) | SourcesFailed(key):
                    asked = self._asked.get(key)
                    if asked is not None:
                        self._hear(asked, event)

    def _hear(self, asked: Asked, event: PlanReady | PartsArrived | SourcesFailed) -> None:
        match event:
            case PlanReady(_, plan, provenance, publishable):
                asked.answered = True
                asked.publishable = publishable and self._produces and asked.wishes.publish
                if asked.plan is None:
                    self._plan(asked, plan, None if provenance.exact else provenance.key.hex())
            case PartsArrived(_, chunk, layer, parts):
                if asked.entry is not None:
                    asked.entry.load.arrived(chunk, layer, parts)
            case SourcesFailed(_, why):
                self._fall_back(asked, why)

    def _store(self, wanted: StoreWanted) -> None:
        try:
            block_ids = tuple(self.blocks(wanted.key))
        except RuntimeError as error:
            self.link.stored(wanted.ticket, str(error))
            return
        ticket, arena = wanted.ticket, self.link.arena
        order: StoreKV | StoreE
        if wanted.e_layer is None:
            order = StoreKV(ticket, block_ids, wanted.start, wanted.layers, arena, wanted.slots)
        else:
            order = StoreE(ticket, wanted.key, wanted.start, wanted.e_layer, arena, wanted.slots)
        self.store(order, lambda why: self.link.stored(ticket, why))

    # --- inside --------------------------------------------------------------------------------------------------------------

    def _plan(self, asked: Asked, plan: ReusePlan, salt: str | None) -> None:
        """A request's plan is known: from now on it is one of the requests of this side, if there is anything to do for it."""
        asked.plan, asked.salt = plan, salt
        load = asked.load(plan, self.link.layout.num_layers, self.link.chunk_tokens)
        if not load.stop and not (self._produces and asked.wishes.publish):
            return
        sampling = asked.request.sampling_params
        asked.entry = Entry(load, asked.num_tokens, sampling.max_tokens or 1, asked.lost, asked)
        asked.entry.request_id = asked.key
        taps = self.link.transition_layers if self._produces and asked.wishes.publish else ()
        asked.entry.tapped = bool(taps)
        # the answer's first tokens are enough: who wants the rest of a long one has it computed
        capacity = asked.num_tokens + min(sampling.max_tokens or 1, self.link.chunk_tokens)
        self.enter(asked.entry, Serve(asked.key, self.link.layout, taps, capacity))
        self._by_id[asked.key] = asked.entry
        if load.lora_id and not load.only_pulls:
            self._hold(asked)

    def _hold(self, asked: Asked) -> None:
        """Before a load with units of an adapter gets blocks, all ranks have the adapter, or none begins: a unit that fails on one rank
        while the others wait in it would end the engine."""
        self._holds -= 1  # tickets that are not the link's
        asked.holding = True

        def held(why: str) -> None:
            asked.holding = False
            if why and self._asked.get(asked.key) is asked:
                self._fall_back(asked, f"the adapter cannot be loaded: {why}")

        self._stores[self._holds] = held
        self._orders.append(asked.hold(self._holds))

    def _fall_back(self, asked: Asked, why: str) -> None:
        """The load cannot be completed: vLLM computes the prompt. Late and repeated failures change nothing."""
        entry = asked.entry
        if entry is None or not entry.load.stop or asked.failing:
            return
        load = entry.load
        if load.state is LoadState.QUEUED or load.swapped:
            asked.fallback = asked.fallback or why
            self._replace(asked)
        elif load.state is LoadState.LOADING:
            assert self.loads is not None
            asked.fallback, asked.failing = asked.fallback or why, True
            self.loads.remove(load)
            self._orders.append(replace(load.end(asked.key), failed=True))
        elif load.state is LoadState.ENDED:
            # its worker says so with the report that ends it: vLLM takes nothing of it
            asked.fallback, asked.failing = asked.fallback or why, True

    def _replace(self, asked: Asked) -> None:
        """Go on with a private plan; nothing that was made under the one before counts."""
        assert asked.entry is not None
        asked.plan, asked.salt = private_plan(asked.num_tokens, f"fallback: {asked.fallback}"), None
        if asked.request.num_output_tokens:
            asked.publishable = False  # tokens of the answer were generated under another plan
        asked.covered.forget()
        asked.entry.load = asked.load(asked.plan, self.link.layout.num_layers, self.link.chunk_tokens)
        self.link.unneeded(asked.key)

    def _publish(self, asked: Asked, *, last: bool) -> None:
        """Have the blocks of all tokens published that are computed by now."""
        tokens = computed_tokens(asked.request) if last else tuple(asked.request.prompt_token_ids)
        assert asked.plan is not None
        self.link.computed(asked.key, asked.plan, tokens, asked.covered, last=last)

    def _give_back(self, key: str) -> None:
        self._held_since.pop(key, None)
        self.release(key)
