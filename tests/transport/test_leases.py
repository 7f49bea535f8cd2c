"""Leases: each pull has its own, what lands too late is not used, and nothing is recycled while somebody may still read it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from kvkin.kv.errors import LeaseExpired, SourceRefused, SourceTimeout
from kvkin.kv.layout import KVLayout, Plane
from kvkin.kv.lineage import Lineage
from kvkin.kv.provenance import exact_provenance
from kvkin.kv.store import Block
from kvkin.transport.backends.inproc import InprocTransport
from kvkin.transport.holder import MAX_WAIT_S, StreamServer
from kvkin.transport.memory import KVMemory
from kvkin.transport.messages import PROTOCOL_VERSION
from kvkin.transport.stream_messages import (
    CloseStream,
    LeaseRenewed,
    OpenStream,
    RenewLease,
    StreamClosed,
    StreamLost,
    StreamOpened,
    StreamRefused,
)
from kvkin.transport.streams import LayerStream, StreamRequest, StreamTimes

LAYERS = 2
LAYOUT = KVLayout(LAYERS, (Plane("keys", 2, 16), Plane("values", 2, 16)), 64, "float32", 16)
LINEAGE = Lineage((b"h" * 16,) * (LAYERS + 1), (b"k" * 16,) * LAYERS)
PROVENANCE = exact_provenance(LINEAGE.id)
HASHES = tuple(bytes([number]) * 16 for number in range(1, 5))
LEASE_S, GRACE_S = 10.0, 2.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Holder:
    """A node's stored context and its stream server, on a clock that the test turns."""

    clock: Clock
    memory: KVMemory
    server: StreamServer
    blocks: list[Block]

    @property
    def pinned(self) -> set[int]:
        return {block.refs for block in self.blocks}

    def ask(self, message: Any, peer: bytes = b"one") -> list[Any]:
        return [answer for _, answer in self.server.handle(peer, message)]


@pytest.fixture
async def holder() -> AsyncIterator[Holder]:
    clock = Clock()
    memory = KVMemory(LAYOUT, 8 * LAYOUT.kv_slot_bytes, LAYOUT.e_block_bytes, InprocTransport())
    server = StreamServer(
        memory, "incarnation", lease_s=LEASE_S, grace_s=GRACE_S, lineages={LINEAGE.id: LINEAGE}, clock=clock
    )
    parents = [b"root" * 4, *HASHES]
    chain = [(block, parents[n], PROVENANCE, n * LAYOUT.block_size) for n, block in enumerate(HASHES)]
    blocks = memory.store.reserve(chain, (), clock.now)
    for block in blocks:
        memory.store.advance(block, LAYERS)
        memory.store.publish(block)
    for block in reversed(blocks):
        memory.store.release(block, clock.now)
    yield Holder(clock, memory, server, blocks)
    await memory.close()


def opening(stream_id: str = "stream", consumer: str = "decode-0", **changes: Any) -> OpenStream:
    message = OpenStream(
        version=PROTOCOL_VERSION,
        stream_id=stream_id,
        consumer=consumer,
        rank=0,
        layout_digest=LAYOUT.digest,
        provenance=PROVENANCE.key,
        blocks=HASHES,
        first_position=0,
        kv_layers=tuple(range(LAYERS)),
        e_layer=None,
        chunk_blocks=2,
    )
    return msgspec.structs.replace(message, **changes)


# --- the holder's side -----------------------------------------------------------------------------------------------------


