"""Requests of the vLLM engine, from their admission to their end: what is entered into vLLM, taken out of it, begun anew, and said at the end.

Belongs to the engine's thread. An error inside one request ends that request and no other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from kvkin.engines.api import Arrival, EngineRequest, EngineSink
from kvkin.engines.loop import ActiveRequests, EngineLoop
from kvkin.engines.vllm.admission import Admission
from kvkin.engines.vllm.launch import Runtime, VllmModel
from kvkin.engines.vllm.running import RunningRequest
from kvkin.engines.vllm.spaces import PagedSpace
from kvkin.engines.vllm.waiting import LayerWaits
from kvkin.kv.errors import NodeUnavailable
from kvkin.kv.plan import ReusePlan


class RequestTable:
    """``failure`` is set once nothing can be asked of vLLM any more; ``wait_s``: see ``LayerWaits``."""

    def __init__(
        self,
        runtime: Runtime,
        models: Mapping[str, VllmModel],
        admission: Admission,
        num_layers: int,
        loop: EngineLoop,
        failure: Future[None],
        wait_s: float,
    ) -> None:
        self._runtime, self._models, self._admission, self._num_layers = runtime, models, admission, num_layers
        self._loop, self._failure = loop, failure
        self.active = ActiveRequests()
        self._requests: dict[str, RunningRequest] = {}
        self._by_key: dict[str, RunningRequest] = {}
        self.waits = LayerWaits(wait_s, loop, self._by_key.get)

    def all(self) -> list[RunningRequest]:
        return list(self._requests.values())

    def get(self, request_id: str) -> RunningRequest | None:
        return self._requests.get(request_id)

    def by_key(self, key: str) -> RunningRequest | None:
        """The request whose plan has this name."""
        return self._by_key.get(key)

    def guarded(self, running: RunningRequest, action: Callable[[], None]) -> None:
        """An error inside one request ends that request and no other."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - ends this request and no other
            self.fail(running, error)

    # --- a plan begins -------------------------------------------------------------------------------------------------------

    def admit(self, request: EngineRequest, sink: EngineSink) -> None:
        model = self._models[request.model]
        try:
            if self._failure.done():
                raise NodeUnavailable("the engine has failed")
            running = RunningRequest(request, sink, self._space(), model.tokenizer, model.eos, self._num_layers)
        except Exception as error:  # noqa: BLE001 - told to whoever submitted the request
            self.active.ended(request)
            sink.failed(request.request_id, error)
            return
        self._requests[request.request_id] = running
        self.guarded(running, lambda: self._begin(running, request.plan))

    def take_data(self, running: RunningRequest, arrival: Arrival) -> None:
        assert running.entry is not None
        running.first_data_at = running.first_data_at or time.monotonic()
        running.entry.load.arrived(arrival.chunk, arrival.layer, self._runtime.workers.parts(arrival))

    def replan(self, running: RunningRequest, plan: ReusePlan) -> None:
        if not running.prefilled:
            self._leave(running)
            self._disconnect(running)
            self._begin(running, plan)

    def start_over(self, running: RunningRequest) -> None:
        """The same plan again, with the data that came so far; from now on it is not waited for inside a forward."""
        assert running.entry is not None
        received, running.fault, running.started_over = running.entry.load.received, None, True
        self.replan(running, running.plan)
        for write in received:
            running.entry.load.arrived(write.chunk, write.layer, write.parts)

    def _begin(self, running: RunningRequest, plan: ReusePlan) -> None:
        key = self._admission.enter(running, plan)
        self._by_key[key] = running
        running.internal_id = self._admission.add(running, plan, key)

    def _space(self) -> PagedSpace:
        scheduler, loop = self._runtime.scheduler, self._loop

        def release(key: str) -> None:
            loop.post(lambda: scheduler.release(key))

        return PagedSpace(self._runtime.workers, scheduler.blocks, release)

    # --- a request ends ------------------------------------------------------------------------------------------------------

    def finish(self, running: RunningRequest, reason: str, *, known: bool) -> None:
        """The answer is complete; ``known`` to vLLM, unless it ended with a stop string. Its blocks are kept either way."""
        assert running.entry is not None
        if not known:
            self._abort(running)
        self._forget(running)
        running.finish(reason, self._first_distribution(running))

    def fail(self, running: RunningRequest, error: Exception) -> None:
        if self._requests.get(running.request.request_id) is running:
            self._leave(running)
            self._forget(running)
            running.sink.failed(running.request.request_id, error)

    def fail_all(self, error: Exception) -> None:
        for running in self.all():
            self.fail(running, error)

    def _leave(self, running: RunningRequest) -> None:
        """Take it out of vLLM, its blocks as well."""
        running.space.num_tokens = 0
        if running.entry is not None:
            running.entry.hold = False
            self._abort(running)
            self._runtime.scheduler.left(running.entry)
            self._first_distribution(running)

    def _first_distribution(self, running: RunningRequest) -> NDArray[np.float32] | None:
        assert running.entry is not None
        if not running.request.first_distribution or self._failure.done():
            return None
        return self._runtime.workers.first_distribution(running.entry.load.key)

    def _abort(self, running: RunningRequest) -> None:
        if running.internal_id and not self._failure.done():
            self._runtime.llm.abort_request([running.internal_id], internal=True)
            running.internal_id = ""

    def _forget(self, running: RunningRequest) -> None:
        self._requests.pop(running.request.request_id, None)
        self._disconnect(running)
        self.active.ended(running.request)

    def _disconnect(self, running: RunningRequest) -> None:
        """What is still said of it under the name of its plan concerns nobody."""
        if running.entry is not None:
            self._by_key.pop(running.entry.load.key, None)
            self.waits.forget(running.entry.load.key)
            running.entry.listener = None
