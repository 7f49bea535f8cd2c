"""``kvkin bench transport``: how close the data plane comes to what the machine can do.

Five arms move the same bytes between two processes: the backends ``ucx`` and ``tcp``, a bare NIXL READ loop, a raw socket,
and ``memcpy`` within this process. They run in turns (ABAB), so that whatever else the machine does hits all alike, and
only ratios within one run count. The source is one child process that serves all arms from the same memory.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import secrets
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Annotated

import msgspec
import numpy as np
import tyro
import uvloop
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from kvkin.kv.errors import ConfigError
from kvkin.transport.backends import open_transport
from kvkin.transport.data_plane import Copy, Peer, RegionAddress, Transport

ARMS = ("memcpy", "nixl", "ucx", "socket", "tcp")
RATIOS = (("ucx", "nixl"), ("ucx", "memcpy"), ("tcp", "socket"))
DEADLINE_S = 60.0
POLL_S = 50e-6
BATCH_BYTES = 64 << 20
"""One measurement is the mean of transfers of this many bytes in all (at most 32): a node pulls layer after layer, too."""

Arm = Callable[[int], Awaitable[None]]


class Addresses(msgspec.Struct):
    """What the source tells the bench."""

    ucx: RegionAddress
    tcp: RegionAddress
    socket_port: int


def parse_size(text: str) -> int:
    """Bytes of ``64K``, ``16M`` or ``4096``. Raises ConfigError."""
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    digits = text if factor == 1 else text[:-1]
    if not digits.isdigit() or int(digits) == 0:
        raise ConfigError("sizes", f"{text!r} is not a size", "a number of bytes, optionally with K, M or G")
    return int(digits) * factor


@dataclass(frozen=True)
class BenchTransport:
    """Compare the data plane with bare NIXL, a raw socket and memcpy (ratios within this run)."""

    sizes: tuple[str, ...] = ("64K", "256K", "1M", "4M", "16M", "64M")
    """Bytes of one transfer, with K, M or G."""
    repeats: int = 9
    """Measurements of each arm at each size, interleaved; at least 7 for figures to be published."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the results as JSON instead of a table."""

    def run(self) -> int:
        sizes = [parse_size(size) for size in self.sizes]
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        source = context.Process(target=serve, args=(theirs, max(sizes)), daemon=True)
        source.start()
        theirs.close()
        try:
            addresses = msgspec.msgpack.decode(ours.recv_bytes(), type=Addresses)
            seconds = uvloop.run(measure(addresses, sizes, self.repeats))
        finally:
            ours.close()
            source.join(10)
            if source.is_alive():
                source.kill()
                source.join()
        print(json.dumps(results(seconds))) if self.json else Console().print(table(seconds))
        return 0


Seconds = dict[tuple[str, int], list[float]]
"""(arm, bytes) -> seconds of each repeat, in order: the same index is the same turn."""


