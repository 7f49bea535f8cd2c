"""Bounds on the host memory that requests take beside the node's arena: kept hidden states, copies of preempted loads. Pure."""

from __future__ import annotations


class HostMemory:
    """Bytes by request, at most ``max_bytes`` together (None: no bound)."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self.used = 0
        self.refused = 0
        """Requests that got none."""
        self._of: dict[str, int] = {}

    def take(self, key: str, num_bytes: int) -> bool:
        """Whether there is room for ``num_bytes`` of request ``key``, which has none yet; if so they are its."""
        assert key not in self._of, key
        if self.max_bytes is not None and self.used + num_bytes > self.max_bytes:
            self.refused += 1
            return False
        self._of[key] = num_bytes
        self.used += num_bytes
        return True

    def give(self, key: str) -> None:
        """The request is over. Idempotent."""
        self.used -= self._of.pop(key, 0)
