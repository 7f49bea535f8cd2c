"""The reuse report of one answer for people: what ``kvkin ask`` prints below it and the demo shows for each request.

Pure: from the ``finished`` message to rich renderables.
"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvkin.kv.plan import PlanKind
from kvkin.transport.messages import Finished, ReuseReport, SegmentReport, Timings

KIND_STYLES = {
    PlanKind.EXACT: "bold green",
    PlanKind.SHARED_PREFIX: "bold green",
    PlanKind.PARTIAL: "bold yellow",
    PlanKind.TOKEN_WISE: "bold yellow",
    PlanKind.PRIVATE: "bold",
}
# Phases in the order in which a request goes through them, as they are called in ``phases_ms`` and on the screen.
PHASES = ("hash", "route", "queue", "pull", "wait", "recompute", "suffix")


def answer_report(answer: Finished) -> RenderableType:
    """Everything: headline, segments, phases, and why this plan was chosen."""
    report = answer.report
    parts: list[RenderableType] = [headline(answer), segments_table(report), Text(phases_text(answer.timings))]
    if report.fallback:
        parts.append(Text(f"fell back from {report.planned}: {report.fallback}", style="bold red"))
    if report.reason:
        parts.append(Text(f"why: {report.reason}", style="dim"))
    return Group(*parts)


def headline(answer: Finished) -> Text:
    """``partial reuse (unprofiled): 944 of 1,010 prompt tokens from prefill-0, 10 layers recomputed, 31.2 MB pulled``"""
    report, usage = answer.report, answer.usage
    text = Text(f"{report.kind}", style=KIND_STYLES[report.kind])
    if report.kind is PlanKind.PRIVATE:
        prefill = f" prefill of {usage.prompt_tokens:,} prompt tokens on {answer.node}{_cached_text(report)}"
        text.append(prefill, style="not bold")
    else:
        # a context that the node holds itself is used where it lies
        sources = " and ".join(source if source != answer.node else f"{source} itself" for source in report.sources)
        text.append(
            f" reuse ({quality_text(report)}) on {answer.node}: {report.tokens_reused:,} of {usage.prompt_tokens:,} "
            f"prompt tokens from {sources}, {report.layers_recomputed} layers recomputed, "
            f"{bytes_text(report.bytes_pulled)} pulled{_cached_text(report)}",
            style="not bold",
        )
    return text.append(f"; first token after {answer.timings.ttft_ms:,.0f} ms", style="not bold")


def _cached_text(report: ReuseReport) -> str:
    """What a prefix cache of the engine's own had, whatever the plan was."""
    return f", {report.tokens_cached:,} tokens from its engine's own cache" if report.tokens_cached else ""


def segments_table(report: ReuseReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tokens", no_wrap=True)
    table.add_column("segment", no_wrap=True)
    table.add_column("from", no_wrap=True)
    table.add_column("recomputed", no_wrap=True)
    table.add_column("pulled", justify="right", no_wrap=True)
    for segment in report.segments:
        table.add_row(
            Text(f"[{segment.start}, {segment.stop})"),
            Text(segment_kind(segment), style=KIND_STYLES[segment.kind] if segment.sources else ""),
            ", ".join(segment.sources),
            Text(layers_text(segment)),
            bytes_text(segment.bytes_pulled) if segment.bytes_pulled else "",
        )
    return table


def segment_kind(segment: SegmentReport) -> str:
    return segment.kind.value if segment.sources else "computed"


def layers_text(segment: SegmentReport) -> str:
    """``layers [10, 20) from E`` for a recompute that begins with pulled hidden states."""
    if not segment.sources:
        return "all layers"
    if segment.group is None:
        return "nothing"
    start, stop = segment.group
    return f"layers [{start}, {stop})" + (f" from E {segment.e_layer}" if segment.e_layer is not None else "")


def phases_ms(timings: Timings) -> dict[str, float]:
    """Phase -> milliseconds. They overlap, so they do not add up to the time to first token."""
    return {phase: round(float(getattr(timings, f"{phase}_ms")), 3) for phase in PHASES}


def phases_text(timings: Timings) -> str:
    parts = [f"{phase} {value:,.1f}" for phase, value in phases_ms(timings).items()]
    return f"first token {timings.ttft_ms:,.1f} ms, of it (overlapping): {', '.join(parts)}"


def quality_text(report: ReuseReport) -> str:
    return report.quality.value if not report.loss else f"{report.quality.value}, loss {report.loss:.3f}"


def bytes_text(count: int) -> str:
    if count >= 1_000_000:
        return f"{count / 1e6:,.1f} MB"
    return f"{count / 1e3:,.1f} kB" if count else "0 B"
