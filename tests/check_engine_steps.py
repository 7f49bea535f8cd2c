"""The engine contract, part two: what an engine does step by step.

What runs before what is missing, requests that interleave without touching each other, cancels and replans in every phase, data that
comes twice or too late, prefill orders, the ends of an answer, refusals. Part one is ``check_engine.py``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import oracle
import pytest
from check_engine import SHAPES, Geometry, Tally, assert_kv, assert_result
from engine_harness import (
    NUM_LAYERS,
    Bench,
    MakeEngine,
    Recorder,
    arrivals,
    computed,
    contexts,
    exact,
    family,
    greedy,
    partial,
    plan_of,
    prompt,
    request,
    run_until_idle,
    step_until,
    token_wise,
)

from kvkin.engines.api import Arrival
from kvkin.kv.errors import Cancelled, DuplicateRequest, InvalidRequest, NodeUnavailable
from kvkin.kv.execution import PlanExecution
from kvkin.kv.plan import ReusePlan
from kvkin.kv.pulls import E_LAYER

BLOCK, CHUNK, CONTEXT, TOTAL = 8, 8, 40, 53
CONTEXT_CHUNKS, SUFFIX_CHUNKS = (0, 1, 2, 3, 4), (5, 6)
PARTIAL = plan_of(partial(0, CONTEXT, (1, 3), "sender"), computed(CONTEXT, TOTAL))
PRIVATE = plan_of(computed(0, TOTAL))


class Run:
    """One engine over one family, and requests for ``prompt(TOTAL, seed)`` whose data the test feeds itself."""

    def __init__(self, make_engine: MakeEngine, arch: str, **options: Any) -> None:
        self.arch, self.models = arch, family(arch)
        options = {"block_size": BLOCK, "chunk_tokens": CHUNK, **options}
        self.bench: Bench = make_engine(self.models, **options)
        self.recorder = Recorder(self.bench)
        self.submitted: dict[str, tuple[str, tuple[int, ...], ReusePlan, int]] = {}

    def submit(
        self, name: str, plan: ReusePlan = PARTIAL, model: str = "receiver", seed: int = 0, **options: Any
    ) -> PlanExecution:
        token_ids = prompt(plan.num_tokens, seed)
        self.submitted[name] = (model, token_ids, plan, seed)
        return self.bench.engine.submit(request(name, token_ids, plan, model, **options), self.recorder)

    def data(self, name: str, execution: PlanExecution) -> list[Arrival]:
        model, token_ids, plan, seed = self.submitted[name]
        held = contexts(self.arch, len(token_ids), seed)
        return arrivals(plan, execution, held, self.bench.engine.layout(model), random.Random(seed))

    def feed(self, name: str, data: list[Arrival]) -> None:
        for arrival in data:
            self.bench.engine.arrived(name, arrival)

    def expected(self, name: str, plan: ReusePlan) -> oracle.State:
        """The oracle's state of prompt + generated - 1 tokens, had the request run ``plan``."""
        model, token_ids, _, seed = self.submitted[name]
        tokens = self.recorder.of(name).tokens
        state = oracle.execute(self.models[model], token_ids, plan, contexts(self.arch, len(token_ids), seed))
        return oracle.generate(self.models[model], state, len(tokens), tokens)[0]

    def assert_result(self, name: str, plan: ReusePlan | None = None) -> None:
        model, token_ids, submitted, seed = self.submitted[name]
        tally = Tally()
        held = contexts(self.arch, len(token_ids), seed)
        heard = self.recorder.of(name)
        assert_result(self.bench, heard, self.models[model], token_ids, plan or submitted, held, tally)
        tally.close()

    def units(self, name: str) -> set[tuple[int, int]]:
        return {(unit.chunk, unit.layer) for unit in self.recorder.of(name).units}


# --- what waits for what -------------------------------------------------------------------------------------------------


