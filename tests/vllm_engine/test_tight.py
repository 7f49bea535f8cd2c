"""vLLM's own ways under load: chunked prefill, its prefix cache, preemption, few blocks. Answers stay the plan's, counts stay true."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from check_engine_steps import BLOCK, CHUNK, CONTEXT, PARTIAL, PRIVATE, TOTAL, Run
from engine_harness import (
    NUM_LAYERS,
    TAPS,
    arrivals,
    computed,
    contexts,
    exact,
    greedy,
    partial,
    plan_of,
    prompt,
    run_until_idle,
    token_wise,
)
from vllm_bench import SharedEngine, VllmBench, lora_family

from kvkin.kv.errors import CapacityError
from kvkin.kv.execution import PlanExecution
from kvkin.kv.plan import PlanKind

pytestmark = pytest.mark.vllm

PAGE = 32  # tokens of a block in vLLM's cache
LONG_CONTEXT, LONG = 88, 101
LONG_PLANS = {
    "private": plan_of(computed(0, LONG)),
    "partial": plan_of(partial(0, LONG_CONTEXT, (1, 3), "sender"), computed(LONG_CONTEXT, LONG)),
    "exact": plan_of(exact(0, LONG_CONTEXT, "twin"), computed(LONG_CONTEXT, LONG)),
    "token-wise": plan_of(token_wise(0, LONG_CONTEXT, [3, 40, 41, 87], "sender"), computed(LONG_CONTEXT, LONG)),
    "long suffix": plan_of(partial(0, 24, (2, 4), "other"), computed(24, LONG)),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    """Steps of at most 16 tokens, 14 blocks of 32, the prefix cache on."""
    family = lora_family("llama", tmp_path_factory.mktemp("family"))
    options = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 15, "enable_prefix_caching": True}
    engine = SharedEngine(family, max_model_len=320, **options)
    yield engine
    engine.close()


def lineages(shared: SharedEngine, tag: str) -> dict[str, bytes]:
    return {name: f"{name} {tag}".encode() for name in shared.family.members}


class Tagged:
    """Makes engines whose blocks vLLM's cache keeps under ``tag``: later engines with the same tag find them."""

    def __init__(self, shared: SharedEngine, tag: str) -> None:
        self._shared, self._lineages = shared, lineages(shared, tag)

    def __call__(self, models, *, block_size, chunk_tokens, eos=frozenset()) -> VllmBench:  # type: ignore[no-untyped-def]
        return self._shared.make(
            models, block_size=block_size, chunk_tokens=chunk_tokens, eos=eos, lineages=self._lineages
        )


@pytest.mark.parametrize("name", LONG_PLANS)
def test_chunked_prefill(shared: SharedEngine, name: str) -> None:
    run = Run(shared.make, shared.family.name)
    run.feed(name, run.data(name, run.submit(name, LONG_PLANS[name], sampling=greedy(6))))
    run_until_idle(run.bench)
    run.assert_result(name)


def test_requests_that_do_not_fit_together(shared: SharedEngine) -> None:
    """Six requests of four blocks or more, growing, in fourteen blocks: some are preempted, and all give their plan's answer."""
    run = Run(shared.make, shared.family.name)
    names = {f"{name} {index}": plan for index in range(2) for name, plan in list(LONG_PLANS.items())[:3]}
    for seed, (name, plan) in enumerate(names.items()):
        run.feed(name, run.data(name, run.submit(name, plan, seed=seed, sampling=greedy(60), taps=())))
    preempted = 0
    while run.bench.step():
        scheduler = shared.runtime.scheduler
        preempted += sum(entry.load.swapped for entry in scheduler.entries.values())
    for name in names:
        heard = run.recorder.of(name)
        assert heard.error is None, heard.error
        assert heard.result is not None
        assert len(heard.tokens) == 60
    assert preempted, "the test is about preemption"
    # KV that vLLM took back to make room is not there to be compared: tokens and log probabilities are
    for name in names:
        assert_tokens_only(run, name)


