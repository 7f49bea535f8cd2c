"""MessagePack codecs of the three message families, with size limits; every process uses exactly these.

A frame that is too long, not MessagePack, of an unknown type or with a wrong field raises ProtocolError naming what is wrong;
whoever received it answers with an error and goes on.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from kvkin.kv.errors import ProtocolError
from kvkin.transport.messages import ClientReply, ClientRequest
from kvkin.transport.node_messages import NodeToRouter, RouterToNode
from kvkin.transport.stream_messages import ConsumerToHolder, HolderToConsumer

MAX_FRAME_BYTES = 64 << 20

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


T = TypeVar("T")


class Codec(Generic[T]):
    """Decodes one family of messages."""

    def __init__(self, family: Any, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder = msgspec.msgpack.Decoder(family)
        self.max_bytes = max_bytes

    def decode(self, frame: bytes) -> T:
        if len(frame) > self.max_bytes:
            raise ProtocolError(f"message of {len(frame)} bytes (allowed: up to {self.max_bytes})")
        try:
            message: T = self._decoder.decode(frame)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ProtocolError(f"unreadable message: {error}") from None
        return message


def peek_id(frame: bytes) -> str:
    """The ``id`` of a client message that could not be decoded, so that its error reaches the right request; else empty."""
    try:
        raw = msgspec.msgpack.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return ""
    found = raw.get("id", "") if isinstance(raw, dict) else ""
    return found if isinstance(found, str) and len(found) <= 256 else ""


def client_requests(max_bytes: int = MAX_FRAME_BYTES) -> Codec[ClientRequest]:
    return Codec(ClientRequest, max_bytes)


def client_replies() -> Codec[ClientReply]:
    return Codec(ClientReply)


def node_to_router() -> Codec[NodeToRouter]:
    return Codec(NodeToRouter)


def router_to_node() -> Codec[RouterToNode]:
    return Codec(RouterToNode)


def consumer_to_holder() -> Codec[ConsumerToHolder]:
    return Codec(ConsumerToHolder)


def holder_to_consumer() -> Codec[HolderToConsumer]:
    return Codec(HolderToConsumer)
