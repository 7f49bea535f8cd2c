"""The ``tcp`` backend's serving side against clients that do not behave, and the consumer against odd servers."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest
from check_transport import LONG_S, make_content, until

from kvkin.kv.errors import SourceLost, SourceRefused
from kvkin.transport.backends import tcp_server
from kvkin.transport.backends import tcp_wire as wire
from kvkin.transport.backends.tcp import TcpTransport
from kvkin.transport.data_plane import Copy, RegionAddress

NUM_BYTES = 8 << 20
CONTENT = make_content(NUM_BYTES)


@pytest.fixture
async def source() -> AsyncIterator[TcpTransport]:
    transport = TcpTransport(max_connections=3)
    transport.register(CONTENT.copy())
    yield transport
    await transport.close()


@pytest.fixture
async def consumer() -> AsyncIterator[TcpTransport]:
    transport = TcpTransport()
    transport.register(np.zeros(NUM_BYTES, dtype=np.uint8))
    yield transport
    await transport.close()


class Raw:
    """A client that speaks bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def read(self, size: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(size), LONG_S)

    async def ended(self) -> bool:
        try:
            return await asyncio.wait_for(self.reader.read(1), LONG_S) == b""
        except ConnectionError:
            return True

    async def close(self) -> None:
        self.writer.close()
        await asyncio.gather(self.writer.wait_closed(), return_exceptions=True)


async def dial(source: TcpTransport) -> Raw:
    return Raw(*await asyncio.open_connection("127.0.0.1", source.port))


def hello(source: TcpTransport, **changes: object) -> bytes:
    incarnation = wire.decode_metadata(source.address(0).metadata).incarnation
    fields = {"magic": wire.MAGIC, "version": wire.VERSION, "incarnation": incarnation, "region": 0, **changes}
    return wire.HELLO.pack(*fields.values())


async def pulls_fine(source: TcpTransport, consumer: TcpTransport) -> None:
    peer = await consumer.connect(source.address(0), 0, deadline_s=LONG_S)
    await peer.pull([Copy(0, 0, NUM_BYTES)], deadline_s=LONG_S).wait()
    assert np.array_equal(consumer.regions[0], CONTENT)
    await peer.close()


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4, b"\0" * 4096, os.urandom(4096)],
    ids=["http", "zeros", "random"],
)
async def test_garbage_ends_its_own_connection(source: TcpTransport, consumer: TcpTransport, garbage: bytes) -> None:
    raw = await dial(source)
    raw.writer.write(garbage)
    assert await raw.ended()
    await raw.close()
    await pulls_fine(source, consumer)


async def test_half_a_hello_then_gone(source: TcpTransport, consumer: TcpTransport) -> None:
    raw = await dial(source)
    raw.writer.write(hello(source)[:11])
    await raw.writer.drain()
    await raw.close()
    await until(lambda: source.connections == 0)
    await pulls_fine(source, consumer)


async def test_silence_is_cut_off(source: TcpTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "HELLO_TIMEOUT_S", 0.1)
    raw = await dial(source)
    assert await raw.ended()
    await raw.close()


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"version": 9}, wire.WRONG_VERSION),
        ({"incarnation": b"x" * 16}, wire.REPLACED),
        ({"region": 5}, wire.NO_REGION),
    ],
)
async def test_hello_that_does_not_fit(source: TcpTransport, changes: dict[str, object], status: int) -> None:
    raw = await dial(source)
    raw.writer.write(hello(source, **changes))
    assert wire.WELCOME.unpack(await raw.read(wire.WELCOME.size)) == (wire.MAGIC, wire.VERSION, status, 0)
    assert await raw.ended()
    await raw.close()


@pytest.mark.parametrize(
    "request_bytes",
    [
        wire.COUNT.pack(1) + wire.SPAN.pack(NUM_BYTES, 1),
        wire.COUNT.pack(1) + wire.SPAN.pack(0, NUM_BYTES + 1),
        wire.COUNT.pack(1) + wire.SPAN.pack((1 << 64) - 1, (1 << 64) - 1),
        wire.COUNT.pack(2) + wire.SPAN.pack(0, 1) + wire.SPAN.pack(NUM_BYTES - 1, 2),
        wire.COUNT.pack(wire.MAX_COPIES + 1),
        wire.COUNT.pack((1 << 32) - 1),
    ],
)
async def test_request_out_of_bounds(source: TcpTransport, consumer: TcpTransport, request_bytes: bytes) -> None:
    """The server checks by itself: not one byte outside of the region is ever sent."""
    raw = await dial(source)
    raw.writer.write(hello(source) + request_bytes)
    await raw.read(wire.WELCOME.size)
    assert wire.REPLY.unpack(await raw.read(wire.REPLY.size)) == (wire.OUT_OF_BOUNDS, 0)
    assert await raw.ended()
    await raw.close()
    await pulls_fine(source, consumer)


