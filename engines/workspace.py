"""Workspace: one request's own KV and E taps in engine memory, filled by pulls and by compute, read by attention.

Shared blocks are immutable and live in the node's arena; their bytes are copied in here (and out again when a request publishes),
so an edit never touches what others read. Owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvkin.engines.block_bytes import e_view, kv_views
from kvkin.engines.layer_ops import LayerOps
from kvkin.kv.layout import KVLayout


class Workspace:
    """KV of ``capacity`` tokens: per layer and plane ``(capacity, kv_heads, head_dim)``; E per tap layer ``(capacity, hidden)``."""

    def __init__(self, ops: LayerOps, capacity: int, taps: Sequence[int] = ()) -> None:
        self.capacity = capacity
        shape = (capacity, ops.planes[0].kv_heads, ops.planes[0].head_dim)
        value_shape = (capacity, ops.planes[1].kv_heads, ops.planes[1].head_dim)
        self.keys = [torch.empty(shape, dtype=ops.dtype, device=ops.device) for _ in range(ops.num_layers)]
        self.values = [torch.empty(value_shape, dtype=ops.dtype, device=ops.device) for _ in range(ops.num_layers)]
        self.e_taps = {
            layer: torch.empty((capacity, ops.hidden_size), dtype=ops.dtype, device=ops.device) for layer in taps
        }
        self._covered: dict[int, list[tuple[int, int]]] = {layer: [] for layer in taps}

    def tap(self, layer: int, start: int, hidden: Tensor) -> None:
        """Remember the hidden states entering ``layer`` of tokens from ``start`` on, if this layer is tapped."""
        if layer in self.e_taps:
            self.e_taps[layer][start : start + len(hidden)] = hidden
            cover(self._covered[layer], start, start + len(hidden))

    def has_e(self, layer: int, start: int, stop: int) -> bool:
        """Whether E of all tokens [start, stop) at ``layer`` is here."""
        return any(first <= start and stop <= last for first, last in self._covered.get(layer, ()))

    def has_kv(self, start: int, stop: int) -> bool:
        """Always: nobody takes this memory back. What was not computed yet is the caller's business."""
        return stop <= self.capacity

    def release(self) -> None:
        """Nothing to do: the memory goes with the object."""

    def forget_taps(self) -> None:
        """Another plan begins: what was tapped under the one before is not its E."""
        for spans in self._covered.values():
            spans.clear()

    # --- bytes in and out ----------------------------------------------------------------------------------------------

    def load_kv(self, layer: int, start: int, blocks: NDArray[np.uint8], layout: KVLayout) -> None:
        """Copy whole blocks (their bytes, contiguous) of ``layer`` to tokens from ``start`` on."""
        for plane, target in zip(kv_views(blocks, layout), (self.keys, self.values), strict=True):
            tokens = plane.shape[0] * plane.shape[1]
            into = target[layer][start : start + tokens].view(plane.shape)
            into.copy_(plane)

    def store_kv(self, layer: int, start: int, blocks: NDArray[np.uint8], layout: KVLayout) -> None:
        """Copy tokens from ``start`` on of ``layer`` into whole blocks (writable bytes, contiguous)."""
        for plane, source in zip(kv_views(blocks, layout), (self.keys, self.values), strict=True):
            tokens = plane.shape[0] * plane.shape[1]
            plane.copy_(source[layer][start : start + tokens].view(plane.shape))

    def load_e(self, start: int, blocks: NDArray[np.uint8], layout: KVLayout) -> Tensor:
        """Hidden states (tokens, hidden) from E blocks' bytes; a copy on the engine's device."""
        return e_view(blocks, layout).to(self.keys[0].device, copy=True)

    def store_e(self, layer: int, start: int, blocks: NDArray[np.uint8], layout: KVLayout) -> None:
        into = e_view(blocks, layout)
        into.copy_(self.e_taps[layer][start : start + len(into)])


def cover(spans: list[tuple[int, int]], start: int, stop: int) -> None:
    """Add [start, stop) to a list of disjoint spans, joining what touches."""
    joined = [span for span in spans if span[1] < start or span[0] > stop]
    touching = [span for span in spans if not (span[1] < start or span[0] > stop)]
    low = min([start, *(span[0] for span in touching)])
    high = max([stop, *(span[1] for span in touching)])
    spans[:] = sorted([*joined, (low, high)])
