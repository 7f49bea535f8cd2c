"""How many requests of a family share a prefix: decayed counts at sampled lengths, bounded, clock passed in.

Part of the prefix index; the policy weighs with it whether a cold prefix is worth a shared prefill (docs/design.md section 5).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

from kvkin.kv.hashing import BlockHash

_FIRST = 4
_NEGLIGIBLE = 0.01


def sample_lengths(limit: int) -> list[int]:
    """Prefix lengths in blocks at which requests are counted: every 4 blocks, from 32 on every eighth of the length.

    >>> sample_lengths(50)
    [4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 45, 50]
    """
    lengths, length = [], _FIRST
    while length <= limit:
        lengths.append(length)
        length += max(_FIRST, length // 8)
    return lengths


# prompts of up to 4 million blocks; longer ones are counted at their first blocks
_LENGTHS = sample_lengths(1 << 22)


class _Count:
    """Decayed number of requests by model, as of ``time``."""

    __slots__ = ("by_model", "time")

    def __init__(self, time: float) -> None:
        self.time = time
        self.by_model: dict[str, float] = {}


class FanOut:
    """Counts of one router. ``half_life_s`` is when a request counts half; ``max_prefixes`` bounds each family."""

    def __init__(self, half_life_s: float, max_prefixes: int = 50_000) -> None:
        self._half_life_s, self._max_prefixes = half_life_s, max_prefixes
        self._families: dict[str, OrderedDict[BlockHash, _Count]] = {}

    def observe(self, family: str, model: str, hashes: Sequence[BlockHash], now: float) -> None:
        """Count one request of ``model`` at every sampled prefix of its blocks."""
        counts = self._families.setdefault(family, OrderedDict())
        total = len(hashes)
        for length in takewhile(total.__ge__, _LENGTHS):
            block = hashes[length - 1]
            count = counts.get(block)
            if count is None:
                count = counts[block] = _Count(now)
            else:
                counts.move_to_end(block)
                self._decay(count, now)
            count.by_model[model] = count.by_model.get(model, 0.0) + 1.0
        while len(counts) > self._max_prefixes:
            counts.popitem(last=False)

    def of_others(
        self, family: str, model: str, hashes: Sequence[BlockHash], now: float
    ) -> tuple[tuple[int, float], ...]:
        """(blocks, decayed number of requests of other models that began with them), by rising blocks."""
        counts = self._families.get(family)
        found: list[tuple[int, float]] = []
        total = len(hashes)
        for length in takewhile(total.__ge__, _LENGTHS) if counts else ():
            count = counts.get(hashes[length - 1]) if counts else None
            if count is None:
                break
            others = sum(value for name, value in count.by_model.items() if name != model)
            others *= self._factor(count, now)
            if others < _NEGLIGIBLE:
                break
            found.append((length, others))
        return tuple(found)

    def _factor(self, count: _Count, now: float) -> float:
        # exponents outside of this range would overflow, and mean nothing any more
        return float(0.5 ** min(max((now - count.time) / self._half_life_s, 0.0), 1000.0))

    def _decay(self, count: _Count, now: float) -> None:
        factor = self._factor(count, now)
        count.time = max(now, count.time)
        count.by_model = {
            name: value * factor for name, value in count.by_model.items() if value * factor >= _NEGLIGIBLE
        }
