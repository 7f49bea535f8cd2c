"""Space: what nodes see of one request's KV and hidden states, whatever engine holds them.

A prefill node copies out of it when a unit is done, a decode node when it publishes. Owned by the engine's thread; only
``release`` may be called from any thread.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvkin.kv.layout import KVLayout


class Space(Protocol):
    """KV of a request's tokens by layer, E at the layers that it taps."""

    def has_kv(self, start: int, stop: int) -> bool:
        """Whether KV of tokens [start, stop) in all layers can be read now: an engine may have taken its memory back."""

    def has_e(self, layer: int, start: int, stop: int) -> bool:
        """Whether E of all tokens [start, stop) at ``layer`` is here."""

    def store_kv(self, layer: int, start: int, blocks: NDArray[np.uint8], layout: KVLayout) -> None:
        """Copy tokens from ``start`` on of ``layer`` into whole blocks (writable bytes, contiguous)."""

    def store_e(self, layer: int, start: int, blocks: NDArray[np.uint8], layout: KVLayout) -> None:
        """Copy hidden states entering ``layer`` of tokens from ``start`` on into whole blocks."""

    def release(self) -> None:
        """Nothing will be read any more; the engine may use the memory. Idempotent."""
