"""The links of one ``ucx`` transport, and the thread that polls what is in flight on them.

NIXL has nothing to await: somebody has to poll. One thread does it for all links. It sleeps on its command queue while nothing
is in flight and polls every 50 us otherwise, which beats busy polling where cores are few (an event loop cannot: its timers
have milliseconds).

On shared memory nothing is ever in flight: the copy runs inside the post, without the GIL. Handing such a pull to a thread
and back costs more than a small copy takes, and many times more on a busy machine; so there the event loop itself posts,
one piece a turn, and the thread only opens and ends links.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvkin.kv.errors import KvkinError, LocalTransportError, SourceError, SourceLost
from kvkin.transport.backends.base import PullTransfer, call_on_loop, join_threads
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
POLL_S = 50e-6
QUARANTINE_POLL_S = 2e-3

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
        return bool(self._jobs)

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
                try:
                    self._remote = self._agent.add_remote(metadata)
                except SourceLost:
                    # seen about once in a thousand with a process that had just been thawed; a dead one refuses again
                    self._remote = self._agent.add_remote(metadata)
                self._opened = True
        except KvkinError as error:
            self.tear_down(error)

    def start(self, job: Job) -> None:
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
            # not under the lock: the loop wakes at once, and its next pull would find the lock taken
            while self._ended:
                job = self._ended.pop(0)
                call_on_loop(self._loop, job.transfer.settle if job.aborted else job.transfer.complete)
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

    def tear_down(self, error: KvkinError) -> None:
        """End the endpoint: all pulls fail with ``error`` and, once the agent is gone, settle. Idempotent."""
        if self._down is not None:
            return
        self._down = error
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


def _nothing() -> None:
    pass


def _as_source_error(error: KvkinError) -> KvkinError:
    return error if isinstance(error, SourceError) else SourceLost(str(error))


def _fail_settled(transfer: PullTransfer, error: KvkinError) -> None:
    transfer.fail(error, settled=True)


def _fail_unsettled(transfer: PullTransfer, error: KvkinError) -> None:
    transfer.fail(error, settled=False)


class UcxWorker:
    """The thread with its command queue."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._links: list[Link] = []
        self._thread = threading.Thread(target=self._run, name=f"kvkin-ucx-{next(self._numbers)}", daemon=True)
        self._thread.start()

    def add(self, link: Link) -> None:
        """From the loop: drive this link from now on."""
        self._commands.put(lambda: self._links.append(link))

    def drop(self, link: Link) -> None:
        """From the loop: the link is torn down."""
        self._commands.put(lambda: self._links.remove(link) if link in self._links else None)

    def submit(self, command: Callable[[], None]) -> None:
        """From the loop: run this on the worker thread, in order."""
        self._commands.put(command)

    def wake(self) -> None:
        """From the loop: a link has something in flight that no command announced."""
        self._commands.put(_nothing)

    async def stop(self) -> None:
        """End the thread; links must be torn down before."""
        self._commands.put(None)
        await join_threads([self._thread])

    def _run(self) -> None:
        while True:
            busy = [link for link in self._links if link.busy]
            try:
                command = self._commands.get(block=not busy)
            except queue.Empty:
                pass
            else:
                if command is None:
                    return
                command()
                continue
            moved = False
            for link in busy:
                moved = link.step() or moved
            if not moved:
                time.sleep(QUARANTINE_POLL_S if all(link.only_quarantined for link in busy) else POLL_S)
