"""The receiver's side of ``kvkin bench pipeline`` and of ``kvkin bench engine ttft``: one schedule of a plan per call, timed from start to first
token.

Runs on the same layer streams, engine and executor as a decode node. One engine and one holder serve all contexts: shorter ones are
beginnings of the longest. Opened by ``bench_pipeline_open.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from kvkin.decode_nodes.sources import PlanSources
from kvkin.engines.api import Arrival, Counters, Engine, EngineRequest, Result
from kvkin.engines.spaces import Space
from kvkin.kv.errors import DeadlineExceeded, SourceLost
from kvkin.kv.execution import Unit
from kvkin.kv.generation import Sampling, TokenLogprob
from kvkin.kv.hashing import block_hashes
from kvkin.kv.plan import Holder, LayerGroup, LayerSource, PlanKind, ReusePlan, Segment, private_plan
from kvkin.tools.bench_holder import HolderProcess
from kvkin.tools.bench_pipeline_result import Measured, ideal_s
from kvkin.transport.node_runtime import NodeRuntime
from kvkin.transport.streams import LayerStream, StreamRequest, StreamTimes

T = TypeVar("T")

# Linux paces a connection only after its first ten segments, which hold 640 KiB on a loopback link.
UNPACED_SEGMENTS = 10


@dataclass(frozen=True)
class Computed:
    """One engine run: seconds to the first token, of recompute, and of the suffix's last layer with the head."""

    seconds: float
    recompute_s: float
    last_layer_s: float


