"""Client messages: what a client and the router say to each other (docs/protocol.md describes the same for other languages).

One ZeroMQ message is one frame: the MessagePack map of one struct, ``type`` names it. New fields go to the end with a default,
so that older peers still read newer messages. Sizes are limited by ``codec.py`` before anything is decoded.
"""

from __future__ import annotations

import enum

import msgspec

from kvkin.kv.generation import Sampling as Sampling  # noqa: PLC0414 - re-exported for clients
from kvkin.kv.generation import TokenLogprob as TokenLogprob  # noqa: PLC0414 - re-exported for clients
from kvkin.kv.plan import PlanKind
from kvkin.kv.provenance import Quality

PROTOCOL_VERSION = 1


class Reuse(enum.StrEnum):
    """What a request allows: exact plans only, profiled ones within ``max_loss``, anything, or nothing at all; ``own``: what any
    engine's prefix cache does, the exact blocks of the same model on the node that answers."""

    EXACT = "exact"
    BOUNDED = "bounded"
    ANY = "any"
    OFF = "off"
    OWN = "own"


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str


# --- client to router ---------------------------------------------------------------------------------------------------


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """Ask for an answer. Exactly one of ``prompt``, ``token_ids``, ``messages`` is given.

    ``id`` is the client's own, unique among its running requests. ``publish`` off leaves nothing behind that later
    requests could hit. ``share_hint`` is how many later requests are expected to start with this prompt (negative: unknown).
    ``ttft_slo_s`` asks for the plan of the least loss whose first token is expected that soon (none: the cluster's default).
    """

    id: str
    model: str
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[ChatMessage, ...] | None = None
    sampling: Sampling = Sampling()
    stream: bool = True
    reuse: Reuse = Reuse.BOUNDED
    max_loss: float = 0.05
    publish: bool = True
    share_hint: float = -1.0
    deadline_s: float | None = None
    ttft_slo_s: float | None = None


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    id: str


class ListModels(msgspec.Struct, frozen=True, tag="models"):
    id: str


class AskStatus(msgspec.Struct, frozen=True, tag="status"):
    id: str


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Keepalive of a client that waits. For every id in ``running`` that the router does not know (it was restarted, or ended
    that request) it sends an ``error``; then, always, a ``pong``. A client that pinged once and then falls silent is gone."""

    id: str
    running: tuple[str, ...] = ()


# --- router to client ---------------------------------------------------------------------------------------------------


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The request runs under the server's ``request_id`` (for logs). Repeated now and then while a request waits: a sign of life."""

    id: str
    request_id: str
    prompt_tokens: int


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Answer to ``ping``; another ``incarnation`` than before means that the router was restarted."""

    id: str
    router: str
    incarnation: str


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """Newly generated tokens; ``index`` is the position of the first in the answer. ``text`` may lag behind (UTF-8, stop strings)."""

    id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class Usage(msgspec.Struct, frozen=True):
    """True counts: ``cached_tokens`` are prompt tokens whose KV was reused in whole or in part."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Timings(msgspec.Struct, frozen=True):
    """Milliseconds. The phases overlap: ``pull_ms`` runs from the first pull to the last arrival, ``recompute_ms`` and
    ``suffix_ms`` are compute time, ``wait_ms`` is when the engine had nothing to do for this request but wait for KV."""

    hash_ms: float = 0.0
    route_ms: float = 0.0
    queue_ms: float = 0.0
    pull_ms: float = 0.0
    wait_ms: float = 0.0
    recompute_ms: float = 0.0
    suffix_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0


class SegmentReport(msgspec.Struct, frozen=True):
    """One segment as it was executed, counted where bytes landed and layers ran."""

    start: int
    stop: int
    kind: PlanKind
    sources: tuple[str, ...] = ()
    e_layer: int | None = None
    group: tuple[int, int] | None = None
    tokens_reused: int = 0
    layers_recomputed: int = 0
    bytes_pulled: int = 0


class Alternative(msgspec.Struct, frozen=True):
    """A plan that the router weighed: ``ttft_s`` is its estimated time to first token, ``loss`` nil where it was never profiled.

    ``group`` are the layers that the longest approximately reused span recomputes (nil: none is, or there is no such span).
    """

    node: str
    kind: PlanKind
    group: tuple[int, int] | None
    loss: float | None
    ttft_s: float
    sources: tuple[str, ...]
    chosen: bool = False


class DecisionInputs(msgspec.Struct, frozen=True):
    """What the router went by when it chose the plan, as it was then.

    ``slo_s`` is the target for the first token (nil: none), ``ttft_s`` the chosen plan's estimate and ``queue_s`` the wait in it.
    ``pull_bytes_per_s`` from the plan's first other node (the best alternative's if it has none, 0: nothing to pull from
    anybody), ``prefill_layer_tokens_per_s`` of the chosen node: measured, or the defaults until they are.
    """

    max_loss: float
    slo_s: float | None
    ttft_s: float
    queue_s: float
    pull_bytes_per_s: float
    prefill_layer_tokens_per_s: float
    considered: tuple[Alternative, ...] = ()


