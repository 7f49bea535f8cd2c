"""The reference engine, step by step: the second part of the engine contract."""

from __future__ import annotations

import itertools

import check_engine_steps as steps
import pytest
from check_engine import GEOMETRIES, SHAPES
from engine_harness import computed, plan_of, token_wise
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_bench import make_reference


@pytest.mark.parametrize("layer", [0, 3, 4])
@pytest.mark.parametrize("chunk", [0, 2, 4])
def test_layers_below_a_held_back_one_are_done(layer: int, chunk: int) -> None:
    steps.check_held_layer(make_reference, "mistral", layer, chunk)


@pytest.mark.parametrize("chunk", [0, 2, 4])
def test_recompute_goes_as_far_as_e_arrived(chunk: int) -> None:
    steps.check_held_e(make_reference, "llama", chunk)


def test_a_group_from_layer_zero_starts_without_data() -> None:
    steps.check_starts_without_data(make_reference, "qwen3")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_order_of_arrivals(data: st.DataObject) -> None:
    steps.check_arrival_order(
        make_reference,
        data.draw(st.sampled_from(["mistral", "qwen3"])),
        data.draw(st.sampled_from([name for name in SHAPES if not name.startswith("private")])),
        data.draw(st.sampled_from(GEOMETRIES)),
        lambda arrivals: data.draw(st.permutations(arrivals)),
        lambda: data.draw(st.integers(0, 3)),
    )


@pytest.mark.parametrize(
    "plan",
    [
        steps.PARTIAL,
        plan_of(token_wise(0, steps.CONTEXT, [1, 7, 8, 20, 39], "sender"), computed(steps.CONTEXT, steps.TOTAL)),
    ],
    ids=["partial", "token-wise"],
)
def test_repeated_data(plan: steps.ReusePlan) -> None:
    steps.check_repeated_data(make_reference, "llama", plan)


def test_requests_interleave_strictly_in_turns() -> None:
    sequence = steps.check_interleaving(make_reference, "mixtral")
    # round robin: between two tokens of the decode, each other request advances by at most one unit or token
    places = [at for at, what in enumerate(sequence) if what == ("decode", "token")]
    for before, after in itertools.pairwise(places):
        between = [name for name, what in sequence[before + 1 : after] if what in ("unit", "token")]
        assert len(between) == len(set(between)) <= 2


@pytest.mark.parametrize("phase", steps.PHASES)
def test_cancel(phase: str) -> None:
    steps.check_cancel(make_reference, "llama", phase)


@pytest.mark.parametrize("phase", steps.PHASES)
def test_replan_after_a_failed_source(phase: str) -> None:
    steps.check_replan(make_reference, "mistral", phase)


@pytest.mark.parametrize("own_tokens", [16, steps.CONTEXT])
def test_replan_keeps_own_blocks(own_tokens: int) -> None:
    steps.check_replan_keeps_own_blocks(make_reference, "qwen2", own_tokens)


def test_prefill_order() -> None:
    steps.check_prefill_order(make_reference, "mixtral")


def test_ends() -> None:
    steps.check_ends(make_reference, "llama")


def test_refusals() -> None:
    steps.check_refusals(make_reference, "llama")


def test_errors_stay_inside_their_request() -> None:
    steps.check_errors_stay_inside(make_reference, "llama")


def test_a_cancelled_id_is_free() -> None:
    steps.check_cancelled_id_is_free(make_reference, "llama")


def test_close() -> None:
    steps.check_close(make_reference, "llama")