def test_preempted_requests_whose_load_finds_no_room_end_as_such(shared: SharedEngine) -> None:
    """Room for not quite one copy: who is preempted under a plan with a load ends, to be tried again; private ones just go on."""
    shared.settle()
    free = shared.free_blocks()
    layout = shared.make(block_size=BLOCK, chunk_tokens=CHUNK).engine.layout("receiver")
    room = LONG_CONTEXT * NUM_LAYERS * layout.kv_token_bytes
    run = Run(shared.make, shared.family.name, swap_bytes=room - 1)
    names = {f"{name} {index}": plan for index in range(2) for name, plan in list(LONG_PLANS.items())[:3]}
    for seed, (name, plan) in enumerate(names.items()):
        run.feed(name, run.data(name, run.submit(name, plan, seed=seed, sampling=greedy(60), taps=())))
    swaps = shared.runtime.scheduler.swaps
    while run.bench.step():
        assert not swaps.used
    ended = {name for name in names if run.recorder.of(name).error is not None}
    assert ended, "the test is about those that found no room"
    assert swaps.refused == len(ended)
    for name in names:
        error = run.recorder.of(name).error
        if name in ended:
            assert not name.startswith("private")
            assert isinstance(error, CapacityError), error
        else:
            assert_tokens_only(run, name)
    run.recorder.heard.clear()
    run_until_idle(run.bench)
    assert (shared.free_blocks(), swaps.used) == (free, 0)


def test_hidden_states_beyond_their_memory_are_not_kept(shared: SharedEngine) -> None:
    layout = shared.make(block_size=BLOCK, chunk_tokens=CHUNK).engine.layout("receiver")
    tokens = TOTAL + 4
    room = len(TAPS) * tokens * layout.hidden_size * layout.dtype_bytes
    run = Run(shared.make, shared.family.name, e_bytes=2 * room - 1)
    for seed, name in enumerate(("first", "second")):
        run.submit(name, PRIVATE, seed=seed, sampling=greedy(4))
    run_until_idle(run.bench)
    spaces = {name: run.recorder.of(name).space for name in ("first", "second")}
    assert [spaces[name].has_e(TAPS[0], 0, TOTAL) for name in ("first", "second")] == [True, False]
    run.assert_result("first")
    assert_tokens_only(run, "second")
    assert shared.runtime.scheduler.states.refused == 1
    run.submit("order", PRIVATE, sampling=None)
    run_until_idle(run.bench)
    assert run.recorder.of("order").space.has_e(TAPS[0], 0, TOTAL), "an order is for them"
    spaces["first"].release()
    run_until_idle(run.bench)
    run.submit("third", PRIVATE, seed=2, sampling=greedy(4))
    run_until_idle(run.bench)
    run.assert_result("third")
    assert run.recorder.of("third").space.has_e(TAPS[0], 0, TOTAL)


def assert_tokens_only(run: Run, name: str) -> None:
    import oracle
    from check_engine import Tally, assert_each_token_counted_once, assert_tokens

    model, token_ids, plan, seed = run.submitted[name]
    heard = run.recorder.of(name)
    state = oracle.execute(run.models[model], token_ids, plan, contexts(run.arch, len(token_ids), seed))
    _, choices, logits = oracle.generate(run.models[model], state, len(heard.tokens), heard.tokens)
    tally = Tally()
    assert_tokens(heard, choices, logits, tally)
    tally.close()
    assert_each_token_counted_once(heard, plan)


def test_waiting_requests_get_the_blocks_of_unread_answers(shared: SharedEngine) -> None:
    """Nobody releases anything: answers that are kept for readers give way, oldest first, and say so."""
    run = Run(shared.make, shared.family.name)
    names = [f"r{index}" for index in range(6)]
    for index, name in enumerate(names):
        run.submit(name, LONG_PLANS["private"], seed=index, sampling=greedy(3))
        run_until_idle(run.bench)
    spaces = [run.recorder.of(name).space for name in names]
    assert all(run.recorder.of(name).result is not None for name in names)
    assert not spaces[0].has_kv(0, 8)
    with pytest.raises(RuntimeError, match="given back"):
        spaces[0].read(0, 0, 8)
    assert spaces[-1].has_kv(0, LONG)
    run.assert_result(names[-1])


