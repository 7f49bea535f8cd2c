"""Layer streams, the consumer's side: open a lease, pull each layer of each chunk when it is ready and its turn, close.

Decode nodes run one ``LayerStream`` per (segment, holder). ``PullScheduler`` decides the order; the transport moves the bytes into
scratch slots of the consumer's own arena; a pull counts only if its completion was seen before the lease ended on our clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from kvkin.kv.errors import LeaseExpired, SourceError, SourceLost, SourceRefused, SourceTimeout
from kvkin.kv.lineage import Lineage
from kvkin.kv.pulls import E_LAYER, PullItem, PullScheduler
from kvkin.transport.arena import e_copies, kv_copies
from kvkin.transport.data_plane import Copy, Transfer
from kvkin.transport.holder_link import HolderLink
from kvkin.transport.memory import KVMemory
from kvkin.transport.messages import PROTOCOL_VERSION
from kvkin.transport.stream_messages import (
    CloseStream,
    HolderToConsumer,
    LayerReady,
    LeaseRenewed,
    OpenStream,
    RenewLease,
    StreamClosed,
    StreamLost,
    StreamOpened,
    StreamRefused,
)

log = structlog.get_logger()

_ERRORS: dict[str, type[SourceError]] = {
    "source_refused": SourceRefused,
    "source_lost": SourceLost,
    "lease_expired": LeaseExpired,
    "source_timeout": SourceTimeout,
}


@dataclass(frozen=True)
class StreamRequest:
    """What to pull and where to put it. ``kv_slots`` and ``e_slots`` are scratch slots of the consumer's arena, one a block.

    ``lineage`` is the receiver's; the KV of ``exact_layers`` (and E, if ``exact_e``) must have the same lineage at the holder, or
    the stream is refused: an exact plan never rests on the router's word alone.
    """

    stream_id: str
    provenance: bytes
    blocks: tuple[bytes, ...]
    first_position: int
    kv_layers: tuple[int, ...]
    e_layer: int | None
    chunk_blocks: int
    kv_slots: tuple[int, ...]
    e_slots: tuple[int, ...]
    order_id: str = ""
    lineage: Lineage | None = None
    exact_layers: tuple[int, ...] = ()
    exact_e: bool = False


@dataclass
class StreamTimes:
    """Deadlines in seconds."""

    open_s: float = 5.0
    pull_s: float = 20.0
    order_s: float = 60.0


@dataclass
class LayerStream:
    """One stream. ``run`` does it all; ``fetch_kv`` and ``fetch_e`` wait for single layers (DroidSpeak's verbs)."""

    request: StreamRequest
    link: HolderLink
    memory: KVMemory
    consumer: str
    times: StreamTimes
    window_bytes: int
    clock: Callable[[], float] = time.monotonic
    bytes_pulled: int = 0
    first_pull_at: float = 0.0
    last_arrival_at: float = 0.0
    transfers: list[Transfer] = field(default_factory=list)
    _lease_end: float = 0.0
    _renewal_sent: float = 0.0
    _arrived: dict[int, int] = field(default_factory=dict)
    _layer_done: dict[int, asyncio.Event] = field(default_factory=dict)

    async def run(self, on_arrival: Callable[[int, int], None]) -> None:
        """Pull everything; ``on_arrival(chunk, layer)`` is called as each item lands (layer -1: E).

        Raises a SourceError when the holder refuses, dies, freezes, or the lease ends; transfers that may still write are
        left in ``transfers`` with their ``settled`` futures.
        """
        inbox = self.link.subscribe(self.request.stream_id)
        opened: StreamOpened | None = None
        renewing: asyncio.Task[None] | None = None
        try:
            opened = await self._open(inbox)
            renewing = asyncio.create_task(self._renew_forever(opened.lease_s))
            await self._pull_all(opened, self._schedule(opened), inbox, on_arrival)
        finally:
            if renewing is not None:
                renewing.cancel()
            if opened is None:
                self.link.post(CloseStream(self.request.stream_id, -1))
                self.link.unsubscribe(self.request.stream_id)
            else:
                self._last_word(opened, inbox)

    async def fetch_kv(self, layer: int) -> None:
        """Return once all chunks of ``layer`` have arrived."""
        await self._layer_done.setdefault(layer, asyncio.Event()).wait()

    async def fetch_e(self) -> None:
        """Return once the hidden states of all chunks have arrived."""
        await self.fetch_kv(E_LAYER)

    # --- opening -----------------------------------------------------------------------------------------------------

    async def _open(self, inbox: asyncio.Queue[HolderToConsumer]) -> StreamOpened:
        request = self.request
        wait_s = self.times.order_s if request.order_id else 0.0
        sent = self.clock()
        self.link.post(
            OpenStream(
                version=PROTOCOL_VERSION,
                stream_id=request.stream_id,
                consumer=self.consumer,
                rank=0,
                layout_digest=self.memory.layout.digest,
                provenance=request.provenance,
                blocks=request.blocks,
                first_position=request.first_position,
                kv_layers=request.kv_layers,
                e_layer=request.e_layer,
                chunk_blocks=request.chunk_blocks,
                order_id=request.order_id,
                wait_s=wait_s,
            )
        )
        message = await self._next(inbox, self.times.open_s + wait_s, "open the stream")
        match message:
            case StreamOpened():
                self._check_lineage(message)
                # the lease counts from when we asked, so our clock ends it before the holder's does; after a wait for an
                # order that is unknown, so it is renewed at once and trusted for half its life until then
                self._lease_end = sent + message.lease_s
                if wait_s:
                    self._lease_end = self.clock() + message.lease_s / 2
                    self._renew()
                return message
            case StreamRefused(_, code, why):
                raise _ERRORS.get(code, SourceRefused)(f"{self.link.node} refuses: {why}")
            case StreamLost(_, code, why):
                raise _ERRORS.get(code, SourceLost)(f"{self.link.node}: {why}")
            case _:
                raise SourceRefused(f"{self.link.node} answered {type(message).__name__} to an open")

    def _check_lineage(self, opened: StreamOpened) -> None:
        mine, theirs = self.request.lineage, opened.lineage
        if mine is None:
            return
        differing = [layer for layer in self.request.exact_layers if mine.kv[layer] != theirs.kv[layer]]
        e_layer = self.request.e_layer
        if differing:
            raise SourceRefused(f"{self.link.node}: KV of layer {differing[0]} has another lineage than this model's")
        if self.request.exact_e and e_layer is not None and mine.hidden[e_layer] != theirs.hidden[e_layer]:
            raise SourceRefused(f"{self.link.node}: hidden states entering layer {e_layer} have another lineage")

    def _schedule(self, opened: StreamOpened) -> PullScheduler:
        request, layout = self.request, self.memory.layout
        items = []
        for chunk, blocks in enumerate(self._chunk_blocks()):
            items += [PullItem(layer, chunk, len(blocks) * layout.kv_block_bytes) for layer in request.kv_layers]
            if request.e_layer is not None:
                items.append(PullItem(E_LAYER, chunk, len(blocks) * layout.e_block_bytes))
        scheduler = PullScheduler(items, self.window_bytes)
        scheduler.mark_ready(opened.ready)
        return scheduler

    def _chunk_blocks(self) -> list[range]:
        count, step = len(self.request.blocks), self.request.chunk_blocks
        return [range(start, min(start + step, count)) for start in range(0, count, step)]

    # --- pulling -----------------------------------------------------------------------------------------------------

    async def _pull_all(
        self,
        opened: StreamOpened,
        scheduler: PullScheduler,
        inbox: asyncio.Queue[HolderToConsumer],
        on_arrival: Callable[[int, int], None],
    ) -> None:
        peer = await self.link.peer(opened, self.memory, deadline_s=self.times.open_s)
        chunks = self._chunk_blocks()
        pulls: dict[asyncio.Task[None], PullItem] = {}
        listening = asyncio.ensure_future(inbox.get())
        try:
            while not scheduler.done:
                while (item := scheduler.next()) is not None:
                    self.first_pull_at = self.first_pull_at or self.clock()
                    transfer = peer.pull(self._copies(opened, item, chunks[item.chunk]), deadline_s=self.times.pull_s)
                    self.transfers.append(transfer)
                    pulls[asyncio.ensure_future(transfer.wait())] = item
                idle_s = None if pulls else self.times.order_s
                done, _ = await asyncio.wait([listening, *pulls], timeout=idle_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    raise SourceTimeout(f"{self.link.node} announced no layer for {self.times.order_s:g} s")
                for task in [task for task in pulls if task in done]:
                    item = pulls.pop(task)
                    task.result()
                    self._landed(item, scheduler, on_arrival)
                if listening in done:
                    self._heard(listening.result(), scheduler)
                    listening = asyncio.ensure_future(inbox.get())
        finally:
            listening.cancel()
            for task in pulls:
                task.cancel()
            await asyncio.gather(*pulls, return_exceptions=True)

    def _copies(self, opened: StreamOpened, item: PullItem, blocks: range) -> list[Copy]:
        request, memory = self.request, self.memory
        inside = slice(blocks.start, blocks.stop)
        if item.layer == E_LAYER:
            return e_copies(
                memory.layout,
                list(opened.e_slots[inside]),
                opened.kv_bytes,
                list(request.e_slots[inside]),
                memory.arena.kv_bytes,
            )
        return kv_copies(
            memory.layout,
            item.layer,
            list(opened.kv_slots[inside]),
            opened.num_slots,
            list(request.kv_slots[inside]),
            memory.arena.num_slots,
        )

    def _landed(self, item: PullItem, scheduler: PullScheduler, on_arrival: Callable[[int, int], None]) -> None:
        now = self.clock()
        if now > self._lease_end:
            raise LeaseExpired(f"the lease of {self.link.node} ended before layer {item.layer} was here")
        scheduler.completed(item)
        self.bytes_pulled += item.num_bytes
        self.last_arrival_at = now
        self._arrived[item.layer] = self._arrived.get(item.layer, 0) + 1
        if self._arrived[item.layer] == len(self._chunk_blocks()):
            self._layer_done.setdefault(item.layer, asyncio.Event()).set()
        on_arrival(item.chunk, item.layer)

    def _heard(self, message: HolderToConsumer, scheduler: PullScheduler) -> None:
        match message:
            case LayerReady(_, ready):
                scheduler.mark_ready(ready)
            case LeaseRenewed(_, lease_s):
                self._lease_end = max(self._lease_end, self._renewal_sent + lease_s)
            case StreamLost(_, code, why) | StreamRefused(_, code, why):
                raise _ERRORS.get(code, SourceLost)(f"{self.link.node}: {why}")
            case _:
                log.debug("late stream message", node=self.link.node, kind=type(message).__name__)

    # --- lease -------------------------------------------------------------------------------------------------------

    async def _renew_forever(self, lease_s: float) -> None:
        while True:
            await asyncio.sleep(lease_s / 3)
            self._renew()

    def _renew(self) -> None:
        self._renewal_sent = self.clock()
        self.link.post(RenewLease(self.request.stream_id))

    def _last_word(self, opened: StreamOpened, inbox: asyncio.Queue[HolderToConsumer]) -> None:
        """Give the lease back without waiting: the data is ours by our own clock; a mismatch is logged loudly."""
        if self.link.lost:
            self.link.unsubscribe(self.request.stream_id)
            return
        self.link.post(CloseStream(self.request.stream_id, opened.generation))

        async def listen() -> None:
            with contextlib.suppress(SourceError):
                message = await self._next(inbox, self.times.open_s, "close the stream")
                while not isinstance(message, StreamClosed):
                    message = await self._next(inbox, self.times.open_s, "close the stream")
                if not message.valid:
                    log.warning("lease was over at release", node=self.link.node, stream=self.request.stream_id)
            self.link.unsubscribe(self.request.stream_id)

        self.link.spawn(listen())

    async def _next(self, inbox: asyncio.Queue[HolderToConsumer], timeout_s: float, what: str) -> HolderToConsumer:
        try:
            return await asyncio.wait_for(inbox.get(), timeout_s)
        except TimeoutError:
            raise SourceTimeout(f"{self.link.node} did not answer in {timeout_s:g} s to {what}") from None
