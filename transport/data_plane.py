"""The KV data plane's contract: a transport moves bytes between registered memory regions (docs/design.md section 8).

Backends: ``ucx`` (NIXL over UCX, one-sided READ), ``tcp`` (plain sockets), ``inproc`` (tests). All pass
``tests/check_transport.py``. Layer streams (``streams.py``) decide what is pulled when; leases are theirs, too.
Runs in every node; methods are called on the node's event loop unless a docstring says otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray


class RegionAddress(msgspec.Struct, frozen=True):
    """What a peer needs to read a region: sent in the handshake. ``metadata`` is opaque to everyone but the backend."""

    backend: str
    region: int
    num_bytes: int
    metadata: bytes


class Copy(msgspec.Struct, frozen=True):
    """``num_bytes`` from ``remote_offset`` of the peer's region to ``local_offset`` of ours (bytes)."""

    remote_offset: int
    local_offset: int
    num_bytes: int


class Transfer(Protocol):
    """One pull in flight."""

    num_bytes: int

    async def wait(self) -> None:
        """Return once all bytes are in the local region.

        Raises SourceTimeout when the deadline passed, SourceLost when the peer died or disconnected. Cancelling the
        awaiting task abandons the transfer; either way ``settled`` says when the destination may be used again.
        """

    @property
    def settled(self) -> asyncio.Future[None]:
        """Done once no more byte can land in the destination (until then it is quarantined)."""
        ...


class Peer(Protocol):
    """A connection to one remote region."""

    def pull(self, copies: Sequence[Copy], *, deadline_s: float) -> Transfer:
        """Start reading ``copies`` now; at most ``deadline_s`` seconds. Bounds outside of either region raise ValueError.

        An empty list is a transfer that is done at once. Bytes count only when ``wait`` returned.
        """
        ...

    async def close(self) -> None:
        """Tear the endpoint down; every transfer in flight fails with SourceLost and settles."""


class Transport(Protocol):
    """One backend's endpoint in this process."""

    name: str
    pulled_bytes: int
    """Bytes of completed pulls, counted from the backend's own completions."""
    quarantined_bytes: int
    """Bytes of destinations of transfers that failed but may still write."""

    def register(self, buffer: NDArray[np.uint8]) -> int:
        """Register memory (1-d uint8, contiguous, owned by the caller until ``close``); returns the region's number."""
        ...

    def address(self, region: int) -> RegionAddress:
        """How peers reach ``region``."""
        ...

    async def connect(self, address: RegionAddress, local_region: int, *, deadline_s: float) -> Peer:
        """Connect to a peer's region for pulls into ``local_region``.

        Raises SourceLost or SourceTimeout if the peer is not there, SourceRefused if it speaks another protocol version,
        LocalTransportError if ``local_region`` is unknown or the backend does not fit.
        """
        ...

    async def close(self) -> None:
        """Close all peers and listeners, deregister all regions. Idempotent."""
