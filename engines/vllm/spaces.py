"""PagedSpace: one request's KV in vLLM's paged cache and its hidden states in host memory, as nodes read them (``engines/spaces.py``).

The blocks belong to vLLM: they stay while the request runs, are held after its end until ``release``, and may be taken back under
memory pressure, after which ``has_kv`` is false. Hidden states are kept here, by request and not by block: three taps of an 8B
model would else cost as much paged memory as six layers of KV.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvkin.engines.block_bytes import e_view, kv_views
from kvkin.engines.vllm.layers import LayerRunner
from kvkin.engines.vllm.paged_kv import slots_of
from kvkin.engines.workspace import cover
from kvkin.kv.layout import KVLayout


class ETaps:
    """Hidden states entering some layers, (capacity, hidden) each, and for which tokens they are known."""

    def __init__(self, layers: Sequence[int], capacity: int, hidden_size: int, dtype: torch.dtype) -> None:
        self.layers = tuple(layers)
        self._states = {layer: torch.empty((capacity, hidden_size), dtype=dtype) for layer in layers}
        self._covered: dict[int, list[tuple[int, int]]] = {layer: [] for layer in layers}

    def record(self, layer: int, start: int, hidden: Tensor) -> None:
        """Keep hidden states (n, hidden) of tokens from ``start`` on, if this layer is tapped."""
        if layer in self._states and len(hidden):
            self._states[layer][start : start + len(hidden)] = hidden
            cover(self._covered[layer], start, start + len(hidden))

    def has(self, layer: int, start: int, stop: int) -> bool:
        return any(first <= start and stop <= last for first, last in self._covered.get(layer, ()))

    def states(self, layer: int, start: int, stop: int) -> Tensor:
        """Hidden states (stop - start, hidden): a view."""
        return self._states[layer][start:stop]

    def forget(self) -> None:
        """Another plan begins: what was tapped under the one before is not its E."""
        for spans in self._covered.values():
            spans.clear()


class Key:
    """Under which name the connector has the request now: a replanned one gets another."""

    current = ""


class PagedSpace:
    """``blocks(key)`` are the request's blocks as they are now (it raises once they are gone), ``release(key)`` gives them back."""

    def __init__(
        self,
        runner: LayerRunner,
        taps: ETaps,
        blocks: Callable[[str], Sequence[int]],
        release: Callable[[str], None],
    ) -> None:
        self._runner, self.taps, self._blocks, self.key = runner, taps, blocks, Key()
        self.num_tokens = 0
        """Tokens whose KV in all layers is in the blocks."""
        # whoever forgets to release holds the blocks until the object is collected
        self._finalizer = weakref.finalize(self, _release, self.key, release)
        self._finalizer.atexit = False

    def has_kv(self, start: int, stop: int) -> bool:
        return stop <= self.num_tokens

    def has_e(self, layer: int, start: int, stop: int) -> bool:
        return self.taps.has(layer, start, stop)

    def read(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values (stop - start, kv_heads, head_dim) of tokens [start, stop): copies."""
        blocks = self._blocks(self.key.current)
        return self._runner.read(layer, slots_of(blocks, self._runner.block_size, start, stop))

    def store_kv(self, layer: int, start: int, blocks: NDArray[np.uint8], layout: KVLayout) -> None:
        planes = kv_views(blocks, layout)
        stop = start + planes[0].shape[0] * planes[0].shape[1]
        for plane, source in zip(planes, self.read(layer, start, stop), strict=True):
            plane.copy_(source.view(plane.shape))

    def store_e(self, layer: int, start: int, blocks: NDArray[np.uint8], layout: KVLayout) -> None:
        into = e_view(blocks, layout)
        into.copy_(self.taps.states(layer, start, start + len(into)))

    def release(self) -> None:
        self._finalizer()


def losing(space: PagedSpace) -> Callable[[], None]:
    """Says of a space that its blocks are gone; does not keep it alive."""
    reference = weakref.ref(space)

    def lose() -> None:
        found = reference()
        if found is not None:
            found.num_tokens = 0

    return lose


def _release(key: Key, release: Callable[[str], None]) -> None:
    release(key.current)
