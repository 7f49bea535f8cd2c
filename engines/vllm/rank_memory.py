"""A rank's part of whole blocks: its heads out of them into vLLM's paged cache, and back.

Blocks outside of vLLM (``kv/layout.py``) have all heads. They come as bytes, or as a place in an arena that another process owns and
this one maps. Used by the worker side, in whichever process the model runs. What it starts on a device is not waited for, but for
``read_kv`` and ``store_kv`` (``lanes.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

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

STAGED_BYTES = 1 << 30
"""Of blocks on their way into arenas, at most this much is in staging memory at a time."""


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
        """Keep hidden states (n, hidden), in host memory, of tokens from ``start`` on, as far as there is room; how many.

        0 if this layer is not tapped.
        """
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
        self.runner, self._lane, self._arenas = runner, runner.lane, arenas
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
        keys, values = (self._lane.to_device(plane[:, :, self._of_rank]).flatten(0, 1) for plane in planes)
        skip = min(max(cached - start, 0), len(keys))
        if skip < len(keys):
            slots = slots_of(block_ids, self.runner.block_size, start + skip, start + len(keys))
            self.runner.write(layer, keys[skip:], values[skip:], slots)

    def hidden(self, parts: Sequence[tuple[int, Bytes]], layout: KVLayout) -> Tensor:
        """Hidden states (n, hidden) of a chunk that came in parts, on the model's device. Raises LocalTransportError."""
        ordered = [e_view(self._bytes(data), layout) for _, data in sorted(parts, key=lambda part: part[0])]
        return self._lane.to_device(torch.cat(ordered))

    # --- blocks out ----------------------------------------------------------------------------------------------------------

    def read_kv(self, layer: int, block_ids: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The rank's keys and values (stop - start, heads, head_dim), copies in host memory, now."""
        keys, values = self._lane.read(lambda: self._rows(layer, block_ids, start, stop))
        return keys, values

    def store_kv(self, layer: int, block_ids: Sequence[int], start: int, place: Bytes, layout: KVLayout) -> None:
        """Tokens from ``start`` on of one layer into whole blocks, now. Raises LocalTransportError."""
        if self._writes:
            planes = kv_views(self._bytes(place), layout)
            self._put(planes, self.read_kv(layer, block_ids, start, start + _num_tokens(planes)))

    def store_blocks(self, order: StoreKV, done: Callable[[], None]) -> None:
        """Call it in ``Lane.saving``; ``done`` is called in its order, when the blocks are written. Raises LocalTransportError."""
        arena = self._arenas.arena(order.arena)
        lane = self._lane
        for layer in order.layers if self._writes else ():
            for index, slot, count in slot_runs(list(order.slots)):
                start = order.start + index * arena.layout.block_size
                planes = kv_views(arena.kv_block(layer, slot, count), arena.layout)
                rows = self._rows(layer, order.block_ids, start, start + _num_tokens(planes))
                staged = [lane.to_host(each) for each in rows]
                lane.then(partial(self._put, planes, staged), sum(each.nbytes for each in staged))
                lane.pace(STAGED_BYTES)
        lane.then(done)

    def keep(self, block_ids: Sequence[int], num_tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the first tokens of a request, by layer, in host memory: to be written back (``restore``), not to be read.

        Call it in ``Lane.saving``.
        """
        kept = []
        for layer in range(self.runner.num_layers):
            # layer by layer: a device has no room for a copy of all
            keys, values = self._rows(layer, block_ids, 0, num_tokens)
            kept.append((self._lane.to_host(keys), self._lane.to_host(values)))
        return kept

    def restore(self, kept: Sequence[tuple[Tensor, Tensor]], block_ids: Sequence[int], start: int) -> None:
        """Write what ``keep`` gave into other blocks, from token ``start`` on."""
        slots = slots_of(block_ids, self.runner.block_size, start, len(kept[0][0]))
        for layer, planes in enumerate(kept):
            keys, values = (self._lane.to_device(plane[start:]) for plane in planes)
            self.runner.write(layer, keys, values, slots)

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

    def _rows(self, layer: int, block_ids: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.runner.read(layer, slots_of(block_ids, self.runner.block_size, start, stop))

    def _put(self, planes: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """The rank's rows (tokens, heads, head_dim) into its heads of whole blocks, one plane each."""
        for plane, each in zip(planes, rows, strict=True):
            into = plane[:, :, self._of_rank]
            into.copy_(each.view(into.shape))

    @property
    def _of_rank(self) -> slice:
        return slice(self._heads.start, self._heads.stop)

    def _bytes(self, data: Bytes) -> NDArray[np.uint8]:
        return self._arenas.view(data) if isinstance(data, Place) else data


def _num_tokens(planes: Sequence[Tensor]) -> int:
    return planes[0].shape[0] * planes[0].shape[1]
