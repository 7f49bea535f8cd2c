"""The engine contract, part three: what one request leaves behind is what the next one, or another model, starts from.

Turns are chained through bytes: KV and E taps are read out of the engine's workspace after a request, cut into blocks, and pulled by
later ones. The oracle goes the same way with its own states, so that errors would add up if there were any.
"""

from __future__ import annotations

import random
from typing import Any

import oracle
import torch
from check_engine import Tally, assert_result
from engine_harness import (
    TAPS,
    Bench,
    Heard,
    MakeEngine,
    Recorder,
    arrivals,
    computed,
    contexts,
    exact,
    family,
    partial,
    plan_of,
    prompt,
    request,
    run_until_idle,
    token_wise,
)
from oracle import State

from kvkin.kv.plan import ReusePlan

BLOCK, CHUNK = 8, 16


class Conversation:
    """Requests of several models, one after the other, over what the earlier ones left in the engine."""

    def __init__(self, make_engine: MakeEngine, arch: str) -> None:
        self.arch, self.models = arch, family(arch)
        self.bench: Bench = make_engine(self.models, block_size=BLOCK, chunk_tokens=CHUNK)
        self.left: dict[str, State] = {}  # by node name, as the engine left it
        self.wanted: dict[str, State] = {}  # the same, as the oracle has it
        self.tally = Tally()

    def know(self, contexts: dict[str, State]) -> None:
        self.left.update(contexts)
        self.wanted.update(contexts)

    def turn(self, name: str, model: str, token_ids: tuple[int, ...], plan: ReusePlan) -> tuple[int, ...]:
        """Run a request, compare it, keep what it leaves under ``name``; returns prompt and answer."""
        recorder = Recorder(self.bench)
        execution = self.bench.engine.submit(request(name, token_ids, plan, model), recorder)
        for arrival in arrivals(plan, execution, self.left, self.bench.engine.layout(model), random.Random(name)):
            self.bench.engine.arrived(name, arrival)
        run_until_idle(self.bench)
        heard = recorder.of(name)
        self.wanted[name] = assert_result(
            self.bench, heard, self.models[model], token_ids, plan, self.wanted, self.tally
        )
        self.left[name] = self._left(heard, self.wanted[name])
        return (*token_ids, *heard.tokens)

    def _left(self, heard: Heard, like: State) -> State:
        """KV and E taps out of the engine's workspace; E is NaN where the engine does not offer a block's."""
        kv = [self.bench.kv(heard.space, layer, like.num_tokens) for layer in range(like.num_layers)]
        hidden = [torch.full_like(states, float("nan")) for states in like.hidden]
        for layer in TAPS:
            for start in range(0, like.num_tokens - BLOCK + 1, BLOCK):
                states: Any = self.bench.e(heard.space, layer, start, start + BLOCK)
                if states is not None:
                    hidden[layer][start : start + BLOCK] = states
        return State([keys.clone() for keys, _ in kv], [values.clone() for _, values in kv], hidden)


def whole_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK * BLOCK


def check_three_turns_of_two_agents(make_engine: MakeEngine, arch: str) -> None:
    """Agent one answers; agent two takes its context and answer approximately; agent one goes on over its own blocks and the
    reply of agent two. Published length is prompt + generated - 1, so that answers are reused with their E."""
    talk = Conversation(make_engine, arch)
    first = talk.turn("one", "receiver", prompt(37), plan_of(computed(0, 37)))
    asked = (*first, *prompt(11, seed=8))
    shared = whole_blocks(len(first) - 1)
    assert shared == 40, "the last block holds generated tokens"
    second = talk.turn("two", "other", asked, plan_of(partial(0, shared, (1, 3), "one"), computed(shared, len(asked))))
    asked = (*second, *prompt(6, seed=9))
    reply = whole_blocks(len(second) - 1)
    plan = plan_of(exact(0, 32, "one"), partial(32, reply, (2, 4), "two"), computed(reply, len(asked)))
    third = talk.turn("three", "receiver", asked, plan)
    # the next turn pulls its own tainted blocks whole: exactly what an unbroken computation would have read
    asked = (*third, *prompt(3, seed=10))
    own = whole_blocks(len(third) - 1)
    talk.turn("four", "receiver", asked, plan_of(exact(0, own, "three"), computed(own, len(asked))))
    talk.tally.close()


def check_exact_turns_equal_one_prefill(make_engine: MakeEngine, arch: str) -> None:
    """Turn after turn over own blocks: the same as a private prefill of the whole conversation."""
    talk = Conversation(make_engine, arch)
    tokens = talk.turn("t0", "receiver", prompt(20), plan_of(computed(0, 20)))
    for index in range(1, 4):
        own = whole_blocks(len(tokens) - 1)
        tokens = (*tokens, *prompt(7, seed=index))
        plan = plan_of(exact(0, own, f"t{index - 1}"), computed(own, len(tokens)))
        tokens = talk.turn(f"t{index}", "receiver", tokens, plan)
    talk.tally.close()
    alone = oracle.private(talk.models["receiver"], tokens[:-1])
    for layer in range(alone.num_layers):
        torch.testing.assert_close(talk.left["t3"].keys[layer], alone.keys[layer], rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(talk.left["t3"].values[layer], alone.values[layer], rtol=1e-4, atol=1e-3)


def check_a_chain_of_approximations(make_engine: MakeEngine, arch: str) -> None:
    """Each model starts from what the one before left, under another group or other rows; E comes along from layer to layer."""
    talk = Conversation(make_engine, arch)
    tokens = prompt(45)
    talk.know({"origin": contexts(arch, 45)["sender"]})
    rest = computed(40, 45)
    talk.turn("a", "receiver", tokens, plan_of(partial(0, 40, (1, 4), "origin"), rest))
    talk.turn("b", "other", tokens, plan_of(partial(0, 40, (2, 5), "a"), rest))
    talk.turn("c", "upper", tokens, plan_of(token_wise(0, 40, range(4, 40, 5), "b"), rest))
    talk.turn("d", "receiver", tokens, plan_of(partial(0, 40, (4, 5), "c", e_node="b"), rest))
    talk.tally.close()
