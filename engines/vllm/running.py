"""One request inside the vLLM engine: what its sink is told, and what is counted of it. Touched by the engine's thread only."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from kvkin.engines.answer import Answer
from kvkin.engines.api import Counters, EngineRequest, EngineSink
from kvkin.engines.vllm.entries import Entry
from kvkin.engines.vllm.spaces import PagedSpace
from kvkin.kv.errors import CapacityError
from kvkin.kv.execution import Unit
from kvkin.kv.generation import TokenLogprob
from kvkin.kv.plan import ReusePlan


class WastedStep(Exception):
    """A step of vLLM of which nothing is to be used: the request starts over."""


class RunningRequest:
    """``begun`` for every plan that it is given; the engine feeds it what vLLM's steps bring. Is its load's ``Listener``."""

    def __init__(
        self,
        request: EngineRequest,
        sink: EngineSink,
        space: PagedSpace,
        tokenizer: Tokenizer | None,
        eos: frozenset[int],
        num_layers: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request, self.sink, self.space, self.counters = request, sink, space, Counters()
        self.prompt = len(request.token_ids)
        self.fault: Exception | None = None
        """Something went wrong while vLLM was in the middle of a step: the engine ends the request after it."""
        self.prefilled = False
        self.entry: Entry | None = None
        self.plan = request.plan
        self.started_over = False
        self.first_data_at = 0.0
        self.internal_id = ""
        self._num_layers, self._clock = num_layers, clock
        self._answer = Answer(request, sink, tokenizer, eos)
        self._began = 0.0
        self._load_s = 0.0
        self._loading = False
        self._first_step = True
        self._reached = 0

    def begun(self, entry: Entry, plan: ReusePlan) -> None:
        """A plan begins; nothing of the one before counts as its KV or its E."""
        self.entry, self.plan, self.first_data_at = entry, plan, 0.0
        self.space.num_tokens = 0
        self.space.covered.forget()
        self.counters.recomputed_layers.clear()
        self.counters.cached_tokens = self.counters.loaded_tokens = self.counters.computed_tokens = 0
        self._began, self._load_s, self._loading, self._first_step = self._clock(), 0.0, bool(entry.load.stop), True

    # --- from the worker, inside a step ------------------------------------------------------------------------------------

    def unit_done(self, unit: Unit, positions: Sequence[int], seconds: float) -> None:
        if self.fault is not None:
            return
        self._load_s += seconds
        if positions:
            self.counters.computed_layer_tokens += len(positions)
            self.counters.computed_positions += sum(positions)
        if unit.recompute:
            self.counters.recompute_s += seconds
            if positions:
                assert self.entry is not None
                segment = self.entry.load.chunks[unit.chunk].segment
                self.counters.recomputed_layers.setdefault(segment, set()).add(unit.layer)
        else:
            self.counters.suffix_s += seconds
            self.counters.computed_tokens += len(positions) if unit.first else 0
        try:
            self.sink.unit_done(self.request.request_id, unit, self.space)
        except Exception as error:  # noqa: BLE001 - ends this request and no other
            self.fault = error

    def states_kept(self, layer: int, start: int, stop: int) -> None:
        self.space.covered.add(layer, start, stop)

    def load_failed(self, why: str) -> None:
        self.fault = self.fault or RuntimeError(f"the plan's KV could not be written: {why}")

    def step_wasted(self, why: str) -> None:
        self.fault = self.fault or WastedStep(why)

    def load_lost(self, why: str) -> None:
        self.fault = self.fault or CapacityError(why)

    # --- from the engine, after a step ---------------------------------------------------------------------------------------

    def loaded(self) -> None:
        """Its load is complete: what it did not compute, it waited."""
        if self._loading:
            self._loading = False
            self.counters.wait_s += max(0.0, self._clock() - self._began - self._load_s)

    def progressed(self, start: int, stop: int, seconds: float) -> None:
        """vLLM computed tokens [start, stop) of it, in ``seconds`` of its step."""
        assert self.entry is not None
        if self._first_step:
            self._first_step = False
            load = self.entry.load
            self.counters.cached_tokens = load.cached if load.cached < load.stop else start
            self.counters.loaded_tokens = load.written_tokens
            self._reached = start
        elif self._reached < min(start, self.prompt):
            # taken up again after a preemption: by now vLLM's cache has more of it
            self.counters.cached_tokens += min(start, self.prompt) - self._reached
            self._reached = min(start, self.prompt)
        rows = range(start, min(stop, self.prompt))
        if rows:
            self.counters.computed_layer_tokens += len(rows) * self._num_layers
            self.counters.computed_positions += sum(rows) * self._num_layers
            self.counters.suffix_s += seconds
            # after a preemption, tokens come again
            self.counters.computed_tokens += max(0, rows.stop - max(rows.start, self._reached))
            self._reached = max(self._reached, rows.stop)
        self.space.num_tokens = stop
        if stop >= self.prompt and not self.prefilled:
            self.prefilled = True
            self.counters.prefilled_at = self._clock()
            self.sink.prefilled(self.request.request_id)

    def generated(self, token: int, logprob: TokenLogprob | None) -> str:
        """A new token; returns why the answer ends with it, or nothing."""
        if not self._answer.tokens:
            self.counters.first_token_at = self._clock()
        return self._answer.add(token, logprob)

    def finish(self, reason: str, first_logprobs: NDArray[np.float32] | None) -> None:
        self.space.num_tokens = self.prompt + max(len(self._answer.tokens) - 1, 0)
        result = self._answer.result(reason, first_logprobs)
        self.sink.finished(result, self.space, self.counters)
