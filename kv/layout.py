"""KV layout: how the KV of one layer and the E cache lie in memory and on the wire.

A block slot holds, for one layer, its planes one after the other, each ``(block_size, kv_heads, head_dim)`` row-major.
An arena is ``num_layers`` slabs of ``num_slots`` such blocks: slots that follow each other are contiguous bytes, so a run of
blocks of one layer is one transfer. E slots hold ``(block_size, hidden_size)``. Used by every node and by the handshake.
"""

from __future__ import annotations

import msgspec

from kvkin.kv.hashing import digest

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Plane(msgspec.Struct, frozen=True):
    """One named tensor of a layer's KV, e.g. keys after RoPE: ``(tokens, kv_heads, head_dim)``."""

    name: str
    kv_heads: int
    head_dim: int

    @property
    def elements_per_token(self) -> int:
        return self.kv_heads * self.head_dim


class KVLayout(msgspec.Struct, frozen=True):
    """What two nodes must agree on before a byte moves (compared by ``digest`` in the handshake)."""

    num_layers: int
    planes: tuple[Plane, ...]
    hidden_size: int
    dtype: str
    block_size: int

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return self.dtype_bytes * sum(plane.elements_per_token for plane in self.planes)

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.block_size * self.kv_token_bytes

    @property
    def kv_slot_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.num_layers * self.kv_block_bytes

    @property
    def e_block_bytes(self) -> int:
        """Bytes of one block of hidden states at one transition layer."""
        return self.block_size * self.hidden_size * self.dtype_bytes

    def kv_offset(self, layer: int, slot: int, num_slots: int) -> int:
        """Byte offset of ``slot`` in ``layer`` within an arena of ``num_slots`` slots."""
        return (layer * num_slots + slot) * self.kv_block_bytes

    def e_offset(self, slot: int) -> int:
        return slot * self.e_block_bytes

    @property
    def digest(self) -> bytes:
        return digest(b"layout", msgspec.msgpack.encode(self))


def slot_runs(slots: list[int]) -> list[tuple[int, int, int]]:
    """Contiguous runs of a slot list as (index in the list, first slot, length): one descriptor each.

    >>> slot_runs([4, 5, 6, 9])
    [(0, 4, 3), (3, 9, 1)]
    """
    runs: list[tuple[int, int, int]] = []
    for index, slot in enumerate(slots):
        if runs and runs[-1][1] + runs[-1][2] == slot:
            first, start, length = runs[-1]
            runs[-1] = (first, start, length + 1)
        else:
            runs.append((index, slot, 1))
    return runs
