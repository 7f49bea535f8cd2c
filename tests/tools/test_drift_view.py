"""What ``kvkin status`` and ``kvkin up`` show of drift."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, RenderableType

from kvkin.tools.cluster_view import status_view, up_view
from kvkin.transport.messages import DriftStatus, StatusReply

OK = DriftStatus("base", "qa", "ok", 7260.0, 40, 12, 0.95, 0.9, 0.0125, 0.8, None, None)
OFF = DriftStatus("base", "code", "off", 30.0, 16, 0, 0.25, 0.125, 3.5, None, 0.7, 0.5)
NEW = DriftStatus("qa", "code", "watching", 90.0, 0, 0, None, None, None, 0.85, None, None)


def shown(renderable: RenderableType) -> list[str]:
    console = Console(width=200, highlight=False)
    with console.capture() as capture:
        console.print(renderable)
    return [" ".join(line.split()) for line in capture.get().splitlines() if line.strip()]


def reply(pairs: Sequence[DriftStatus]) -> StatusReply:
    return StatusReply("1", "router-0", 5.0, 0, (), 9, {"requests": 2}, tuple(pairs))


def test_a_pair_is_a_row_with_its_figures_and_bounds() -> None:
    lines = shown(status_view(reply([OK, OFF, NEW])))
    assert "base qa ok 2 h 40 (12 inherited) 0.950 (from 0.80) 0.900 0.013" in lines
    assert "base code off 30 s 16 0.250 0.125 (from 0.70) 3.500 (to 0.50)" in lines
    assert "qa code watching 1 min 0 - (from 0.85) - -" in lines


def test_nothing_is_shown_where_nothing_is_watched() -> None:
    assert not [line for line in shown(status_view(reply([]))) if "drift" in line]


def test_up_shows_only_what_is_off() -> None:
    lines = shown(up_view({}, reply([OK, OFF]), "running"))
    assert [line.split()[:3] for line in lines if line.startswith("base ")] == [["base", "code", "off"]]
    assert not [line for line in shown(up_view({}, reply([OK]), "running")) if "drift" in line]
