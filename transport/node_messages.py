"""Node messages: what prefill nodes, decode nodes, attached servers and the router say to each other.

Every node keeps one DEALER socket per router. It registers, sends a snapshot of what it holds, then ordered deltas numbered
per (incarnation, router) and heartbeats; the router orders prefills and executions (docs/design.md section 2). An attached server
takes its requests from its own clients: it asks for plans, and is never sent an execution or an order.
"""

from __future__ import annotations

import msgspec

from kvkin.kv.layout import KVLayout
from kvkin.kv.lineage import Lineage
from kvkin.kv.plan import PlanKind, ReusePlan
from kvkin.kv.provenance import Provenance
from kvkin.transport.messages import NodeLoad, Reuse, ReuseReport, Sampling, Timings, TokenLogprob

# --- node to router -----------------------------------------------------------------------------------------------------


class ServedModel(msgspec.Struct, frozen=True):
    """A model that a node runs; the router checks it against its own configuration by lineage and tokenizer digest."""

    name: str
    family: str
    lineage: Lineage
    tokenizer_digest: bytes


class Register(msgspec.Struct, frozen=True, tag="register"):
    """First message of an incarnation. ``source_address`` is where consumers open layer streams (ZeroMQ)."""

    version: int
    node: str
    role: str
    incarnation: str
    source_address: str
    models: tuple[ServedModel, ...]
    layout: KVLayout
    transition_layers: tuple[int, ...] = ()


class Holding(msgspec.Struct, frozen=True):
    """What a node has of one block: KV of layers [0, kv_layers) and E at ``e_layers``. ``position`` is its first token's."""

    block: bytes
    parent: bytes
    provenance: int
    position: int
    kv_layers: int
    e_layers: tuple[int, ...] = ()


class Holdings(msgspec.Struct, frozen=True, tag="holdings"):
    """A part of a snapshot (``sequence`` 0) or the next delta. ``Holding.provenance`` and the pairs of ``removed`` index ``provenances``.

    ``removed`` lists (block, provenance) pairs. ``epoch`` counts the snapshots that the incarnation has sent to this router;
    its parts are numbered by ``part``, ``last`` ends it. Deltas carry the epoch of the newest snapshot, are numbered from 1
    within it and may be sent between its parts. A receiver that misses a number asks for a snapshot.
    """

    incarnation: str
    sequence: int
    provenances: tuple[Provenance, ...] = ()
    added: tuple[Holding, ...] = ()
    removed: tuple[tuple[bytes, int], ...] = ()
    epoch: int = 0
    part: int = 0
    last: bool = True


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    incarnation: str
    load: NodeLoad
    draining: bool = False


