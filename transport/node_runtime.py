"""What every node that holds KV has: transport, KV memory, stream server, links to the routers, a clean start and stop.

``prefill_nodes/node.py`` and ``decode_nodes/node.py`` put their core on top of it.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog
import zmq
import zmq.asyncio

from kvkin.kv.errors import ConfigError
from kvkin.kv.layout import KVLayout
from kvkin.kv.lineage import Lineage
from kvkin.transport.backends import open_transport
from kvkin.transport.data_plane import Transport
from kvkin.transport.holder import HolderSocket, StreamServer
from kvkin.transport.holder_link import HolderLinks
from kvkin.transport.memory import KVMemory
from kvkin.transport.messages import PROTOCOL_VERSION, NodeLoad
from kvkin.transport.node_messages import Register, RouterToNode, ServedModel
from kvkin.transport.router_link import RouterLink, RouterLinks

log = structlog.get_logger()


class CheckSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Checks for drift on a decode node, as ``configs.schema.DriftConfig``; ``record`` is the folder for prompts (None: not kept)."""

    idle_s: float = 0.5
    max_pending: int = 16
    record: Path | None = None
    record_bytes: int = 16 << 20


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One node's part of the configuration, resolved. Seconds and bytes as in ``configs.schema``."""

    name: str
    role: str
    family: str
    host: str
    bind_host: str
    port: int
    models: tuple[ServedModel, ...]
    layout: KVLayout
    transition_layers: tuple[int, ...]
    chunk_tokens: int
    context_half_tokens: float = 4096.0
    kv_bytes: int
    e_bytes: int
    routers: tuple[str, ...]
    backend: str = "ucx"
    data_port: int = 0
    insecure: bool = False
    quarantine_max_bytes: int = 256 << 20
    pull_window_bytes: int = 64 << 20
    lease_s: float = 15.0
    lease_grace_s: float = 2.0
    heartbeat_s: float = 1.0
    pull_s: float = 20.0
    open_stream_s: float = 5.0
    order_s: float = 120.0
    drain_s: float = 30.0
    max_running: int = 8
    max_queue: int = 256
    checks: CheckSettings = CheckSettings()

    def lineage(self, model: str) -> Lineage:
        return next(served.lineage for served in self.models if served.name == model)


class NodeRuntime:
    """Sockets, memory and links of one node; built on the node's event loop, closed with ``close``."""

    def __init__(
        self,
        settings: NodeSettings,
        on_message: Callable[[RouterLink, RouterToNode], None],
        load: Callable[[], NodeLoad],
        transport: Transport | None = None,
    ) -> None:
        self.settings = settings
        self.incarnation = secrets.token_hex(8)
        self.context = zmq.asyncio.Context()
        self.transport = transport or open_transport(
            settings.backend,
            host=settings.bind_host,
            port=settings.data_port,
            insecure=settings.insecure,
            advertise_host=settings.host,
            quarantine_max_bytes=settings.quarantine_max_bytes,
        )
        self.memory = KVMemory(settings.layout, settings.kv_bytes, settings.e_bytes, self.transport)
        self.store = self.memory.store
        self.server = StreamServer(
            self.memory,
            self.incarnation,
            lease_s=settings.lease_s,
            grace_s=settings.lease_grace_s,
            lineages={served.lineage.id: served.lineage for served in settings.models},
        )
        try:
            self.holder = HolderSocket(self.server, self.context, settings.bind_host, settings.port)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"nodes.{settings.name}.port",
                f"cannot listen on {settings.bind_host}:{settings.port} ({error})",
                "a free port, or 0 for any; is this node already running?",
            ) from None
        port = self.holder.address.rsplit(":", 1)[1]
        self.source_address = f"tcp://{settings.host}:{port}"
        self.links = HolderLinks(self.context)
        self._kept: set[asyncio.Future[None]] = set()
        self._load = load
        self.routers = RouterLinks(
            [
                RouterLink(
                    address, self._registration, self.store, load, on_message, self.context, settings.heartbeat_s
                )
                for address in settings.routers
            ],
            self.store,
        )

    def _registration(self) -> Register:
        return Register(
            version=PROTOCOL_VERSION,
            node=self.settings.name,
            role=self.settings.role,
            incarnation=self.incarnation,
            source_address=self.source_address,
            models=self.settings.models,
            layout=self.settings.layout,
            transition_layers=self.settings.transition_layers,
        )

    def keep(self, task: asyncio.Future[None]) -> None:
        """Hold on to a background task until it is done; ``close`` waits for those that are left."""
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)

    async def settle(self) -> None:
        """Until the background tasks that were kept so far are done."""
        await asyncio.gather(*self._kept, return_exceptions=True)

    def memory_load(self) -> NodeLoad:
        """The part of the load that the memory knows."""
        store = self.store
        return NodeLoad(
            kv_slots_used=store.kv_pool.used,
            kv_slots_total=store.kv_pool.num_slots,
            e_slots_used=store.e_pool.used,
            e_slots_total=store.e_pool.num_slots,
            leases=len(self.server.leases),
            quarantined_bytes=self.transport.quarantined_bytes,
            pulled_bytes=self.transport.pulled_bytes,
        )

    async def serve(self, stop: asyncio.Event) -> None:
        """Run sockets and links until ``stop`` is set. Raises what a background task raised (ConfigError: refused)."""
        tasks = [
            asyncio.create_task(self.holder.serve()),
            asyncio.create_task(self.holder.tick_forever()),
            asyncio.create_task(self.routers.run()),
            asyncio.create_task(stop.wait()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if isinstance(error, ExceptionGroup):
                    raise error.exceptions[0]
                if error is not None:
                    raise error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def serve_and_drain(self, stop: asyncio.Event, idle: Callable[[], bool]) -> None:
        """Serve until ``stop``; then take nothing new and go on until ``idle()`` or for ``drain_s`` seconds more."""
        closing = asyncio.Event()

        async def drain() -> None:
            await stop.wait()
            self.routers.drain()
            give_up = time.monotonic() + self.settings.drain_s
            while not idle() and time.monotonic() < give_up:  # noqa: ASYNC110 - idleness has no event of its own
                await asyncio.sleep(0.02)
            closing.set()

        draining = asyncio.create_task(drain())
        try:
            await self.serve(closing)
        finally:
            draining.cancel()

    async def close(self) -> None:
        """Leave the routers, close every socket and peer, give the memory back."""
        self.routers.close()
        # closing the peers settles what is still in flight, and with it the tasks that wait for that
        await self.links.close()
        await self.settle()
        self.holder.close()
        await self.memory.close()
        self.context.destroy(linger=200)


def stop_on_signals(stop: asyncio.Event, name: str) -> None:
    """SIGINT and SIGTERM ask for a clean stop; a second one is taken as impatience and acts as usual."""
    loop = asyncio.get_running_loop()

    def ask(number: int) -> None:
        log.info("stopping", node=name, signal=signal.Signals(number).name)
        stop.set()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)

    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, ask, each)


def write_ready_file(path: Path | None, text: str) -> None:
    """Tell whoever started this process that it serves now (used by ``kvkin up`` and the tests instead of waiting)."""
    if path is not None:
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text)
        temporary.replace(path)
