"""The router process: sockets, threads, timers and signals around ``RouterCore`` (docs/design.md section 2).

Started by ``kvkin router`` (``serve_router``) and by tests (``async with RouterNode(settings)``). Nothing is decided here.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import secrets
import signal
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

import structlog
import uvloop
import zmq

from kvkin.kv.errors import ProtocolError
from kvkin.router import policy
from kvkin.router.core import RouterCore
from kvkin.router.drift_memory import read_memory, write_memory
from kvkin.router.events import (
    ClientLost,
    Event,
    Instruction,
    NodeSaid,
    NodeSentGarbage,
    Note,
    PeerLost,
    PreparePrompt,
    PromptFailed,
    PromptReady,
    RememberAnswer,
    RememberDrift,
    Reply,
    Stop,
    StopAsked,
    TellNode,
    TimePassed,
)
from kvkin.router.front import Front, PromptWorkers
from kvkin.router.planning import Choose
from kvkin.router.settings import RouterSettings
from kvkin.router.sockets import RouterSocket
from kvkin.transport.attention import Standstill
from kvkin.transport.codec import MAX_FRAME_BYTES, encode, node_to_router

log = structlog.get_logger()


class RouterNode:
    """One router in this process's event loop. Use as an async context manager, or ``start``, ``wait`` and ``close``."""

    def __init__(self, settings: RouterSettings, *, choose: Choose = policy.choose) -> None:
        self.settings = settings
        self.incarnation = secrets.token_hex(8)
        self._choose = choose
        self._events: deque[Event] = deque()
        self._handling = False
        self._stopped = asyncio.Event()
        self._timers: list[asyncio.TimerHandle] = []
        self._closed = False

    # --- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bind and begin. Raises ConfigError if a port is taken or a tokenizer cannot be read."""
        settings = self.settings
        self._loop = asyncio.get_running_loop()
        self._codec = node_to_router()
        self._front = Front(settings)
        # reading a tokenizer takes up to a second
        self._workers = await asyncio.to_thread(PromptWorkers, settings)
        ids = (f"{self.incarnation[:6]}-{number:06}" for number in itertools.count(1))
        memory = settings.drift.memory
        self.core = RouterCore(
            settings,
            self.incarnation,
            lambda: next(ids),
            started_at=self._loop.time(),
            choose=self._choose,
            switched_off=() if memory is None else read_memory(memory),
        )
        for note in (note for family in settings.families.values() for note in family.notes):
            log.warning("profile", problem=note)
        for pair in self.core.drift.status(self._loop.time()):
            log.warning("pair is still switched off for drift", sender=pair.sender, receiver=pair.receiver)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        key, insecure = f"nodes.{settings.name}", settings.insecure
        try:
            # a frame over the request limit is still read and answered; only one beyond all reason costs the connection
            self._clients = RouterSocket(
                self._context,
                f"{key}.client_port",
                settings.client_address,
                self._on_client,
                insecure=insecure,
                max_bytes=4 * settings.limits.max_request_bytes,
            )
            try:
                self._nodes = RouterSocket(
                    self._context,
                    f"{key}.node_port",
                    settings.node_address,
                    self._on_node,
                    insecure=insecure,
                    max_bytes=MAX_FRAME_BYTES,
                )
            except BaseException:
                self._clients.close()
                raise
        except BaseException:
            self._workers.close()
            self._context.term()
            raise
        self._standstill = Standstill(settings.timeouts.tick_s, self._loop.time())
        self._tick()
        log.info("router is up", router=settings.name, clients=self.client_address, nodes=self.node_address)

    @property
    def client_address(self) -> str:
        """Where clients connect, with the real port."""
        return self._clients.address

    @property
    def node_address(self) -> str:
        """Where nodes connect, with the real port."""
        return self._nodes.address

    def stop(self, *, at_once: bool = False) -> None:
        """Take nothing new; stop when all is done, or after ``drain_s``. Twice, or ``at_once``: end what still runs."""
        at_once = at_once or bool(self._timers)
        self._timers.append(self._loop.call_later(self.settings.timeouts.drain_s, self._feed, StopAsked(at_once=True)))
        self._feed(StopAsked(at_once))

    async def wait(self) -> None:
        """Return once the router has stopped."""
        await self._stopped.wait()

    async def close(self) -> None:
        """Stop at once and give everything back. Running requests get their error."""
        if self._closed:
            return
        self._feed(StopAsked(at_once=True))
        self._closed = True
        for timer in [*self._timers, self._ticking]:
            timer.cancel()
        self._clients.close()
        self._nodes.close()
        await asyncio.to_thread(self._workers.close)
        # ends when the last replies have left or their time is up
        await asyncio.to_thread(self._context.term)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # --- events ------------------------------------------------------------------------------------------------------

    def _on_client(self, client: bytes, frames: list[bytes]) -> None:
        self._feed(self._front.read(client, frames))

    def _on_node(self, peer: bytes, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1:
                raise ProtocolError(f"a message is one frame of MessagePack, not {len(frames)}")
            self._feed(NodeSaid(peer, self._codec.decode(frames[0])))
        except ProtocolError as error:
            self._feed(NodeSentGarbage(peer, str(error)))

    def _tick(self) -> None:
        self._ticking = self._loop.call_later(self.settings.timeouts.tick_s, self._tick)
        self._feed(TimePassed(self._standstill.look(self._loop.time())))

    def _report_prompt(self, event: PromptReady | PromptFailed) -> None:
        """On a worker thread; the loop may be gone while the last workers finish."""
        if not self._closed:
            self._loop.call_soon_threadsafe(self._feed, event)

    def _feed(self, event: Event) -> None:
        """Hand an event to the core and carry out what it says; what happens meanwhile queues behind it."""
        if self._closed:
            return
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                self._step(self._events.popleft())
        finally:
            self._handling = False

    def _step(self, event: Event) -> None:
        try:
            instructions = self.core.handle(event, self._loop.time())
        except Exception:
            # our own bug: it must show, and it must not take everybody's requests down
            log.exception("the core failed", event_kind=type(event).__name__)
            instructions = self.core.decided
        for instruction in instructions:
            self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Reply(client, message):
                problem = self._clients.send(client, encode(message))
                if problem:
                    self._events.append(ClientLost(client, problem))
            case TellNode(peer, message):
                if self._nodes.send(peer, encode(message)):
                    self._events.append(PeerLost(peer))
            case PreparePrompt(request_id, request):
                self._workers.prepare(request_id, request, self._report_prompt)
            case RememberAnswer():
                self._workers.remember(instruction)
            case RememberDrift(pairs):
                if self.settings.drift.memory is not None:
                    write_memory(self.settings.drift.memory, pairs)
            case Note(level, event, fields):
                getattr(log, level)(event, **fields)
            case Stop():
                self._stopped.set()


async def run_router(settings: RouterSettings, on_ready: Callable[[RouterNode], None] | None = None) -> None:
    """Serve until SIGINT or SIGTERM: the first drains, the second ends at once. ``on_ready`` is told the real addresses."""
    loop = asyncio.get_running_loop()
    async with RouterNode(settings) as node:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, node.stop)
        try:
            if on_ready is not None:
                on_ready(node)
            await node.wait()
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


def serve_router(settings: RouterSettings, on_ready: Callable[[RouterNode], None] | None = None) -> None:
    """``run_router`` in an event loop of its own; what ``kvkin router`` runs. Raises ConfigError."""
    # the index is a large tree without cycles: full collections over it would stop decisions for tenths of a second
    gc.freeze()
    gc.set_threshold(50_000, 50, 1000)
    uvloop.run(run_router(settings, on_ready))
