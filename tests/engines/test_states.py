"""States of a context, whole, under a group or blended, against the oracle and CacheBlend's rule done by hand."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from check_engine import assert_close
from engine_harness import NUM_LAYERS, VARIANTS, contexts, family, prompt
from oracle import State
from states_harness import CONTEXT, GROUPS, WHOLE, CountedOps, copied, ops_of, oracle_context, same, sender_states
from tiny_models import ARCHITECTURES
from torch import Tensor

from kvkin.engines import states
from kvkin.engines.states import ContextStates, blend_states, full_states, group_states, states_of_groups
from kvkin.kv.plan import LayerGroup

ALL = [*ARCHITECTURES, *VARIANTS]
SOME_GROUPS = [LayerGroup(0, 1), LayerGroup(0, 3), LayerGroup(1, 3), LayerGroup(2, 3), LayerGroup(3, NUM_LAYERS), WHOLE]


def assert_kv(found: ContextStates, wanted: State | ContextStates) -> None:
    assert (found.num_tokens, found.num_layers) == (wanted.num_tokens, wanted.num_layers)
    for layer in range(wanted.num_layers):
        assert_close(found.keys[layer], wanted.keys[layer], f"keys of layer {layer}")
        assert_close(found.values[layer], wanted.values[layer], f"values of layer {layer}")


# --- whole ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("chunk_tokens", [1, 12, 36, 37, 512])
def test_full_states_are_a_private_prefill(arch: str, chunk_tokens: int) -> None:
    found = full_states(ops_of(arch), CONTEXT, keep_hidden=True, chunk_tokens=chunk_tokens)
    wanted = contexts(arch, len(CONTEXT))["receiver"]
    assert_kv(found, wanted)
    for layer in range(NUM_LAYERS):
        assert_close(found.hidden[layer], wanted.hidden[layer], f"hidden states entering layer {layer}")


def test_hidden_states_are_kept_only_if_asked_for() -> None:
    bare, kept = (full_states(ops_of("llama"), CONTEXT, keep_hidden=keep) for keep in (False, True))
    assert bare.hidden == []
    assert len(kept.hidden) == NUM_LAYERS
    kv_bytes = NUM_LAYERS * len(CONTEXT) * 2 * 2 * 16 * 4
    assert bare.nbytes == kv_bytes
    assert kept.nbytes == kv_bytes + NUM_LAYERS * len(CONTEXT) * 64 * 4


def test_a_context_of_one_token() -> None:
    assert_kv(full_states(ops_of("mistral"), CONTEXT[:1]), contexts("mistral", 1)["receiver"])


def test_nothing_is_computed_that_leads_to_no_kv() -> None:
    ops = CountedOps(ops_of("llama"))
    full_states(ops, CONTEXT)
    assert ops.layers("project_qkv") == ops.layers("attend") == ops.layers("finish") == list(range(NUM_LAYERS - 1))
    assert ops.layers("project_kv") == [NUM_LAYERS - 1]


# --- under a group -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("group", [None, *SOME_GROUPS], ids=str)
def test_group_states_are_what_the_plan_yields(arch: str, group: LayerGroup | None) -> None:
    assert_kv(group_states(ops_of(arch), CONTEXT, sender_states(arch), group), oracle_context(arch, group))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_group_shifted_by_one_is_another(arch: str) -> None:
    """Otherwise the test above could not tell."""
    with pytest.raises(AssertionError, match="differ by"):
        assert_kv(
            group_states(ops_of(arch), CONTEXT, sender_states(arch), LayerGroup(2, 4)),
            oracle_context(arch, LayerGroup(1, 3)),
        )


def test_layers_outside_of_the_group_are_the_senders_own_tensors() -> None:
    sender = sender_states("llama")
    before = copied(sender)
    found = group_states(ops_of("llama"), CONTEXT, sender, LayerGroup(1, 3))
    shared = [found.keys[i] is sender.keys[i] and found.values[i] is sender.values[i] for i in range(NUM_LAYERS)]
    assert shared == [True, False, False, True, True]
    assert found.hidden == []
    assert same(sender, before), "the sender's states were written to"


def test_the_last_layer_of_a_group_computes_k_and_v_only() -> None:
    ops = CountedOps(ops_of("llama"))
    group_states(ops, CONTEXT, sender_states("llama"), LayerGroup(1, 4))
    assert ops.layers("project_qkv") == ops.layers("attend") == ops.layers("finish") == [1, 2]
    assert ops.layers("project_kv") == [3]


def test_full_reuse_runs_nothing() -> None:
    ops = CountedOps(ops_of("llama"))
    group_states(ops, CONTEXT, sender_states("llama"), None)
    assert ops.calls == []


def test_groups_that_start_alike_are_computed_once() -> None:
    ops, sender = CountedOps(ops_of("mistral")), sender_states("mistral")
    groups = [LayerGroup(1, 3), None, *GROUPS]
    together = states_of_groups(ops, CONTEXT, sender, groups)
    passes = ops.rows("project_kv", "project_qkv", context=True) / len(CONTEXT)
    assert passes == sum(range(1, NUM_LAYERS + 1)), "each start once, down to the last layer"
    for group, found in zip(groups, together, strict=True):
        assert_kv(found, group_states(ops_of("mistral"), CONTEXT, sender, group))
    assert together[0].keys[2] is together[groups.index(LayerGroup(1, 4))].keys[2]


# --- blended -------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def blend_by_hand(model: Any, sender: State, ratio: float, check_layer: int, update: bool) -> tuple[State, int]:
    """CacheBlend's rule over transformers' own layers, one token's deviation at a time."""
    num_tokens, everything = len(CONTEXT), torch.arange(len(CONTEXT))
    hidden = model.model.embed_tokens(torch.tensor(CONTEXT))
    state, computed = State([], [], []), 0
    for layer in range(check_layer + 1):
        none = sender.keys[layer][:0], sender.values[layer][:0], everything[:0]
        leaving, keys, values = oracle.run_layer(model, layer, hidden, everything, *none)
        computed += num_tokens
        if layer < check_layer:
            hidden = leaving
            state.keys.append(keys)
            state.values.append(values)
    old = sender.values[check_layer]
    deviations = {token: float(((values[token] - old[token]) ** 2).sum()) for token in range(num_tokens)}
    ranked = sorted(deviations, key=lambda token: deviations[token], reverse=True)
    chosen = torch.tensor(sorted(ranked[: int(ratio * num_tokens)]), dtype=torch.long)
    others = torch.tensor(sorted(set(range(num_tokens)) - set(chosen.tolist())), dtype=torch.long)
    fresh, hidden = (keys, values), hidden[chosen]
    for layer in range(check_layer, NUM_LAYERS):
        base = fresh if update and layer == check_layer else (sender.keys[layer], sender.values[layer])
        merged_keys, merged_values = base[0].clone(), base[1].clone()
        if len(chosen):
            past = merged_keys[others], merged_values[others], others
            hidden, merged_keys[chosen], merged_values[chosen] = oracle.run_layer(model, layer, hidden, chosen, *past)
        computed += len(chosen) if layer > check_layer else 0
        state.keys.append(merged_keys)
        state.values.append(merged_values)
    return state, computed


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize("check_layer", [0, 1, NUM_LAYERS - 1])
@pytest.mark.parametrize("ratio", [0.0, 0.03, 0.3, 0.7, 1.0])
def test_blend_follows_the_published_rule(arch: str, ratio: float, check_layer: int, update: bool) -> None:
    found, computed = blend_states(
        ops_of(arch),
        CONTEXT,
        sender_states(arch),
        ratio=ratio,
        check_layer=check_layer,
        update_check_layer=update,
    )
    held = contexts(arch, len(CONTEXT))["sender"]
    wanted, count = blend_by_hand(family(arch)["receiver"], held, ratio, check_layer, update)
    assert_kv(found, wanted)
    assert computed == count


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("check_layer", [0, 1, 3])
def test_blending_every_token_is_a_full_prefill(arch: str, check_layer: int) -> None:
    found, computed = blend_states(ops_of(arch), CONTEXT, sender_states(arch), ratio=1.0, check_layer=check_layer)
    assert_kv(found, contexts(arch, len(CONTEXT))["receiver"])
    assert computed == NUM_LAYERS * len(CONTEXT)


