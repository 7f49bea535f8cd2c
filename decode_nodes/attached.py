"""The link of a plain ``vllm serve`` to its family (docs/vllm.md): asks for plans, pulls, publishes, serves what it published.

One thread beside vLLM's scheduler, with a loop of its own. vLLM's thread talks to it through ``engines.vllm.serving.Link`` and takes its
events; between the two nothing is shared but a queue. What becomes of requests is in ``attached_requests.py``. No router, a slow one, or a
fault in here costs plans and nothing else: vLLM serves on.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Protocol

import structlog
import uvloop

from kvkin.decode_nodes.attached_models import AttachedModels
from kvkin.decode_nodes.attached_requests import AttachedRequests
from kvkin.engines.vllm.serving import Covered, LinkEvent, Question, ServingOptions
from kvkin.kv.errors import ConfigError
from kvkin.kv.plan import ReusePlan
from kvkin.transport.messages import NodeLoad
from kvkin.transport.node_runtime import NodeRuntime, NodeSettings
from kvkin.transport.node_settings import node_settings

log = structlog.get_logger()

START_WAIT_S = 5.0
"""How long the server's start waits for a router to take it: without one it serves as plain vLLM, and joins when there is one."""
CLOSE_S = 5.0
"""How long the server's end waits for the link's."""


class Models(Protocol):
    """Which requests of the server are of which model."""

    def model_of(self, lora: tuple[str, str] | None) -> str | None: ...


class AttachedServer:
    """Implements ``engines.vllm.serving.Link``. ``start`` returns once it is in a family, or would be if there were a router."""

    def __init__(self, settings: NodeSettings, models: Models, plan_s: float) -> None:
        self.settings, self._models = settings, models
        self.layout, self.chunk_tokens = settings.layout, settings.chunk_tokens
        self.transition_layers = settings.transition_layers
        self._events: deque[LinkEvent] = deque()
        self._requests = AttachedRequests(plan_s, self._events)
        self._closing = False
        self._failure: ConfigError | None = None
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="kvkin-link", daemon=True)

    # --- from vLLM's thread ------------------------------------------------------------------------------------------------

    def start(self, wait_s: float = START_WAIT_S) -> None:
        """Open memory and sockets and register. Raises ConfigError if they cannot be had, or a router refuses this server."""
        self._thread.start()
        self._started.result()
        self.arena = self.runtime.memory.arena.description
        assert self.arena is not None, "nodes share their arenas"
        if not self._joins(wait_s):
            addresses = ", ".join(self.settings.routers)
            log.warning("no router answers: this server computes everything itself until one does", routers=addresses)

    def _joins(self, wait_s: float) -> bool:
        """Whether some router takes this server within the time. Raises ConfigError if one refuses it: that ends the thread."""
        try:
            return asyncio.run_coroutine_threadsafe(self._registered(wait_s), self._loop).result(wait_s + CLOSE_S)
        except (CancelledError, TimeoutError, RuntimeError):
            self._thread.join(CLOSE_S)
            if self._failure is None:
                raise
            raise self._failure from None

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing and self._failure is None

    def take(self) -> LinkEvent | None:
        return self._events.popleft() if self._events else None

    def model_of(self, lora: tuple[str, str] | None) -> str | None:
        return self._models.model_of(lora)

    def ask(self, question: Question) -> None:
        self._post(lambda: self._requests.ask(question))

    def unneeded(self, key: str) -> None:
        self._post(lambda: self._requests.unneeded(key))

    def computed(self, key: str, plan: ReusePlan, token_ids: tuple[int, ...], covered: Covered, *, last: bool) -> None:
        self._post(lambda: self._requests.computed(key, plan, token_ids, covered, last))

    def stored(self, ticket: int, why: str) -> None:
        self._post(lambda: self._requests.stored(ticket, why))

    def ended(self, key: str, tokens_reused: int, fallback: str) -> None:
        self._post(lambda: self._requests.ended(key, tokens_reused, fallback))

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            if self._thread.is_alive() and self._started.done() and self._started.exception() is None:
                self._post(self._stop.set)
                self._thread.join(CLOSE_S)

    def _post(self, action: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:
            return  # the loop is closed: nobody waits for an answer of one that is not alive

    # --- the thread --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except ConfigError as error:
            self._gave_up(error)
        except Exception as error:  # noqa: BLE001 - vLLM serves on without it
            self._gave_up(ConfigError(f"nodes.{self.settings.name}", f"the link to the family failed: {error!r}"))

    def _gave_up(self, error: ConfigError) -> None:
        """Before the start has ended it raises this; later this server goes on alone."""
        self._failure = error
        if not self._started.done():
            self._started.set_exception(error)
        else:
            log.error("this server is in no family any more and computes everything itself", why=str(error))

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.runtime = self._requests.runtime = NodeRuntime(self.settings, self._requests.on_message, self.load)
        try:
            self._started.set_result(None)
            await self.runtime.serve(self._stop)
        finally:
            self._requests.stop()
            await self.runtime.close()

    async def _registered(self, wait_s: float) -> bool:
        waiting = [asyncio.ensure_future(link.registered.wait()) for link in self.runtime.routers.links]
        done, pending = await asyncio.wait(waiting, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return bool(done)

    def load(self) -> NodeLoad:
        return self._requests.load()


def open_link(options: ServingOptions, checkpoint: str, dtype: str) -> AttachedServer:
    """Join the family as ``options.name`` with the weights of ``checkpoint``, which vLLM runs in ``dtype``.

    Raises ConfigError if they are not the node's, if sockets or memory cannot be had, or if a router refuses the server.
    """
    models = AttachedModels(options, checkpoint, dtype)
    settings = node_settings(options.config, models.family, options.name)
    server = AttachedServer(settings, models, options.config.timeouts.plan_s)
    server.start()
    log.info("attached", node=options.name, models=list(models.served), streams=server.runtime.source_address)
    return server
