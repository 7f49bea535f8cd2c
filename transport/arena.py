"""Arenas: registered host memory in which block slots live, addressed by ``KVLayout``.

A node owns one KV arena (``layers x slots``) and one E arena; which slot holds what is the pure ``kv.store``'s business.
Torch never appears here: engines view the memory through numpy.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from kvkin.kv.layout import KVLayout, slot_runs
from kvkin.transport.data_plane import Copy


class Arena:
    """Anonymous page-aligned memory for ``num_slots`` KV block slots and ``num_e_slots`` E block slots."""

    def __init__(self, layout: KVLayout, num_slots: int, num_e_slots: int) -> None:
        self.layout, self.num_slots, self.num_e_slots = layout, num_slots, num_e_slots
        self.kv_bytes = num_slots * layout.kv_slot_bytes
        self.num_bytes = self.kv_bytes + num_e_slots * layout.e_block_bytes
        self._map = mmap.mmap(-1, max(self.num_bytes, mmap.PAGESIZE))
        self.buffer: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

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
        self.buffer = np.empty(0, dtype=np.uint8)
        # a view elsewhere keeps the map exported: the collector returns it with the last view
        try:
            self._map.close()
        except BufferError:
            return


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
