"""The reference engine: transformers modules, layer by layer, several requests interleaved by step.

Correctness first; the embedded default, and what profiling runs on. One thread of its own runs steps round robin: a long
prefill advances by one unit (a chunk through a layer) per turn, so decoding requests keep flowing. Used by prefill and decode
nodes and by ``kvkin ask --local``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import torch
from tokenizers import Tokenizer

from kvkin.engines.api import Arrival, EngineRequest, EngineSink
from kvkin.engines.layer_ops import LayerOps, layout_of
from kvkin.engines.requests import RunningRequest
from kvkin.engines.text import TextStream
from kvkin.kv.errors import DuplicateRequest, InvalidRequest, NodeUnavailable
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
        self._active: dict[str, EngineRequest] = {}  # submitted, neither ended nor cancelled; under the lock
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._drained = False  # nothing looks into the inbox any more
        self._thread: threading.Thread | None = None
        if start:
            self._thread = threading.Thread(target=self._run, name="kvkin-engine", daemon=True)
            self._thread.start()

    def layout(self, model: str) -> KVLayout:
        return self._layouts[model]

    # --- from any thread -------------------------------------------------------------------------------------------------

    def plan_execution(self, model: str, plan: ReusePlan) -> PlanExecution:
        loaded = self._models.get(model)
        if loaded is None:
            raise InvalidRequest(f"model {model!r} is not on this node (allowed: {', '.join(self.models)})")
        try:
            return PlanExecution(plan, loaded.ops.num_layers, self._chunk_tokens)
        except ValueError as error:
            raise InvalidRequest(f"plan: {error}") from None

    def submit(self, request: EngineRequest, sink: EngineSink) -> PlanExecution:
        planned = self.plan_execution(request.model, request.plan)
        if planned.plan.num_tokens != len(request.token_ids):
            raise InvalidRequest(f"plan covers {planned.plan.num_tokens} of {len(request.token_ids)} tokens")
        with self._wake:
            if request.request_id in self._active:
                raise DuplicateRequest(f"request {request.request_id!r} is still running")
            self._active[request.request_id] = request
        if not self._post(lambda: self._admit(request, sink, self._models[request.model])):
            raise NodeUnavailable("the engine is closed")
        return planned

    def arrived(self, request_id: str, arrival: Arrival) -> None:
        self._post(lambda: self._with(request_id, lambda running: running.arrived(arrival)))

    def replan(self, request_id: str, plan: ReusePlan) -> None:
        self._post(lambda: self._with(request_id, lambda running: running.replan(plan)))

    def cancel(self, request_id: str, reason: str) -> None:
        with self._wake:
            self._active.pop(request_id, None)
        self._post(lambda: self._with(request_id, lambda running: running.cancel(reason)))

    def call(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the future
                    future.set_exception(error)

        if not self._post(run):
            future.set_exception(NodeUnavailable("the engine is closed"))
        return future

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()
        else:
            self._shut_down()

    # --- on the engine thread ----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Take in what arrived, then run one step of the next request that has something to do; False if none has."""
        with torch.inference_mode():
            while self._inbox:
                self._inbox.popleft()()
            for _ in range(len(self._turns)):
                request_id = self._turns.popleft()
                running = self._requests.get(request_id)
                if running is None:
                    continue
                self._turns.append(request_id)
                if self._guarded(running, running.step):
                    return True
        return False

    def _run(self) -> None:
        while True:
            busy = self.step()
            with self._wake:
                if self._closed:
                    break
                if not busy and not self._inbox:
                    self._wake.wait()
        self._shut_down()

    def _shut_down(self) -> None:
        while True:
            with self._wake:
                self._drained = not self._inbox
                if self._drained:
                    break
                action = self._inbox.popleft()
            action()
        for running in list(self._requests.values()):
            running.cancel("the engine is closing")
        self._requests.clear()

    def _post(self, action: Callable[[], None]) -> bool:
        """Have ``action`` run on the engine thread; False if the engine is closed and never will."""
        with self._wake:
            if self._drained:
                return False
            self._inbox.append(action)
            self._wake.notify_all()
            return True

    def _admit(self, request: EngineRequest, sink: EngineSink, model: LoadedModel) -> None:
        stop = request.sampling.stop if request.sampling else ()
        text = TextStream(model.tokenizer, stop) if model.tokenizer is not None and request.sampling else None
        try:
            running = RunningRequest(
                request, sink, model.ops, self._layouts[request.model], text, model.eos, self._chunk_tokens
            )
        except Exception as error:  # noqa: BLE001 - told to whoever submitted the request
            self._release(request)
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
            self._release(running.request)
        return result

    def _release(self, request: EngineRequest) -> None:
        with self._wake:
            if self._active.get(request.request_id) is request:
                del self._active[request.request_id]
