"""A request on a decode node, and the way of what its engine says to the node's event loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from kvkin.decode_nodes.publication import Publisher
from kvkin.decode_nodes.sources import PlanSources
from kvkin.engines.api import Counters, EngineRequest, Result
from kvkin.engines.spaces import Space
from kvkin.kv.execution import Unit
from kvkin.kv.generation import TokenLogprob
from kvkin.kv.plan import ReusePlan
from kvkin.transport.node_messages import Execute, Generated
from kvkin.transport.router_link import RouterLink


@dataclass
class Running:
    """A request on this node. ``plan`` is the one that is executed (the fallback, once a source failed)."""

    execute: Execute
    link: RouterLink
    plan: ReusePlan
    received: float
    started: float = 0.0
    sources: list[PlanSources] = field(default_factory=list)
    publisher: Publisher | None = None
    publishing: asyncio.Future[None] | None = None
    fallback: str = ""
    result: tuple[Result, Space, Counters] | None = None
    space: Space | None = None

    def engine_request(self, transition_layers: tuple[int, ...]) -> EngineRequest:
        """Hidden states are kept where they are to be published."""
        execute = self.execute
        return EngineRequest(
            execute.request_id,
            execute.model,
            execute.token_ids,
            execute.plan,
            execute.sampling,
            transition_layers if execute.publish else (),
            first_distribution=execute.check is not None,
            engine_cache=execute.engine_cache,
            root=execute.root,
        )

    def stop_sources(self) -> None:
        for sources in self.sources:
            sources.stop()


class Listener(Protocol):
    """The node: called on its loop."""

    def prefilled(self, request_id: str) -> None: ...

    def first_space(self, request_id: str, space: Space) -> None: ...

    def generated(self, message: Generated) -> None: ...

    def ended(self, result: Result, space: Space, counters: Counters) -> None: ...

    def broke(self, request_id: str, error: Exception) -> None: ...


class LoopSink:
    """Hands engine events of one request to the listener, on the loop that it was made on."""

    def __init__(self, listener: Listener) -> None:
        self._listener, self._loop = listener, asyncio.get_running_loop()
        self._seen = False

    def unit_done(self, request_id: str, unit: Unit, space: Space) -> None:
        if not self._seen:
            self._seen = True
            self._loop.call_soon_threadsafe(self._listener.first_space, request_id, space)

    def prefilled(self, request_id: str) -> None:
        self._loop.call_soon_threadsafe(self._listener.prefilled, request_id)

    def tokens(self, request_id: str, index: int, token_id: int, text: str, logprob: TokenLogprob | None) -> None:
        logprobs = () if logprob is None else (logprob,)
        message = Generated(request_id, index, (token_id,), text, logprobs)
        self._loop.call_soon_threadsafe(self._listener.generated, message)

    def finished(self, result: Result, space: Space, counters: Counters) -> None:
        self._loop.call_soon_threadsafe(self._listener.ended, result, space, counters)

    def failed(self, request_id: str, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._listener.broke, request_id, error)
