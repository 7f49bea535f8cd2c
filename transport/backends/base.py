"""What the backends share: the life of one pull, the counters of a transport, bounds checks.

Everything here runs on the event loop of the node. Backends with threads report to it through :func:`call_on_loop`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkin.kv.errors import Cancelled, KvkinError, LocalTransportError, SourceTimeout
from kvkin.transport.data_plane import Copy


class TransportBase:
    """Counters and the region table of one endpoint (see the contract in ``data_plane.py``)."""

    def __init__(self) -> None:
        self.pulled_bytes = 0
        self.quarantined_bytes = 0
        self.regions: dict[int, NDArray[np.uint8]] = {}
        self.closed = False
        self._next_region = 0

    def add_region(self, buffer: NDArray[np.uint8]) -> int:
        """Number a buffer. Raises LocalTransportError where the buffer cannot be registered or the endpoint is closed."""
        if self.closed:
            raise LocalTransportError("the transport is closed")
        if buffer.ndim != 1 or buffer.dtype != np.uint8 or not buffer.flags.c_contiguous or not buffer.flags.writeable:
            raise LocalTransportError("a region is 1-dimensional contiguous writeable uint8 memory")
        if buffer.size == 0:
            raise LocalTransportError("a region of 0 bytes cannot be registered")
        region, self._next_region = self._next_region, self._next_region + 1
        self.regions[region] = buffer
        return region

    def region_buffer(self, region: int) -> NDArray[np.uint8]:
        """Raises LocalTransportError for an unknown region."""
        buffer = self.regions.get(region)
        if buffer is None:
            raise LocalTransportError(f"region {region} is not registered here (known: {sorted(self.regions)})")
        return buffer


class PullTransfer:
    """One pull (the contract's ``Transfer``): an outcome that is decided once, and ``settled``.

    ``abort`` is called when the deadline passed or the awaiting task was cancelled: the backend then makes sure that no
    more byte lands and calls :meth:`settle`. Until that, the destination counts as quarantined.
    """

    def __init__(
        self, owner: TransportBase, num_bytes: int, deadline_s: float, abort: Callable[[PullTransfer], None]
    ) -> None:
        self.num_bytes = num_bytes
        self.failed = False
        self.decided = False
        """Whether ``wait`` would return or raise at once."""
        self.on_settled: Callable[[PullTransfer], object] | None = None
        self._owner, self._abort, self._deadline_s = owner, abort, deadline_s
        self._loop = asyncio.get_running_loop()
        self._error: KvkinError | None = None
        self._is_settled = False
        # one future for each one who waits: a caller that gives up waiting cancels its own and nobody else's
        self._deciding: list[asyncio.Future[None]] = []
        self._settling: list[asyncio.Future[None]] = []
        self._timer = self._loop.call_later(deadline_s, self._timed_out)

    @property
    def settled(self) -> asyncio.Future[None]:
        future = self._loop.create_future()
        if self._is_settled:
            future.set_result(None)
        else:
            self._settling.append(future)
        return future

    async def wait(self) -> None:
        if self.decided:
            # whoever pulls in a loop must let other tasks run in between
            await asyncio.sleep(0)
        else:
            future = self._loop.create_future()
            self._deciding.append(future)
            try:
                await future
            except asyncio.CancelledError:
                self._give_up(Cancelled("the pull was abandoned"))
                raise
        if self._error is not None:
            raise self._error

    def complete(self) -> None:
        """All bytes are there. Comes too late after a failure: then it only ends the quarantine."""
        if not self.decided:
            self._owner.pulled_bytes += self.num_bytes
            self._decide(None)
        self.settle()

    def fail(self, error: KvkinError, *, settled: bool) -> None:
        """The backend lost it. ``settled`` False leaves the destination quarantined until :meth:`settle`."""
        if not self.decided:
            self.failed = True
            if not self._is_settled:
                self._owner.quarantined_bytes += self.num_bytes
            self._decide(error)
        if settled:
            self.settle()

    def settle(self) -> None:
        """No more byte can land. Idempotent."""
        if not self._is_settled:
            self._is_settled = True
            if self.failed:
                self._owner.quarantined_bytes -= self.num_bytes
            if self.on_settled is not None:
                self.on_settled(self)
            _wake(self._settling)

    def _decide(self, error: KvkinError | None) -> None:
        self.decided, self._error = True, error
        self._timer.cancel()
        _wake(self._deciding)

    def _timed_out(self) -> None:
        self._give_up(SourceTimeout(f"{self.num_bytes} bytes did not arrive within {self._deadline_s:g} s"))

    def _give_up(self, error: KvkinError) -> None:
        if not self.decided:
            self.fail(error, settled=False)
            self._abort(self)


def _wake(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
    futures.clear()


def check_copies(copies: Sequence[Copy], remote_bytes: int, local_bytes: int) -> list[Copy]:
    """The copies without empty ones and with neighbours merged. Raises ValueError for a copy outside of either region."""
    merged: list[Copy] = []
    for copy in copies:
        if min(copy.remote_offset, copy.local_offset, copy.num_bytes) < 0:
            raise ValueError(f"negative offset or size: {copy}")
        if copy.remote_offset + copy.num_bytes > remote_bytes:
            raise ValueError(f"{copy} ends outside of the peer's region of {remote_bytes} bytes")
        if copy.local_offset + copy.num_bytes > local_bytes:
            raise ValueError(f"{copy} ends outside of the local region of {local_bytes} bytes")
        if copy.num_bytes == 0:
            continue
        if merged and _continues(merged[-1], copy):
            last = merged.pop()
            copy = Copy(last.remote_offset, last.local_offset, last.num_bytes + copy.num_bytes)
        merged.append(copy)
    return merged


def _continues(last: Copy, copy: Copy) -> bool:
    return (
        last.remote_offset + last.num_bytes == copy.remote_offset
        and last.local_offset + last.num_bytes == copy.local_offset
    )


def call_on_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> None:
    """From a thread: run ``function`` on the loop. A loop that is closed already has nobody left to tell."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise


async def join_threads(threads: Sequence[threading.Thread]) -> None:
    """Wait for threads that are about to end without blocking the loop (and without its executor, which stays)."""
    loop = asyncio.get_running_loop()
    joined: asyncio.Future[None] = loop.create_future()

    def join() -> None:
        for thread in threads:
            thread.join()
        call_on_loop(loop, joined.set_result, None)

    waiter = threading.Thread(target=join, name="kvkin-join", daemon=True)
    waiter.start()
    await asyncio.shield(joined)
    waiter.join()
