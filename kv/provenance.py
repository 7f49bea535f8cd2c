"""Provenance: how a concrete block came to be (docs/design.md section 4).

A block computed or pulled as exact, after only exact blocks, has its model's lineage. Everything after the first approximate
block is tainted: suffix, generated tokens, later turns. The router never offers a tainted block as exact.
"""

from __future__ import annotations

import enum
import math

import msgspec

from kvkin.kv.hashing import digest


class Quality(enum.StrEnum):
    """How far a plan's result may be from a private prefill."""

    EXACT = "exact"
    BOUNDED = "bounded"
    UNPROFILED = "unprofiled"

    @property
    def rank(self) -> int:
        return ("exact", "bounded", "unprofiled").index(self.value)


class Provenance(msgspec.Struct, frozen=True):
    """Identity of a block's KV.

    ``key`` names it (the lineage id while exact); ``lineage_id`` is the model's whose weights read and write it; ``loss``
    is the accumulated profiled loss (0 while exact, infinite where a step was never profiled). A tainted provenance says
    where it began: at token ``start``, after blocks of provenance ``parent``. ``computed`` marks blocks that the model
    itself computed after tainted ones.
    """

    key: bytes
    lineage_id: bytes
    loss: float = 0.0
    parent: bytes = b""
    start: int = 0
    computed: bool = False

    @property
    def exact(self) -> bool:
        return self.key == self.lineage_id

    @property
    def quality(self) -> Quality:
        return quality_of(self.loss, self.exact)

    def follows(self, before: Provenance, position: int) -> bool:
        """Whether a block of this provenance at token ``position`` may stand right after one of ``before``."""
        return self.key == before.key or (not self.exact and self.parent == before.key and self.start == position)


def quality_of(loss: float, exact: bool) -> Quality:
    if exact:
        return Quality.EXACT
    return Quality.BOUNDED if math.isfinite(loss) else Quality.UNPROFILED


def exact_provenance(lineage_id: bytes) -> Provenance:
    return Provenance(lineage_id, lineage_id)


def approximate(before: Provenance, start: int, shape: bytes, lineage_id: bytes, loss: float) -> Provenance:
    """Provenance of blocks from token ``start`` on that were made by approximate reuse after ``before``.

    ``shape`` is the canonical bytes of sources and recomputed layers or rows. Losses add up: two approximate segments in
    one context are never reported as one.
    """
    key = digest(b"reuse", before.key, start.to_bytes(8, "little"), shape, lineage_id)
    return Provenance(key, lineage_id, before.loss + loss, before.key, start)


def computed_after(before: Provenance, start: int, lineage_id: bytes) -> Provenance:
    """Provenance of blocks that the model of ``lineage_id`` computed itself from token ``start`` on, after ``before``.

    Exact after exact; after a taint the key holds where the own computation began, because the same tokens under another
    boundary have another KV. Going on computing keeps the key.
    """
    if before.lineage_id == lineage_id and (before.exact or before.computed):
        return before
    key = digest(b"computed", before.key, start.to_bytes(8, "little"), lineage_id)
    return Provenance(key, lineage_id, before.loss, before.key, start, computed=True)