def check_held_layer(make_engine: MakeEngine, arch: str, layer: int, chunk: int) -> None:
    """With KV of one (layer, chunk) held back, the whole recompute and the suffix's layers below it are done, no others."""
    run = Run(make_engine, arch)
    data = run.data("r", run.submit("r"))
    held_back = [arrival for arrival in data if (arrival.layer, arrival.chunk) == (layer, chunk)]
    assert len(held_back) == 1
    run.feed("r", [arrival for arrival in data if arrival is not held_back[0]])
    run_until_idle(run.bench)
    recompute = {(index, group) for index in CONTEXT_CHUNKS for group in (1, 2)}
    assert run.units("r") == recompute | {(index, below) for index in SUFFIX_CHUNKS for below in range(layer)}
    run.feed("r", held_back)
    run_until_idle(run.bench)
    run.assert_result("r")


def check_held_e(make_engine: MakeEngine, arch: str, chunk: int) -> None:
    """With E of one chunk held back, the recompute of the chunks before it is done, and the suffix below the group."""
    run = Run(make_engine, arch)
    data = run.data("r", run.submit("r"))
    held_back = [arrival for arrival in data if (arrival.layer, arrival.chunk) == (E_LAYER, chunk)]
    run.feed("r", [arrival for arrival in data if arrival is not held_back[0]])
    run_until_idle(run.bench)
    recompute = {(index, layer) for index in CONTEXT_CHUNKS if index < chunk for layer in (1, 2)}
    assert run.units("r") == recompute | {(index, 0) for index in SUFFIX_CHUNKS}
    run.feed("r", held_back)
    run_until_idle(run.bench)
    run.assert_result("r")


def check_starts_without_data(make_engine: MakeEngine, arch: str) -> None:
    """A group that starts at layer 0 needs nothing: it and the suffix's layers inside it run before anything arrives."""
    run = Run(make_engine, arch)
    execution = run.submit("r", plan_of(partial(0, CONTEXT, (0, 2), "sender"), computed(CONTEXT, TOTAL)))
    run_until_idle(run.bench)
    assert run.units("r") == {(index, layer) for index in (*CONTEXT_CHUNKS, *SUFFIX_CHUNKS) for layer in (0, 1)}
    run.feed("r", run.data("r", execution))
    run_until_idle(run.bench)
    run.assert_result("r")


def check_arrival_order(
    make_engine: MakeEngine,
    arch: str,
    name: str,
    geometry: Geometry,
    order: Callable[[list[Arrival]], list[Arrival]],
    steps_between: Callable[[], int],
) -> None:
    """Data in any order, at any time (even twice), never changes the result."""
    receiver, plan, _ = SHAPES[name](geometry)
    run = Run(make_engine, arch, block_size=geometry.block_size, chunk_tokens=geometry.chunk_tokens)
    execution = run.submit("r", plan, receiver)
    for arrival in order(run.data("r", execution)):
        for _ in range(steps_between()):
            run.bench.step()
        run.bench.engine.arrived("r", arrival)
    run_until_idle(run.bench)
    run.assert_result("r")


def check_repeated_data(make_engine: MakeEngine, arch: str, plan: ReusePlan) -> None:
    """Everything that came comes again after every step, while its chunk is computed and later: nothing changes."""
    run = Run(make_engine, arch)
    data = run.data("r", run.submit("r", plan))
    for count in range(1, len(data) + 1):
        run.feed("r", data[:count])
        run.bench.step()
    while run.bench.step():
        run.feed("r", data)
    run_until_idle(run.bench)
    run.feed("r", data)
    run_until_idle(run.bench)
    run.assert_result("r")


# --- several requests ----------------------------------------------------------------------------------------------------


