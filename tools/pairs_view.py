"""Pairs of models for people: which are profiled, which are not, what they recompute. Used by ``kvkin status`` and ``kvkin config``.

Pure: from the router's ``status`` reply to rich renderables.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from kvkin.transport.messages import PairStatus

_STYLES = {"profiled": "green", "refused": "bold red", "unprofiled": "yellow"}


def pairs_table(pairs: Iterable[PairStatus]) -> Table:
    """A row for each pair."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("sender", "receiver", "reuse"):
        table.add_column(column, no_wrap=True)
    table.add_column("recomputed layers: loss", overflow="fold")
    table.add_column("profile", overflow="fold")
    for pair in pairs:
        table.add_row(
            pair.sender,
            pair.receiver,
            Text(pair.state, style=_STYLES.get(pair.state, "")),
            groups_text((one.group, one.loss) for one in pair.groups),
            pair.why,
        )
    return table


def groups_text(groups: Iterable[tuple[tuple[int, int] | None, float | None]]) -> str:
    """``none: 0.030, [2, 6): 0.004``: what is recomputed and the loss of that, where it was measured."""
    return ", ".join(group_text(group) + ("" if loss is None else f": {loss:.3f}") for group, loss in groups)


def group_text(group: tuple[int, int] | None) -> str:
    return "none" if group is None else f"[{group[0]}, {group[1]})"
