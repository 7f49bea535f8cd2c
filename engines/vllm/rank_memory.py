"""A rank's part of whole blocks: its heads out of them into vLLM's paged cache, and back.

Blocks outside of vLLM (``kv/layout.py``) have all heads. They come as bytes, or as a place in an arena that another process owns and
this one maps. Used by the worker side, in whichever process the model runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvkin.engines.block_bytes import e_view, kv_views
from kvkin.engines.vllm.layers import LayerRunner
from kvkin.engines.vllm.orders import Bytes, StoreE, StoreKV
from kvkin.engines.vllm.paged_kv import slots_of
from kvkin.engines.vllm.ranks import heads_of, is_writer
from kvkin.kv.layout import KVLayout, slot_runs
from kvkin.transport.arena import AttachedArenas, Place


@dataclass(frozen=True)
class CacheShape:
    """vLLM's paged cache over all ranks: ``kv_heads`` are those of the model. ``dtype`` as torch has it."""

    num_layers: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    dtype: torch.dtype
    block_size: int
    num_ranks: int


class KeptStates:
    """Hidden states entering some layers, (capacity, hidden) each, in host memory. Which of them were written, others know."""

    def __init__(self, layers: Sequence[int], capacity: int, hidden_size: int, dtype: torch.dtype) -> None:
        self._states = {layer: torch.empty((capacity, hidden_size), dtype=dtype) for layer in layers}

    def has(self, layer: int) -> bool:
        return layer in self._states

    def record(self, layer: int, start: int, hidden: Tensor) -> int:
        """Keep hidden states (n, hidden) of tokens from ``start`` on, as far as there is room; how many. 0 if this layer is not tapped."""
        if layer not in self._states:
            return 0
        into = self._states[layer][start : start + len(hidden)]
        into.copy_(hidden[: len(into)])
        return len(into)

    def states(self, layer: int, start: int, stop: int) -> Tensor:
        """Hidden states (stop - start, hidden): a view."""
        return self._states[layer][start:stop]


class RankMemory:
    """Reads and writes rank ``rank``'s heads of ``num_ranks``. ``kv_heads`` are those of the whole model."""

    def __init__(self, runner: LayerRunner, arenas: AttachedArenas, kv_heads: int, rank: int, num_ranks: int) -> None:
        self.runner, self._arenas = runner, arenas
        self._heads = heads_of(kv_heads, num_ranks, rank)
        self._writes, self._first = is_writer(kv_heads, num_ranks, rank), rank == 0
        assert len(self._heads) == runner.kv_heads, f"rank {rank} has {runner.kv_heads} heads, not {self._heads}"
        self.shape = CacheShape(
            runner.num_layers,
            kv_heads,
            runner.head_dim,
            runner.hidden_size,
            runner.dtype,
            runner.block_size,
            num_ranks,
        )

    # --- blocks in -----------------------------------------------------------------------------------------------------------

    def write_kv(
        self, layer: int, block_ids: Sequence[int], cached: int, start: int, data: Bytes, layout: KVLayout
    ) -> None:
        """Write tokens from ``start`` on of one layer, but none below ``cached``. Raises LocalTransportError."""
        planes = kv_views(self._bytes(data), layout)
        keys, values = (plane[:, :, self._of_rank].flatten(0, 1) for plane in planes)
        skip = min(max(cached - start, 0), len(keys))
        if skip < len(keys):
            slots = slots_of(block_ids, self.runner.block_size, start + skip, start + len(keys))
            self.runner.write(layer, keys[skip:], values[skip:], slots)

    def hidden(self, parts: Sequence[tuple[int, Bytes]], layout: KVLayout) -> Tensor:
        """Hidden states (n, hidden) of a chunk that came in parts, on the model's device. Raises LocalTransportError."""
        ordered = [e_view(self._bytes(data), layout) for _, data in sorted(parts, key=lambda part: part[0])]
        return torch.cat(ordered).to(self.runner.device)

    # --- blocks out ----------------------------------------------------------------------------------------------------------

    def read_kv(self, layer: int, block_ids: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The rank's keys and values (stop - start, heads, head_dim), copies in host memory."""
        keys, values = self.runner.read(layer, slots_of(block_ids, self.runner.block_size, start, stop))
        return keys.cpu(), values.cpu()

    def store_kv(self, layer: int, block_ids: Sequence[int], start: int, place: Bytes, layout: KVLayout) -> None:
        """Tokens from ``start`` on of one layer into whole blocks. Raises LocalTransportError."""
        if not self._writes:
            return
        planes = kv_views(self._bytes(place), layout)
        stop = start + planes[0].shape[0] * planes[0].shape[1]
        for plane, rows in zip(planes, self.read_kv(layer, block_ids, start, stop), strict=True):
            into = plane[:, :, self._of_rank]
            into.copy_(rows.view(into.shape))

    def store_blocks(self, order: StoreKV) -> None:
        """Raises LocalTransportError."""
        arena = self._arenas.arena(order.arena)
        for layer in order.layers:
            for index, slot, count in slot_runs(list(order.slots)):
                start = order.start + index * arena.layout.block_size
                self.store_kv(layer, order.block_ids, start, arena.kv_block(layer, slot, count), arena.layout)

    def store_states(self, order: StoreE, kept: KeptStates) -> None:
        """Hidden states are the same on every rank, and kept on the first. Raises LocalTransportError."""
        if not self._first:
            return
        arena = self._arenas.arena(order.arena)
        for index, slot, count in slot_runs(list(order.slots)):
            into = e_view(arena.e_block(slot, count), arena.layout)
            start = order.start + index * arena.layout.block_size
            into.copy_(kept.states(order.layer, start, start + len(into)))

    # --- inside --------------------------------------------------------------------------------------------------------------

    @property
    def _of_rank(self) -> slice:
        return slice(self._heads.start, self._heads.stop)

    def _bytes(self, data: Bytes) -> NDArray[np.uint8]:
        return self._arenas.view(data) if isinstance(data, Place) else data
