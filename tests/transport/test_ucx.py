"""What is special about the ``ucx`` backend: NIXL's errors, its metadata, the cap on quarantine, an idle endpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest
from check_transport import FILL, LONG_S, REGION_BYTES, SHORT_S, outcome, until
from hypothesis import given
from hypothesis import strategies as st
from nixl_cu12 import _bindings as nixl
from transport_pairs import ProcessPair, Source, prepare

from kvkin.kv.errors import KvkinError, LocalTransportError, SourceError, SourceLost, SourceRefused, SourceTimeout
from kvkin.transport.backends import nixl as nixl_layer
from kvkin.transport.backends import ucx
from kvkin.transport.backends.base import check_copies
from kvkin.transport.backends.ucx import UcxMetadata, UcxTransport
from kvkin.transport.backends.ucx_link import PIECE_BYTES, PIECE_COPIES, make_pieces
from kvkin.transport.data_plane import Copy, RegionAddress

EXCEPTIONS = [value for value in vars(nixl).values() if isinstance(value, type) and issubclass(value, Exception)]


def test_every_nixl_exception_is_mapped() -> None:
    assert set(EXCEPTIONS) == set(nixl_layer.REMOTE_ERRORS)


@pytest.mark.parametrize("exception", EXCEPTIONS, ids=lambda exception: exception.__name__)
def test_mapping(exception: type[Exception]) -> None:
    with pytest.raises(LocalTransportError, match=r"register: boom"), nixl_layer.local_errors("register"):
        raise exception("boom")
    with (
        pytest.raises((SourceError, LocalTransportError), match=r"READ: boom") as caught,
        nixl_layer.remote_errors("READ"),
    ):
        raise exception("boom")
    assert type(caught.value) is nixl_layer.REMOTE_ERRORS[exception]
    assert isinstance(caught.value.__cause__, exception)


@pytest.mark.parametrize("exception", EXCEPTIONS, ids=lambda exception: exception.__name__)
async def test_a_pull_never_shows_more_than_a_lost_source(
    transports: tuple[UcxTransport, UcxTransport], exception: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever NIXL raises in the middle: the pull is lost and settled, and other peers go on."""
    source, consumer = transports
    doomed = await consumer.connect(source.address(0), 0, deadline_s=LONG_S)
    healthy = await consumer.connect(source.address(0), 0, deadline_s=LONG_S)
    broken = doomed._link._agent
    assert broken is not None

    def explode(*_: object) -> tuple[int, bool]:
        with nixl_layer.remote_errors("READ"):
            raise exception("boom")

    monkeypatch.setattr(broken, "read", explode)
    del broken
    for size in (8, 1 << 20):
        pull = doomed.pull([Copy(0, 0, size)], deadline_s=LONG_S)
        error = await outcome(pull)
        assert isinstance(error, SourceError)
        assert not isinstance(error, SourceTimeout)
        await pull.settled
    monkeypatch.undo()
    await healthy.pull([Copy(0, 0, 1 << 20)], deadline_s=LONG_S).wait()
    await doomed.close()
    await healthy.close()


@pytest.fixture
async def transports() -> AsyncIterator[tuple[UcxTransport, UcxTransport]]:
    """Source and consumer in one process."""
    source, consumer = UcxTransport(), UcxTransport()
    for transport in (source, consumer):
        transport.register(np.ones(4 << 20, dtype=np.uint8))
    yield source, consumer
    await consumer.close()
    await source.close()


def with_metadata(address: RegionAddress, **changes: object) -> RegionAddress:
    metadata = msgspec.msgpack.decode(address.metadata, type=UcxMetadata)
    return msgspec.structs.replace(
        address, metadata=msgspec.msgpack.encode(msgspec.structs.replace(metadata, **changes))
    )


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"version": 9}, SourceRefused, "protocol 9"),
        ({"incarnation": b"x" * 16}, SourceRefused, "not the one"),
        ({"agent": b"nonsense"}, SourceRefused, "connect|metadata"),
        ({"host": "elsewhere"}, LocalTransportError, "RDMA"),
    ],
)
async def test_metadata_that_does_not_fit(
    transports: tuple[UcxTransport, UcxTransport],
    changes: dict[str, object],
    error: type[KvkinError],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ucx, "has_rdma", lambda: False)
    source, consumer = transports
    with pytest.raises(error, match=text):
        await consumer.connect(with_metadata(source.address(0), **changes), 0, deadline_s=LONG_S)
    peer = await consumer.connect(source.address(0), 0, deadline_s=LONG_S)
    await peer.close()


