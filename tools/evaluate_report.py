"""What ``kvkin evaluate`` shows of its result: tables for the terminal, Markdown, and the figure of quality over latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from kvkin.tools.plots import COLOURS, new_figure, save_figure
from kvkin.tools.report_view import bytes_text

ARM_HEAD = (
    "arm",
    "score (95 %)",
    "minus full (95 %)",
    "kept (95 %)",
    "first token",
    "full / arm (95 %)",
    "moved",
    "compute",
)
EQUAL_HEAD = ("arm", "first token", "against", "its first token", "score minus its score (95 %)")
LABELS = {
    "full": "full prefill",
    "sender": "sender alone",
    "reuse": "full reuse",
    "blend": "CacheBlend",
    "group": "DroidSpeak",
}


def show(console: Console, result: Mapping[str, Any]) -> None:
    """The tables, for a terminal."""
    console.print(_table(title(result), ARM_HEAD, arm_rows(result)))
    if result["equal_latency"]:
        console.print(_table("at equal latency", EQUAL_HEAD, equal_rows(result)))


def markdown(result: Mapping[str, Any], figure: str | None) -> str:
    """The tables with all that is needed to read them; ``figure`` is a file beside it."""
    data, made, context = result["data"], result["made"], result["context_tokens"]
    lines = [
        f"# {result['receiver']} on the KV of {result['sender']}: {data['name']}",
        "",
        (
            f"{result['cases']} cases over {result['contexts']} contexts of split {data['split']} (BLAKE2b of the cases {data['cases_digest']}), contexts of "
            f"{context['min']} to {context['max']} tokens (median {context['p50']}), suffixes of "
            f"{result['suffix_tokens_mean']:g} on average; metric: {result['metric']['title']}. "
            f"{made['device']}, {made['dtype']}, {made['threads']} thread(s), {made['date']}."
        ),
        "",
        f"    {result['command']}",
        "",
        *_markdown_table(ARM_HEAD, arm_rows(result)),
        "",
        (
            "Score: mean. Kept: share of full prefill's mean. First token: median time of the compute of context and suffix, "
            "all KV local. Full / arm: median of each context's ratio. Moved: KV outside of the recompute and hidden states, mean "
            "of a context. Compute: layer-tokens of the context, as a share of full prefill's. Intervals: bootstrap over "
            "contexts, paired."
        ),
    ]
    if result["equal_latency"]:
        lines += ["", "## At equal latency", "", *_markdown_table(EQUAL_HEAD, equal_rows(result))]
    if figure:
        lines += ["", f"![quality over time to first token]({figure})"]
    return "\n".join(lines) + "\n"


def title(result: Mapping[str, Any]) -> str:
    return (
        f"{result['receiver']} on the KV of {result['sender']}: {result['metric']['title']}, {result['data']['name']}, "
        f"{result['cases']} cases, contexts of {result['context_tokens']['p50']} tokens (median)"
    )


def arm_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Cells under ``ARM_HEAD``, an arm a row."""
    return [
        [
            label(arm),
            _interval(arm["score"], "{:.3f}"),
            "" if arm["kind"] == "full" else _interval(arm["difference"], "{:+.3f}"),
            "" if arm["kind"] == "full" else _interval(arm["kept"], "{:.1%}"),
            f"{arm['ttft_ms']['estimate']:,.0f} ms",
            "" if arm["kind"] == "full" else _interval(arm["speedup"], "{:.2f}"),
            bytes_text(arm["bytes_mean"]),
            f"{arm['compute_share']:.0%}",
        ]
        for arm in result["arms"]
    ]


def equal_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Cells under ``EQUAL_HEAD``: of each group one row for the nearest ratio and one for the interpolated one."""
    rows = []
    for one in result["equal_latency"]:
        near, mixed, mine = one["nearest"], one["interpolated"], f"{one['ttft_ms']:,.0f} ms"
        name = label(one)
        against = f"CacheBlend {near['ratio']:g} (nearest)"
        rows.append([name, mine, against, f"{near['ttft_ms']:,.0f} ms", _interval(near["difference"], "{:+.3f}")])
        if mixed is not None:
            against = f"CacheBlend {mixed['ratio']:.3g} (interpolated)"
            rows.append(["", mine, against, mine, _interval(mixed["difference"], "{:+.3f}")])
    return rows


def label(arm: Mapping[str, Any]) -> str:
    """``DroidSpeak [10, 20)``, ``CacheBlend 0.16``."""
    words = LABELS[arm["kind"]]
    if arm["kind"] == "blend":
        return f"{words} {arm['ratio']:g}"
    return f"{words} [{arm['group'][0]}, {arm['group'][1]})" if arm["kind"] == "group" else words


def _interval(value: Mapping[str, Any], form: str) -> str:
    if value["estimate"] is None:
        return "-"
    if value["low"] is None:
        return form.format(value["estimate"])
    high = "..." if value["high"] is None else form.format(value["high"])
    return f"{form.format(value['estimate'])} ({form.format(value['low'])} to {high})"


def _table(name: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> RenderableType:
    table = Table(title=name, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in head:
        table.add_column(column, justify="left" if column in (head[0], "against") else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


# --- the figure ----------------------------------------------------------------------------------------------------------


def draw(result: Mapping[str, Any], stem: Path) -> list[Path]:
    """Mean score over median time to first token, an arm a point; writes ``stem``.svg and .png.

    Bars are the paired interval of the difference to full prefill: those of the scores themselves mostly show how unlike the cases
    are, which is the same in every arm.
    """
    figure, axes = new_figure()
    full = next(arm for arm in result["arms"] if arm["kind"] == "full")
    axes.axhline(full["score"]["estimate"], color=COLOURS["full"], linewidth=0.8, linestyle=":")
    for kind, words in LABELS.items():
        arms = sorted(
            (arm for arm in result["arms"] if arm["kind"] == kind), key=lambda arm: arm["ttft_ms"]["estimate"]
        )
        if not arms:
            continue
        x = [arm["ttft_ms"]["estimate"] for arm in arms]
        y = [arm["score"]["estimate"] for arm in arms]
        bars = [[_reach(arm["difference"], end) for arm in arms] for end in ("low", "high")]
        line = "-" if kind == "blend" else ""
        axes.errorbar(
            x, y, yerr=bars, fmt=f"o{line}", color=COLOURS[kind], capsize=2, elinewidth=0.8, markersize=5, label=words
        )
        if kind in ("blend", "group"):
            for number, (arm, at, score) in enumerate(zip(arms, x, y, strict=True)):
                # ratios above their points, groups below, neighbours at different heights
                above = 6 + 8 * (number % 2)
                axes.annotate(
                    label(arm).removeprefix(f"{words} "),
                    (at, score),
                    (4, above if kind == "blend" else -above - 5),
                    textcoords="offset points",
                    fontsize=7,
                    color=COLOURS[kind],
                )
    axes.set(xlabel="time to first token, ms (median, all KV local)", ylabel=result["metric"]["title"])
    axes.set_title(
        f"{result['receiver']} on the KV of {result['sender']}, n = {result['cases']}\n"
        "bars: 95 % interval of the difference to full prefill",
        fontsize=9,
    )
    axes.set_xlim(left=0)
    axes.margins(y=0.12)  # room for the labels
    figure.legend(loc="outside right upper", fontsize=8)
    return save_figure(figure, stem)


def _reach(difference: Mapping[str, Any], end: str) -> float:
    """How far a bar goes; 0 for a bound that is not known (one case)."""
    return 0.0 if difference[end] is None else abs(float(difference[end]) - float(difference["estimate"]))
