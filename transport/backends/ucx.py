"""Backend ``ucx``: one-sided READ with NIXL over UCX (shared memory on one host, RDMA between hosts).

A transport has one *serving* agent in which all regions are registered, and one *pulling* agent per peer. They are apart
because only the end of an agent makes sure that an abandoned READ stops writing (releasing its handle or removing the
remote agent does not, where UCX emulates READ); with an agent of its own a bad peer can be cut off without hurting
the pulls from others. A pulling agent costs about 10 descriptors and 50 ms to connect, and no thread.

Connecting reads the peer's *hello page* (magic, version, incarnation), so that the link is proven and warm, and an
address of a process that was replaced is noticed. A frozen peer never causes an error in UCX: deadlines are ours.
On one host, UCX reads the peer's memory through the kernel: bytes of a frozen process still arrive, and that is fine.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvkin.kv.errors import KvkinError, LocalTransportError, SourceLost, SourceRefused, SourceTimeout
from kvkin.transport.backends.base import PullTransfer, TransportBase, check_copies
from kvkin.transport.backends.nixl import NixlAgent
from kvkin.transport.backends.ucx_link import Job, Link, make_pieces
from kvkin.transport.backends.ucx_worker import UcxWorker
from kvkin.transport.data_plane import Copy, RegionAddress

VERSION = 1
HELLO_BYTES = 64


class UcxMetadata(msgspec.Struct, frozen=True, array_like=True):
    """The opaque part of an address. New fields go to the end with a default."""

    version: int
    incarnation: bytes
    hello: int
    base: int
    agent: bytes
    host: str = ""
    """Kernel boot id: equal where the processes share memory. Empty means unknown."""
    rdma: bool = False


def this_host() -> str:
    """The kernel's boot id."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def has_rdma() -> bool:
    """Whether this host has an InfiniBand, RoCE or EFA device."""
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


def hello_page(incarnation: bytes) -> NDArray[np.uint8]:
    """What a peer finds at ``UcxMetadata.hello``."""
    return np.frombuffer((b"kvkin-ucx" + VERSION.to_bytes(2, "big") + incarnation).ljust(HELLO_BYTES, b"\0"), np.uint8)


class UcxTransport(TransportBase):
    """One endpoint (the contract's ``Transport``)."""

    name = "ucx"

    def __init__(self, *, loopback_only: bool = True, quarantine_max_bytes: int = 256 << 20) -> None:
        super().__init__()
        self.loopback_only, self.quarantine_max_bytes = loopback_only, quarantine_max_bytes
        self._incarnation = secrets.token_bytes(16)
        self._agent = NixlAgent(f"kvkin-{self._incarnation.hex()}", progress=True, loopback_only=loopback_only)
        self._hello = hello_page(self._incarnation).copy()
        self._agent.register(self._hello)
        self.worker = UcxWorker()
        self._peers: set[UcxPeer] = set()

    def register(self, buffer: NDArray[np.uint8]) -> int:
        region = self.add_region(buffer)
        try:
            self._agent.register(buffer)
        except LocalTransportError:
            del self.regions[region]
            raise
        return region

    def address(self, region: int) -> RegionAddress:
        buffer = self.region_buffer(region)
        hello, base, agent = self._hello.ctypes.data, buffer.ctypes.data, self._agent.metadata()
        metadata = UcxMetadata(VERSION, self._incarnation, hello, base, agent, this_host(), has_rdma())
        return RegionAddress(self.name, region, buffer.size, msgspec.msgpack.encode(metadata))

    async def connect(self, address: RegionAddress, local_region: int, *, deadline_s: float) -> UcxPeer:
        if self.closed:
            raise LocalTransportError("the transport is closed")
        local = self.region_buffer(local_region)
        if address.backend != self.name:
            raise LocalTransportError(f"address of backend {address.backend!r} given to {self.name!r}")
        metadata = _decode(address.metadata)
        if metadata.host not in ("", this_host()) and not (metadata.rdma and has_rdma()):
            # UCX would emulate READ over TCP: slower than the tcp backend, and a consumer that goes away in the middle
            # can abort the source's process with an assertion in UCX
            raise LocalTransportError("the peer is on another host and not both have RDMA devices: use the backend tcp")
        peer = UcxPeer(self, local, address.num_bytes, metadata)
        self._peers.add(peer)
        try:
            await peer.open(deadline_s)
        except BaseException:
            # a cancelled connect leaves nothing behind either; the worker ends it on its own
            peer.disconnect(SourceLost("connecting failed"))
            raise
        return peer

    def forget(self, peer: UcxPeer) -> None:
        self._peers.discard(peer)

    def check_quarantine(self) -> None:
        """Disconnect the peers that hold back most, until the cap is kept."""
        held = sum(peer.held_bytes for peer in self._peers)
        for peer in sorted(self._peers, key=lambda peer: -peer.held_bytes):
            if held <= self.quarantine_max_bytes:
                return
            held -= peer.held_bytes
            peer.disconnect(SourceLost(f"{peer.held_bytes} bytes in quarantine: the peer was disconnected"))

    async def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for peer in list(self._peers):
            await peer.close()
        await self.worker.stop()
        self._agent.close()
        self.regions.clear()