def test_every_consumer_has_a_lease_of_its_own(holder: Holder) -> None:
    """Two consumers and two ranks read the same blocks: what one gives back, the others keep."""
    ranks = [opening(), opening(consumer="decode-1"), opening("stream-2", rank=1)]
    opened = [holder.ask(message, peer)[0] for message, peer in zip(ranks, (b"one", b"two", b"one"), strict=True)]
    assert all(isinstance(one, StreamOpened) for one in opened)
    assert holder.pinned == {3}
    assert holder.ask(CloseStream("stream", opened[0].generation)) == [StreamClosed("stream", True)]
    assert holder.pinned == {2}
    # late, repeated and foreign releases end nobody's lease
    assert holder.ask(CloseStream("stream", opened[0].generation)) == [StreamClosed("stream", False)]
    assert holder.ask(CloseStream("stream-2", 0), b"two") == [StreamClosed("stream-2", False)]
    assert holder.ask(CloseStream("stream", opened[1].generation), b"stranger") == [StreamClosed("stream", False)]
    assert holder.pinned == {2}
    assert len(holder.server.leases) == 2


def test_an_open_stream_is_not_opened_twice(holder: Holder) -> None:
    holder.ask(opening())
    assert isinstance(holder.ask(opening())[0], StreamRefused)
    assert holder.pinned == {1}


def test_blocks_are_kept_until_lease_and_grace_are_over(holder: Holder) -> None:
    holder.ask(opening())
    holder.clock.now += LEASE_S / 3
    assert holder.ask(RenewLease("stream")) == [LeaseRenewed("stream", LEASE_S)]
    holder.clock.now += LEASE_S + GRACE_S / 2
    assert holder.server.tick() == []
    assert holder.pinned == {1}
    assert isinstance(holder.ask(RenewLease("stream"))[0], StreamLost), "a lease that is over is not renewed"
    holder.clock.now += GRACE_S
    ((peer, lost),) = holder.server.tick()
    assert (peer, lost.code) == (b"one", "lease_expired")
    assert holder.pinned == {0}
    assert holder.ask(CloseStream("stream", 0)) == [StreamClosed("stream", False)]


def test_a_release_in_the_grace_tells_that_the_data_does_not_count(holder: Holder) -> None:
    generation = holder.ask(opening())[0].generation
    holder.clock.now += LEASE_S + GRACE_S / 2
    assert holder.ask(CloseStream("stream", generation)) == [StreamClosed("stream", False)]
    assert holder.pinned == {0}


@pytest.mark.parametrize("wait_s", [float("nan"), -1.0, float("-inf"), 0.0])
def test_a_wait_that_is_none_is_refused_at_once(holder: Holder, wait_s: float) -> None:
    message = opening(blocks=(b"x" * 16,), order_id="never", wait_s=wait_s)
    assert isinstance(holder.ask(message)[0], StreamRefused)


def test_a_wait_for_an_order_is_bounded_and_can_be_given_up(holder: Holder) -> None:
    unknown = {"blocks": (b"x" * 16,), "order_id": "never", "wait_s": float("inf")}
    assert holder.ask(opening(**unknown)) == []
    assert holder.ask(opening("other", **unknown)) == []
    holder.ask(CloseStream("other", -1))
    holder.clock.now += MAX_WAIT_S + 1
    assert [type(answer) for _, answer in holder.server.tick()] == [StreamRefused]
    assert holder.server.tick() == []


# --- the consumer's side ---------------------------------------------------------------------------------------------------


@dataclass
class DirectLink:
    """A consumer's link without sockets. ``before_pull`` runs at each pull; a frozen holder answers nothing."""

    holder: Holder
    node: str = "prefill-0"
    lost: bool = False
    frozen: bool = False
    lateness_s: float = 0.0
    inboxes: dict[str, asyncio.Queue[Any]] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def subscribe(self, stream_id: str) -> asyncio.Queue[Any]:
        return self.inboxes.setdefault(stream_id, asyncio.Queue())

    def unsubscribe(self, stream_id: str) -> None:
        self.inboxes.pop(stream_id, None)

    def post(self, message: Any) -> None:
        if not self.frozen:
            for answer in self.holder.ask(message):
                self.inboxes[answer.stream_id].put_nowait(answer) if answer.stream_id in self.inboxes else None

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def peer(self, opened: StreamOpened, memory: KVMemory, *, deadline_s: float) -> Any:
        self.frozen = self.lateness_s > 0  # and so no renewal comes through either
        self.holder.clock.now += self.lateness_s
        return await memory.transport.connect(opened.address, memory.region, deadline_s=deadline_s)


