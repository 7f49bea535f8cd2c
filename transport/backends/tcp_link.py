"""One client connection of the ``tcp`` backend: a thread that asks for copies and receives them into place.

Requests are answered in order, and a few are sent ahead, so the wire never idles between two pulls and the most urgent
one is never slowed down by the next. An abandoned pull that is being received right now costs the connection: only so
nothing can land later. The peer then makes a new one for the other pulls.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvkin.kv.errors import KvkinError, SourceLost, SourceRefused
from kvkin.transport.backends import tcp_wire as wire
from kvkin.transport.backends.base import PullTransfer, call_on_loop
from kvkin.transport.backends.tcp_server import receive_exactly, receive_some
from kvkin.transport.data_plane import Copy

AHEAD_BYTES = 32 << 10
"""Requests sent before their turn. Far below the socket buffers: while both sides only send, neither would go on."""
DRAIN_BYTES = 1 << 20
"""An abandoned pull that was asked for and not begun is read into the void up to this size; a larger one costs the
connection."""


class Pull:
    """A transfer with what it takes; ``aborted`` is guarded by the lock of the link that holds it."""

    def __init__(self, transfer: PullTransfer, copies: Sequence[Copy], local: NDArray[np.uint8]) -> None:
        self.transfer = transfer
        self.aborted = False
        groups = [copies[first : first + wire.MAX_COPIES] for first in range(0, len(copies), wire.MAX_COPIES)]
        self.units = [Unit(self, group, local, index == len(groups) - 1) for index, group in enumerate(groups)]


class Unit:
    """One request of a pull."""

    def __init__(self, pull: Pull, copies: Sequence[Copy], local: NDArray[np.uint8], last: bool) -> None:
        self.pull, self.last = pull, last
        self.request = wire.encode_request(copies)
        self.num_bytes = sum(copy.num_bytes for copy in copies)
        memory = local.data
        self.views = [memory[copy.local_offset : copy.local_offset + copy.num_bytes] for copy in copies]


class Link:
    """Owns ``sock`` (connected, welcomed, blocking). ``on_down(self, error, restart)`` is called once, on the loop."""

    _numbers = itertools.count()

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        on_down: Callable[[Link, KvkinError, bool], None],
    ) -> None:
        self._sock, self._loop, self._on_down = sock, loop, on_down
        self._incoming: queue.SimpleQueue[Unit | None] = queue.SimpleQueue()
        self._sent: deque[Unit] = deque()
        self._ahead_bytes = 0
        self._lock = threading.Lock()
        self._current: Pull | None = None
        self._restart = False
        self._thread = threading.Thread(target=self._run, name=f"kvkin-tcp-pull-{next(self._numbers)}", daemon=True)
        self._thread.start()

    # called on the event loop

    def submit(self, unit: Unit) -> None:
        self._incoming.put(unit)

    def abort(self, pull: Pull) -> bool:
        """True if nothing of it can land any more; otherwise it settles with ``on_down`` or its completion."""
        with self._lock:
            pull.aborted = True
            if self._current is not pull:
                return True
            self._restart = True
            self._cut()
            return False

    def close(self) -> None:
        """End the thread; ``on_down`` follows."""
        self._incoming.put(None)
        self._cut()

    def unfinished(self) -> list[Unit]:
        """After ``on_down``: what was submitted and not received, in order."""
        units = list(self._sent)
        while not self._incoming.empty():
            unit = self._incoming.get_nowait()
            if unit is not None:
                units.append(unit)
        return units

    def join(self) -> None:
        """After ``on_down``: the thread has nothing left to do."""
        self._thread.join()

    def _cut(self) -> None:
        # not close: the number must not be reused while the thread is in a call on it
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    # runs on the thread

    def _run(self) -> None:
        error: KvkinError = SourceLost("the peer is closed")
        try:
            with self._sock:
                while self._send_ahead():
                    if not self._receive(self._sent[0]):
                        break
                    self._sent.popleft()
        except KvkinError as failure:
            error = failure
        except OSError as failure:
            error = SourceLost(f"the connection broke: {failure}")
        except Exception as failure:  # noqa: BLE001 - a bug of ours may cost this peer, not the node
            error = SourceLost(f"internal error: {failure!r}")
        call_on_loop(self._loop, self._on_down, self, error, self._restart)

    def _send_ahead(self) -> bool:
        """Ask for what waits, at least one unit. False when the link is closed."""
        while not self._sent or (self._ahead_bytes < AHEAD_BYTES and not self._incoming.empty()):
            unit = self._incoming.get()
            if unit is None:
                return False
            if unit.pull.aborted:
                continue
            self._sock.sendall(unit.request)
            self._sent.append(unit)
            self._ahead_bytes += len(unit.request)
        return True

    def _receive(self, unit: Unit) -> bool:
        """Receive one unit into place. False if the connection has to be given up for an abandoned pull."""
        with self._lock:
            aborted = unit.pull.aborted
            self._current = None if aborted else unit.pull
        if aborted and unit.num_bytes > DRAIN_BYTES:
            self._restart = True
            return False
        header = receive_exactly(self._sock, wire.REPLY.size)
        if header is None:
            raise SourceLost("the peer closed the connection")
        status, num_bytes = wire.REPLY.unpack(header)
        if status != wire.OK or num_bytes != unit.num_bytes:
            raise SourceRefused(wire.STATUS_TEXT.get(status, f"the peer answered with status {status}"))
        self._receive_into([memoryview(bytearray(unit.num_bytes))] if aborted else list(unit.views))
        self._ahead_bytes -= len(unit.request)
        with self._lock:
            self._current = None
        if unit.last and not aborted:
            call_on_loop(self._loop, unit.pull.transfer.complete)
        return True

    def _receive_into(self, views: list[memoryview]) -> None:
        first = 0
        while first < len(views):
            first = receive_some(self._sock, views, first)
            if not self._incoming.empty() and self._ahead_bytes < AHEAD_BYTES:
                self._peek_ahead()

    def _peek_ahead(self) -> None:
        # the queue has one reader, this thread: what is there now stays there
        unit = self._incoming.get_nowait()
        if unit is None:
            raise SourceLost("the peer is closed")
        if not unit.pull.aborted:
            self._sock.sendall(unit.request)
            self._sent.append(unit)
            self._ahead_bytes += len(unit.request)
