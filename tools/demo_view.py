"""The demo on the screen: each request as it ends, and the one table at the end. Pure."""

from __future__ import annotations

import statistics
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvkin.kv.plan import PlanKind
from kvkin.tools.demo_workload import Record
from kvkin.tools.report_view import KIND_STYLES, bytes_text, headline, phases_text, segments_table


def record_view(number: int, record: Record) -> RenderableType:
    """One request: what was asked, what was reused, where the time went, and the private run beside it."""
    step, answer, private = record.step, record.answer, record.private
    parts: list[RenderableType] = [
        headline(answer),
        segments_table(answer.report),
        Text(phases_text(answer.timings)),
        Text(
            f"private run on the same node: first token {private.timings.ttft_ms:,.1f} ms, {record.ratio:.1f} times that"
        ),
        Text(f"“{' '.join(answer.text.split())}”", style="italic"),
    ]
    parts += [Text(f"NOT AS EXPECTED: {problem}", style="bold red") for problem in record.problems]
    title = Text(f"{number}. {step.title}", style="bold").append(
        f" ({step.model}, expects {step.expect})", style="not bold dim"
    )
    return Group(Text(), title, Padding(Group(*parts), (0, 0, 0, 3)))


def table(records: list[Record]) -> Table:
    prefix = _shared_words({record.step.model for record in records})
    shown = Table(title="\nWhat each request did", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in ("request", f"{prefix}…" if prefix else "model", "plan", "quality", "source"):
        shown.add_column(column, no_wrap=True)
    for column in ("context", "reused", "layers", "pulled", "first token", "privately", "ratio"):
        shown.add_column(column, justify="right", no_wrap=True)
    shown.add_column("reference", no_wrap=True)
    for record in records:
        report = record.answer.report
        shown.add_row(
            record.step.name,
            record.step.model.removeprefix(prefix),
            Text(report.kind.value, style=KIND_STYLES[report.kind]),
            report.quality.value,
            ", ".join(report.sources),
            f"{record.context_tokens:,}",
            f"{report.tokens_reused:,}",
            str(report.layers_recomputed) if report.sources else "",
            bytes_text(report.bytes_pulled) if report.bytes_pulled else "",
            f"{record.answer.timings.ttft_ms:,.0f} ms",
            f"{record.private.timings.ttft_ms:,.0f} ms",
            f"{record.ratio:.1f}x",
            _verdict(record.same_as_reference),
        )
    return shown


def summary(records: list[Record], peak_bytes: int, times: dict[str, float], out: Path) -> RenderableType:
    """Ratios by plan, then what the demo itself took."""
    lines = []
    for kind in PlanKind:
        ratios = [record.ratio for record in records if record.answer.report.kind is kind]
        if ratios and kind is not PlanKind.PRIVATE:
            lines.append(f"{kind}: first token {statistics.median(ratios):.1f} times earlier than privately (median)")
    same = sum(record.same_as_reference is True for record in records)
    lines.append(f"{same} of {len(records)} answers have the very tokens of plain transformers")
    lines.append(
        f"cluster up in {times['start_s']:.1f} s, workload {times['workload_s']:.1f} s, all {times['total_s']:.1f} s; "
        f"peak memory {peak_bytes / 2**30:.1f} GiB in all; report: {out}"
    )
    return Text("\n".join(["", *lines]))


def _shared_words(names: set[str]) -> str:
    """What all names begin with, up to a dash: the members of a family are told apart by the rest."""
    shared = ""
    if len(names) > 1:
        for words in zip(*(name.split("-")[:-1] for name in sorted(names)), strict=False):
            if len(set(words)) > 1:
                break
            shared += f"{words[0]}-"
    return shared


def _verdict(same: bool | None) -> Text:
    if same is None:
        return Text("not compared")
    return Text("same tokens") if same else Text("other tokens", style="bold red")
