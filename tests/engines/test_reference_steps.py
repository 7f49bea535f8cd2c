"""The reference engine, step by step: the second part of the engine contract."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import check_engine_steps as steps
import pytest
from check_engine import GEOMETRIES, SHAPES
from engine_harness import (
    Heard,
    Recorder,
    computed,
    family,
    greedy,
    plan_of,
    prompt,
    request,
    run_until_idle,
    token_wise,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_bench import make_reference
from tiny_models import make_tiny_tokenizer

from kvkin.engines.layer_ops import ReferenceOps
from kvkin.engines.reference import LoadedModel, ReferenceEngine
from kvkin.engines.text import load_tokenizer
from kvkin.kv.errors import Cancelled, NodeUnavailable
from kvkin.kv.generation import Sampling


@pytest.mark.parametrize("layer", [0, 3, 4])
@pytest.mark.parametrize("chunk", [0, 2, 4])
def test_layers_below_a_held_back_one_are_done(layer: int, chunk: int) -> None:
    steps.check_held_layer(make_reference, "mistral", layer, chunk)


@pytest.mark.parametrize("chunk", [0, 2, 4])
def test_recompute_goes_as_far_as_e_arrived(chunk: int) -> None:
    steps.check_held_e(make_reference, "llama", chunk)


def test_a_group_from_layer_zero_starts_without_data() -> None:
    steps.check_starts_without_data(make_reference, "qwen3")


@settings(max_examples=25)
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


def test_its_own_thread() -> None:
    """The engine with its own thread: requests from several threads, a call between two steps, and an orderly end."""
    models = family("llama")
    loaded = {name: LoadedModel(ReferenceOps(model), None, frozenset()) for name, model in models.items()}
    engine = ReferenceEngine(loaded, block_size=8, chunk_tokens=8)
    ended = threading.Semaphore(0)

    class Waiter(Recorder):
        def finished(self, *arguments: Any) -> None:
            super().finished(*arguments)
            ended.release()

        def failed(self, *arguments: Any) -> None:
            super().failed(*arguments)
            ended.release()

    recorder = Waiter()
    names = [f"r{index}" for index in range(4)]
    threads = [
        threading.Thread(target=engine.submit, args=(request(name, prompt(steps.TOTAL), steps.PRIVATE), recorder))
        for name in names
    ]
    for thread in threads:
        thread.start()
    assert engine.call(threading.get_ident).result(timeout=60) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda: 1 // 0).result(timeout=60)
    for thread in threads:
        thread.join()
    assert all(ended.acquire(timeout=60) for _ in names)
    waiting = Waiter()
    engine.submit(request("waits", prompt(steps.TOTAL), steps.PARTIAL), waiting)
    engine.close()
    engine.close()
    assert isinstance(waiting.of("waits").error, Cancelled)
    assert len({tuple(recorder.of(name).tokens) for name in names}) == 1
    assert all(recorder.of(name).error is None for name in names)
    with pytest.raises(NodeUnavailable):
        engine.call(lambda: 1).result(timeout=60)


def test_stop_strings_and_text(tmp_path: Path) -> None:
    """The streamed text adds up; an answer ends before a stop string, with the tokens that it took to see it."""
    tokenizer = load_tokenizer(make_tiny_tokenizer(tmp_path))

    def answer(**options: Any) -> Heard:
        bench = make_reference(family("llama"), block_size=8, chunk_tokens=16, tokenizer=tokenizer)
        recorder = Recorder()
        bench.engine.submit(
            request("r", prompt(steps.TOTAL), steps.PRIVATE, sampling=greedy(24, logprobs=1, **options)), recorder
        )
        run_until_idle(bench)
        heard = recorder.of("r")
        assert heard.result is not None
        assert heard.text == heard.result.text
        assert heard.result.token_ids == tuple(heard.tokens)
        assert heard.result.logprobs == tuple(heard.logprobs)
        return heard

    whole = answer()
    assert whole.result.finish_reason == "length"
    assert whole.text == tokenizer.decode(whole.tokens, skip_special_tokens=True)
    stop = whole.text[9:12]
    stopped = answer(stop=("never seen", stop))
    assert stopped.result.finish_reason == "stop"
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert stopped.tokens == whole.tokens[: len(stopped.tokens)]
    assert len(stopped.tokens) < len(whole.tokens)
    assert stop in tokenizer.decode(stopped.tokens)


def test_a_seed_repeats_whatever_else_runs() -> None:
    def tokens(others: int) -> list[int]:
        bench = make_reference(family("qwen2"), block_size=8, chunk_tokens=8)
        recorder = Recorder()
        sampling = Sampling(temperature=0.9, top_k=40, seed=17, max_tokens=12, ignore_eos=True)
        for index in range(others):
            other = Sampling(temperature=1.5, seed=index, max_tokens=9, ignore_eos=True)
            bench.engine.submit(
                request(f"o{index}", prompt(20, index), plan_of(computed(0, 20)), sampling=other), recorder
            )
        bench.engine.submit(request("r", prompt(30), plan_of(computed(0, 30)), sampling=sampling), recorder)
        run_until_idle(bench)
        return recorder.of("r").tokens

    assert tokens(0) == tokens(3)
