"""The two systems that ``kvkin bench engine disaggregated`` compares, each of several processes, asked alike: a prompt, and a greedy answer.

``KvkinSystem`` is a real cluster: router, one prefill node of the base, a decode node for each model, asked by the ZeroMQ client. ``VllmSystem`` is
vLLM's disaggregated mode: for each model a process that prefills and one that decodes, NIXL between them, and this process in the place of
vLLM's proxy: it sends the prompt to the one, and what that says of its KV to the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from kvkin.kv.errors import DeadlineExceeded, NodeUnavailable
from kvkin.kv.generation import Sampling
from kvkin.tools.bench_engine_children import Child, running
from kvkin.tools.bench_engine_messages import First, Generate, Generated, Setup
from kvkin.tools.bench_engine_result import Answer
from kvkin.tools.bench_engine_setup import START_S, Bench
from kvkin.tools.bench_serving_sweep import is_idle
from kvkin.tools.cluster_processes import ClusterProcesses
from kvkin.tools.local import status_until
from kvkin.tools.ports import free_ports
from kvkin.transport.client import AsyncClient

REGISTER_S = 60.0
IDLE_S = 120.0
ANSWER_S = 600.0

PREFILL_ONLY: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}
"""What vLLM's proxy sends with a prompt that is to be decoded elsewhere (vllm docs, NixlConnector)."""


# Requests of one client, one after the other: (model, prompt).
Session = Sequence[tuple[str, tuple[int, ...]]]


class System(Protocol):
    """One of the two. ``processes`` by what they are for."""

    engines: dict[str, Any]
    processes: dict[str, int]

    async def ask(self, model: str, token_ids: Sequence[int], new_tokens: int, share_hint: float) -> Answer:
        """The answer; ``share_hint`` is how many more requests on this context are announced (negative: it is not known)."""
        ...

    async def settle(self) -> None:
        """Until nothing runs any more."""


class KvkinSystem:
    """A running cluster of kvkin."""

    def __init__(self, client: AsyncClient, bench: Bench) -> None:
        self._client = client
        nodes = bench.config.prefill_nodes | bench.config.decode_nodes
        self.engines: dict[str, Any] = {name: {"models": list(node.models)} for name, node in nodes.items()}
        self.processes = {
            "router": len(bench.config.routers),
            "prefill": len(bench.config.prefill_nodes),
            "decode": len(bench.config.decode_nodes),
        }

    async def ask(self, model: str, token_ids: Sequence[int], new_tokens: int, share_hint: float) -> Answer:
        started = time.perf_counter()
        first_s = 0.0
        sampling = Sampling(max_tokens=new_tokens, ignore_eos=True)
        asked = self._client.stream(
            model, token_ids=token_ids, sampling=sampling, reuse="any", share_hint=share_hint, timeout_s=ANSWER_S
        )
        async with asked as stream:
            async for _ in stream:
                first_s = first_s or time.perf_counter() - started
            last_s = time.perf_counter() - started
        done = stream.finished
        assert done is not None, "a stream without an error ends with finished"
        report = done.report
        reused = report.tokens_reused + report.tokens_cached
        return Answer(model, len(token_ids), done.token_ids, first_s, last_s, reused, report.kind.value)

    async def settle(self) -> None:
        """Orders in the background, too: they are paid for in the round that gave them."""
        await status_until(self._client.status, is_idle, IDLE_S)


@contextlib.asynccontextmanager
async def kvkin_system(bench: Bench) -> AsyncIterator[KvkinSystem]:
    """The cluster of the bench's file, started here and stopped afterwards."""
    processes = ClusterProcesses(bench.file, bench.config, log_dir=bench.logs)
    await processes.start()
    try:
        router = next(iter(bench.config.routers.values()))
        async with AsyncClient(f"tcp://{router.host}:{router.client_port}") as client:
            workers = set(bench.config.prefill_nodes) | set(bench.config.decode_nodes)
            await status_until(client.status, lambda now: {one.name for one in now.nodes} >= workers, REGISTER_S)
            yield KvkinSystem(client, bench)
    finally:
        await processes.stop(at_once=True)


class VllmSystem:
    """Pairs of running processes by model: (prefill, decode)."""

    def __init__(self, pairs: Mapping[str, tuple[Child, Child]]) -> None:
        self._pairs = pairs
        self.engines: dict[str, Any] = {child.name: child.settings for pair in pairs.values() for child in pair}
        self.processes = {"proxy": 0, "prefill": len(pairs), "decode": len(pairs)}

    async def ask(self, model: str, token_ids: Sequence[int], new_tokens: int, share_hint: float) -> Answer:
        prefill, decode = self._pairs[model]
        ids, started = tuple(token_ids), time.perf_counter()
        async with prefill.asking(Generate(ids, 1, PREFILL_ONLY)) as number:
            await prefill.reply(number, First, ANSWER_S)
            prefilled = await prefill.reply(number, Generated, ANSWER_S)
        if not prefilled.transfer:
            raise NodeUnavailable(f"{prefill.name} did not say where the KV is; {prefill.log_end()}")
        async with decode.asking(Generate(ids, new_tokens, prefilled.transfer)) as number:
            await decode.reply(number, First, ANSWER_S)
            first_s = time.perf_counter() - started
            generated = await decode.reply(number, Generated, ANSWER_S)
            last_s = time.perf_counter() - started
        cached = prefilled.cached_tokens
        return Answer(model, len(ids), generated.token_ids, first_s, last_s, cached, "remote prefill")

    async def settle(self) -> None:
        """Nothing of it goes on once all answers are there."""


@contextlib.asynccontextmanager
async def vllm_system(bench: Bench, models: Sequence[str], threads: int) -> AsyncIterator[VllmSystem]:
    """Two processes for each model, started here and gone afterwards."""
    ports = iter(free_ports(2 * len(models)))
    pairs = {}
    for model in models:
        node = bench.decode_node(model)
        named = [f"vllm-{role}-{node.removeprefix('decode-')}" for role in ("prefill", "decode")]
        first, second = (
            Child(
                name,
                Setup("nixl", str(bench.file), node, side_channel_port=next(ports)),
                threads,
                bench.logs / f"{name}.log",
            )
            for name in named
        )
        pairs[model] = (first, second)
    async with running([child for pair in pairs.values() for child in pair], START_S):
        yield VllmSystem(pairs)


async def in_flight(
    system: System, sessions: Sequence[Session], most: int, new_tokens: int
) -> tuple[list[Answer], float]:
    """(answers in the order of ``sessions`` and of their requests, seconds until the last one).

    At most ``most`` sessions at a time, begun in order; the requests of one come one after the other, each when the one before is answered, and say how
    many more will come.
    """
    turn = asyncio.Semaphore(most)

    async def one(session: Session) -> list[Answer]:
        try:
            return [
                await system.ask(model, ids, new_tokens, float(len(session) - number) if len(session) > 1 else -1.0)
                for number, (model, ids) in enumerate(session, 1)
            ]
        finally:
            turn.release()

    started, tasks = time.perf_counter(), []
    try:
        async with asyncio.timeout(ANSWER_S):
            for session in sessions:
                await turn.acquire()
                tasks.append(asyncio.create_task(one(session)))
            answers = [answer for answers in await asyncio.gather(*tasks) for answer in answers]
    except TimeoutError:
        raise DeadlineExceeded(f"{len(sessions)} sessions took longer than {ANSWER_S:.0f} s") from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return answers, time.perf_counter() - started
