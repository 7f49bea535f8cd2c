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
from dataclasses import dataclass, field, replace
from typing import Any

import structlog
from vllm.v1.request import RequestStatus

from kvkin.engines.vllm import compat
from kvkin.engines.vllm.loads import Load, LoadState
from kvkin.engines.vllm.orders import Serve, StoreE, StoreKV
from kvkin.engines.vllm.scheduler_side import PARAMETER, Entry, SchedulerSide, StepPlan
from kvkin.engines.vllm.serving import (
    Link,
    PartsArrived,
    PlanReady,
    Published,
    Question,
    SourcesFailed,
    StoreWanted,
    Wishes,
    wishes_of,
)
from kvkin.engines.vllm.spaces import Coverage
from kvkin.kv.errors import ConfigError
from kvkin.kv.execution import Unit
from kvkin.kv.plan import ReusePlan, private_plan
from kvkin.transport.messages import Reuse

log = structlog.get_logger()

ANSWER_GRACE_S = 1.0
"""The link answers by itself when its deadline is over; should it hang, a request waits so much longer."""
HOLD_S = 30.0
"""Longest that blocks of a finished request are kept for their publication."""
_PUBLISHED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass
class Asked:
    """A request that the family may know something of. ``plan``: what is executed, once it is known; ``salt``: what approximate KV of it is
    found by. Is its load's ``Listener``."""

    request: Any
    model: str
    lora_id: int
    wishes: Wishes
    deadline: float
    fail: Callable[[Asked, str], None]
    plan: ReusePlan | None = None
    salt: str | None = None
    entry: Entry | None = None
    publishable: bool = False
    answered: bool = False
    failing: bool = False
    prefilled: bool = False
    fallback: str = ""
    covered: Coverage = field(default_factory=Coverage)

    @property
    def key(self) -> str:
        key: str = self.request.request_id
        return key

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def tokens_reused(self) -> int:
        """Prompt tokens whose KV came from others, in whole or in part; those that vLLM had itself are not among them."""
        load = None if self.entry is None else self.entry.load
        return 0 if load is None or load.state is not LoadState.DONE else max(0, load.stop - load.cached)

    def unit_done(self, unit: Unit, positions: object, seconds: float) -> None:
        """The load's own table follows its units."""

    def states_kept(self, layer: int, start: int, stop: int) -> None:
        self.covered.add(layer, start, stop)

    def load_failed(self, why: str) -> None:
        self.fail(self, why)

    def step_wasted(self, why: str) -> None:
        """Loads of servers are never ended early, so no forward waits for one."""

    def load_lost(self, why: str) -> None:
        self.fail(self, why)


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
        self._just_prefilled: list[Asked] = []
        self._held_since: dict[str, float] = {}
        self.configure(link.chunk_tokens, link.layout.num_layers)

    @property
    def has_orders(self) -> bool:
        """Whether steps are wanted although vLLM has no request: blocks are kept until they are stored."""
        return bool(self._orders or self._held or self._stores)

    # --- from vLLM's scheduler -----------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        if not self.link.alive:
            return
        lora = request.lora_request
        model = self.link.model_of(None if lora is None else (lora.lora_name, lora.lora_path))
        wishes = self._wishes_of(request)
        if model is None or wishes is None or not _is_plain(request):
            return
        # of a prompt without a whole block and a token behind it nothing can be reused
        whole = len(request.prompt_token_ids) > self.link.layout.block_size
        asking = self._consumes and whole and wishes.reuse is not Reuse.OFF
        if not (asking or wishes.publish):
            return
        lora_id = 0 if lora is None else lora.lora_int_id
        deadline = self._clock() + self._plan_s + ANSWER_GRACE_S
        asked = Asked(request, model, lora_id, wishes, deadline, self._fall_back)
        self._asked[asked.key] = asked
        if not asking:
            # a router is asked all the same: it says on which root the blocks hang
            wishes = replace_reuse(wishes)
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
                self.link.unneeded(
                    asked.key
                )  # it is all in vLLM's cache; what is to be published stays where it landed

    def finished(self, request: Any, block_ids: tuple[list[int], ...]) -> bool:
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
        """What a client is told of its request at the end (``kv_transfer_params`` of the answer), before it is ``finished``."""
        asked = self._asked.get(request.request_id)
        if asked is None or asked.plan is None:
            return None
        reused = asked.tokens_reused
        said = {"plan": str(asked.plan.kind), "tokens_reused": reused, "reason": asked.plan.reason}
        return {PARAMETER: said | ({"fallback": asked.fallback} if asked.fallback else {})}

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

    def _wishes_of(self, request: Any) -> Wishes | None:
        """What the request allows; None if it cannot be read: such a request shares nothing."""
        parameters = request.kv_transfer_params
        if not isinstance(parameters, dict) or PARAMETER not in parameters:
            return self._wishes
        try:
            return wishes_of(parameters[PARAMETER], self._wishes, f"kv_transfer_params.{PARAMETER}")
        except ConfigError as error:
            log.warning(
                "a request's wishes cannot be read: it shares nothing", request=request.request_id, why=str(error)
            )
            return None

    def _plan(self, asked: Asked, plan: ReusePlan, salt: str | None) -> None:
        """A request's plan is known: from now on it is one of the requests of this side, if there is anything to do for it."""
        asked.plan, asked.salt = plan, salt
        load = self._load(asked, plan)
        if not load.stop and not (self._produces and asked.wishes.publish):
            return
        sampling = asked.request.sampling_params
        asked.entry = Entry(load, asked.num_tokens, sampling.max_tokens or 1, _lost(asked), asked)
        asked.entry.request_id = asked.key
        taps = self.link.transition_layers if self._produces and asked.wishes.publish else ()
        asked.entry.tapped = bool(taps)
        # the answer's first tokens are enough: who wants the rest of a long one has it computed
        capacity = asked.num_tokens + min(sampling.max_tokens or 1, self.link.chunk_tokens)
        self.enter(asked.entry, Serve(asked.key, self.link.layout, taps, capacity))
        self._by_id[asked.key] = asked.entry

    def _load(self, asked: Asked, plan: ReusePlan) -> Load:
        tokens, layout = asked.request.prompt_token_ids, self.link.layout
        return Load(asked.key, plan, tokens, asked.lora_id, layout.num_layers, self.link.chunk_tokens)

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
        asked.entry.load = self._load(asked, asked.plan)
        self.link.unneeded(asked.key)

    def _publish(self, asked: Asked, *, last: bool) -> None:
        """Have the blocks of all tokens published that are computed by now."""
        request = asked.request
        count = min(request.num_computed_tokens, request.num_tokens)
        tokens = tuple(request.all_token_ids[:count] if last else request.prompt_token_ids)
        assert asked.plan is not None
        self.link.computed(asked.key, asked.plan, tokens, asked.covered, last=last)

    def _give_back(self, key: str) -> None:
        self._held_since.pop(key, None)
        self.release(key)


def replace_reuse(wishes: Wishes) -> Wishes:
    """The same without reuse."""
    return Wishes(Reuse.OFF, wishes.max_loss, wishes.publish, wishes.share_hint)


def _lost(asked: Asked) -> Callable[[bool], None]:
    def lose(states: bool) -> None:
        if states:
            asked.covered.forget()

    return lose


def _is_plain(request: Any) -> bool:
    """Whether the request's KV is that of its token ids alone, and vLLM may reuse any. One with a salt of its own is to share nothing."""
    return (
        request.sampling_params is not None
        and request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and not request.mm_features
        and not request.resumable
        and not request.skip_reading_prefix_cache
        and request.cache_salt is None
    )
