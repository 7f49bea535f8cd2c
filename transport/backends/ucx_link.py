"""A link of the ``ucx`` backend: one pulling agent, connected to one peer, with the pieces in flight on it.

On a network, posts return at once and the worker thread (``ucx_worker.py``) posts and polls. On shared memory nothing is
ever in flight: the copy runs inside the post, without the GIL. Handing such a pull to a thread and back costs more than
a small copy takes, and many times more on a busy machine; so there the event loop itself posts, one piece a turn, and
the thread only opens and ends links.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvkin.kv.errors import KvkinError, LocalTransportError, SourceError, SourceLost
from kvkin.transport.backends.base import PullTransfer, call_on_loop
from kvkin.transport.backends.nixl import NixlAgent
from kvkin.transport.data_plane import Copy

PIECE_BYTES = 16 << 20
PIECE_COPIES = 64
"""A pull is posted in pieces of this size, one or two milliseconds of copying on shared memory: what bounds the time until a
cancel, a deadline or whatever else the loop has to do is seen."""
LEARN_BYTES = 64 << 10
"""A post of at least so much tells whether the link is shared memory."""
WINDOW = 4
"""Pieces in flight per link: enough to fill a network, few enough that an abandoned pull ends soon."""
DRAIN_S = 0.5
"""How long a link that is closed waits for the pieces in flight. Where UCX emulates READ, the *source's* process can abort
with an assertion in UCX if its consumer's endpoint goes away in the middle."""

Piece = tuple[NDArray[np.uint64], NDArray[np.uint64]]
"""Local and remote rows, ``(copies, 3)``: address, bytes, device 0."""


def make_pieces(copies: Sequence[Copy], remote_base: int, local_base: int) -> deque[Piece]:
    """Cut copies into pieces of at most ``PIECE_BYTES`` and ``PIECE_COPIES`` each."""
    pieces: deque[Piece] = deque()
    local: list[tuple[int, int, int]] = []
    remote: list[tuple[int, int, int]] = []
    room = PIECE_BYTES
    for copy in copies:
        done = 0
        while done < copy.num_bytes:
            size = min(copy.num_bytes - done, room)
            local.append((local_base + copy.local_offset + done, size, 0))
            remote.append((remote_base + copy.remote_offset + done, size, 0))
            done, room = done + size, room - size
            if room == 0 or len(local) == PIECE_COPIES:
                pieces.append((np.array(local, dtype=np.uint64), np.array(remote, dtype=np.uint64)))
                local, remote, room = [], [], PIECE_BYTES
    if local:
        pieces.append((np.array(local, dtype=np.uint64), np.array(remote, dtype=np.uint64)))
    return pieces


class Job:
    """One pull: pieces to post and pieces in flight. Worker thread only, but for ``transfer``, which the loop owns."""

    def __init__(self, transfer: PullTransfer, pieces: deque[Piece]) -> None:
        self.transfer, self.pieces = transfer, pieces
        self.in_flight = 0
        self.aborted = False