def check_interleaving(make_engine: MakeEngine, arch: str) -> list[tuple[str, str]]:
    """Two long prefills and a decode advance in turns, and each gives the tokens that it gives alone.

    Returns the sequence of (request, unit or token) so that an engine's own test can ask for more.
    """
    jobs: Mapping[str, tuple[ReusePlan, str, int, int]] = {
        "decode": (plan_of(computed(0, 9)), "other", 3, 16),
        "long": (plan_of(computed(0, 61)), "receiver", 1, 3),
        "pulled": (PARTIAL, "receiver", 0, 3),
    }

    def start(run: Run, name: str) -> None:
        plan, model, seed, tokens = jobs[name]
        run.feed(name, run.data(name, run.submit(name, plan, model, seed, sampling=greedy(tokens))))

    alone = {}
    for name in jobs:
        run = Run(make_engine, arch)
        start(run, name)
        run_until_idle(run.bench)
        alone[name] = run.recorder.of(name).tokens
    run = Run(make_engine, arch)
    start(run, "decode")
    step_until(run.bench, lambda: len(run.recorder.of("decode").tokens) == 2)
    start(run, "long")
    start(run, "pulled")
    run_until_idle(run.bench)
    for name in jobs:
        run.assert_result(name)
        assert run.recorder.of(name).tokens == alone[name]
    sequence = run.recorder.sequence
    units = {name: [at for at, what in enumerate(sequence) if what == (name, "unit")] for name in ("long", "pulled")}
    tokens = [at for at, what in enumerate(sequence) if what == ("decode", "token")]
    both = range(max(units["long"][0], units["pulled"][0]), min(units["long"][-1], units["pulled"][-1]))
    assert sum(at in both for at in tokens) >= 5, "the decode goes on while two prompts are prefilled"
    assert all(sum(at in both for at in places) >= 5 for places in units.values()), "both prefills advance in turns"
    return sequence


PHASES = ("queued", "waiting", "computing", "decoding")


def _bring_to(run: Run, name: str, phase: str) -> list[Arrival]:
    """Submit a partial plan and bring it into ``phase``; returns its data, of which some is not fed yet (except decoding)."""
    data = run.data(name, run.submit(name, sampling=greedy(6)))
    heard = run.recorder.of(name)
    match phase:
        case "waiting":
            # everything but the last layer, so that all that can run has run
            run.feed(name, [arrival for arrival in data if arrival.layer < NUM_LAYERS - 1])
            before = -1
            while before < len(heard.units):
                before = len(heard.units)
                for _ in range(8):
                    run.bench.step()
            assert heard.units
            assert not heard.prefilled
        case "computing":
            run.feed(name, [arrival for arrival in data if arrival.layer < 1])
            step_until(run.bench, lambda: len(heard.units) >= 3)
            assert len(heard.units) < 2 * len(CONTEXT_CHUNKS)
        case "decoding":
            run.feed(name, data)
            step_until(run.bench, lambda: len(heard.tokens) >= 2)
    return data


def check_cancel(make_engine: MakeEngine, arch: str, phase: str) -> None:
    """A cancelled request ends once, as cancelled, and hears nothing more; another one does not notice."""
    run = Run(make_engine, arch)
    run.submit("bystander", PRIVATE, "other", seed=5, sampling=greedy(40))
    data = _bring_to(run, "victim", phase)
    assert not run.recorder.of("bystander").ends
    run.bench.engine.cancel("victim", "nobody listens")
    run.bench.step()
    heard = run.recorder.of("victim")
    assert heard.ends == 1
    assert isinstance(heard.error, Cancelled)
    # late signals are ignored; the recorder refuses whatever it hears after the end
    run.feed("victim", data)
    run.bench.engine.replan("victim", PRIVATE)
    run.bench.engine.cancel("victim", "again")
    run.bench.engine.cancel("nobody", "no such request")
    run_until_idle(run.bench)
    assert heard.ends == 1
    run.assert_result("bystander")


