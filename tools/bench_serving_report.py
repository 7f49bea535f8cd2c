"""What a serving benchmark says in the end: one JSON object, a CSV line for every request, and tables. Pure but for ``write``.

``results.json`` and ``requests.csv`` are also written after every point, so that a long run that dies leaves what it had.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvkin.tools.bench_serving_stats import (
    RESAMPLES,
    Crossing,
    Objective,
    Ratio,
    Spread,
    crossing,
    curve_of,
    grouped,
    mean_phases,
    quantile,
    throughput_ratio,
    ttft_all_ms,
)
from kvkin.tools.bench_serving_sweep import PointResult
from kvkin.tools.load_records import Outcome
from kvkin.tools.report_view import PHASES

JSON_FILE, CSV_FILE = "results.json", "requests.csv"
DIGITS = 4


def report(
    settings: Mapping[str, Any],
    results: Sequence[PointResult],
    objective: Objective,
    seed: int,
    *,
    resamples: int = RESAMPLES,
) -> dict[str, Any]:
    """The object that ``--json`` prints: settings, points, summary. Without ``resamples`` there are no intervals, which take seconds."""
    return {
        "settings": dict(settings),
        "points": [point_json(result) for result in results],
        "summary": summary(results, objective, seed, resamples),
    }


def point_json(result: PointResult) -> dict[str, Any]:
    point = msgspec.to_builtins(result.point)
    figures = msgspec.to_builtins(result.figures)
    return _rounded({**point, **figures, "truncated": result.truncated, "router": result.router})


def summary(
    results: Sequence[PointResult], objective: Objective, seed: int, resamples: int = RESAMPLES
) -> dict[str, Any]:
    """By arm its curve over the rate, all repeats together, and with a TTFT objective the throughput at equal p95 TTFT.

    Only rates and repeats that every arm completed are compared.
    """
    arms = list(dict.fromkeys(result.point.arm for result in results))
    ttft = {arm: ttft_by_repeat(results, arm) for arm in arms}
    found: dict[str, Any] = {"arms": {arm: {"curve": _curve(results, arm)} for arm in arms}}
    if objective.ttft_ms is None:
        return _rounded(found)
    crossings = {}
    for arm in arms:
        if ttft[arm]:
            curve = curve_of(ttft[arm], range(len(next(iter(ttft[arm].values())))))
            crossings[arm] = crossing(curve, objective.ttft_ms)
            found["arms"][arm]["throughput_at_p95_ttft"] = msgspec.to_builtins(crossings[arm])
    ratios = {
        f"{over}/{under}": throughput_ratio(ttft[over], ttft[under], objective.ttft_ms, seed, resamples)
        for place, over in enumerate(arms)
        for under in arms[place + 1 :]
        if over in crossings and under in crossings
    }
    found["throughput_ratios_at_p95_ttft"] = {name: msgspec.to_builtins(ratio) for name, ratio in ratios.items()}
    found["p95_ttft_objective_ms"] = objective.ttft_ms
    return _rounded(found)


def ttft_by_repeat(results: Sequence[PointResult], arm: str) -> dict[float, list[list[float]]]:
    """Rate -> TTFTs (ms) of each repeat, of the rates and repeats that all arms completed: every rate has the same repeats."""
    by_point: dict[tuple[float, int], set[str]] = {}
    for result in results:
        by_point.setdefault((result.point.rate, result.point.repeat), set()).add(result.point.arm)
    arms = {result.point.arm for result in results}
    complete = {key for key, found in by_point.items() if found == arms}
    repeats = sorted({repeat for _, repeat in complete})
    # an interrupted run may have a repeat at some rates only: it counts where it is there at all rates of the first one
    rates = sorted({rate for rate, repeat in complete if repeat == 0})
    whole = [repeat for repeat in repeats if all((rate, repeat) in complete for rate in rates)]
    records = {(one.point.rate, one.point.repeat): one.records for one in results if one.point.arm == arm}
    return {
        rate: [ttft_all_ms(one for one in records[rate, repeat] if not one.warm_up) for repeat in whole]
        for rate in rates
    }


def _curve(results: Sequence[PointResult], arm: str) -> list[dict[str, Any]]:
    rows = []
    mine = [result for result in results if result.point.arm == arm]
    for rate in sorted({result.point.rate for result in mine}):
        at_rate = [result for result in mine if result.point.rate == rate]
        measured = [one for result in at_rate for one in result.records if not one.warm_up]
        finished = [one for one in measured if one.outcome is Outcome.FINISHED]
        ttft = [one.ttft_ms for one in finished if one.ttft_ms is not None]
        everyone = ttft_all_ms(measured)
        span_s = math.fsum(result.figures.span_s for result in at_rate)
        prompt_tokens = sum(result.figures.prompt_tokens for result in at_rate)
        rows.append(
            {
                "rate": rate,
                "repeats": len(at_rate),
                "requests": len(measured),
                "finished": len(finished),
                "ttft_mean_ms": math.fsum(ttft) / len(ttft) if ttft else math.nan,
                "ttft_p50_ms": quantile(ttft, 0.5),
                "ttft_p95_ms": quantile(ttft, 0.95),
                "ttft_p95_all_ms": quantile(everyone, 0.95),
                "achieved_per_s": len(finished) / span_s if span_s else 0.0,
                "goodput_per_s": sum(result.figures.objective_met for result in at_rate) / span_s if span_s else 0.0,
                "reused_share": sum(result.figures.tokens_reused for result in at_rate) / max(1, prompt_tokens),
                "bytes_pulled": sum(result.figures.bytes_pulled for result in at_rate),
                "phases_ms": mean_phases(finished),
            }
        )
    return rows


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON values: rounded, and null for what is endless or cannot be said."""
    return {key: _json(value) for key, value in values.items()}


