"""The scheduler side of a plain vLLM server, on an in-process vLLM: the test is the link, the oracle says what must come out."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from engine_harness import (
    NUM_LAYERS,
    arrivals,
    computed,
    contexts,
    e_bytes,
    exact,
    kv_bytes,
    partial,
    plan_of,
    prompt,
)
from oracle import State
from vllm_bench import OPTIONS, Family, plain_family

from kvkin.engines.vllm import compat, connector
from kvkin.engines.vllm.connector import KvkinConnector
from kvkin.engines.vllm.loads import LoadState
from kvkin.engines.vllm.plugin import CONNECTOR, CONNECTOR_MODULE, register_here
from kvkin.engines.vllm.serving import (
    LinkEvent,
    PartsArrived,
    PlanReady,
    Published,
    Question,
    ServingOptions,
    SourcesFailed,
    StoreWanted,
    Wishes,
)
from kvkin.engines.vllm.serving_side import HOLD_S, ServingSide
from kvkin.kv.execution import PlanExecution
from kvkin.kv.layout import KVLayout, Plane
from kvkin.kv.plan import ReusePlan, private_plan, provenances
from kvkin.transport.arena import Arena, ArenaDescription, place_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCK, CHUNK, TAP = 16, 32, 1
CONTEXT, TOTAL = 96, 103
LINEAGE = b"receiver"
LAYOUT = KVLayout(NUM_LAYERS, (Plane("keys", 2, 32), Plane("values", 2, 32)), 128, "float32", BLOCK)
STEPS = 3000


class ScriptedLink:
    """What the link says is what the test lets it say; it remembers what it is told."""

    layout, chunk_tokens, transition_layers = LAYOUT, CHUNK, (TAP,)

    def __init__(self) -> None:
        self.memory = Arena(LAYOUT, 256, 256, shared=True)
        assert self.memory.description is not None
        self.arena: ArenaDescription = self.memory.description
        self.alive = True
        self.events: deque[LinkEvent] = deque()
        self.answer: Callable[[Question], None] = lambda question: None
        self.forget()

    def forget(self) -> None:
        """Before the next test."""
        self.asked: list[Question] = []
        self.over: list[tuple[str, int, str]] = []
        self.given_up: list[str] = []
        self.done: list[tuple[str, ReusePlan, tuple[int, ...], bool]] = []
        self.covered: Any = None
        self.stores: dict[int, str] = {}
        self.publish: Callable[[str], None] = lambda key: self.events.append(Published(key))
        self._next = 0

    def take(self) -> LinkEvent | None:
        return self.events.popleft() if self.events else None

    def model_of(self, lora: tuple[str, str] | None) -> str | None:
        return "receiver"

    def ask(self, question: Question) -> None:
        self.asked.append(question)
        self.answer(question)

    def unneeded(self, key: str) -> None:
        self.given_up.append(key)

    def computed(self, key: str, plan: ReusePlan, token_ids: tuple[int, ...], covered: Any, *, last: bool) -> None:
        self.done.append((key, plan, token_ids, last))
        self.covered = covered
        if last:
            self.publish(key)

    def stored(self, ticket: int, why: str) -> None:
        self.stores[ticket] = why

    def ended(self, key: str, tokens_reused: int, fallback: str) -> None:
        self.over.append((key, tokens_reused, fallback))

    def close(self) -> None:
        self.alive = False

    # --- what tests have it say ------------------------------------------------------------------------------------------

    def plan(self, key: str, plan: ReusePlan) -> None:
        self.events.append(PlanReady(key, plan, provenances(plan, LINEAGE)[-1], True))

    def bring(self, key: str, plan: ReusePlan, held: Mapping[str, State], *, most: int = 1 << 30) -> None:
        """The first ``most`` arrivals of a plan, out of slots of the arena."""
        execution = PlanExecution(plan, NUM_LAYERS, CHUNK)
        for arrival in arrivals(plan, execution, held, LAYOUT, random.Random(0))[:most]:
            parts = []
            for start, data in arrival.parts:
                # the blocks are moved as they are: bytes are bytes
                view = self.memory.buffer[self._next : self._next + data.nbytes]
                view[:] = data
                self._next += data.nbytes
                place = place_of(view)
                assert place is not None
                parts.append((start, place))
            self.events.append(PartsArrived(key, arrival.chunk, arrival.layer, tuple(parts)))


class Bench:
    """One vLLM, its serving side, and requests asked of it."""

    def __init__(self, llm: Any, side: ServingSide, link: ScriptedLink) -> None:
        self.llm, self.side, self.link = llm, side, link
        self._number = 0

    def add(self, tokens: tuple[int, ...], max_tokens: int = 5, wishes: Any = None, **how: Any) -> str:
        from vllm import SamplingParams

        self._number += 1
        extra = None if wishes is None else {"kv_transfer_params": {"kvkin": wishes}}
        parameters = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=extra
        )
        internal: str = self.llm.add_request(f"r{self._number}", {"prompt_token_ids": list(tokens), **how}, parameters)
        return internal

    def step(self) -> list[Any]:
        connector_here = compat.current_connector()
        with compat.active(connector_here):
            outputs: list[Any] = self.llm.step()
        return outputs

    def run(self, until: Callable[[list[Any]], bool] | None = None) -> dict[str, Any]:
        """Step until nothing is left to do, or ``until`` holds; the finished outputs by request."""
        finished: dict[str, Any] = {}
        for _ in range(STEPS):
            outputs = self.step()
            finished |= {output.request_id: output for output in outputs if output.finished}
            if until is not None and until(outputs):
                return finished
            if until is None and not compat.scheduler_of(self.llm).has_requests():
                return finished
        raise AssertionError("it never ends")

    def tokens(self, tokens: tuple[int, ...], **how: Any) -> list[int]:
        """The answer to a request that runs alone."""
        self.add(tokens, **how)
        (output,) = self.run().values()
        return list(output.outputs[0].token_ids)

    def free(self) -> int:
        return self.side.free_blocks()


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return plain_family("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def built(family: Family) -> Iterator[tuple[Any, ServingSide, ScriptedLink]]:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    compat.prepare_environment()
    register_here()
    link = ScriptedLink()
    patch = pytest.MonkeyPatch()
    options = _options(family)
    patch.setattr(connector, "serving_options", lambda extra: options)
    patch.setattr(connector, "open_link", lambda *_: link)
    # the model is tapped as the cluster file's transition layers say
    patch.setattr("kvkin.engines.vllm.models.taps_of", lambda extra: (TAP,))
    config = EngineArgs(
        **OPTIONS | {"enable_prefix_caching": True, "block_size": 32},
        model=str(family.checkpoint),
        skip_tokenizer_init=True,
        disable_log_stats=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector=CONNECTOR,
            kv_connector_module_path=CONNECTOR_MODULE,
            kv_role="kv_both",
            kv_connector_extra_config={"config": "cluster.yaml", "node": "vllm-0"},
        ),
    ).create_engine_config()
    with compat.building():
        llm = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
        agent = compat.current_connector()
    here: KvkinConnector = compat.scheduler_of(llm).get_kv_connector()
    side = here.scheduler_side
    assert isinstance(side, ServingSide)
    patch.setattr(compat, "current_connector", lambda: agent)
    yield llm, side, link
    compat.shut_down(llm, agent)
    link.memory.close()
    patch.undo()


def _options(family: Family) -> ServingOptions:
    from kvkin.configs.schema import AttachedNode, ClusterConfig, FamilyConfig, ModelConfig, RouterNode

    node = AttachedNode(port=0, models=("receiver",))
    members = FamilyConfig(
        base="receiver", models={"receiver": ModelConfig(checkpoint=str(family.checkpoint))}, chunk_tokens=CHUNK
    )
    config = ClusterConfig(families={"tiny": members}, nodes={"router-0": RouterNode(), "vllm-0": node})
    return ServingOptions(Path("cluster.yaml"), config, "vllm-0", node, "tiny", members, Wishes())


@pytest.fixture
def bench(built: tuple[Any, ServingSide, ScriptedLink]) -> Iterator[Bench]:
    llm, side, link = built
    link.forget()
    link.alive, side._clock, side._consumes, side._produces = True, lambda: 0.0, True, True
    bench = Bench(llm, side, link)
    compat.scheduler_of(llm).reset_prefix_cache()
    free = bench.free()
    yield bench
    bench.run()
    assert not side._asked
    assert not side.entries
    assert not side._held
    assert bench.free() == free, "blocks are lost"
    assert len(link.over) == len(link.asked), "each request ends once"


def private(family: Family, tokens: tuple[int, ...], count: int = 5) -> list[int]:
    model = family.models["receiver"]
    return oracle.generate(model, oracle.private(model, tokens), count)[1]


def planned(family: Family, tokens: tuple[int, ...], plan: ReusePlan, held: Mapping[str, State]) -> list[int]:
    model = family.models["receiver"]
    return oracle.generate(model, oracle.execute(model, tokens, plan, held), 5)[1]


def held_of(family: Family, seed: int) -> dict[str, State]:
    return {name: state.head(CONTEXT) for name, state in contexts(family.name, TOTAL, seed).items()}


EXACT = plan_of(exact(0, CONTEXT, "receiver"), computed(CONTEXT, TOTAL))
PARTIAL = plan_of(partial(0, CONTEXT, (1, 3), "sender"), computed(CONTEXT, TOTAL))
LOWEST = plan_of(partial(0, CONTEXT, (0, 2), "sender"), computed(CONTEXT, TOTAL))


@pytest.mark.parametrize(("name", "plan"), [("exact", EXACT), ("partial", PARTIAL), ("lowest", LOWEST)])
def test_a_plan_is_executed_as_it_says(bench: Bench, family: Family, name: str, plan: ReusePlan) -> None:
    tokens, held = prompt(TOTAL, 1), held_of(family, 1)
    bench.link.answer = lambda question: (
        bench.link.plan(question.key, plan),
        bench.link.bring(question.key, plan, held),
    )[0]
    bench.add(tokens)
    (output,) = bench.run().values()
    assert list(output.outputs[0].token_ids) == planned(family, tokens, plan, held)
    assert [one[1:] for one in bench.link.over] == [(CONTEXT, "")]
    assert output.kv_transfer_params["kvkin"]["tokens_reused"] == CONTEXT
    assert bench.link.asked[0].token_ids == tokens


def test_approximate_kv_is_found_under_its_own_plan_only(bench: Bench, family: Family) -> None:
    tokens, held = prompt(TOTAL, 2), held_of(family, 2)
    approximate, own = planned(family, tokens, PARTIAL, held), private(family, tokens)
    assert approximate != own, "the test would not notice"

    def partial_answer(question: Question) -> None:
        bench.link.plan(question.key, PARTIAL)
        bench.link.bring(question.key, PARTIAL, held)

    bench.link.answer = partial_answer
    assert bench.tokens(tokens) == approximate
    bench.link.answer = lambda question: bench.link.plan(question.key, private_plan(TOTAL))
    assert bench.tokens(tokens) == own
    assert bench.tokens(tokens) == own  # out of vLLM's cache
    bench.link.alive = False
    assert bench.tokens(tokens) == own
    bench.link.alive = True
    # the same plan again: vLLM has its blocks, and nothing is pulled
    bench.link.answer = lambda question: bench.link.plan(question.key, PARTIAL)
    assert bench.tokens(tokens) == approximate
    assert bench.link.given_up


def test_exact_kv_is_vllms_own_from_then_on(bench: Bench, family: Family) -> None:
    tokens, held = prompt(TOTAL, 3), held_of(family, 3)
    bench.link.answer = lambda question: (
        bench.link.plan(question.key, EXACT),
        bench.link.bring(question.key, EXACT, held),
    )[0]
    bench.tokens(tokens)
    bench.link.alive = False
    bench.add(tokens)
    (output,) = bench.run().values()
    assert output.num_cached_tokens == CONTEXT
    assert list(output.outputs[0].token_ids) == private(family, tokens)


def test_no_answer_is_a_private_prefill_once_the_time_is_over(bench: Bench, family: Family) -> None:
    tokens = prompt(TOTAL, 4)
    bench.link.answer = lambda question: None
    key = bench.add(tokens)
    for _ in range(50):
        assert not bench.step()
    assert bench.side._asked[key].plan is None
    bench.side._clock = lambda: 1e6
    (output,) = bench.run().values()
    assert list(output.outputs[0].token_ids) == private(family, tokens)
    assert "did not answer" in bench.link.over[0][2]


def test_others_go_on_while_one_waits_for_its_plan(bench: Bench, family: Family) -> None:
    waiting, other = prompt(TOTAL, 5), prompt(TOTAL, 6)
    bench.link.answer = lambda question: None
    key = bench.add(waiting)
    bench.link.answer = lambda question: bench.link.plan(question.key, private_plan(TOTAL))
    bench.add(other)
    finished = bench.run(until=lambda outputs: any(output.finished for output in outputs))
    assert [list(one.outputs[0].token_ids) for one in finished.values()] == [private(family, other)]
    bench.link.plan(key, private_plan(TOTAL))
    (output,) = bench.run().values()
    assert list(output.outputs[0].token_ids) == private(family, waiting)


@pytest.mark.parametrize("plan", [EXACT, PARTIAL], ids=["exact", "partial"])
@pytest.mark.parametrize("when", ["before the blocks", "in the middle", "with the plan"])
def test_sources_that_fail_cost_a_private_prefill(bench: Bench, family: Family, plan: ReusePlan, when: str) -> None:
    tokens, held = prompt(TOTAL, 7), held_of(family, 7)

    def answer(question: Question) -> None:
        bench.link.plan(question.key, plan)
        if when == "with the plan":
            bench.link.events.append(SourcesFailed(question.key, "gone"))
        elif when == "in the middle":
            bench.link.bring(question.key, plan, held, most=5)

    bench.link.answer = answer
    key = bench.add(tokens)
    if when == "before the blocks":
        bench.link.events.append(SourcesFailed(key, "gone"))
    elif when == "in the middle":
        bench.run(
            until=lambda _: (
                bench.side._asked[key].entry is not None
                and bench.side._asked[key].entry.load.state is LoadState.LOADING
            )
        )
        bench.step()
        bench.link.events.append(SourcesFailed(key, "gone"))
        bench.link.events.append(SourcesFailed(key, "gone again"))
    (output,) = bench.run().values()
    assert list(output.outputs[0].token_ids) == private(family, tokens)
    assert bench.link.over == [(key, 0, "gone")]
    assert output.kv_transfer_params["kvkin"]["fallback"] == "gone"
    # late data of it must not be taken
    bench.link.bring(key, plan, held)
    # what it left in vLLM's cache is exact
    bench.link.alive = False
    assert bench.tokens(tokens) == private(family, tokens)


def test_data_that_a_worker_cannot_read_costs_a_private_prefill(bench: Bench, family: Family) -> None:
    tokens, held = prompt(TOTAL, 8), held_of(family, 8)
    gone = Arena(LAYOUT, 64, 64, shared=True)
    here, bench.link.memory = bench.link.memory, gone

    def answer(question: Question) -> None:
        bench.link.plan(question.key, EXACT)
        bench.link.bring(question.key, EXACT, held)
        gone.close()

    bench.link.answer = answer
    try:
        assert bench.tokens(tokens) == private(family, tokens)
    finally:
        bench.link.memory = here
    assert bench.link.over[0][1] == 0
    assert bench.link.over[0][2]


@pytest.mark.parametrize("when", ["asked", "loading", "generating"])
def test_an_abort_leaves_nothing(bench: Bench, family: Family, when: str) -> None:
    tokens, held = prompt(TOTAL, 9), held_of(family, 9)
    most = {"asked": 0, "loading": 3, "generating": 1 << 30}[when]

    def answer(question: Question) -> None:
        if when != "asked":
            bench.link.plan(question.key, PARTIAL)
            bench.link.bring(question.key, PARTIAL, held, most=most)

    bench.link.answer = answer
    key = bench.add(tokens, max_tokens=50)
    if when == "asked":
        bench.step()
    elif when == "loading":
        bench.run(
            until=lambda _: (
                bench.side._asked[key].entry is not None
                and bench.side._asked[key].entry.load.state is LoadState.LOADING
            )
        )
        bench.step()
    else:
        bench.run(until=lambda outputs: bool(outputs))
    bench.llm.abort_request([key], internal=True)
    bench.run()
    bench.link.plan(key, PARTIAL)  # too late for anybody
    bench.link.bring(key, PARTIAL, held)
    bench.run()
    assert [one[0] for one in bench.link.over] == [key]
    assert not [one for one in bench.link.done if one[3]]


def test_what_was_computed_can_be_stored_at_the_prompts_end_and_at_the_answers(bench: Bench, family: Family) -> None:
    tokens = prompt(TOTAL, 10)
    bench.link.answer = lambda question: bench.link.plan(question.key, private_plan(TOTAL))
    bench.link.publish = lambda key: None  # its blocks stay until they are stored
    key = bench.add(tokens, max_tokens=12)
    finished = bench.run(until=lambda outputs: any(output.finished for output in outputs))
    (output,) = finished.values()
    answer = list(output.outputs[0].token_ids)
    (_, plan, first, last), (_, _, whole, really_last) = bench.link.done
    assert (first, last, plan.kind.value) == (tokens, False, "private")
    assert (whole, really_last) == ((*tokens, *answer[:-1]), True)
    assert bench.link.covered.has(TAP, 0, TOTAL)

    count = len(whole) // BLOCK
    slots = tuple(range(100, 100 + count))
    bench.link.events.append(StoreWanted(key, 1, 0, slots, tuple(range(NUM_LAYERS))))
    bench.link.events.append(StoreWanted(key, 2, 0, tuple(range(5)), (), TAP))
    assert bench.side.has_orders
    bench.run(until=lambda _: len(bench.link.stores) == 2)
    assert bench.link.stores == {1: "", 2: ""}
    wanted = oracle.private(family.models["receiver"], whole)
    for layer in range(NUM_LAYERS):
        ours = np.concatenate([bench.link.memory.kv_block(layer, slot) for slot in slots]).view(np.float32)
        theirs = kv_bytes(wanted, layer, 0, count * BLOCK, LAYOUT).view(np.float32)
        assert abs(ours - theirs).max() <= 1e-4 * max(1.0, abs(theirs).max())
    ours = bench.link.memory.e_block(0, 5).view(np.float32)
    theirs = e_bytes(wanted, TAP, 0, 5 * BLOCK, LAYOUT).view(np.float32)
    assert abs(ours - theirs).max() <= 1e-4 * max(1.0, abs(theirs).max())

    bench.link.events.append(Published(key))
    bench.run()
    bench.link.events.append(StoreWanted(key, 3, 0, (1,), (0,)))
    bench.add(prompt(40, 11))
    bench.link.publish = lambda key: bench.link.events.append(Published(key))
    bench.run()
    assert "given back" in bench.link.stores[3]


def test_a_link_that_never_publishes_does_not_keep_blocks(bench: Bench, family: Family) -> None:
    tokens = prompt(TOTAL, 12)
    bench.link.answer = lambda question: bench.link.plan(question.key, private_plan(TOTAL))
    bench.link.publish = lambda key: None
    bench.add(tokens)
    bench.run(until=lambda outputs: any(output.finished for output in outputs))
    assert bench.side._held
    bench.side._clock = lambda: HOLD_S + 1.0
    bench.run()
    assert not bench.side._held


@pytest.mark.parametrize(
    ("consumes", "produces", "waits", "publishes"),
    [(True, False, True, False), (False, True, False, True)],
    ids=["consumer", "producer"],
)
def test_roles(bench: Bench, family: Family, consumes: bool, produces: bool, waits: bool, publishes: bool) -> None:
    tokens, held = prompt(TOTAL, 13), held_of(family, 13)
    bench.side._consumes, bench.side._produces = consumes, produces

    def answer(question: Question) -> None:
        bench.link.plan(question.key, EXACT)
        bench.link.bring(question.key, EXACT, held)

    bench.link.answer = answer
    assert bench.tokens(tokens) == private(family, tokens)
    (question,) = bench.link.asked
    assert (question.wishes.reuse.value == "bounded") is waits
    assert bench.link.over[0][1] == (CONTEXT if waits else 0)
    assert bool(bench.link.done) is publishes


@pytest.mark.parametrize(
    "wishes", [{"reuse": "sometimes"}, {"max_loss": -1.0}, {"other": 1}, [], {"reuse": "off", "publish": False}]
)
def test_requests_that_take_no_part(bench: Bench, family: Family, wishes: Any) -> None:
    tokens = prompt(TOTAL, 14)
    assert bench.tokens(tokens, wishes=wishes) == private(family, tokens)
    assert not bench.link.asked
    assert bench.tokens(tokens, cache_salt="mine") == private(family, tokens)
    assert not bench.link.asked


def test_blocks_that_an_operator_takes_back_are_computed_again(bench: Bench, family: Family) -> None:
    """vLLM's reset preempts without a word: what was generated stays, and the rest goes on as a private run would."""
    tokens, held = prompt(TOTAL, 15), held_of(family, 15)

    def answer(question: Question) -> None:
        bench.link.plan(question.key, PARTIAL)
        bench.link.bring(question.key, PARTIAL, held)

    bench.link.answer = answer
    key = bench.add(tokens)
    bench.run(until=lambda outputs: bool(outputs))
    count = bench.side._asked[key].request.num_output_tokens
    scheduler = compat.scheduler_of(bench.llm)
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    (output,) = bench.run().values()
    before = planned(family, tokens, PARTIAL, held)[:count]
    expected = before + private(family, (*tokens, *before), 5 - count)
    assert list(output.outputs[0].token_ids) == expected
    assert bench.link.over == [(key, 0, "vLLM took back the blocks")]
    # neither plan made all of it
    assert not [one for one in bench.link.done if one[3]]
    bench.link.alive = False
    assert bench.tokens(tokens) == private(family, tokens)
