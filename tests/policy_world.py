"""A small family for tests of the policy: lineages with chosen shared depths, nodes, matches."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvkin.kv.cost import CostSettings, NodeRates
from kvkin.kv.layout import KVLayout, Plane
from kvkin.kv.lineage import LayerWeights, Lineage, fold_lineage
from kvkin.kv.plan import LayerGroup
from kvkin.kv.provenance import Provenance, exact_provenance
from kvkin.router.index import Match, Run
from kvkin.router.policy_types import (
    ClusterView,
    FamilyView,
    GroupChoice,
    NodeView,
    PolicyRequest,
    PolicySettings,
)
from kvkin.transport.messages import Reuse

LAYERS, BLOCK = 8, 16
LAYOUT = KVLayout(LAYERS, (Plane("k", 2, 16), Plane("v", 2, 16)), 64, "float32", BLOCK)
TRANSITIONS = (2, 4)


def lineage_of(own_from: int, name: str) -> Lineage:
    """A model whose layers are the base's below ``own_from`` and its own from there on."""

    def layer(index: int) -> LayerWeights:
        weights = (name if index >= own_from else "base").encode()
        return LayerWeights(weights, weights + b"-whole", b"geometry")

    return fold_lineage(b"root", b"float32", [layer(index) for index in range(LAYERS)])


LINEAGES = {
    "base": lineage_of(LAYERS, "base"),
    "copy": lineage_of(LAYERS, "copy"),  # the same weights under another name
    "upper": lineage_of(5, "upper"),  # layers 0..4 are the base's
    "full": lineage_of(0, "full"),  # every layer is its own
    "other": lineage_of(0, "other"),
}
GROUPS: Mapping[tuple[str, str], tuple[GroupChoice, ...]] = {
    ("base", "full"): (GroupChoice(LayerGroup(2, 6), 0.02), GroupChoice(LayerGroup(4, 6), 0.08)),
    ("other", "full"): (GroupChoice(LayerGroup(2, 5)),),
    ("full", "other"): (GroupChoice(LayerGroup(0, 4), 0.03),),
}
# one layer-token takes 10 us, a byte 1 ns: 1,600 tokens private 0.15 s, pulled whole 0.013 s
RATES = NodeRates(1e5, 1e9)
SETTINGS = PolicySettings(cost=CostSettings(context_half_tokens=1e9))


def exact(model: str) -> Provenance:
    return exact_provenance(LINEAGES[model].id)


def family(groups: Mapping[tuple[str, str], tuple[GroupChoice, ...]] = GROUPS) -> FamilyView:
    models_of: dict[bytes, tuple[str, ...]] = {}
    for name, lineage in LINEAGES.items():
        models_of[lineage.id] = (*models_of.get(lineage.id, ()), name)
    return FamilyView(
        "f",
        "base",
        LAYOUT,
        {lineage.id: lineage for lineage in LINEAGES.values()},
        models_of,
        groups,
        TRANSITIONS,
    )


FAMILY = family()


def node(name: str, *models: str, role: str = "decode", **changes: object) -> NodeView:
    rates = NodeRates(
        1e5 * float(str(changes.pop("speed", 1.0))),
        1e9,
        float(str(changes.pop("queued_tokens", 0.0))),
        float(str(changes.pop("leases", 0.0))),
    )
    return NodeView(name, role, models, rates, **changes)  # type: ignore[arg-type]


def view(*nodes: NodeView, family: FamilyView = FAMILY) -> ClusterView:
    return ClusterView({one.name: one for one in nodes}, {"f": family})


def request(model: str, blocks: int = 100, tail: int = 8, **changes: object) -> PolicyRequest:
    """A prompt of so many full blocks and ``tail`` tokens."""
    values: dict[str, object] = {
        "model": model,
        "family": "f",
        "lineage": LINEAGES[model],
        "num_tokens": blocks * BLOCK + tail,
        "block_size": BLOCK,
        "num_blocks": blocks,
        "num_layers": LAYERS,
        "reuse": Reuse.ANY,
    }
    return PolicyRequest(**(values | changes))  # type: ignore[arg-type]


def run(
    provenance: Provenance,
    start: int,
    stop: int,
    e_layers: tuple[int, ...] = TRANSITIONS,
    kv_layers: int = LAYERS,
    order_id: str = "",
) -> Run:
    return Run(provenance, start, stop, kv_layers, e_layers, order_id)


def held(name: str, model: str, blocks: int, e_layers: tuple[int, ...] = TRANSITIONS, **changes: object) -> Match:
    return Match(name, (run(exact(model), 0, blocks, e_layers, **changes),))  # type: ignore[arg-type]


UNPROFILED = math.inf
