"""vLLM passes the engine contract on a Llama family of LoRA adapters: what it computes, and how it behaves step by step.

The contract's checks of *which* units run before missing data are the reference engine's: vLLM takes a load as a whole, so the last
segment waits for all of it. What holds instead is here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import check_engine_drift as drift
import check_engine_steps as steps
import check_engine_turns as turns
import pytest
from check_engine import GEOMETRIES, SHAPES, check_shape
from check_engine_steps import CONTEXT, CONTEXT_CHUNKS, PARTIAL, PRIVATE, TOTAL, Run
from engine_harness import (
    NUM_LAYERS,
    Recorder,
    computed,
    exact,
    greedy,
    partial,
    plan_of,
    prompt,
    request,
    run_until_idle,
    step_until,
    token_wise,
)
from vllm_bench import SharedEngine, lora_family
from vllm_checks import check_batch_in_pieces, check_leaves_nothing

from kvkin.kv.errors import InvalidRequest
from kvkin.kv.generation import Sampling
from kvkin.kv.pulls import E_LAYER

pytestmark = pytest.mark.vllm

REST = computed(CONTEXT, TOTAL)
PLANS = {
    "private": PRIVATE,
    "exact": plan_of(exact(0, CONTEXT, "twin"), REST),
    "partial": PARTIAL,
    "lowest": plan_of(partial(0, CONTEXT, (0, 2), "sender"), REST),
    "highest": plan_of(partial(0, CONTEXT, (3, NUM_LAYERS), "sender"), REST),
    "full reuse": plan_of(exact(0, CONTEXT, "sender"), REST),
    "token-wise": plan_of(token_wise(0, CONTEXT, [1, 7, 8, 20, 39], "sender"), REST),
    "computed between": plan_of(exact(0, 8, "twin"), computed(8, 24), partial(24, CONTEXT, (2, 4), "other"), REST),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    engine = SharedEngine(lora_family("llama", tmp_path_factory.mktemp("family")))
    yield engine
    engine.close()


@pytest.mark.parametrize("shape", SHAPES)
def test_plan_shape(shared: SharedEngine, shape: str) -> None:
    check_shape(shared.make, shared.family.name, shape, GEOMETRIES)


# --- step by step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layer", "chunk"), [(0, 0), (3, 2), (4, 4)])
def test_a_load_waits_for_a_layer_and_recomputes_meanwhile(shared: SharedEngine, layer: int, chunk: int) -> None:
    run = Run(shared.make, shared.family.name)
    data = run.data("r", run.submit("r"))
    held_back = [arrival for arrival in data if (arrival.layer, arrival.chunk) == (layer, chunk)]
    run.feed("r", [arrival for arrival in data if arrival is not held_back[0]])
    run_until_idle(run.bench)
    assert run.units("r") == {(index, group) for index in CONTEXT_CHUNKS for group in (1, 2)}
    run.feed("r", held_back)
    run_until_idle(run.bench)
    run.assert_result("r")


@pytest.mark.parametrize("chunk", [0, 2, 4])
def test_recompute_goes_as_far_as_e_arrived(shared: SharedEngine, chunk: int) -> None:
    run = Run(shared.make, shared.family.name)
    data = run.data("r", run.submit("r"))
    held_back = [arrival for arrival in data if (arrival.layer, arrival.chunk) == (E_LAYER, chunk)]
    run.feed("r", [arrival for arrival in data if arrival is not held_back[0]])
    run_until_idle(run.bench)
    assert run.units("r") == {(index, layer) for index in range(chunk) for layer in (1, 2)}
    run.feed("r", held_back)
    run_until_idle(run.bench)
    run.assert_result("r")


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_arrivals(shared: SharedEngine, seed: int) -> None:
    source = random.Random(seed)
    names = [name for name in SHAPES if not name.startswith("private")]
    steps.check_arrival_order(
        shared.make,
        shared.family.name,
        source.choice(names),
        source.choice(GEOMETRIES),
        lambda arrivals: source.sample(arrivals, len(arrivals)),
        lambda: source.randrange(4),
    )


@pytest.mark.parametrize("plan", ["partial", "token-wise"])
def test_repeated_data(shared: SharedEngine, plan: str) -> None:
    steps.check_repeated_data(shared.make, shared.family.name, PLANS[plan])


@pytest.mark.parametrize("phase", steps.PHASES)
def test_cancel(shared: SharedEngine, phase: str) -> None:
    steps.check_cancel(shared.make, shared.family.name, phase)


@pytest.mark.parametrize("phase", steps.PHASES)
def test_replan_after_a_failed_source(shared: SharedEngine, phase: str) -> None:
    steps.check_replan(shared.make, shared.family.name, phase)


@pytest.mark.parametrize("own_tokens", [16, CONTEXT])
def test_replan_keeps_own_blocks(shared: SharedEngine, own_tokens: int) -> None:
    steps.check_replan_keeps_own_blocks(shared.make, shared.family.name, own_tokens)


def test_prefill_order(shared: SharedEngine) -> None:
    steps.check_prefill_order(shared.make, shared.family.name, chunk_by_chunk=False)


def test_ends(shared: SharedEngine) -> None:
    steps.check_ends(shared.make, shared.family.name)


def test_refusals(shared: SharedEngine) -> None:
    steps.check_refusals(shared.make, shared.family.name)


def test_errors_stay_inside_their_request(shared: SharedEngine) -> None:
    steps.check_errors_stay_inside(shared.make, shared.family.name)


def test_a_cancelled_id_is_free(shared: SharedEngine) -> None:
    steps.check_cancelled_id_is_free(shared.make, shared.family.name)


def test_close(shared: SharedEngine) -> None:
    steps.check_close(shared.make, shared.family.name)


# --- several at once -------------------------------------------------------------------------------------------------------


def test_eight_requests_with_different_plans(shared: SharedEngine) -> None:
    """One batch: base and two adapters, every kind of plan, data in pieces; each equals its plan's oracle."""
    models = ["receiver", "other", "sender", "other", "receiver", "upper", "other", "receiver"]
    check_batch_in_pieces(shared, PLANS, models)


