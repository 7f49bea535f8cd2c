"""The front's part of ``kvkin bench router``: a real router process, mock decode nodes, and clients that ask without a pause.

Router, nodes and clients are three processes on loopback TCP. The nodes compute nothing: they answer at once with a few tokens
and publish the request's blocks as real nodes do, so that every request is decoded, hashed, looked up, decided, sent to a node and
answered, and the index changes under it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import multiprocessing.process
import random
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import uvloop
import zmq
import zmq.asyncio

from kvkin.kv.errors import KvkinError
from kvkin.kv.hashing import block_hashes
from kvkin.kv.layout import KVLayout, Plane
from kvkin.kv.lineage import LayerWeights, fold_lineage
from kvkin.kv.plan import PlanKind
from kvkin.kv.provenance import Quality, exact_provenance
from kvkin.router.node import RouterNode
from kvkin.router.settings import FamilySettings, ModelSettings, RouterSettings
from kvkin.tools.logs import setup_logging
from kvkin.transport.codec import client_replies, encode, router_to_node
from kvkin.transport.messages import (
    PROTOCOL_VERSION,
    Error,
    Finished,
    Generate,
    NodeLoad,
    ReuseReport,
    Sampling,
    Timings,
)
from kvkin.transport.node_messages import (
    Done,
    Execute,
    Generated,
    Heartbeat,
    Holding,
    Holdings,
    Register,
    Registered,
    ServedModel,
    SnapshotWanted,
)

MODEL, LAYERS, BLOCK, VOCABULARY = "model", 4, 16, 1000
LAYOUT = KVLayout(LAYERS, (Plane("k", 1, 8), Plane("v", 1, 8)), 8, "float32", BLOCK)
LINEAGE = fold_lineage(b"root", b"float32", [LayerWeights(b"kv", b"whole", b"geometry")] * LAYERS)
TOKENIZER_DIGEST = bytes(16)
SYSTEM_TOKENS = 256
HEARTBEAT_S = 1.0
START_S = 60.0
WARM_UP_S = 1.0


class Front(msgspec.Struct, frozen=True):
    """What the front sustained. ``alone_p50_us`` is the time of a request when nobody else asks."""

    clients: int
    requests_per_s: float
    p50_us: float
    p99_us: float
    nodes: int
    prompt_tokens: int
    alone_p50_us: float


class Addresses(msgspec.Struct, frozen=True):
    """Where the router's process listens."""

    clients: str
    nodes: str


def bench_front(clients: int, seconds: float, nodes: int = 4, prompt_tokens: int = 512) -> Front:
    """Start router and nodes, measure, stop them. Raises KvkinError if they do not come up."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        addresses = msgspec.msgpack.decode(_start(stack, run_router, folder), type=Addresses)
        _start(stack, run_nodes, addresses.nodes, nodes)
        return uvloop.run(_measure(addresses.clients, clients, seconds, nodes, prompt_tokens))


def _start(stack: contextlib.ExitStack, target: Callable[..., None], *arguments: object) -> bytes:
    """Start a child process and return what it says when it is ready; ``stack`` ends it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    child.start()
    theirs.close()
    stack.callback(_end, child, ours)
    with contextlib.suppress(EOFError):  # it died, and said on stderr why
        if ours.poll(START_S):
            return ours.recv_bytes()
    raise KvkinError(f"a child process of the benchmark was not ready within {START_S:g} s, or died")


def _end(child: multiprocessing.process.BaseProcess, connection: Connection) -> None:
    connection.close()  # tells it to end
    child.join(10.0)
    if child.is_alive():
        child.kill()
        child.join()


