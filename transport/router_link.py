"""A node's links to the routers: registration, snapshot, ordered holdings deltas, heartbeats, replies.

One DEALER socket per router. Whatever a node publishes is flushed before the reply that follows it, so a client that has its
answer hits what the answer left behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

import structlog
import zmq
import zmq.asyncio

from kvkin.kv.errors import ConfigError, ProtocolError
from kvkin.kv.provenance import Provenance
from kvkin.kv.store import BlockStore, Change
from kvkin.transport.codec import encode, router_to_node
from kvkin.transport.messages import NodeLoad
from kvkin.transport.node_messages import (
    Heartbeat,
    Holding,
    Holdings,
    Leave,
    NodeToRouter,
    Refused,
    Register,
    Registered,
    RouterToNode,
    SnapshotWanted,
)

log = structlog.get_logger()

SNAPSHOT_PART = 4096
"""Blocks per snapshot message: a large store neither blocks the loop nor makes one huge frame."""


class Advertiser:
    """Numbers what one router is told of the store: snapshots by epoch and part, deltas in order. Pure."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._epoch = 0
        self._sequence = 0

    def snapshot(self, blocks: Sequence[Change]) -> list[Holdings]:
        self._epoch, self._sequence = self._epoch + 1, 0
        parts = [blocks[start : start + SNAPSHOT_PART] for start in range(0, len(blocks), SNAPSHOT_PART)] or [[]]
        return [self._holdings(part, 0, number, number == len(parts) - 1) for number, part in enumerate(parts)]

    def delta(self, changes: Sequence[Change]) -> Holdings:
        self._sequence += 1
        return self._holdings(changes, self._sequence, 0, True)

    def _holdings(self, changes: Sequence[Change], sequence: int, part: int, last: bool) -> Holdings:
        numbers: dict[bytes, int] = {}
        provenances: list[Provenance] = []
        added: list[Holding] = []
        removed: list[tuple[bytes, int]] = []
        for change in changes:
            number = numbers.setdefault(change.provenance.key, len(provenances))
            if number == len(provenances):
                provenances.append(change.provenance)
            if change.kv_layers or change.e_layers:
                added.append(
                    Holding(change.key[0], change.parent, number, change.position, change.kv_layers, change.e_layers)
                )
            else:
                removed.append((change.key[0], number))
        return Holdings(
            self._incarnation,
            sequence,
            tuple(provenances),
            tuple(added),
            tuple(removed),
            epoch=self._epoch,
            part=part,
            last=last,
        )


class RouterLink:
    """The link to one router. ``run`` never returns by itself; it raises ConfigError if the router refuses the node."""

    def __init__(
        self,
        address: str,
        registration: Callable[[], Register],
        store: BlockStore,
        load: Callable[[], NodeLoad],
        on_message: Callable[[RouterLink, RouterToNode], None],
        context: zmq.asyncio.Context,
        heartbeat_s: float,
    ) -> None:
        self.address, self.registered, self.draining = address, asyncio.Event(), False
        self.heard_at = 0.0
        """When this router last said anything (``time.monotonic``)."""
        self._registration, self._store, self._load, self._on_message = registration, store, load, on_message
        self._heartbeat_s = heartbeat_s
        self._advertiser = Advertiser(registration().incarnation)
        self._codec = router_to_node()
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 200
        self._socket.reconnect_ivl_max = 1000
        self._socket.connect(address)

    async def run(self) -> None:
        beating = asyncio.create_task(self._beat())
        try:
            while True:
                try:
                    message = self._codec.decode(await self._socket.recv())
                except ProtocolError as error:
                    log.warning("unreadable message from the router", router=self.address, error=str(error))
                    continue
                self.heard_at = time.monotonic()
                self._handle(message)
        finally:
            beating.cancel()

    def send(self, message: NodeToRouter) -> None:
        self._socket.send(encode(message))

    def advertise(self, changes: Sequence[Change]) -> None:
        """Tell a registered router what changed; an unregistered one gets a snapshot later anyway."""
        if changes and self.registered.is_set():
            self.send(self._advertiser.delta(changes))

    def drain(self) -> None:
        """Take nothing new from now on; the router hears of it at once."""
        self.draining = True
        if self.registered.is_set():
            self._send_heartbeat()

    def close(self) -> None:
        """Say goodbye and close."""
        if self.registered.is_set():
            self.send(Leave(self._registration().incarnation))
        self._socket.close()

    def _handle(self, message: RouterToNode) -> None:
        match message:
            case Registered(router, _, _):
                log.info("registered", router=router, address=self.address)
                self.registered.set()
                self._send_snapshot()
            case SnapshotWanted(register):
                if register:
                    self.registered.clear()
                    self.send(self._registration())
                else:
                    self._send_snapshot()
            case Refused(code, why):
                raise ConfigError(f"nodes.{self._registration().node}", f"the router refuses this node ({code}): {why}")
            case _:
                self._on_message(self, message)

    def _send_heartbeat(self) -> None:
        self.send(Heartbeat(self._registration().incarnation, self._load(), self.draining))

    def _send_snapshot(self) -> None:
        for part in self._advertiser.snapshot(self._store.snapshot()):
            self.send(part)

    async def _beat(self) -> None:
        while True:
            if self.registered.is_set():
                self._send_heartbeat()
            else:
                self.send(self._registration())
            await asyncio.sleep(self._heartbeat_s)


class RouterLinks:
    """All routers of the cluster. Changes of the store are taken once and told to each."""

    def __init__(self, links: Iterable[RouterLink], store: BlockStore) -> None:
        self.links, self._store = list(links), store

    def flush(self) -> None:
        changes = self._store.take_changes()
        for link in self.links:
            link.advertise(changes)

    async def run(self) -> None:
        """Run all links and flush changes now and then; raises ConfigError when a router refuses the node."""
        async with asyncio.TaskGroup() as tasks:
            for link in self.links:
                tasks.create_task(link.run())
            tasks.create_task(self._flush_forever())

    async def _flush_forever(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            self.flush()

    def drain(self) -> None:
        for link in self.links:
            link.drain()

    def close(self) -> None:
        for link in self.links:
            link.close()
