"""The serving side of the ``tcp`` backend: sends registered memory straight from where it lies.

One thread accepts, one per connection sends with blocking calls: 16 MiB are one system call, during which the node's event
loop and its compute go on. Nothing that a stranger sends can do more than end its own connection.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
import time
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from kvkin.transport.backends import tcp_wire as wire

HELLO_TIMEOUT_S = 5.0
"""A connection that has not said hello by then is closed."""
STALL_S = 30.0
"""A consumer that takes no byte for so long is cut off (it may be frozen: then it would hold its thread for ever)."""
SO_MAX_PACING_RATE = 47  # Linux, <asm-generic/socket.h>: Python's socket module does not name it


class TcpServer:
    """Listens from construction on; ``regions`` is the transport's live table."""

    _numbers = itertools.count()

    def __init__(
        self, host: str, port: int, incarnation: bytes, regions: Mapping[int, NDArray[np.uint8]], max_connections: int
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._incarnation, self._regions, self._max_connections = incarnation, regions, max_connections
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._closed = False
        self.max_bytes_per_s = 0
        """Pace of each new connection, kept by the kernel (0: as fast as it goes)."""
        self._name = f"kvkin-tcp-serve-{next(self._numbers)}"
        self._acceptor = threading.Thread(target=self._accept, name=self._name, daemon=True)
        self._acceptor.start()

    @property
    def connections(self) -> int:
        with self._lock:
            return len(self._connections)

    def close(self) -> list[threading.Thread]:
        """Stop listening and cut every connection. Returns the threads, which end at once."""
        with self._lock:
            self._closed = True
            connections = dict(self._connections)
        for sock in [self._listener, *connections]:
            # not close: the descriptor number must not be reused while a thread is still in a call on it
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        return [self._acceptor, *connections.values()]

    def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    sock, _ = self._listener.accept()
                except OSError:
                    with self._lock:
                        if self._closed:
                            return
                    # out of descriptors, or the client left while queued: neither may end the service
                    time.sleep(0.05)
                    continue
                with self._lock:
                    refused = self._closed or len(self._connections) >= self._max_connections
                    if not refused:
                        thread = threading.Thread(target=self._serve, args=(sock,), name=self._name, daemon=True)
                        self._connections[sock] = thread
                        thread.start()
                if refused:
                    sock.close()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(HELLO_TIMEOUT_S)
            region = self._welcome(sock)
            if region is not None:
                sock.settimeout(None)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                if self.max_bytes_per_s:
                    sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, self.max_bytes_per_s)
                sock.setsockopt(
                    socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", *divmod(int(STALL_S * 1e6), 10**6))
                )
                while self._answer(sock, region):
                    pass
        except OSError:
            pass  # the consumer left, stalled or was cut off by close: its own deadline tells it
        finally:
            with self._lock:
                del self._connections[sock]
            sock.close()

    def _welcome(self, sock: socket.socket) -> int | None:
        hello = receive_exactly(sock, wire.HELLO.size)
        if hello is None:
            return None
        magic, version, incarnation, region = wire.HELLO.unpack(hello)
        if magic != wire.MAGIC:
            return None
        buffer = self._regions.get(region)
        status = wire.OK
        if version != wire.VERSION:
            status = wire.WRONG_VERSION
        elif incarnation != self._incarnation:
            status = wire.REPLACED
        elif buffer is None:
            status = wire.NO_REGION
        size = buffer.size if buffer is not None and status == wire.OK else 0
        sock.sendall(wire.WELCOME.pack(wire.MAGIC, wire.VERSION, status, size))
        return int(region) if status == wire.OK else None

    def _answer(self, sock: socket.socket, region: int) -> bool:
        """Serve one request; False ends the connection."""
        header = receive_exactly(sock, wire.COUNT.size)
        if header is None:
            return False
        (count,) = wire.COUNT.unpack(header)
        body = receive_exactly(sock, count * wire.SPAN.size) if count <= wire.MAX_COPIES else None
        buffer = self._regions.get(region)
        spans = list(wire.SPAN.iter_unpack(body)) if body is not None else []
        if body is None or buffer is None or any(offset + size > buffer.size for offset, size in spans):
            sock.sendall(wire.REPLY.pack(wire.NO_REGION if buffer is None else wire.OUT_OF_BOUNDS, 0))
            return False
        memory = buffer.data
        reply = wire.REPLY.pack(wire.OK, sum(size for _, size in spans))
        send_all(sock, [memoryview(reply), *(memory[offset : offset + size] for offset, size in spans if size)])
        return True


def receive_exactly(sock: socket.socket, size: int) -> bytes | None:
    """``size`` bytes, or None if the connection ends before. For headers, not for payload."""
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            return None
        data += more
    return data


def send_all(sock: socket.socket, views: list[memoryview]) -> None:
    """Send every view, gathered into few system calls and without a copy."""
    first = 0
    while first < len(views):
        sent = sock.sendmsg(views[first : first + wire.GATHER])
        while first < len(views) and sent >= len(views[first]):
            sent -= len(views[first])
            first += 1
        if sent:
            views[first] = views[first][sent:]
