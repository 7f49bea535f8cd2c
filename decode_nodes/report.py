"""What is said of a request at its end: the reuse report and the timings, counted where bytes landed and layers ran."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from kvkin.decode_nodes.sources import PlanSources
from kvkin.engines.api import Counters
from kvkin.kv.plan import LayerGroup, PlanKind, ReusePlan, Segment, provenances
from kvkin.transport.messages import ReuseReport, SegmentReport, Timings
from kvkin.transport.node_messages import Execute


def fallback_plan(plan: ReusePlan, node: str, reason: str) -> ReusePlan:
    """The private plan after a source failed; leading segments that this node holds itself exactly are kept."""
    kept: list[Segment] = []
    for segment in plan.segments:
        # another model's blocks may lie here as well, and be reused whole: that is approximate
        own = segment.kind is PlanKind.EXACT and segment.nodes == (node,)
        if not own or not all(source.holder.provenance.exact for source in segment.sources):
            break
        kept.append(segment)
    start = kept[-1].stop if kept else 0
    return ReusePlan((*kept, Segment(start, plan.num_tokens)), reason)


def reuse_report(
    plan: ReusePlan,
    execute: Execute,
    sources: Sequence[PlanSources],
    counters: Counters,
    lineage_id: bytes,
    fallback: str,
) -> ReuseReport:
    """Of the plan as executed; ``bytes_pulled`` includes what landed before a fallback."""
    current = sources[-1]
    segments = []
    for number, segment in enumerate(plan.segments):
        group = segment.recompute
        segments.append(
            SegmentReport(
                start=segment.start,
                stop=segment.stop,
                kind=segment.kind,
                sources=segment.nodes,
                e_layer=segment.e_layer,
                group=(group.start, group.stop) if isinstance(group, LayerGroup) else None,
                tokens_reused=segment.num_tokens if segment.sources else 0,
                layers_recomputed=len(counters.recomputed_layers.get(number, ())),
                bytes_pulled=current.bytes_pulled(number),
            )
        )
    final = provenances(plan, lineage_id)[-1]
    reused = [segment for segment in segments if segment.tokens_reused]
    return ReuseReport(
        kind=plan.kind,
        quality=final.quality,
        loss=final.loss if math.isfinite(final.loss) else None,
        segments=tuple(segments),
        sources=tuple(dict.fromkeys(name for segment in reused for name in segment.sources)),
        tokens_reused=sum(segment.tokens_reused for segment in segments),
        layers_recomputed=max((segment.layers_recomputed for segment in segments), default=0),
        bytes_pulled=sum(each.total_bytes for each in sources),
        reason=plan.reason,
        fallback=fallback,
        planned=execute.plan.kind,
        tokens_cached=counters.cached_tokens,
        tokens_loaded=counters.loaded_tokens,
        tokens_computed=counters.computed_tokens,
    )


def timings(
    received: float, started: float, execute: Execute, sources: Sequence[PlanSources], counters: Counters
) -> Timings:
    """Milliseconds from when this node received the request; the router adds its own phases."""
    before_ms = execute.hash_ms + execute.route_ms
    return Timings(
        hash_ms=execute.hash_ms,
        route_ms=execute.route_ms,
        queue_ms=(started - received) * 1e3,
        pull_ms=sum(each.pull_seconds for each in sources) * 1e3,
        wait_ms=counters.wait_s * 1e3,
        recompute_ms=counters.recompute_s * 1e3,
        suffix_ms=counters.suffix_s * 1e3,
        ttft_ms=(counters.first_token_at - received) * 1e3 + before_ms,
        total_ms=(time.monotonic() - received) * 1e3 + before_ms,
    )