def _json(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS) if math.isfinite(value) else None
    if isinstance(value, dict):
        return _rounded(value)
    return [_json(item) for item in value] if isinstance(value, list | tuple) else value


# --- files ---------------------------------------------------------------------------------------------------------------

COLUMNS = (
    "arm", "rate", "repeat", "number", "session", "turn", "model", "node", "outcome", "code", "warm_up", "kind", "quality", "loss",
    "fallback", "prompt_tokens", "asked_tokens", "tokens", "tokens_reused", "bytes_pulled", "intended_s", "sent_s", "late_ms",
    "first_token_s", "ended_s", "ttft_ms", "e2e_ms", "mean_gap_ms", "gaps_ms",
    *(f"{phase}_ms" for phase in PHASES), "other_ms", "message",
)  # fmt: skip


def requests_csv(results: Sequence[PointResult]) -> str:
    """One line for every planned request of every point; ``gaps_ms`` are separated by spaces."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for result in results:
        for record in result.records:
            row = {
                **msgspec.structs.asdict(result.point),
                **msgspec.structs.asdict(record),
                "outcome": record.outcome.value,
                "late_ms": record.late_s * 1e3,
                "ttft_ms": record.ttft_ms,
                "e2e_ms": record.e2e_ms,
                "mean_gap_ms": record.mean_gap_ms,
                "other_ms": record.other_ms if record.phases_ms else None,
                "gaps_ms": " ".join(f"{gap * 1e3:.3f}" for gap in record.gaps_s),
                **{f"{phase}_ms": record.phases_ms.get(phase) for phase in PHASES},
            }
            writer.writerow([_cell(row[column]) for column in COLUMNS])
    return text.getvalue()


def _cell(value: object) -> object:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else value


def write(folder: Path, whole: Mapping[str, Any], results: Sequence[PointResult]) -> None:
    """``results.json`` and ``requests.csv``, each replaced as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in ((JSON_FILE, json.dumps(whole, indent=1) + "\n"), (CSV_FILE, requests_csv(results))):
        temporary = folder / f"{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(folder / name)


# --- for people ----------------------------------------------------------------------------------------------------------


def view(results: Sequence[PointResult], whole: Mapping[str, Any]) -> RenderableType:
    """All points, what they say together, and what a reader must know besides."""
    if not results:
        return Text("no point was completed")
    lines = [*_summary_lines(whole["summary"]), *_trouble(results)]
    return Group(_points_table(results), Text(), _groups_table(results), Text(), *lines)


