"""What the policy is asked, what it sees of the cluster and what it answers: frozen structs without behaviour of their own.

The router node fills :class:`PolicySettings` from its configuration and :class:`ClusterView` from its membership; the policy
(router/policy.py) reads nothing else. All times are seconds, all sizes bytes, all groups half-open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from kvkin.kv.cost import CostSettings, Estimate, NodeRates
from kvkin.kv.layout import KVLayout
from kvkin.kv.lineage import Lineage
from kvkin.kv.plan import LayerGroup, PlanKind, ReusePlan
from kvkin.kv.provenance import Provenance, Quality
from kvkin.transport.messages import Reuse


class PolicyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request, after tokenization and hashing.

    ``num_blocks`` is how many full blocks were hashed. ``share_hint`` is how many later requests are expected to start with
    this prompt (negative: unknown). ``fan_out`` is what the index has seen: (blocks, decayed number of other requests of the
    family that passed them), by rising blocks. ``order_id`` is a fresh id for the one prefill order that the decision may hold.
    ``receiver`` is the attached server that asks for itself (empty: any decode node of the model may answer).
    ``deadline_s`` is the time left until the client's deadline, ``slo_s`` that until its target for the first token (none: no
    target; at most 0: missed already).
    """

    model: str
    family: str
    lineage: Lineage
    num_tokens: int
    block_size: int
    num_blocks: int
    num_layers: int
    reuse: Reuse = Reuse.BOUNDED
    max_loss: float = 0.05
    publish: bool = True
    share_hint: float = -1.0
    fan_out: tuple[tuple[int, float], ...] = ()
    order_id: str = ""
    deadline_s: float | None = None
    slo_s: float | None = None
    receiver: str = ""


class NodeView(msgspec.Struct, frozen=True):
    """A node as the router sees it now. ``role`` is ``prefill``, ``decode`` or ``attached``; ``rates`` hold its decaying load signals."""

    name: str
    role: str
    models: tuple[str, ...]
    rates: NodeRates = NodeRates()
    alive: bool = True
    draining: bool = False

    @property
    def usable(self) -> bool:
        """New work may go there."""
        return self.alive and not self.draining


class GroupChoice(msgspec.Struct, frozen=True):
    """A recompute group that is allowed for a pair of models (None: full reuse, nothing is recomputed); ``loss`` is profiled and
    at least 0, infinite if it never was."""

    group: LayerGroup | None
    loss: float = math.inf


class FamilyView(msgspec.Struct, frozen=True, eq=False, weakref=True):
    """One family, made once: the policy remembers what follows from it for as long as this very object lives.

    ``lineages`` are keyed by lineage id, ``models_of`` names the models of each id.

    ``base_model`` is what the prefill nodes compute when they are ordered. ``groups`` are keyed by (sender, receiver) model.
    """

    name: str
    base_model: str
    layout: KVLayout
    lineages: Mapping[bytes, Lineage]
    models_of: Mapping[bytes, tuple[str, ...]]
    groups: Mapping[tuple[str, str], tuple[GroupChoice, ...]] = {}
    transition_layers: tuple[int, ...] = ()

    @property
    def num_models(self) -> int:
        return sum(len(names) for names in self.models_of.values())

    @property
    def base_lineage(self) -> bytes | None:
        """Lineage id of the base model (None: no node serves it)."""
        return next((key for key, names in self.models_of.items() if self.base_model in names), None)


class ClusterView(msgspec.Struct, frozen=True):
    """All nodes by name and all families by name."""

    nodes: Mapping[str, NodeView]
    families: Mapping[str, FamilyView]


class PolicySettings(msgspec.Struct, frozen=True):
    """Weights and thresholds of the policy.

    - ``beta``: seconds of TTFT that one node-second is worth.
    - ``exact_preference``: share of its objective by which an approximate plan must beat the best exact one (ties prefer exact).
    - ``min_pull_tokens``: less than this is never pulled over the wire (the layer pipeline costs more than it saves).
    - ``min_order_tokens``: contexts shorter than this are never ordered from the prefill pool.
    - ``min_fan_out``: expected later requests below which no background order is made.
    - ``max_pool_queue_s``: a prefill node with a longer queue gets no more orders.
    - ``live_margin``: a live order is chosen only if its TTFT is at most this share of the best plan's without it.
    - ``spill_s``: a node that holds none of the context is chosen over one that does only if it is better by this much.
    - ``max_segments``: most segments of a plan.
    - ``ttft_slo_s``: target for the first token of requests that name none (None: no target).
    """

    beta: float = 0.1
    exact_preference: float = 0.1
    min_pull_tokens: int = 64
    min_order_tokens: int = 256
    min_fan_out: float = 1.0
    max_pool_queue_s: float = 30.0
    live_margin: float = 0.7
    cost: CostSettings = CostSettings()
    spill_s: float = 0.5
    max_segments: int = 16
    ttft_slo_s: float | None = None


class OrderRequest(msgspec.Struct, frozen=True):
    """A prefill to order: the first ``num_blocks`` blocks of the prompt, computed by ``model`` on ``node``.

    The router node announces it to the index with the same figures, so that later requests find it while it is computed.
    """

    order_id: str
    node: str
    model: str
    num_blocks: int
    provenance: Provenance
    kv_layers: int
    e_layers: tuple[int, ...]
    background: bool


class Considered(msgspec.Struct, frozen=True):
    """One alternative that the policy weighed. ``sources`` are the nodes of its segments, the receiver's own blocks included;
    ``group`` is what its longest approximate segment recomputes (None: nothing, or there is none)."""

    node: str
    kind: PlanKind
    sources: tuple[str, ...]
    quality: Quality
    loss: float
    reused_blocks: int
    ttft_s: float
    objective_s: float
    chosen: bool
    group: LayerGroup | None = None


class Decision(msgspec.Struct, frozen=True):
    """Where the request runs and how. At most one of ``live_order`` (the plan pulls from it) and ``background_order`` is set.

    ``pull_bytes_per_s`` and ``layer_tokens_per_s`` are the rates that the estimate went by (0: there was nothing to pull).
    """

    node: str
    plan: ReusePlan
    estimate: Estimate
    quality: Quality
    loss: float
    reason: str
    live_order: OrderRequest | None = None
    background_order: OrderRequest | None = None
    considered: tuple[Considered, ...] = ()
    pull_bytes_per_s: float = 0.0
    layer_tokens_per_s: float = 0.0