class UcxPeer:
    """A pulling agent connected to one region of one peer."""

    def __init__(self, owner: UcxTransport, local: NDArray[np.uint8], remote_bytes: int, metadata: UcxMetadata) -> None:
        self._owner, self._local, self._remote_bytes, self._metadata = owner, local, remote_bytes, metadata
        self._scratch = np.zeros(HELLO_BYTES, dtype=np.uint8)
        self._unsettled: set[PullTransfer] = set()
        self._writing: set[PullTransfer] = set()
        self._lost: KvkinError | None = None
        self._own: deque[Job] = deque()
        """Jobs that the loop posts itself (shared memory); nothing of them is ever in flight between two turns."""
        self._loop = asyncio.get_running_loop()
        self._down: asyncio.Future[None] = self._loop.create_future()
        self._link = Link(self._loop, self._on_down, owner.worker.wake)

    @property
    def held_bytes(self) -> int:
        """Destinations of pulls that were given up while pieces were in flight."""
        return sum(transfer.num_bytes for transfer in self._writing)

    async def open(self, deadline_s: float) -> None:
        """Connect and read the hello page."""
        worker, name = self._owner.worker, f"kvkin-{secrets.token_hex(16)}"
        buffers = [self._local, self._scratch]
        worker.add(self._link)
        worker.submit(partial(self._link.open, name, self._owner.loopback_only, buffers, self._metadata.agent))
        hello = PullTransfer(TransportBase(), HELLO_BYTES, deadline_s, self._abort)
        page = [Copy(0, 0, HELLO_BYTES)]
        job = self._track(hello, page, self._metadata.hello, self._scratch.ctypes.data)
        worker.submit(partial(self._link.start, job))
        try:
            await hello.wait()
        except SourceTimeout:
            raise SourceTimeout(f"the peer did not answer within {deadline_s:g} s") from None
        if not np.array_equal(self._scratch, hello_page(self._metadata.incarnation)):
            raise SourceRefused("the peer at this address is not the one that gave it out")

    def pull(self, copies: Sequence[Copy], *, deadline_s: float) -> PullTransfer:
        merged = check_copies(copies, self._remote_bytes, self._local.size)
        transfer = PullTransfer(self._owner, sum(copy.num_bytes for copy in merged), deadline_s, self._abort)
        if self._lost is not None:
            transfer.fail(SourceLost(str(self._lost)), settled=True)
        elif not merged:
            transfer.complete()
        else:
            self._own.append(self._track(transfer, merged, self._metadata.base, self._local.ctypes.data))
            if len(self._own) == 1:
                self._post()
        return transfer

    def _post(self) -> None:
        """Post one piece here on the loop, and the next one on its next turn; or hand all to the worker."""
        if not self._own:
            return
        job = self._own[0]
        done = None if self._link.asynchronous else self._link.try_now(job)
        if done is not True:
            if done is False:
                self._own.popleft()
            for waiting in self._own:
                self._owner.worker.submit(partial(self._link.start, waiting))
            self._own.clear()
            return
        if not job.pieces:
            self._own.popleft()
            job.transfer.complete()
        if self._own:
            self._loop.call_soon(self._post)

    def _track(self, transfer: PullTransfer, copies: Sequence[Copy], remote_base: int, local_base: int) -> Job:
        self._unsettled.add(transfer)
        transfer.on_settled = self._forget
        return Job(transfer, make_pieces(copies, remote_base, local_base))

    def _abort(self, transfer: PullTransfer) -> None:
        own = next((job for job in self._own if job.transfer is transfer), None)
        if own is not None:
            self._own.remove(own)
            transfer.settle()
            return
        # most pulls that are given up had nothing in flight: only what the worker reports counts against the cap
        self._owner.worker.submit(partial(self._link.abort, transfer, self._still_writing))

    def _still_writing(self, transfer: PullTransfer) -> None:
        if transfer in self._unsettled:
            self._writing.add(transfer)
            self._owner.check_quarantine()

    def _forget(self, transfer: PullTransfer) -> None:
        self._unsettled.discard(transfer)
        self._writing.discard(transfer)

    def disconnect(self, error: KvkinError) -> None:
        """Fail all pulls and tear the endpoint down without waiting for it."""
        if self._lost is None:
            self._lost = error
            self._fail_own()
            self._owner.worker.submit(partial(self._link.close, error))

    def _fail_own(self) -> None:
        while self._own:
            self._own.popleft().transfer.fail(SourceLost(str(self._lost)), settled=True)

    def _on_down(self, error: KvkinError) -> None:
        """The link is gone, whoever ended it."""
        self._lost = self._lost or error
        self._fail_own()
        self._owner.worker.drop(self._link)
        self._owner.forget(self)
        if not self._down.done():
            self._down.set_result(None)

    async def close(self) -> None:
        self.disconnect(SourceLost("the peer is closed"))
        await asyncio.shield(self._down)


def _decode(metadata: bytes) -> UcxMetadata:
    try:
        decoded = msgspec.msgpack.decode(metadata, type=UcxMetadata)
    except msgspec.DecodeError as error:
        raise SourceRefused(f"the peer's address cannot be read: {error}") from error
    if decoded.version != VERSION:
        raise SourceRefused(f"the peer speaks ucx protocol {decoded.version}, we speak {VERSION}")
    return decoded
