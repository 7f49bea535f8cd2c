"""The receiver's side of ``kvkin bench pipeline``: one schedule of a plan per call, timed from start to first token."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec
import zmq
import zmq.asyncio

from kvkin.configs.families import ResolvedFamily
from kvkin.decode_nodes.sources import PlanSources
from kvkin.engines.api import Arrival, Counters, EngineRequest, Result
from kvkin.engines.reference import ReferenceEngine
from kvkin.engines.workspace import Workspace
from kvkin.kv.execution import Unit
from kvkin.kv.generation import Sampling, TokenLogprob
from kvkin.kv.hashing import block_hashes, root_hash
from kvkin.kv.plan import Holder, LayerGroup, LayerSource, PlanKind, ReusePlan, Segment, private_plan
from kvkin.kv.provenance import exact_provenance
from kvkin.tools.roles import build_engine
from kvkin.transport.codec import encode, node_to_router
from kvkin.transport.messages import NodeLoad
from kvkin.transport.node_messages import Failed, OrderDone, PrefillOrder, Register, Registered, ServedModel
from kvkin.transport.node_runtime import NodeRuntime, NodeSettings
from kvkin.transport.streams import LayerStream, StreamRequest, StreamTimes

DEADLINE_S = 300.0


@dataclass
class Timed:
    """One engine run: seconds to the first token, of recompute, and of the suffix's last layer with the head."""

    seconds: float = 0.0
    recompute_s: float = 0.0
    last_layer_s: float = 0.0


@dataclass
class Measured:
    """One interleaved round at one rate: seconds by schedule, and the parts that the ideal is made of."""

    seconds: dict[str, float]
    transfer_s: float
    recompute_s: float


class _Sink:
    """Times one request."""

    def __init__(self) -> None:
        self.done: asyncio.Future[Counters] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self.first_at = 0.0
        self.before_last_at = 0.0
        self._previous = 0.0

    def unit_done(self, request_id: str, unit: Unit, space: Workspace) -> None:
        self.before_last_at, self._previous = self._previous, time.perf_counter()

    def prefilled(self, request_id: str) -> None: ...

    def tokens(self, request_id: str, index: int, token_id: int, text: str, logprob: TokenLogprob | None) -> None:
        self.first_at = self.first_at or time.perf_counter()

    def finished(self, result: Result, space: Workspace, counters: Counters) -> None:
        self._loop.call_soon_threadsafe(self.done.set_result, counters)

    def failed(self, request_id: str, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self.done.set_exception, error)


