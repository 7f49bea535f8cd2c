"""The cost model (DESIGN.md section 5): what a plan costs in time to first token and in node-seconds.

Pure arithmetic over measured rates; the policy compares plans with it, nodes use :func:`prefill_work` to measure their rate
in the same unit, the simulator replays traces on it. Seconds, bytes and layer-tokens (one token through one layer) throughout.
"""

from __future__ import annotations

import msgspec


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
