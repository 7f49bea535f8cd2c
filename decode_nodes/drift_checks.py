"""Carries out what ``decode_nodes.drift`` decides: private runs on the node's engine, samples to the routers, records to disk.

On the node's event loop; the node tells what arrives, what has finished and when it is idle.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import structlog

from kvkin.decode_nodes.drift import (
    Check,
    Chosen,
    DriftCore,
    Dropped,
    Event,
    Report,
    RunEnded,
    RunFailed,
    StartRun,
    StopRun,
    Tick,
    WorkArrived,
)
from kvkin.decode_nodes.drift_records import Record, Records
from kvkin.engines.api import Counters, Engine, EngineRequest, Result
from kvkin.engines.spaces import Space
from kvkin.kv.errors import KvkinError
from kvkin.kv.execution import Unit
from kvkin.kv.generation import Sampling, TokenLogprob
from kvkin.kv.plan import private_plan
from kvkin.transport.messages import NodeLoad
from kvkin.transport.node_messages import DriftSample, Execute
from kvkin.transport.node_runtime import NodeSettings

log = structlog.get_logger()


class DriftChecks:
    """All checks of one node. ``tell`` sends a sample to the routers, ``spawn`` keeps background work until it is done."""

    def __init__(
        self,
        settings: NodeSettings,
        engine: Engine,
        tell: Callable[[DriftSample], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        checks = settings.checks
        self._settings, self._engine, self._tell, self._spawn = settings, engine, tell, spawn
        self._records = None if checks.record is None else Records(checks.record, checks.record_bytes)
        self._loop = asyncio.get_running_loop()
        self.core = DriftCore(checks.idle_s, checks.max_pending)

    def load(self, of_node: NodeLoad) -> NodeLoad:
        """The node's load with the checks' counts."""
        core = self.core
        return msgspec.structs.replace(
            of_node,
            checks_waiting=core.waiting,
            checks_running=core.running,
            checks_done=core.done,
            checks_dropped=core.dropped,
        )

    # --- what the node says --------------------------------------------------------------------------------------------

    def finished(self, execute: Execute, result: Result) -> None:
        """A request has finished with the plan that it was sent with (no fallback)."""
        asked, first = execute.check, result.first_logprobs
        if asked is None or first is None:
            return
        greedy = execute.sampling.temperature == 0
        check = Check(
            request_id=execute.request_id,
            model=execute.model,
            receiver=self._settings.lineage(execute.model).id,
            token_ids=execute.token_ids,
            suffix_start=execute.plan.segments[-1].start,
            asked=asked,
            tokens=result.token_ids[: asked.tokens] if greedy else (),
            first_logprobs=first,
            # who publishes nothing wants to leave nothing behind
            recordable=execute.publish,
        )
        self._do(Chosen(check, time.monotonic()))

    def work_arrived(self) -> None:
        """A request is about to be submitted: what runs here gives way before the engine's next step."""
        self._do(WorkArrived(time.monotonic()))

    def tick(self, busy: bool) -> None:
        self._do(Tick(time.monotonic(), busy))

    # --- what is done about it -----------------------------------------------------------------------------------------

    def _do(self, event: Event) -> None:
        for instruction in self.core.handle(event):
            match instruction:
                case StartRun(run_id, check):
                    self._start(run_id, check)
                case StopRun(run_id):
                    self._engine.cancel(run_id, "the node has something to do")
                case Report(check, sample):
                    log.debug("checked for drift", request=check.request_id, divergence=sample.divergence)
                    self._tell(sample)
                    if self._records is not None and check.recordable:
                        self._spawn(self._record(self._records, check))
                case Dropped(request_id, reason):
                    log.info("check for drift dropped", request=request_id, why=reason)

    def _start(self, run_id: str, check: Check) -> None:
        """Private for certain: nothing of a store is read, nothing is tapped, nothing is published."""
        size = len(check.token_ids)
        request = EngineRequest(
            run_id,
            check.model,
            check.token_ids,
            private_plan(size, "check for drift"),
            Sampling(max_tokens=check.num_tokens, ignore_eos=True),
            first_distribution=True,
            engine_cache=False,
        )
        try:
            self._engine.submit(request, _RunSink(self, run_id))
        except KvkinError as error:
            why = str(error)
            self._loop.call_soon(self._do, RunFailed(run_id, why))

    async def _record(self, records: Records, check: Check) -> None:
        for sender in dict.fromkeys(source.model for source in check.asked.sources):
            record = Record(check.token_ids, check.suffix_start, sender, check.model)
            try:
                if not await asyncio.to_thread(records.add, record):
                    log.info("prompt not recorded: longer than a file may be", request=check.request_id)
            except OSError as error:
                log.warning("prompt not recorded", request=check.request_id, problem=str(error))

    # --- from the engine's sink (already on the loop) --------------------------------------------------------------------

    def ended(self, run_id: str, result: Result) -> None:
        if result.first_logprobs is None:
            self._do(RunFailed(run_id, "the engine gave no distribution"))
        else:
            self._do(RunEnded(run_id, result.token_ids, result.first_logprobs))

    def broke(self, run_id: str, error: Exception) -> None:
        self._do(RunFailed(run_id, str(error) or repr(error)))


class _RunSink:
    """Hands the end of one private run to the node's loop; its units and tokens concern nobody."""

    def __init__(self, checks: DriftChecks, run_id: str) -> None:
        self._checks, self._run_id, self._loop = checks, run_id, asyncio.get_running_loop()

    def unit_done(self, request_id: str, unit: Unit, space: Space) -> None:
        pass

    def prefilled(self, request_id: str) -> None:
        pass

    def tokens(self, request_id: str, index: int, token_id: int, text: str, logprob: TokenLogprob | None) -> None:
        pass

    def finished(self, result: Result, space: Space, counters: Counters) -> None:
        space.release()
        self._loop.call_soon_threadsafe(self._checks.ended, self._run_id, result)

    def failed(self, request_id: str, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._checks.broke, self._run_id, error)
