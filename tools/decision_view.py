"""Why a plan was chosen, for people: what the router went by and what else it weighed. ``kvkin ask --verbose`` shows it.

Pure: from the reuse report to rich renderables.
"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvkin.tools.pairs_view import group_text
from kvkin.transport.messages import Alternative, DecisionInputs


def decision_view(inputs: DecisionInputs) -> RenderableType:
    """The inputs in one line, then a row for each plan that was weighed."""
    return Group(Text(inputs_text(inputs)), _alternatives_table(inputs.considered))


def inputs_text(inputs: DecisionInputs) -> str:
    """``estimated 0.120 s (target 0.500 s), of it queue 0.010 s; at 104 MB/s and 41,000 layer tokens/s; loss up to 0.05``"""
    target = "" if inputs.slo_s is None else f" (target {inputs.slo_s:.3f} s)"
    pull = f"{inputs.pull_bytes_per_s / 1e6:,.0f} MB/s and " if inputs.pull_bytes_per_s else ""
    return (
        f"estimated {inputs.ttft_s:.3f} s{target}, of it queue {inputs.queue_s:.3f} s; at {pull}"
        f"{inputs.prefill_layer_tokens_per_s:,.0f} layer tokens/s; loss up to {inputs.max_loss:g}"
    )


def _alternatives_table(alternatives: tuple[Alternative, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("weighed", "on", "from", "recomputed"):
        table.add_column(column, no_wrap=True)
    for column in ("loss", "first token"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in alternatives:
        table.add_row(
            f"{one.kind}{' (chosen)' if one.chosen else ''}",
            one.node,
            ", ".join(one.sources),
            recomputed_text(one),
            "?" if one.loss is None else f"{one.loss:.3f}",
            f"{one.ttft_s:.3f} s",
            style="bold" if one.chosen else "",
        )
    return table


def recomputed_text(one: Alternative) -> str:
    """What is recomputed of its approximate span; empty where there is none."""
    return group_text(one.group) if one.kind in ("partial", "token-wise") or one.group is not None else ""
