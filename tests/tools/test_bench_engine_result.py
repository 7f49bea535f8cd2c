"""The arithmetic and the tables of ``kvkin bench engine``, on made-up runs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvkin.tools.bench_engine_messages import Event, Reused, Stalled, Timed
from kvkin.tools.bench_engine_report import head, percent_text, tables
from kvkin.tools.bench_engine_result import (
    Answer,
    SystemRound,
    TtftRound,
    disaggregated_result,
    ideal_of,
    overhead_result,
    stall_result,
    ttft_result,
    within,
)
from kvkin.tools.docs_evaluation import engine_text

ARMS = ("plain", "kvkin", "transformers")
SETTINGS: dict[str, Any] = {
    "command": "kvkin bench engine overhead",
    "model": "m",
    "context": [512],
    "suffix": 32,
    "requests": 8,
    "new_tokens": 32,
    "budget": 512,
    "documents": 2,
    "repeats": 3,
    "threads": 2,
    "mode": "compiled",
    "group": [2, 4],
    "num_layers": 8,
    "sender": "s",
    "receiver": "r",
    "members": ["m", "s", "r"],
}
MADE = {"device": "cpu", "dtype": "float32", "versions": {"vllm": "0.32.0"}}


def result(part: str, results: dict[str, Any], engines: dict[str, Any]) -> dict[str, Any]:
    whole = {"part": part, "settings": SETTINGS, "made": MADE, "engines": engines, "results": results}
    again: dict[str, Any] = json.loads(json.dumps(whole))
    return again


def overhead_round(kvkin_s: float) -> dict[tuple[str, str], Timed]:
    seconds = {"plain": 1.0, "kvkin": kvkin_s, "transformers": 2.0}
    prefill = {(arm, "prefill"): Timed(each, 512) for arm, each in seconds.items()}
    # kvkin generated twice the tokens in the time: what counts is the time a token
    decode = {(arm, "decode"): Timed(each, 200 if arm == "kvkin" else 100) for arm, each in seconds.items()}
    return prefill | decode


def test_overhead_is_time_a_token_paired_by_round() -> None:
    found = overhead_result([overhead_round(each) for each in (1.02, 1.04, 1.10)], ARMS, 0)
    middle, low, high = found["kvkin_over_plain"]["prefill"]
    assert (middle, low, high) == (1.04, 1.02, 1.1)
    assert found["kvkin_over_plain"]["decode"][0] == 0.52
    assert found["arms"]["plain"] == {"prefill_tokens_per_s": 512.0, "decode_tokens_per_s": 100.0}
    assert found["arms"]["kvkin"]["prefill_tokens_per_s"] == round(512 / 1.04, 2)
    assert found["within"] == {"prefill": False, "decode": True}
    assert found["transformers_over_plain"]["prefill"][0] == 2.0
    assert found["runs_s"]["kvkin"]["prefill"] == [1.02, 1.04, 1.1]


@pytest.mark.parametrize(
    ("found", "kept"),
    [([1.02, 0.99, 1.08], True), ([1.02, 0.99, 1.081], False), ([1.0, None, None], None)],
)
def test_the_aim_is_kept_by_the_whole_interval(found: list[float | None], kept: bool | None) -> None:
    assert within(found) is kept


def stall_round(partial_s: float) -> dict[Event, Stalled]:
    return {
        "alone": Stalled((0.1,) * 10, 1.0),
        "prefill": Stalled((0.1, 1.0), 4.0),
        "partial": Stalled((0.1, partial_s), 2.0),
    }


@pytest.mark.parametrize(("partial_s", "worse"), [((0.5, 0.6, 0.7), False), ((1.5, 1.6, 1.7), True), ((1.5,), True)])
def test_stalls_are_compared_by_their_p99(partial_s: tuple[float, ...], worse: bool) -> None:
    found = stall_result([stall_round(each) for each in partial_s], 0)
    assert found["partial_worse"] is worse
    assert found["events"]["alone"]["p99_ms"] == 100.0
    assert found["events"]["prefill"]["max_ms"] == 1000.0
    assert found["events"]["partial"]["gaps"] == 2 * len(partial_s)
    assert found["p99_ms_by_round"]["prefill"] == [991.0] * len(partial_s)
    expected = sorted((0.1 + 0.99 * (each - 0.1)) / 0.991 for each in partial_s)[len(partial_s) // 2]
    assert found["partial_over_prefill"][0] == pytest.approx(expected, abs=1e-4)


def test_ideal_overlaps_the_transfer_with_the_recompute() -> None:
    assert ideal_of(Reused(9.0, 1, transfer_s=3.0, states_s=0.5, compute_s=1.0, last_layer_s=0.25)) == 3.25
    assert ideal_of(Reused(9.0, 1, transfer_s=1.0, states_s=0.5, compute_s=2.0, last_layer_s=0.25)) == 2.75


def ttft_round(seconds: float) -> TtftRound:
    parts = {"transfer_s": 0.5, "states_s": 0.1, "compute_s": 0.4, "last_layer_s": 0.0}
    return TtftRound(
        Timed(4.0, 544), {"exact": Reused(seconds, 7, **parts), "partial": Reused(2 * seconds, 5, **parts)}
    )


def test_first_token_next_to_the_ideal() -> None:
    (context,) = ttft_result({512: [ttft_round(each) for each in (1.0, 2.0, 1.0)]}, 0)["contexts"]
    exact, partial = context["shapes"]["exact"], context["shapes"]["partial"]
    assert (context["context_tokens"], context["prefill_ms"]) == (512, 4000.0)
    assert (exact["ttft_ms"], partial["ttft_ms"], exact["ideal_ms"]) == (1000.0, 2000.0, 500.0)
    assert exact["prefill_over_ttft"] == [4.0, 2.0, 4.0]
    assert exact["prefill_over_ideal"][0] == 8.0
    assert partial["ttft_over_ideal"][0] == 4.0
    assert (exact["bytes_pulled"], exact["parts_ms"]["states"]) == (7, 100.0)


def system_round(first_s: float, seconds: float, token: int, reused: int) -> SystemRound:
    answer = Answer("m", 544, (1, token), first_s, seconds, reused, "exact")
    return SystemRound((answer, Answer("s", 544, (1, 2), first_s, seconds, reused, "partial")), seconds)


def test_systems_are_compared_round_by_round() -> None:
    rounds = [
        {"kvkin": system_round(1.0, 2.0, 5, 272), "vllm": system_round(2.0, 4.0, 5, 0)},
        {"kvkin": system_round(1.0, 2.0, 5, 272), "vllm": system_round(3.0, 4.0, 6, 0)},
    ]
    found = disaggregated_result({"shared": rounds}, 0)["workloads"]["shared"]
    assert found["systems"]["kvkin"]["ttft_ms"] == 1000.0
    assert found["systems"]["vllm"]["tokens_per_s"] == 1.0
    assert found["systems"]["kvkin"]["reused_share"] == 0.5
    assert found["systems"]["kvkin"]["kinds"] == {"exact": 2, "partial": 2}
    assert found["ttft_vllm_over_kvkin"] == [2.5, 2.0, 3.0]
    assert found["throughput_kvkin_over_vllm"][0] == 2.0
    assert found["same_answers"] == 0.75


# --- what is shown -----------------------------------------------------------------------------------------------------------

ENGINES = {arm: {"prefix_caching": arm != "transformers"} for arm in ARMS}
SYSTEMS = {
    "kvkin": {"processes": {"router": 1, "prefill": 1, "decode": 3}},
    "vllm": {"processes": {"proxy": 0, "prefill": 3, "decode": 3}},
}
RESULTS = {
    "overhead": result("overhead", overhead_result([overhead_round(each) for each in (1.02, 1.04)], ARMS, 0), ENGINES),
    "stall": result("stall", stall_result([stall_round(0.5)], 0), {}),
    "ttft": result("ttft", ttft_result({512: [ttft_round(1.0)]}, 0), {}),
    "disaggregated": result(
        "disaggregated",
        disaggregated_result(
            {"one model": [{"kvkin": system_round(1.0, 2.0, 5, 272), "vllm": system_round(2.0, 4.0, 5, 0)}]}, 0
        ),
        SYSTEMS,
    ),
}
SAID = {
    "overhead": ("vLLM under kvkin", "prefill +3.0 % (+2.0 to +4.0 %) (kept)", "on, new prompts", "off"),
    "stall": ("vLLM prefills", "it does not stall the others more", "2,000 ms"),
    "ttft": ("exact", "partial", "4.00", "1,000 ms"),
    "disaggregated": ("vLLM, NIXL", "kvkin: 1 router, 1 prefill, 3 decode; vllm: 3 prefill, 3 decode", "50%"),
}


@pytest.mark.parametrize("part", RESULTS)
def test_tables_and_documents_say_what_was_found(part: str) -> None:
    found = RESULTS[part]
    assert "vLLM 0.32.0 compiled. Medians of 3 interleaved round(s)." in head(found)
    for shown in tables(found):
        assert all(len(row) == len(shown.head) for row in shown.rows)
    text = engine_text(found)
    for said in SAID[part]:
        assert said in text
    assert f"    {SETTINGS['command']}\n" in text


def test_percentages() -> None:
    assert percent_text([1.021, 0.996, 1.045]) == "+2.1 % (-0.4 to +4.5 %)"
    assert percent_text([0.97, None, None]) == "-3.0 %"
    assert percent_text([None, None, None]) == "-"
