"""Arenas: registered host memory in which block slots live, addressed by ``KVLayout``.

A node owns one KV arena (``layers x slots``) and one E arena; which slot holds what is the pure ``kv.store``'s business.
Torch never appears here: engines view the memory through numpy.

A *shared* arena can be mapped by other processes of the same user and host (the ranks of an engine): it is a memory file without a
name, found through its owner's descriptor, so nothing is left behind however the owner ends.
"""

from __future__ import annotations

import mmap
import os
import weakref

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvkin.kv.errors import LocalTransportError
from kvkin.kv.layout import KVLayout, slot_runs
from kvkin.transport.data_plane import Copy


class ArenaDescription(msgspec.Struct, frozen=True):
    """Where a shared arena is: descriptor ``fd`` of process ``pid``, recognised by ``inode``; and how it is cut."""

    pid: int
    fd: int
    inode: int
    layout: KVLayout
    num_slots: int
    num_e_slots: int


class Place(msgspec.Struct, frozen=True):
    """``num_bytes`` bytes of a shared arena from ``offset`` on."""

    arena: ArenaDescription
    offset: int
    num_bytes: int


class Arena:
    """Page-aligned memory for ``num_slots`` KV block slots and ``num_e_slots`` E block slots; ``shared`` with other processes or not."""

    _description: ArenaDescription | None

    def __init__(self, layout: KVLayout, num_slots: int, num_e_slots: int, *, shared: bool = False) -> None:
        self._cut(layout, num_slots, num_e_slots)
        if not shared:
            self._open(mmap.mmap(-1, self._map_bytes))
            return
        fd = os.memfd_create("kvkin-arena", os.MFD_CLOEXEC)
        os.ftruncate(fd, self._map_bytes)
        self._open(mmap.mmap(fd, self._map_bytes))
        self._fd = fd
        self._description = ArenaDescription(
            os.getpid(), fd, os.fstat(fd).st_ino, layout, self.num_slots, self.num_e_slots
        )
        _shared.add(self)

    @classmethod
    def attach(cls, description: ArenaDescription) -> Arena:
        """The same memory as the owner's, in this process. Raises LocalTransportError if the owner has closed it, or cannot be seen."""
        path = f"/proc/{description.pid}/fd/{description.fd}"
        arena = cls.__new__(cls)
        arena._cut(description.layout, description.num_slots, description.num_e_slots)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise LocalTransportError(f"the arena of process {description.pid} cannot be mapped: {error}") from None
        try:
            found = os.fstat(fd)
            if found.st_ino != description.inode or found.st_size != arena._map_bytes:
                raise LocalTransportError(f"the arena of process {description.pid} is not there any more")
            arena._open(mmap.mmap(fd, arena._map_bytes))
        finally:
            os.close(fd)
        arena._description = description
        return arena

    def _cut(self, layout: KVLayout, num_slots: int, num_e_slots: int) -> None:
        self.layout, self.num_slots, self.num_e_slots = layout, num_slots, num_e_slots
        self.kv_bytes = num_slots * layout.kv_slot_bytes
        self.num_bytes = self.kv_bytes + num_e_slots * layout.e_block_bytes
        self._map_bytes = max(self.num_bytes, mmap.PAGESIZE)
        self._fd = -1
        self._description = None

    def _open(self, memory: mmap.mmap) -> None:
        self._map = memory
        self.buffer: NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)

    @property
    def description(self) -> ArenaDescription | None:
        """What another process attaches with; None if the arena is not shared."""
        return self._description

    def kv_block(self, layer: int, slot: int, count: int = 1) -> NDArray[np.uint8]:
        """Bytes of ``count`` contiguous slots in one layer; a view."""
        start = self.layout.kv_offset(layer, slot, self.num_slots)
        return self.buffer[start : start + count * self.layout.kv_block_bytes]

    def e_block(self, slot: int, count: int = 1) -> NDArray[np.uint8]:
        """Bytes of ``count`` contiguous E slots; a view."""
        start = self.kv_bytes + self.layout.e_offset(slot)
        return self.buffer[start : start + count * self.layout.e_block_bytes]

    def close(self) -> None:
        """Give the memory back. Idempotent; views that someone still holds keep it alive until they go."""
        _shared.discard(self)
        self.buffer = np.empty(0, dtype=np.uint8)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        # a view elsewhere keeps the map exported: the collector returns it with the last view
        try:
            self._map.close()
        except BufferError:
            return

    def __del__(self) -> None:
        # an owner that is dropped without a close: the map goes by itself, the descriptor would not
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)


_shared: weakref.WeakSet[Arena] = weakref.WeakSet()


def place_of(data: NDArray[np.uint8]) -> Place | None:
    """Where contiguous bytes of this process lie in one of its shared arenas; None if they do not."""
    address = data.ctypes.data
    for arena in list(_shared):
        offset = address - arena.buffer.ctypes.data
        if arena.description is not None and offset >= 0 and offset + data.nbytes <= arena.num_bytes:
            return Place(arena.description, offset, data.nbytes)
    return None


class AttachedArenas:
    """Arenas of other processes that this one has mapped, by description. Those whose owners closed them go at the next new one."""

    def __init__(self) -> None:
        self._arenas: dict[ArenaDescription, Arena] = {}

    def __len__(self) -> int:
        return len(self._arenas)

    def arena(self, description: ArenaDescription) -> Arena:
        """Raises LocalTransportError."""
        found = self._arenas.get(description)
        if found is None:
            for gone in [each for each in self._arenas if not _is_open(each)]:
                self._arenas.pop(gone).close()
            found = self._arenas[description] = Arena.attach(description)
        return found

    def view(self, place: Place) -> NDArray[np.uint8]:
        """The bytes of a place; a writable view. Raises LocalTransportError."""
        arena = self.arena(place.arena)
        assert 0 <= place.offset <= place.offset + place.num_bytes <= arena.num_bytes, place
        return arena.buffer[place.offset : place.offset + place.num_bytes]

    def close(self) -> None:
        while self._arenas:
            self._arenas.popitem()[1].close()


def _is_open(description: ArenaDescription) -> bool:
    try:
        return os.stat(f"/proc/{description.pid}/fd/{description.fd}").st_ino == description.inode
    except OSError:
        return False


def kv_copies(
    layout: KVLayout, layer: int, remote: list[int], remote_slots: int, local: list[int], local_slots: int
) -> list[Copy]:
    """Copies that bring one layer of the blocks in slots ``remote`` into ``local``, coalesced where both sides are contiguous."""
    return _coalesce(
        remote,
        local,
        layout.kv_block_bytes,
        layout.kv_offset(layer, 0, remote_slots),
        layout.kv_offset(layer, 0, local_slots),
    )


def e_copies(
    layout: KVLayout, remote: list[int], remote_kv_bytes: int, local: list[int], local_kv_bytes: int
) -> list[Copy]:
    """Like :func:`kv_copies` for E slots, which lie behind the KV in each arena."""
    return _coalesce(remote, local, layout.e_block_bytes, remote_kv_bytes, local_kv_bytes)


def _coalesce(remote: list[int], local: list[int], block_bytes: int, remote_base: int, local_base: int) -> list[Copy]:
    if len(remote) != len(local):
        raise ValueError(f"{len(remote)} remote blocks for {len(local)} local slots")
    copies: list[Copy] = []
    for index, start, length in slot_runs(remote):
        for offset, local_start, count in slot_runs(local[index : index + length]):
            copies.append(
                Copy(
                    remote_base + (start + offset) * block_bytes,
                    local_base + local_start * block_bytes,
                    count * block_bytes,
                )
            )
    return copies