@dataclass
class Consumer:
    link: DirectLink
    memory: KVMemory
    arrivals: list[tuple[int, int]] = field(default_factory=list)

    def stream(self, **changes: Any) -> LayerStream:
        slots = tuple(self.memory.store.take_scratch(len(HASHES), 0)[0])
        values: dict[str, Any] = {
            "stream_id": "stream",
            "provenance": PROVENANCE.key,
            "blocks": HASHES,
            "first_position": 0,
            "kv_layers": tuple(range(LAYERS)),
            "e_layer": None,
            "chunk_blocks": 2,
            "kv_slots": slots,
            "e_slots": (),
        }
        request = StreamRequest(**{**values, **changes})
        times = StreamTimes(open_s=0.2, pull_s=5.0, order_s=5.0)
        link: Any = self.link
        return LayerStream(request, link, self.memory, "decode-0", times, 1 << 20, self.link.holder.clock)

    async def run(self, **changes: Any) -> LayerStream:
        stream = self.stream(**changes)
        async with asyncio.timeout(20):
            await stream.run(lambda chunk, layer: self.arrivals.append((chunk, layer)))
        return stream


@pytest.fixture
async def consumer(holder: Holder) -> AsyncIterator[Consumer]:
    memory = KVMemory(LAYOUT, 8 * LAYOUT.kv_slot_bytes, LAYOUT.e_block_bytes, InprocTransport())
    made = Consumer(DirectLink(holder), memory)
    yield made
    await asyncio.gather(*made.link.tasks)
    await memory.close()


async def test_data_that_lands_in_time_counts_and_the_lease_is_given_back(holder: Holder, consumer: Consumer) -> None:
    stream = await consumer.run()
    assert sorted(consumer.arrivals) == [(chunk, layer) for chunk in range(2) for layer in range(LAYERS)]
    assert stream.bytes_pulled == consumer.memory.transport.pulled_bytes == len(HASHES) * LAYOUT.kv_slot_bytes
    assert holder.pinned == {0}


async def test_data_that_lands_after_the_lease_is_not_used(holder: Holder, consumer: Consumer) -> None:
    """The bytes come, but the holder may have written something else there meanwhile: nobody is told that they are here."""
    consumer.link.lateness_s = LEASE_S + 0.1
    with pytest.raises(LeaseExpired, match="prefill-0"):
        await consumer.run()
    assert consumer.arrivals == []
    assert consumer.memory.transport.pulled_bytes > 0


async def test_the_consumers_lease_ends_before_the_holders(holder: Holder, consumer: Consumer) -> None:
    """It counts from when it asked, without the grace: between the two ends nothing is used and nothing is recycled."""
    consumer.link.lateness_s = LEASE_S + GRACE_S / 2
    with pytest.raises(LeaseExpired):
        await consumer.run()
    assert holder.server.tick() == []
    assert holder.pinned == {1}


async def test_a_holder_that_does_not_answer_is_given_up(holder: Holder, consumer: Consumer) -> None:
    consumer.link.frozen = True
    with pytest.raises(SourceTimeout, match="open the stream"):
        await consumer.run()
    assert consumer.link.inboxes == {}


async def test_an_exact_plan_refuses_kv_of_another_lineage(holder: Holder, consumer: Consumer) -> None:
    mine = Lineage(LINEAGE.hidden, (b"k" * 16, b"other kv of 16.."))
    with pytest.raises(SourceRefused, match="layer 1 has another lineage"):
        await consumer.run(lineage=mine, exact_layers=(0, 1))
    assert consumer.arrivals == []
    assert holder.pinned == {0}