class ReuseReport(msgspec.Struct, frozen=True):
    """What reuse did for a request. ``fallback`` says why the plan was given up (empty: it was not). ``inputs`` are added by the
    router.

    The engine counts each token of the prompt once, by where its KV came from: ``tokens_cached`` from a prefix cache of its own,
    ``tokens_loaded`` from the plan's sources (in all layers or some), ``tokens_computed`` through all layers. Together they are the
    prompt; all 0: an older node.
    """

    kind: PlanKind
    quality: Quality
    loss: float | None
    segments: tuple[SegmentReport, ...]
    sources: tuple[str, ...]
    tokens_reused: int
    layers_recomputed: int
    bytes_pulled: int
    reason: str
    fallback: str = ""
    planned: PlanKind = PlanKind.PRIVATE
    inputs: DecisionInputs | None = None
    tokens_cached: int = 0
    tokens_loaded: int = 0
    tokens_computed: int = 0


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The one good end of a request. ``finish_reason``: stop, length. ``token_ids`` are all generated ones."""

    id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timings: Timings
    report: ReuseReport
    logprobs: tuple[TokenLogprob, ...] = ()
    node: str = ""


class Error(msgspec.Struct, frozen=True, tag="error"):
    """The bad end: ``code`` from kv/errors.py (``cancelled`` included). ``id`` is empty if the message had none that was readable."""

    id: str
    code: str
    message: str
    retryable: bool = False


class ModelEntry(msgspec.Struct, frozen=True):
    name: str
    family: str
    max_context_tokens: int
    nodes: tuple[str, ...]


class Models(msgspec.Struct, frozen=True, tag="model_list"):
    id: str
    models: tuple[ModelEntry, ...]


class NodeLoad(msgspec.Struct, frozen=True):
    """A node's measured state, sent with each heartbeat. Rates are moving averages (0: not measured yet).

    ``pulled_bytes`` is what completed pulls of KV and E have brought since the node started, counted by the data plane.
    ``checks_*`` count checks for drift, since the node started: those that wait, whether one runs now (1), done, and given up."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    kv_slots_used: int = 0
    kv_slots_total: int = 0
    e_slots_used: int = 0
    e_slots_total: int = 0
    leases: int = 0
    quarantined_bytes: int = 0
    prefill_layer_tokens_per_s: float = 0.0
    pull_bytes_per_s: float = 0.0
    fallbacks: int = 0
    finished: int = 0
    failed: int = 0
    pulled_bytes: int = 0
    checks_waiting: int = 0
    checks_running: int = 0
    checks_done: int = 0
    checks_dropped: int = 0


class NodeStatus(msgspec.Struct, frozen=True):
    name: str
    role: str
    state: str
    incarnation: str
    models: tuple[str, ...]
    load: NodeLoad
    holdings: int
    last_seen_s: float


class DriftStatus(msgspec.Struct, frozen=True):
    """What checks against private runs showed of one pair of models. Running means, the older the less they count; nil before
    the first sample.

    ``state``: ``watching`` (too few samples, or no bound to keep), ``ok``, or ``off``: its bound was left, plans of the pair
    are exact or private. ``since_s`` is how long that has been so. In ``inherited`` of the ``samples`` there was KV of other pairs
    as well: they count for nothing else. ``first_token``: share of checks in which the first token was the private one;
    ``agreement``: share of the first tokens up to the first difference; ``divergence`` of the first token's distribution, in nats.
    ``min_*`` and ``max_divergence`` are the bound (nil: none).
    """

    sender: str
    receiver: str
    state: str
    since_s: float
    samples: int
    inherited: int
    first_token: float | None
    agreement: float | None
    divergence: float | None
    min_first_token: float | None
    min_agreement: float | None
    max_divergence: float | None


class PairGroup(msgspec.Struct, frozen=True):
    """Layers [start, stop) that a pair may recompute (nil: none, full reuse), and the loss of that (nil: unprofiled)."""

    group: tuple[int, int] | None
    loss: float | None


class PairStatus(msgspec.Struct, frozen=True):
    """A pair of models for which approximate reuse is configured. ``state``: ``profiled``, ``unprofiled`` (``reuse: any`` only), or
    ``refused``: it has a profile that does not hold, ``why`` says for what reason (else: the profile's file)."""

    sender: str
    receiver: str
    state: str
    groups: tuple[PairGroup, ...]
    why: str = ""


class StatusReply(msgspec.Struct, frozen=True, tag="status_reply"):
    id: str
    router: str
    uptime_s: float
    running: int
    nodes: tuple[NodeStatus, ...]
    index_blocks: int
    counters: dict[str, int]
    drift: tuple[DriftStatus, ...] = ()
    pairs: tuple[PairStatus, ...] = ()


ClientRequest = Generate | Cancel | ListModels | AskStatus | Ping
ClientReply = Accepted | Pong | Tokens | Finished | Error | Models | StatusReply
