"""Backend ``tcp``: plain sockets, for networks without RDMA. See ``tcp_wire.py`` for the protocol.

Serving: ``tcp_server.py``. Pulling: a peer has one connection (``tcp_link.py``), replaced when an abandoned pull cost it;
a connection that the *other* side ended means that the source is lost. Bandwidth shaping needs nothing from us: bind to
the address of the shaped interface.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvkin.kv.errors import (
    ConfigError,
    KvkinError,
    LocalTransportError,
    SourceError,
    SourceLost,
    SourceRefused,
    SourceTimeout,
)
from kvkin.transport.backends import tcp_wire as wire
from kvkin.transport.backends.base import PullTransfer, TransportBase, check_copies, join_threads
from kvkin.transport.backends.tcp_link import Link, Unit, make_units
from kvkin.transport.backends.tcp_server import TcpServer
from kvkin.transport.data_plane import Copy, RegionAddress

WILDCARDS = ("", "0.0.0.0", "::")
RECONNECT_S = 5.0


class TcpTransport(TransportBase):
    """One endpoint (the contract's ``Transport``); listens from construction on."""

    name = "tcp"

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, *, advertise_host: str | None = None, max_connections: int = 256
    ) -> None:
        super().__init__()
        if host in WILDCARDS and advertise_host is None:
            raise ConfigError("advertise_host", f"needed because host is the wildcard {host!r}", "a name or address")
        self._host = advertise_host or host
        self._incarnation = secrets.token_bytes(16)
        try:
            self._server = TcpServer(host, port, self._incarnation, self.regions, max_connections)
        except OSError as error:
            raise LocalTransportError(f"cannot listen on {host} port {port}: {error}") from error
        self._peers: set[TcpPeer] = set()

    @property
    def port(self) -> int:
        return self._server.port

    def limit_rate(self, max_bytes_per_s: int) -> None:
        """Pace connections that peers open from now on (0: as fast as it goes); the kernel does it (Linux)."""
        self._server.max_bytes_per_s = max_bytes_per_s

    @property
    def connections(self) -> int:
        """Connections that pull from here right now."""
        return self._server.connections

    def register(self, buffer: NDArray[np.uint8]) -> int:
        return self.add_region(buffer)

    def address(self, region: int) -> RegionAddress:
        metadata = wire.TcpMetadata(wire.VERSION, self._incarnation, self._host, self.port)
        size = self.region_buffer(region).size
        return RegionAddress(self.name, region, size, msgspec.msgpack.encode(metadata))

    async def connect(self, address: RegionAddress, local_region: int, *, deadline_s: float) -> TcpPeer:
        if self.closed:
            raise LocalTransportError("the transport is closed")
        local = self.region_buffer(local_region)
        if address.backend != self.name:
            raise LocalTransportError(f"address of backend {address.backend!r} given to {self.name!r}")
        peer = TcpPeer(self, address, local)
        await peer.open(deadline_s)
        self._peers.add(peer)
        if self.closed:
            await peer.close()
            raise LocalTransportError("the transport was closed while connecting")
        return peer

    def forget(self, peer: TcpPeer) -> None:
        self._peers.discard(peer)

    async def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for peer in list(self._peers):
            await peer.close()
        await join_threads(self._server.close())
        self.regions.clear()


