"""The data plane's contract on every backend, with the source in a process of its own that is killed and frozen.

``ucx-tcp`` is the ucx backend on a link without shared memory: there a frozen source stops the bytes, and a READ that was
given up goes on writing when it thaws, which is what quarantine is for.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from check_transport import CHECKS, FAILURE_CHECKS, LONG_S, REGION_BYTES, Check, make_content
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvkin.transport.backends import open_transport
from kvkin.transport.backends.inproc import InprocTransport
from kvkin.transport.data_plane import Copy, Peer, RegionAddress, Transport

CHILD = Path(__file__).with_name("serving_child.py")
CONTENT = make_content(REGION_BYTES)
VARIANTS = ("inproc", "tcp", "ucx", "ucx-tcp")


class ConsumerSide:
    """This process's half of a pair."""

    def __init__(self, backend: str) -> None:
        self.content = CONTENT
        self.local = np.zeros(REGION_BYTES, dtype=np.uint8)
        self.consumer: Transport = open_transport(backend)
        self.local_region = self.consumer.register(self.local)


class InprocPair(ConsumerSide):
    """The source plays the process that is frozen or killed."""

    def __init__(self) -> None:
        super().__init__("inproc")
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
        await self.consumer.close()
        await self.source.close()


class ProcessPair(ConsumerSide):
    """The source is a real child process."""

    def __init__(self, backend: str, source: ProcessPair | None = None) -> None:
        self.backend = backend
        if source is None:
            self._spawn(0)
        super().__init__(backend)
        if source is None:
            self.address = self._ready()
        else:
            self.child, self.address = source.child, source.address

    def _spawn(self, port: int) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        arguments = [sys.executable, str(CHILD), self.backend, str(REGION_BYTES), str(port)]
        pipe = subprocess.PIPE
        self.child = subprocess.Popen(arguments, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, text=True)

    def _ready(self) -> RegionAddress:
        assert self.child.stdout is not None
        line = self.child.stdout.readline().strip()
        assert line, f"the serving process ended: {self.child.communicate()[1]}"
        return msgspec.msgpack.decode(bytes.fromhex(line), type=RegionAddress)

    async def freeze(self) -> None:
        self.child.send_signal(signal.SIGSTOP)
        # the signal is asynchronous: wait until the kernel says that the process is stopped
        os.waitid(os.P_PID, self.child.pid, os.WSTOPPED | os.WNOWAIT)

    async def thaw(self) -> None:
        self.child.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        self.child.kill()
        self.child.communicate()

    async def replace(self) -> None:
        port = msgspec.msgpack.decode(self.address.metadata)[3] if self.backend == "tcp" else 0
        await self.kill()
        self._spawn(port)
        self.address = await asyncio.to_thread(self._ready)

    async def close(self) -> None:
        await self.consumer.close()
        if self.child.returncode is None:
            self.child.send_signal(signal.SIGCONT)
            try:
                self.child.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                await self.kill()


def make_pair(variant: str, patch: pytest.MonkeyPatch) -> InprocPair | ProcessPair:
    if variant == "ucx-tcp":
        patch.setenv("UCX_TLS", "tcp")
        patch.setenv("UCX_LOG_LEVEL", "fatal")
    return InprocPair() if variant == "inproc" else ProcessPair(variant.removesuffix("-tcp"))


def leaked(before: tuple[int, list[str], list[str]]) -> bool:
    after = held()
    return after[0] > before[0] or after[1:] != before[1:]


def held() -> tuple[int, list[str], list[str]]:
    """Open descriptors, our threads, shared-memory files."""
    gc.collect()
    threads = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("kvkin"))
    return len(os.listdir("/proc/self/fd")), threads, sorted(os.listdir("/dev/shm"))


@pytest.fixture
async def pair(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[InprocPair | ProcessPair]:
    before = held()
    made = make_pair(request.param, monkeypatch)
    yield made
    await made.close()
    assert not leaked(before), f"{before} -> {held()}"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=VARIANTS)
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[InprocPair | ProcessPair]:
    """One healthy source for all checks that leave it so."""
    before = held()
    with pytest.MonkeyPatch.context() as patch:
        made = make_pair(request.param, patch)
        yield made
        await made.close()
    assert not leaked(before), f"{before} -> {held()}"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(shared: InprocPair | ProcessPair, check: Check) -> None:
    await check(shared)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def peer(shared: InprocPair | ProcessPair) -> AsyncIterator[Peer]:
    peer = await shared.consumer.connect(shared.address, shared.local_region, deadline_s=LONG_S)
    yield peer
    await peer.close()


SPAN = 1 << 16
"""Random copies lie in the first bytes: collisions and neighbours become likely."""


@st.composite
def copy_lists(draw: st.DrawFn) -> list[Copy]:
    """Copies with disjoint destinations, so that their order does not matter."""
    ends = sorted(draw(st.sets(st.integers(0, SPAN), min_size=2, max_size=24)))
    copies = []
    for start, end in zip(ends, ends[1:], strict=False):
        size = draw(st.integers(0, end - start))
        remote = draw(st.one_of(st.just(start), st.integers(0, SPAN - size)))
        copies.append(Copy(remote, start, size))
    return draw(st.permutations(copies))


@pytest.mark.asyncio(loop_scope="module")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(copies=copy_lists())
async def test_random_copies(shared: InprocPair | ProcessPair, peer: Peer, copies: list[Copy]) -> None:
    shared.local[:SPAN] = 0
    expected = shared.local[:SPAN].copy()
    for copy in copies:
        source = shared.content[copy.remote_offset : copy.remote_offset + copy.num_bytes]
        expected[copy.local_offset : copy.local_offset + copy.num_bytes] = source
    await peer.pull(copies, deadline_s=LONG_S).wait()
    assert np.array_equal(shared.local[:SPAN], expected)


@pytest.mark.parametrize("check", FAILURE_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("pair", VARIANTS, indirect=True)
async def test_failures(pair: InprocPair | ProcessPair, check: Check) -> None:
    await check(pair)
