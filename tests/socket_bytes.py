"""Bytes that processes have received through TCP sockets, as the kernel counts them (Linux, sock_diag).

Shared memory and reads of another process's memory do not count, which is what tests of the data plane want to tell apart.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_REQUEST, _DUMP, _DONE, _ERROR = 1, 0x300, 3, 2
_INFO = 2  # the attribute that holds struct tcp_info
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_DIAG_MSG_BYTES, _INODE_AT = 72, 68
_RECEIVED_AT = 128  # tcpi_bytes_received, u64


def bytes_received(pids: Iterable[int]) -> dict[int, int]:
    """Bytes that each open TCP socket of ``pids`` has received, by inode."""
    own = {inode for pid in pids for inode in _sockets(pid)}
    return {inode: count for inode, count in _all_sockets() if inode in own}


def _sockets(pid: int) -> Iterator[int]:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                yield int(target[8:-1])


def _all_sockets() -> Iterator[tuple[int, int]]:
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
            wanted = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, 0xFFFFFFFF) + bytes(48)
            header = _HEADER.pack(_HEADER.size + len(wanted), _SOCK_DIAG_BY_FAMILY, _REQUEST | _DUMP, 1, 0)
            kernel.send(header + wanted)
            yield from _answers(kernel)


def _answers(kernel: socket.socket) -> Iterator[tuple[int, int]]:
    while True:
        data, at = kernel.recv(1 << 20), 0
        while at < len(data):
            length, kind, *_ = _HEADER.unpack_from(data, at)
            if kind == _DONE:
                return
            assert kind != _ERROR, "the kernel does not tell"
            yield _count(data[at + _HEADER.size : at + length])
            at += (length + 3) & ~3


def _count(body: bytes) -> tuple[int, int]:
    """(inode, bytes received) of one socket."""
    (inode,) = struct.unpack_from("=I", body, _INODE_AT)
    at = _DIAG_MSG_BYTES
    while at < len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, at)
        if kind == _INFO:
            (received,) = struct.unpack_from("=Q", body, at + _ATTRIBUTE.size + _RECEIVED_AT)
            return inode, received
        at += (length + 3) & ~3
    return inode, 0