def check_replan(make_engine: MakeEngine, arch: str, phase: str) -> None:
    """A source fails: the replanned request equals a private prefill, whatever was there and whatever still comes."""
    run = Run(make_engine, arch)
    run.submit("bystander", PRIVATE, "other", seed=5, sampling=greedy(40))
    data = _bring_to(run, "victim", phase)
    run.bench.engine.replan("victim", PRIVATE)
    heard = run.recorder.of("victim")
    if phase != "decoding":  # there, the prompt is complete and the plan has served
        heard.written.clear()
    for arrival in data:
        run.feed("victim", [arrival])
        run.bench.step()
    run_until_idle(run.bench)
    run.assert_result("victim", PARTIAL if phase == "decoding" else PRIVATE)
    if phase != "decoding":
        assert heard.counters is not None
        assert heard.counters.recomputed_layers == {}
    run.assert_result("bystander")


def check_replan_keeps_own_blocks(make_engine: MakeEngine, arch: str, own_tokens: int) -> None:
    """A replan may pull, too: own blocks are fed again, the rest is computed, and the result is a private prefill's.

    E taps of the first plan are forgotten: nothing that only it pulled or computed is offered.
    """
    run = Run(make_engine, arch)
    own = exact(0, own_tokens, "twin")
    data = run.data("r", run.submit("r"))
    run.feed("r", [arrival for arrival in data if arrival.layer < 3])
    run_until_idle(run.bench)
    second = plan_of(own, computed(own_tokens, TOTAL))
    run.bench.engine.replan("r", second)
    run.recorder.of("r").written.clear()
    run.submitted["r"] = ("receiver", prompt(TOTAL), second, 0)
    run.feed("r", run.data("r", PlanExecution(second, NUM_LAYERS, CHUNK)))
    run_until_idle(run.bench)
    run.assert_result("r")
    assert_kv(run.bench, run.recorder.of("r").space, run.expected("r", PRIVATE))


# --- orders, ends, refusals ----------------------------------------------------------------------------------------------


def check_prefill_order(make_engine: MakeEngine, arch: str, *, chunk_by_chunk: bool = True) -> None:
    """Without sampling: every layer of every chunk is announced once, in order; all KV is there; no token, one end.

    An engine that takes several chunks through a layer at once may be told not to go ``chunk_by_chunk``: then each layer's chunks
    ascend, and each chunk's layers.
    """
    run = Run(make_engine, arch)
    run.submit("r", PRIVATE, sampling=None)
    run_until_idle(run.bench)
    heard = run.recorder.of("r")
    announced = [(unit.chunk, unit.layer) for unit in heard.units]
    wanted = [(chunk, layer) for chunk in (*CONTEXT_CHUNKS, *SUFFIX_CHUNKS) for layer in range(NUM_LAYERS)]
    assert (announced if chunk_by_chunk else sorted(announced)) == wanted
    assert sorted(announced, key=lambda pair: pair[0]) == wanted
    assert sorted(announced, key=lambda pair: pair[1]) == sorted(wanted, key=lambda pair: pair[1])
    assert heard.result is not None
    assert (heard.result.finish_reason, heard.tokens, heard.ends, heard.prefilled) == ("prefill", [], 1, 1)
    assert_kv(run.bench, heard.space, contexts(arch, TOTAL)["receiver"])


def check_ends(make_engine: MakeEngine, arch: str) -> None:
    """An answer ends at max_tokens (length) or with an EOS token, which counts as generated (stop)."""
    run = Run(make_engine, arch)
    run.submit("r", PRIVATE, sampling=greedy(5))
    run_until_idle(run.bench)
    tokens = run.recorder.of("r").tokens
    assert len(tokens) == 5
    assert run.recorder.of("r").result.finish_reason == "length"
    run = Run(make_engine, arch, eos=frozenset({tokens[2]}))
    run.submit("r", PRIVATE, sampling=greedy(5, ignore_eos=False))
    run.submit("on", PRIVATE, sampling=greedy(5))
    run_until_idle(run.bench)
    assert run.recorder.of("r").tokens == tokens[: tokens.index(tokens[2]) + 1]
    assert run.recorder.of("r").result.finish_reason == "stop"
    run.assert_result("r")
    assert run.recorder.of("on").tokens == tokens


