"""What checks of reuse against private runs showed, as a table for ``kvkin status`` and ``kvkin up``. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from kvkin.transport.messages import DriftStatus

_STYLES = {"ok": "green", "off": "bold red", "watching": "yellow"}


def drift_table(pairs: Sequence[DriftStatus]) -> Table:
    """A row a pair: its state, how long that has been so, and each figure with the bound that it should keep."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("drift: sender", "receiver", "state"):
        table.add_column(column, no_wrap=True)
    for column in ("since", "checks", "first token", "agreement", "divergence"):
        table.add_column(column, justify="right", no_wrap=True)
    for pair in pairs:
        table.add_row(
            pair.sender,
            pair.receiver,
            Text(pair.state, style=_STYLES.get(pair.state, "")),
            _ago(pair.since_s),
            f"{pair.samples} ({pair.inherited} inherited)" if pair.inherited else str(pair.samples),
            _bounded(pair.first_token, pair.min_first_token, "from"),
            _bounded(pair.agreement, pair.min_agreement, "from"),
            _bounded(pair.divergence, pair.max_divergence, "to"),
        )
    return table


def _bounded(seen: float | None, bound: float | None, word: str) -> str:
    text = "-" if seen is None else f"{seen:.3f}"
    return text if bound is None else f"{text} ({word} {bound:.2f})"


def _ago(seconds: float) -> str:
    """5 s, 3 min, 2 h, 4 d."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"
