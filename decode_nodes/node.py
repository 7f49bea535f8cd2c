"""The decode node: executes reuse plans, generates, publishes what it computed.

Thin IO around ``decode_nodes.core``: one asyncio loop for sockets and pulls, the engine on its own thread. Started by
``kvkin decode``; several of them, a prefill node and a router can live in one process (``kvkin ask --local``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import msgspec
import structlog

from kvkin.decode_nodes.core import (
    AbortReceived,
    Complete,
    DecodeCore,
    EngineFailed,
    EngineFinished,
    Event,
    ExecuteReceived,
    Fail,
    FallBack,
    Instruction,
    PromptReady,
    PublishPrompt,
    SourceFailed,
    Start,
    Tick,
)
from kvkin.decode_nodes.drift_checks import DriftChecks
from kvkin.decode_nodes.publication import Publisher, SpaceRows
from kvkin.decode_nodes.report import fallback_plan, reuse_report, timings
from kvkin.decode_nodes.running import LoopSink, Running
from kvkin.decode_nodes.sources import PlanSources, faster
from kvkin.engines.api import Counters, Engine, Result
from kvkin.engines.spaces import Space
from kvkin.kv.cost import measured_work
from kvkin.kv.errors import KvkinError
from kvkin.kv.hashing import block_hashes
from kvkin.kv.plan import private_plan
from kvkin.transport.data_plane import Transport
from kvkin.transport.messages import NodeLoad
from kvkin.transport.node_messages import Abort, Done, Drain, DriftSample, Execute, Failed, Generated, RouterToNode
from kvkin.transport.node_runtime import NodeRuntime, NodeSettings
from kvkin.transport.router_link import RouterLink

log = structlog.get_logger()


class DecodeNode:
    """One decode node. ``serve`` runs it until ``stop`` is set."""

    def __init__(self, settings: NodeSettings, engine: Engine, transport: Transport | None = None) -> None:
        self.settings, self._engine = settings, engine
        self.runtime = NodeRuntime(settings, self._on_message, self.load, transport)
        self.core = DecodeCore(settings.max_running, settings.max_queue)
        self.checks = DriftChecks(settings, engine, self._tell_routers, self._spawn)
        self._requests: dict[str, Running] = {}
        self._compute_rate = 0.0
        self._pull_rate = 0.0
        self._loop = asyncio.get_running_loop()

    def load(self) -> NodeLoad:
        queued = [running for running in self._requests.values() if not running.started]
        return msgspec.structs.replace(
            self.checks.load(self.runtime.memory_load()),
            running=self.core.running,
            waiting=self.core.waiting,
            queued_tokens=sum(len(running.execute.token_ids) for running in queued),
            prefill_layer_tokens_per_s=self._compute_rate,
            pull_bytes_per_s=self._pull_rate,
            fallbacks=self.core.fallbacks,
            finished=self.core.finished,
            failed=self.core.failed,
        )

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``, then finish what runs within ``drain_s``; what is left gets an error (retryable).

        Raises ConfigError if a router refuses this node.
        """
        ticking = asyncio.create_task(self._tick_forever())
        try:
            await self.runtime.serve_and_drain(stop, lambda: not self.core.running and not self.core.waiting)
        finally:
            ticking.cancel()
            for request_id in list(self._requests):
                self._do(EngineFailed(request_id, "node_unavailable", f"{self.settings.name} is stopping", True))
            await asyncio.to_thread(self._engine.close)
            await self.runtime.close()

    # --- events in, instructions out ---------------------------------------------------------------------------------

    def _on_message(self, link: RouterLink, message: RouterToNode) -> None:
        match message:
            case Execute():
                now = time.monotonic()
                self.checks.work_arrived()
                self._requests.setdefault(message.request_id, Running(message, link, message.plan, now))
                self._do(ExecuteReceived(message, now))
            case Abort(request_id, reason):
                self._do(AbortReceived(request_id, reason))
            case Drain():
                self.runtime.routers.drain()
            case _:
                log.warning("message is not for a decode node", kind=type(message).__name__)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            self._do(Tick(time.monotonic()))
            self.checks.tick(self._busy())

    def _busy(self) -> bool:
        """Whether anything runs, waits, is pulled from here, or the node is about to stop."""
        draining = any(link.draining for link in self.runtime.routers.links)
        return bool(self.core.running or self.core.waiting or self.runtime.server.leases) or draining

    def _do(self, event: Event) -> None:
        for instruction in self.core.handle(event):
            running = self._requests[instruction.request_id]
            try:
                self._carry_out(instruction, running)
            except Exception as error:
                # a fault of ours: it ends the request that it is about, and is not waited for until a deadline
                log.exception("a request met a fault of the node", request=instruction.request_id)
                if instruction.request_id in self._requests:
                    self._loop.call_soon(self._do, EngineFailed(instruction.request_id, "internal", repr(error), False))

    def _carry_out(self, instruction: Instruction, running: Running) -> None:
        match instruction:
            case Start():
                self._start(running)
            case FallBack(_, reason):
                self._fall_back(running, reason)
            case PublishPrompt():
                self._prompt_ready(running)
            case Complete(request_id):
                del self._requests[request_id]
                self._spawn(self._complete(running))
            case Fail(request_id, code, message, retryable):
                del self._requests[request_id]
                running.link.send(Failed(request_id, code, message, retryable))
                self._engine.cancel(request_id, message)
                self._spawn(self._release(running))

    def _tell_routers(self, sample: DriftSample) -> None:
        """Each router watches for itself."""
        for link in self.runtime.routers.links:
            if link.registered.is_set():
                link.send(sample)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.runtime.keep(asyncio.ensure_future(work))

    # --- a request -----------------------------------------------------------------------------------------------------

    def _start(self, running: Running) -> None:
        execute = running.execute
        running.started = time.monotonic()
        try:
            running.plan.validate(self.settings.layout.num_layers)
            self._engine.submit(running.engine_request(self.settings.transition_layers), LoopSink(self))
        except (KvkinError, ValueError) as error:
            code, retryable = _told(error, "invalid_request")
            self._loop.call_soon(self._do, EngineFailed(execute.request_id, code, str(error), retryable))
            return
        running.publisher = Publisher(self.runtime, execute.model, execute.root)
        self._pull(running)

    def _pull(self, running: Running) -> None:
        """Start the pulls of the plan; a plan that cannot begin is a failed source."""
        execute = running.execute
        size = self.settings.layout.block_size
        execution = self._engine.plan_execution(execute.model, running.plan)
        sources = PlanSources(
            self.runtime,
            f"{execute.request_id}.{len(running.sources)}",
            execute.model,
            block_hashes(execute.token_ids, execute.root, size),
            execution,
            execute.source_addresses,
            lambda arrival: self._engine.arrived(execute.request_id, arrival),
            lambda reason: self._do(SourceFailed(execute.request_id, reason)),
        )
        running.sources.append(sources)
        try:
            sources.start()
        except KvkinError as error:
            why = str(error)
            self._loop.call_soon(self._do, SourceFailed(execute.request_id, why))

    def _fall_back(self, running: Running, reason: str) -> None:
        log.warning("falling back to a private prefill", request=running.execute.request_id, why=reason)
        # what this node holds itself is kept the first time; if that is gone as well, nothing is
        first, running.fallback = not running.fallback, running.fallback or reason
        running.sources[-1].stop()
        why = f"fallback: {running.fallback}"
        if first:
            running.plan = fallback_plan(running.plan, self.settings.name, why)
        else:
            running.plan = private_plan(running.plan.num_tokens, why)
        self._engine.replan(running.execute.request_id, running.plan)
        self._pull(running)

    def _prompt_ready(self, running: Running) -> None:
        if running.execute.publish and running.space is not None:
            running.publishing = asyncio.ensure_future(self._publish(running, running.execute.token_ids, running.space))
            self.runtime.keep(running.publishing)
        else:
            running.stop_sources()

    async def _publish(self, running: Running, tokens: tuple[int, ...], space: Space) -> None:
        assert running.publisher is not None
        rows = SpaceRows(self._engine, self.runtime.memory.arena, space)
        await running.publisher.publish(tokens, running.plan, running.sources[-1].scratch, rows)
        running.stop_sources()

    async def _complete(self, running: Running) -> None:
        try:
            await self._answer(running)
        except Exception as error:  # as in ``_do``
            request_id = running.execute.request_id
            log.exception("a request met a fault of the node", request=request_id)
            running.link.send(Failed(request_id, "internal", repr(error), False))

    async def _answer(self, running: Running) -> None:
        """Publish the answer, then say that it is complete: the next turn must find it."""
        assert running.result is not None
        result, space, counters = running.result
        execute = running.execute
        try:
            if running.publishing is not None:
                await running.publishing
            if execute.publish:
                await self._publish(running, (*execute.token_ids, *result.token_ids[:-1]), space)
        finally:
            space.release()
        self._measure(running, counters)
        report = reuse_report(
            running.plan, execute, running.sources, counters, self._lineage_id(execute), running.fallback
        )
        running.link.send(
            Done(
                execute.request_id,
                result.text,
                result.token_ids,
                result.finish_reason,
                timings(running.received, running.started, execute, running.sources, counters),
                report,
                result.logprobs,
            )
        )
        if not running.fallback:
            self.checks.finished(execute, result)

    def _lineage_id(self, execute: Execute) -> bytes:
        return self.settings.lineage(execute.model).id

    async def _release(self, running: Running) -> None:
        if running.publishing is not None:
            await asyncio.gather(running.publishing, return_exceptions=True)
        if running.space is not None:
            running.space.release()
        running.stop_sources()

    def _measure(self, running: Running, counters: Counters) -> None:
        """Moving averages for the router's cost model."""
        seconds = counters.recompute_s + counters.suffix_s
        if seconds > 0 and counters.computed_layer_tokens >= 64 * self.settings.layout.num_layers:
            work = measured_work(
                counters.computed_layer_tokens, counters.computed_positions, self.settings.context_half_tokens
            )
            self._compute_rate = _average(self._compute_rate, work / seconds)
        self._pull_rate = faster(self._pull_rate, running.sources)

    # --- from the engine's sink (already on the loop) --------------------------------------------------------------------

    def prefilled(self, request_id: str) -> None:
        self._do(PromptReady(request_id))

    def first_space(self, request_id: str, space: Space) -> None:
        running = self._requests.get(request_id)
        if running is not None:
            running.space = space

    def generated(self, message: Generated) -> None:
        running = self._requests.get(message.request_id)
        if running is not None:
            running.link.send(message)

    def ended(self, result: Result, space: Space, counters: Counters) -> None:
        running = self._requests.get(result.request_id)
        if running is not None:
            running.result = (result, space, counters)
            self._do(EngineFinished(result.request_id))
        else:
            space.release()

    def broke(self, request_id: str, error: Exception) -> None:
        code, retryable = _told(error, "internal")
        if code == "internal":
            log.error("request failed in the engine", request=request_id, error=repr(error))
        self._do(EngineFailed(request_id, code, str(error) or repr(error), retryable))


def _told(error: Exception, default: str) -> tuple[str, bool]:
    """(code, whether the request may succeed elsewhere or later) of what went wrong in the engine."""
    return (error.code, error.retryable) if isinstance(error, KvkinError) else (default, False)


def _average(old: float, new: float) -> float:
    return new if not old else 0.7 * old + 0.3 * new
