"""What ends, misbehaves or may know nothing, on an engine with few blocks and vLLM's prefix cache: it leaves nothing and finds nothing.

Aborts in every state, late and repeated signals, blocks and entries that nobody gives back, a cache that knows neither tenants nor weights:
what bites engines that load KV from elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import oracle
import pytest
from check_engine import Tally, assert_each_token_counted_once, assert_tokens
from check_engine_steps import Run
from engine_harness import (
    TAPS,
    computed,
    contexts,
    exact,
    greedy,
    partial,
    plan_of,
    prompt,
    request,
    run_until_idle,
    token_wise,
)
from vllm_bench import SharedEngine, VllmBench, lora_family

from kvkin.engines.api import Arrival
from kvkin.kv.errors import Cancelled, InvalidRequest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

PAGE = 32  # tokens of a block in vLLM's cache
CONTEXT, TOTAL = 72, 85
MODEL_LENGTH = 320
PRIVATE = plan_of(computed(0, TOTAL))
PLANS = (
    PRIVATE,
    plan_of(exact(0, CONTEXT, "twin"), computed(CONTEXT, TOTAL)),
    plan_of(partial(0, CONTEXT, (1, 3), "sender"), computed(CONTEXT, TOTAL)),
    plan_of(token_wise(0, CONTEXT, [3, 40, 71], "sender"), computed(CONTEXT, TOTAL)),
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    """Steps of at most 16 tokens, 14 blocks of 32 tokens."""
    family = lora_family("llama", tmp_path_factory.mktemp("family"))
    options = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 15, "enable_prefix_caching": True}
    engine = SharedEngine(family, max_model_len=MODEL_LENGTH, **options)
    yield engine
    engine.close()


class Known:
    """Makes engines whose models have ``lineages``: later engines with the same ones find what they left in vLLM's cache."""

    def __init__(self, shared: SharedEngine, lineages: dict[str, bytes]) -> None:
        self._shared, self._lineages = shared, lineages

    def __call__(self, models, *, block_size, chunk_tokens, eos=frozenset()) -> VllmBench:  # type: ignore[no-untyped-def]
        return self._shared.make(
            models, block_size=block_size, chunk_tokens=chunk_tokens, eos=eos, lineages=self._lineages
        )


def assert_nothing_left(shared: SharedEngine, run: Run, free: int) -> None:
    """No block, no entry, no host memory, nothing in the workers."""
    for heard in run.recorder.heard.values():
        if heard.space is not None:
            heard.space.release()
            heard.space.release()
    run.recorder.heard.clear()
    run_until_idle(run.bench)
    scheduler = shared.runtime.scheduler
    assert shared.free_blocks() == free
    assert (scheduler.entries, scheduler.states.used, scheduler.swaps.used) == ({}, 0, 0)
    assert shared.served() == []


# --- any order of signals --------------------------------------------------------------------------------------------------


class Storm:
    """Requests with all kinds of plans, and signals in a random order: late ones, repeated ones, for those that have ended."""

    def __init__(self, shared: SharedEngine, seed: int) -> None:
        lineages = {name: f"{name} storm {seed}".encode() for name in shared.family.members}
        self.run = Run(Known(shared, lineages), shared.family.name)
        self.draw = random.Random(seed)
        self.data: dict[str, list[Arrival]] = {}
        self.cancelled: set[str] = set()

    def act(self) -> None:
        kinds = ["step"] * 10 + ["arrival"] * 12 + ["submit"] * 3 + ["cancel", "replan", "release"]
        kind = self.draw.choice(kinds)
        if kind == "step":
            for _ in range(self.draw.randrange(1, 4)):
                self.run.bench.step()
        elif kind == "submit":
            if len([name for name in self.data if not self.run.recorder.of(name).ends]) < 5:
                self.submit()
        elif self.data:
            self.signal(kind, self.draw.choice(list(self.data)))

    def submit(self) -> None:
        name, plan = f"r{len(self.data)}", self.draw.choice(PLANS)
        model = self.draw.choice(["receiver", "sender", "other"]) if plan is PRIVATE else "receiver"
        sampling = greedy(self.draw.randrange(1, 40)) if self.draw.random() < 0.8 else None
        taps = self.draw.choice([(), TAPS])
        # few prompts, so that the cache has some of them
        execution = self.run.submit(name, plan, model, self.draw.randrange(3), sampling=sampling, taps=taps)
        self.data[name] = self.run.data(name, execution)
        self.draw.shuffle(self.data[name])

    def signal(self, kind: str, name: str) -> None:
        engine, heard = self.run.bench.engine, self.run.recorder.of(name)
        if kind == "arrival":
            self.run.feed(name, self.draw.sample(self.data[name], min(4, len(self.data[name]))))
        elif kind == "cancel":
            self.cancelled |= set() if heard.ends else {name}
            engine.cancel(name, "changed my mind")
        elif kind == "replan":
            if not heard.prefilled and not heard.ends:
                model, tokens, _, seed = self.run.submitted[name]
                self.run.submitted[name] = (model, tokens, PRIVATE, seed)
            engine.replan(name, PRIVATE)
        elif heard.space is not None:
            heard.space.release()

    def calm(self) -> None:
        """Everything that is missing comes, and everything ends."""
        for name, data in self.data.items():
            self.run.feed(name, data)
        run_until_idle(self.run.bench)

    def assert_answers(self) -> None:
        """Each request ended once, well unless it was cancelled, and with the tokens of the plan that it had."""
        for name, (model, tokens, plan, seed) in self.run.submitted.items():
            heard = self.run.recorder.of(name)
            assert heard.ends == 1, name
            if heard.error is not None:
                assert isinstance(heard.error, Cancelled), (name, heard.error)
                assert name in self.cancelled
                continue
            assert_each_token_counted_once(heard, plan)
            if not heard.tokens:  # an order
                assert heard.result is not None
                assert heard.result.finish_reason == "prefill"
                continue
            state = oracle.execute(self.run.models[model], tokens, plan, contexts(self.run.arch, len(tokens), seed))
            _, choices, logits = oracle.generate(self.run.models[model], state, len(heard.tokens), heard.tokens)
            tally = Tally()
            assert_tokens(heard, choices, logits, tally)
            tally.close()


