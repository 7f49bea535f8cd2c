"""The holder's side of layer streams: answers consumers on the node's source socket, grants leases, announces layers.

Prefill and decode nodes run one. ``StreamServer`` decides synchronously in ``handle``; ``serve`` is the thin loop around the socket.
The bytes themselves are read by the consumer through the data plane.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import msgspec
import structlog
import zmq
import zmq.asyncio

from kvkin.kv.errors import ProtocolError
from kvkin.kv.lineage import Lineage
from kvkin.kv.pulls import E_LAYER
from kvkin.kv.store import Block
from kvkin.transport.codec import consumer_to_holder, encode
from kvkin.transport.leases import LeaseTable
from kvkin.transport.memory import KVMemory
from kvkin.transport.messages import PROTOCOL_VERSION
from kvkin.transport.stream_messages import (
    CloseStream,
    ConsumerToHolder,
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

# Longest that a consumer may wait for an order, whatever it asks for (s).
MAX_WAIT_S = 3600.0

Key = tuple[str, str, int]
Outgoing = tuple[bytes, HolderToConsumer]


class _Stream(msgspec.Struct):
    """An open stream: who reads it, its blocks chunk by chunk, what was not announced yet."""

    peer: bytes
    key: Key
    e_layer: int | None
    chunks: list[list[Block]]
    unannounced: set[tuple[int, int]]


class _Waiting(msgspec.Struct):
    """A stream that was asked for before its order started."""

    peer: bytes
    message: OpenStream
    until: float


class StreamServer:
    """Streams of one node. ``lineages`` maps the lineage id of each model served here to its lineage."""

    def __init__(
        self,
        memory: KVMemory,
        incarnation: str,
        *,
        lease_s: float,
        grace_s: float,
        lineages: dict[bytes, Lineage],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory, self._incarnation, self._clock = memory, incarnation, clock
        self._lineages = lineages
        self.leases = LeaseTable(memory.store, lease_s, grace_s)
        self._streams: dict[Key, _Stream] = {}
        self._waiting: list[_Waiting] = []
        self._readers: dict[tuple[bytes, bytes], set[Key]] = {}

    # --- decisions ---------------------------------------------------------------------------------------------------

    def handle(self, peer: bytes, message: ConsumerToHolder) -> list[Outgoing]:
        now = self._clock()
        match message:
            case OpenStream():
                return [(peer, self._open(peer, message, now))] if self._may_open(message, peer, now) else []
            case RenewLease(stream_id):
                key = self._key_of(peer, stream_id)
                if key is not None and self.leases.renew(key, now):
                    return [(peer, LeaseRenewed(stream_id, self.leases.lease_s))]
                return [(peer, StreamLost(stream_id, "lease_expired", "the lease is over"))]
            case CloseStream(stream_id, generation):
                key = self._key_of(peer, stream_id)
                self._waiting = [w for w in self._waiting if (w.peer, w.message.stream_id) != (peer, stream_id)]
                valid = key is not None and self.leases.release(key, generation, now)
                if key is not None:
                    self._drop(key)
                return [(peer, StreamClosed(stream_id, valid))]

    def progressed(self, blocks: Iterable[Block]) -> list[Outgoing]:
        """More layers of ``blocks`` became visible: announcements for whoever reads them."""
        keys = {key for block in blocks for key in self._readers.get(block.key, ())}
        outgoing: list[Outgoing] = []
        for key in keys:
            stream = self._streams[key]
            ready = self._visible(stream)
            if ready:
                stream.unannounced.difference_update(ready)
                outgoing.append((stream.peer, LayerReady(key[0], ready)))
        return outgoing

    def order_started(self) -> list[Outgoing]:
        """Blocks of an order exist now: try the streams that waited for them."""
        waiting, self._waiting = self._waiting, []
        now = self._clock()
        outgoing: list[Outgoing] = []
        for entry in waiting:
            if self._may_open(entry.message, entry.peer, now, until=entry.until):
                outgoing.append((entry.peer, self._open(entry.peer, entry.message, now)))
        return outgoing

    def order_failed(self, blocks: Iterable[Block], order_id: str, why: str) -> list[Outgoing]:
        """The blocks will never be complete: tell their readers and end their leases."""
        keys = {key for block in blocks for key in self._readers.get(block.key, ())}
        outgoing: list[Outgoing] = []
        for key in keys:
            outgoing.append((self._streams[key].peer, StreamLost(key[0], "source_lost", why)))
            self.leases.release(key, None, self._clock())
            self._drop(key)
        for entry in [entry for entry in self._waiting if entry.message.order_id == order_id]:
            self._waiting.remove(entry)
            outgoing.append((entry.peer, StreamRefused(entry.message.stream_id, "source_lost", why)))
        return outgoing

    def tick(self) -> list[Outgoing]:
        """Expire leases and waits; call about once a second."""
        now = self._clock()
        outgoing: list[Outgoing] = []
        for key in self.leases.expire(now):
            stream = self._streams.get(key)
            if stream is not None:
                outgoing.append((stream.peer, StreamLost(key[0], "lease_expired", "the lease was not renewed in time")))
                self._drop(key)
        for entry in [entry for entry in self._waiting if entry.until < now]:
            self._waiting.remove(entry)
            outgoing.append((entry.peer, self._gone(entry.message)))
        return outgoing

    # --- inside --------------------------------------------------------------------------------------------------------

    def _may_open(self, message: OpenStream, peer: bytes, now: float, until: float | None = None) -> bool:
        """Whether to answer now; otherwise the stream was put aside to wait for its order."""
        if until is None:
            # not a number is no wait either: it would never be over
            until = now + (min(message.wait_s, MAX_WAIT_S) if message.wait_s > 0 else 0.0)
        if not message.order_id or until <= now or self._find(message) is not None:
            return True
        self._waiting.append(_Waiting(peer, message, until))
        return False

    def _open(self, peer: bytes, message: OpenStream, now: float) -> StreamOpened | StreamRefused:
        refused = self._refusal(message)
        if refused is not None:
            return refused
        blocks = self._find(message)
        if blocks is None:
            return self._gone(message)
        key = (message.stream_id, message.consumer, message.rank)
        try:
            lease = self.leases.grant(key, blocks, now)
        except ValueError as error:
            return StreamRefused(message.stream_id, "source_refused", str(error))
        step = max(1, message.chunk_blocks)
        chunks = [blocks[start : start + step] for start in range(0, len(blocks), step)]
        layers = [*message.kv_layers, *([E_LAYER] if message.e_layer is not None else [])]
        pairs = {(chunk, layer) for chunk in range(len(chunks)) for layer in layers}
        stream = _Stream(peer, key, message.e_layer, chunks, pairs)
        self._streams[key] = stream
        for block in blocks:
            self._readers.setdefault(block.key, set()).add(key)
        ready = self._visible(stream)
        stream.unannounced.difference_update(ready)
        return StreamOpened(
            stream_id=message.stream_id,
            incarnation=self._incarnation,
            lease_s=self.leases.lease_s,
            address=self._memory.transport.address(self._memory.region),
            num_slots=self._memory.arena.num_slots,
            kv_bytes=self._memory.arena.kv_bytes,
            kv_slots=tuple(block.slot for block in blocks),
            e_slots=() if message.e_layer is None else tuple(block.e_slots[message.e_layer] for block in blocks),
            generation=lease.generation,
            lineage=self._lineages[blocks[0].provenance.lineage_id],
            ready=ready if stream.unannounced else None,
        )

    def _refusal(self, message: OpenStream) -> StreamRefused | None:
        def refuse(why: str) -> StreamRefused:
            return StreamRefused(message.stream_id, "source_refused", why)

        layout = self._memory.layout
        if message.version != PROTOCOL_VERSION:
            return refuse(f"protocol version {message.version} (allowed: {PROTOCOL_VERSION})")
        if message.layout_digest != layout.digest:
            return refuse("KV layouts differ: block size, dtype and geometry must be equal on both sides")
        if not message.blocks or any(not 0 <= layer < layout.num_layers for layer in message.kv_layers):
            return refuse(f"a stream needs blocks and layers in 0 .. {layout.num_layers - 1}")
        return None

    def _find(self, message: OpenStream) -> list[Block] | None:
        """The blocks in order, if all are here or being made with what the stream asks for."""
        blocks: list[Block] = []
        for block_hash in message.blocks:
            block = self._memory.store.get(block_hash, message.provenance)
            if block is None or (message.e_layer is not None and message.e_layer not in block.e_slots):
                return None
            blocks.append(block)
        return blocks

    def _gone(self, message: OpenStream) -> StreamRefused:
        missing = sum(self._memory.store.get(block, message.provenance) is None for block in message.blocks)
        why = f"{missing} of {len(message.blocks)} blocks are not here (evicted, or never were)"
        if not missing:
            why = f"the hidden states entering layer {message.e_layer} are not here"
        return StreamRefused(message.stream_id, "source_refused", why)

    def _visible(self, stream: _Stream) -> tuple[tuple[int, int], ...]:
        return tuple(
            (chunk, layer)
            for chunk, layer in sorted(stream.unannounced)
            if all(
                (stream.e_layer in block.e_ready) if layer == E_LAYER else block.kv_layers > layer
                for block in stream.chunks[chunk]
            )
        )

    def _key_of(self, peer: bytes, stream_id: str) -> Key | None:
        return next((k for k, s in self._streams.items() if k[0] == stream_id and s.peer == peer), None)

    def _drop(self, key: Key) -> None:
        stream = self._streams.pop(key, None)
        for block in {block.key for chunk in stream.chunks for block in chunk} if stream else ():
            readers = self._readers.get(block)
            if readers is not None:
                readers.discard(key)
                if not readers:
                    del self._readers[block]


class HolderSocket:
    """The ROUTER socket of a StreamServer. ``address`` is where consumers connect."""

    def __init__(self, server: StreamServer, context: zmq.asyncio.Context, host: str, port: int) -> None:
        self._server = server
        self._codec = consumer_to_holder()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        # consumers notice a frozen holder, and we a vanished consumer, by ZMTP heartbeats
        self._socket.heartbeat_ivl, self._socket.heartbeat_timeout = 1000, 3000
        bound = self._socket.bind_to_random_port(f"tcp://{host}") if port == 0 else port
        if port != 0:
            self._socket.bind(f"tcp://{host}:{port}")
        self.address = f"tcp://{host}:{bound}"

    async def serve(self) -> None:
        """Answer until cancelled. A bad message is logged and dropped: it harms no other stream."""
        while True:
            frames = await self._socket.recv_multipart()
            try:
                peer, body = frames
                message = self._codec.decode(body)
            except (ValueError, ProtocolError) as error:
                log.warning("unreadable stream message", error=str(error))
                continue
            self.send(self._server.handle(peer, message))

    async def tick_forever(self, every_s: float = 1.0) -> None:
        while True:
            await asyncio.sleep(every_s)
            self.send(self._server.tick())

    def send(self, outgoing: list[Outgoing]) -> None:
        """Queue announcements; a consumer that is gone is dropped by ZeroMQ, its lease expires."""
        for peer, message in outgoing:
            self._socket.send_multipart([peer, encode(message)])

    def close(self) -> None:
        self._socket.close(linger=0)
