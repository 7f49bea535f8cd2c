"""VllmEngine: kvkin's ``Engine`` on an in-process vLLM, for prefill and decode nodes alike.

One thread of its own owns vLLM: it takes in what other threads posted, then runs one vLLM step. A request with a plan is handed to
vLLM at once; vLLM parks it as waiting for remote KV while arrivals are written and units run between the steps of the others, and
then computes the last segment itself, with its own batching, chunked prefill and prefix cache (``loads.py``, ``scheduler_side.py``).
The cache's salt is the provenance of the plan's result, so that approximate KV is never found by who asked for exact KV.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from kvkin.engines.api import Arrival, EngineRequest, EngineSink
from kvkin.engines.loop import ActiveRequests, EngineLoop
from kvkin.engines.vllm import compat
from kvkin.engines.vllm.first_logits import kept
from kvkin.engines.vllm.launch import Runtime, VllmModel, build_runtime
from kvkin.engines.vllm.loads import Load, LoadState
from kvkin.engines.vllm.orders import Progress
from kvkin.engines.vllm.running import RunningRequest
from kvkin.engines.vllm.sampling import sampling_params, token_logprobs
from kvkin.engines.vllm.scheduler_side import Entry
from kvkin.engines.vllm.spaces import ETaps, PagedSpace, losing
from kvkin.engines.vllm.worker_side import Served
from kvkin.kv.errors import Cancelled, InvalidRequest, NodeUnavailable
from kvkin.kv.execution import PlanExecution
from kvkin.kv.hashing import digest
from kvkin.kv.layout import KVLayout, Plane
from kvkin.kv.plan import ReusePlan, provenances

T = TypeVar("T")

__all__ = ["VllmEngine", "VllmModel"]

CLOSING_STEPS = 1000
"""Steps after which a close gives up on requests that vLLM does not let go of."""


class VllmEngine:
    """Runs requests of one checkpoint and its adapters. ``options`` are vLLM's engine arguments (``vllm:`` in the cluster file).

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
        runtime: Runtime | None = None,
        start: bool = True,
    ) -> None:
        self.models = tuple(models)
        self._models = dict(models)
        self._chunk_tokens, self._taps = chunk_tokens, tuple(transition_layers)
        self._owned = runtime is None
        self._runtime = runtime or build_runtime(
            models, chunk_tokens=chunk_tokens, transition_layers=transition_layers, options=options
        )
        runner = self._runtime.worker.runner
        planes = tuple(Plane(name, runner.kv_heads, runner.head_dim) for name in ("keys", "values"))
        dtype = str(runner.dtype).removeprefix("torch.")
        self._layout = KVLayout(runner.num_layers, planes, runner.hidden_size, dtype, block_size)
        self._runtime.scheduler.configure(chunk_tokens, runner.num_layers)
        # one that no other engine has: blocks of models without a lineage are found by their own requests only
        self._nonce = digest(b"vllm engine", time.time_ns().to_bytes(8, "little"), id(self).to_bytes(8, "little"))
        self._numbers = itertools.count()
        self._requests: dict[str, RunningRequest] = {}
        self._by_key: dict[str, RunningRequest] = {}
        self._active = ActiveRequests()
        self._loop = EngineLoop(self.step, self._end)
        if start:
            self._loop.start()

    def layout(self, model: str) -> KVLayout:
        return self._layout

    # --- from any thread ---------------------------------------------------------------------------------------------------

    def plan_execution(self, model: str, plan: ReusePlan) -> PlanExecution:
        if model not in self._models:
            raise InvalidRequest(f"model {model!r} is not on this node (allowed: {', '.join(self.models)})")
        try:
            return PlanExecution(plan, self._layout.num_layers, self._chunk_tokens)
        except ValueError as error:
            raise InvalidRequest(f"plan: {error}") from None

    def submit(self, request: EngineRequest, sink: EngineSink) -> PlanExecution:
        planned = self.plan_execution(request.model, request.plan)
        if planned.plan.num_tokens != len(request.token_ids):
            raise InvalidRequest(f"plan covers {planned.plan.num_tokens} of {len(request.token_ids)} tokens")
        if not set(request.taps) <= set(self._taps):
            raise InvalidRequest(f"taps {request.taps}: the engine taps {self._taps}")
        self._active.add(request)
        if not self._loop.post(lambda: self._admit(request, sink)):
            raise NodeUnavailable("the engine is closed")
        return planned

    def arrived(self, request_id: str, arrival: Arrival) -> None:
        self._loop.post(lambda: self._with(request_id, lambda running: self._take_data(running, arrival)))

    def replan(self, request_id: str, plan: ReusePlan) -> None:
        self._loop.post(lambda: self._with(request_id, lambda running: self._replan(running, plan)))

    def cancel(self, request_id: str, reason: str) -> None:
        self._active.cancelled(request_id)
        self._loop.post(lambda: self._with(request_id, lambda running: self._fail(running, Cancelled(reason))))

    def call(self, function: Callable[[], T]) -> Future[T]:
        return self._loop.call(function)

    def close(self) -> None:
        self._loop.close()

    # --- on the engine's thread: a step ----------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Take in what arrived, then run one step of vLLM; False if there was nothing to do until something arrives."""
        self._loop.take_in()
        runtime = self._runtime
        if not compat.scheduler_of(runtime.llm).has_requests():
            return False
        started = time.monotonic()
        with compat.active(runtime.connector):
            outputs = runtime.llm.step()
        self._after_step(outputs, time.monotonic() - started - runtime.worker.slice_s)
        return runtime.scheduler.active

    def _after_step(self, outputs: Sequence[Any], seconds: float) -> None:
        progress = self._runtime.scheduler.last.progress
        for running in list(self._requests.values()):
            entry = running.entry
            if entry is not None and entry.load.state in (LoadState.ENDED, LoadState.DONE):
                running.loaded()
        total = sum(each.stop - each.start for each in progress)
        for each in progress:
            self._progressed(each, seconds * (each.stop - each.start) / total)
        for output in outputs:
            of = self._by_key.get(output.request_id)
            if of is not None:
                self._guarded(of, partial(self._take_output, of, output))
        for running in list(self._requests.values()):
            if running.fault is not None:
                self._fail(running, running.fault)

    def _progressed(self, progress: Progress, seconds: float) -> None:
        running = self._by_key.get(progress.key)
        if running is not None and running.fault is None:
            self._guarded(running, lambda: running.progressed(progress.start, progress.stop, seconds))

    def _take_output(self, running: RunningRequest, output: Any) -> None:
        if running.fault is not None:
            return
        (completion,) = output.outputs
        sampling = running.request.sampling
        if sampling is None:
            if output.finished:
                self._finish(running, "prefill", known=True)
            return
        tokens = list(completion.token_ids)
        for token, logprob in zip(tokens, token_logprobs(completion, sampling.logprobs), strict=True):
            reason = running.generated(int(token), logprob)
            if reason:
                self._finish(running, reason, known=output.finished)
                return
        if output.finished:  # vLLM's own limit: the model's context
            self._finish(running, "length", known=True)

    # --- on the engine's thread: requests ----------------------------------------------------------------------------------

    def _admit(self, request: EngineRequest, sink: EngineSink) -> None:
        model, runner = self._models[request.model], self._runtime.worker.runner
        try:
            running = RunningRequest(request, sink, self._space(request), model.tokenizer, model.eos, runner.num_layers)
        except Exception as error:  # noqa: BLE001 - told to whoever submitted the request
            self._active.ended(request)
            sink.failed(request.request_id, error)
            return
        self._requests[request.request_id] = running
        self._guarded(running, lambda: self._begin(running, request.plan))

    def _begin(self, running: RunningRequest, plan: ReusePlan) -> None:
        """Hand a request to vLLM with a plan: under a name of its own, because ids come again and plans are replaced."""
        request, runtime = running.request, self._runtime
        model = self._models[request.model]
        vocabulary = runtime.llm.model_config.get_vocab_size()
        if not all(0 <= token < vocabulary for token in request.token_ids):
            raise InvalidRequest(f"token ids must be below {vocabulary}")
        key = f"{next(self._numbers)}.{self._nonce.hex()[:8]}"
        adapter = None if model.adapter is None else runtime.adapters[model.adapter]
        load = Load(
            key,
            plan,
            request.token_ids,
            0 if adapter is None else adapter.lora_int_id,
            self._layout.num_layers,
            self._chunk_tokens,
        )
        new_tokens = request.sampling.max_tokens if request.sampling else 1
        entry = Entry(load, running.prompt, new_tokens, losing(running.space), tapped=bool(request.taps))
        running.begun(entry)
        running.space.key.current = key
        runtime.scheduler.enter(key, entry)
        runtime.worker.served[key] = Served(running, running.space.taps, self._layout, load.later_chunks)
        self._by_key[key] = running
        try:
            running.internal_id = runtime.llm.add_request(
                key,
                {"prompt_token_ids": list(request.token_ids), "cache_salt": self._salt(request, plan, key)},
                sampling_params(request, model.eos, key),
                lora_request=adapter,
            )
        except ValueError as error:
            raise InvalidRequest(str(error)) from error

    def _space(self, request: EngineRequest) -> PagedSpace:
        worker, scheduler, loop = self._runtime.worker, self._runtime.scheduler, self._loop
        new_tokens = request.sampling.max_tokens if request.sampling else 1
        runner = worker.runner
        taps = ETaps(request.taps, len(request.token_ids) + new_tokens, runner.hidden_size, runner.dtype)
        return PagedSpace(
            runner, taps, scheduler.blocks, lambda key: _ignore(loop.post(lambda: scheduler.release(key)))
        )

    def _take_data(self, running: RunningRequest, arrival: Arrival) -> None:
        assert running.entry is not None
        load = running.entry.load
        # late data of a plan given up, and repeated data, must not touch what was computed since
        if load.arrived(arrival.chunk, arrival.layer):
            self._runtime.worker.served[load.key].mailbox[arrival.chunk, arrival.layer] = arrival

    def _replan(self, running: RunningRequest, plan: ReusePlan) -> None:
        if not running.prefilled:
            self._leave(running)
            self._disconnect(running)
            self._begin(running, plan)

    def _finish(self, running: RunningRequest, reason: str, *, known: bool) -> None:
        """The answer is complete; ``known`` to vLLM, unless it ended with a stop string. Its blocks are kept either way."""
        assert running.entry is not None
        if not known:
            self._abort(running)
        self._forget(running)
        running.finish(reason, running.entry.load.key)

    def _fail(self, running: RunningRequest, error: Exception) -> None:
        if self._requests.get(running.request.request_id) is running:
            self._leave(running)
            self._forget(running)
            running.sink.failed(running.request.request_id, error)

    def _leave(self, running: RunningRequest) -> None:
        """Take it out of vLLM, its blocks as well."""
        running.space.num_tokens = 0
        if running.entry is not None:
            running.entry.hold = False
            self._abort(running)
            self._runtime.scheduler.left(running.entry)
            kept.pop(running.entry.load.key, None)

    def _abort(self, running: RunningRequest) -> None:
        if running.internal_id:
            self._runtime.llm.abort_request([running.internal_id], internal=True)
            running.internal_id = ""

    def _forget(self, running: RunningRequest) -> None:
        self._requests.pop(running.request.request_id, None)
        self._disconnect(running)
        self._active.ended(running.request)

    def _disconnect(self, running: RunningRequest) -> None:
        """What is still said of it under the name of its plan concerns nobody."""
        if running.entry is not None:
            self._by_key.pop(running.entry.load.key, None)
            self._runtime.worker.served.pop(running.entry.load.key, None)

    def _with(self, request_id: str, action: Callable[[RunningRequest], None]) -> None:
        """Act on a request if it still runs: late signals are ignored."""
        running = self._requests.get(request_id)
        if running is not None:
            self._guarded(running, lambda: action(running))

    def _guarded(self, running: RunningRequest, action: Callable[[], None]) -> None:
        """An error inside one request ends that request and no other."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - ends this request and no other
            self._fail(running, error)

    def _end(self) -> None:
        """The close, after the last step: nothing of ours stays in vLLM."""
        for running in list(self._requests.values()):
            self._fail(running, Cancelled("the engine is closing"))
        runtime = self._runtime
        runtime.scheduler.release_all()
        with compat.active(runtime.connector):
            for _ in range(CLOSING_STEPS):
                if not compat.scheduler_of(runtime.llm).has_requests():
                    break
                runtime.llm.step()
        if self._owned:
            runtime.shut_down()

    def _salt(self, request: EngineRequest, plan: ReusePlan, key: str) -> str:
        """Salt of vLLM's prefix cache: the model, and how the KV under this plan comes to be."""
        lineage = self._models[request.model].lineage_id or digest(b"model", self._nonce, request.model.encode())
        parts = [lineage.hex(), provenances(plan, lineage)[-1].key.hex()]
        if not request.engine_cache or (request.sampling is None and request.taps):
            # a salt that nobody else has. An order must give the hidden states of what it computes: vLLM's cache has none
            parts.append(key)
        return ".".join(parts)


def _ignore(_: object) -> None:
    pass
