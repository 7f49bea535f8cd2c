"""What figures share: matplotlib without a screen and without state, one look, SVG and PNG that are alike from run to run.

``kvkin profile``, ``kvkin evaluate`` and ``kvkin bench serving`` draw with it. matplotlib is imported in here only, when something is drawn; ``check_plots`` says that it is
missing before anything is measured.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvkin.kv.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("svg", "png")
# A way to reuse KV looks the same in every figure.
COLOURS: Mapping[str, str] = {
    "full": "tab:red",
    "sender": "0.5",
    "reuse": "tab:purple",
    "blend": "tab:orange",
    "group": "tab:blue",
}


def check_plots(otherwise: str) -> None:
    """Raise ConfigError unless matplotlib is installed; ``otherwise`` says how to do without figures."""
    if importlib.util.find_spec("matplotlib") is None:
        how = f"pip install 'kvkin[plots]' (or matplotlib); {otherwise}"
        raise ConfigError("plot", "figures need the package matplotlib, which is not installed", how)


def new_figure(width: float = 7.2, height: float = 4.4) -> tuple[Figure, Axes]:
    """An empty figure of ``width`` x ``height`` inches with one pair of axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # no pyplot: it keeps every figure, and a backend, for the whole process
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    return figure, axes


def save_figure(figure: Figure, stem: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write ``stem``.svg and ``stem``.png (or other ``formats``) and return them. The same figure gives the same bytes: no dates, no random ids."""
    import matplotlib

    files = [stem.with_name(f"{stem.name}.{suffix}") for suffix in formats]
    with matplotlib.rc_context({"svg.hashsalt": "kvkin"}):
        for file in files:
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files
