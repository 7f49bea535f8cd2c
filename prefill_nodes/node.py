"""The prefill node: computes ordered contexts chunk by chunk, layer by layer, and serves each layer as soon as it is visible.

Thin IO around ``prefill_nodes.core``; runs on one asyncio loop, the engine on its own thread. Started by ``kvkin prefill``.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import msgspec
import structlog

from kvkin.engines.api import Counters, Engine, EngineRequest, Result
from kvkin.engines.arena_copies import arrival_from, store_layer, store_states
from kvkin.engines.spaces import Space
from kvkin.kv.cost import measured_work
from kvkin.kv.errors import CapacityError, KvkinError
from kvkin.kv.execution import PlanExecution, Unit
from kvkin.kv.generation import TokenLogprob
from kvkin.kv.hashing import block_hashes
from kvkin.kv.plan import Holder, LayerGroup, LayerSource, PlanKind, ReusePlan, Segment
from kvkin.kv.provenance import exact_provenance
from kvkin.kv.store import Block
from kvkin.prefill_nodes.core import (
    CancelCompute,
    ComputeEnded,
    Event,
    OrderAborted,
    OrderReceived,
    PrefillCore,
    ReportDone,
    ReportFailed,
    StartCompute,
    Tick,
)
from kvkin.transport.data_plane import Transport
from kvkin.transport.holder import Outgoing
from kvkin.transport.messages import NodeLoad
from kvkin.transport.node_messages import Abort, Drain, Failed, OrderDone, PrefillOrder, RouterToNode
from kvkin.transport.node_runtime import NodeRuntime, NodeSettings
from kvkin.transport.router_link import RouterLink

log = structlog.get_logger()


@dataclass
class _Running:
    """The order that is being computed."""

    order: PrefillOrder
    blocks: list[Block]
    local_blocks: int
    started: float
    execution: PlanExecution | None = None
    e_layers: frozenset[int] = field(default_factory=frozenset)


class PrefillNode:
    """One prefill node. ``serve`` runs it until ``stop`` is set; ``address`` is where its layer streams are opened."""

    def __init__(self, settings: NodeSettings, engine: Engine, transport: Transport | None = None) -> None:
        self.settings, self._engine = settings, engine
        self.runtime = NodeRuntime(settings, self._on_message, self.load, transport)
        self.core = PrefillCore(settings.max_queue)
        self._links: dict[str, RouterLink] = {}
        self._running: _Running | None = None
        self._rate = 0.0
        self._finished = 0
        self._failed = 0
        self._loop = asyncio.get_running_loop()

    def load(self) -> NodeLoad:
        return msgspec.structs.replace(
            self.runtime.memory_load(),
            running=self.core.running,
            waiting=self.core.waiting,
            queued_tokens=self.core.queued_tokens,
            prefill_layer_tokens_per_s=self._rate,
            finished=self._finished,
            failed=self._failed,
        )

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``, then finish orders and let readers finish within ``drain_s``.

        Raises ConfigError if a router refuses this node.
        """
        ticking = asyncio.create_task(self._tick_forever())
        try:
            await self.runtime.serve_and_drain(stop, self._idle)
        finally:
            ticking.cancel()
            if self._running is not None:
                self._engine.cancel(self._running.order.order_id, "the node is stopping")
            await asyncio.to_thread(self._engine.close)
            await self.runtime.close()

    def _idle(self) -> bool:
        return not (self.core.running or self.core.waiting or len(self.runtime.server.leases))

    # --- events in, instructions out ---------------------------------------------------------------------------------

    def _on_message(self, link: RouterLink, message: RouterToNode) -> None:
        self._links[link.address] = link
        match message:
            case PrefillOrder():
                self._do(OrderReceived(message, link.address, time.monotonic()))
            case Abort(request_id, reason):
                self._do(OrderAborted(request_id, reason))
            case Drain():
                self.runtime.routers.drain()
            case _:
                log.warning("message is not for a prefill node", kind=type(message).__name__)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            self._do(Tick(time.monotonic()))

    def _do(self, event: Event) -> None:
        for instruction in self.core.handle(event):
            match instruction:
                case StartCompute(order):
                    self._start(order)
                case CancelCompute(order_id, reason):
                    self._engine.cancel(order_id, reason)
                case ReportDone(order_id, reply_to, num_tokens, computed, seconds):
                    self._finished += 1
                    self.runtime.routers.flush()
                    self._links[reply_to].send(OrderDone(order_id, num_tokens, computed, seconds))
                case ReportFailed(order_id, reply_to, code, message, retryable):
                    self._failed += 1
                    log.warning("order failed", order=order_id, code=code, why=message)
                    self._links[reply_to].send(Failed(order_id, code, message, retryable))

    # --- running an order --------------------------------------------------------------------------------------------

    def _start(self, order: PrefillOrder) -> None:
        try:
            self._prepare(order)
        except Exception as error:  # whatever it is, the next order must find the node free
            code, retryable = "invalid_request", isinstance(error, CapacityError)
            if isinstance(error, KvkinError):
                code = error.code
            elif not isinstance(error, ValueError):
                code = "internal"
                log.exception("an order met a fault of the node", order=order.order_id)
            running, self._running = self._running, None
            blocks = [] if running is None else running.blocks
            self._send(self.runtime.server.order_failed(blocks, order.order_id, str(error)))
            if running is not None:
                self._engine.cancel(order.order_id, "it could not be begun")
                self._release(running)
            ended = ComputeEnded(order.order_id, code=code, error=str(error), retryable=retryable)
            # not from inside the core's own instruction loop
            self._loop.call_soon(self._do, ended)

    def _prepare(self, order: PrefillOrder) -> None:
        settings, store, now = self.settings, self.runtime.store, time.monotonic()
        size = settings.layout.block_size
        if order.model not in self._engine.models:
            raise ValueError(f"model {order.model!r} is not on this node")
        hashes = block_hashes(order.token_ids, order.root, size)
        provenance = exact_provenance(settings.lineage(order.model).id)
        parents = [order.root, *hashes][: len(hashes)]
        chain = [(h, p, provenance, index * size) for index, (h, p) in enumerate(zip(hashes, parents, strict=True))]
        blocks = store.reserve(chain, settings.transition_layers, now)
        local = 0
        while local < len(blocks) and blocks[local].kv_layers == settings.layout.num_layers:
            local += 1
        running = _Running(order, blocks, local, now, e_layers=frozenset(settings.transition_layers))
        if local == len(blocks):
            self._release(running)
            self._send(self.runtime.server.order_started())
            self._loop.call_soon(self._do, ComputeEnded(order.order_id))
            return
        self._running = running
        request = EngineRequest(
            order.order_id,
            order.model,
            order.token_ids[: len(blocks) * size],
            self._plan(running, Holder(settings.name, provenance)),
            None,
            settings.transition_layers,
            root=order.root,
        )
        running.execution = self._engine.submit(request, _Sink(self, running))
        for chunk in running.execution.chunks:
            slots = [block.slot for block in blocks[chunk.start // size : chunk.stop // size]]
            for layer in sorted(chunk.pulled):
                arena = self.runtime.memory.arena
                self._engine.arrived(order.order_id, arrival_from(arena, chunk.index, layer, chunk.start, slots))
        self._send(self.runtime.server.order_started())

    def _plan(self, running: _Running, here: Holder) -> ReusePlan:
        size, layers = self.settings.layout.block_size, self.settings.layout.num_layers
        split, stop = running.local_blocks * size, len(running.blocks) * size
        computed = Segment(split, stop)
        if not split:
            return ReusePlan((computed,))
        own = Segment(0, split, sources=(LayerSource(LayerGroup(0, layers), here),), kind=PlanKind.EXACT)
        return ReusePlan((own, computed))

    def progressed(self, running: _Running, unit: Unit) -> None:
        """A layer of a chunk is in the arena: announce it (called on the loop after the copy)."""
        if running is not self._running:
            return
        store, size = self.runtime.store, self.settings.layout.block_size
        blocks = running.blocks[unit.start // size : unit.stop // size]
        for block in blocks:
            store.advance(block, unit.layer + 1)
            store.e_visible(block, unit.layer)
            if unit.layer == self.settings.layout.num_layers - 1:
                store.publish(block)
        self._send(self.runtime.server.progressed(blocks))

    def ended(self, running: _Running, counters: Counters | None, error: Exception | None) -> None:
        if running is not self._running:
            return
        self._running = None
        order_id = running.order.order_id
        if error is not None:
            why = str(error)
            self._send(self.runtime.server.order_failed(running.blocks, order_id, why))
            self._release(running)
            code, retryable = getattr(error, "code", "internal"), getattr(error, "retryable", False)
            self._do(ComputeEnded(order_id, code=code, error=why, retryable=retryable))
            return
        self._release(running)
        assert counters is not None
        seconds = time.monotonic() - running.started
        if counters.suffix_s > 0:
            work = measured_work(
                counters.computed_layer_tokens, counters.computed_positions, self.settings.context_half_tokens
            )
            rate = work / counters.suffix_s
            self._rate = rate if not self._rate else 0.7 * self._rate + 0.3 * rate
        size = self.settings.layout.block_size
        num_computed = (len(running.blocks) - running.local_blocks) * size
        log.info("order done", order=order_id, tokens=len(running.blocks) * size, computed=num_computed, s=seconds)
        self._do(ComputeEnded(order_id, num_computed, seconds))

    def _release(self, running: _Running) -> None:
        now = time.monotonic()
        # children first: an incomplete block is removed with its last reference
        for block in reversed(running.blocks):
            self.runtime.store.release(block, now)

    def _send(self, outgoing: list[Outgoing]) -> None:
        self.runtime.holder.send(outgoing)

    def copy_out(self, running: _Running, unit: Unit, space: Space) -> None:
        """On the engine thread: one layer of one chunk into the arena (its slots belong to this order)."""
        size, arena = self.settings.layout.block_size, self.runtime.memory.arena
        blocks = running.blocks[unit.start // size : unit.stop // size]
        store_layer(arena, space, unit.layer, unit.start, [block.slot for block in blocks])
        if unit.layer in running.e_layers and all(unit.layer in block.e_slots for block in blocks):
            slots = [block.e_slots[unit.layer] for block in blocks]
            store_states(arena, space, unit.layer, unit.start, slots)


class _Sink:
    """Hands engine events of one order to the node's loop."""

    def __init__(self, node: PrefillNode, running: _Running) -> None:
        self._node, self._running, self._loop = node, running, asyncio.get_running_loop()

    def unit_done(self, request_id: str, unit: Unit, space: Space) -> None:
        self._node.copy_out(self._running, unit, space)
        self._loop.call_soon_threadsafe(self._node.progressed, self._running, unit)

    def prefilled(self, request_id: str) -> None: ...

    def tokens(self, request_id: str, index: int, token_id: int, text: str, logprob: TokenLogprob | None) -> None: ...

    def finished(self, result: Result, space: Space, counters: Counters) -> None:
        space.release()  # every unit was copied out when it was done
        self._loop.call_soon_threadsafe(self._node.ended, self._running, counters, None)

    def failed(self, request_id: str, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._node.ended, self._running, None, error)