def test_blending_no_token_is_full_reuse() -> None:
    sender = sender_states("llama")
    found, computed = blend_states(ops_of("llama"), CONTEXT, sender, ratio=0.0, check_layer=0)
    assert same(found, group_states(ops_of("llama"), CONTEXT, sender, None))
    assert computed == len(CONTEXT), "the check itself"


def test_blending_leaves_the_sender_alone() -> None:
    sender = sender_states("qwen3")
    before = copied(sender)
    blend_states(ops_of("qwen3"), CONTEXT, sender, ratio=0.5)
    assert same(sender, before)


@pytest.mark.parametrize("mutation", ["the least deviating tokens", "keys instead of values", "another check layer"])
def test_another_choice_of_tokens_is_noticed(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with the rule could not pass for any choice of tokens."""
    ops, sender = ops_of("llama"), sender_states("llama")
    choose = states._most_deviating
    if mutation == "the least deviating tokens":
        fewest = sorted(set(range(len(CONTEXT))) - set(choose(*_checked(1), len(CONTEXT) - 11)))
        monkeypatch.setattr(states, "_most_deviating", lambda fresh, old, count: fewest)
    elif mutation == "keys instead of values":
        by_keys = choose(contexts("llama", len(CONTEXT))["receiver"].keys[1], sender.keys[1], 11)
        monkeypatch.setattr(states, "_most_deviating", lambda fresh, old, count: by_keys)
    found, _ = blend_states(ops, CONTEXT, sender, ratio=0.3, check_layer=2 if mutation == "another check layer" else 1)
    held, model = contexts("llama", len(CONTEXT))["sender"], family("llama")["receiver"]
    wanted, _ = blend_by_hand(model, held, 0.3, 1, False)
    with pytest.raises(AssertionError, match="differ by"):
        assert_kv(found, wanted)


def _checked(layer: int) -> tuple[Tensor, Tensor]:
    """The receiver's and the sender's values at a layer."""
    held = contexts("llama", len(CONTEXT))
    return held["receiver"].values[layer], held["sender"].values[layer]


# --- bad input -----------------------------------------------------------------------------------------------------------


def short_sender() -> ContextStates:
    return full_states(ops_of("llama", "sender"), CONTEXT[:-1], keep_hidden=True)


def shallow_sender() -> ContextStates:
    sender = sender_states("llama")
    return ContextStates(sender.keys[:-1], sender.values[:-1])


@pytest.mark.parametrize(
    ("named", "arguments"),
    [
        ("token_ids", {"token_ids": ()}),
        ("sender: states of 36 tokens", {"sender": short_sender}),
        ("sender: states of 4 layers", {"sender": shallow_sender}),
        ("sender: its hidden states entering layer 2", {"sender": lambda: full_states(ops_of("llama"), CONTEXT)}),
        (r"group: \[2, 6\)", {"group": LayerGroup(2, NUM_LAYERS + 1)}),
        (r"group: \[3, 3\)", {"group": LayerGroup(3, 3)}),
        (r"group: \[-1, 2\)", {"group": LayerGroup(-1, 2)}),
    ],
)
def test_bad_groups_and_senders_are_named(named: str, arguments: dict[str, Any]) -> None:
    sender = arguments.get("sender", lambda: sender_states("llama"))()
    with pytest.raises(ValueError, match=named):
        group_states(
            ops_of("llama"), arguments.get("token_ids", CONTEXT), sender, arguments.get("group", LayerGroup(2, 4))
        )


@pytest.mark.parametrize(
    ("named", "arguments"),
    [
        ("ratio: 1.01", {"ratio": 1.01}),
        ("ratio: -0.1", {"ratio": -0.1}),
        ("ratio: nan", {"ratio": float("nan")}),
        ("check_layer: 5", {"check_layer": NUM_LAYERS}),
        ("check_layer: -1", {"check_layer": -1}),
    ],
)
def test_bad_blends_are_named(named: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=named):
        blend_states(ops_of("llama"), CONTEXT, sender_states("llama"), **{"ratio": 0.2, **arguments})


def test_bad_blend_senders_are_named() -> None:
    with pytest.raises(ValueError, match="sender: states of 36 tokens"):
        blend_states(ops_of("llama"), CONTEXT, short_sender(), ratio=0.2)


def test_bad_prefills_are_named() -> None:
    with pytest.raises(ValueError, match="token_ids"):
        full_states(ops_of("llama"), prompt(0))
    with pytest.raises(ValueError, match="chunk_tokens: 0"):
        full_states(ops_of("llama"), CONTEXT, chunk_tokens=0)
