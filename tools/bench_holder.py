"""The holder of ``kvkin bench pipeline``: a real prefill node in a process of its own, whose link can be slowed down.

Both ends are here: the process (``python -m kvkin.tools.bench_holder SETUP``, a :class:`HolderSetup` as JSON) and :func:`holding`, with
which the bench starts it, orders a context of it like a router, and ends it. The process reads commands from stdin, a line each:
``rate BYTES_PER_S`` paces connections opened from then on, ``stop`` ends it, and so does the end of stdin: it never outlives the bench.
It answers with a JSON object a line on stdout.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from kvkin.configs.loader import load_cluster
from kvkin.configs.vllm_node import vllm_node
from kvkin.engines.api import Engine
from kvkin.kv.errors import DeadlineExceeded, NodeUnavailable
from kvkin.prefill_nodes.node import PrefillNode
from kvkin.tools.logs import setup_logging
from kvkin.tools.roles import resolve_worker
from kvkin.tools.vllm_engine import build_vllm, prepare_environment
from kvkin.transport.backends.tcp import TcpTransport
from kvkin.transport.codec import encode, node_to_router
from kvkin.transport.node_messages import Failed, OrderDone, PrefillOrder, Register, Registered
from kvkin.transport.node_runtime import NodeSettings

STOP_S = 10.0
ORDER = "bench"


class HolderSetup(msgspec.Struct, frozen=True):
    """What the process is to be. ``adapter`` is empty where the model is a whole checkpoint.

    With a ``file`` it runs its model as the node ``node`` of that cluster file does, on vLLM; else on the reference engine.
    """

    settings: NodeSettings
    checkpoint: str
    adapter: str
    device: str
    compute_dtype: str
    threads: int
    file: str = ""
    node: str = ""


# --- the process -------------------------------------------------------------------------------------------------------------


async def main(setup: HolderSetup) -> None:
    """Serve until told to stop."""
    settings = setup.settings
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    engine = await _unless_left(reader, _vllm_engine if setup.file else _reference_engine, setup)
    transport = TcpTransport(settings.bind_host)
    node = PrefillNode(settings, engine, transport)
    stop = asyncio.Event()
    serving = asyncio.ensure_future(node.serve(stop))
    _say("address", node.runtime.source_address)
    while line := (await reader.readline()).decode().split():
        if line[0] == "stop":
            break
        transport.limit_rate(int(line[1]))
        _say("rate", int(line[1]))
    stop.set()
    await serving


async def _unless_left(
    reader: asyncio.StreamReader, build: Callable[[HolderSetup], Engine], setup: HolderSetup
) -> Engine:
    """The engine, built on a thread; the bench says nothing meanwhile, so what comes from it is its end, and then this process ends."""
    building = asyncio.ensure_future(asyncio.to_thread(build, setup))
    leaving = asyncio.ensure_future(reader.readline())
    await asyncio.wait((building, leaving), return_when=asyncio.FIRST_COMPLETED)
    if not building.done():
        os._exit(1)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    return await building


def _reference_engine(setup: HolderSetup) -> Engine:
    import torch
    from transformers.utils.logging import disable_progress_bar

    from kvkin.engines.loading import load_model
    from kvkin.engines.reference import ReferenceEngine

    settings = setup.settings
    torch.set_num_threads(setup.threads)
    disable_progress_bar()
    adapter = Path(setup.adapter) if setup.adapter else None
    model = load_model(Path(setup.checkpoint), adapter, device=setup.device, compute_dtype=setup.compute_dtype)
    return ReferenceEngine(
        {settings.models[0].name: model}, block_size=settings.layout.block_size, chunk_tokens=settings.chunk_tokens
    )


def _vllm_engine(setup: HolderSetup) -> Engine:
    config = load_cluster(Path(setup.file))
    family = resolve_worker(config, setup.node)
    node = vllm_node(config, family, setup.node)
    assert node is not None, f"{setup.node} of {setup.file} runs on vLLM"
    prepare_environment(node)
    return build_vllm(family, (setup.settings.models[0].name,), node)


def _say(key: str, value: object) -> None:
    print(json.dumps({key: value}), flush=True)


# --- the bench's end of it ---------------------------------------------------------------------------------------------------


class HolderProcess:
    """The running process. Everything raises NodeUnavailable once it has ended, DeadlineExceeded where it does not answer."""

    def __init__(self, process: asyncio.subprocess.Process, deadline_s: float) -> None:
        self.process, self.address = process, ""
        self._deadline_s = deadline_s

    async def set_rate(self, bytes_per_s: int) -> None:
        """Pace the connections that are opened from now on; 0 lifts the limit."""
        await self._tell(f"rate {bytes_per_s}")
        await self.answer("rate")

    async def stop(self) -> None:
        """Ask it to end, and wait for a while until it has."""
        with contextlib.suppress(NodeUnavailable, TimeoutError):
            await self._tell("stop")
            await asyncio.wait_for(self.process.wait(), STOP_S)

    async def answer(self, key: str) -> Any:
        """What it says of ``key``; anything else on its stdout is skipped."""
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(self._deadline_s):
                while line := await self.process.stdout.readline():
                    with contextlib.suppress(json.JSONDecodeError):
                        said = json.loads(line)
                        if isinstance(said, dict) and key in said:
                            return said[key]
        except TimeoutError:
            raise DeadlineExceeded(f"the holder process did not answer within {self._deadline_s:g} s") from None
        raise NodeUnavailable("the holder process has ended")

    async def compute(self, order: PrefillOrder, socket: zmq.asyncio.Socket) -> None:
        """Be its router until it has computed ``order``."""
        ordering = asyncio.ensure_future(_order(socket, order))
        ending = asyncio.ensure_future(self.process.wait())
        waiting: tuple[asyncio.Future[Any], ...] = (ordering, ending)
        try:
            done, _ = await asyncio.wait(waiting, timeout=self._deadline_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        if ordering in done:
            ordering.result()
        elif ending in done:
            raise NodeUnavailable("the holder process ended before it had computed the context")
        else:
            raise DeadlineExceeded(f"the holder did not compute the context within {self._deadline_s:g} s")

    async def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{line}\n".encode())
            await self.process.stdin.drain()
        except ConnectionError:
            raise NodeUnavailable("the holder process has ended") from None


@contextlib.asynccontextmanager
async def holding(
    setup: HolderSetup, token_ids: Sequence[int], root: bytes, deadline_s: float
) -> AsyncIterator[HolderProcess]:
    """A holder that has computed the KV of ``token_ids``; it is gone afterwards, whatever happens inside.

    Raises NodeUnavailable if it ends or cannot compute, DeadlineExceeded after ``deadline_s``.
    """
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    setup = msgspec.structs.replace(
        setup, settings=msgspec.structs.replace(setup.settings, routers=(f"tcp://127.0.0.1:{port}",))
    )
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "kvkin.tools.bench_holder",
            msgspec.json.encode(setup).decode(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C at the terminal reaches the bench alone
        )
        try:
            holder = HolderProcess(process, deadline_s)
            holder.address = await holder.answer("address")
            model = setup.settings.models[0].name
            await holder.compute(PrefillOrder(ORDER, model, tuple(token_ids), root, deadline_s), socket)
            yield holder
            await holder.stop()
        finally:
            # nothing in it is worth a farewell
            if process.returncode is None:
                process.kill()
            await process.wait()
    finally:
        socket.close(linger=0)
        context.destroy(linger=0)


async def _order(socket: zmq.asyncio.Socket, order: PrefillOrder) -> None:
    codec = node_to_router()
    ordered = False
    while True:
        peer, body = await socket.recv_multipart()
        match codec.decode(body):
            case Register():
                await socket.send_multipart([peer, encode(Registered(ORDER, "1", 1.0))])
                if not ordered:
                    await socket.send_multipart([peer, encode(order)])
                ordered = True
            case OrderDone():
                return
            case Failed(_, code, why, _):
                raise NodeUnavailable(f"the holder cannot compute the context ({code}): {why}")
            case _:
                pass


if __name__ == "__main__":
    setup_logging("warning")
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=HolderSetup)))
