"""A thin typed layer over one NIXL agent (UCX one-sided READ on host memory), used by the ``ucx`` backend only.

It goes to NIXL's bindings instead of its ``nixl_agent`` class, because that class fixes the progress thread's poll timeout
at 0: every idle agent then spins on a core of its own. Here the thread sleeps until UCX has something to do.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvkin.kv.errors import KvkinError, LocalTransportError, SourceLost, SourceRefused

try:
    from nixl_cu12 import _bindings as nixl
except ImportError as error:  # pragma: no cover - depends on the platform
    raise LocalTransportError(f"the ucx backend needs the package nixl-cu12 (Linux only): {error}") from error

PROGRESS_WAKEUP_US = 20_000
"""The progress thread wakes on events; this is the fallback poll for the cases in which UCX does not raise one."""

REMOTE_ERRORS: dict[type[Exception], type[KvkinError]] = {
    nixl.nixlBackendError: SourceLost,
    nixl.nixlCancelledError: SourceLost,
    nixl.nixlRemoteDisconnectError: SourceLost,
    nixl.nixlUnknownError: SourceLost,
    nixl.nixlMismatchError: SourceRefused,
    nixl.nixlNotAllowedError: SourceRefused,
    nixl.nixlNotFoundError: SourceRefused,
    nixl.nixlNotSupportedError: SourceRefused,
    nixl.nixlInvalidParamError: LocalTransportError,
    nixl.nixlNoTelemetryError: LocalTransportError,
    nixl.nixlNotPostedError: LocalTransportError,
    nixl.nixlRepostActiveError: LocalTransportError,
}
"""What a NIXL exception means while talking to a peer. Every type that the bindings raise is listed (a test compares)."""

_environment = threading.Lock()


@contextlib.contextmanager
def remote_errors(doing: str) -> Iterator[None]:
    """Map NIXL's exceptions in operations that involve a peer."""
    try:
        yield
    except tuple(REMOTE_ERRORS) as error:
        raise REMOTE_ERRORS[type(error)](f"{doing}: {error}") from error


@contextlib.contextmanager
def local_errors(doing: str) -> Iterator[None]:
    """Map NIXL's exceptions in operations on this side only."""
    try:
        yield
    except tuple(REMOTE_ERRORS) as error:
        raise LocalTransportError(f"{doing}: {error}") from error


@contextlib.contextmanager
def _ucx_environment(loopback_only: bool) -> Iterator[None]:
    """UCX reads its settings from the environment when a context is made. A setting of the operator wins."""
    # Two-sided shared memory is never chosen for links that must notice a dead peer, but each context would make its
    # files in /dev/shm, which a process that is killed at that moment leaves behind.
    ours = {"UCX_TLS": "^posix,sysv"}
    if loopback_only:
        # UCX listens on every interface; the plugin's own device option says lo:1, which UCX does not find
        ours["UCX_NET_DEVICES"] = "lo"
    with _environment:
        added = {name: value for name, value in ours.items() if name not in os.environ}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                del os.environ[name]


class NixlAgent:
    """One NIXL agent with its own UCX context. Not thread-safe: one thread uses it at a time.

    ``progress`` starts NIXL's progress thread, which a serving agent needs (peers connect while nobody here polls).
    A pulling agent goes without: :meth:`poll` makes its progress, and nothing lands while nobody polls.
    """

    def __init__(self, name: str, *, progress: bool, loopback_only: bool) -> None:
        config = nixl.nixlAgentConfig()
        config.useProgThread = progress
        config.pthrDelay = PROGRESS_WAKEUP_US
        with local_errors("start the UCX backend of NIXL"), _ucx_environment(loopback_only):
            self._agent = nixl.nixlAgent(name, config)
            self._agent.createBackend("UCX", {})
        self.name = name
        self._registered: list[object] = []

    def register(self, buffer: NDArray[np.uint8]) -> None:
        """Register host memory; it stays so until :meth:`close`. Raises LocalTransportError."""
        with local_errors(f"register {buffer.nbytes} bytes"):
            regions = nixl.nixlRegDList(nixl.DRAM_SEG, [(buffer.ctypes.data, buffer.nbytes, 0, "")])
            self._agent.registerMem(regions, [])
        self._registered.append(regions)

    def metadata(self) -> bytes:
        """Connection data and keys of everything registered so far."""
        with local_errors("read the agent's metadata"):
            return bytes(self._agent.getLocalMD())

    def add_remote(self, metadata: bytes) -> str:
        """Load a peer's metadata and start connecting. Raises SourceLost, or SourceRefused where it cannot be read."""
        try:
            with remote_errors("connect"):
                name = self._agent.loadRemoteMD(metadata)
        except LocalTransportError as error:
            raise SourceRefused(f"the peer's metadata cannot be read: {error}") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def read(self, remote_name: str, local: NDArray[np.uint64], remote: NDArray[np.uint64]) -> tuple[int, bool]:
        """Post one READ of rows (address, bytes, 0). Returns its handle and whether it is done already.

        On shared memory the copy runs inside this call (without the GIL); on a network it returns at once.
        """
        with remote_errors("READ"):
            handle = self._agent.createXferReq(
                nixl.NIXL_READ,
                nixl.nixlXferDList(nixl.DRAM_SEG, local),
                nixl.nixlXferDList(nixl.DRAM_SEG, remote),
                remote_name,
                b"",
                [],
            )
            try:
                return int(handle), self._agent.postXferReq(handle, b"") == nixl.NIXL_SUCCESS
            except BaseException:
                self.release(int(handle))
                raise

    def poll(self, handle: int) -> bool:
        """Make progress; True once the READ is done. Raises SourceLost where the peer is gone."""
        with remote_errors("READ"):
            return bool(self._agent.getXferStatus(handle) == nixl.NIXL_SUCCESS)

    def release(self, handle: int) -> None:
        """Free a handle. This does *not* stop a READ in flight: on some links its bytes still land while anyone polls."""
        with contextlib.suppress(*REMOTE_ERRORS):
            self._agent.releaseXferReq(handle)

    def close(self) -> bool:
        """Tear the UCX context down. True once it is really gone, so that nothing can land any more.

        Every handle must be released before. Removing the remote agent would not do: bytes still landed after it.
        """
        if self._agent is None:
            return True
        gone = weakref.ref(self._agent)
        self._agent = None
        self._registered.clear()
        return gone() is None
