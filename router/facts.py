"""What the policy knows of a receiver beforehand: which parts of which sender's KV it may use, and how.

Derived once per (family, model) and remembered for as long as the FamilyView lives; pure.
"""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

from kvkin.kv.layout import KVLayout
from kvkin.kv.lineage import Lineage, shared_transition
from kvkin.kv.plan import LayerGroup, PlanKind
from kvkin.kv.provenance import Provenance, exact_provenance
from kvkin.router.policy_types import FamilyView


class Option:
    """One way to reuse a block: which layers are pulled, from where the recompute starts, what it costs in quality.

    ``kept``: the receiver's own blocks as they are, whose loss stands in their provenance.
    """

    __slots__ = (
        "e_block_bytes",
        "e_layer",
        "group",
        "kept",
        "kind",
        "kv_block_bytes",
        "loss",
        "needed_layers",
        "pulled",
        "recomputed_layers",
    )

    def __init__(
        self, kind: PlanKind, layout: KVLayout, group: LayerGroup | None, loss: float, *, kept: bool = False
    ) -> None:
        num_layers = layout.num_layers
        self.kind, self.group, self.loss, self.kept = kind, group, loss, kept
        start, stop = (num_layers, num_layers) if group is None else (group.start, group.stop)
        spans = (LayerGroup(0, start), LayerGroup(stop, num_layers))
        self.pulled = tuple(span for span in spans if len(span))
        self.kv_block_bytes = sum(map(len, self.pulled)) * layout.kv_block_bytes
        self.recomputed_layers = stop - start
        self.needed_layers = num_layers if stop < num_layers or group is None else start
        self.e_layer = start if group is not None and start > 0 else None
        self.e_block_bytes = 0 if self.e_layer is None else layout.e_block_bytes


# (option, loss, recomputed layers, bytes of E, and of KV and E, pulled per block), by rising layers: what is compared first,
# without a look at the option itself
Priced = tuple[Option, float, int, int, int]


class Facts:
    """A receiver: its lineage, and by sender lineage id how deep both agree and which groups are allowed.

    ``senders`` are the lineages whose blocks are of any use, ``exact_senders`` those that share at least one layer. ``losses``
    are the profiled ones of all groups, rising.
    """

    def __init__(self, model: str, lineage: Lineage, family: FamilyView) -> None:
        self.model, self.num_layers = model, lineage.num_layers
        self.lineage_id = lineage.id
        self.provenance: Provenance = exact_provenance(self.lineage_id)
        self.layout = layout = family.layout
        self.base_lineage = family.base_lineage
        self.num_models = family.num_models
        self.shared = {key: shared_transition(sender, lineage) for key, sender in family.lineages.items()}
        self.shared[self.lineage_id] = self.num_layers
        self.whole = Option(PlanKind.EXACT, layout, None, 0.0)
        self.kept = Option(PlanKind.PARTIAL, layout, None, 0.0, kept=True)
        self.from_layer = {
            layer: Option(PlanKind.SHARED_PREFIX, layout, LayerGroup(layer, self.num_layers), 0.0)
            for layer in range(1, self.num_layers)
        }
        groups = {key: self._groups(names, family) for key, names in family.models_of.items()}
        self.groups = {key: found for key, found in groups.items() if found and key != self.lineage_id}
        losses = {option.loss for options in self.groups.values() for option in options}
        self.losses = tuple(sorted(loss for loss in losses if math.isfinite(loss)))
        self._groups_for: dict[tuple[bytes, int, tuple[int, ...]], tuple[Priced, ...]] = {}
        self.exact_senders = frozenset(key for key, depth in self.shared.items() if depth > 0)
        self.senders = self.exact_senders.union(self.groups)
        # share of the layers that this model computes when the base model's KV is there
        self.share_after_base = self._share_after_base(family)

    def exact_option(self, lineage_id: bytes, kv_layers: int, e_layers: tuple[int, ...]) -> Option | None:
        """How exact blocks of a lineage give this receiver exact KV (None: not at all)."""
        depth = self.shared.get(lineage_id, 0)
        if depth >= self.num_layers and kv_layers >= self.num_layers:
            return self.whole
        limit = min(depth, kv_layers, self.num_layers - 1)
        return self.from_layer.get(max((layer for layer in e_layers if layer <= limit), default=0))

    def groups_for(self, lineage_id: bytes, kv_layers: int, e_layers: tuple[int, ...]) -> tuple[Priced, ...]:
        """The recompute groups for which a sender's blocks with these layers have all that is pulled."""
        key = (lineage_id, kv_layers, e_layers)
        found = self._groups_for.get(key)
        if found is None:
            found = tuple(
                (
                    option,
                    option.loss,
                    option.recomputed_layers,
                    option.e_block_bytes,
                    option.kv_block_bytes + option.e_block_bytes,
                )
                for option in self.groups.get(lineage_id, ())
                if kv_layers >= option.needed_layers and (option.e_layer is None or option.e_layer in e_layers)
            )
            if len(self._groups_for) > 4096:
                self._groups_for.clear()
            self._groups_for[key] = found
        return found

    def _groups(self, senders: tuple[str, ...], family: FamilyView) -> tuple[Option, ...]:
        options: dict[LayerGroup | None, Option] = {}
        for sender in senders:
            for choice in family.groups.get((sender, self.model), ()):
                known = options.get(choice.group)
                if self._fits(choice.group) and (known is None or choice.loss < known.loss):
                    options[choice.group] = Option(PlanKind.PARTIAL, self.layout, choice.group, choice.loss)
        return tuple(sorted(options.values(), key=lambda option: (option.recomputed_layers, option.loss)))

    def _fits(self, group: LayerGroup | None) -> bool:
        """Full reuse does; so does a group within the layers, unless it is all of them: that reuses nothing."""
        if group is None:
            return True
        return 0 <= group.start < group.stop <= self.num_layers and len(group) < self.num_layers

    def _share_after_base(self, family: FamilyView) -> float:
        if self.base_lineage is None:
            return 1.0
        depth = self.shared.get(self.base_lineage, 0)
        if depth >= self.num_layers:
            return 0.0
        recomputed = [option.recomputed_layers for option in self.groups.get(self.base_lineage, ())]
        recomputed += [self.num_layers - layer for layer in family.transition_layers if 0 < layer <= depth]
        return min(recomputed, default=self.num_layers) / self.num_layers


_FACTS: WeakKeyDictionary[FamilyView, dict[tuple[str, int], tuple[Lineage, Facts]]] = WeakKeyDictionary()


def facts_of(model: str, lineage: Lineage, family: FamilyView) -> Facts:
    """The remembered facts of a receiver."""
    known = _FACTS.setdefault(family, {})
    # by identity: hashing a lineage means hashing all its layers
    found = known.get((model, id(lineage)))
    if found is None:
        if len(known) > 4 * len(family.lineages) + 64:
            known.clear()
        found = known[model, id(lineage)] = (lineage, Facts(model, lineage, family))
    return found[1]


def saving_after_base(family: FamilyView, receiver: str) -> float:
    """Mean share of a private prefill that the family's other models save once the base model's KV is there."""
    shares = []
    for key, names in family.models_of.items():
        for name in names:
            if name not in (receiver, family.base_model):
                shares.append(1.0 - facts_of(name, family.lineages[key], family).share_after_base)
    return math.fsum(shares) / len(shares) if shares else 0.0