async def _closed(connection: Connection) -> None:
    """Return when the other side closes the pipe."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(connection.fileno(), ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(connection.fileno())


# --- the router's process -----------------------------------------------------------------------------------------------


def run_router(connection: Connection, folder: str) -> None:
    setup_logging("error")
    uvloop.run(_serve(connection, _settings(Path(folder))))


async def _serve(connection: Connection, settings: RouterSettings) -> None:
    async with RouterNode(settings) as node:
        addresses = Addresses(node.client_address, node.node_address)
        connection.send_bytes(msgspec.msgpack.encode(addresses))
        await _closed(connection)


def _settings(folder: Path) -> RouterSettings:
    """A family of one model; its tokenizer is never asked, as prompts come as ids."""
    words = {"<unk>": 0, **{f"w{number}": number for number in range(1, VOCABULARY)}}
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    family = FamilySettings(
        name="family", base_model=MODEL, layout=LAYOUT, tokenizer_digest=TOKENIZER_DIGEST, vocab_size=VOCABULARY
    )
    model = ModelSettings(
        name=MODEL,
        family="family",
        lineage=LINEAGE,
        tokenizer_dir=str(folder),
        vocab_size=VOCABULARY,
        max_context_tokens=1 << 20,
    )
    return RouterSettings(
        name="router",
        families={"family": family},
        models={MODEL: model},
        client_address="tcp://127.0.0.1:0",
        node_address="tcp://127.0.0.1:0",
        index_max_blocks=20_000,
    )


# --- the nodes' process -------------------------------------------------------------------------------------------------


def run_nodes(connection: Connection, address: str, count: int) -> None:
    uvloop.run(_mock_nodes(connection, address, count))


async def _mock_nodes(connection: Connection, address: str, count: int) -> None:
    context = zmq.asyncio.Context()
    nodes = [_MockNode(context, address, f"d{number}") for number in range(count)]
    tasks = [asyncio.create_task(coroutine) for node in nodes for coroutine in (node.read(), node.beat())]
    await asyncio.gather(*(node.registered.wait() for node in nodes))
    connection.send_bytes(b"ready")
    await _closed(connection)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    context.destroy(linger=0)


class _MockNode:
    """A decode node that answers at once: two messages of tokens, its holdings, and the end."""

    ANSWER = (1, 2, 3, 4)

    def __init__(self, context: zmq.asyncio.Context, address: str, name: str) -> None:
        self.name = name
        self.registered = asyncio.Event()
        self._socket: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        self._socket.connect(address)
        self._codec = router_to_node()
        self._epoch = self._sequence = 0
        report = ReuseReport(PlanKind.PRIVATE, Quality.EXACT, 0.0, (), (), 0, 0, 0, "mock")
        self._end = (self.ANSWER, "stop", Timings(), report)

    async def read(self) -> None:
        model = ServedModel(MODEL, "family", LINEAGE, TOKENIZER_DIGEST)
        register = Register(
            PROTOCOL_VERSION, self.name, "decode", "one", f"tcp://127.0.0.1:1/{self.name}", (model,), LAYOUT
        )
        await self._say(register)
        while True:
            match self._codec.decode(await self._socket.recv()):
                case Execute() as execute:
                    await self._run(execute)
                case Registered():
                    await self._snapshot()
                    self.registered.set()
                case SnapshotWanted(wants_registration):
                    await (self._say(register) if wants_registration else self._snapshot())
                case _:
                    pass

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self._say(Heartbeat("one", NodeLoad()))

    async def _say(self, message: msgspec.Struct) -> None:
        await self._socket.send(encode(message))

    async def _snapshot(self) -> None:
        self._epoch, self._sequence = self._epoch + 1, 0
        await self._say(Holdings("one", 0, epoch=self._epoch))

    async def _run(self, execute: Execute) -> None:
        await self._say(Generated(execute.request_id, 0, self.ANSWER[:2], "one two "))
        await self._say(Generated(execute.request_id, 2, self.ANSWER[2:], "three four "))
        hashes = block_hashes(execute.token_ids, execute.root, BLOCK)
        added = tuple(
            Holding(block, parent, 0, number * BLOCK, LAYERS)
            for number, (parent, block) in enumerate(itertools.pairwise([execute.root, *hashes]))
        )
        self._sequence += 1
        provenances = (exact_provenance(LINEAGE.id),)
        await self._say(Holdings("one", self._sequence, provenances, added, epoch=self._epoch))
        await self._say(Done(execute.request_id, "one two three four ", *self._end))


# --- the clients --------------------------------------------------------------------------------------------------------


class _Asker:
    """A client with a connection of its own and one request at a time."""

    def __init__(self, context: zmq.asyncio.Context, address: str, number: int, prompt_tokens: int) -> None:
        self._socket: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        self._socket.connect(address)
        self._codec = client_replies()
        self._random = random.Random(number)
        self._system = [number % 8 + 1] * min(SYSTEM_TOKENS, prompt_tokens)
        self._new_tokens = prompt_tokens - len(self._system)
        self.times: list[tuple[float, float]] = []  # (end, seconds)

    async def ask_until(self, ended: Callable[[], bool]) -> None:
        for number in itertools.count():
            if ended():
                return
            await self._ask(str(number))

    async def _ask(self, request_id: str) -> None:
        new = self._random.choices(range(1, VOCABULARY), k=self._new_tokens)
        message = Generate(request_id, MODEL, token_ids=(*self._system, *new), sampling=Sampling(max_tokens=4))
        started = time.perf_counter()
        await self._socket.send(encode(message))
        while True:
            match self._codec.decode(await self._socket.recv()):
                case Finished():
                    now = time.perf_counter()
                    self.times.append((now, now - started))
                    return
                case Error(_, code, text):
                    raise KvkinError(f"the front answered {code}: {text}")
                case _:
                    pass


async def _measure(address: str, clients: int, seconds: float, nodes: int, prompt_tokens: int) -> Front:
    context = zmq.asyncio.Context()
    askers = [_Asker(context, address, number, prompt_tokens) for number in range(clients)]
    try:
        alone = await _ask_for(askers[:1], WARM_UP_S, 0.2)
        together = await _ask_for(askers, seconds, WARM_UP_S)
    finally:
        context.destroy(linger=0)
    return Front(
        clients=clients,
        requests_per_s=round(len(together) / seconds, 1),
        p50_us=_percentile(together, 0.5),
        p99_us=_percentile(together, 0.99),
        nodes=nodes,
        prompt_tokens=prompt_tokens,
        alone_p50_us=_percentile(alone, 0.5),
    )


async def _ask_for(askers: list[_Asker], seconds: float, warm_up_s: float) -> list[float]:
    """Sorted times of the requests that ended within ``seconds`` after the warm-up."""
    begin = time.perf_counter() + warm_up_s
    end = begin + seconds
    for asker in askers:
        asker.times.clear()
    await asyncio.gather(*(asker.ask_until(lambda: time.perf_counter() > end) for asker in askers))
    return sorted(taken for asker in askers for ended, taken in asker.times if begin <= ended <= end)


def _percentile(ordered: list[float], share: float) -> float:
    if not ordered:
        raise KvkinError("no request was answered within the time of the measurement")
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e6, 1)
