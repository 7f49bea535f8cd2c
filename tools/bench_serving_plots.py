"""The plots of a serving benchmark, from the JSON object that it prints: SVG and PNG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvkin.tools.plots import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# An arm has the same colour in every plot, whichever arms were run.
COLOURS = {"sharing": "tab:blue", "own": "tab:orange", "off": "tab:red"}
# Phases that follow each other within a request, and what is in none; pulls run beside them.
STACKED = {"queue": "0.4", "wait": "tab:cyan", "recompute": "tab:green", "suffix": "tab:olive", "other": "0.8"}
PULL = "tab:purple"


def write_plots(folder: Path, whole: Mapping[str, Any]) -> list[Path]:
    """``ttft``, ``goodput`` and ``phases`` in all formats; returns the files. ``whole`` is what ``report()`` makes."""
    arms = whole["summary"]["arms"]
    drawn = {
        "ttft": _ttft(arms, whole["summary"].get("p95_ttft_objective_ms")),
        "goodput": _goodput(arms),
        "phases": _phases(arms),
    }
    return [file for name, figure in drawn.items() for file in save_figure(figure, folder / name)]


def _ttft(arms: Mapping[str, Any], objective_ms: float | None) -> Figure:
    figure, axes = new_figure(width=8.2)
    for arm, found in arms.items():
        for key, style, words in (("ttft_p50_ms", "--", "p50"), ("ttft_p95_ms", "-", "p95")):
            rates, values = _known(found["curve"], key)
            axes.plot(rates, values, style, marker="o", color=COLOURS[arm], label=f"{arm}, {words}")
    if objective_ms is not None:
        axes.axhline(objective_ms, color="grey", linestyle=":", label="objective")
    axes.set(xlabel="offered requests/s", ylabel="ms", yscale="log", title="Time to first token")
    for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        set_formatter("{x:,.0f}")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _goodput(arms: Mapping[str, Any]) -> Figure:
    figure, axes = new_figure()
    highest = 0.0
    for arm, found in arms.items():
        rates, values = _known(found["curve"], "goodput_per_s")
        axes.plot(rates, values, marker="o", color=COLOURS[arm], label=arm)
        highest = max([highest, *rates])
    axes.plot([0, highest], [0, highest], color="grey", linestyle=":", label="all that is offered")
    axes.set(xlabel="offered requests/s", ylabel="requests/s within the objective", title="Goodput")
    axes.legend()
    return figure


def _phases(arms: Mapping[str, Any]) -> Figure:
    """One panel an arm: mean milliseconds of each phase, stacked up to the mean TTFT; a pull overlaps with the others and is drawn
    beside them. Hashing and routing are too short to be seen."""
    figure, empty = new_figure(width=3.0 + 3.0 * len(arms))
    empty.remove()
    panels = figure.subplots(1, len(arms), sharey=True, squeeze=False)[0]
    for axes, (arm, found) in zip(panels, arms.items(), strict=True):
        rows = [row for row in found["curve"] if row["finished"]]
        places = range(len(rows))
        below = [0.0] * len(rows)
        for phase, colour in STACKED.items():
            values = [row["phases_ms"][phase] for row in rows]
            axes.bar(places, values, bottom=below, width=0.5, color=colour, label=phase)
            below = [low + value for low, value in zip(below, values, strict=True)]
        pulls = [row["phases_ms"]["pull"] for row in rows]
        axes.bar([place + 0.35 for place in places], pulls, width=0.15, color=PULL, label="pull")
        axes.set_xticks(list(places), [f"{row['rate']:.3g}" for row in rows])
        axes.set(xlabel="offered requests/s", title=arm)
    panels[0].set_ylabel("mean ms to the first token")
    panels[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _known(rows: Iterable[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Rates and values where there is a value."""
    pairs = [(row["rate"], row[key]) for row in rows if row[key] is not None]
    return [rate for rate, _ in pairs], [value for _, value in pairs]
