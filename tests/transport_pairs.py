"""Pairs for the data plane's contract suite: a consumer in this process, a source in a child that can be stopped and killed."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from check_transport import REGION_BYTES, make_content

from kvkin.transport.backends import open_transport
from kvkin.transport.backends.inproc import InprocTransport
from kvkin.transport.backends.tcp_wire import decode_metadata
from kvkin.transport.data_plane import RegionAddress, Transport

CHILD = Path(__file__).with_name("serving_child.py")
CONTENT = make_content(REGION_BYTES)
ACK_S = 60.0


class Source:
    """A serving child process."""

    def __init__(self, backend: str, port: int = 0) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        arguments = [sys.executable, str(CHILD), backend, str(REGION_BYTES), str(port)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(arguments, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, text=True)
        self._address: RegionAddress | None = None

    @property
    def address(self) -> RegionAddress:
        """Waits for the child's ready-ack the first time."""
        if self._address is None:
            assert self.process.stdout is not None
            assert select.select([self.process.stdout], [], [], ACK_S)[0], "the serving process does not get ready"
            line = self.process.stdout.readline().strip()
            assert line, f"the serving process ended: {self.process.communicate()[1]}"
            self._address = msgspec.msgpack.decode(bytes.fromhex(line), type=RegionAddress)
        return self._address

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        # the signal is asynchronous: return once the kernel says that the process is stopped
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        if self.alive:
            self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self) -> str:
        """Let it end by itself; returns what it wrote to standard error."""
        self.thaw()
        try:
            return self.process.communicate(timeout=10)[1]
        except subprocess.TimeoutExpired:
            self.kill()
            raise


class ConsumerSide:
    """This process's half of a pair."""

    def __init__(self, consumer: Transport) -> None:
        self.content = CONTENT
        self.local = np.zeros(REGION_BYTES, dtype=np.uint8)
        self.consumer = consumer
        self.local_region = consumer.register(self.local)

    async def close(self) -> None:
        async with asyncio.timeout(30):
            await self.consumer.close()


class InprocPair(ConsumerSide):
    """The source only plays a process that is frozen or killed."""

    def __init__(self) -> None:
        super().__init__(open_transport("inproc"))
        self._start()

    def _start(self) -> None:
        self.source = InprocTransport()
        self.address = self.source.address(self.source.register(self.content.copy()))

    async def freeze(self) -> None:
        self.source.freeze()

    async def thaw(self) -> None:
        self.source.thaw()

    async def kill(self) -> None:
        await self.source.close()

    async def replace(self) -> None:
        await self.source.close()
        self._start()

    async def close(self) -> None:
        await super().close()
        await self.source.close()


class ProcessPair(ConsumerSide):
    """The source is a real process; it outlives the pair, for starting one takes seconds on a busy machine."""

    def __init__(self, source: Source, consumer: Transport) -> None:
        super().__init__(consumer)
        self.source = source
        assert source.address.num_bytes == REGION_BYTES

    @property
    def address(self) -> RegionAddress:
        return self.source.address

    async def freeze(self) -> None:
        self.source.freeze()

    async def thaw(self) -> None:
        self.source.thaw()

    async def kill(self) -> None:
        self.source.kill()

    async def replace(self) -> None:
        backend, old = self.address.backend, self.address.metadata
        self.source.kill()
        self.source = Source(backend, decode_metadata(old).port if backend == "tcp" else 0)
        await asyncio.to_thread(lambda: self.source.address)

    async def close(self) -> None:
        await super().close()
        self.source.thaw()


Pair = InprocPair | ProcessPair
VARIANTS = ("inproc", "tcp", "ucx", "ucx-tcp")
"""``ucx-tcp`` is the ucx backend on a link without shared memory or RDMA. There UCX emulates READ and may abort the *process* when
an endpoint is torn down in the middle of one, this test process included; the backend refuses such links between hosts. So
the variant runs only where KVKIN_TEST_UCX_TCP is set."""


def prepare(variant: str, patch: pytest.MonkeyPatch) -> str:
    """Set the environment of a variant; returns its backend."""
    if variant == "ucx-tcp":
        if not os.environ.get("KVKIN_TEST_UCX_TCP"):
            pytest.skip(
                "UCX may abort the process on links where it emulates READ: set KVKIN_TEST_UCX_TCP=1 to run these"
            )
        patch.setenv("UCX_TLS", "tcp")
        # UCX reports every peer that goes away
        patch.setenv("UCX_LOG_LEVEL", "fatal")
    return variant.removesuffix("-tcp")


@dataclass(frozen=True)
class Held:
    """What this process holds and a transport must give back."""

    descriptors: int
    threads: tuple[str, ...]
    shared_memory: tuple[str, ...]

    def grew_to(self, after: Held) -> bool:
        """More descriptors are a leak; fewer only mean that the collector ran."""
        return (
            after.descriptors > self.descriptors
            or after.threads != self.threads
            or after.shared_memory != self.shared_memory
        )


def held() -> Held:
    gc.collect()
    threads = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("kvkin"))
    # other programs on this machine come and go there, too
    files = sorted(name for name in os.listdir("/dev/shm") if name.startswith(("ucx", "nixl", "kvkin")))
    return Held(len(os.listdir("/proc/self/fd")), tuple(threads), tuple(files))
