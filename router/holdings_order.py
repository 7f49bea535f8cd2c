"""Holdings in order: a node's snapshots and numbered deltas, whatever the wire does to them.

Whatever is missing, late or twice ends in a new snapshot or in the right order: a gap is seen and asked about, and an eviction
that overtakes a snapshot is applied after it. Pure; ``membership.py`` keeps one for each incarnation.
"""

from __future__ import annotations

from kvkin.transport.node_messages import Holdings

# Deltas that may wait for a snapshot to end or a gap to close; beyond it a new snapshot is cheaper.
MAX_BUFFERED_DELTAS = 4096


class HoldingsOrder:
    """Puts one incarnation's holdings into order. ``asked_at`` is when a snapshot was last asked for (None: none is missing)."""

    def __init__(self, now: float) -> None:
        self.epoch = -1
        self.complete = False
        self.asked_at: float | None = now
        self._next = 1
        self._parts: dict[int, Holdings] = {}
        self._num_parts: int | None = None
        self._deltas: dict[int, Holdings] = {}

    @property
    def whole(self) -> bool:
        """Nothing is known to be missing."""
        return self.complete and not self._deltas

    def accept(self, message: Holdings) -> tuple[list[tuple[bool, Holdings]], bool]:
        """(what counts now as (is a snapshot, holdings), whether something is missing)."""
        if message.epoch < self.epoch:
            return [], False
        if message.epoch > self.epoch:
            self._begin(message.epoch)
        if message.sequence == 0:
            if self.complete:
                return [], False
            missing = message.part > len(self._parts)
            self._parts[message.part] = message
            if message.last:
                self._num_parts = message.part + 1
        else:
            missing = False
            if message.sequence >= self._next:
                self._deltas[message.sequence] = message
        ready = self._take_ready()
        if self.complete:
            missing = bool(self._deltas)
        return ready, missing or len(self._deltas) > MAX_BUFFERED_DELTAS

    def _begin(self, epoch: int) -> None:
        self.epoch, self.complete, self._next = epoch, False, 1
        self._parts, self._num_parts, self._deltas = {}, None, {}

    def _take_ready(self) -> list[tuple[bool, Holdings]]:
        ready: list[tuple[bool, Holdings]] = []
        if not self.complete and self._num_parts is not None and len(self._parts) == self._num_parts:
            ready += [(part == 0, self._parts[part]) for part in range(self._num_parts)]
            self.complete, self._parts = True, {}
        if self.complete:
            while self._next in self._deltas:
                ready.append((False, self._deltas.pop(self._next)))
                self._next += 1
        return ready


def well_formed(message: Holdings) -> bool:
    """Whether the message's numbers and references can be true."""
    count = len(message.provenances)
    return (
        message.sequence >= 0
        and message.part >= 0
        and all(0 <= holding.provenance < count for holding in message.added)
        and all(0 <= provenance < count for _, provenance in message.removed)
    )
