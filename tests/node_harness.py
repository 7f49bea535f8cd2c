"""A scripted router and nodes in one process: the tests say which plan a decode node executes, and see every reply.

Nodes are the real ones over a real backend and real sockets; only the router's decisions are replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import zmq
import zmq.asyncio
from tiny_models import make_tiny
from transformers import AutoModelForCausalLM

from kvkin.configs.checkpoints import read_model
from kvkin.decode_nodes.node import DecodeNode
from kvkin.engines.api import Engine
from kvkin.engines.loading import load_model
from kvkin.engines.reference import LoadedModel, ReferenceEngine
from kvkin.kv.generation import Sampling
from kvkin.kv.hashing import root_hash
from kvkin.kv.lineage import Lineage
from kvkin.kv.plan import Holder, LayerGroup, LayerSource, PlanKind, ReusePlan, Segment
from kvkin.kv.provenance import exact_provenance
from kvkin.prefill_nodes.node import PrefillNode
from kvkin.transport.backends import open_transport
from kvkin.transport.codec import encode, node_to_router
from kvkin.transport.messages import NodeLoad
from kvkin.transport.node_messages import (
    Done,
    DriftCheck,
    Execute,
    Failed,
    Generated,
    Heartbeat,
    Holdings,
    OrderDone,
    PrefillOrder,
    Register,
    Registered,
    ServedModel,
)
from kvkin.transport.node_runtime import NodeSettings

BLOCK = 16
CHUNK = 32
LAYERS = 4
ROOT = root_hash(b"test-tokenizer", BLOCK, "default")
WAIT_S = 60.0


@dataclass
class Member:
    """A loaded family member: engine side and lineage."""

    name: str
    path: Path
    loaded: LoadedModel
    lineage: Lineage


def load_member(name: str, path: Path, cache: Path) -> Member:
    identity = read_model(name, str(path), compute_dtype="float32", cache_dir=cache)
    return Member(name, path, load_model(path, None, device="cpu", compute_dtype="float32"), identity.lineage)


@dataclass
class ScriptedRouter:
    """A ROUTER socket that registers whoever comes and records everything that is said."""

    context: zmq.asyncio.Context
    address: str = ""
    nodes: dict[str, bytes] = field(default_factory=dict)
    registers: dict[str, Register] = field(default_factory=dict)
    holdings: dict[str, list[Holdings]] = field(default_factory=dict)
    heartbeats: dict[str, Heartbeat] = field(default_factory=dict)
    messages: list[Any] = field(default_factory=list)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __post_init__(self) -> None:
        self._socket = self.context.socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._task = asyncio.ensure_future(self._listen())

    async def _listen(self) -> None:
        codec = node_to_router()
        names: dict[bytes, str] = {}
        while True:
            peer, body = await self._socket.recv_multipart()
            message = codec.decode(body)
            async with self._changed:
                match message:
                    case Register():
                        names[peer] = message.node
                        self.nodes[message.node], self.registers[message.node] = peer, message
                        await self._socket.send_multipart([peer, encode(Registered("router", "1", 1.0))])
                    case Holdings():
                        self.holdings.setdefault(names[peer], []).append(message)
                    case Heartbeat():
                        self.heartbeats[names[peer]] = message
                    case _:
                        self.messages.append(message)
                self._changed.notify_all()

    def load(self, node: str) -> NodeLoad:
        """The node's newest heartbeat; an empty load before the first."""
        beat = self.heartbeats.get(node)
        return beat.load if beat else NodeLoad()

    async def until(self, condition: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
        """Wait until ``condition()`` is true after some message."""

        async def wait() -> Any:
            async with self._changed:
                await self._changed.wait_for(condition)
                return condition()

        return await asyncio.wait_for(wait(), timeout_s)

    async def send(self, node: str, message: Any) -> None:
        await self.until(lambda: node in self.nodes)
        await self._socket.send_multipart([self.nodes[node], encode(message)])

    def of(self, kind: type, name: str) -> list[Any]:
        return [
            m
            for m in self.messages
            if isinstance(m, kind) and name in (getattr(m, "request_id", ""), getattr(m, "order_id", ""))
        ]

    async def order(self, node: str, order_id: str, model: str, tokens: tuple[int, ...]) -> Any:
        await self.send(node, PrefillOrder(order_id, model, tokens, ROOT, WAIT_S))
        return (await self.until(lambda: self.of(OrderDone, order_id) or self.of(Failed, order_id)))[0]

    async def start(
        self,
        node: str,
        request_id: str,
        model: str,
        tokens: tuple[int, ...],
        plan: ReusePlan,
        *,
        max_tokens: int = 6,
        publish: bool = True,
        deadline_s: float = WAIT_S,
        check: DriftCheck | None = None,
        **sampling: Any,
    ) -> None:
        addresses = {name: register.source_address for name, register in self.registers.items()}
        how = Sampling(**{"max_tokens": max_tokens, "ignore_eos": True, **sampling})
        execute = Execute(request_id, model, tokens, ROOT, plan, how, publish, deadline_s, addresses, check=check)
        await self.send(node, execute)

    async def beats(self, node: str, count: int) -> None:
        """Until ``count`` more heartbeats have come: what a node has not begun meanwhile it does not begin."""
        for _ in range(count):
            last = self.heartbeats.get(node)
            await self.until(lambda last=last: self.heartbeats.get(node) is not last)

    async def ended(self, request_id: str) -> Done | Failed:
        found = await self.until(lambda: self.of(Done, request_id) or self.of(Failed, request_id))
        assert len(found) == 1
        reply: Done | Failed = found[0]
        return reply

    async def execute(
        self, node: str, request_id: str, model: str, tokens: tuple[int, ...], plan: ReusePlan, **how: Any
    ) -> Done:
        await self.start(node, request_id, model, tokens, plan, **how)
        reply = await self.ended(request_id)
        assert isinstance(reply, Done), reply
        assert [t for g in self.of(Generated, request_id) for t in g.token_ids] == list(reply.token_ids)
        return reply

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close(linger=0)


class HoldingTransport:
    """Wraps the consumer's transport: pulls of one layer wait at the start until ``release`` is called."""

    def __init__(self, inner: Any, num_layers: int) -> None:
        self._inner, self._num_layers = inner, num_layers
        self.kv_bytes = 0
        self.held_layer: int | None = None
        self.holding = asyncio.Event()
        self._released = asyncio.Event()

    def hold(self, layer: int) -> None:
        self.held_layer = layer
        self.holding.clear()
        self._released.clear()

    def release(self) -> None:
        self.held_layer = None
        self._released.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def connect(self, address: Any, local_region: int, *, deadline_s: float) -> Any:
        peer = await self._inner.connect(address, local_region, deadline_s=deadline_s)
        return _HoldingPeer(peer, self)


class _HoldingPeer:
    def __init__(self, peer: Any, holder: HoldingTransport) -> None:
        self._peer, self._holder = peer, holder

    def pull(self, copies: Any, *, deadline_s: float) -> Any:
        holder = self._holder
        slab = holder.kv_bytes // holder._num_layers
        layer = copies[0].local_offset // slab if copies[0].local_offset < holder.kv_bytes else -1
        if layer != holder.held_layer:
            return self._peer.pull(copies, deadline_s=deadline_s)
        return _HeldTransfer(self._peer, copies, deadline_s, holder)

    async def close(self) -> None:
        await self._peer.close()


class _HeldTransfer:
    def __init__(self, peer: Any, copies: Any, deadline_s: float, holder: HoldingTransport) -> None:
        self.num_bytes = sum(copy.num_bytes for copy in copies)
        self._start = lambda: peer.pull(copies, deadline_s=deadline_s)
        self._holder, self._transfer = holder, None

    async def wait(self) -> None:
        self._holder.holding.set()
        await self._holder._released.wait()
        self._transfer = self._start()
        await self._transfer.wait()

    @property
    def settled(self) -> Any:
        if self._transfer is not None:
            return self._transfer.settled
        future = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future


def settings_for(role: str, name: str, members: list[Member], router: str, **changes: Any) -> NodeSettings:
    layout = ReferenceEngine(
        {m.name: m.loaded for m in members}, block_size=BLOCK, chunk_tokens=CHUNK, start=False
    ).layout(members[0].name)
    values: dict[str, Any] = {
        "name": name,
        "role": role,
        "family": "tiny",
        "host": "127.0.0.1",
        "bind_host": "127.0.0.1",
        "port": 0,
        "models": tuple(ServedModel(m.name, "tiny", m.lineage, b"test-tokenizer") for m in members),
        "layout": layout,
        "transition_layers": (1, 2),
        "chunk_tokens": CHUNK,
        "kv_bytes": 64 * layout.kv_slot_bytes,
        "e_bytes": 128 * layout.e_block_bytes,
        "routers": (router,),
        "backend": "tcp",
        "heartbeat_s": 0.2,
        "order_s": 20.0,
        "drain_s": 5.0,
    }
    return NodeSettings(**{**values, **changes})


@contextlib.asynccontextmanager
async def running(
    role: str, name: str, members: list[Member], router: ScriptedRouter, engine: Engine | None = None, **changes: Any
) -> AsyncIterator[Any]:
    """A prefill or decode node (on the reference engine unless one is given) that serves until the block ends; its errors surface here."""
    settings = settings_for(role, name, members, router.address, **changes)
    if engine is None:
        engine = ReferenceEngine({m.name: m.loaded for m in members}, block_size=BLOCK, chunk_tokens=CHUNK)
    transport = HoldingTransport(open_transport(settings.backend), settings.layout.num_layers)
    transport.kv_bytes = settings.kv_bytes // settings.layout.kv_slot_bytes * settings.layout.kv_slot_bytes
    node = (PrefillNode if role == "prefill" else DecodeNode)(settings, engine, transport)
    stop = asyncio.Event()
    serving = asyncio.ensure_future(node.serve(stop))
    try:
        await router.until(lambda: name in router.holdings)
        yield node
    finally:
        stop.set()
        await asyncio.wait_for(serving, WAIT_S)


def greedy(member: Member, tokens: tuple[int, ...], count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(member.path, dtype=torch.float32).eval()
    with torch.no_grad():
        out = model.generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False, eos_token_id=None)
    return out[0, len(tokens) :].tolist()


def pulled(member: Member, node: str, order_id: str = "") -> Holder:
    return Holder(node, exact_provenance(member.lineage.id), order_id)


def exact_plan(holder: Holder, context: int, total: int) -> ReusePlan:
    source = LayerSource(LayerGroup(0, LAYERS), holder)
    return ReusePlan((Segment(0, context, (source,), kind=PlanKind.EXACT), Segment(context, total)))


def partial_plan(holder: Holder, context: int, total: int, start: int, stop: int) -> ReusePlan:
    sources = [LayerSource(LayerGroup(0, start), holder)] if start else []
    if stop < LAYERS:
        sources.append(LayerSource(LayerGroup(stop, LAYERS), holder))
    segment = Segment(
        0,
        context,
        tuple(sources),
        e_layer=start or None,
        e_holder=holder if start else None,
        recompute=LayerGroup(start, stop),
        kind=PlanKind.PARTIAL,
        loss=float("inf"),
    )
    return ReusePlan((segment, Segment(context, total)))


@contextlib.asynccontextmanager
async def scripted_router() -> AsyncIterator[ScriptedRouter]:
    context = zmq.asyncio.Context()
    router = ScriptedRouter(context)
    yield router
    await router.close()
    context.destroy(linger=0)


def tiny_members(root: Path, **shape: Any) -> dict[str, Member]:
    """A base and a fine-tune of other weights, on disk below ``root``; ``shape`` as in ``make_tiny``."""
    paths = {
        name: make_tiny("llama", root / name, seed=seed, num_layers=LAYERS, **shape)
        for name, seed in (("base", 1), ("tune", 2))
    }
    return {name: load_member(name, path, root / "cache") for name, path in paths.items()}


def assert_clean(*nodes: Any) -> None:
    """Nothing is pinned, leased or lost: every used slot belongs to a stored block."""
    for node in nodes:
        store = node.runtime.store
        assert all(block.refs == 0 for block in store.blocks())
        assert store.kv_pool.used == len(store), node.settings.name
        assert store.e_pool.used == sum(len(block.e_slots) for block in store.blocks())
        assert len(node.runtime.server.leases) == 0
        assert node.runtime.transport.quarantined_bytes == 0


async def until_clean(router: ScriptedRouter, *nodes: Any) -> None:
    """``assert_clean``, once the messages that give back leases and pins have arrived."""

    def clean() -> bool:
        try:
            assert_clean(*nodes)
        except AssertionError:
            return False
        return True

    try:
        await router.until(clean)
    except TimeoutError:
        assert_clean(*nodes)
        raise
