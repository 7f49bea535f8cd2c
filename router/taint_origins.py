"""Which approximate reuse a tainted block's name stands for: found again from the name, for blocks whose plan this router did not make.

A provenance's key is a digest of what came before, where the reuse began, whose KV was reused and which layers were recomputed
(``kv.provenance.approximate``). The models and groups of a family are few, so a router tries them: after a restart, or of another
router's plans, it learns from which pair a block comes and under which group, and so what today's profile says of it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvkin.kv.plan import Holder, LayerSource, Segment, segment_provenance
from kvkin.kv.provenance import Provenance, exact_provenance
from kvkin.router.facts import Option, facts_of
from kvkin.router.policy_types import FamilyView

_MAX_STRANGERS = 4096


class Origins:
    """All groups that the profiles and the configuration of ``families`` allow, by the receiver's lineage id."""

    def __init__(self, families: Mapping[str, FamilyView]) -> None:
        self._family_of = {key: family for family in families.values() for key in family.models_of}
        self._strangers: set[bytes] = set()  # keys that no group explains: tried once

    def segment_of(self, provenance: Provenance, before: Provenance) -> Segment | None:
        """The reuse of another model's exact blocks by which blocks of ``provenance`` came to stand after blocks of ``before``.

        None: no group of today's explains the name, or the blocks that were reused were tainted themselves.
        """
        key, lineage_id = provenance.key, provenance.lineage_id
        if key in self._strangers or provenance.parent != before.key or lineage_id not in self._family_of:
            return None
        for segment in self._segments(lineage_id, provenance.start):
            if segment_provenance(segment, before, lineage_id).key == key:
                return segment
        if len(self._strangers) >= _MAX_STRANGERS:
            self._strangers.clear()
        self._strangers.add(key)
        return None

    def _segments(self, lineage_id: bytes, start: int) -> Iterator[Segment]:
        family = self._family_of[lineage_id]
        for name in family.models_of[lineage_id]:
            for sender, options in facts_of(name, family.lineages[lineage_id], family).groups.items():
                holder = Holder("", exact_provenance(sender))
                for option in options:
                    yield _segment(option, holder, start)


def _segment(option: Option, holder: Holder, start: int) -> Segment:
    """As the policy makes it (``Desk.plan``); where it stops and on which node is in no name."""
    return Segment(
        start,
        start + 1,
        sources=tuple(LayerSource(span, holder) for span in option.pulled),
        source_first_position=start,
        e_layer=option.e_layer,
        e_holder=None if option.e_layer is None else holder,
        recompute=option.group,
        kind=option.kind,
        loss=option.loss,
    )
