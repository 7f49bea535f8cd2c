"""A consumer's link to one holder: the DEALER socket, the streams that listen on it, the data-plane peer.

Kept per holder address and reused by all requests. Loss of the holder (killed: reset connection, or a refused one; frozen: ZMTP
heartbeats unanswered) reaches every open stream as ``StreamLost`` and closes the link with all that belongs to it, as the holder may never
come back, or under another address; the next request makes a new link, so a replaced holder just works.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from kvkin.kv.errors import ProtocolError, SourceLost
from kvkin.transport.codec import encode, holder_to_consumer
from kvkin.transport.data_plane import Peer
from kvkin.transport.memory import KVMemory
from kvkin.transport.stream_messages import ConsumerToHolder, HolderToConsumer, StreamLost, StreamOpened

log = structlog.get_logger()

WATCH_MS = 1000
# A holder listens before any plan names it: whoever cannot connect to it is too late, and ZeroMQ would try for ever.
ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED


class HolderLink:
    """Link to the holder ``node`` at ``address``. ``lost`` is set for good when the connection breaks."""

    def __init__(
        self, node: str, address: str, context: zmq.asyncio.Context, on_lost: Callable[[HolderLink], None]
    ) -> None:
        """``on_lost`` is called once, when the connection breaks: whoever owns the link closes it then."""
        self.node, self.address, self.lost = node, address, False
        self._on_lost = on_lost
        self._codec = holder_to_consumer()
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.heartbeat_ivl, self._socket.heartbeat_timeout = 1000, 3000
        self._monitor = self._socket.get_monitor_socket(ENDS)
        self._socket.connect(address)
        self._inboxes: dict[str, asyncio.Queue[HolderToConsumer]] = {}
        self._peers: dict[str, Peer] = {}
        self._connecting = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()
        self.spawn(self._listen())
        self.spawn(self._watch())

    def subscribe(self, stream_id: str) -> asyncio.Queue[HolderToConsumer]:
        inbox: asyncio.Queue[HolderToConsumer] = asyncio.Queue()
        self._inboxes[stream_id] = inbox
        if self.lost:
            inbox.put_nowait(StreamLost(stream_id, "source_lost", "the connection broke"))
        return inbox

    def unsubscribe(self, stream_id: str) -> None:
        self._inboxes.pop(stream_id, None)

    def post(self, message: ConsumerToHolder) -> None:
        """Send without waiting; a holder that is gone shows as silence or as ``StreamLost``."""
        if not self.lost:
            self._socket.send(encode(message))

    async def peer(self, opened: StreamOpened, memory: KVMemory, *, deadline_s: float) -> Peer:
        """The data-plane connection to the holder's incarnation, made once. Raises SourceError."""
        async with self._connecting:
            if self.lost:  # a connection made now would be nobody's to close
                raise SourceLost(f"{self.node}: the connection broke")
            peer = self._peers.get(opened.incarnation)
            if peer is None:
                peer = await memory.transport.connect(opened.address, memory.region, deadline_s=deadline_s)
                self._peers[opened.incarnation] = peer
            return peer

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Close socket and data-plane peers; streams in flight fail with SourceLost."""
        self._lose("the link was closed")
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        async with self._connecting:
            for peer in self._peers.values():
                await peer.close()
            self._peers.clear()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    async def _listen(self) -> None:
        while True:
            try:
                message = self._codec.decode(await self._socket.recv())
            except ProtocolError as error:
                log.warning("unreadable stream message", node=self.node, error=str(error))
                continue
            inbox = self._inboxes.get(message.stream_id)
            if inbox is not None:
                inbox.put_nowait(message)

    async def _watch(self) -> None:
        with contextlib.suppress(zmq.ZMQError):
            # a look now and then besides: a wake-up that the event loop missed must not keep a dead holder alive
            while not await self._monitor.poll(WATCH_MS):
                pass
            seen = await recv_monitor_message(self._monitor)
            refused = seen["event"] == zmq.EVENT_CONNECT_RETRIED
            why = (
                "it cannot be connected to (killed)"
                if refused
                else "the connection broke (killed, frozen or restarted)"
            )
            log.warning("lost the connection to a holder", node=self.node, address=self.address, why=why)
            self._lose(why)

    def _lose(self, why: str) -> None:
        if not self.lost:
            self.lost = True
            for stream_id, inbox in self._inboxes.items():
                inbox.put_nowait(StreamLost(stream_id, "source_lost", why))
            self._on_lost(self)


class HolderLinks:
    """All links of one node, by holder name and address; lost ones are closed at once and replaced on the next use."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._context = context
        self._links: dict[tuple[str, str], HolderLink] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._links)

    def get(self, node: str, address: str) -> HolderLink:
        link = self._links.get((node, address))
        if link is None:
            link = self._links[node, address] = HolderLink(node, address, self._context, self._retire)
        return link

    def _retire(self, link: HolderLink) -> None:
        if self._links.get((link.node, link.address)) is link:
            del self._links[link.node, link.address]
            task = asyncio.ensure_future(link.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        links = list(self._links.values())
        self._links.clear()
        await asyncio.gather(*(link.close() for link in links), *self._closing)
