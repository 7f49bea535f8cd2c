"""PagedSpace: one request's KV in vLLM's paged cache and its hidden states in host memory, as nodes read them (``engines/spaces.py``).

The blocks belong to vLLM: they stay while the request runs, are held after its end until ``release``, and may be taken back under
memory pressure, after which ``has_kv`` is false. Hidden states are kept by the first worker, by request and not by block: three taps
of an 8B model would else cost as much paged memory as six layers of KV. They go with the blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvkin.engines.vllm.workers import Workers
from kvkin.engines.workspace import cover
from kvkin.kv.layout import KVLayout


class Coverage:
    """Of which tokens hidden states are kept, by layer."""

    def __init__(self) -> None:
        self._spans: dict[int, list[tuple[int, int]]] = {}

    def add(self, layer: int, start: int, stop: int) -> None:
        cover(self._spans.setdefault(layer, []), start, stop)

    def has(self, layer: int, start: int, stop: int) -> bool:
        return any(first <= start and stop <= last for first, last in self._spans.get(layer, ()))

    def forget(self) -> None:
        """Another plan begins: what was kept under the one before is not its E. Or nothing is kept any more."""
        self._spans.clear()


class Key:
    """Under which name the connector has the request now: a replanned one gets another."""

    current = ""


class PagedSpace:
    """``blocks(key)`` are the request's blocks as they are now (it raises once they are gone), ``release(key)`` gives them back."""

    def __init__(
        self,
        workers: Workers,
        blocks: Callable[[str], Sequence[int]],
        release: Callable[[str], None],
    ) -> None:
        self._workers, self._blocks, self.key = workers, blocks, Key()
        self.covered = Coverage()
        self.num_tokens = 0
        """Tokens whose KV in all layers is in the blocks."""
        # whoever forgets to release holds the blocks until the object is collected
        self._finalizer = weakref.finalize(self, _release, self.key, release)
        self._finalizer.atexit = False

    def has_kv(self, start: int, stop: int) -> bool:
        return stop <= self.num_tokens and not self._workers.lost

    def has_e(self, layer: int, start: int, stop: int) -> bool:
        return self.covered.has(layer, start, stop) and not self._workers.lost

    def read(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values (stop - start, kv_heads, head_dim) of tokens [start, stop): copies."""
        return self._workers.read_kv(layer, self._blocks(self.key.current), start, stop)

    def states(self, layer: int, start: int, stop: int) -> Tensor:
        """Hidden states (stop - start, hidden) entering ``layer``."""
        return self._workers.states(self.key.current, layer, start, stop)

    def store_kv(self, layer: int, start: int, blocks: NDArray[np.uint8], layout: KVLayout) -> None:
        self._workers.store_kv(layer, self._blocks(self.key.current), start, blocks, layout)

    def store_e(self, layer: int, start: int, blocks: NDArray[np.uint8], layout: KVLayout) -> None:
        self._workers.store_e(self.key.current, layer, start, blocks, layout)

    def release(self) -> None:
        self._finalizer()


def losing(space: PagedSpace) -> Callable[[bool], None]:
    """Says of a space that its blocks are gone, and with True its hidden states; does not keep it alive."""
    reference = weakref.ref(space)

    def lose(states: bool) -> None:
        found = reference()
        if found is not None:
            found.num_tokens = 0
            if states:
                found.covered.forget()

    return lose


def _release(key: Key, release: Callable[[str], None]) -> None:
    release(key.current)