async def test_wire_format(source: TcpTransport) -> None:
    """A client in any language: hello, then two requests at once, answered in order."""
    raw = await dial(source)
    raw.writer.write(hello(source) + wire.COUNT.pack(2) + wire.SPAN.pack(3, 4) + wire.SPAN.pack(100, 2))
    raw.writer.write(wire.COUNT.pack(0) + wire.COUNT.pack(1) + wire.SPAN.pack(NUM_BYTES - 1, 1))
    assert wire.WELCOME.unpack(await raw.read(wire.WELCOME.size)) == (wire.MAGIC, wire.VERSION, wire.OK, NUM_BYTES)
    assert await raw.read(9) == bytes([0, 0, 0, 0, 0, 0, 0, 0, 6])
    assert await raw.read(6) == CONTENT[3:7].tobytes() + CONTENT[100:102].tobytes()
    assert await raw.read(9) == bytes(9)
    assert await raw.read(9) == bytes([0, 0, 0, 0, 0, 0, 0, 0, 1])
    assert await raw.read(1) == CONTENT[-1:].tobytes()
    await raw.close()


async def test_connections_are_capped(source: TcpTransport, consumer: TcpTransport) -> None:
    peers = [await consumer.connect(source.address(0), 0, deadline_s=LONG_S) for _ in range(3)]
    with pytest.raises(SourceLost):
        await consumer.connect(source.address(0), 0, deadline_s=LONG_S)
    await peers[0].pull([Copy(0, 0, 8)], deadline_s=LONG_S).wait()
    await peers.pop().close()
    await until(lambda: source.connections == 2)
    peers.append(await consumer.connect(source.address(0), 0, deadline_s=LONG_S))
    for peer in peers:
        await peer.close()


async def test_consumer_that_takes_nothing_is_cut_off(source: TcpTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "STALL_S", 0.2)
    raw = socket.create_connection(("127.0.0.1", source.port))
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.sendall(hello(source) + (wire.COUNT.pack(1) + wire.SPAN.pack(0, NUM_BYTES)) * 4)
    await until(lambda: source.connections == 1)
    await until(lambda: source.connections == 0)
    raw.close()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", SourceRefused),
        (wire.WELCOME.pack(wire.MAGIC, 2, wire.WRONG_VERSION, 0), SourceRefused),
        (wire.WELCOME.pack(wire.MAGIC, wire.VERSION, wire.OK, 17), SourceRefused),
        (wire.WELCOME.pack(wire.MAGIC, wire.VERSION, 200, 0), SourceRefused),
        (b"", SourceLost),
    ],
)
async def test_odd_servers(consumer: TcpTransport, answer: bytes, error: type[Exception]) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(wire.HELLO.size)
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        metadata = wire.TcpMetadata(wire.VERSION, b"i" * 16, "127.0.0.1", port)
        address = RegionAddress("tcp", 0, 16, msgspec.msgpack.encode(metadata))
        with pytest.raises(error):
            await consumer.connect(address, 0, deadline_s=LONG_S)


async def test_address_of_another_version(source: TcpTransport, consumer: TcpTransport) -> None:
    address = source.address(0)
    metadata = msgspec.structs.replace(wire.decode_metadata(address.metadata), version=9)
    with pytest.raises(SourceRefused, match="protocol 9"):
        await consumer.connect(
            msgspec.structs.replace(address, metadata=msgspec.msgpack.encode(metadata)), 0, deadline_s=LONG_S
        )


async def test_an_abandoned_pull_costs_at_most_the_connection(source: TcpTransport, consumer: TcpTransport) -> None:
    """Pulls behind one that is given up while it is received are asked for again, by themselves."""
    peer = await consumer.connect(source.address(0), 0, deadline_s=LONG_S)
    for _ in range(5):
        pulls = [peer.pull([Copy(0, 0, NUM_BYTES)], deadline_s=LONG_S) for _ in range(6)]
        await pulls[0].wait()
        doomed = [asyncio.ensure_future(pulls[index].wait()) for index in (1, 3)]
        await asyncio.sleep(0)
        for task in doomed:
            task.cancel()
        await asyncio.wait(doomed)
        for index in (2, 4, 5):
            await pulls[index].wait()
    assert np.array_equal(consumer.regions[0], CONTENT)
    assert consumer.quarantined_bytes == 0
    await peer.close()