@pytest.mark.parametrize("seed", range(4))
def test_no_order_of_signals_leaves_anything(shared: SharedEngine, seed: int) -> None:
    shared.settle()
    free = shared.free_blocks()
    storm = Storm(shared, seed)
    for _ in range(160):
        storm.act()
    storm.calm()
    storm.assert_answers()
    ends = [storm.run.recorder.of(name) for name in storm.data]
    assert any(heard.error is None for heard in ends)
    assert any(heard.error is not None for heard in ends)
    assert_nothing_left(shared, storm.run, free)


def test_a_cancel_in_every_step_of_a_load(shared: SharedEngine) -> None:
    """Also in the step whose report of the load is on its way, and in the one in which vLLM takes the request up again."""
    shared.settle()
    free = shared.free_blocks()
    for plan in PLANS[1:]:
        steps, ended = 0, False
        while not ended:
            run = Run(shared.make, shared.family.name)
            run.feed("r", run.data("r", run.submit("r", plan, sampling=greedy(2))))
            for _ in range(steps):
                run.bench.step()
            ended = bool(run.recorder.of("r").ends)
            run.bench.engine.cancel("r", "now")
            run_until_idle(run.bench)
            heard = run.recorder.of("r")
            assert heard.ends == 1
            assert isinstance(heard.error, Cancelled) is not ended
            assert_nothing_left(shared, run, free)
            steps += 1
        assert steps > 3, "the load took no steps to be cancelled in"


# --- prompts that cannot be ------------------------------------------------------------------------------------------------


def test_a_prompt_beyond_the_models_length_is_refused_and_leaves_nothing(shared: SharedEngine) -> None:
    """vLLM refuses it after kvkin has entered it: with its load, and memory for its hidden states."""
    shared.settle()
    free = shared.free_blocks()
    run = Run(shared.make, shared.family.name)
    run.submit("bystander", PRIVATE, sampling=greedy(6))
    for name, total in (("too long", MODEL_LENGTH + 1), ("much too long", 2 * MODEL_LENGTH)):
        plan = plan_of(exact(0, CONTEXT, "twin"), computed(CONTEXT, total))
        run.bench.engine.submit(request(name, prompt(total, 7), plan), run.recorder)
        run.bench.step()
        error = run.recorder.of(name).error
        assert isinstance(error, InvalidRequest), error
        assert not error.retryable
        assert str(MODEL_LENGTH) in str(error)
    run_until_idle(run.bench)
    run.assert_result("bystander")
    assert_nothing_left(shared, run, free)


def test_an_answer_ends_where_the_models_length_does(shared: SharedEngine) -> None:
    shared.settle()
    free = shared.free_blocks()
    run = Run(shared.make, shared.family.name)
    total = MODEL_LENGTH - 5
    plan = plan_of(exact(0, CONTEXT, "twin"), computed(CONTEXT, total))
    run.feed("r", run.data("r", run.submit("r", plan, sampling=greedy(200), taps=())))
    run_until_idle(run.bench)
    heard = run.recorder.of("r")
    assert heard.error is None, heard.error
    assert heard.result is not None
    assert heard.result.finish_reason == "length"
    assert 5 <= len(heard.tokens) <= 6  # the last token's KV is nobody's
    assert_nothing_left(shared, run, free)


# --- who may know what vLLM's cache has --------------------------------------------------------------------------------------


def cached(run: Run, name: str, **options: object) -> int:
    """Prompt tokens that vLLM's cache had for a private request."""
    run.submit(name, PRIVATE, "sender", sampling=greedy(2), taps=(), **options)
    run_until_idle(run.bench)
    counters = run.recorder.of(name).counters
    assert counters is not None
    return counters.cached_tokens


def test_another_tenant_finds_nothing(shared: SharedEngine) -> None:
    """Neither the KV nor, by the time to its first token, that somebody else had asked the same."""
    run = Run(Known(shared, {name: f"{name} tenants".encode() for name in shared.family.members}), shared.family.name)
    asked = [("acme", 0), ("globex", 0), ("acme", TOTAL // PAGE * PAGE), ("globex", TOTAL // PAGE * PAGE), ("", 0)]
    for index, (scope, wanted) in enumerate(asked):
        assert cached(run, f"r{index}", root=scope.encode()) == wanted, (scope, index)


def test_other_weights_under_the_same_name_find_nothing(shared: SharedEngine) -> None:
    """An adapter was trained on and kept its name: its weights name its KV."""
    for version, wanted in (("v1", 0), ("v2", 0), ("v1", TOTAL // PAGE * PAGE)):
        lineages = {name: f"{name} {version}".encode() for name in shared.family.members}
        run = Run(Known(shared, lineages), shared.family.name)
        assert cached(run, "r") == wanted, version


def test_models_without_a_lineage_share_nothing_between_engines(shared: SharedEngine) -> None:
    for _ in range(2):
        assert cached(Run(shared.make, shared.family.name), "r") == 0
