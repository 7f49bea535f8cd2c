"""VllmEngine: kvkin's ``Engine`` on a vLLM whose scheduler runs in this process, for prefill and decode nodes alike. With one rank the
model does, too; with several (``tensor_parallel_size``) they are processes of their own (``workers.py``).

One thread of its own owns vLLM: it takes in what other threads posted, then runs one vLLM step. A request with a plan is handed to
vLLM at once; vLLM parks it as waiting for remote KV while arrivals are written and units run between the steps of the others, and
then computes the last segment itself, with its own batching, chunked prefill and prefix cache (``loads.py``, ``scheduler_side.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from kvkin.engines.admitting import check_covered, execution_of
from kvkin.engines.api import Arrival, EngineRequest, EngineSink
from kvkin.engines.loop import EngineLoop
from kvkin.engines.vllm import compat
from kvkin.engines.vllm.admission import Admission
from kvkin.engines.vllm.launch import Runtime, VllmModel, build_runtime
from kvkin.engines.vllm.loads import LoadState
from kvkin.engines.vllm.orders import Progress
from kvkin.engines.vllm.request_table import RequestTable
from kvkin.engines.vllm.running import RunningRequest, WastedStep
from kvkin.engines.vllm.sampling import token_logprobs
from kvkin.engines.vllm.waiting import Posted
from kvkin.kv.errors import Cancelled, InvalidRequest, NodeUnavailable
from kvkin.kv.execution import PlanExecution
from kvkin.kv.layout import KVLayout, Plane
from kvkin.kv.plan import ReusePlan

T = TypeVar("T")

__all__ = ["VllmEngine", "VllmModel"]

CLOSING_STEPS = 1000
"""Steps after which a close gives up on requests that vLLM does not let go of."""


class VllmEngine:
    """Runs requests of one checkpoint and its adapters. ``options`` are vLLM's engine arguments (``vllm:`` in the cluster file).

    Beside the node's arena, requests take host memory: up to ``e_bytes`` for hidden states that are to be published (who finds none left
    publishes no E), up to ``swap_bytes`` for copies of pulled KV whose blocks vLLM gave to others (who finds none left ends with
    CapacityError). None: no bound.

    ``sync_wait_s``: how long a forward may wait for the last layers of a context where nothing else runs (``waiting.py``).

    ``runtime`` is an engine that was built already (with the same checkpoint, adapters and transition layers): it is left running
    at the close. ``start=False`` leaves stepping to the caller (tests).
    """

    def __init__(
        self,
        models: Mapping[str, VllmModel],
        *,
        block_size: int,
        chunk_tokens: int,
        transition_layers: Sequence[int],
        options: Mapping[str, Any],
        e_bytes: int | None = None,
        swap_bytes: int | None = None,
        sync_wait_s: float = 0.0,
        runtime: Runtime | None = None,
        start: bool = True,
    ) -> None:
        self.models = tuple(models)
        self._chunk_tokens, self._taps = chunk_tokens, tuple(transition_layers)
        self._owned = runtime is None
        self._runtime = runtime or build_runtime(
            models, chunk_tokens=chunk_tokens, transition_layers=transition_layers, options=options
        )
        shape = self._runtime.workers.shape
        planes = tuple(Plane(name, shape.kv_heads, shape.head_dim) for name in ("keys", "values"))
        dtype = str(shape.dtype).removeprefix("torch.")
        self._layout = KVLayout(shape.num_layers, planes, shape.hidden_size, dtype, block_size)
        self._runtime.scheduler.configure(
            chunk_tokens,
            shape.num_layers,
            shape.num_layers * self._layout.kv_token_bytes,
            states_bytes=e_bytes,
            swap_bytes=swap_bytes,
        )
        self.failure: Future[None] = Future()
        self._loop = EngineLoop(self.step, self._end)
        admission = Admission(self._runtime, models, self._layout, chunk_tokens)
        self._table = RequestTable(
            self._runtime, models, admission, shape.num_layers, self._loop, self.failure, sync_wait_s
        )
        self._waits = self._table.waits
        if self._runtime.worker is not None:
            # ranks in other processes see no data that this one has not ordered to be written
            self._runtime.scheduler.ends_early = self._waits.may_end
            self._runtime.worker.wait_by(self._waits.layer)
        compat.on_failure(self._runtime.llm, lambda: self._post_death("a process that runs the model has died"))
        if start:
            self._loop.start()

    def layout(self, model: str) -> KVLayout:
        return self._layout

    # --- from any thread ---------------------------------------------------------------------------------------------------

    def plan_execution(self, model: str, plan: ReusePlan) -> PlanExecution:
        return execution_of(plan, model, self.models, self._layout.num_layers, self._chunk_tokens)

    def submit(self, request: EngineRequest, sink: EngineSink) -> PlanExecution:
        planned = self.plan_execution(request.model, request.plan)
        check_covered(request, planned)
        if not set(request.taps) <= set(self._taps):
            raise InvalidRequest(f"taps {request.taps}: the engine taps {self._taps}")
        self._table.active.add(request)
        if not self._loop.post(lambda: self._table.admit(request, sink)):
            raise NodeUnavailable("the engine is closed")
        return planned

    def arrived(self, request_id: str, arrival: Arrival) -> None:
        self._post(request_id, lambda running: self._table.take_data(running, arrival), data=True)

    def replan(self, request_id: str, plan: ReusePlan) -> None:
        self._post(request_id, lambda running: self._table.replan(running, plan))

    def cancel(self, request_id: str, reason: str) -> None:
        self._table.active.cancelled(request_id)
        self._post(request_id, lambda running: self._table.fail(running, Cancelled(reason)))

    def call(self, function: Callable[[], T]) -> Future[T]:
        return self._loop.call(function)

    def _post(self, request_id: str, action: Callable[[RunningRequest], None], *, data: bool = False) -> None:
        """Have ``action`` run for a request, if it still runs then: late signals are ignored."""

        def act() -> None:
            running = self._table.get(request_id)
            if running is not None:
                self._table.guarded(running, lambda: action(running))

        self._loop.post(Posted(request_id, data, act))

    def close(self) -> None:
        self._loop.close()

    # --- on the engine's thread: a step ----------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Take in what arrived, then run one step of vLLM; False if there was nothing to do until something arrives."""
        self._loop.take_in()
        runtime = self._runtime
        if self.failure.done() or not compat.scheduler_of(runtime.llm).has_requests():
            return False
        started = time.monotonic()
        try:
            with compat.active(runtime.connector):
                outputs = runtime.llm.step()
        except Exception as error:  # noqa: BLE001 - vLLM does not come back from a step that failed
            self._died(f"vLLM failed: {' '.join(str(error).split()) or repr(error)}")
            return False
        waited, self._waits.waited_s = self._waits.waited_s, 0.0
        self._after_step(outputs, max(0.0, time.monotonic() - started - runtime.scheduler.slice_s - waited))
        return runtime.scheduler.active

    def _after_step(self, outputs: Sequence[Any], seconds: float) -> None:
        progress = self._runtime.scheduler.last.progress
        for running in self._table.all():
            entry = running.entry
            if entry is not None and entry.load.state in (LoadState.ENDED, LoadState.DONE):
                running.loaded()
        total = sum(each.stop - each.start for each in progress)
        for each in progress:
            self._progressed(each, seconds * (each.stop - each.start) / total)
        for output in outputs:
            of = self._table.by_key(output.request_id)
            if of is not None:
                self._table.guarded(of, partial(self._take_output, of, output))
        for running in self._table.all():
            if isinstance(running.fault, WastedStep):
                self._table.guarded(running, partial(self._table.start_over, running))
            elif running.fault is not None:
                self._table.fail(running, running.fault)

    def _progressed(self, progress: Progress, seconds: float) -> None:
        running = self._table.by_key(progress.key)
        if running is not None and running.fault is None:
            self._table.guarded(running, lambda: running.progressed(progress.start, progress.stop, seconds))

    def _take_output(self, running: RunningRequest, output: Any) -> None:
        if running.fault is not None:
            return
        (completion,) = output.outputs
        sampling = running.request.sampling
        if sampling is None:
            if output.finished:
                self._table.finish(running, "prefill", known=True)
            return
        tokens = list(completion.token_ids)
        for token, logprob in zip(tokens, token_logprobs(completion, sampling.logprobs), strict=True):
            reason = running.generated(int(token), logprob)
            if reason:
                self._table.finish(running, reason, known=output.finished)
                return
        if output.finished:  # vLLM's own limit: the model's context
            self._table.finish(running, "length", known=True)

    # --- on the engine's thread: the end ---------------------------------------------------------------------------------------

    def _end(self) -> None:
        """The close, after the last step: nothing of ours stays in vLLM."""
        self._table.fail_all(Cancelled("the engine is closing"))
        runtime = self._runtime
        runtime.scheduler.release_all()
        if not self.failure.done():
            self._settle()
        if self._owned:
            runtime.shut_down()

    def _settle(self) -> None:
        """Step until vLLM has let go of everything."""
        runtime = self._runtime
        with compat.active(runtime.connector):
            for _ in range(CLOSING_STEPS):
                if not compat.scheduler_of(runtime.llm).has_requests():
                    break
                runtime.llm.step()

    def _post_death(self, why: str) -> None:
        self._loop.post(lambda: self._died(why))

    def _died(self, why: str) -> None:
        """vLLM runs nothing any more: all requests end, to be tried elsewhere. Idempotent."""
        if self.failure.done():
            return
        error = NodeUnavailable(why)
        self.failure.set_exception(error)
        self._runtime.workers.lost = True
        self._table.fail_all(error)