def check_refusals(make_engine: MakeEngine, arch: str) -> None:
    """What cannot run is refused at once, by a word that says why; a bad token id ends its own request only."""
    run = Run(make_engine, arch)
    engine = run.bench.engine
    tokens = prompt(TOTAL)
    for wrong, why in [
        (request("a", tokens, PRIVATE, "unknown"), "unknown"),
        (request("a", tokens[:-1], PRIVATE), "53 of 52"),
        (request("a", tokens, plan_of(exact(0, TOTAL, "twin"))), "last segment"),
        (request("a", tokens, plan_of(token_wise(0, CONTEXT, [41], "sender"), computed(CONTEXT, TOTAL))), "rows"),
    ]:
        with pytest.raises(InvalidRequest, match=why):
            engine.submit(wrong, run.recorder)
    run.submit("good", PRIVATE)
    with pytest.raises(DuplicateRequest):
        engine.submit(request("good", tokens, PRIVATE), run.recorder)
    engine.submit(request("bad", (*tokens[:-1], 10**6), PRIVATE), run.recorder)
    run_until_idle(run.bench)
    assert run.recorder.of("bad").error is not None
    run.assert_result("good")
    run.recorder.heard.clear()
    run.submit("good", PRIVATE)  # an id is free again after the end
    run_until_idle(run.bench)
    run.assert_result("good")


def check_errors_stay_inside(make_engine: MakeEngine, arch: str) -> None:
    """Whatever goes wrong inside one request, its listener's fault included, ends that request only."""
    run = Run(make_engine, arch)

    class Faulty(Recorder):
        def unit_done(self, request_id: str, unit: Any, space: Any) -> None:
            raise TypeError("a listener's bug")

    faulty = Faulty()
    run.submit("good", PRIVATE)
    run.bench.engine.submit(request("faulty", prompt(TOTAL), PRIVATE), faulty)
    run.bench.engine.submit(request("torn", prompt(TOTAL), PARTIAL), run.recorder)
    run.bench.engine.arrived("torn", Arrival(0, 0, ((0, np.zeros(3, dtype=np.uint8)),)))
    run_until_idle(run.bench)
    assert isinstance(faulty.of("faulty").error, TypeError)
    assert run.recorder.of("torn").error is not None
    run.assert_result("good")


def check_cancelled_id_is_free(make_engine: MakeEngine, arch: str) -> None:
    """An id may be used again as soon as its request was cancelled, even before the engine's next step."""
    run = Run(make_engine, arch)
    old = Recorder()
    run.bench.engine.submit(request("r", prompt(TOTAL), PARTIAL), old)
    run.bench.engine.cancel("r", "changed my mind")
    run.submit("r", PRIVATE)
    with pytest.raises(DuplicateRequest):
        run.submit("r", PRIVATE)
    run_until_idle(run.bench)
    assert isinstance(old.of("r").error, Cancelled)
    run.assert_result("r")


def check_close(make_engine: MakeEngine, arch: str) -> None:
    """Closing ends what runs and what is queued as cancelled; twice is once."""
    run = Run(make_engine, arch)
    run.submit("running")
    run.bench.step()
    run.submit("queued", PRIVATE)
    run.bench.engine.close()
    run.bench.engine.close()
    for name in ("running", "queued"):
        heard = run.recorder.of(name)
        assert heard.ends == 1
        assert isinstance(heard.error, Cancelled)
    with pytest.raises(NodeUnavailable):
        run.submit("late", PRIVATE)
    with pytest.raises(NodeUnavailable):
        run.bench.engine.call(lambda: 1).result(timeout=0)
    run.bench.engine.cancel("running", "late")