class Generated(msgspec.Struct, frozen=True, tag="generated"):
    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class Done(msgspec.Struct, frozen=True, tag="done"):
    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    timings: Timings
    report: ReuseReport
    logprobs: tuple[TokenLogprob, ...] = ()


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A request's or an order's bad end."""

    request_id: str
    code: str
    message: str
    retryable: bool


class OrderDone(msgspec.Struct, frozen=True, tag="order_done"):
    order_id: str
    num_tokens: int
    computed_tokens: int
    seconds: float


class DriftSource(msgspec.Struct, frozen=True):
    """A model whose KV is reused approximately: its lineage id and name, and how. ``group`` are the recomputed layers
    [start, stop) (none: full reuse, or token rows)."""

    lineage_id: bytes
    model: str
    kind: PlanKind
    group: tuple[int, int] | None = None


class DriftSample(msgspec.Struct, frozen=True, tag="drift_sample"):
    """What a check of ``request_id`` against a private run showed, told to every router (docs/operations.md, Drift).

    ``receiver`` is the lineage id of the request's model, ``sources`` and ``inherited`` come back from ``DriftCheck``.
    ``first_token``: both runs find the same first token most likely. ``agreement`` is the share of ``tokens`` first tokens up to the first
    difference, ``divergence`` KL(private || reused) of the first token's distribution, in nats. ``model`` is the request's model by
    name (empty: not told): several may share a lineage, and differ in their heads.
    """

    request_id: str
    receiver: bytes
    sources: tuple[DriftSource, ...]
    first_token: bool
    agreement: float
    divergence: float
    tokens: int
    inherited: bool = False
    model: str = ""


class AskPlan(msgspec.Struct, frozen=True, tag="ask_plan"):
    """An attached server (docs/vllm.md) took a request of its own: how does it best get the KV of this prompt?

    ``question_id`` is the server's, unique among its open questions; the rest as in ``generate``. Answered by one ``planned`` or
    ``plan_refused``.
    """

    question_id: str
    model: str
    token_ids: tuple[int, ...]
    reuse: Reuse = Reuse.BOUNDED
    max_loss: float = 0.05
    publish: bool = True
    share_hint: float = -1.0
    deadline_s: float = 60.0


class PlanDone(msgspec.Struct, frozen=True, tag="plan_done"):
    """What became of the plan that answered ``question_id``, for the router's counters: counted where bytes landed."""

    question_id: str
    prompt_tokens: int
    tokens_reused: int
    fallback: str = ""


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The node stops now: what it held is gone, what still ran on it failed. Saves the router from waiting for silence."""

    incarnation: str


# --- router to node -----------------------------------------------------------------------------------------------------


class Registered(msgspec.Struct, frozen=True, tag="registered"):
    """The router knows the node now; a snapshot is expected next."""

    router: str
    router_incarnation: str
    heartbeat_s: float


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The node does not fit this cluster; it logs why and stops."""

    code: str
    message: str


class SnapshotWanted(msgspec.Struct, frozen=True, tag="snapshot_wanted"):
    """A gap or a restart: send everything again. ``register`` asks for a new registration first."""

    register: bool = False


class DriftCheck(msgspec.Struct, frozen=True):
    """Asks a node to compare a request with a private run of it, when it has nothing else to do: the first ``tokens`` tokens.

    ``sources`` are the approximate reuses that the answer comes of, one for each segment, those included that earlier plans made
    and that this one builds on; ``inherited``: it builds on more than can be named.
    """

    tokens: int
    sources: tuple[DriftSource, ...]
    inherited: bool = False


class Execute(msgspec.Struct, frozen=True, tag="execute"):
    """Run a request. ``root`` is the root hash of its blocks; ``source_addresses`` maps node names of the plan to addresses.

    ``check``: the request was chosen to be checked for drift; none: it was not. Without ``engine_cache`` nothing may be reused, not
    even what a prefix cache of the node's engine has.
    """

    request_id: str
    model: str
    token_ids: tuple[int, ...]
    root: bytes
    plan: ReusePlan
    sampling: Sampling
    publish: bool
    deadline_s: float
    source_addresses: dict[str, str]
    hash_ms: float = 0.0
    route_ms: float = 0.0
    check: DriftCheck | None = None
    engine_cache: bool = True


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a request or an order in whatever state it is; unknown ids are ignored."""

    request_id: str
    reason: str


class PrefillOrder(msgspec.Struct, frozen=True, tag="prefill_order"):
    """Compute and keep the KV of all full blocks of ``token_ids`` and E at the node's transition layers."""

    order_id: str
    model: str
    token_ids: tuple[int, ...]
    root: bytes
    deadline_s: float
    background: bool = False


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    """The plan for an ``ask_plan``, with the server that asked as its receiver; ``root`` and ``source_addresses`` as in ``execute``."""

    question_id: str
    root: bytes
    plan: ReusePlan
    source_addresses: dict[str, str]


class PlanRefused(msgspec.Struct, frozen=True, tag="plan_refused"):
    """There is no plan: the server computes the prompt itself and leaves nothing of it to others."""

    question_id: str
    code: str
    message: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Finish what runs, take nothing new."""


NodeToRouter = (
    Register | Holdings | Heartbeat | Generated | Done | Failed | OrderDone | DriftSample | Leave | AskPlan | PlanDone
)
RouterToNode = Registered | Refused | SnapshotWanted | Execute | Abort | PrefillOrder | Drain | Planned | PlanRefused