def test_others_decode_while_a_load_is_recomputed(shared: SharedEngine) -> None:
    """Of two loads and seven decodes: between two slices every decode gets a token, and a slice is a chunk at most."""
    run = Run(shared.make, shared.family.name)
    decodes = [f"d{index}" for index in range(7)]
    for index, name in enumerate(decodes):
        run.submit(name, plan_of(computed(0, 9)), "other" if index % 2 else "receiver", seed=index, sampling=greedy(60))
    step_until(run.bench, lambda: all(len(run.recorder.of(name).tokens) >= 2 for name in decodes))
    for name, seed in (("one", 20), ("two", 21)):
        run.feed(name, run.data(name, run.submit(name, seed=seed, sampling=greedy(3))))
    begun = len(run.recorder.sequence)
    step_until(run.bench, lambda: all(run.recorder.of(name).prefilled for name in ("one", "two")))
    seen = {"one": 0, "two": 0}
    since, slices = (
        set(decodes),
        [],
    )  # who got a token since the last unit; of each slice, who did before it, and its units
    for name, what in run.recorder.sequence[begun:]:
        if what == "token":
            since.add(name)
        elif what == "unit" and name in seen:
            unit = run.recorder.of(name).units[seen[name]]
            seen[name] += 1
            if unit.recompute:
                if since:
                    slices.append((frozenset(since), []))
                slices[-1][1].append((name, unit.chunk))
                since = set()
    assert len(slices) >= 2 * len(CONTEXT_CHUNKS), "chunks of eight rows, one to a step"
    assert all(len(set(units)) == 1 and len(units) == 2 for _, units in slices), (
        "a chunk goes through the group's layers"
    )
    assert all(tokens >= set(decodes) for tokens, _ in slices), "everybody got a token in between"
    run_until_idle(run.bench)
    for name in (*decodes, "one", "two"):
        run.assert_result(name)


