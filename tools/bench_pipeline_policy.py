"""What the router's policy would do on a link of ``kvkin bench pipeline``, going by what the bench measured. Pure.

The very policy of the router (``router/policy.py``) is asked with a cluster of two nodes: the receiver, whose speed is that of its
measured private runs, and a holder of the whole context. Only the measured recompute group is offered, and the two models share no
layer exactly, so that the choice is between the two plans that were measured: partial reuse and a private prefill.
"""

from __future__ import annotations

import msgspec

from kvkin.kv.cost import CostSettings, NodeRates, prefill_work
from kvkin.kv.layout import KVLayout
from kvkin.kv.lineage import LayerWeights, Lineage, fold_lineage
from kvkin.kv.plan import LayerGroup, PlanKind
from kvkin.kv.provenance import exact_provenance
from kvkin.router.chains import Match, Run
from kvkin.router.policy import choose
from kvkin.router.policy_types import ClusterView, FamilyView, GroupChoice, NodeView, PolicyRequest, PolicySettings
from kvkin.transport.messages import Reuse

SENDER, RECEIVER, HOLDER, NODE, FAMILY = "sender", "receiver", "holder", "node", "family"


class Situation(msgspec.Struct, frozen=True):
    """One context of the bench: ``context_tokens`` (whole blocks) that the holder has, ``suffix_tokens`` behind them."""

    layout: KVLayout
    group: LayerGroup
    context_tokens: int
    suffix_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.context_tokens + self.suffix_tokens


class PolicyChoice(msgspec.Struct, frozen=True):
    """``kind`` is partial or private. ``partial_s`` and ``private_s`` are the estimated seconds to the first token of each (None: the
    policy does not weigh reuse of so few tokens)."""

    kind: PlanKind
    reused_tokens: int
    partial_s: float | None
    private_s: float
    reason: str


def layer_tokens_per_s(situation: Situation, private_s: float, cost: CostSettings) -> float:
    """Speed of a receiver whose private prefill takes ``private_s``, in the unit in which the cost model counts work."""
    return prefill_work(situation.num_tokens, 0, situation.layout.num_layers, cost) / private_s


def policy_choice(situation: Situation, private_s: float, bytes_per_s: float, settings: PolicySettings) -> PolicyChoice:
    """What the policy chooses where a private prefill takes ``private_s`` and the link moves ``bytes_per_s``."""
    layout, group = situation.layout, situation.group
    sender, receiver = (_lineage(name, layout.num_layers) for name in (SENDER, RECEIVER))
    transitions = (group.start,) if group.start else ()
    family = FamilyView(
        name=FAMILY,
        base_model=SENDER,
        layout=layout,
        lineages={sender.id: sender, receiver.id: receiver},
        models_of={sender.id: (SENDER,), receiver.id: (RECEIVER,)},
        groups={(SENDER, RECEIVER): (GroupChoice(group),)},
        transition_layers=transitions,
    )
    rates = NodeRates(layer_tokens_per_s(situation, private_s, settings.cost), bytes_per_s)
    nodes = {NODE: NodeView(NODE, "decode", (RECEIVER,), rates), HOLDER: NodeView(HOLDER, "prefill", (SENDER,))}
    held = Run(
        exact_provenance(sender.id), 0, situation.context_tokens // layout.block_size, layout.num_layers, transitions
    )
    request = PolicyRequest(
        model=RECEIVER,
        family=FAMILY,
        lineage=receiver,
        num_tokens=situation.num_tokens,
        block_size=layout.block_size,
        num_blocks=situation.num_tokens // layout.block_size,
        num_layers=layout.num_layers,
        reuse=Reuse.ANY,
        publish=False,
    )
    decision = choose(request, (Match(HOLDER, (held,)),), ClusterView(nodes, {FAMILY: family}), settings)
    estimates = {one.kind: one.ttft_s for one in decision.considered}
    return PolicyChoice(
        kind=decision.plan.kind,
        reused_tokens=decision.plan.reused_tokens,
        partial_s=estimates.get(PlanKind.PARTIAL),
        private_s=estimates[PlanKind.PRIVATE],
        reason=decision.reason,
    )


def _lineage(name: str, num_layers: int) -> Lineage:
    """A model all of whose layers are its own."""
    weights = name.encode()
    return fold_lineage(b"bench", b"bench", [LayerWeights(weights, weights, b"geometry")] * num_layers)