@dataclass
class Bench:
    """An open bench: the holder process, its address, the receiver's runtime and engine."""

    runtime: NodeRuntime
    engine: ReferenceEngine
    holder: asyncio.subprocess.Process
    address: str
    model: str
    tokens: tuple[int, ...]
    root: bytes
    partial: ReusePlan
    reuse_all: ReusePlan
    _serial: int = 0
    _arrivals: list[Arrival] = field(default_factory=list)

    @property
    def pulled_bytes(self) -> int:
        """Bytes that the partial plan moves."""
        segment, layout = self.partial.segments[0], self.runtime.settings.layout
        per_block = len(segment.pulled_layers()) * layout.kv_block_bytes
        per_block += layout.e_block_bytes if segment.e_layer is not None else 0
        return segment.num_tokens // layout.block_size * per_block

    async def set_rate(self, gbit_per_s: float) -> None:
        """Pace the link; 0 lifts the limit. Existing connections are closed: the pace belongs to a connection."""
        await self._tell(f"rate {int(gbit_per_s * 1e9 / 8)}")
        await self.runtime.links.close()

    async def warm_up(self) -> None:
        await self._run(private_plan(len(self.tokens)))
        await self._run(self.partial)

    async def measure_all(self, *, reverse: bool) -> Measured:
        """Every schedule once, in order or reversed."""
        runs: dict[str, Callable[[], asyncio.Future[float]]] = {
            "naive": lambda: asyncio.ensure_future(self._run(self.partial, deferred=True)),
            "reuse_only": lambda: asyncio.ensure_future(self._run(self.reuse_all)),
            "pipelined": lambda: asyncio.ensure_future(self._run(self.partial)),
            "private": lambda: asyncio.ensure_future(self._run(private_plan(len(self.tokens)))),
            "transfer": lambda: asyncio.ensure_future(self._transfer_only()),
            "e": lambda: asyncio.ensure_future(self._e_only()),
        }
        names = list(runs)[::-1] if reverse else list(runs)
        seconds = {name: await runs[name]() for name in names}
        compute = await self.compute_only()
        transfer, states = seconds.pop("transfer"), seconds.pop("e")
        seconds["ideal"] = max(transfer, states + compute.seconds) + compute.last_layer_s
        return Measured(seconds, transfer, compute.recompute_s)

    async def compute_only(self) -> Timed:
        """The partial plan with everything in memory already."""
        async with self._sources(self.partial, self._arrivals.append) as sources:
            self._arrivals.clear()
            await self._all_arrived(sources, lambda: len(self._arrivals))
            return await self._compute(self.partial, self._arrivals)

    async def close(self) -> None:
        await asyncio.to_thread(self.engine.close)
        with contextlib.suppress(ConnectionError):
            await self._tell("stop", answer=False)
        await asyncio.wait_for(self.holder.wait(), DEADLINE_S)
        await self.runtime.close()

    # --- inside --------------------------------------------------------------------------------------------------------

    async def _run(self, plan: ReusePlan, *, deferred: bool = False) -> float:
        """Pull and compute; deferred: compute only once everything is here."""
        self._serial += 1
        request_id, sink = f"run-{self._serial}", _Sink()
        held: list[Arrival] = []

        def arrived(arrival: Arrival) -> None:
            held.append(arrival)
            if not deferred:
                self.engine.arrived(request_id, arrival)
            elif len(held) == expected:
                for each in held:
                    self.engine.arrived(request_id, each)

        execution = self.engine.plan_execution(self.model, plan)
        expected = execution.missing
        started = time.perf_counter()
        self.engine.submit(EngineRequest(request_id, self.model, self.tokens, plan, Sampling(max_tokens=1)), sink)
        async with self._sources(plan, arrived):
            await asyncio.wait_for(sink.done, DEADLINE_S)
        return sink.first_at - started

    async def _compute(self, plan: ReusePlan, arrivals: list[Arrival]) -> Timed:
        self._serial += 1
        request_id, sink = f"run-{self._serial}", _Sink()
        started = time.perf_counter()
        self.engine.submit(EngineRequest(request_id, self.model, self.tokens, plan, Sampling(max_tokens=1)), sink)
        for arrival in arrivals:
            self.engine.arrived(request_id, arrival)
        counters = await asyncio.wait_for(sink.done, DEADLINE_S)
        return Timed(sink.first_at - started, counters.recompute_s, sink.first_at - sink.before_last_at)

    async def _transfer_only(self) -> float:
        landed: list[Arrival] = []
        started = time.perf_counter()
        async with self._sources(self.partial, landed.append) as sources:
            await self._all_arrived(sources, lambda: len(landed))
            return time.perf_counter() - started

    async def _e_only(self) -> float:
        """Only the hidden states of the transition layer; 0 where the plan needs none."""
        segment, settings = self.partial.segments[0], self.runtime.settings
        if segment.e_layer is None or segment.e_holder is None:
            return 0.0
        blocks = segment.num_tokens // settings.layout.block_size
        _, e_slots = self.runtime.store.take_scratch(0, blocks)
        self._serial += 1
        request = StreamRequest(
            stream_id=f"run-{self._serial}",
            provenance=segment.e_holder.provenance.key,
            blocks=tuple(block_hashes(self.tokens, self.root, settings.layout.block_size)[:blocks]),
            first_position=0,
            kv_layers=(),
            e_layer=segment.e_layer,
            chunk_blocks=settings.chunk_tokens // settings.layout.block_size,
            kv_slots=(),
            e_slots=tuple(e_slots),
        )
        link = self.runtime.links.get("holder", self.address)
        times = StreamTimes(pull_s=DEADLINE_S)
        stream = LayerStream(request, link, self.runtime.memory, "bench", times, settings.pull_window_bytes)
        started = time.perf_counter()
        await stream.run(lambda chunk, layer: None)
        seconds = time.perf_counter() - started
        self.runtime.store.give_scratch([], e_slots)
        return seconds

    async def _all_arrived(self, sources: PlanSources, count: Callable[[], int]) -> None:
        expected = self.engine.plan_execution(self.model, self.partial).missing
        await asyncio.wait_for(sources.wait(), DEADLINE_S)
        assert count() == expected, f"{count()} of {expected} items arrived"

    @contextlib.asynccontextmanager
    async def _sources(self, plan: ReusePlan, arrived: Callable[[Arrival], None]) -> AsyncIterator[PlanSources]:
        self._serial += 1
        failures: list[str] = []
        sources = PlanSources(
            self.runtime,
            f"stream-{self._serial}",
            self.model,
            block_hashes(self.tokens, self.root, self.runtime.settings.layout.block_size),
            self.engine.plan_execution(self.model, plan),
            {"holder": self.address},
            arrived,
            failures.append,
        )
        sources.start()
        try:
            yield sources
        finally:
            sources.stop()
            await self.runtime.settle()
            assert not failures, failures

    async def _tell(self, line: str, *, answer: bool = True) -> None:
        assert self.holder.stdin is not None
        assert self.holder.stdout is not None
        self.holder.stdin.write(f"{line}\n".encode())
        await self.holder.stdin.drain()
        if answer:
            await asyncio.wait_for(self.holder.stdout.readline(), DEADLINE_S)


