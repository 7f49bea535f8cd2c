"""Between a request's space and a node's arena: arrivals out of stored blocks, stored blocks out of computed rows.

Both kinds of node use it; ``ArenaView`` is the little that is needed of ``transport.arena.Arena``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvkin.engines.api import Arrival
from kvkin.engines.spaces import Space
from kvkin.kv.layout import KVLayout, slot_runs
from kvkin.kv.pulls import E_LAYER


class ArenaView(Protocol):
    layout: KVLayout

    def kv_block(self, layer: int, slot: int, count: int = 1) -> NDArray[np.uint8]: ...

    def e_block(self, slot: int, count: int = 1) -> NDArray[np.uint8]: ...


def arrival_from(arena: ArenaView, chunk: int, layer: int, first_token: int, slots: Sequence[int]) -> Arrival:
    """An arrival of blocks in ``slots`` (E slots for layer -1) for tokens from ``first_token`` on."""
    size = arena.layout.block_size
    parts = []
    for index, slot, count in slot_runs(list(slots)):
        data = arena.e_block(slot, count) if layer == E_LAYER else arena.kv_block(layer, slot, count)
        parts.append((first_token + index * size, data))
    return Arrival(chunk, layer, tuple(parts))


def store_layer(arena: ArenaView, space: Space, layer: int, first_token: int, slots: Sequence[int]) -> None:
    """Copy one layer's KV of whole blocks from ``first_token`` on into ``slots``."""
    for index, slot, count in slot_runs(list(slots)):
        start = first_token + index * arena.layout.block_size
        space.store_kv(layer, start, arena.kv_block(layer, slot, count), arena.layout)


def store_states(arena: ArenaView, space: Space, layer: int, first_token: int, e_slots: Sequence[int]) -> None:
    """Copy the hidden states entering ``layer`` of whole blocks from ``first_token`` on into ``e_slots``."""
    for index, slot, count in slot_runs(list(e_slots)):
        start = first_token + index * arena.layout.block_size
        space.store_e(layer, start, arena.e_block(slot, count), arena.layout)
