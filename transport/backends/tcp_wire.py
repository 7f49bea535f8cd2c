"""The ``tcp`` backend's wire format, version 1: integers big-endian, no compression, no padding.

::

    client -> server   hello    magic "kvkinTCP", u16 version, 16 bytes incarnation, u32 region
    server -> client   welcome  magic "kvkinTCP", u16 version, u8 status, u64 bytes of the region
    client -> server   request  u32 count, then count x (u64 offset, u64 bytes)
    server -> client   reply    u8 status, u64 bytes; if the status is OK the bytes of all copies in order

Requests may be sent ahead; replies come in their order. After any status but OK the server closes the connection.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from kvkin.kv.errors import SourceRefused
from kvkin.transport.data_plane import Copy

MAGIC = b"kvkinTCP"
VERSION = 1
HELLO = struct.Struct("!8sH16sI")
WELCOME = struct.Struct("!8sHBQ")
COUNT = struct.Struct("!I")
SPAN = struct.Struct("!QQ")
REPLY = struct.Struct("!BQ")

OK, WRONG_VERSION, REPLACED, NO_REGION, OUT_OF_BOUNDS = range(5)
STATUS_TEXT = {
    WRONG_VERSION: "the peer speaks another protocol version",
    REPLACED: "the peer at this address was replaced",
    NO_REGION: "the peer does not serve that region",
    OUT_OF_BOUNDS: "the peer says that the request is out of bounds",
}

MAX_COPIES = 1024
"""Copies in one request; longer pulls take several."""
GATHER = 64
"""Pieces of memory in one system call."""


class TcpMetadata(msgspec.Struct, frozen=True, array_like=True):
    """The opaque part of an address. New fields go to the end with a default."""

    version: int
    incarnation: bytes
    host: str
    port: int


def decode_metadata(metadata: bytes) -> TcpMetadata:
    """Raises SourceRefused where it cannot be read or another version wrote it."""
    try:
        decoded = msgspec.msgpack.decode(metadata, type=TcpMetadata)
    except msgspec.DecodeError as error:
        raise SourceRefused(f"the peer's address cannot be read: {error}") from error
    if decoded.version != VERSION:
        raise SourceRefused(f"the peer speaks tcp protocol {decoded.version}, we speak {VERSION}")
    return decoded


def encode_request(copies: Sequence[Copy]) -> bytes:
    """One request for the remote side of ``copies`` (at most ``MAX_COPIES``)."""
    return COUNT.pack(len(copies)) + b"".join(SPAN.pack(copy.remote_offset, copy.num_bytes) for copy in copies)