def _plan(holder: Holder, context: int, total: int, num_layers: int, group: tuple[int, int] | None) -> ReusePlan:
    if group is None:
        sources = (LayerSource(LayerGroup(0, num_layers), holder),)
        segment = Segment(0, context, sources, kind=PlanKind.PARTIAL, loss=float("inf"))
    else:
        spans = [span for span in (LayerGroup(0, group[0]), LayerGroup(group[1], num_layers)) if len(span)]
        segment = Segment(
            0,
            context,
            tuple(LayerSource(span, holder) for span in spans),
            e_layer=group[0] or None,
            e_holder=holder if group[0] else None,
            recompute=LayerGroup(*group),
            kind=PlanKind.PARTIAL,
            loss=float("inf"),
        )
    return ReusePlan((segment, Segment(context, total)))


async def open_bench(
    family: ResolvedFamily, sender: str, receiver: str, group: tuple[int, int], context: int, suffix: int, seed: int
) -> Bench:
    """Load the receiver, start the holder, let it compute the context."""
    layout, chunk = family.layout, family.config.chunk_tokens
    rng = random.Random(seed)
    tokens = tuple(rng.randrange(100, family.vocab_size) for _ in range(context + suffix))
    root = root_hash(family.tokenizer_digest, layout.block_size, "bench")
    context_zmq = zmq.asyncio.Context()
    socket = context_zmq.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    blocks = context // layout.block_size + 1

    def settings(name: str, model: str, routers: tuple[str, ...]) -> NodeSettings:
        served = ServedModel(model, family.name, family.models[model].lineage, family.tokenizer_digest)
        return NodeSettings(
            name=name,
            role="prefill" if routers else "decode",
            family=family.name,
            host="127.0.0.1",
            bind_host="127.0.0.1",
            port=0,
            models=(served,),
            layout=layout,
            transition_layers=(group[0],) if group[0] else (),
            chunk_tokens=chunk,
            kv_bytes=2 * blocks * layout.kv_slot_bytes,
            e_bytes=2 * blocks * layout.e_block_bytes,
            routers=routers,
            backend="tcp",
            pull_s=DEADLINE_S,
            lease_s=60.0,
        )

    holder_settings = settings("holder", sender, (f"tcp://127.0.0.1:{port}",))
    holder = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvkin.tools.bench_holder",
        msgspec.json.encode(holder_settings).decode(),
        str(family.models[sender].path),
        str(family.models[sender].adapter_path or ""),
        "1",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert holder.stdout is not None
    engine = await asyncio.to_thread(build_engine, family, (receiver,))
    address = await _listening(holder)
    await asyncio.wait_for(_order(socket, sender, tokens[:context], root), DEADLINE_S)
    socket.close(linger=0)
    context_zmq.destroy(linger=0)
    held = Holder("holder", exact_provenance(family.models[sender].lineage.id))
    total = context + suffix
    return Bench(
        NodeRuntime(settings("receiver", receiver, ()), lambda link, message: None, NodeLoad),
        engine,
        holder,
        address,
        receiver,
        tokens,
        root,
        _plan(held, context, total, layout.num_layers, group),
        _plan(held, context, total, layout.num_layers, None),
    )


async def _listening(holder: asyncio.subprocess.Process) -> str:
    """The holder's stream address, from its first JSON line (log lines before it are skipped)."""
    assert holder.stdout is not None
    while line := await asyncio.wait_for(holder.stdout.readline(), DEADLINE_S):
        with contextlib.suppress(json.JSONDecodeError):
            found: dict[str, str] = json.loads(line)
            return found["address"]
    raise ChildProcessError("the holder process ended before it served")


async def _order(socket: zmq.asyncio.Socket, model: str, tokens: tuple[int, ...], root: bytes) -> None:
    """Be the holder's router for one order."""
    codec = node_to_router()
    while True:
        peer, body = await socket.recv_multipart()
        match codec.decode(body):
            case Register():
                await socket.send_multipart([peer, encode(Registered("bench", "1", 1.0))])
                await socket.send_multipart([peer, encode(PrefillOrder("bench", model, tokens, root, DEADLINE_S))])
            case OrderDone():
                return
            case Failed(_, code, why, _):
                raise ChildProcessError(f"the holder could not compute the context ({code}): {why}")
            case _:
                pass
