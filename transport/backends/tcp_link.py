"""One client connection of the ``tcp`` backend, driven by the event loop: asks for copies and receives them into place.

Requests are answered in order, and a few are sent ahead, so the wire never idles between two pulls and the most urgent
one is never slowed down by the next. Bytes land only while the loop runs :meth:`Link._readable`: a pull that is given up has
settled at once. What the source still sends for it is read into the void, or, if that is much, costs the connection.

Measured against a thread with blocking calls: as fast on an idle machine and on a busy one, and a small pull takes a third of
the time, for nobody has to be woken twice.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvkin.kv.errors import SourceError, SourceLost, SourceRefused
from kvkin.transport.backends import tcp_wire as wire
from kvkin.transport.backends.base import PullTransfer
from kvkin.transport.data_plane import Copy

AHEAD_BYTES = 32 << 10
"""Requests sent before their turn. Far below the socket buffers: while both sides only send, neither would go on."""
DRAIN_BYTES = 1 << 20
"""Bytes of an abandoned pull that are read into the void; more of them cost the connection."""
GATHER_BELOW_BYTES = 64 << 10
TURN_BYTES = 1 << 20
"""Received in one turn of the loop, a fraction of a millisecond of copying, before others have theirs."""


class Unit:
    """One request of a pull; most pulls need one."""

    def __init__(self, transfer: PullTransfer, copies: Sequence[Copy], local: NDArray[np.uint8], *, last: bool) -> None:
        self.transfer, self.last = transfer, last
        self.request = wire.encode_request(copies)
        self.num_bytes = sum(copy.num_bytes for copy in copies)
        memory = local.data
        self.views = [memory[copy.local_offset : copy.local_offset + copy.num_bytes] for copy in copies]

    @property
    def abandoned(self) -> bool:
        return self.transfer.decided


def make_units(transfer: PullTransfer, copies: Sequence[Copy], local: NDArray[np.uint8]) -> list[Unit]:
    """Cut a pull into requests of at most ``wire.MAX_COPIES``."""
    groups = [copies[first : first + wire.MAX_COPIES] for first in range(0, len(copies), wire.MAX_COPIES)]
    return [Unit(transfer, group, local, last=group is groups[-1]) for group in groups]


class Link:
    """Owns ``sock`` (connected, welcomed, not blocking).

    ``on_down(error)`` is called once, unless :meth:`close` came first; without an error the connection was given up for an
    abandoned pull, and ``unfinished`` has to be asked for again.
    """

    def __init__(self, sock: socket.socket, on_down: Callable[[SourceError | None], None]) -> None:
        self._sock, self._on_down = sock, on_down
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Unit] = deque()
        self._sent: deque[Unit] = deque()
        self._ahead_bytes = 0
        self._outgoing = bytearray()
        self._header = bytearray()
        self._views: list[memoryview] = []
        self._first = 0
        self._remaining = 0
        self._closed = False
        self._loop.add_reader(sock, self._readable)

    @property
    def unfinished(self) -> list[Unit]:
        """What was submitted, not received and not abandoned, in order."""
        return [unit for unit in (*self._sent, *self._waiting) if not unit.abandoned]

    def submit(self, unit: Unit) -> None:
        self._waiting.append(unit)
        self._send_ahead()

    def give_up(self) -> None:
        """A pull was abandoned: if it is the one being received, decide what to do with the rest of it."""
        if self._sent and self._header and self._sent[0].abandoned:
            self._skip_rest()

    def close(self) -> None:
        """Idempotent; nothing lands any more."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()
            self._views.clear()

    def _down(self, error: SourceError | None) -> None:
        if not self._closed:
            self.close()
            self._on_down(error)

    def _send_ahead(self) -> None:
        """Ask for what waits: at least for one unit, and for more while their requests are small."""
        while self._waiting and (not self._sent or self._ahead_bytes < AHEAD_BYTES):
            unit = self._waiting.popleft()
            if not unit.abandoned:
                self._sent.append(unit)
                self._ahead_bytes += len(unit.request)
                self._outgoing += unit.request
        if self._outgoing:
            self._writable()

    def _writable(self) -> None:
        try:
            sent = self._sock.send(self._outgoing)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._down(SourceLost(f"the connection broke: {error}"))
            return
        del self._outgoing[:sent]
        if self._outgoing:
            self._loop.add_writer(self._sock, self._writable)
        else:
            self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        try:
            turn = TURN_BYTES
            while turn > 0 and not self._closed:
                turn -= self._receive_payload(turn) if self._remaining else self._receive_header()
        except BlockingIOError:
            return
        except SourceError as error:
            self._down(error)
        except OSError as error:
            self._down(SourceLost(f"the connection broke: {error}"))

    def _receive_header(self) -> int:
        received = self._sock.recv(wire.REPLY.size - len(self._header))
        if not received:
            raise SourceLost("the peer closed the connection")
        if not self._sent:
            raise SourceRefused("the peer sends what nobody asked for")
        self._header += received
        if len(self._header) == wire.REPLY.size:
            status, num_bytes = wire.REPLY.unpack(self._header)
            unit = self._sent[0]
            if status != wire.OK or num_bytes != unit.num_bytes:
                raise SourceRefused(wire.STATUS_TEXT.get(status, f"the peer answered with status {status}"))
            self._views, self._first, self._remaining = list(unit.views), 0, num_bytes
            if unit.abandoned:
                self._skip_rest()
        return len(received)

    def _skip_rest(self) -> None:
        if self._remaining > DRAIN_BYTES:
            self._down(None)
        else:
            self._views, self._first = [memoryview(bytearray(self._remaining))], 0

    def _receive_payload(self, turn: int) -> int:
        """Receive up to about ``turn`` bytes into place. This is the loop that bandwidth depends on."""
        views, first, left = self._views, self._first, turn
        receive, receive_many = self._sock.recv_into, self._sock.recvmsg_into
        try:
            while self._remaining and left > 0:
                view = views[first]
                # a large view fills from many calls, small ones are gathered
                many = len(view) < GATHER_BELOW_BYTES and first + 1 < len(views)
                received = receive_many(views[first : first + wire.GATHER])[0] if many else receive(view)
                if received == 0:
                    raise SourceLost("the peer closed the connection")
                left -= received
                self._remaining -= received
                while first < len(views) and received >= len(views[first]):
                    received -= len(views[first])
                    first += 1
                if received:
                    views[first] = views[first][received:]
        finally:
            self._first = first
        if self._remaining == 0:
            self._end_unit()
        return turn - left

    def _end_unit(self) -> None:
        unit = self._sent.popleft()
        self._ahead_bytes -= len(unit.request)
        self._header.clear()
        self._views.clear()
        if unit.last:
            unit.transfer.complete()
        self._send_ahead()
