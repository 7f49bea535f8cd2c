"""The pure parts of ``kvkin bench pipeline``: ratios with intervals, the policy's choice by link, the JSON and the tables."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from policy_world import BLOCK, LAYERS, LAYOUT

from kvkin.kv.cost import CostSettings
from kvkin.kv.plan import LayerGroup, PlanKind
from kvkin.router.policy_types import PolicySettings
from kvkin.tools import docs_evaluation
from kvkin.tools.bench_pipeline_policy import Situation, layer_tokens_per_s, policy_choice
from kvkin.tools.bench_pipeline_report import SPEEDUP_HEAD, SWEEP_HEAD, speedup_rows, sweep_rows
from kvkin.tools.bench_pipeline_result import (
    SCHEDULES,
    LinkRuns,
    Measured,
    compare,
    context_result,
    rate_result,
    ratio,
)

# attention is free here, so that all arithmetic can be done by hand
FLAT = PolicySettings(cost=CostSettings(context_half_tokens=1e12))
SITUATION = Situation(LAYOUT, LayerGroup(2, 5), 1600, 40)
PRIVATE_S = 0.82  # of 1,640 tokens: 0.5 ms a token, 62.5 us a layer-token
KV_BYTES = 5 * 1600 * 2 * 2 * 16 * 4  # of five layers: two planes of two heads of 16, float32
E_BYTES = 1600 * 64 * 4
OVERHEAD_S = 0.004


def measured(**seconds: float) -> Measured:
    every = {"naive": 3.0, "reuse_only": 1.0, "pipelined": 2.0, "private": 4.0, "ideal": 1.6} | seconds
    moved = {"naive": 10, "reuse_only": 12, "pipelined": 10, "private": 0}
    return Measured(every, moved, transfer_s=1.0, compute_s=1.25, recompute_s=1.0)


# --- ratios ------------------------------------------------------------------------------------------------------------------


def test_a_ratio_is_the_median_of_pairs_with_its_interval() -> None:
    # the ratio of the medians would be 3.0
    middle, low, high = ratio([4.0, 3.0, 10.0], [2.0, 1.0, 1.0], seed=0)
    assert (middle, low, high) == (3.0, 2.0, 10.0)
    assert ratio([4.0] * 5, [2.0] * 5, seed=0) == [2.0, 2.0, 2.0]


def test_one_pair_has_no_interval() -> None:
    assert ratio([3.0], [2.0], seed=0) == [1.5, None, None]


def test_pairs_must_be_pairs() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratio([1.0, 2.0], [1.0], seed=0)


def test_compare_reads_the_name() -> None:
    runs = [measured(), measured(naive=4.0)]
    assert compare(runs, "private_over_pipelined", 0)[0] == 2.0
    assert compare(runs, "naive_over_pipelined", 0)[0] == 1.75
    assert compare(runs, "private_over_compute", 0)[0] == 3.2
    with pytest.raises(KeyError):
        compare(runs, "private_over_nothing", 0)


# --- the policy --------------------------------------------------------------------------------------------------------------


def test_the_rate_is_in_the_unit_of_the_cost_model() -> None:
    assert layer_tokens_per_s(SITUATION, PRIVATE_S, FLAT.cost) == pytest.approx(1640 * LAYERS / PRIVATE_S)
    # a token at context_half_tokens counts twice: the mean token of 1,640 counts 1 + 820 / 4096
    weighted = layer_tokens_per_s(SITUATION, PRIVATE_S, CostSettings())
    assert weighted == pytest.approx(1640 * LAYERS * (1 + 820 / 4096) / PRIVATE_S)


def test_a_slow_link_is_answered_privately_a_fast_one_with_the_group() -> None:
    slow = policy_choice(SITUATION, PRIVATE_S, 1e6, FLAT)
    assert (slow.kind, slow.reused_tokens) == (PlanKind.PRIVATE, 0)
    assert slow.private_s == pytest.approx(PRIVATE_S)
    # the last layer of the suffix follows the last byte
    assert slow.partial_s == pytest.approx((KV_BYTES + E_BYTES) / 1e6 + OVERHEAD_S + 40 * 62.5e-6)
    fast = policy_choice(SITUATION, PRIVATE_S, 1e9, FLAT)
    assert (fast.kind, fast.reused_tokens) == (PlanKind.PARTIAL, 1600)
    computed_s = (3 * 1600 + 8 * 40) * 62.5e-6
    assert fast.partial_s == pytest.approx(E_BYTES / 1e9 + OVERHEAD_S + computed_s)
    assert fast.private_s == pytest.approx(PRIVATE_S)


def test_it_changes_its_mind_once_as_the_link_gets_faster() -> None:
    rates = [1e5 * 1.5**power for power in range(30)]
    kinds = [policy_choice(SITUATION, PRIVATE_S, rate, FLAT).kind for rate in rates]
    turn = kinds.index(PlanKind.PARTIAL)
    assert 0 < turn < len(kinds)
    assert kinds == [PlanKind.PRIVATE] * turn + [PlanKind.PARTIAL] * (len(kinds) - turn)


def test_full_reuse_is_not_offered_and_a_group_at_layer_0_needs_no_states() -> None:
    # full reuse would cost nothing but bytes: at this rate it would win by far
    choice = policy_choice(SITUATION, PRIVATE_S, 1e12, FLAT)
    assert choice.partial_s is not None
    assert choice.partial_s > 3 * 1600 * 62.5e-6
    from_0 = policy_choice(Situation(LAYOUT, LayerGroup(0, 3), 1600, 40), PRIVATE_S, 1e9, FLAT)
    assert from_0.kind is PlanKind.PARTIAL
    assert from_0.partial_s == pytest.approx((3 * 1600 + 8 * 40) * 62.5e-6)


def test_reuse_of_too_few_tokens_is_not_weighed() -> None:
    choice = policy_choice(Situation(LAYOUT, LayerGroup(2, 5), 3 * BLOCK, 8), 0.028, 1e9, FLAT)
    assert (choice.kind, choice.partial_s) == (PlanKind.PRIVATE, None)
    assert "no usable KV" in choice.reason


# --- results -----------------------------------------------------------------------------------------------------------------


def test_what_is_said_of_a_link() -> None:
    # reuse was slower here than the policy believes: 2 s against 0.8 s
    link = LinkRuns(8.0, False, [measured(private=0.8)] * 3)
    found = rate_result(SITUATION, link, PRIVATE_S, FLAT, seed=0)
    assert (found["gbit_per_s"], found["balanced"], found["runs"]) == (8.0, False, 3)
    assert found["ttft_ms"] == {
        "naive": 3000,
        "reuse_only": 1000,
        "pipelined": 2000,
        "private": 800,
        "ideal": 1600,
    }
    policy = found["policy"]
    assert (policy["choice"], policy["was_faster"], policy["choice_over_other"]) == ("partial", False, [2.5, 2.5, 2.5])
    assert policy["estimate_ms"]["private"] == 820
    assert found["naive_over_pipelined"] == [1.5, 1.5, 1.5]
    assert found["pipelined_worse"] is False
    backed_off = rate_result(SITUATION, LinkRuns(0.008, False, link.runs), PRIVATE_S, FLAT, seed=0)["policy"]
    assert (backed_off["choice"], backed_off["was_faster"], backed_off["choice_over_other"][0]) == (
        "private",
        True,
        0.4,
    )


@pytest.mark.parametrize(
    ("naive", "worse"), [([1.8, 1.9, 1.7], True), ([1.8, 2.2, 1.9], False), ([1.9], True), ([2.0], False)]
)
def test_pipelined_is_worse_only_beyond_noise(naive: list[float], worse: bool) -> None:
    link = LinkRuns(1.0, False, [measured(naive=seconds) for seconds in naive])
    assert rate_result(SITUATION, link, PRIVATE_S, FLAT, seed=0)["pipelined_worse"] is worse


def test_what_is_said_of_a_context() -> None:
    links = [
        LinkRuns(0.4, True, [measured(private=0.82), measured(private=0.82, pipelined=0.4)]),
        LinkRuns(0.1, False, [measured(private=0.82)]),
    ]
    found = context_result(SITUATION, links, FLAT, seed=0)
    assert (found["context_tokens"], found["suffix_tokens"], found["group"]) == (1600, 40, [2, 5])
    assert (found["balanced_gbit_per_s"], found["transfer_over_recompute"]) == (0.4, 1.0)
    assert found["layer_tokens_per_s"] == pytest.approx(16000)
    assert found["bytes_pulled"] == {"naive": 10, "reuse_only": 12, "pipelined": 10, "private": 0}
    # of the balanced rate alone
    assert found["pipelined_over_ideal"] == [0.75, 0.25, 1.25]
    assert found["private_over_pipelined"] == [1.23, 0.41, 2.05]
    rows = [(row["schedule"], row["gbit_per_s"], row["runs"]) for row in found["results"]]
    assert rows == [(name, 0.4, 2) for name in SCHEDULES] + [(name, 0.1, 1) for name in SCHEDULES]
    assert found["results"][2]["runs_ms"] == [2000, 400]
    assert [rate["gbit_per_s"] for rate in found["rates"]] == [0.4, 0.1]
    json.dumps(found, allow_nan=False)


# --- tables ------------------------------------------------------------------------------------------------------------------


def whole(rates: list[float]) -> dict[str, Any]:
    links = [LinkRuns(0.4, True, [measured(), measured()]), *(LinkRuns(rate, False, [measured()]) for rate in rates)]
    return {
        "settings": {
            "command": "kvkin bench pipeline --context 1600",
            "sender": "base",
            "receiver": "full",
            "num_layers": LAYERS,
            "group": [2, 5],
            "suffix_tokens": 40,
            "repeats": 2,
            "sweep_repeats": 1,
            "rates": rates,
        },
        "made": {"device": "cpu", "dtype": "float32", "threads": 2},
        "contexts": [context_result(SITUATION, links, FLAT, seed=0)],
    }


def test_tables() -> None:
    result = whole([2.0, 0.1])
    (row,) = speedup_rows(result)
    assert len(row) == len(SPEEDUP_HEAD)
    assert row[:6] == ["1,600", "0.4 Gbit/s (balanced)", "4,000 ms", "2,000 ms", "1,600 ms", "2.00 (2.00 to 2.00)"]
    assert row[6:] == ["2.50", "3.20", "1.25 (1.25 to 1.25)"]
    rows = sweep_rows(result)
    assert {len(each) for each in rows} == {len(SWEEP_HEAD)}
    assert [each[1] for each in rows] == ["0.1 Gbit/s", "0.4 Gbit/s (balanced)", "2 Gbit/s"]
    assert [each[6] for each in rows] == ["1.50", "1.50 (1.50 to 1.50)", "1.50"]


def test_the_document_shows_both_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs_evaluation, "DOCUMENT", tmp_path / "evaluation.md")
    (tmp_path / "evaluation").mkdir()
    text = "a\n<!-- pipeline/one: begin -->\nold\n<!-- pipeline/one: end -->\nb\n"
    for rates, tables in (([2.0, 0.1], 2), ([], 1)):
        (tmp_path / "evaluation" / "one.json").write_text(json.dumps(whole(rates)))
        shown = docs_evaluation.filled(text)
        assert docs_evaluation.filled(shown) == shown
        assert shown.startswith(
            "a\n<!-- pipeline/one: begin -->\n`full` on the KV of `base`, layers [2, 5) of 8 recomputed"
        )
        assert "\n    kvkin bench pipeline --context 1600\n" in shown
        assert "old" not in shown
        assert len(re.findall(r"^\| --- ", shown, re.MULTILINE)) == tables
        assert (
            "| 1,600 | 0.4 Gbit/s (balanced) | 4,000 ms | 2,000 ms | 1,600 ms | 2.00 (2.00 to 2.00) | 2.50 |" in shown
        )
        assert len(re.findall(r"^\| 1,600 ", shown, re.MULTILINE)) == (4 if rates else 1)
