"""The reference engine: transformers modules, layer by layer, several requests interleaved by step.

Correctness first; the embedded default, and what profiling runs on. One thread of its own runs steps round robin: a long
prefill advances by one unit (a chunk through a layer) per turn, so decoding requests keep flowing. Used by prefill and decode
nodes and by ``kvkin ask --local``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import torch
from tokenizers import Tokenizer

from kvkin.engines.admitting import check_covered, execution_of
from kvkin.engines.api import Arrival, EngineRequest, EngineSink
from kvkin.engines.layer_ops import LayerOps, layout_of
from kvkin.engines.loop import ActiveRequests, EngineLoop
from kvkin.engines.requests import RunningRequest
from kvkin.kv.errors import NodeUnavailable
from kvkin.kv.execution import PlanExecution
from kvkin.kv.layout import KVLayout
from kvkin.kv.plan import ReusePlan

T = TypeVar("T")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run: its layer operations, its tokenizer (None: no text) and the ids that end an answer."""

    ops: LayerOps
    tokenizer: Tokenizer | None
    eos: frozenset[int]


class ReferenceEngine:
    """Runs requests of several models of one family. ``start=False`` leaves stepping to the caller (tests)."""

    def __init__(
        self, models: dict[str, LoadedModel], *, block_size: int, chunk_tokens: int, start: bool = True
    ) -> None:
        self.models = tuple(models)
        self._models = models
        self._layouts = {name: layout_of(model.ops, block_size) for name, model in models.items()}
        self._chunk_tokens = chunk_tokens
        self._requests: dict[str, RunningRequest] = {}
        self._turns: deque[str] = deque()
        self._active = ActiveRequests()
        self.failure: Future[None] = Future()
        self._loop = EngineLoop(self.step, self._end)
        if start:
            self._loop.start()

    def layout(self, model: str) -> KVLayout:
        return self._layouts[model]

    # --- from any thread -------------------------------------------------------------------------------------------------

    def plan_execution(self, model: str, plan: ReusePlan) -> PlanExecution:
        layout = self._layouts.get(model)
        return execution_of(plan, model, self.models, layout.num_layers if layout else 0, self._chunk_tokens)

    def submit(self, request: EngineRequest, sink: EngineSink) -> PlanExecution:
        planned = self.plan_execution(request.model, request.plan)
        check_covered(request, planned)
        self._active.add(request)
        if not self._loop.post(lambda: self._admit(request, sink, self._models[request.model])):
            raise NodeUnavailable("the engine is closed")
        return planned

    def arrived(self, request_id: str, arrival: Arrival) -> None:
        self._loop.post(lambda: self._with(request_id, lambda running: running.arrived(arrival)))

    def replan(self, request_id: str, plan: ReusePlan) -> None:
        self._loop.post(lambda: self._with(request_id, lambda running: running.replan(plan)))

    def cancel(self, request_id: str, reason: str) -> None:
        self._active.cancelled(request_id)
        self._loop.post(lambda: self._with(request_id, lambda running: running.cancel(reason)))

    def call(self, function: Callable[[], T]) -> Future[T]:
        return self._loop.call(function)

    def close(self) -> None:
        self._loop.close()

    # --- on the engine thread ----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Take in what arrived, then run one step of the next request that has something to do; False if none has."""
        with torch.inference_mode():
            self._loop.take_in()
            for _ in range(len(self._turns)):
                request_id = self._turns.popleft()
                running = self._requests.get(request_id)
                if running is None:
                    continue
                self._turns.append(request_id)
                if self._guarded(running, running.step):
                    return True
        return False

    def _end(self) -> None:
        """The close, after the last step."""
        for running in list(self._requests.values()):
            running.cancel("the engine is closing")
        self._requests.clear()

    def _admit(self, request: EngineRequest, sink: EngineSink, model: LoadedModel) -> None:
        try:
            running = RunningRequest(
                request, sink, model.ops, self._layouts[request.model], model.tokenizer, model.eos, self._chunk_tokens
            )
        except Exception as error:  # noqa: BLE001 - told to whoever submitted the request
            self._active.ended(request)
            sink.failed(request.request_id, error)
            return
        self._requests[request.request_id] = running
        self._turns.append(request.request_id)

    def _with(self, request_id: str, action: Callable[[RunningRequest], None]) -> None:
        """Act on a request if it still runs: late signals are ignored."""
        running = self._requests.get(request_id)
        if running is not None:
            self._guarded(running, lambda: action(running))

    def _guarded(self, running: RunningRequest, action: Callable[[], T]) -> T | None:
        """An error inside one request ends that request and no other."""
        result: T | None = None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001 - ends this request and no other
            running.fail(error)
        if running.ended:
            self._requests.pop(running.request.request_id, None)
            self._active.ended(running.request)
        return result
