"""What an evaluation says of its cases, on records written by hand: equal latency, intervals, tables, figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkin.kv.errors import ConfigError
from kvkin.kv.layout import KVLayout, Plane
from kvkin.kv.plan import LayerGroup
from kvkin.tools.evaluate_arms import Arm, make_arms
from kvkin.tools.evaluate_report import ARM_HEAD, arm_rows, draw, equal_rows, markdown
from kvkin.tools.evaluate_result import equal_latency, summarize
from kvkin.tools.plots import check_plots, new_figure, save_figure

ARMS = make_arms([0.1, 0.3], [LayerGroup(2, 6)], num_layers=10)
HEAD = {
    "sender": "s",
    "receiver": "r",
    "data": {"name": "d", "split": "test", "cases_digest": "00"},
    "metric": {"name": "f1", "title": "token F1"},
    "command": "kvkin evaluate",
    "made": {"device": "cpu", "dtype": "float32", "threads": 1, "date": "2026-01-01"},
}


def _records(
    scores: Mapping[str, Sequence[float]],
    ttft_s: Mapping[str, Sequence[float]],
    arms: Sequence[Arm] = ARMS,
    a_context: int = 1,
) -> dict[str, Any]:
    count = len(next(iter(scores.values())))
    return {
        f"case {number}": {
            "context": f"context {number // a_context}",
            "tokens": 100 + number,
            "suffix_tokens": 10,
            "arms": {
                arm.name: {
                    "score": scores.get(arm.name, scores["full"])[number],
                    "ttft_s": ttft_s.get(arm.name, ttft_s["full"])[number],
                    "layer_tokens": 1000,
                    "bytes": 8,
                }
                for arm in arms
            },
        }
        for number in range(count)
    }


def _even(**seconds: float) -> dict[str, list[float]]:
    """The same time in each of four cases, by arm."""
    names = {"full": "full", "low": "blend 0.1", "high": "blend 0.3", "group": "group 2-6", "reuse": "reuse"}
    return {names[key]: [value] * 4 for key, value in seconds.items()}


SCORES = {
    "full": [1.0, 1.0, 0.5, 0.5],
    "blend 0.1": [0.2, 0.4, 0.0, 0.2],
    "blend 0.3": [0.6, 0.8, 0.4, 0.2],
    "group 2-6": [0.7, 0.7, 0.3, 0.3],
}


def _equal(**seconds: float) -> dict[str, Any]:
    times = _even(**{"full": 9.0, "reuse": 0.01, "low": 0.2, "high": 0.4, **seconds})
    found = equal_latency(list(_records(SCORES, times).values()), ARMS, seed=0)
    return {one["name"]: one for one in found}


def test_nearest_ratio_and_the_one_in_between() -> None:
    one = _equal(group=0.25)["group 2-6"]
    assert one["ttft_ms"] == 250
    assert (one["nearest"]["ratio"], one["nearest"]["ttft_ms"]) == (0.1, 200)
    assert one["nearest"]["difference"]["estimate"] == pytest.approx(0.5 - 0.2)
    # a quarter of the way from 0.1 to 0.3: each case's score, too
    assert one["interpolated"]["ratio"] == pytest.approx(0.15)
    assert one["interpolated"]["between"] == [0.1, 0.3]
    mixed = [0.75 * low + 0.25 * high for low, high in zip(SCORES["blend 0.1"], SCORES["blend 0.3"], strict=True)]
    differences = np.array(SCORES["group 2-6"]) - mixed
    found = one["interpolated"]["difference"]
    assert found["estimate"] == pytest.approx(differences.mean())
    assert differences.min() - 1e-9 <= found["low"] <= found["estimate"] <= found["high"] <= differences.max() + 1e-9
    assert found["n"] == 4
    assert _equal(group=0.35)["group 2-6"]["nearest"]["ratio"] == 0.3


def test_outside_of_all_ratios_nothing_is_interpolated() -> None:
    for seconds, nearest in ((0.1, 0.1), (0.5, 0.3)):
        one = _equal(group=seconds)["group 2-6"]
        assert one["interpolated"] is None
        assert one["nearest"]["ratio"] == nearest
    assert _equal(group=0.2)["group 2-6"]["interpolated"]["ratio"] == pytest.approx(0.1)
    assert _equal(group=0.4)["group 2-6"]["interpolated"]["ratio"] == pytest.approx(0.3)
    assert _equal(group=0.3)["reuse"]["interpolated"] is None


def test_ratios_whose_order_of_time_is_another() -> None:
    """A busy machine may time the larger ratio faster: what counts is the measured time."""
    one = _equal(group=0.25, low=0.4, high=0.2)["group 2-6"]
    assert one["nearest"]["ratio"] == 0.3
    assert one["interpolated"]["ratio"] == pytest.approx(0.25)
    same = _equal(group=0.2, low=0.2, high=0.2)["group 2-6"]
    assert same["interpolated"]["ratio"] == pytest.approx(0.1)


def test_without_ratios_or_groups_nothing_is_equal() -> None:
    only = make_arms([], [LayerGroup(0, 1)], num_layers=10)
    cases = list(_records({"full": [1.0]}, {"full": [1.0]}, only).values())
    assert equal_latency(cases, only, seed=0) == []
    blends = make_arms([0.5], [], num_layers=10)
    cases = list(_records({"full": [1.0]}, {"full": [1.0]}, blends).values())
    assert [one["name"] for one in equal_latency(cases, blends, seed=0)] == ["reuse"]


def _result(scores: Mapping[str, Sequence[float]] = SCORES) -> dict[str, Any]:
    count = len(next(iter(scores.values())))
    times = {"full": [4.0, 2.0, 1.0, 1.0][:count], "group 2-6": [2.0, 0.5, 0.5, 1.0][:count]}
    return summarize(_records(scores, times), ARMS, seed=0, head=HEAD)


def test_times_are_medians_and_speed_ups_are_paired() -> None:
    result = _result()
    arms = {arm["name"]: arm for arm in result["arms"]}
    assert arms["full"]["ttft_ms"]["estimate"] == 1500
    assert arms["group 2-6"]["ttft_ms"]["estimate"] == 750
    assert arms["group 2-6"]["speedup"]["estimate"] == 2.0  # median of 2, 4, 2, 1
    assert (arms["full"]["difference"]["low"], arms["full"]["difference"]["high"]) == (0, 0)
    assert arms["group 2-6"]["kept"]["estimate"] == pytest.approx(0.5 / 0.75, abs=1e-6)
    assert (result["cases"], result["context_tokens"]) == (4, {"min": 100, "p50": 101, "mean": 101.5, "max": 103})


def test_what_cannot_be_said_is_null_and_a_dash() -> None:
    one = _result({name: values[:1] for name, values in SCORES.items()})
    assert {arm["score"]["low"] for arm in one["arms"]} == {None}
    assert [row[1] for row in arm_rows(one)] == ["1.000", "1.000", "1.000", "0.200", "0.600", "0.700"]
    nothing = _result({"full": [0.0] * 4})
    kept = {arm["name"]: arm["kept"] for arm in nothing["arms"]}
    assert kept["reuse"]["estimate"] is None  # a share of nothing
    assert arm_rows(nothing)[2][ARM_HEAD.index("kept (95 %)")] == "-"
    rare = _result({"full": [0.0, 0.0, 0.0, 0.1], "reuse": [0.1] * 4})
    assert arm_rows(rare)[2][ARM_HEAD.index("kept (95 %)")].endswith("to ...)")


def test_rows_and_markdown() -> None:
    result = _result()
    text = markdown(result, "figure.svg")
    assert "| DroidSpeak [2, 6) | 0.500 (" in text
    assert "![quality over time to first token](figure.svg)" in text
    assert "![" not in markdown(result, None)
    rows = equal_rows(result)
    assert all(len(row) == 5 for row in rows)
    assert [row[0] for row in rows if row[0]] == ["full reuse", "DroidSpeak [2, 6)"]


def test_bytes_of_an_arm() -> None:
    layout = KVLayout(10, (Plane("keys", 2, 8), Plane("values", 2, 8)), 32, "bfloat16", 16)
    kv, hidden = 2 * 2 * 8 * 2, 32 * 2
    pulled = {arm.name: arm.pulled_bytes(48, layout) for arm in ARMS}
    assert pulled["full"] == pulled["sender"] == 0
    assert pulled["reuse"] == 48 * 10 * kv
    assert pulled["blend 0.1"] == pulled["blend 0.3"] == 48 * 9 * kv
    assert pulled["group 2-6"] == 48 * (6 * kv + hidden)
    assert Arm("group", LayerGroup(0, 6)).pulled_bytes(48, layout) == 48 * 4 * kv
    assert Arm("group", LayerGroup(0, 10)).pulled_bytes(48, layout) == 0
    assert Arm("blend", ratio=0.1, check_layer=0).pulled_bytes(48, layout) == pulled["reuse"]


# --- figures -------------------------------------------------------------------------------------------------------------


def test_the_same_result_gives_the_same_figure(tmp_path: Path) -> None:
    first, second = draw(_result(), tmp_path / "a"), draw(_result(), tmp_path / "b")
    assert [file.name for file in first] == ["a.svg", "a.png"]
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]
    other = _result({**SCORES, "group 2-6": [0.1] * 4})
    assert draw(other, tmp_path / "c")[0].read_bytes() != first[0].read_bytes()


def test_points_lie_where_the_result_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(
        "kvkin.tools.evaluate_report.save_figure",
        lambda figure, stem: (drawn.append(figure), save_figure(figure, stem))[1],
    )
    result = _result()
    draw(result, tmp_path / "a")
    (axes,) = drawn[0].axes
    points = {(x, y) for container in axes.containers for x, y in zip(*container[0].get_data(), strict=True)}
    expected = {(arm["ttft_ms"]["estimate"], arm["score"]["estimate"]) for arm in result["arms"]}
    assert points == expected
    # one case: no bars, and still a figure
    assert draw(_result({name: values[:1] for name, values in SCORES.items()}), tmp_path / "b")[1].stat().st_size > 0


def test_plots_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    check_plots("--no-plot goes without")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    with pytest.raises(ConfigError, match=r"^plot: .*matplotlib.*\(allowed: pip install .*; --no-plot goes without\)"):
        check_plots("--no-plot goes without")


def test_figures_leave_no_state_behind(tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    figure, axes = new_figure()
    axes.plot([0, math.pi], [0, 1])
    svg, png = save_figure(figure, tmp_path / "x.y")
    assert (svg.name, png.name) == ("x.y.svg", "x.y.png")
    assert dict(matplotlib.rcParams) == before
