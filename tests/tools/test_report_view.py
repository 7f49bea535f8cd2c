"""The reuse report as people see it: what was reused, from where, and what the engine's own cache had of it."""

from __future__ import annotations

from kvkin.kv.plan import PlanKind
from kvkin.kv.provenance import Quality
from kvkin.tools.report_view import headline
from kvkin.transport.messages import Finished, ReuseReport, SegmentReport, Timings, Usage


def answer(*segments: SegmentReport, **report: int) -> Finished:
    reused = [segment for segment in segments if segment.sources]
    whole = ReuseReport(
        PlanKind.EXACT if reused else PlanKind.PRIVATE,
        Quality.EXACT,
        0.0,
        segments,
        tuple(name for segment in reused for name in segment.sources),
        sum(segment.tokens_reused for segment in reused),
        0,
        1_500_000 if reused else 0,
        "",
        **report,  # type: ignore[arg-type]
    )
    return Finished("1", "yes", (7,), "stop", Usage(1010, 1, 0), Timings(ttft_ms=120.4), whole, node="decode-0")


COMPUTED = SegmentReport(0, 1010, PlanKind.PRIVATE)
PULLED = SegmentReport(0, 960, PlanKind.EXACT, ("prefill-0",), tokens_reused=960)


def test_private() -> None:
    assert str(headline(answer(COMPUTED))) == (
        "private prefill of 1,010 prompt tokens on decode-0; first token after 120 ms"
    )
    cached = answer(COMPUTED, tokens_cached=960, tokens_computed=50)
    assert str(headline(cached)) == (
        "private prefill of 1,010 prompt tokens on decode-0, 960 tokens from its engine's own cache; "
        "first token after 120 ms"
    )


def test_reused() -> None:
    plain = (
        "exact reuse (exact) on decode-0: 960 of 1,010 prompt tokens from prefill-0, 0 layers recomputed, 1.5 MB pulled"
    )
    assert str(headline(answer(PULLED))) == f"{plain}; first token after 120 ms"
    cached = answer(PULLED, tokens_cached=640, tokens_loaded=320, tokens_computed=50)
    assert str(headline(cached)) == f"{plain}, 640 tokens from its engine's own cache; first token after 120 ms"
