"""Which pairs of models a tainted block comes of: remembered from the plans that this router made (router/drift.py).

A provenance says that a block is approximate, not whose KV made it so. The router knows: it made the plan, and names what the plan
leaves behind in the same way as the node (``kv.plan.segment_provenance``). Pure and bounded.
"""

from __future__ import annotations

from collections import OrderedDict

from kvkin.kv.plan import PlanKind, ReusePlan, Segment, segment_provenance
from kvkin.kv.provenance import Provenance, exact_provenance
from kvkin.router.drift_types import Pair

_EXACT = (PlanKind.EXACT, PlanKind.SHARED_PREFIX)
_NONE: frozenset[Pair] = frozenset()


def foreign(segment: Segment, receiver: bytes) -> set[bytes]:
    """Lineage ids of the other models whose KV a segment reuses approximately."""
    if segment.kind in _EXACT:
        return set()
    holders = [source.holder for source in segment.sources]
    if segment.e_holder is not None:
        holders.append(segment.e_holder)
    return {holder.provenance.lineage_id for holder in holders} - {receiver}


class Taints:
    """Provenance key -> the pairs (sender, receiver) whose approximate reuse led to it; what was used longest ago is forgotten."""

    def __init__(self, most: int = 65_536) -> None:
        self._most = most
        self._pairs: OrderedDict[bytes, frozenset[Pair]] = OrderedDict()
        self._same: dict[frozenset[Pair], tuple[frozenset[Pair], int]] = {}  # a set -> the one of its kind, its keys

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def num_sets(self) -> int:
        """Different sets of pairs that are kept."""
        return len(self._same)

    def pairs_of(self, provenance: Provenance) -> frozenset[Pair] | None:
        """None: not known here."""
        return _NONE if provenance.exact else self._pairs.get(provenance.key)

    def learn(self, plan: ReusePlan, receiver: bytes) -> None:
        """Note what the blocks of a plan on the model ``receiver`` come of."""
        if not any(map(_taints, plan.segments)):
            return
        before = exact_provenance(receiver)
        pairs: frozenset[Pair] | None = _NONE
        for segment in plan.segments:
            after = segment_provenance(segment, before, receiver)
            if segment.sources:
                pairs = self._joined(segment, receiver, pairs)
            if not after.exact and pairs is not None:
                self._remember(after.key, pairs)
            before = after

    def _joined(self, segment: Segment, receiver: bytes, before: frozenset[Pair] | None) -> frozenset[Pair] | None:
        """What came before, what the segment's holders bring along, and the segment's own pairs; None if part of it is unknown."""
        holders = {source.holder.provenance for source in segment.sources}
        if segment.e_holder is not None:
            holders.add(segment.e_holder.provenance)
        known = [before, *map(self.pairs_of, holders)]
        found = [pairs for pairs in known if pairs is not None]
        if len(found) < len(known):
            return None
        own = frozenset((sender, receiver) for sender in foreign(segment, receiver))
        return own.union(*found)

    def _remember(self, key: bytes, pairs: frozenset[Pair]) -> None:
        # few different sets, many keys: equal sets are one object, gone with the last key of it
        one, count = self._same.get(pairs, (pairs, 0))
        self._same[one] = (one, count + 1)
        if key in self._pairs:
            self._release(self._pairs[key])
        self._pairs[key] = one
        self._pairs.move_to_end(key)
        while len(self._pairs) > self._most:
            _, oldest = self._pairs.popitem(last=False)
            self._release(oldest)

    def _release(self, pairs: frozenset[Pair]) -> None:
        one, count = self._same.pop(pairs)
        if count > 1:
            self._same[one] = (one, count - 1)


def _taints(segment: Segment) -> bool:
    exact = segment.kind in _EXACT and all(source.holder.provenance.exact for source in segment.sources)
    return bool(segment.sources) and not exact
