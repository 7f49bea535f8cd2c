"""Stream messages: a consumer asks a holder for the KV of some blocks; the data itself goes over the data plane.

The holder answers with a lease and slots; for a prefill that still runs it announces each layer of each chunk when its data
is visible. Leases are per (request, consumer, rank) and name the holder's incarnation (docs/design.md section 8).
"""

from __future__ import annotations

import msgspec

from kvkin.kv.lineage import Lineage
from kvkin.transport.data_plane import RegionAddress


class OpenStream(msgspec.Struct, frozen=True, tag="open_stream"):
    """Ask for blocks. ``stream_id`` is unique per consumer; version and digests are checked before anything else.

    ``blocks`` lie one after the other in the prompt from token ``first_position`` on; ``chunk_blocks`` is how many of them
    make one chunk. With an ``order_id`` the holder waits for that order if the blocks are not there yet.
    """

    version: int
    stream_id: str
    consumer: str
    rank: int
    layout_digest: bytes
    provenance: bytes
    blocks: tuple[bytes, ...]
    first_position: int
    kv_layers: tuple[int, ...]
    e_layer: int | None
    chunk_blocks: int
    order_id: str = ""
    wait_s: float = 0.0


class StreamOpened(msgspec.Struct, frozen=True, tag="stream_opened"):
    """The lease. ``kv_slots``/``e_slots`` are the slots of each block in order; ``num_slots`` and ``kv_bytes`` place them.

    ``ready`` lists the (chunk, layer) pairs that can be pulled now, layer -1 meaning E; None means all of them.
    """

    stream_id: str
    incarnation: str
    lease_s: float
    address: RegionAddress
    num_slots: int
    kv_bytes: int
    kv_slots: tuple[int, ...]
    e_slots: tuple[int, ...]
    generation: int
    lineage: Lineage
    ready: tuple[tuple[int, int], ...] | None = None


class StreamRefused(msgspec.Struct, frozen=True, tag="stream_refused"):
    stream_id: str
    code: str
    message: str


class LayerReady(msgspec.Struct, frozen=True, tag="layer_ready"):
    """Data of these (chunk, layer) pairs is visible (layer -1: E)."""

    stream_id: str
    ready: tuple[tuple[int, int], ...]


class StreamLost(msgspec.Struct, frozen=True, tag="stream_lost"):
    """The holder gives up: order aborted, blocks evicted, lease over. Pulled data that was not confirmed must not be used."""

    stream_id: str
    code: str
    message: str


class RenewLease(msgspec.Struct, frozen=True, tag="renew_lease"):
    stream_id: str


class LeaseRenewed(msgspec.Struct, frozen=True, tag="lease_renewed"):
    stream_id: str
    lease_s: float


class CloseStream(msgspec.Struct, frozen=True, tag="close_stream"):
    """Give the lease back. ``generation`` must still be the lease's, or the pulls did not count (``StreamClosed.valid``)."""

    stream_id: str
    generation: int


class StreamClosed(msgspec.Struct, frozen=True, tag="stream_closed"):
    stream_id: str
    valid: bool


ConsumerToHolder = OpenStream | RenewLease | CloseStream
HolderToConsumer = StreamOpened | StreamRefused | LayerReady | StreamLost | LeaseRenewed | StreamClosed
