"""Figures of a profile: sensitivity of the layers, its spread over inputs, and all groups with their frontier (matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvkin.configs.profiles import Profile
from kvkin.tools.plots import new_figure, save_figure


def write_figures(path: Path, profile: Profile, sensitivities: Sequence[Sequence[float]]) -> dict[str, Path]:
    """Write ``<profile>-sensitivity.svg``, ``-inputs.svg`` and ``-frontier.svg``; paths by these names."""
    drawn = {"sensitivity": _sensitivity, "inputs": _inputs, "frontier": _frontier}
    found = {}
    for key, draw in drawn.items():
        figure, axes = new_figure()
        draw(axes, profile, np.asarray(sensitivities, dtype=np.float64))
        (found[key],) = save_figure(figure, path.with_name(f"{path.stem}-{key}"), ("svg",))
    return found


def _sensitivity(axes: Any, profile: Profile, sensitivities: np.ndarray) -> None:
    layers = [one.layer for one in profile.sensitivity]
    mean = np.array([one.mean for one in profile.sensitivity])
    spread = [
        [max(0.0, one.mean - one.p10) for one in profile.sensitivity],
        [max(0.0, one.p90 - one.mean) for one in profile.sensitivity],
    ]
    group = profile.chosen.group if profile.chosen is not None else None
    colors = ["tab:orange" if group is not None and group[0] <= layer < group[1] else "tab:blue" for layer in layers]
    axes.bar(layers, mean, yerr=spread, color=colors, ecolor="0.5", capsize=2)
    axes.set_xlabel("layer whose KV is the sender's" + ("" if group is None else " (orange: in the chosen group)"))
    axes.set_ylabel("divergence, nats a token (10 to 90 %)")


def _inputs(axes: Any, profile: Profile, sensitivities: np.ndarray) -> None:
    shares = sensitivities / np.maximum(sensitivities.sum(axis=1, keepdims=True), 1e-12)
    axes.grid(visible=False)
    image = axes.imshow(shares, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0.0)
    axes.set_xlabel("layer")
    axes.set_ylabel("input")
    axes.figure.colorbar(image, ax=axes, label="share of the input's total")


def _frontier(axes: Any, profile: Profile, sensitivities: np.ndarray) -> None:
    measured = [one for one in profile.groups if one.quality is not None]
    layers = [0 if one.group is None else one.group[1] - one.group[0] for one in measured]
    losses = [one.quality.loss * 100 for one in measured if one.quality is not None]
    axes.scatter(layers, losses, color="0.6", s=18, label="measured groups, their own loss")
    axes.step(
        [one.layers for one in profile.frontier],
        [one.loss * 100 for one in profile.frontier],
        where="post",
        marker="o",
        color="tab:blue",
        label="frontier, expected loss",
    )
    if profile.chosen is not None:
        axes.scatter([profile.chosen.layers], [profile.chosen.loss * 100], color="tab:red", zorder=3, label="chosen")
    axes.axhline(profile.max_loss * 100, color="tab:red", linewidth=0.8, linestyle="--")
    axes.set_xlabel(f"recomputed layers of {profile.num_layers}")
    axes.set_ylabel("loss, % of the full prefill's score")
    axes.legend()
