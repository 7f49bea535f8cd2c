"""Backend ``inproc``: source and consumer live in one process (tests, ``kvkin ask --local``).

A pull is numpy copies, one piece a turn of the event loop. ``freeze`` plays a peer that hangs.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvkin.kv.errors import LocalTransportError, SourceLost, SourceRefused, SourceTimeout
from kvkin.transport.backends.base import PullTransfer, TransportBase, check_copies
from kvkin.transport.data_plane import Copy, RegionAddress

PIECE_BYTES = 1 << 20
"""Copied in one turn of the loop."""

_OPEN: dict[bytes, InprocTransport] = {}
"""Endpoints of this process by their key."""


class InprocTransport(TransportBase):
    """One endpoint; any other one of the same process reaches it through its address."""

    name = "inproc"

    def __init__(self) -> None:
        super().__init__()
        self._key = secrets.token_bytes(16)
        self._peers: set[InprocPeer] = set()
        self.readers: set[InprocPeer] = set()
        self.thawed = asyncio.Event()
        self.thawed.set()
        _OPEN[self._key] = self

    def register(self, buffer: NDArray[np.uint8]) -> int:
        return self.add_region(buffer)

    def address(self, region: int) -> RegionAddress:
        return RegionAddress(self.name, region, self.region_buffer(region).size, self._key)

    async def connect(self, address: RegionAddress, local_region: int, *, deadline_s: float) -> InprocPeer:
        if self.closed:
            raise LocalTransportError("the transport is closed")
        local = self.region_buffer(local_region)
        if address.backend != self.name:
            raise LocalTransportError(f"address of backend {address.backend!r} given to {self.name!r}")
        source = _OPEN.get(address.metadata)
        if source is None:
            raise SourceLost("the peer's transport is closed")
        try:
            async with asyncio.timeout(deadline_s):
                await source.thawed.wait()
        except TimeoutError:
            raise SourceTimeout(f"the peer did not answer within {deadline_s:g} s") from None
        if source.closed:
            raise SourceLost("the peer's transport is closed")
        remote = source.regions.get(address.region)
        if remote is None or remote.size != address.num_bytes:
            raise SourceRefused(f"the peer has no region {address.region} of {address.num_bytes} bytes")
        peer = InprocPeer(self, source, remote, local)
        self._peers.add(peer)
        return peer

    def freeze(self) -> None:
        """Pulls from this endpoint hang from now on, as if its process were stopped."""
        self.thawed.clear()

    def thaw(self) -> None:
        """Go on with what hung."""
        self.thawed.set()
        for reader in list(self.readers):
            reader.run()

    async def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        _OPEN.pop(self._key, None)
        for peer in list(self._peers):
            await peer.close()
        for reader in list(self.readers):
            reader.lost("the peer closed its transport")
        self.thawed.set()
        self.regions.clear()

    def forget(self, peer: InprocPeer) -> None:
        self._peers.discard(peer)


class InprocPeer:
    """Pulls from ``remote`` (a region of ``source``) into ``local``."""

    def __init__(
        self, owner: InprocTransport, source: InprocTransport, remote: NDArray[np.uint8], local: NDArray[np.uint8]
    ) -> None:
        self._owner, self._source, self._remote, self._local = owner, source, remote, local
        self._waiting: dict[PullTransfer, deque[Copy]] = {}
        self._running = False
        self._lost: str | None = None
        source.readers.add(self)

    def pull(self, copies: Sequence[Copy], *, deadline_s: float) -> PullTransfer:
        merged = check_copies(copies, self._remote.size, self._local.size)
        transfer = PullTransfer(self._owner, sum(copy.num_bytes for copy in merged), deadline_s, self._abort)
        if self._lost is not None:
            transfer.fail(SourceLost(self._lost), settled=True)
        elif not merged:
            transfer.complete()
        else:
            self._waiting[transfer] = deque(merged)
            self.run()
        return transfer

    def run(self) -> None:
        """Go on copying on the next turn of the loop, if there is anything to do."""
        if not self._running and self._waiting and self._source.thawed.is_set():
            self._running = True
            asyncio.get_running_loop().call_soon(self._copy_piece)

    def _copy_piece(self) -> None:
        self._running = False
        if not self._waiting or not self._source.thawed.is_set():
            return
        transfer, copies = next(iter(self._waiting.items()))
        remote, local, size = copies[0].remote_offset, copies[0].local_offset, min(copies[0].num_bytes, PIECE_BYTES)
        self._local[local : local + size] = self._remote[remote : remote + size]
        if size < copies[0].num_bytes:
            copies[0] = Copy(remote + size, local + size, copies[0].num_bytes - size)
        else:
            copies.popleft()
        if not copies:
            del self._waiting[transfer]
            transfer.complete()
        self.run()

    def lost(self, reason: str) -> None:
        """The source went away, or this peer was closed."""
        if self._lost is not None:
            return
        self._lost = reason
        self._source.readers.discard(self)
        self._owner.forget(self)
        while self._waiting:
            self._waiting.popitem()[0].fail(SourceLost(reason), settled=True)

    def _abort(self, transfer: PullTransfer) -> None:
        self._waiting.pop(transfer, None)
        transfer.settle()

    async def close(self) -> None:
        self.lost("the peer is closed")
