"""Pulling a plan's segments: own blocks out of the node's arena, other nodes' through layer streams into scratch slots.

One ``PlanSources`` per executing plan. Failures are reported once, through ``on_failure``; scratch slots go back only when no
transfer can write to them any more (docs/design.md section 8, quarantine).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from kvkin.engines.api import Arrival
from kvkin.engines.arena_copies import arrival_from
from kvkin.kv.errors import KvkinError, SourceRefused
from kvkin.kv.execution import Chunk, PlanExecution
from kvkin.kv.plan import Holder, PlanKind, Segment
from kvkin.kv.store import Block
from kvkin.transport.data_plane import Transfer
from kvkin.transport.node_runtime import NodeRuntime
from kvkin.transport.streams import LayerStream, StreamRequest, StreamTimes

log = structlog.get_logger()

MIN_RATED_BYTES = 4 << 20
"""Pulls of at least so much tell the link's rate."""


@dataclass
class Scratch:
    """Where one segment's pulls land: one KV slot a block, one E slot a block if E is pulled."""

    kv_slots: list[int] = field(default_factory=list)
    e_slots: list[int] = field(default_factory=list)


class PlanSources:
    """All pulls of one request's plan."""

    def __init__(
        self,
        runtime: NodeRuntime,
        request_id: str,
        model: str,
        hashes: list[bytes],
        execution: PlanExecution,
        addresses: dict[str, str],
        on_arrival: Callable[[Arrival], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._runtime, self._request_id, self._execution = runtime, request_id, execution
        self._lineage = runtime.settings.lineage(model)
        self._hashes, self._addresses = hashes, addresses
        self._on_arrival, self._on_failure = on_arrival, on_failure
        self._size = runtime.settings.layout.block_size
        self._tasks: list[asyncio.Task[None]] = []
        self._pinned: list[Block] = []
        self._failed = False
        self.scratch: dict[int, Scratch] = {}
        self.streams: dict[int, list[LayerStream]] = {}

    @property
    def complete(self) -> bool:
        """Whether everything that was to be pulled is there."""
        return not self._failed and all(task.done() and not task.cancelled() for task in self._tasks)

    @property
    def transfers(self) -> list[Transfer]:
        return [transfer for streams in self.streams.values() for stream in streams for transfer in stream.transfers]

    def bytes_pulled(self, segment: int) -> int:
        return sum(stream.bytes_pulled for stream in self.streams.get(segment, ()))

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_pulled(segment) for segment in self.streams)

    @property
    def pull_seconds(self) -> float:
        """From the first pull to the last arrival; 0 if nothing came over the wire."""
        streams = [s for each in self.streams.values() for s in each if s.last_arrival_at]
        if not streams:
            return 0.0
        return max(s.last_arrival_at for s in streams) - min(s.first_pull_at for s in streams)

    def start(self) -> None:
        """Begin all pulls. Raises SourceRefused or CapacityError if the plan cannot even begin (nothing is left behind)."""
        try:
            for number, segment in enumerate(self._execution.plan.segments):
                if segment.sources:
                    self._check(segment)
                    self._begin(number, segment)
        except KvkinError:
            self.stop()
            raise

    async def wait(self) -> None:
        """Until all streams have ended."""
        await asyncio.gather(*self._tasks)

    def stop(self) -> None:
        """Stop pulling, unpin own blocks; scratch slots return as soon as nothing can write to them. Idempotent."""
        for task in self._tasks:
            task.cancel()
        now = time.monotonic()
        for block in self._pinned:
            self._runtime.store.release(block, now)
        self._pinned = []
        scratch, self.scratch = list(self.scratch.values()), {}
        if not scratch:
            return
        returning = asyncio.ensure_future(self._give_back(scratch, list(self._tasks)))
        self._runtime.keep(returning)

    async def _give_back(self, scratch: list[Scratch], tasks: list[asyncio.Task[None]]) -> None:
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(transfer.settled for transfer in self.transfers), return_exceptions=True)
        for each in scratch:
            # -1: adopted as a published block meanwhile
            kv_slots = [slot for slot in each.kv_slots if slot >= 0]
            self._runtime.store.give_scratch(kv_slots, [slot for slot in each.e_slots if slot >= 0])

    # --- inside --------------------------------------------------------------------------------------------------------

    def _check(self, segment: Segment) -> None:
        if segment.start % self._size or segment.num_tokens % self._size:
            raise SourceRefused(
                f"segment [{segment.start}, {segment.stop}) is not made of whole blocks of {self._size}"
            )
        if segment.source_first_position not in (-1, segment.start):
            raise SourceRefused("this engine does not move KV to other positions")

    def _begin(self, number: int, segment: Segment) -> None:
        here = self._runtime.settings.name
        by_holder: dict[Holder, list[int]] = {}
        for source in segment.sources:
            by_holder.setdefault(source.holder, []).extend(range(source.layers.start, source.layers.stop))
        if segment.e_holder is not None:
            by_holder.setdefault(segment.e_holder, [])
        chunks = [chunk for chunk in self._execution.chunks if chunk.segment == number]
        if any(holder.node != here for holder in by_holder):
            blocks = segment.num_tokens // self._size
            self.scratch[number] = Scratch(
                *self._runtime.store.take_scratch(blocks, blocks if segment.e_layer is not None else 0)
            )
        for holder, layers in by_holder.items():
            e_layer = segment.e_layer if holder == segment.e_holder else None
            if holder.node == here:
                self._own(segment, holder, layers, e_layer, chunks)
            else:
                self._stream(number, segment, holder, tuple(layers), e_layer, chunks)

    def _segment_hashes(self, segment: Segment) -> list[bytes]:
        return self._hashes[segment.start // self._size : segment.stop // self._size]

    def _own(
        self, segment: Segment, holder: Holder, layers: list[int], e_layer: int | None, chunks: list[Chunk]
    ) -> None:
        """Blocks that this node holds itself: pinned while the engine copies them."""
        store, arena = self._runtime.store, self._runtime.memory.arena
        found = [store.get(block, holder.provenance.key) for block in self._segment_hashes(segment)]
        blocks = [block for block in found if block is not None]
        if len(blocks) < len(found) or any(block.kv_layers <= max(layers, default=0) for block in blocks):
            raise SourceRefused("own blocks were evicted")
        if e_layer is not None and any(e_layer not in block.e_ready for block in blocks):
            raise SourceRefused(f"own hidden states entering layer {e_layer} were evicted")
        for block in blocks:
            store.acquire(block, time.monotonic())
        self._pinned += blocks
        for chunk in chunks:
            inside = blocks[(chunk.start - segment.start) // self._size : (chunk.stop - segment.start) // self._size]
            if e_layer is not None:
                slots = [block.e_slots[e_layer] for block in inside]
                self._on_arrival(arrival_from(arena, chunk.index, -1, chunk.start, slots))
            slots = [block.slot for block in inside]
            for layer in layers:
                self._on_arrival(arrival_from(arena, chunk.index, layer, chunk.start, slots))

    def _stream(
        self,
        number: int,
        segment: Segment,
        holder: Holder,
        layers: tuple[int, ...],
        e_layer: int | None,
        chunks: list[Chunk],
    ) -> None:
        address = self._addresses.get(holder.node)
        if address is None:
            raise SourceRefused(f"no address for {holder.node}")
        settings, scratch = self._runtime.settings, self.scratch[number]
        exact = segment.kind in (PlanKind.EXACT, PlanKind.SHARED_PREFIX)
        stream = LayerStream(
            StreamRequest(
                stream_id=f"{self._request_id}/{number}/{len(self.streams.get(number, ()))}",
                provenance=holder.provenance.key,
                blocks=tuple(self._segment_hashes(segment)),
                first_position=segment.start,
                kv_layers=layers,
                e_layer=e_layer,
                chunk_blocks=(chunks[0].stop - chunks[0].start) // self._size,
                kv_slots=tuple(scratch.kv_slots),
                e_slots=tuple(scratch.e_slots),
                order_id=holder.order_id,
                lineage=self._lineage,
                exact_layers=layers if exact else (),
                exact_e=exact,
            ),
            self._runtime.links.get(holder.node, address),
            self._runtime.memory,
            f"{settings.name}/{self._runtime.incarnation}",
            StreamTimes(settings.open_stream_s, settings.pull_s, settings.order_s),
            settings.pull_window_bytes,
        )
        self.streams.setdefault(number, []).append(stream)
        self._tasks.append(asyncio.ensure_future(self._run(stream, number, segment, chunks)))

    async def _run(self, stream: LayerStream, number: int, segment: Segment, chunks: list[Chunk]) -> None:
        arena, scratch = self._runtime.memory.arena, self.scratch[number]

        def landed(chunk_number: int, layer: int) -> None:
            chunk = chunks[chunk_number]
            inside = slice((chunk.start - segment.start) // self._size, (chunk.stop - segment.start) // self._size)
            slots = (scratch.e_slots if layer < 0 else scratch.kv_slots)[inside]
            self._on_arrival(arrival_from(arena, chunk.index, layer, chunk.start, slots))

        try:
            await stream.run(landed)
        except KvkinError as error:
            if not self._failed:
                self._failed = True
                self._on_failure(str(error))


def faster(rate: float, sources: Sequence[PlanSources]) -> float:
    """The node's pull rate (bytes/s) after another request's pulls.

    A small pull is all latency, one that waits for a live prefill says nothing about the link: large and best ones count.
    """
    pulled = sum(each.total_bytes for each in sources)
    pull_s = max((each.pull_seconds for each in sources), default=0.0)
    return max(0.9 * rate, pulled / pull_s) if pulled >= MIN_RATED_BYTES and pull_s > 0 else rate
