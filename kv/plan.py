"""Segments and reuse plans (docs/design.md section 5): the language of policy, wire, executor, cost model and index.

A plan covers the whole prompt with consecutive segments. The router makes it, ``PlanExecution`` runs it, the reuse report
is told in it.
"""

from __future__ import annotations

import enum

import msgspec

from kvkin.kv.provenance import Provenance, approximate, computed_after, exact_provenance


class PlanKind(enum.StrEnum):
    """The common plan shapes; a plan of several segments is named after its dominant one."""

    EXACT = "exact"
    SHARED_PREFIX = "shared-prefix"
    PARTIAL = "partial"
    TOKEN_WISE = "token-wise"
    PRIVATE = "private"


class LayerGroup(msgspec.Struct, frozen=True, tag="layers"):
    """Half-open range of layers [start, stop)."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.start <= layer < self.stop


class TokenRows(msgspec.Struct, frozen=True, tag="rows"):
    """Token rows (positions in the prompt) that are recomputed in all layers (KVShare, CacheBlend)."""

    rows: tuple[int, ...]


class Holder(msgspec.Struct, frozen=True):
    """Who holds the KV of some layers: a node, under which provenance; ``order_id`` if it is computing it right now."""

    node: str
    provenance: Provenance
    order_id: str = ""


class LayerSource(msgspec.Struct, frozen=True):
    """KV of layers [layers.start, layers.stop) comes from ``holder``."""

    layers: LayerGroup
    holder: Holder


class Segment(msgspec.Struct, frozen=True):
    """Tokens [start, stop) of the prompt, what is pulled for them and what is recomputed.

    ``sources`` are ordered and disjoint; the layers that they leave out must lie in ``recompute``. ``e_layer`` is the
    transition layer whose hidden states are pulled from ``e_holder`` (none if the recompute starts at layer 0).
    ``source_first_position`` is where the span starts in the holder's context; it differs from ``start`` for moved spans.
    ``loss`` is the profiled loss of this reuse (0 exact, infinite unprofiled).
    """

    start: int
    stop: int
    sources: tuple[LayerSource, ...] = ()
    source_first_position: int = -1
    e_layer: int | None = None
    e_holder: Holder | None = None
    recompute: LayerGroup | TokenRows | None = None
    kind: PlanKind = PlanKind.PRIVATE
    loss: float = 0.0

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def nodes(self) -> tuple[str, ...]:
        """Every node that the segment pulls from, in order of first use."""
        names = [source.holder.node for source in self.sources]
        if self.e_holder is not None:
            names.insert(0, self.e_holder.node)
        return tuple(dict.fromkeys(names))

    def pulled_layers(self) -> list[int]:
        return [layer for source in self.sources for layer in range(source.layers.start, source.layers.stop)]

    def recomputed_layers(self, num_layers: int) -> range:
        if isinstance(self.recompute, LayerGroup):
            return range(self.recompute.start, self.recompute.stop)
        return range(num_layers) if self.recompute is not None or not self.sources else range(0)

    def shape(self) -> bytes:
        """Canonical bytes of what is approximate about the segment (goes into provenance)."""
        return msgspec.msgpack.encode(
            (
                [(source.layers, source.holder.provenance.key) for source in self.sources],
                self.e_layer,
                self.e_holder.provenance.key if self.e_holder else b"",
                self.recompute,
                self.source_first_position,
            )
        )


class ReusePlan(msgspec.Struct, frozen=True):
    """Consecutive segments from 0 to ``num_tokens``; the last one is computed and holds at least one token."""

    segments: tuple[Segment, ...]
    reason: str = ""

    @property
    def num_tokens(self) -> int:
        return self.segments[-1].stop

    @property
    def reused_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.segments if segment.sources)

    @property
    def kind(self) -> PlanKind:
        """Kind of the segment with the most reused tokens; private if nothing is reused."""
        reusing = [segment for segment in self.segments if segment.sources]
        return max(reusing, key=lambda segment: segment.num_tokens).kind if reusing else PlanKind.PRIVATE

    @property
    def loss(self) -> float:
        return sum(segment.loss for segment in self.segments)

    def validate(self, num_layers: int) -> None:
        """Raise ValueError, naming the segment, unless the plan can be executed on a model of ``num_layers`` layers."""
        position = 0
        if not self.segments:
            raise ValueError("a plan has at least one segment")
        for index, segment in enumerate(self.segments):
            where = f"segment {index} [{segment.start}, {segment.stop})"
            if segment.start != position or segment.stop <= segment.start:
                raise ValueError(f"{where} does not continue at token {position}")
            position = segment.stop
            _validate_layers(segment, num_layers, where)
        last = self.segments[-1]
        if last.sources:
            raise ValueError("the last segment must be computed: at least one token is never reused")


def _validate_layers(segment: Segment, num_layers: int, where: str) -> None:
    pulled = segment.pulled_layers()
    if pulled != sorted(set(pulled)) or (pulled and (pulled[0] < 0 or pulled[-1] >= num_layers)):
        raise ValueError(f"{where}: sources overlap, are out of order or exceed {num_layers} layers")
    if isinstance(segment.recompute, TokenRows):
        if len(pulled) != num_layers:
            raise ValueError(f"{where}: token-wise reuse needs the KV of all layers")
        rows = segment.recompute.rows
        if list(rows) != sorted(set(rows)) or (rows and not segment.start <= rows[0] <= rows[-1] < segment.stop):
            raise ValueError(f"{where}: recomputed rows must ascend and lie inside of it")
        if segment.e_layer is not None or segment.e_holder is not None:
            raise ValueError(f"{where}: token-wise reuse takes no hidden states")
        return
    group = segment.recompute
    computed = segment.recomputed_layers(num_layers)
    if group is not None and not 0 <= group.start < group.stop <= num_layers:
        raise ValueError(f"{where}: recompute group [{group.start}, {group.stop}) is outside of 0 .. {num_layers}")
    if sorted([*pulled, *computed]) != list(range(num_layers)):
        raise ValueError(f"{where}: pulled and recomputed layers must cover every layer once")
    needs_e = bool(computed) and computed[0] > 0
    if needs_e != (segment.e_layer is not None) or (segment.e_layer is None) != (segment.e_holder is None):
        raise ValueError(f"{where}: hidden states are pulled exactly where the recompute starts above layer 0")
    if needs_e and segment.e_layer != computed[0]:
        raise ValueError(f"{where}: e_layer {segment.e_layer} is not the first recomputed layer {computed[0]}")


def private_plan(num_tokens: int, reason: str = "") -> ReusePlan:
    """Everything on the receiver: the reference that all other plans are compared with."""
    return ReusePlan((Segment(0, num_tokens),), reason)


def segment_provenance(segment: Segment, before: Provenance, lineage_id: bytes) -> Provenance:
    """Provenance of the blocks of ``segment`` on a receiver of ``lineage_id``, given that of the block before.

    Exact and shared-prefix segments keep exactness; a segment that is pulled whole from the receiver's own earlier blocks
    keeps theirs; anything else taints. Exact KV after tainted blocks is neither exact nor what the model would have computed
    there, so it gets a name of its own. Pure, so that the router and the node come to the same answer.
    """
    if not segment.sources:
        return computed_after(before, segment.start, lineage_id)
    holders = {source.holder.provenance for source in segment.sources}
    if segment.e_holder is not None:
        holders.add(segment.e_holder.provenance)
    claimed = segment.kind in (PlanKind.EXACT, PlanKind.SHARED_PREFIX)
    if claimed and before.exact and all(holder.exact for holder in holders):
        return computed_after(before, segment.start, lineage_id)
    if len(holders) == 1 and segment.recompute is None:
        (held,) = holders
        if held.lineage_id == lineage_id and held.follows(before, segment.start):
            return held
    inherited = max(holder.loss for holder in holders)
    return approximate(before, segment.start, segment.shape(), lineage_id, segment.loss + inherited)


def provenances(plan: ReusePlan, lineage_id: bytes) -> list[Provenance]:
    """Provenance after each segment, folded from the start of the prompt."""
    result: list[Provenance] = []
    before = exact_provenance(lineage_id)
    for segment in plan.segments:
        before = segment_provenance(segment, before, lineage_id)
        result.append(before)
    return result
