"""The contract suite of the data plane: every backend passes every check (``tests/transport/test_transports.py`` runs them).

A check gets a :class:`Pair`, a consumer in this process and a source that can be frozen and killed, and uses nothing but the
contract in ``kvkin.transport.data_plane``. Deadlines inside are far below the test's own, and nothing waits by sleeping.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from kvkin.kv.errors import LocalTransportError, SourceError, SourceLost, SourceRefused, SourceTimeout
from kvkin.transport.data_plane import Copy, Peer, RegionAddress, Transfer, Transport

MIB = 1 << 20
REGION_BYTES = 32 * MIB
LONG_S = 20.0
"""A deadline that must never be what ends a check."""
SHORT_S = 0.4
"""A deadline that is meant to pass."""
FILL = 0xA5

Check = Callable[["Pair"], Coroutine[Any, Any, None]]
CHECKS: list[Check] = []
"""Checks that leave the source alive and well."""
FAILURE_CHECKS: list[Check] = []
"""Checks that kill, freeze or replace the source."""


def make_content(num_bytes: int) -> NDArray[np.uint8]:
    """What a source serves: any 8 bytes occur once, so a byte in the wrong place is seen."""
    words = np.arange((num_bytes + 7) // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return words.view(np.uint8)[:num_bytes].copy()


class Pair(Protocol):
    """A consumer and the source that it pulls from."""

    consumer: Transport
    local: NDArray[np.uint8]
    local_region: int
    content: NDArray[np.uint8]

    @property
    def address(self) -> RegionAddress: ...
    async def freeze(self) -> None: ...
    async def thaw(self) -> None: ...
    async def kill(self) -> None: ...
    async def replace(self) -> None:
        """Kill the source and start another one at the same place; ``address`` is the new one's."""


async def connect(pair: Pair) -> Peer:
    return await pair.consumer.connect(pair.address, pair.local_region, deadline_s=LONG_S)


async def within(seconds: float, awaitable: Awaitable[Any]) -> Any:
    async with asyncio.timeout(seconds):
        return await awaitable


async def until(condition: Callable[[], bool]) -> None:
    """For what a thread or another process brings about and nothing announces."""
    async with asyncio.timeout(LONG_S):
        while not condition():  # noqa: ASYNC110 - there is nothing to wait on
            await asyncio.sleep(0)


async def expect_lost(transfer: Transfer) -> None:
    """SourceLost long before any deadline, and settled."""
    with pytest.raises(SourceLost):
        await within(LONG_S / 2, transfer.wait())
    await within(LONG_S / 2, transfer.settled)


async def outcome(transfer: Transfer) -> SourceError | None:
    try:
        await transfer.wait()
    except SourceError as error:
        return error
    return None


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


def failure_check(function: Check) -> Check:
    FAILURE_CHECKS.append(function)
    return function


@check
async def check_bytes_arrive(pair: Pair) -> None:
    peer = await connect(pair)
    for remote, local, size in [(0, 0, REGION_BYTES), (1, 3, 1), (4097, 12345, 777_777), (REGION_BYTES - 1, 0, 1)]:
        pair.local[:] = FILL
        await peer.pull([Copy(remote, local, size)], deadline_s=LONG_S).wait()
        assert np.array_equal(pair.local[local : local + size], pair.content[remote : remote + size])
        assert (pair.local[:local] == FILL).all()
        assert (pair.local[local + size :] == FILL).all()
    await peer.close()


@check
async def check_empty_pulls_complete(pair: Pair) -> None:
    peer = await connect(pair)
    before = pair.consumer.pulled_bytes
    for copies in ([], [Copy(0, 0, 0)], [Copy(REGION_BYTES, REGION_BYTES, 0), Copy(5, 7, 0)]):
        transfer = peer.pull(copies, deadline_s=LONG_S)
        assert transfer.num_bytes == 0
        await transfer.wait()
        assert transfer.settled.done()
    assert pair.consumer.pulled_bytes == before
    await peer.close()


@check
async def check_out_of_bounds_is_refused(pair: Pair) -> None:
    peer = await connect(pair)
    pair.local[:] = FILL
    for bad in [
        Copy(REGION_BYTES, 0, 1),
        Copy(0, REGION_BYTES, 1),
        Copy(1, 0, REGION_BYTES),
        Copy(-1, 0, 1),
        Copy(0, -1, 1),
        Copy(0, 0, -1),
        Copy(0, 0, 1 << 63),
    ]:
        with pytest.raises(ValueError, match=r"region|negative"):
            peer.pull([Copy(0, 0, 8), bad], deadline_s=LONG_S)
    await peer.pull([Copy(8, 8, 8)], deadline_s=LONG_S).wait()
    assert (pair.local[:8] == FILL).all()
    await peer.close()


