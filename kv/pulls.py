"""PullScheduler: which pull comes next (docs/design.md section 5, "order of pulls"). Pure; one per layer stream.

Most urgent first: all chunks' E, then KV by layer, then by chunk, and only what is *ready*. A stored context is ready at
once; a live prefill announces ``LayerReady``. A window bounds what is in flight, so that an urgent item never waits behind
many less urgent ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import msgspec

E_LAYER = -1
"""Layer number that stands for hidden states in (chunk, layer) pairs, on the wire too."""


class PullItem(msgspec.Struct, frozen=True, order=True):
    """One (chunk, layer) of a stream. Sorts by urgency: E (layer -1) first, then layer by layer, chunk by chunk."""

    layer: int
    chunk: int
    num_bytes: int


class PullScheduler:
    """Hands out items in urgency order, at most ``window_bytes`` in flight (one item always fits)."""

    def __init__(self, items: Iterable[PullItem], window_bytes: int) -> None:
        self._waiting = {(item.chunk, item.layer): item for item in items}
        self._ready: list[PullItem] = []
        self._in_flight: dict[tuple[int, int], PullItem] = {}
        self._window_bytes = window_bytes
        self._in_flight_bytes = 0

    @property
    def done(self) -> bool:
        """Whether everything was pulled (true at once if there was nothing to pull)."""
        return not (self._waiting or self._ready or self._in_flight)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def mark_ready(self, pairs: Iterable[tuple[int, int]] | None = None) -> None:
        """The holder says that these (chunk, layer) pairs are visible; None means all. Unknown or repeated pairs are ignored."""
        for pair in list(self._waiting) if pairs is None else pairs:
            item = self._waiting.pop(pair, None)
            if item is not None:
                heapq.heappush(self._ready, item)

    def next(self) -> PullItem | None:
        """The next item to pull now, or None if nothing is ready or the window is full."""
        if not self._ready:
            return None
        item = self._ready[0]
        if self._in_flight and self._in_flight_bytes + item.num_bytes > self._window_bytes:
            return None
        heapq.heappop(self._ready)
        self._in_flight[item.chunk, item.layer] = item
        self._in_flight_bytes += item.num_bytes
        return item

    def completed(self, item: PullItem) -> None:
        """The bytes of ``item`` are here. A duplicate completion is ignored."""
        if self._in_flight.pop((item.chunk, item.layer), None) is not None:
            self._in_flight_bytes -= item.num_bytes