async def measure(addresses: Addresses, sizes: list[int], repeats: int) -> Seconds:
    """Run all arms in turns."""
    largest = max(sizes)
    transports = {name: open_transport(name) for name in ("ucx", "tcp")}
    raw = socket.create_connection(("127.0.0.1", addresses.socket_port))
    try:
        arms: dict[str, Arm] = {
            "memcpy": memcpy_arm(largest),
            "nixl": nixl_arm(addresses.ucx, largest),
            "ucx": await pull_arm(transports["ucx"], addresses.ucx, largest),
            "socket": socket_arm(raw, largest),
            "tcp": await pull_arm(transports["tcp"], addresses.tcp, largest),
        }
        seconds: Seconds = {(name, size): [] for name in ARMS for size in sizes}
        for size in sizes:
            count = max(1, min(32, BATCH_BYTES // size))
            for turn in range(repeats + 1):
                # forwards and backwards in turns: no arm always runs after the same neighbour
                for name in ARMS if turn % 2 else reversed(ARMS):
                    # not timed: the arm before has put the source to sleep and its own bytes into the caches
                    await arms[name](size)
                    started = time.perf_counter()
                    for _ in range(count):
                        await arms[name](size)
                    if turn > 0:  # the first one warms up
                        seconds[name, size].append((time.perf_counter() - started) / count)
        return seconds
    finally:
        raw.close()
        for transport in transports.values():
            await transport.close()


def memcpy_arm(largest: int) -> Arm:
    source, target = np.ones(largest, dtype=np.uint8), np.zeros(largest, dtype=np.uint8)

    async def run(size: int) -> None:
        target[:size] = source[:size]

    return run


async def pull_arm(transport: Transport, address: RegionAddress, largest: int) -> Arm:
    region = transport.register(np.zeros(largest, dtype=np.uint8))
    peer: Peer = await transport.connect(address, region, deadline_s=DEADLINE_S)

    async def run(size: int) -> None:
        await peer.pull([Copy(0, 0, size)], deadline_s=DEADLINE_S).wait()

    return run


def nixl_arm(address: RegionAddress, largest: int) -> Arm:
    """NIXL as its own examples use it, without its progress thread: that one would spin on a core, in every arm's way."""
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    from kvkin.transport.backends.ucx import UcxMetadata

    # NIXL logs its start to standard output, where the JSON goes
    logging.getLogger("nixl").setLevel(logging.WARNING)
    metadata = msgspec.msgpack.decode(address.metadata, type=UcxMetadata)
    agent = nixl_agent(f"bench-{secrets.token_hex(8)}", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    target = np.zeros(largest, dtype=np.uint8)
    agent.register_memory([(target.ctypes.data, largest, 0, "")], "DRAM")
    name = agent.add_remote_agent(metadata.agent)
    name = name.decode() if isinstance(name, bytes) else name

    async def run(size: int) -> None:
        handle = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs([(target.ctypes.data, size, 0)], "DRAM"),
            agent.get_xfer_descs([(metadata.base, size, 0)], "DRAM"),
            name,
        )
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(POLL_S)  # noqa: ASYNC251 - a bare loop has no event loop to care for
            state = agent.check_xfer_state(handle)
        assert state == "DONE", state
        agent.release_xfer_handle(handle)

    return run


def socket_arm(raw: socket.socket, largest: int) -> Arm:
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    target = np.zeros(largest, dtype=np.uint8)

    async def run(size: int) -> None:
        raw.sendall(struct.pack("!Q", size))
        view = target.data[:size]
        while len(view):
            view = view[raw.recv_into(view) :]

    return run


def serve(pipe: Connection, num_bytes: int) -> None:
    """The source process: serves until the pipe closes."""
    memory = np.arange(num_bytes, dtype=np.uint64).view(np.uint8)[:num_bytes]
    uvloop.run(_serve(pipe, memory))


async def _serve(pipe: Connection, memory: NDArray[np.uint8]) -> None:
    transports = [open_transport("ucx"), open_transport("tcp")]
    ucx, tcp = (transport.address(transport.register(memory)) for transport in transports)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        raw = threading.Thread(target=_serve_socket, args=(listener, memory), daemon=True)
        raw.start()
        pipe.send_bytes(msgspec.msgpack.encode(Addresses(ucx, tcp, listener.getsockname()[1])))
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(pipe.fileno(), ended.set)
        await ended.wait()
    for transport in transports:
        await transport.close()


def _serve_socket(listener: socket.socket, memory: NDArray[np.uint8]) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while request := connection.recv(8, socket.MSG_WAITALL):
            connection.sendall(memory.data[: struct.unpack("!Q", request)[0]])


def results(seconds: Seconds) -> dict[str, list[dict[str, str | int | float]]]:
    """The JSON form: medians."""
    rows = [(arm, size, float(np.median(times))) for (arm, size), times in seconds.items()]
    return {
        "results": [
            {
                "backend": arm,
                "bytes": size,
                "gb_per_s": round(size / median / 1e9, 4),
                "latency_us": round(median * 1e6, 2),
            }
            for arm, size, median in rows
        ]
    }


def ratio(seconds: Seconds, arm: str, base: str, size: int) -> tuple[float, float, float]:
    """Median bandwidth ratio of the pairs, with its 95 % bootstrap interval."""
    pairs = np.array(seconds[base, size]) / np.array(seconds[arm, size])
    draws = np.random.default_rng(0).choice(pairs, size=(2000, len(pairs)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return float(np.median(pairs)), float(low), float(high)


def table(seconds: Seconds) -> Table:
    """GB/s and latency of each arm, then the ratios."""
    repeats = len(next(iter(seconds.values())))
    view = Table(title=f"kvkin bench transport: GB/s (us), medians of {repeats} interleaved repeats")
    view.add_column("bytes", justify="right")
    for arm in ARMS:
        view.add_column(arm, justify="right")
    for arm, base in RATIOS:
        view.add_column(f"{arm} / {base}", justify="right")
    for size in sorted({size for _, size in seconds}):
        medians = [float(np.median(seconds[arm, size])) for arm in ARMS]
        cells = [f"{size / median / 1e9:.2f} ({median * 1e6:.0f})" for median in medians]
        for arm, base in RATIOS:
            middle, low, high = ratio(seconds, arm, base, size)
            cells.append(f"{middle:.2f} [{low:.2f}, {high:.2f}]")
        view.add_row(f"{size:,}", *cells)
    return view


if __name__ == "__main__":
    raise SystemExit(tyro.cli(BenchTransport).run())