@check
async def check_concurrent_pulls(pair: Pair) -> None:
    """Pulls of many sizes over two peers at once, the sizes not in order."""
    peers = [await connect(pair), await connect(pair)]
    sizes = [1, 64 * 1024, 3, 5 * MIB + 13, 4096, MIB, 9 * MIB + 1, 17, 65537] * 3
    pair.local[:] = FILL
    expected = pair.local.copy()
    transfers, offset = [], 0
    before = pair.consumer.pulled_bytes
    for index, size in enumerate(sizes):
        size = min(size, REGION_BYTES - offset)
        remote = (index * 1_000_003) % (REGION_BYTES - size + 1)
        transfers.append(peers[index % 2].pull([Copy(remote, offset, size)], deadline_s=LONG_S))
        expected[offset : offset + size] = pair.content[remote : remote + size]
        offset += size
    await asyncio.gather(*(transfer.wait() for transfer in transfers))
    assert np.array_equal(pair.local, expected)
    assert pair.consumer.pulled_bytes - before == offset
    assert pair.consumer.quarantined_bytes == 0
    for peer in peers:
        await peer.close()


@check
async def check_many_small_copies(pair: Pair) -> None:
    """More copies than fit into one descriptor list or request, none of which can be merged."""
    peer = await connect(pair)
    count, size = 5000, 768
    pair.local[:] = FILL
    copies = [Copy(2 * index * size, (count - index) * size, size) for index in range(count)]
    await peer.pull(copies, deadline_s=LONG_S).wait()
    assert (pair.local[:size] == FILL).all()
    for copy in copies:
        landed = pair.local[copy.local_offset : copy.local_offset + size]
        assert np.array_equal(landed, pair.content[copy.remote_offset : copy.remote_offset + size])
    await peer.close()


@check
async def check_loop_stays_responsive(pair: Pair) -> None:
    """The event loop has other work to do while bytes move."""
    peer = await connect(pair)
    transfers = [peer.pull([Copy(0, 0, REGION_BYTES)], deadline_s=LONG_S) for _ in range(4)]
    turns, pending = 0, asyncio.gather(*(transfer.wait() for transfer in transfers))
    while not pending.done():
        await asyncio.sleep(0)
        turns += 1
    await pending
    assert turns >= 4
    await peer.close()


