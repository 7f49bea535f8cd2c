"""The scheduler side of a plain vLLM server, on an in-process vLLM: the test is the link, the oracle says what must come out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import oracle
import pytest
from engine_harness import NUM_LAYERS, computed, contexts, e_bytes, exact, kv_bytes, partial, plan_of, prompt
from oracle import State
from serving_bench import BLOCK, CONTEXT, LAYOUT, TAP, TOTAL, Bench, Built, built_server, fresh_bench
from vllm_bench import Family, plain_family

from kvkin.engines.vllm import compat
from kvkin.engines.vllm.loads import LoadState
from kvkin.engines.vllm.serving import Published, Question, SourcesFailed, StoreWanted
from kvkin.engines.vllm.serving_side import HOLD_S
from kvkin.kv.plan import ReusePlan, private_plan
from kvkin.transport.arena import Arena

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return plain_family("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def built(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    with built_server(family, tmp_path_factory.mktemp("cluster")) as built:
        yield built


@pytest.fixture
def bench(built: Built) -> Iterator[Bench]:
    with fresh_bench(built) as bench:
        yield bench


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
    for how, why in (({"wishes": wishes}, ""), ({"cache_salt": "mine"}, "cache_salt")):
        bench.add(tokens, **how)
        (output,) = bench.run().values()
        assert list(output.outputs[0].token_ids) == private(family, tokens)
        said = output.kv_transfer_params["kvkin"]
        assert (said["plan"], said["tokens_reused"]) == ("private", 0)
        assert why in said["reason"] != ""
        assert not bench.link.asked
    assert not bench.side._apart


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
