"""The cost model (docs/design.md section 5): what a plan costs in time to first token and in node-seconds.

Pure arithmetic over measured rates. The policy compares plans with it, the simulator replays traces on it, and nodes measure
their rate in the same unit (:func:`measured_work`). Seconds, bytes and layer-tokens (one token through one layer).

Recompute and pulls overlap: the recompute starts when the hidden states are there, the suffix walks up the layers and waits only
for those that have not arrived, so its last layer is all that must follow the last byte. A live source adds one bound: nothing
of its last chunk can be pulled or recomputed before that chunk is computed over there.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvkin.kv.layout import KVLayout
from kvkin.kv.plan import LayerGroup, ReusePlan, Segment


class NodeRates(msgspec.Struct, frozen=True):
    """Measured speed and load of a node (0: not measured yet, the defaults of :class:`CostSettings` apply).

    ``queued_tokens`` are prompt tokens that wait or run before a new request; ``leases`` are streams that pull from this node.
    Both are decaying signals, so they may be fractions.
    """

    prefill_layer_tokens_per_s: float = 0.0
    pull_bytes_per_s: float = 0.0
    queued_tokens: float = 0.0
    leases: float = 0.0


class CostSettings(msgspec.Struct, frozen=True):
    """Constants of the cost model.

    ``context_half_tokens``: context length at which attention costs as much as the rest of a layer. ``stream_overhead_s``:
    opening one remote layer stream. ``chunk_tokens``: chunk of a live prefill.
    """

    default_layer_tokens_per_s: float = 10_000.0
    default_pull_bytes_per_s: float = 1e9
    context_half_tokens: float = 4096.0
    stream_overhead_s: float = 0.004
    chunk_tokens: int = 256

    def layer_tokens_per_s(self, rates: NodeRates) -> float:
        return rates.prefill_layer_tokens_per_s or self.default_layer_tokens_per_s

    def queue_s(self, rates: NodeRates, num_layers: int) -> float:
        """Seconds until a node begins with something new."""
        return rates.queued_tokens * num_layers / self.layer_tokens_per_s(rates)

    def bytes_per_s(self, receiver: NodeRates, source: NodeRates) -> float:
        """What one more stream from ``source`` gets: the streams that pull from it share its link."""
        return (receiver.pull_bytes_per_s or self.default_pull_bytes_per_s) / (1.0 + source.leases)


class Work(msgspec.Struct, frozen=True):
    """What a plan makes its receiver and the wire do, summed over its segments.

    ``recompute`` and ``suffix`` are layer-tokens (the suffix is everything that is computed without reuse); ``pull_s`` and
    ``e_s`` are seconds on the wire for everything and for the hidden states alone. A live source is complete after ``ready_s``
    (counted from now); ``tail_recompute`` layer-tokens and ``tail_pull_s`` belong to its last chunk. ``order_s`` are
    node-seconds of a prefill that is ordered for this plan.
    """

    recompute: float = 0.0
    suffix: float = 0.0
    pull_s: float = 0.0
    e_s: float = 0.0
    ready_s: float = 0.0
    tail_recompute: float = 0.0
    tail_pull_s: float = 0.0
    order_s: float = 0.0


class Estimate(msgspec.Struct, frozen=True):
    """Estimated seconds of a plan by phase. Phases overlap: ``ttft_s`` is not their sum.

    ``node_s`` counts compute on all nodes, orders included; ``saving_s`` what later requests are expected to save.
    """

    queue_s: float
    pull_s: float
    recompute_s: float
    suffix_s: float
    ttft_s: float
    node_s: float
    saving_s: float = 0.0

    def objective_s(self, beta: float) -> float:
        """TTFT + beta x node-seconds - expected saving."""
        return self.ttft_s + beta * self.node_s - self.saving_s


NO_WORK = Work()


def prefill_work(num_tokens: int, first_position: int, num_layers: int, settings: CostSettings) -> float:
    """Layer-tokens of a prefill, weighted by how far each token attends: a token at ``context_half_tokens`` counts twice."""
    return num_tokens * num_layers * (1.0 + (first_position + 0.5 * num_tokens) / settings.context_half_tokens)


def measured_work(layer_tokens: int, positions: int, context_half_tokens: float) -> float:
    """Work that was done, in the unit of :func:`prefill_work`: ``layer_tokens`` tokens through a layer, ``positions`` the sum of
    theirs. Nodes divide it by the seconds that it took, so that their rate is of the unit that the cost model counts in."""
    return layer_tokens + positions / context_half_tokens


def with_reuse(
    work: Work,
    num_tokens: int,
    first_position: int,
    recomputed_layers: int,
    kv_bytes: float,
    e_bytes: float,
    bytes_per_s: float,
    ready_s: float,
    settings: CostSettings,
) -> Work:
    """``work`` and a reused segment of ``num_tokens``. Own blocks have no bytes; a stored source is ready after 0 seconds."""
    recompute = prefill_work(num_tokens, first_position, recomputed_layers, settings)
    pull_s = e_s = 0.0
    if kv_bytes or e_bytes:
        pull_s = (kv_bytes + e_bytes) / bytes_per_s + settings.stream_overhead_s
        if e_bytes:
            e_s = e_bytes / bytes_per_s + settings.stream_overhead_s
    tail = min(1.0, settings.chunk_tokens / num_tokens) if ready_s > 0.0 else 0.0
    return Work(
        work.recompute + recompute,
        work.suffix,
        work.pull_s + pull_s,
        work.e_s + e_s,
        max(work.ready_s, ready_s),
        work.tail_recompute + tail * recompute,
        work.tail_pull_s + tail * pull_s,
        work.order_s,
    )


def with_suffix(work: Work, num_tokens: int, first_position: int, num_layers: int, settings: CostSettings) -> Work:
    """``work`` and ``num_tokens`` that are computed in all layers."""
    suffix = prefill_work(num_tokens, first_position, num_layers, settings)
    return msgspec.structs.replace(work, suffix=work.suffix + suffix)


def first_token_s(work: Work, suffix: float, rate: float, queue_s: float, num_layers: int) -> float:
    """Seconds until the first token of ``work`` and ``suffix`` more layer-tokens at ``rate`` layer-tokens a second."""
    suffix_s = (work.suffix + suffix) / rate
    computed_at, pulled_at = queue_s + work.e_s + work.recompute / rate, queue_s + work.pull_s
    if work.ready_s > 0.0:
        computed_at = max(computed_at, work.ready_s + work.tail_recompute / rate)
        pulled_at = max(pulled_at, work.ready_s + work.tail_pull_s)
    computed_at, pulled_at = computed_at + suffix_s, pulled_at + suffix_s / num_layers
    return max(pulled_at, computed_at)


def estimate(work: Work, rates: NodeRates, num_layers: int, settings: CostSettings, saving_s: float = 0.0) -> Estimate:
    """Seconds on a receiver of ``rates``."""
    rate = settings.layer_tokens_per_s(rates)
    queue_s = settings.queue_s(rates, num_layers)
    return Estimate(
        queue_s=queue_s,
        pull_s=work.pull_s,
        recompute_s=work.recompute / rate,
        suffix_s=work.suffix / rate,
        ttft_s=first_token_s(work, 0.0, rate, queue_s, num_layers),
        node_s=(work.recompute + work.suffix) / rate + work.order_s,
        saving_s=saving_s,
    )


def plan_work(
    plan: ReusePlan,
    node: str,
    rates: Mapping[str, NodeRates],
    layout: KVLayout,
    settings: CostSettings,
    ready_s: Mapping[str, float] = {},
) -> Work:
    """Work of a whole plan on ``node``. ``ready_s`` says by order id when live sources are complete."""
    work = NO_WORK
    for segment in plan.segments:
        if not segment.sources:
            work = with_suffix(work, segment.num_tokens, segment.start, layout.num_layers, settings)
            continue
        kv_bytes, e_bytes, source = _wire_bytes(segment, node, layout)
        bytes_per_s = settings.bytes_per_s(rates.get(node, NodeRates()), rates.get(source, NodeRates()))
        orders = {holder.order_id for holder in (layer.holder for layer in segment.sources) if holder.order_id}
        work = with_reuse(
            work,
            segment.num_tokens,
            segment.start,
            _recomputed_layers(segment, layout.num_layers),
            kv_bytes,
            e_bytes,
            bytes_per_s,
            max((ready_s.get(order, 0.0) for order in orders), default=0.0),
            settings,
        )
    return work


def _wire_bytes(segment: Segment, node: str, layout: KVLayout) -> tuple[int, int, str]:
    """(bytes of KV, bytes of E, the node that most of it comes from) that ``node`` pulls from others for a segment."""
    kv_bytes, source = 0, node
    for layers in segment.sources:
        if layers.holder.node != node:
            kv_bytes += len(layers.layers) * segment.num_tokens * layout.kv_token_bytes
            source = layers.holder.node
    e_bytes = 0
    if segment.e_holder is not None and segment.e_holder.node != node:
        e_bytes = segment.num_tokens * layout.hidden_size * layout.dtype_bytes
        source = segment.e_holder.node if source == node else source
    return kv_bytes, e_bytes, source


def _recomputed_layers(segment: Segment, num_layers: int) -> int:
    """Layers that are recomputed for every token of a segment; chosen token rows count as the share that they are."""
    if segment.recompute is None or isinstance(segment.recompute, LayerGroup):
        return len(segment.recomputed_layers(num_layers))
    return round(num_layers * len(segment.recompute.rows) / segment.num_tokens)
