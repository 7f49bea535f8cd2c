"""A lost holder leaves nothing behind at its consumers, even if it never comes back under the same address."""

from __future__ import annotations

import asyncio

import pytest
import zmq
import zmq.asyncio

from kvkin.kv.errors import SourceLost
from kvkin.transport.holder_link import HolderLinks
from kvkin.transport.stream_messages import StreamLost

DEADLINE_S = 20.0


async def test_lost_link_is_closed_without_another_request() -> None:
    context = zmq.asyncio.Context()
    holder = context.socket(zmq.ROUTER)
    port = holder.bind_to_random_port("tcp://127.0.0.1")
    links = HolderLinks(context)
    try:
        link = links.get("prefill-0", f"tcp://127.0.0.1:{port}")
        assert links.get("prefill-0", f"tcp://127.0.0.1:{port}") is link
        inbox = link.subscribe("stream")
        link.post(StreamLost("stream", "hello", "any message will do"))  # type: ignore[arg-type]
        await asyncio.wait_for(holder.recv_multipart(), DEADLINE_S)
        holder.close(linger=0)
        assert isinstance(await asyncio.wait_for(inbox.get(), DEADLINE_S), StreamLost)
        assert link.lost
        assert len(links) == 0
        with pytest.raises(SourceLost):
            await link.peer(None, None, deadline_s=1.0)  # type: ignore[arg-type]
        link.post(StreamLost("stream", "late", "is nobody's"))  # type: ignore[arg-type]
        async with asyncio.timeout(DEADLINE_S):
            await links.close()
        assert link._socket.closed
        assert link._monitor.closed
    finally:
        holder.close(linger=0)
        await links.close()
        context.destroy(linger=0)


async def test_a_holder_that_died_before_the_first_stream_is_lost_at_once() -> None:
    """Nobody listens any more where the plan says: the next plan must not wait for the time that opening a stream may take."""
    context, dead = zmq.asyncio.Context(), zmq.asyncio.Context()
    gone = dead.socket(zmq.ROUTER)
    address = f"tcp://127.0.0.1:{gone.bind_to_random_port('tcp://127.0.0.1')}"
    dead.destroy(linger=0)
    links = HolderLinks(context)
    inbox = links.get("prefill-0", address).subscribe("stream")
    lost = await asyncio.wait_for(inbox.get(), 10)
    assert isinstance(lost, StreamLost)
    assert "cannot be connected to" in lost.message
    assert len(links) == 0
    await links.close()
    context.destroy(linger=0)