def _points_table(results: Sequence[PointResult]) -> Table:
    table = _table("milliseconds from the intended arrival (p50 p95 p99); warm-up excluded", ("rate", "rep", "arm"))
    for column in ("done", "TTFT", "TBT", "end to end", "good/s", "reused"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in sorted(results, key=lambda one: (one.point.rate, one.point.repeat, one.point.place)):
        figures, counts = result.figures, result.figures.counts
        table.add_row(
            f"{result.point.rate:.4g}",
            str(result.point.repeat + 1),
            result.point.arm,
            f"{counts.finished}/{counts.planned}",
            _percentiles(figures.ttft_ms),
            _percentiles(figures.tbt_ms),
            _percentiles(figures.e2e_ms),
            f"{figures.goodput_per_s:.3g}",
            f"{figures.tokens_reused / max(1, figures.prompt_tokens):.0%}",
        )
    return table


def _groups_table(results: Sequence[PointResult]) -> Table:
    """By arm, over all its points: the plan kinds and the models."""
    table = _table("by plan kind and by model, all rates together", ("arm", "of"))
    for column in ("done", "TTFT", "TBT", "end to end", "pulled MB"):
        table.add_column(column, justify="right", no_wrap=True)
    for arm in dict.fromkeys(result.point.arm for result in results):
        records = [record for result in results if result.point.arm == arm for record in result.records]
        finished = [one for one in records if one.outcome is Outcome.FINISHED and not one.warm_up]
        for groups in (grouped(finished, lambda one: one.kind), grouped(finished, lambda one: one.model)):
            for name, figures in groups.items():
                table.add_row(
                    arm,
                    name,
                    str(figures.finished),
                    _percentiles(figures.ttft_ms),
                    _percentiles(figures.tbt_ms),
                    _percentiles(figures.e2e_ms),
                    f"{figures.bytes_pulled / 1e6:,.1f}",
                )
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(
        title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold"
    )
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _percentiles(values: Spread | None) -> str:
    return "-" if values is None else f"{values.p50:.0f} {values.p95:.0f} {values.p99:.0f}"


def _summary_lines(whole: Mapping[str, Any]) -> list[Text]:
    lines = []
    for arm, found in whole["arms"].items():
        if "throughput_at_p95_ttft" in found:
            at = msgspec.convert(found["throughput_at_p95_ttft"], Crossing)
            limit = f"{whole['p95_ttft_objective_ms']:,.0f} ms"
            words = {"at": "holds up to", "above": "holds beyond", "below": "is missed already at"}[at.bound]
            lines.append(Text(f"{arm}: p95 TTFT of {limit} {words} {at.rate:.4g} requests/s"))
    for name, found in whole.get("throughput_ratios_at_p95_ttft", {}).items():
        ratio = msgspec.convert(found, Ratio)
        lines.append(Text(f"throughput {name} at that p95: {ratio_text(ratio)}"))
    return lines


def ratio_text(ratio: Ratio) -> str:
    if ratio.value is None:
        return "unknown, sweep other rates"
    words = "" if ratio.bound == "exact" else f"{ratio.bound} "
    interval = "" if ratio.low is None else f" (95 % {ratio.low:.2f} to {ratio.high:.2f})"
    return f"{words}{ratio.value:.2f}{interval}"


def _trouble(results: Sequence[PointResult]) -> list[Text]:
    """What a reader of the figures must know: requests that were lost, a generator that was late, prompts that were cut."""
    lines = []
    for result in results:
        point, figures = result.point, result.figures
        where = f"{point.arm} at {point.rate:.4g}/s, repeat {point.repeat + 1}"
        for counts, what in ((figures.counts, ""), (figures.warm_up_counts, " in the warm-up")):
            kinds = {f"failed with {code}": number for code, number in counts.failed.items()}
            kinds |= {name.replace("_", " "): getattr(counts, name) for name in _LOST}
            lost = ", ".join(f"{number} {name}" for name, number in kinds.items() if number)
            if lost:
                lines.append(Text(f"{where}{what}: {lost}", style="red"))
        if figures.late.count:
            lines.append(
                Text(
                    f"{where}: the generator sent {figures.late.count} requests more than {figures.late.bound_ms:g} ms late, "
                    f"at most {figures.late.max_ms:,.0f} ms",
                    style="yellow",
                )
            )
        if figures.fallbacks:
            lines.append(
                Text(f"{where}: {figures.fallbacks} plans were given up for a private prefill", style="yellow")
            )
        if result.truncated:
            lines.append(Text(f"{where}: {result.truncated} prompts were cut to what the models have room for"))
    return lines


_LOST = ("timed_out", "cut_off", "not_sent", "abandoned", "never_due")