@check
async def check_cancel_abandons_one_pull(pair: Pair) -> None:
    """A cancelled pull settles, its bytes do not count, its destination can be used again, others go on."""
    peer = await connect(pair)
    before = pair.consumer.pulled_bytes
    half = REGION_BYTES // 2
    first = peer.pull([Copy(0, 0, half)] * 4, deadline_s=LONG_S)
    doomed = peer.pull([Copy(0, half, half)] * 4, deadline_s=LONG_S)
    after = peer.pull([Copy(half, 0, half)], deadline_s=LONG_S)
    waiting = asyncio.ensure_future(doomed.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await within(LONG_S / 2, doomed.settled)
    pair.local[half:] = FILL
    await first.wait()
    await after.wait()
    assert (pair.local[half:] == FILL).all()
    assert np.array_equal(pair.local[:half], pair.content[half:])
    assert pair.consumer.pulled_bytes - before == 5 * half
    assert pair.consumer.quarantined_bytes == 0
    await peer.close()


@check
async def check_deadline_passes(pair: Pair) -> None:
    """A deadline that nobody could keep: SourceTimeout, settled, and the peer still works."""
    peer = await connect(pair)
    before = pair.consumer.pulled_bytes
    transfer = peer.pull([Copy(0, 0, REGION_BYTES)] * 8, deadline_s=0.0)
    with pytest.raises(SourceTimeout):
        await transfer.wait()
    await within(LONG_S / 2, transfer.settled)
    pair.local[:] = FILL
    await peer.pull([Copy(0, 0, 10)], deadline_s=LONG_S).wait()
    assert (pair.local[10:] == FILL).all()
    assert pair.consumer.pulled_bytes - before == 10
    await peer.close()


@check
async def check_close_of_a_peer(pair: Pair) -> None:
    """Pulls in flight fail and settle; later ones fail at once; closing twice is fine."""
    peer = await connect(pair)
    transfers = [peer.pull([Copy(0, 0, REGION_BYTES)], deadline_s=LONG_S) for _ in range(16)]
    await asyncio.gather(peer.close(), peer.close())
    outcomes = [await outcome(transfer) for transfer in transfers]
    assert isinstance(outcomes[-1], SourceLost)
    assert all(transfer.settled.done() for transfer in transfers)
    pair.local[:] = FILL
    await expect_lost(peer.pull([Copy(0, 0, 1)], deadline_s=LONG_S))
    assert pair.consumer.quarantined_bytes == 0
    again = await connect(pair)
    await again.pull([Copy(0, 0, 1)], deadline_s=LONG_S).wait()
    assert (pair.local[1:] == FILL).all()
    await again.close()
    await peer.close()


@check
async def check_connect_refuses(pair: Pair) -> None:
    address, consumer = pair.address, pair.consumer
    other = RegionAddress("carrier-pigeon", address.region, address.num_bytes, address.metadata)
    with pytest.raises(LocalTransportError, match="carrier-pigeon"):
        await consumer.connect(other, pair.local_region, deadline_s=LONG_S)
    with pytest.raises(LocalTransportError, match="region 4711"):
        await consumer.connect(address, 4711, deadline_s=LONG_S)
    garbage = RegionAddress(address.backend, address.region, address.num_bytes, b"\xc1garbage")
    with pytest.raises((SourceRefused, SourceLost)):
        await consumer.connect(garbage, pair.local_region, deadline_s=LONG_S)


@failure_check
async def check_kill_before_connect(pair: Pair) -> None:
    address = pair.address
    await pair.kill()
    with pytest.raises(SourceLost):
        await within(LONG_S / 2, pair.consumer.connect(address, pair.local_region, deadline_s=LONG_S))


@failure_check
async def check_kill_between_connect_and_pull(pair: Pair) -> None:
    peer = await connect(pair)
    await pair.kill()
    await expect_lost(peer.pull([Copy(0, 0, REGION_BYTES)], deadline_s=LONG_S))
    await expect_lost(peer.pull([Copy(0, 0, 1)], deadline_s=LONG_S))
    assert pair.consumer.quarantined_bytes == 0
    await peer.close()


@failure_check
async def check_kill_in_the_middle_and_replace(pair: Pair) -> None:
    """What completed stays good, the rest is lost promptly, and the next incarnation serves at once."""
    peer = await connect(pair)
    transfers = [peer.pull([Copy(0, 0, REGION_BYTES)], deadline_s=LONG_S) for _ in range(40)]
    await transfers[0].wait()
    await pair.replace()
    outcomes = await within(LONG_S / 2, asyncio.gather(*(outcome(transfer) for transfer in transfers)))
    assert outcomes[0] is None
    assert isinstance(outcomes[-1], SourceLost)
    assert all(error is None or isinstance(error, SourceLost) for error in outcomes)
    await within(LONG_S / 2, asyncio.gather(*(transfer.settled for transfer in transfers)))
    assert pair.consumer.pulled_bytes == REGION_BYTES * outcomes.count(None)
    assert pair.consumer.quarantined_bytes == 0
    pair.local[:] = FILL
    again = await connect(pair)
    await again.pull([Copy(100, 0, 100)], deadline_s=LONG_S).wait()
    assert np.array_equal(pair.local[:100], pair.content[100:200])
    assert (pair.local[100:] == FILL).all()
    await peer.close()
    await again.close()


@failure_check
async def check_old_address_of_a_replaced_peer(pair: Pair) -> None:
    old = pair.address
    peer = await connect(pair)
    await peer.pull([Copy(0, 0, 1)], deadline_s=LONG_S).wait()
    await pair.replace()
    with pytest.raises((SourceRefused, SourceLost)):
        await within(LONG_S / 2, pair.consumer.connect(old, pair.local_region, deadline_s=LONG_S))
    await expect_lost(peer.pull([Copy(0, 0, 1)], deadline_s=LONG_S))
    await peer.close()


@failure_check
async def check_freeze_before_connect(pair: Pair) -> None:
    await pair.freeze()
    started = time.monotonic()
    with pytest.raises(SourceTimeout):
        await pair.consumer.connect(pair.address, pair.local_region, deadline_s=SHORT_S)
    assert time.monotonic() - started < SHORT_S + 3
    await pair.thaw()
    peer = await connect(pair)
    await peer.pull([Copy(0, 0, 1)], deadline_s=LONG_S).wait()
    await peer.close()


async def pull_frozen(pair: Pair, peer: Peer, count: int) -> list[Transfer]:
    """Pulls from a frozen source: each times out, or is complete (shared memory of a frozen process can be read)."""
    size = REGION_BYTES // count
    transfers = [peer.pull([Copy(i * size, i * size, size)], deadline_s=SHORT_S) for i in range(count)]
    for index, transfer in enumerate(transfers):
        error = await outcome(transfer)
        assert error is None or isinstance(error, SourceTimeout), repr(error)
        if error is None:
            landed = pair.local[index * size : (index + 1) * size]
            assert np.array_equal(landed, pair.content[index * size : (index + 1) * size])
    held = sum(transfer.num_bytes for transfer in transfers if not transfer.settled.done())
    assert pair.consumer.quarantined_bytes == held
    return transfers


async def recycle_and_thaw(pair: Pair, transfers: list[Transfer]) -> None:
    """Use again what is settled, thaw the source, and see that no late byte lands there, before or after the rest settled."""

    def recycle() -> list[NDArray[np.uint8]]:
        size = REGION_BYTES // len(transfers)
        parts = [pair.local[index * size : (index + 1) * size] for index in range(len(transfers))]
        free = [part for part, transfer in zip(parts, transfers, strict=True) if transfer.settled.done()]
        for part in free:
            part[:] = FILL
        return free

    early = recycle()
    await pair.thaw()
    # the source works again: a new connection is served, and whatever was on its way has landed or never will
    witness = np.zeros(MIB, dtype=np.uint8)
    region = pair.consumer.register(witness)
    peer = await pair.consumer.connect(pair.address, region, deadline_s=LONG_S)
    for _ in range(8):
        await peer.pull([Copy(0, 0, MIB)], deadline_s=LONG_S).wait()
    assert np.array_equal(witness, pair.content[:MIB])
    assert all((part == FILL).all() for part in early)
    await within(LONG_S, asyncio.gather(*(transfer.settled for transfer in transfers)))
    assert pair.consumer.quarantined_bytes == 0
    late = recycle()
    for _ in range(8):
        await peer.pull([Copy(0, 0, MIB)], deadline_s=LONG_S).wait()
    assert all((part == FILL).all() for part in late)
    await peer.close()


@failure_check
async def check_freeze_between_connect_and_pull(pair: Pair) -> None:
    peer = await connect(pair)
    await peer.pull([Copy(0, 0, 1)], deadline_s=LONG_S).wait()
    await pair.freeze()
    transfers = await pull_frozen(pair, peer, 1)
    await recycle_and_thaw(pair, transfers)
    await peer.close()


@failure_check
async def check_freeze_in_the_middle(pair: Pair) -> None:
    """Bytes are on the wire when the source stops; several pulls wait behind."""
    peer = await connect(pair)
    first = peer.pull([Copy(0, 0, REGION_BYTES)], deadline_s=LONG_S)
    flood = [peer.pull([Copy(0, 0, REGION_BYTES)], deadline_s=2 * SHORT_S) for _ in range(40)]
    await first.wait()
    await pair.freeze()
    transfers = await pull_frozen(pair, peer, 4) if all([await outcome(x) is None for x in flood]) else flood
    for transfer in transfers:
        error = await outcome(transfer)
        assert error is None or isinstance(error, SourceTimeout), repr(error)
    assert pair.consumer.quarantined_bytes == sum(x.num_bytes for x in transfers if not x.settled.done())
    pair.local[:] = FILL if all(transfer.settled.done() for transfer in transfers) else pair.local
    await pair.thaw()
    await within(LONG_S, asyncio.gather(*(transfer.settled for transfer in transfers)))
    pair.local[:] = FILL
    again = await connect(pair)
    await again.pull([Copy(0, 0, 1)], deadline_s=LONG_S).wait()
    assert (pair.local[1:] == FILL).all()
    assert pair.consumer.quarantined_bytes == 0
    await again.close()
    await peer.close()


@failure_check
async def check_freeze_then_cancel(pair: Pair) -> None:
    peer = await connect(pair)
    await pair.freeze()
    transfer = peer.pull([Copy(0, 0, REGION_BYTES)], deadline_s=LONG_S)
    waiting = asyncio.ensure_future(transfer.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    await recycle_and_thaw(pair, [transfer])
    await peer.close()


@failure_check
async def check_freeze_then_kill(pair: Pair) -> None:
    """Destinations of a source that never comes back are free as soon as it is gone, or its peer is closed."""
    peer = await connect(pair)
    await pair.freeze()
    transfers = await pull_frozen(pair, peer, 2)
    await pair.kill()
    await peer.close()
    await within(LONG_S / 2, asyncio.gather(*(transfer.settled for transfer in transfers)))
    assert pair.consumer.quarantined_bytes == 0


@failure_check
async def check_close_while_frozen(pair: Pair) -> None:
    """Closing tears the endpoint down: everything settles though the source is frozen, and nothing lands when it thaws."""
    peer = await connect(pair)
    await peer.pull([Copy(0, 0, 1)], deadline_s=LONG_S).wait()
    await pair.freeze()
    transfers = [peer.pull([Copy(0, 0, REGION_BYTES)], deadline_s=LONG_S) for _ in range(2)]
    await asyncio.sleep(0)
    await within(LONG_S / 2, peer.close())
    for transfer in transfers:
        assert await outcome(transfer) is None or transfer.settled.done()
    pair.local[:] = FILL
    await pair.thaw()
    assert pair.consumer.quarantined_bytes == 0
    await within(LONG_S / 2, pair.consumer.close())
    await pair.consumer.close()
    assert (pair.local == FILL).all()
    with pytest.raises(LocalTransportError):
        await pair.consumer.connect(pair.address, pair.local_region, deadline_s=LONG_S)