async def test_a_connect_that_is_cancelled_leaves_nothing(transports: tuple[UcxTransport, UcxTransport]) -> None:
    source, consumer = transports
    connecting = asyncio.ensure_future(consumer.connect(source.address(0), 0, deadline_s=LONG_S))
    await asyncio.sleep(0)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    await until(lambda: not consumer._peers)


async def test_small_pulls_let_other_tasks_run(transports: tuple[UcxTransport, UcxTransport]) -> None:
    source, consumer = transports
    peer = await consumer.connect(source.address(0), 0, deadline_s=LONG_S)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count())
    for _ in range(50):
        await peer.pull([Copy(0, 0, 64)], deadline_s=LONG_S).wait()
    counting.cancel()
    assert turns >= 50
    await peer.close()


async def test_an_idle_endpoint_does_not_spin(transports: tuple[UcxTransport, UcxTransport]) -> None:
    """NIXL's default would keep one core busy per agent."""
    source, consumer = transports
    peer = await consumer.connect(source.address(0), 0, deadline_s=LONG_S)
    await peer.pull([Copy(0, 0, 1 << 20)], deadline_s=LONG_S).wait()
    before, waiting = time.process_time(), asyncio.Event()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(waiting.wait(), 0.5)
    assert time.process_time() - before < 0.2
    await peer.close()


async def test_quarantine_has_a_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen source may hold back so much and no more: then its peer is cut off, and everything settles."""
    prepare("ucx-tcp", monkeypatch)
    source = Source("ucx")
    pair = ProcessPair(source, UcxTransport(quarantine_max_bytes=REGION_BYTES // 2))
    try:
        peer = await pair.consumer.connect(pair.address, pair.local_region, deadline_s=LONG_S)
        await peer.pull([Copy(0, 0, 1)], deadline_s=LONG_S).wait()
        await pair.freeze()
        small = peer.pull([Copy(0, 0, REGION_BYTES // 4)], deadline_s=SHORT_S)
        assert isinstance(await outcome(small), SourceTimeout)
        assert pair.consumer.quarantined_bytes == REGION_BYTES // 4
        assert not small.settled.done()
        large = peer.pull([Copy(0, 0, REGION_BYTES)], deadline_s=SHORT_S)
        assert isinstance(await outcome(large), SourceTimeout)
        async with asyncio.timeout(LONG_S / 2):
            await small.settled
            await large.settled
        assert pair.consumer.quarantined_bytes == 0
        assert isinstance(await outcome(peer.pull([Copy(0, 0, 1)], deadline_s=LONG_S)), SourceLost)
        pair.local[:] = FILL
        await pair.thaw()
        await peer.close()
        assert (pair.local == FILL).all()
    finally:
        await pair.close()
        source.kill()


@given(
    st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(0, 3 * PIECE_BYTES)), max_size=600)
)
def test_pieces_cover_the_copies_in_order(rows: list[tuple[int, int, int]]) -> None:
    copies = check_copies([Copy(*row) for row in rows], 1 << 50, 1 << 50)
    pieces = make_pieces(copies, 7, 11)
    flat = [
        Copy(int(remote[0]) - 7, int(local[0]) - 11, int(local[1]))
        for local_rows, remote_rows in pieces
        for local, remote in zip(local_rows, remote_rows, strict=True)
    ]
    assert check_copies(flat, 1 << 50, 1 << 50) == copies
    for local_rows, remote_rows in pieces:
        assert len(local_rows) <= PIECE_COPIES
        assert 0 < local_rows[:, 1].sum() <= PIECE_BYTES
        assert (local_rows[:, 1] == remote_rows[:, 1]).all()