# --- the prefix cache ----------------------------------------------------------------------------------------------------


def test_what_the_cache_serves_is_not_counted_as_computed(shared: SharedEngine) -> None:
    run = Run(Tagged(shared, "again"), shared.family.name)
    for name in ("first", "second"):
        run.submit(name, LONG_PLANS["private"], sampling=greedy(3), taps=())
        run_until_idle(run.bench)
        assert_tokens_only(run, name)
    first, second = (run.recorder.of(name).counters for name in ("first", "second"))
    assert (first.cached_tokens, first.computed_layer_tokens) == (0, LONG * NUM_LAYERS)
    whole = LONG // PAGE * PAGE
    assert (second.cached_tokens, second.computed_layer_tokens) == (whole, (LONG - whole) * NUM_LAYERS)
    assert second.computed_positions == sum(range(whole, LONG)) * NUM_LAYERS


def test_a_request_that_may_reuse_nothing_is_not_served_by_the_cache_either(shared: SharedEngine) -> None:
    """`reuse: off`: it finds nothing, and nobody finds what it left."""
    run = Run(Tagged(shared, "off"), shared.family.name)
    for name, allowed in (("usual", True), ("off", False), ("off again", False), ("usual again", True)):
        run.submit(name, LONG_PLANS["private"], sampling=greedy(3), taps=(), engine_cache=allowed)
        run_until_idle(run.bench)
        assert_tokens_only(run, name)
    cached = {name: run.recorder.of(name).counters.cached_tokens for name in run.submitted}
    assert cached == {"usual": 0, "off": 0, "off again": 0, "usual again": LONG // PAGE * PAGE}


@pytest.mark.parametrize("name", ["partial", "exact", "token-wise"])
def test_a_plan_again(shared: SharedEngine, name: str) -> None:
    """Cached blocks are neither written nor computed; the unaligned rest of the context is; the answer is the same."""
    run = Run(Tagged(shared, f"plan again {name}"), shared.family.name)
    plan = LONG_PLANS[name]
    for request_id in ("first", "second"):
        run.feed(request_id, run.data(request_id, run.submit(request_id, plan, sampling=greedy(4), taps=())))
        run_until_idle(run.bench)
        assert_tokens_only(run, request_id)
    counters = run.recorder.of("second").counters
    whole = LONG // PAGE * PAGE
    assert counters.cached_tokens == whole
    assert counters.computed_layer_tokens == (LONG - whole) * NUM_LAYERS
    assert counters.recomputed_layers == {}


def test_a_load_that_is_cached_in_part(shared: SharedEngine) -> None:
    run = Run(Tagged(shared, "in part"), shared.family.name)
    short = plan_of(*LONG_PLANS["partial"].segments[:1], computed(LONG_CONTEXT, 91))
    run.feed("short", run.data("short", run.submit("short", short, sampling=greedy(2), taps=())))
    run_until_idle(run.bench)
    # the same context under the same plan, then other tokens
    assert prompt(91) == prompt(LONG)[:91]
    run.feed("long", run.data("long", run.submit("long", LONG_PLANS["partial"], sampling=greedy(4), taps=())))
    run_until_idle(run.bench)
    assert_tokens_only(run, "long")
    counters = run.recorder.of("long").counters
    counted = (counters.cached_tokens, counters.loaded_tokens, counters.computed_tokens)
    assert counted == (2 * PAGE, LONG_CONTEXT - 2 * PAGE, LONG - LONG_CONTEXT)
    assert counters.computed_layer_tokens == 2 * (LONG_CONTEXT - 2 * PAGE) + NUM_LAYERS * (LONG - LONG_CONTEXT)
    assert counters.recomputed_layers == {0: {1, 2}}


def test_approximate_kv_is_never_found_by_a_private_request(shared: SharedEngine) -> None:
    """The same tokens under a partial plan, a full reuse, then privately: each computes for itself."""
    run = Run(Tagged(shared, "apart"), shared.family.name)
    full_reuse = msgspec.structs.replace(exact(0, CONTEXT, "sender"), kind=PlanKind.PARTIAL)
    plans = {
        "partial": PARTIAL,
        "full reuse": plan_of(full_reuse, computed(CONTEXT, TOTAL)),
        "private": PRIVATE,
        "other model": PRIVATE,
    }
    for name, plan in plans.items():
        model = "other" if name == "other model" else "receiver"
        run.feed(name, run.data(name, run.submit(name, plan, model, sampling=greedy(4), taps=())))
        run_until_idle(run.bench)
        assert_tokens_only(run, name)
    for name in ("private", "other model"):
        assert run.recorder.of(name).counters.cached_tokens == 0, name


def test_an_order_computes_what_it_must_tap(shared: SharedEngine) -> None:
    """A prefill order is not served by the cache: it would have no hidden states to announce."""
    run = Run(Tagged(shared, "order"), shared.family.name)
    run.submit("answer", PRIVATE, sampling=greedy(2))
    run_until_idle(run.bench)
    run.submit("order", PRIVATE, sampling=None)
    run_until_idle(run.bench)
    heard = run.recorder.of("order")
    assert heard.counters.cached_tokens == 0
    assert heard.space.has_e(2, 0, TOTAL)
    assert heard.result.finish_reason == "prefill"


def test_units_of_cached_chunks_are_announced_too(shared: SharedEngine) -> None:
    run = Run(Tagged(shared, "announced"), shared.family.name)
    for name in ("first", "second"):
        run.submit(name, LONG_PLANS["private"], sampling=greedy(1), taps=())
        run_until_idle(run.bench)
    chunks = -(-LONG // CHUNK)
    for name in ("first", "second"):
        units = [(unit.chunk, unit.layer) for unit in run.recorder.of(name).units]
        assert sorted(units) == [(chunk, layer) for chunk in range(chunks) for layer in range(NUM_LAYERS)]


def test_a_cached_load_waits_for_the_data_that_the_node_will_publish(shared: SharedEngine) -> None:
    run = Run(Tagged(shared, "waits"), shared.family.name)
    plan = plan_of(exact(0, 64, "twin"), computed(64, 70))
    run.feed("first", run.data("first", run.submit("first", plan, sampling=greedy(2), taps=())))
    run_until_idle(run.bench)
    data = run.data("second", run.submit("second", plan, sampling=greedy(2), taps=()))
    run.feed("second", data[:-1])
    run_until_idle(run.bench)
    assert not run.recorder.of("second").prefilled
    run.feed("second", data[-1:])
    run_until_idle(run.bench)
    assert run.recorder.of("second").counters.cached_tokens == 64
    assert_tokens_only(run, "second")


def test_a_replan_finds_nothing_of_the_plan_before(shared: SharedEngine) -> None:
    run = Run(Tagged(shared, "replan"), shared.family.name)
    data = run.data("r", run.submit("r", LONG_PLANS["partial"], sampling=greedy(4), taps=()))
    run.feed("r", data[:-1])
    run_until_idle(run.bench)
    run.bench.engine.replan("r", LONG_PLANS["private"])
    run.feed("r", data[-1:])
    run_until_idle(run.bench)
    run.submitted["r"] = (*run.submitted["r"][:2], LONG_PLANS["private"], 0)
    assert_tokens_only(run, "r")
    assert run.recorder.of("r").counters.cached_tokens == 0


def test_arrivals_of_both_kinds_are_cut_as_the_plan_says(shared: SharedEngine) -> None:
    """What the engine returns at submit is what a node pulls by."""
    run = Run(shared.make, shared.family.name)
    execution = run.submit("r", PARTIAL)
    own = PlanExecution(PARTIAL, NUM_LAYERS, CHUNK)
    assert [chunk.start for chunk in execution.chunks] == [chunk.start for chunk in own.chunks]
    layout = run.bench.engine.layout("receiver")
    assert layout.block_size == BLOCK
    held = contexts(run.arch, TOTAL)
    import random

    run.feed("r", arrivals(PARTIAL, execution, held, layout, random.Random(3)))
    run_until_idle(run.bench)
    run.assert_result("r")
