"""Figures of a serving benchmark: percentiles, counts, goodput, the rate where p95 crosses, and the ratio of two arms."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkin.tools import bench_serving_report as reports
from kvkin.tools.bench_serving_stats import (
    Crossing,
    Objective,
    Ratio,
    compare,
    count,
    crossing,
    curve_of,
    point_figures,
    quantile,
    spread,
    throughput_ratio,
)
from kvkin.tools.bench_serving_sweep import Point, PointResult
from kvkin.tools.load_records import SENT, Outcome, RequestRecord

INF = math.inf
times = st.floats(0.1, 1e6)


def record(number: int = 0, ttft_ms: float | None = 100.0, **fields: Any) -> RequestRecord:
    """A finished request that arrived at second ``number``; without ``ttft_ms`` one that timed out a second later."""
    intended_s = float(number)
    first_s = None if ttft_ms is None else intended_s + ttft_ms / 1e3
    values: dict[str, Any] = {
        "number": number,
        "session": 0,
        "turn": number,
        "model": "a",
        "prompt_tokens": 10,
        "asked_tokens": 3,
        "outcome": Outcome.TIMED_OUT if ttft_ms is None else Outcome.FINISHED,
        "intended_s": intended_s,
        "sent_s": intended_s,
        "first_token_s": first_s,
        "ended_s": intended_s + 1.0 if first_s is None else first_s + 0.06,
        "tokens": 3,
        "gaps_s": (0.01, 0.05),
        "kind": "private",
        "quality": "exact",
    }
    return RequestRecord(**{**values, **fields})


# --- percentiles ---------------------------------------------------------------------------------------------------------


@given(st.lists(times, min_size=1, max_size=40), st.floats(0, 1))
def test_quantile_is_numpys(values: list[float], q: float) -> None:
    found = quantile(values, q)
    assert found == pytest.approx(float(np.percentile(values, 100 * q)))
    assert min(values) <= found <= max(values)


@given(st.lists(times, max_size=20), st.integers(1, 20), st.floats(0, 1))
def test_endless_values_sort_last(values: list[float], endless: int, q: float) -> None:
    found = quantile([*values, *[INF] * endless], q)
    place = q * (len(values) + endless - 1)
    assert math.isinf(found) == (place > len(values) - 1)
    assert not math.isnan(found)


def test_nothing_has_no_percentiles() -> None:
    assert math.isnan(quantile([], 0.5))
    assert spread([]) is None


@given(st.lists(times, min_size=1, max_size=40))
def test_spread_is_ordered(values: list[float]) -> None:
    found = spread(values)
    assert found is not None
    assert found.count == len(values)
    assert found.p50 <= found.p95 <= found.p99 <= max(values)
    assert found.mean == pytest.approx(float(np.mean(values)))


# --- counts and goodput --------------------------------------------------------------------------------------------------

outcomes = st.sampled_from(list(Outcome))
records = st.lists(st.tuples(outcomes, st.booleans(), st.sampled_from(["capacity", "deadline"])), max_size=30).map(
    lambda drawn: [
        record(number, 100.0, outcome=outcome, warm_up=warm_up, code=code if outcome is Outcome.FAILED else "")
        for number, (outcome, warm_up, code) in enumerate(drawn)
    ]
)


@given(records)
def test_every_request_is_counted_once(all_records: list[RequestRecord]) -> None:
    figures = point_figures(all_records, 10.0, Objective(), 20.0)
    for counts, warm_up in ((figures.counts, False), (figures.warm_up_counts, True)):
        mine = [one for one in all_records if one.warm_up is warm_up]
        assert counts == count(mine)
        ends = (counts.finished, sum(counts.failed.values()), counts.timed_out, counts.cut_off)
        assert counts.sent == sum(ends) == sum(one.outcome in SENT for one in mine)
        assert counts.planned == counts.sent + counts.not_sent + counts.abandoned + counts.never_due == len(mine)
    assert figures.objective_met == figures.counts.finished


def test_failures_are_counted_by_code() -> None:
    failed = [record(number, outcome=Outcome.FAILED, code=code) for number, code in enumerate(["b", "a", "b"])]
    assert count([*failed, record(3)]).failed == {"a": 1, "b": 2}


def test_an_objective_needs_a_whole_answer() -> None:
    objective = Objective(ttft_ms=100.0, tbt_ms=30.1)
    assert objective.met(record(0, 100.0))
    assert not objective.met(record(0, 100.5))
    assert not objective.met(record(0, 100.0, gaps_s=(0.01, 0.051, 0.04)))
    assert not objective.met(record(0, 1.0, outcome=Outcome.CUT_OFF))
    assert not objective.met(record(0, None))
    assert Objective().met(record(0, 1e9))
    assert objective.met(record(0, 1.0, gaps_s=()))


def test_figures_of_a_point() -> None:
    measured = [
        record(1, 100.0, kind="exact", tokens_reused=8, bytes_pulled=50, phases_ms={"pull": 4.0, "suffix": 10.0}),
        record(2, 300.0, kind="partial", tokens_reused=4, quality="bounded", loss=0.04, fallback="lost", model="b"),
        record(4, None),
        record(3, 50.0, outcome=Outcome.FAILED, code="capacity", sent_s=3.1),
    ]
    figures = point_figures(
        [record(0, 9000.0, warm_up=True, sent_s=0.5), *measured], 10.0, Objective(ttft_ms=200.0), 20.0
    )
    assert (figures.counts.planned, figures.counts.finished, figures.warm_up_counts.planned) == (4, 2, 1)
    # from the first measured arrival, second 1, to the last end, second 5
    assert figures.span_s == pytest.approx(4.0)
    assert (figures.offered_per_s, figures.achieved_per_s, figures.goodput_per_s) == pytest.approx((0.5, 0.5, 0.25))
    assert figures.objective_met == 1
    assert figures.ttft_ms is not None
    assert (figures.ttft_ms.count, figures.ttft_ms.mean) == (2, pytest.approx(200.0))
    assert figures.ttft_p95_all_ms is None
    assert figures.tbt_ms is not None
    assert (figures.tbt_ms.count, figures.tbt_ms.p50) == (4, pytest.approx(30.0))
    assert figures.e2e_ms is not None
    assert figures.e2e_ms.p50 == pytest.approx(260.0)
    assert {kind: group.finished for kind, group in figures.by_kind.items()} == {"exact": 1, "partial": 1}
    assert {model: group.tokens_reused for model, group in figures.by_model.items()} == {"a": 8, "b": 4}
    assert figures.by_quality == {"exact": 1, "bounded": 1}
    assert (figures.loss_known, figures.loss_mean) == (1, 0.04)
    assert (figures.fallbacks, figures.bytes_pulled, figures.tokens_reused, figures.prompt_tokens) == (1, 50, 12, 20)
    assert (figures.phases_ms["pull"], figures.phases_ms["suffix"], figures.phases_ms["queue"]) == (2.0, 5.0, 0.0)
    # a pull runs beside the others: everything else adds up to what the client waited
    assert figures.phases_ms["other"] == pytest.approx(195.0)
    assert sum(figures.phases_ms.values()) - figures.phases_ms["pull"] == pytest.approx(figures.ttft_ms.mean)
    # lateness is the generator's, so all that were sent count, the warm-up too
    assert (figures.late.count, figures.late.max_ms) == (2, pytest.approx(500.0))


def test_a_point_without_an_answer_has_no_latencies() -> None:
    figures = point_figures([record(0, None)], 0.0, Objective(), 20.0)
    assert (figures.ttft_ms, figures.tbt_ms, figures.e2e_ms, figures.ttft_p95_all_ms) == (None, None, None, None)
    assert (figures.offered_per_s, figures.achieved_per_s, figures.phases_ms) == (0.0, 0.0, {})


# --- where a curve crosses -----------------------------------------------------------------------------------------------

curves = st.dictionaries(st.floats(0.1, 100), times | st.just(INF), min_size=1, max_size=8)


@given(curves, times)
def test_a_crossing_lies_between_the_rates_around_it(curve: dict[float, float], objective_ms: float) -> None:
    found = crossing(curve, objective_ms)
    ordered = sorted(curve)
    broken = [rate for rate in ordered if curve[rate] > objective_ms]
    match found.bound:
        case "above":
            assert not broken
            assert found.rate == ordered[-1]
        case "below":
            assert broken[0] == ordered[0] == found.rate
        case "at":
            before = ordered[ordered.index(broken[0]) - 1]
            assert before <= found.rate <= broken[0]
        case other:
            pytest.fail(other)


@given(curves, times, times)
def test_a_looser_objective_holds_at_least_as_far(curve: dict[float, float], one: float, other: float) -> None:
    strict, loose = (crossing(curve, objective) for objective in sorted((one, other)))
    order = {"below": 0, "at": 1, "above": 2}
    assert order[strict.bound] <= order[loose.bound]
    assert strict.rate <= loose.rate * (1 + 1e-9)


def test_crossings_are_interpolated() -> None:
    curve = {1.0: 100.0, 2.0: 200.0, 4.0: 600.0}
    assert crossing(curve, 150.0) == Crossing(1.5, "at")
    assert crossing(curve, 200.0) == Crossing(2.0, "at")
    assert crossing(curve, 300.0) == Crossing(2.5, "at")
    assert crossing(curve, 50.0) == Crossing(1.0, "below")
    assert crossing(curve, 600.0) == Crossing(4.0, "above")
    # no interpolation towards infinity: the last rate that held
    assert crossing({1.0: 100.0, 2.0: INF}, 150.0) == Crossing(1.0, "at")
    # the first crossing counts
    assert crossing({1.0: 100.0, 2.0: 300.0, 3.0: 100.0}, 200.0) == Crossing(1.5, "at")


def test_ratios_say_how_sure_they_are() -> None:
    def ratio(over: str, under: str) -> Ratio:
        return compare(Crossing(6.0, over), Crossing(2.0, under))

    assert ratio("at", "at") == Ratio(3.0, "exact")
    assert ratio("above", "at") == ratio("at", "below") == ratio("above", "below") == Ratio(3.0, "at least")
    assert ratio("below", "at") == ratio("at", "above") == ratio("below", "above") == Ratio(3.0, "at most")
    assert ratio("above", "above") == ratio("below", "below") == Ratio(None, "unknown")


def test_the_ratio_of_known_curves() -> None:
    """p95 of the one arm grows by 100 ms per request/s, of the other by 200: at equal p95 twice the throughput."""
    rates = (1.0, 2.0, 3.0, 4.0)
    over = {rate: [[100 * rate] * 20 for _ in range(4)] for rate in rates}
    under = {rate: [[200 * rate] * 20 for _ in range(4)] for rate in rates}
    assert throughput_ratio(over, under, 350.0, 0) == Ratio(2.0, "exact", 2.0, 2.0)
    single = throughput_ratio(
        {rate: one[:1] for rate, one in over.items()}, {rate: one[:1] for rate, one in under.items()}, 350, 0
    )
    assert single == Ratio(2.0, "exact")


def test_the_interval_comes_from_repeats() -> None:
    rates = (1.0, 2.0, 3.0, 4.0)
    over = {rate: [[100 * rate * factor] * 20 for factor in (0.9, 1.0, 1.1, 1.0)] for rate in rates}
    under = {rate: [[200 * rate * factor] * 20 for factor in (1.1, 1.0, 0.9, 1.0)] for rate in rates}
    found = throughput_ratio(over, under, 300.0, 0)
    assert found.value is not None
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.value < found.high
    assert found == throughput_ratio(over, under, 300.0, 0)
    assert throughput_ratio(over, under, 300.0, 0, resamples=0) == Ratio(found.value, found.bound)


@given(st.lists(st.lists(times, min_size=1, max_size=6), min_size=1, max_size=4), st.data())
def test_a_curve_pools_its_repeats(by_repeat: list[list[float]], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(range(len(by_repeat))), min_size=1, max_size=5))
    pooled = [one for repeat in chosen for one in by_repeat[repeat]]
    assert curve_of({1.0: by_repeat}, chosen) == {1.0: quantile(pooled, 0.95)}


def test_repeats_must_be_the_same() -> None:
    with pytest.raises(AssertionError, match="repeats differ"):
        throughput_ratio({1.0: [[1.0], [1.0]]}, {1.0: [[1.0]]}, 5.0, 0)


# --- the report ----------------------------------------------------------------------------------------------------------


def result(place: int, arm: Any, rate: float, repeat: int, ttft_ms: Sequence[float | None]) -> PointResult:
    all_records = [record(number, one) for number, one in enumerate(ttft_ms)]
    figures = point_figures(all_records, 10.0, Objective(ttft_ms=150.0), 20.0)
    return PointResult(Point(place, arm, rate, repeat), figures, tuple(all_records), {"requests": 3}, 1)


def test_summary_of_arms() -> None:
    results = [
        result(0, "sharing", 1.0, 0, [100, 100]),
        result(1, "off", 1.0, 0, [100, 100]),
        result(2, "off", 3.0, 0, [200, 200]),
        result(3, "sharing", 3.0, 0, [110, None]),
    ]
    whole = reports.report({"seed": 0}, results, Objective(ttft_ms=150.0), 0)
    assert json.loads(json.dumps(whole)) == whole
    arms = whole["summary"]["arms"]
    assert arms["off"]["throughput_at_p95_ttft"] == {"rate": 2.0, "bound": "at"}
    # one request in two never got an answer: the finished one must not make the arm look fast
    assert arms["sharing"]["throughput_at_p95_ttft"] == {"rate": 1.0, "bound": "at"}
    assert arms["sharing"]["curve"][1]["ttft_p95_ms"] == 110.0
    assert arms["sharing"]["curve"][1]["ttft_p95_all_ms"] is None
    assert whole["summary"]["throughput_ratios_at_p95_ttft"]["sharing/off"]["value"] == 0.5
    assert [point["arm"] for point in whole["points"]] == ["sharing", "off", "off", "sharing"]
    assert whole["points"][0]["router"] == {"requests": 3}


def test_without_an_objective_nothing_crosses() -> None:
    whole = reports.report({}, [result(0, "off", 1.0, 0, [100])], Objective(), 0)
    assert set(whole["summary"]) == {"arms"}
    assert set(whole["summary"]["arms"]["off"]) == {"curve"}
    assert reports.report({}, [], Objective(ttft_ms=5.0), 0)["summary"]["arms"] == {}


def test_an_interrupted_run_compares_what_all_arms_completed() -> None:
    results = [
        result(0, "own", 1.0, 0, [1]),
        result(1, "off", 1.0, 0, [2]),
        result(2, "own", 2.0, 0, [3]),
        result(3, "off", 2.0, 0, [4]),
        result(4, "off", 1.0, 1, [5]),
        result(5, "own", 1.0, 1, [6]),
        result(6, "own", 2.0, 1, [7]),
    ]
    found = reports.ttft_by_repeat(results, "own")
    assert {rate: np.round(values, 6).tolist() for rate, values in found.items()} == {1.0: [[1.0]], 2.0: [[3.0]]}
    found = reports.ttft_by_repeat(results[:3], "off")
    assert {rate: np.round(values, 6).tolist() for rate, values in found.items()} == {1.0: [[2.0]]}


def test_csv_has_a_line_for_every_request() -> None:
    import csv
    import io

    odd = msgspec.structs.replace(record(1, None), message='said "no", twice\nover', gaps_s=())
    one = result(0, "own", 0.5, 2, [100.0])
    rows = list(
        csv.DictReader(io.StringIO(reports.requests_csv([msgspec.structs.replace(one, records=(record(), odd))])))
    )
    assert [row["outcome"] for row in rows] == ["finished", "timed_out"]
    assert rows[0]["gaps_ms"] == "10.000 50.000"
    assert (rows[0]["arm"], rows[0]["rate"], rows[0]["repeat"], rows[0]["ttft_ms"]) == ("own", "0.5", "2", "100")
    assert (rows[1]["message"], rows[1]["first_token_s"], rows[1]["ttft_ms"]) == ('said "no", twice\nover', "", "")


def test_tables_name_what_was_lost() -> None:
    from rich.console import Console

    slow = msgspec.structs.replace(record(0, 100.0), sent_s=0.04)
    gone = record(1, outcome=Outcome.FAILED, code="capacity")
    figures = point_figures([slow, gone, record(2, None)], 10.0, Objective(ttft_ms=150.0), 20.0)
    results = [
        PointResult(Point(0, "sharing", 1.0, 0), figures, (slow, gone), {}, 2),
        result(1, "off", 1.0, 0, [100.0]),
    ]
    console = Console(width=200, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115 - closed below
    with console.file:
        console.print(reports.view(results, reports.report({}, results, Objective(ttft_ms=150.0), 0)))
        text = console.export_text()
    for part in (
        "1 failed with capacity, 1 timed out",
        "1 requests more than 20 ms late, at most 40 ms",
        "2 prompts were cut",
        "off: p95 TTFT of 150 ms holds beyond 1 requests/s",
        "throughput sharing/off at that p95: at most 1.00",
    ):
        assert part in text, text
    assert "no point" in str(reports.view([], {}))
