"""Which groups are measured, and the log that an interrupted measurement goes on with."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkin.kv.plan import LayerGroup
from kvkin.tools.case_log import CaseLog
from kvkin.tools.eta import Eta
from kvkin.tools.profile_search import Group, all_groups, grid, name, order, parse, select, stability


@given(st.integers(1, 40), st.integers(1, 12))
def test_grid_covers_all_layers(num_layers: int, group_size: int) -> None:
    starts, stops = grid(num_layers, group_size)
    assert starts[0] == 0
    assert stops[-1] == num_layers
    assert len(starts) == len(stops)
    # cut at these bounds the layers fall into groups of the given size, the last one perhaps smaller
    sizes = [stop - start for start, stop in zip(starts, stops, strict=True)]
    assert sum(sizes) == num_layers
    assert all(size == group_size for size in sizes[:-1])
    groups = all_groups(starts, stops, num_layers)
    assert len(set(groups)) == len(groups)
    assert None in groups
    assert LayerGroup(0, num_layers) not in groups, "that is a full prefill"


@st.composite
def measured(draw: st.DrawFn) -> tuple[int, dict[Group, list[float]]]:
    num_layers = draw(st.integers(2, 24))
    groups = all_groups(*grid(num_layers, draw(st.integers(1, 4))), num_layers)
    values = st.lists(st.floats(0, 10), min_size=2, max_size=2)
    return num_layers, {group: draw(values) for group in groups}


@given(measured(), st.lists(st.integers(1, 23), max_size=3))
def test_what_must_be_answered_always_is(
    case: tuple[int, dict[Group, list[float]]], transition_layers: list[int]
) -> None:
    num_layers, divergences = case
    chosen = select(divergences, num_layers, transition_layers)
    assert set(chosen) <= set(divergences)
    assert chosen == sorted(set(chosen), key=order)
    assert chosen[0] is None, "full reuse"
    small = [group for group in divergences if group is not None and len(group) <= 0.6 * num_layers]
    if any(group.start == 0 for group in small):
        assert any(group is not None and group.start == 0 for group in chosen)
    if any(group.stop == num_layers for group in small):
        assert any(group is not None and group.stop == num_layers for group in chosen)
    mean = {group: sum(values) for group, values in divergences.items()}
    for size in {len(group) for group in small}:
        least = min(mean[group] for group in small if len(group) == size)
        assert least == min(mean[group] for group in chosen if group is not None and len(group) == size)
    for layer in transition_layers:
        there = [group for group in small if group.start == layer]
        if there:
            assert min(there, key=len) in chosen
            assert min(mean[group] for group in there) == min(
                mean[group] for group in chosen if group is not None and group.start == layer
            )


def test_pruning_leaves_out_most_groups() -> None:
    groups = all_groups(*grid(30, 2), 30)
    divergences = {group: [1.0 if group is None else 1.0 / len(group)] for group in groups}
    assert len(groups) == 120
    assert len(select(divergences, 30, (6, 10, 16))) <= 0.4 * len(groups)


@given(st.integers(0, 50), st.integers(1, 50))
def test_names_of_groups(start: int, size: int) -> None:
    group = LayerGroup(start, start + size)
    assert parse(name(group)) == group
    assert parse(name(None)) is None


@pytest.mark.parametrize("text", ["", "3", "3-", "-3", "5-5", "6-5", "a-b", "1-2-3", "None", "1.5-2"])
def test_no_group(text: str) -> None:
    with pytest.raises(ValueError, match="is no group"):
        parse(text)


def test_stability_of_the_layers_order() -> None:
    alike = [[1.0, 5.0, 2.0, 9.0], [10.0, 50.0, 20.0, 90.0], [0.1, 0.2, 0.15, 7.0]]
    assert stability(alike) == pytest.approx(1.0)
    turned = [[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]]
    assert stability(turned) == pytest.approx(-1.0)
    assert math.isnan(stability([[1.0, 2.0]])), "one input says nothing of others"
    assert math.isnan(stability([[1.0, 1.0], [1.0, 1.0]])), "no order at all"


# --- the log -----------------------------------------------------------------------------------------------------------


def test_a_log_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "log.jsonl"
    first = CaseLog(path, {"data": "a"})
    assert not first.resumed
    first.add("search", "one", {"value": 0.1})
    first.add("answers", "one", {"value": 0.2})
    second = CaseLog(path, {"data": "a"})
    assert second.resumed
    assert second.done == first.done
    assert [record["value"] for record in second.records("search").values()] == [0.1]
    second.add("search", "two", {"value": 0.3})
    assert list(CaseLog(path, {"data": "a"}).records("search")) == ["one", "two"]


def test_a_log_of_something_else_is_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    CaseLog(path, {"data": "a"}).add("search", "one", {"value": 1})
    other = CaseLog(path, {"data": "b"})
    assert not other.resumed
    assert not other.done
    assert not CaseLog(path, {"data": "a"}).done, "it was started anew"


@pytest.mark.parametrize("rest", ['{"stage": "search", "ca', "\x00\x00\n", '{"half": \n'])
def test_a_line_that_a_kill_cut_off_is_dropped(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "log.jsonl"
    CaseLog(path, {"data": "a"}).add("search", "one", {"value": 1})
    with path.open("a") as file:
        file.write(rest)
    again = CaseLog(path, {"data": "a"})
    assert list(again.done) == [("search", "one")]
    again.add("search", "two", {"value": 2})
    lines = path.read_text().splitlines()
    assert [json.loads(line).get("case") for line in lines] == [None, "one", "two"]


def test_progress_says_what_is_left() -> None:
    clock = itertools.count(0, 30)
    said: list[str] = []
    eta = Eta("search", 6, 2, said.append, clock=lambda: float(next(clock)))
    for _ in range(4):
        eta.step()
    assert said == [
        "search: 3/6, 90 s left",
        "search: 4/6, 60 s left",
        "search: 5/6, 30 s left",
        "search: 6/6, 0 s left",
    ]