def test_a_seed_repeats_whatever_else_runs(shared: SharedEngine) -> None:
    def tokens(others: int) -> list[int]:
        run = Run(shared.make, shared.family.name)
        sampling = Sampling(temperature=0.9, top_k=40, seed=17, max_tokens=12, ignore_eos=True)
        for index in range(others):
            other = Sampling(temperature=1.5, seed=index, max_tokens=9, ignore_eos=True)
            run.submit(f"o{index}", plan_of(computed(0, 20)), "other", seed=index, sampling=other)
        run.submit("r", plan_of(computed(0, 30)), sampling=sampling)
        run_until_idle(run.bench)
        return run.recorder.of("r").tokens

    alone = tokens(0)
    assert len(alone) == 12
    assert alone == tokens(3)


# --- memory ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["queued", "waiting", "computing", "decoding"])
def test_what_ends_early_leaves_no_block(shared: SharedEngine, phase: str) -> None:
    check_leaves_nothing(shared, phase)


def test_a_finished_requests_blocks_are_kept_until_they_are_released(shared: SharedEngine) -> None:
    shared.settle()
    free = shared.free_blocks()
    run = Run(shared.make, shared.family.name)
    run.feed("r", run.data("r", run.submit("r")))
    run_until_idle(run.bench)
    space = run.recorder.of("r").space
    assert space.has_kv(0, TOTAL)
    assert shared.free_blocks() < free
    run.assert_result("r")
    space.release()
    space.release()
    run_until_idle(run.bench)
    assert shared.free_blocks() == free
    with pytest.raises(RuntimeError, match="given back"):
        space.read(0, 0, 8)


def test_blocks_of_a_space_that_nobody_holds_are_given_back(shared: SharedEngine) -> None:
    shared.settle()
    free = shared.free_blocks()
    run = Run(shared.make, shared.family.name)
    run.submit("r", PRIVATE)
    run_until_idle(run.bench)
    assert shared.free_blocks() < free
    run.recorder.heard.clear()
    run_until_idle(run.bench)
    assert shared.free_blocks() == free


# --- turns, distributions ----------------------------------------------------------------------------------------------------


def test_three_turns_of_two_agents(shared: SharedEngine) -> None:
    turns.check_three_turns_of_two_agents(shared.make, shared.family.name)


def test_exact_turns_equal_one_prefill(shared: SharedEngine) -> None:
    turns.check_exact_turns_equal_one_prefill(shared.make, shared.family.name)


def test_a_chain_of_approximations(shared: SharedEngine) -> None:
    turns.check_a_chain_of_approximations(shared.make, shared.family.name)


@pytest.mark.parametrize("plan", ["private", "partial", "full reuse", "token-wise"])
def test_first_distribution(shared: SharedEngine, plan: str) -> None:
    drift.check_first_distribution(shared.make, shared.family.name, PLANS[plan], greedy(3))


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=1.7, top_k=2, top_p=0.3, seed=1, max_tokens=2), Sampling(max_tokens=1, logprobs=1)],
    ids=["filtered", "one token"],
)
def test_first_distribution_is_the_models_own(shared: SharedEngine, sampling: Sampling) -> None:
    drift.check_first_distribution(shared.make, shared.family.name, PARTIAL, sampling)


def test_first_distribution_after_a_replan(shared: SharedEngine) -> None:
    drift.check_first_distribution_after_a_replan(shared.make, shared.family.name)


def test_first_distribution_only_on_request(shared: SharedEngine) -> None:
    drift.check_first_distribution_only_on_request(shared.make, shared.family.name)


def test_taps_that_the_engine_has_not_are_refused(shared: SharedEngine) -> None:
    run = Run(shared.make, shared.family.name)
    with pytest.raises(InvalidRequest, match="taps"):
        run.bench.engine.submit(request("r", prompt(TOTAL), PRIVATE, taps=(3,)), Recorder())
