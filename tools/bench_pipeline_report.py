"""The tables of ``kvkin bench pipeline``: for the terminal, and for docs/evaluation.md (tools/docs_evaluation.py). Pure but for ``show``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Result = Mapping[str, Any]

SPEEDUP_HEAD = (
    "context",
    "link",
    "full prefill",
    "pipelined",
    "ideal",
    "speed-up (95 %)",
    "ideal speed-up",
    "without transfer",
    "pipelined / ideal (95 %)",
)
SWEEP_HEAD = (
    "context",
    "link",
    "naive",
    "full reuse",
    "pipelined",
    "full prefill",
    "naive / pipelined (95 %)",
    "policy",
    "estimate: partial, private",
    "choice / other (95 %)",
)


def head(result: Result) -> str:
    """What was measured, in two sentences."""
    settings, made = result["settings"], result["made"]
    start, stop = settings["group"]
    sweep = f", of {settings['sweep_repeats']} at the others" if settings["rates"] else ""
    return (
        f"`{settings['receiver']}` on the KV of `{settings['sender']}`, layers [{start}, {stop}) of {settings['num_layers']} recomputed, "
        f"{settings['suffix_tokens']} tokens behind the context; {made['device']}, {made['dtype']}, {made['threads']} thread(s). Medians of "
        f"{settings['repeats']} interleaved run(s) at the balanced rate, at which the transfer takes as long as the recompute{sweep}."
    )


def speedup_rows(result: Result) -> list[list[str]]:
    """One row a context, at the link rate at which the transfer takes as long as the recompute."""
    rows = []
    for context in result["contexts"]:
        balanced = next(rate for rate in context["rates"] if rate["balanced"])
        times = balanced["ttft_ms"]
        rows.append(
            [
                f"{context['context_tokens']:,}",
                _link(balanced),
                *(f"{times[schedule]:,.0f} ms" for schedule in ("private", "pipelined", "ideal")),
                ratio_text(context["private_over_pipelined"]),
                f"{context['private_over_ideal'][0]:.2f}",
                f"{context['private_over_compute'][0]:.2f}",
                ratio_text(context["pipelined_over_ideal"]),
            ]
        )
    return rows


def sweep_rows(result: Result) -> list[list[str]]:
    """One row a context and link, by rising rate."""
    rows = []
    for context in result["contexts"]:
        for rate in sorted(context["rates"], key=lambda one: float(one["gbit_per_s"])):
            times, policy = rate["ttft_ms"], rate["policy"]
            estimates = [policy["estimate_ms"][kind] for kind in ("partial", "private")]
            rows.append(
                [
                    f"{context['context_tokens']:,}",
                    _link(rate),
                    *(f"{times[name]:,.0f} ms" for name in ("naive", "reuse_only", "pipelined", "private")),
                    ratio_text(rate["naive_over_pipelined"]),
                    policy["choice"],
                    ", ".join("-" if one is None else f"{one:,.0f} ms" for one in estimates),
                    ratio_text(policy["choice_over_other"]),
                ]
            )
    return rows


def ratio_text(found: Sequence[float | None]) -> str:
    """``1.68 (1.65 to 1.72)``; without the interval where there is none."""
    middle, low, high = found
    text = "-" if middle is None else f"{middle:.2f}"
    return text if low is None or high is None else f"{text} ({low:.2f} to {high:.2f})"


def show(console: Console, result: Result) -> None:
    console.print(head(result).replace("`", ""), markup=False, highlight=False)
    for title, columns, rows in (
        ("speed-up over full prefill", SPEEDUP_HEAD, speedup_rows(result)),
        ("by link", SWEEP_HEAD, sweep_rows(result)),
    ):
        table = Table(title=title)
        for column in columns:
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(*row)
        console.print(table)


def _link(rate: Mapping[str, Any]) -> str:
    return f"{rate['gbit_per_s']:.3g} Gbit/s{' (balanced)' if rate['balanced'] else ''}"