class TcpPeer:
    """Pulls from one region of one peer."""

    def __init__(self, owner: TcpTransport, address: RegionAddress, local: NDArray[np.uint8]) -> None:
        self._owner, self._address, self._local = owner, address, local
        self._metadata = wire.decode_metadata(address.metadata)
        self._link: Link | None = None
        self._unsettled: set[PullTransfer] = set()
        self._waiting: list[Unit] = []
        self._reconnecting: asyncio.Task[None] | None = None
        self._lost: KvkinError | None = None

    async def open(self, deadline_s: float) -> None:
        """Connect and say hello."""
        self._link = Link(await _dial(self._metadata, self._address, deadline_s), self._on_down)

    def pull(self, copies: Sequence[Copy], *, deadline_s: float) -> PullTransfer:
        merged = check_copies(copies, self._address.num_bytes, self._local.size)
        transfer = PullTransfer(self._owner, sum(copy.num_bytes for copy in merged), deadline_s, self._abort)
        if self._lost is not None:
            transfer.fail(SourceLost(str(self._lost)), settled=True)
        elif not merged:
            transfer.complete()
        else:
            self._unsettled.add(transfer)
            transfer.on_settled = self._unsettled.discard
            self._submit(make_units(transfer, merged, self._local))
        return transfer

    def _submit(self, units: Sequence[Unit]) -> None:
        for unit in units:
            if self._link is None:
                self._waiting.append(unit)
            else:
                self._link.submit(unit)

    def _abort(self, transfer: PullTransfer) -> None:
        # bytes land only while the loop receives them, and from now on none is received into this destination
        transfer.settle()
        if self._link is not None:
            self._link.give_up()

    def _on_down(self, error: SourceError | None) -> None:
        link, self._link = self._link, None
        if error is not None:
            self._lose(error)
        elif link is not None:
            self._waiting = link.unfinished
            self._reconnecting = asyncio.ensure_future(self._reconnect())

    async def _reconnect(self) -> None:
        try:
            await self.open(RECONNECT_S)
        except (SourceError, LocalTransportError) as error:
            self._lose(error)
            return
        waiting, self._waiting = self._waiting, []
        self._submit([unit for unit in waiting if not unit.abandoned])

    def _lose(self, error: KvkinError) -> None:
        """Nothing runs any more: fail and settle what is left."""
        self._lost = self._lost or error
        failure = error if isinstance(error, SourceError) else SourceLost(str(error))
        for transfer in list(self._unsettled):
            transfer.fail(failure, settled=True)
        self._waiting.clear()
        self._owner.forget(self)

    async def close(self) -> None:
        self._lost = self._lost or SourceLost("the peer is closed")
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            await asyncio.wait([self._reconnecting])
        if self._link is not None:
            self._link.close()
            self._link = None
        self._lose(self._lost)


async def _dial(metadata: wire.TcpMetadata, address: RegionAddress, deadline_s: float) -> socket.socket:
    """A socket, connected and welcomed. Raises SourceLost, SourceTimeout or SourceRefused."""
    loop = asyncio.get_running_loop()
    sock: socket.socket | None = None
    try:
        async with asyncio.timeout(deadline_s):
            family, target = await _resolve(metadata.host, metadata.port)
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            await loop.sock_connect(sock, target)
            await loop.sock_sendall(
                sock, wire.HELLO.pack(wire.MAGIC, wire.VERSION, metadata.incarnation, address.region)
            )
            welcome = b""
            while len(welcome) < wire.WELCOME.size:
                more = await loop.sock_recv(sock, wire.WELCOME.size - len(welcome))
                if not more:
                    raise SourceLost("the peer closed the connection while connecting (it may be at its limit)")
                welcome += more
            _check_welcome(welcome, address)
            connected, sock = sock, None
            return connected
    except TimeoutError:
        raise SourceTimeout(f"the peer did not answer within {deadline_s:g} s") from None
    except OSError as error:
        raise SourceLost(f"cannot connect to {metadata.host} port {metadata.port}: {error}") from error
    finally:
        if sock is not None:
            sock.close()


async def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    # an address needs no resolver, whose thread would stay with the loop
    numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=numeric)
    except socket.gaierror:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return found[0][0], found[0][4]


def _check_welcome(welcome: bytes, address: RegionAddress) -> None:
    magic, version, status, num_bytes = wire.WELCOME.unpack(welcome)
    if magic != wire.MAGIC:
        raise SourceRefused("what answers at the peer's address is no kvkin transport")
    if version != wire.VERSION or status == wire.WRONG_VERSION:
        raise SourceRefused(f"the peer speaks tcp protocol {version}, we speak {wire.VERSION}")
    if status != wire.OK:
        raise SourceRefused(wire.STATUS_TEXT.get(status, f"the peer answered with status {status}"))
    if num_bytes != address.num_bytes:
        raise SourceRefused(f"the peer's region has {num_bytes} bytes, its address says {address.num_bytes}")
