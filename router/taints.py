"""What a tainted block comes of: which pairs of models, under which groups, with which loss (router/drift.py asks).

A provenance says that a block is approximate, not whose KV made it so, and its loss is what the profile of that day said. The router
knows better: it made the plan, and names what the plan leaves behind in the same way as the node (``kv.plan.segment_provenance``).
What another process planned it finds out from the name (router/taint_origins.py). Pure and bounded.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping

import msgspec

from kvkin.kv.plan import LayerGroup, PlanKind, ReusePlan, Segment, segment_provenance
from kvkin.kv.provenance import Provenance, computed_after, exact_provenance
from kvkin.router.drift_types import Group, Pair
from kvkin.router.policy_types import FamilyView
from kvkin.router.taint_origins import Origins

MAX_STEPS = 16
"""A history of more is known by its pairs alone: what so many approximations promise together is next to nothing."""

_EXACT = (PlanKind.EXACT, PlanKind.SHARED_PREFIX)


class Step(msgspec.Struct, frozen=True):
    """One approximate reuse: whose KV (lineage ids), in which shape, which layers were recomputed."""

    sender: bytes
    receiver: bytes
    kind: PlanKind
    group: Group


class History(msgspec.Struct, frozen=True):
    """What a block comes of. ``steps`` are in order (None: more than ``MAX_STEPS``), ``pairs`` are those of all steps.

    ``loss`` is the sum that the profiles which this router has now give to it, infinite if a step is in none of them.
    """

    pairs: frozenset[Pair] = frozenset()
    steps: tuple[Step, ...] | None = ()
    loss: float = 0.0


NO_HISTORY = History()


def foreign(segment: Segment, receiver: bytes) -> set[bytes]:
    """Lineage ids of the other models whose KV a segment reuses approximately."""
    if segment.kind in _EXACT:
        return set()
    return {holder.lineage_id for holder in holders_of(segment)} - {receiver}


class Taints:
    """Provenance key -> history; what was used longest ago is forgotten. ``families`` are what names are explained by."""

    def __init__(self, families: Mapping[str, FamilyView], most: int = 65_536) -> None:
        self._most, self._origins = most, Origins(families)
        self._histories: OrderedDict[bytes, History] = OrderedDict()
        self._same: dict[History, tuple[History, int]] = {}  # a history -> the one of its kind, its keys

    def __len__(self) -> int:
        return len(self._histories)

    @property
    def num_histories(self) -> int:
        """Different histories that are kept."""
        return len(self._same)

    def history_of(self, provenance: Provenance) -> History | None:
        """None: not known here."""
        if provenance.exact:
            return NO_HISTORY
        found = self._histories.get(provenance.key)
        if found is not None:
            self._histories.move_to_end(provenance.key)
        return found

    def traced(self, provenance: Provenance, before: Provenance) -> History | None:
        """History of blocks that stand after blocks of ``before``, whose loss must be today's; found by their name if need be."""
        known = self.history_of(provenance)
        if known is not None:
            return known
        earlier = self.history_of(before)
        if earlier is None or before.lineage_id != provenance.lineage_id:
            return None
        if provenance.computed:
            after = computed_after(before, provenance.start, provenance.lineage_id)
            found = earlier if after.key == provenance.key else None
        else:
            segment = self._origins.segment_of(provenance, before)
            found = None if segment is None else self._grown(segment, before, earlier, provenance.lineage_id)
        if found is not None:
            self._remember(provenance.key, found)
        return found

    def fold(self, plan: ReusePlan, receiver: bytes) -> Iterator[tuple[Provenance, History | None]]:
        """Provenance and history after each segment of a plan on the model ``receiver``."""
        before = exact_provenance(receiver)
        history: History | None = NO_HISTORY
        for segment in plan.segments:
            after = segment_provenance(segment, before, receiver)
            if after.exact:
                history = NO_HISTORY
            elif any(holder.key == after.key for holder in holders_of(segment)):
                history = self.history_of(after)  # own blocks, kept: theirs holds what came before them
            elif segment.sources:
                history = self._grown(segment, before, history, receiver)
            yield after, history
            before = after

    def learn(self, plan: ReusePlan, receiver: bytes) -> None:
        """Note what the blocks of a plan come of."""
        if any(map(_taints, plan.segments)):
            for after, history in self.fold(plan, receiver):
                if history is not None and not after.exact:
                    self._remember(after.key, history)

    def _grown(self, segment: Segment, before: Provenance, earlier: History | None, receiver: bytes) -> History | None:
        """``earlier``, what the segment's holders bring along, and the segment itself; None if part of it is unknown."""
        holders = dict.fromkeys(holder for holder in holders_of(segment) if not holder.exact)
        known = [earlier, *map(self.history_of, holders)]
        found = [history for history in known if history is not None]
        if len(found) < len(known):
            return None
        own = [Step(one, receiver, segment.kind, group_of(segment)) for one in sorted(foreign(segment, receiver))]
        pairs = frozenset((step.sender, step.receiver) for step in own).union(*(history.pairs for history in found))
        known_steps = [history.steps for history in found if history.steps is not None]
        steps = (*itertools.chain.from_iterable(known_steps), *own)
        whole = len(known_steps) == len(found) and len(steps) <= MAX_STEPS
        return History(pairs, steps if whole else None, segment_provenance(segment, before, receiver).loss)

    def _remember(self, key: bytes, history: History) -> None:
        # few different histories, many keys: equal ones are one object, gone with its last key
        one, count = self._same.get(history, (history, 0))
        self._same[one] = (one, count + 1)
        if key in self._histories:
            self._release(self._histories[key])
        self._histories[key] = one
        self._histories.move_to_end(key)
        while len(self._histories) > self._most:
            _, oldest = self._histories.popitem(last=False)
            self._release(oldest)

    def _release(self, history: History) -> None:
        one, count = self._same.pop(history)
        if count > 1:
            self._same[one] = (one, count - 1)


def group_of(segment: Segment) -> Group:
    """The layers that a segment recomputes (None: none, or token rows)."""
    group = segment.recompute
    return (group.start, group.stop) if isinstance(group, LayerGroup) else None


def holders_of(segment: Segment) -> list[Provenance]:
    holders = [source.holder.provenance for source in segment.sources]
    return holders if segment.e_holder is None else [*holders, segment.e_holder.provenance]


def _taints(segment: Segment) -> bool:
    exact = segment.kind in _EXACT and all(holder.exact for holder in holders_of(segment))
    return bool(segment.sources) and not exact