class _Sink:
    """Times one request. ``done`` fails where the request or one of its sources does."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Counters] = self._loop.create_future()
        self.first_at = 0.0
        self.before_last_at = 0.0
        self.last_at = 0.0

    def unit_done(self, request_id: str, unit: Unit, space: Space) -> None:
        self.before_last_at, self.last_at = self.last_at, time.perf_counter()

    def prefilled(self, request_id: str) -> None: ...

    def tokens(self, request_id: str, index: int, token_id: int, text: str, logprob: TokenLogprob | None) -> None:
        self.first_at = self.first_at or time.perf_counter()

    def finished(self, result: Result, space: Space, counters: Counters) -> None:
        space.release()  # nobody publishes it
        self._loop.call_soon_threadsafe(self._settle, counters)

    def failed(self, request_id: str, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self.fail, error)

    def _settle(self, counters: Counters) -> None:
        if not self.done.done():
            self.done.set_result(counters)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


@dataclass
class Bench:
    """An open bench: the holder process with the KV of ``context_ids``, the receiver's runtime and engine.

    ``told_within``: the engine says that a layer's KV is there in the middle of the layer (vLLM), not at its end.
    """

    runtime: NodeRuntime
    engine: Engine
    holder: HolderProcess
    model: str
    context_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    root: bytes
    held: Holder
    group: LayerGroup
    deadline_s: float
    told_within: bool = False
    serial: int = 0

    async def set_rate(self, gbit_per_s: float) -> None:
        """Pace the link; 0 lifts the limit. Existing connections are closed: the pace belongs to a connection."""
        await self.holder.set_rate(int(gbit_per_s * 1e9 / 8))
        await self.runtime.links.close()

    def arms(self, context_tokens: int) -> Arms:
        """The schedules on the first ``context_tokens`` tokens of the context."""
        return Arms(self, context_tokens)


class Arms:
    """The schedules of one context: ``partial`` recomputes the group, ``reuse_all`` nothing."""

    def __init__(self, bench: Bench, context_tokens: int) -> None:
        runtime = bench.runtime
        self._bench, self._engine, self._runtime = bench, bench.engine, runtime
        self._layout = runtime.settings.layout
        self._tokens = bench.context_ids[:context_tokens] + bench.suffix_ids
        hashes = block_hashes(self._tokens, bench.root, self._layout.block_size)
        self._hashes = hashes[: context_tokens // self._layout.block_size]
        total, layers = len(self._tokens), self._layout.num_layers
        self.partial = reuse_plan(bench.held, context_tokens, total, layers, bench.group)
        self.reuse_all = reuse_plan(bench.held, context_tokens, total, layers, None)
        self.private = private_plan(total)

    def bytes_of(self, plan: ReusePlan) -> int:
        """Bytes that a plan moves."""
        first = plan.segments[0]
        per_block = len(first.pulled_layers()) * self._layout.kv_block_bytes
        per_block += self._layout.e_block_bytes if first.e_layer is not None else 0
        return first.num_tokens // self._layout.block_size * per_block

    async def warm_up(self) -> Computed:
        """Everything once, so that memory is there; returns the partial plan's compute alone."""
        await self.run(self.private)
        await self.run(self.partial)
        return (await self.parts(self.partial))[1]

    async def connect(self) -> None:
        """Open the link at its new rate and bring it to its pace, so that no schedule is the first to use it."""
        for _ in range(UNPACED_SEGMENTS + 1):
            await self._pull_alone(self._hashes[:1], tuple(self.partial.segments[0].pulled_layers()[:1]), None)

    async def measure_all(self, *, reverse: bool) -> Measured:
        """Every schedule once, in order or reversed."""
        plans = {"reuse_only": self.reuse_all, "pipelined": self.partial, "private": self.private}
        seconds: dict[str, float] = {}
        moved: dict[str, int] = {}
        transfer_s = states_s = 0.0
        computed = Computed(0.0, 0.0, 0.0)
        names = ("naive", *plans, "parts", "states")
        for name in reversed(names) if reverse else names:
            match name:
                case "naive":
                    seconds[name], moved[name] = await self._run_naive()
                case "parts":
                    transfer_s, computed = await self.parts(self.partial)
                case "states":
                    states_s = await self.states_alone(self.partial)
                case _:
                    seconds[name], moved[name] = await self.run(plans[name])
        seconds["ideal"] = ideal_s(transfer_s, states_s, computed.seconds, computed.last_layer_s)
        return Measured(seconds, moved, transfer_s, computed.seconds, computed.recompute_s)

    # --- schedules -------------------------------------------------------------------------------------------------------

    async def run(self, plan: ReusePlan) -> tuple[float, int]:
        """Compute as data arrives. Returns (seconds to the first token, bytes that came)."""
        request_id, sink = self._next(), _Sink()
        started = time.perf_counter()
        self._submit(request_id, plan, sink)
        async with self._sources(plan, lambda arrival: self._engine.arrived(request_id, arrival), sink.fail) as sources:
            await self._within(sink.done)
            return sink.first_at - started, self._counted(plan, sources)

    async def _run_naive(self) -> tuple[float, int]:
        """Pull everything of the partial plan, and only then begin to compute."""
        started = time.perf_counter()
        async with self._arrived(self.partial) as (arrivals, moved):
            sink, _ = await self._compute(self.partial, arrivals)
            return sink.first_at - started, moved

    async def parts(self, plan: ReusePlan) -> tuple[float, Computed]:
        """(seconds of the transfer alone, the compute alone with everything in memory) of a plan."""
        started = time.perf_counter()
        async with self._arrived(plan) as (arrivals, _):
            between = time.perf_counter()
            sink, counters = await self._compute(plan, arrivals)
            last_layer_s = sink.first_at - (sink.last_at if self._bench.told_within else sink.before_last_at)
            return between - started, Computed(sink.first_at - between, counters.recompute_s, last_layer_s)

    async def states_alone(self, plan: ReusePlan) -> float:
        """Seconds of the transfer of the hidden states entering the group alone; 0 where the plan needs none."""
        e_layer = plan.segments[0].e_layer
        return 0.0 if e_layer is None else await self._pull_alone(self._hashes, (), e_layer)

    async def _pull_alone(self, blocks: list[bytes], kv_layers: tuple[int, ...], e_layer: int | None) -> float:
        """Seconds that pulling these layers of some blocks takes, with nothing else going on."""
        settings, held = self._runtime.settings, self._bench.held
        store, count = self._runtime.store, len(blocks)
        kv_slots, e_slots = store.take_scratch(count if kv_layers else 0, count if e_layer is not None else 0)
        request = StreamRequest(
            stream_id=self._next(),
            provenance=held.provenance.key,
            blocks=tuple(blocks),
            first_position=0,
            kv_layers=kv_layers,
            e_layer=e_layer,
            chunk_blocks=settings.chunk_tokens // settings.layout.block_size,
            kv_slots=tuple(kv_slots),
            e_slots=tuple(e_slots),
        )
        link = self._runtime.links.get(held.node, self._bench.holder.address)
        times = StreamTimes(pull_s=settings.pull_s)
        stream = LayerStream(request, link, self._runtime.memory, "bench", times, settings.pull_window_bytes)
        started = time.perf_counter()
        await self._within(stream.run(lambda chunk, layer: None))
        seconds = time.perf_counter() - started
        store.give_scratch(kv_slots, e_slots)
        return seconds

    # --- inside ----------------------------------------------------------------------------------------------------------

    def _submit(self, request_id: str, plan: ReusePlan, sink: _Sink) -> None:
        request = EngineRequest(request_id, self._bench.model, self._tokens, plan, Sampling(max_tokens=1))
        self._engine.submit(request, sink)

    async def _compute(self, plan: ReusePlan, arrivals: list[Arrival]) -> tuple[_Sink, Counters]:
        """A plan with its data at hand."""
        request_id, sink = self._next(), _Sink()
        self._submit(request_id, plan, sink)
        for arrival in arrivals:
            self._engine.arrived(request_id, arrival)
        return sink, await self._within(sink.done)

    @contextlib.asynccontextmanager
    async def _arrived(self, plan: ReusePlan) -> AsyncIterator[tuple[list[Arrival], int]]:
        """(everything that a plan pulls, its bytes), in memory for as long as the block lasts."""
        arrivals: list[Arrival] = []
        failures: list[Exception] = []
        async with self._sources(plan, arrivals.append, failures.append) as sources:
            await self._within(sources.wait())
            if failures:
                raise failures[0]
            yield arrivals, self._counted(plan, sources)

    @contextlib.asynccontextmanager
    async def _sources(
        self, plan: ReusePlan, arrived: Callable[[Arrival], None], failed: Callable[[Exception], None]
    ) -> AsyncIterator[PlanSources]:
        execution = self._engine.plan_execution(self._bench.model, plan)
        addresses = {self._bench.held.node: self._bench.holder.address}
        sources = PlanSources(
            self._runtime,
            self._next(),
            self._bench.model,
            self._hashes,
            execution,
            addresses,
            arrived,
            lambda why: failed(SourceLost(why)),
        )
        sources.start()
        try:
            yield sources
        finally:
            sources.stop()
            await self._runtime.settle()

    def _counted(self, plan: ReusePlan, sources: PlanSources) -> int:
        moved = sources.total_bytes
        assert moved == self.bytes_of(plan), f"{moved} bytes came, the plan moves {self.bytes_of(plan)}"
        return moved

    async def _within(self, work: Awaitable[T]) -> T:
        """Wait for ``work``, but not for ever."""
        try:
            async with asyncio.timeout(self._bench.deadline_s):
                return await work
        except TimeoutError:
            raise DeadlineExceeded(f"a run took longer than {self._bench.deadline_s:.0f} s") from None

    def _next(self) -> str:
        self._bench.serial += 1
        return f"run-{self._bench.serial}"


def reuse_plan(
    holder: Holder, context_tokens: int, num_tokens: int, num_layers: int, group: LayerGroup | None
) -> ReusePlan:
    """The context from ``holder`` under a recompute group (None: nothing is recomputed), the rest computed."""
    inside = group or LayerGroup(num_layers, num_layers)
    spans = [span for span in (LayerGroup(0, inside.start), LayerGroup(inside.stop, num_layers)) if len(span)]
    e_layer = inside.start if group is not None and inside.start else None
    segment = Segment(
        0,
        context_tokens,
        tuple(LayerSource(span, holder) for span in spans),
        e_layer=e_layer,
        e_holder=holder if e_layer is not None else None,
        recompute=group,
        kind=PlanKind.PARTIAL,
        loss=float("inf"),
    )
    return ReusePlan((segment, Segment(context_tokens, num_tokens)))
