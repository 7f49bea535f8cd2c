"""Answers over several states of a context at once: every branch is what the oracle generates from that state alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import oracle
import pytest
import torch
from check_engine import NEAR_TIE, assert_close
from engine_harness import NUM_LAYERS, VARIANTS, family, prompt
from states_harness import (
    ANSWER,
    CONTEXT,
    GROUPS,
    SUFFIX,
    WHOLE,
    CountedOps,
    copied,
    ops_of,
    oracle_context,
    oracle_logits,
    same,
    sender_states,
)
from tiny_models import ARCHITECTURES

from kvkin.engines.answers import forced_logits, greedy_answers
from kvkin.engines.states import ContextStates, full_states, group_states, states_of_groups
from kvkin.kv.plan import LayerGroup

ALL = [*ARCHITECTURES, *VARIANTS]
BRANCHES = [WHOLE, None, LayerGroup(1, 3), LayerGroup(0, 2), LayerGroup(3, NUM_LAYERS)]
NEW_TOKENS = 6


def branches(arch: str) -> list[ContextStates]:
    return states_of_groups(ops_of(arch), CONTEXT, sender_states(arch), BRANCHES)


def answers(arch: str, states: Sequence[ContextStates], **options: Any) -> list[list[int]]:
    given = {"max_new_tokens": NEW_TOKENS, "eos": (), **options}
    return greedy_answers(ops_of(arch), states, SUFFIX, **given)


# --- greedy --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("suffix", [SUFFIX, SUFFIX[:1]], ids=["suffix", "one token"])
def test_every_branch_is_what_the_oracle_generates(arch: str, suffix: tuple[int, ...]) -> None:
    found = greedy_answers(ops_of(arch), branches(arch), suffix, max_new_tokens=NEW_TOKENS, eos=())
    model = family(arch)["receiver"]
    for group, tokens in zip(BRANCHES, found, strict=True):
        state = oracle.compute(model, oracle_context(arch, group), suffix)
        _, choices, logits = oracle.generate(model, state, NEW_TOKENS, tokens)
        assert len(tokens) == NEW_TOKENS
        for token, choice, row in zip(tokens, choices, logits, strict=True):
            best = torch.topk(row, 2).values
            assert token == choice or best[0] - best[1] < NEAR_TIE, f"group {group}"
    assert len({tuple(tokens) for tokens in found}) > 1, "the branches differ, or a mix-up would not show"


def test_many_branches_are_each_as_alone() -> None:
    """More rows than run through a layer at once, and a state that occurs twice."""
    states = states_of_groups(ops_of("llama"), CONTEXT, sender_states("llama"), [None, *GROUPS, None])
    suffix = prompt(64, seed=5)
    together = greedy_answers(ops_of("llama"), states, suffix, max_new_tokens=NEW_TOKENS, eos=())
    for state, tokens in zip(states, together, strict=True):
        assert [tokens] == greedy_answers(ops_of("llama"), [state], suffix, max_new_tokens=NEW_TOKENS, eos=())
    assert together[0] == together[-1]


def test_a_branch_ends_at_eos_and_the_others_go_on() -> None:
    states = branches("mistral")
    whole = answers("mistral", states)
    for eos in {whole[0][2], whole[1][0], whole[2][-1]}:
        wanted = [tokens[: tokens.index(eos)] if eos in tokens else tokens for tokens in whole]
        assert answers("mistral", states, eos={eos}) == wanted
    first = frozenset(tokens[0] for tokens in whole)
    assert answers("mistral", states, eos=first) == [[]] * len(states), "eos at once is an empty answer"


def test_done_ends_a_branch_and_keeps_its_last_token() -> None:
    states = branches("llama")
    whole = answers("llama", states)
    heard: set[tuple[int, ...]] = set()

    def enough(tokens: Sequence[int]) -> bool:
        return sum(tokens) % 3 == 0

    def done(tokens: Sequence[int]) -> bool:
        heard.add(tuple(tokens))
        return enough(tokens)

    prefixes = [[tokens[:end] for end in range(1, NEW_TOKENS + 1)] for tokens in whole]
    wanted = [next((prefix for prefix in each if enough(prefix)), each[-1]) for each in prefixes]
    assert answers("llama", states, done=done) == wanted
    assert len({len(tokens) for tokens in wanted}) > 1, "they end at different times"
    asked = {tuple(tokens[:end]) for tokens in wanted for end in range(1, len(tokens) + 1)}
    assert {tokens for tokens in asked if len(tokens) < NEW_TOKENS} <= heard <= asked


def test_one_new_token_is_the_first() -> None:
    states = branches("qwen3")
    assert answers("qwen3", states, max_new_tokens=1) == [tokens[:1] for tokens in answers("qwen3", states)]


def test_states_are_not_modified() -> None:
    states = branches("qwen2-window")
    before = [copied(state) for state in states]
    first = answers("qwen2-window", states)
    forced_logits(ops_of("qwen2-window"), states, SUFFIX, ANSWER)
    assert all(same(state, copy) for state, copy in zip(states, before, strict=True))
    assert answers("qwen2-window", states) == first


def test_projections_run_once_for_all_branches() -> None:
    ops = CountedOps(ops_of("llama"))
    greedy_answers(ops, branches("llama"), SUFFIX, max_new_tokens=NEW_TOKENS, eos=())
    steps = [len(SUFFIX) * len(BRANCHES), *[len(BRANCHES)] * (NEW_TOKENS - 1)]
    for name in ("project_qkv", "finish"):
        assert [rows for called, _, rows, _ in ops.calls if called == name] == [
            rows for rows in steps for _ in range(NUM_LAYERS)
        ]
    assert [rows for called, _, rows, _ in ops.calls if called == "logits"] == [len(BRANCHES)] * NEW_TOKENS


# --- forced --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize(("suffix", "answer"), [(SUFFIX, ANSWER), (SUFFIX, ANSWER[:1]), (SUFFIX[:1], ANSWER)])
def test_forced_logits_are_the_oracles(arch: str, suffix: tuple[int, ...], answer: tuple[int, ...]) -> None:
    found = forced_logits(ops_of(arch), branches(arch), suffix, answer)
    model = family(arch)["receiver"]
    assert found.dtype == torch.float32
    assert found.shape == (len(BRANCHES), len(answer), model.config.vocab_size)
    for group, logits in zip(BRANCHES, found, strict=True):
        wanted = oracle_logits(model, oracle_context(arch, group), suffix, answer)
        assert_close(logits, wanted, f"logits of group {group}")


def test_forced_logits_of_many_branches_come_in_order() -> None:
    """More answer rows than run through the head at once."""
    ops, answer = CountedOps(ops_of("llama")), prompt(25, seed=6)
    states = states_of_groups(ops_of("llama"), CONTEXT, sender_states("llama"), GROUPS)
    together = forced_logits(ops, states, SUFFIX, answer)
    assert max(rows for name, _, rows, _ in ops.calls if name == "logits") < len(GROUPS) * len(answer)
    for index, state in enumerate(states):
        assert_close(together[index], forced_logits(ops_of("llama"), [state], SUFFIX, answer)[0], f"branch {index}")


def test_an_answer_is_followed_and_not_chosen() -> None:
    """Logits after the greedy answer choose it again; another token in it changes what comes behind that token, only."""
    (state, *_), ops = branches("llama"), ops_of("llama")
    (tokens,) = answers("llama", [state])
    (own,) = forced_logits(ops, [state], SUFFIX, tokens)
    assert own.argmax(dim=-1).tolist() == tokens
    (other,) = forced_logits(ops, [state], SUFFIX, [tokens[0], tokens[1] + 1, *tokens[2:]])
    assert_close(other[:2], own[:2], "logits up to the changed token")
    assert min(float((row - old).abs().max()) for row, old in zip(other[2:], own[2:], strict=True)) > 0.01


# --- bad input -----------------------------------------------------------------------------------------------------------


def of_two_lengths() -> list[ContextStates]:
    return [full_states(ops_of("llama"), CONTEXT[:end]) for end in (30, 37)]


def shallow() -> list[ContextStates]:
    state = full_states(ops_of("llama"), CONTEXT)
    return [ContextStates(state.keys[1:], state.values[1:])]


@pytest.mark.parametrize(
    ("named", "states"),
    [
        ("states: at least one", list),
        ("states: of one length, not of 30, 37 tokens", of_two_lengths),
        ("states: of 4 layers, the model has 5", shallow),
    ],
)
def test_bad_states_are_named(named: str, states: Any) -> None:
    with pytest.raises(ValueError, match=named):
        answers("llama", states())
    with pytest.raises(ValueError, match=named):
        forced_logits(ops_of("llama"), states(), SUFFIX, ANSWER)


def test_bad_tokens_are_named() -> None:
    ops, sender = ops_of("llama"), sender_states("llama")
    states = [group_states(ops, CONTEXT, sender, None)]
    with pytest.raises(ValueError, match="suffix_ids"):
        greedy_answers(ops, states, (), max_new_tokens=1, eos=())
    with pytest.raises(ValueError, match="max_new_tokens: 0"):
        greedy_answers(ops, states, SUFFIX, max_new_tokens=0, eos=())
    with pytest.raises(ValueError, match="suffix_ids"):
        forced_logits(ops, states, (), ANSWER)
    with pytest.raises(ValueError, match="answer_ids"):
        forced_logits(ops, states, SUFFIX, ())