class Link:
    """A pulling agent with one remote agent, driven by the worker thread.

    The lock serializes the agent, which is not thread-safe: the loop only ever tries to take it.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_down: Callable[[KvkinError], None], wake: Callable[[], None]
    ) -> None:
        self._loop, self._on_down, self._wake = loop, on_down, wake
        self._lock = threading.Lock()
        self._agent: NixlAgent | None = None
        self._remote = ""
        self._jobs: deque[Job] = deque()
        self._posted: list[tuple[int, Job]] = []
        self._ended: list[Job] = []
        self._closing: KvkinError | None = None
        self._drained_by_s = 0.0
        self._opened = False
        self.asynchronous = False
        """Whether posts return before the bytes are there, as on a network: then the loop need not try."""
        self._down: KvkinError | None = None

    # on the event loop

    def try_now(self, job: Job) -> bool | None:
        """Post the job's next piece right here, if the worker has nothing to do with this link.

        True: the piece is done. False: it is in flight, and the worker takes over the job. None: nothing happened.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if self._agent is None or self._jobs:
                return None
            handle, done = self._agent.read(self._remote, *job.pieces[0])
            job.pieces.popleft()
            if done:
                self._agent.release(handle)
            else:
                self.asynchronous = True
                job.in_flight = 1
                self._posted.append((handle, job))
                self._jobs.append(job)
                self._wake()
            return done
        except KvkinError:
            return None  # the worker meets the same error and tears the link down
        finally:
            self._lock.release()

    # on the worker thread

    @property
    def busy(self) -> bool:
        return bool(self._jobs) or self._closing is not None

    @property
    def only_quarantined(self) -> bool:
        return all(job.aborted for job in list(self._jobs))

    def open(self, name: str, loopback_only: bool, buffers: Sequence[NDArray[np.uint8]], metadata: bytes) -> None:
        """Make the agent and load the peer's metadata. Reports a failure through ``on_down``."""
        if self._down is not None:
            return
        try:
            with self._lock:
                self._agent = NixlAgent(name, progress=False, loopback_only=loopback_only)
                for buffer in buffers:
                    self._agent.register(buffer)
                self._remote = self._agent.add_remote(metadata)
                self._opened = True
        except KvkinError as error:
            self.tear_down(error)

    def start(self, job: Job) -> None:
        if self._closing is not None:
            call_on_loop(self._loop, _fail_settled, job.transfer, _as_source_error(self._closing))
            return
        if self._down is not None:
            # while connecting, the caller learns what is wrong on this side; a pull only that its source is lost
            error = _as_source_error(self._down) if self._opened else self._down
            call_on_loop(self._loop, _fail_settled, job.transfer, error)
            return
        with self._lock:
            self._jobs.append(job)

    def abort(self, transfer: PullTransfer, still_writing: Callable[[PullTransfer], None]) -> None:
        """Post nothing more of it; it settles when the pieces in flight have ended, of which ``still_writing`` tells."""
        with self._lock:
            job = next((job for job in self._jobs if job.transfer is transfer), None)
            if job is None:
                return  # it ended while this was on its way
            job.aborted = True
            job.pieces.clear()
            if job.in_flight > 0:
                call_on_loop(self._loop, still_writing, transfer)
            else:
                self._jobs.remove(job)
                call_on_loop(self._loop, transfer.settle)

    def step(self) -> bool:
        """Look at the pieces in flight and post at most one. True if anything moved."""
        try:
            with self._lock:
                moved = self._agent is not None and self._advance(self._agent)
                drained = not self._posted or time.monotonic() >= self._drained_by_s
            # not under the lock: the loop wakes at once, and its next pull would find the lock taken
            while self._ended:
                job = self._ended.pop(0)
                call_on_loop(self._loop, job.transfer.settle if job.aborted else job.transfer.complete)
            if self._closing is not None and drained:
                self.tear_down(self._closing)
            return moved
        except Exception as error:  # noqa: BLE001 - whatever it is, this thread also serves other links
            self.tear_down(error if isinstance(error, KvkinError) else LocalTransportError(repr(error)))
            return True

    def _advance(self, agent: NixlAgent) -> bool:
        moved = False
        for handle, job in list(self._posted):
            if agent.poll(handle):
                self._end_piece(agent, handle, job)
                moved = True
        # strictly in the order of the pulls: the scheduler put the most urgent first
        ready = next((job for job in self._jobs if job.pieces), None)
        if ready is None or len(self._posted) >= WINDOW:
            return moved
        local, remote = ready.pieces.popleft()
        handle, done = agent.read(self._remote, local, remote)
        if int(local[:, 1].sum()) >= LEARN_BYTES:
            self.asynchronous = not done
        ready.in_flight += 1
        self._posted.append((handle, ready))
        if done:
            self._end_piece(agent, handle, ready)
        return True

    def _end_piece(self, agent: NixlAgent, handle: int, job: Job) -> None:
        self._posted.remove((handle, job))
        agent.release(handle)
        job.in_flight -= 1
        if job.in_flight == 0 and not job.pieces:
            self._jobs.remove(job)
            self._ended.append(job)

    def close(self, error: KvkinError) -> None:
        """Fail every pull now, and tear the endpoint down as soon as nothing is in flight, or after ``DRAIN_S``."""
        if self._down is not None or self._closing is not None:
            return
        self._closing, self._drained_by_s = error, time.monotonic() + DRAIN_S
        with self._lock:
            for job in list(self._jobs):
                job.aborted = True
                job.pieces.clear()
                if job.in_flight == 0:
                    self._jobs.remove(job)
                fail = _fail_unsettled if job.in_flight > 0 else _fail_settled
                call_on_loop(self._loop, fail, job.transfer, _as_source_error(error))

    def tear_down(self, error: KvkinError) -> None:
        """End the endpoint: all pulls fail with ``error`` and, once the agent is gone, settle. Idempotent."""
        if self._down is not None:
            return
        self._down, self._closing = error, None
        with self._lock:
            agent, self._agent = self._agent, None
            for handle, _ in self._posted:
                if agent is not None:
                    agent.release(handle)
            self._posted.clear()
            gone = agent is None or agent.close()
        failure = _as_source_error(error)
        for job in [*self._ended, *self._jobs]:
            # an agent that something still holds may still write: rather leak the destination than corrupt it
            call_on_loop(self._loop, _fail_settled if gone else _fail_unsettled, job.transfer, failure)
        self._jobs.clear()
        call_on_loop(self._loop, self._on_down, error)


def _as_source_error(error: KvkinError) -> KvkinError:
    return error if isinstance(error, SourceError) else SourceLost(str(error))


def _fail_settled(transfer: PullTransfer, error: KvkinError) -> None:
    transfer.fail(error, settled=True)


def _fail_unsettled(transfer: PullTransfer, error: KvkinError) -> None:
    transfer.fail(error, settled=False)
