"""The oracle itself: plain transformers, kvkin's engines never imported, and its pieces equal whole forwards."""

from __future__ import annotations

import ast
from pathlib import Path

import oracle
import pytest
import torch
from check_engine import SHAPES, Geometry, assert_close
from engine_harness import NUM_LAYERS, VARIANTS, computed, contexts, family, partial, plan_of, prompt
from tiny_models import ARCHITECTURES, SLIDING_WINDOW
from transformers import DynamicCache

TOKENS = 61


def assert_same(found: oracle.State, wanted: oracle.State) -> None:
    for layer in range(NUM_LAYERS):
        assert_close(found.keys[layer], wanted.keys[layer], f"keys of layer {layer}")
        assert_close(found.values[layer], wanted.values[layer], f"values of layer {layer}")


def test_it_never_imports_the_engines() -> None:
    tree = ast.parse(Path(oracle.__file__).read_text(encoding="utf-8"))
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert [name for name in imported if name and name.startswith("kvkin")] == ["kvkin.kv.plan"]


@pytest.mark.parametrize("arch", [*ARCHITECTURES, *VARIANTS])
@torch.inference_mode()
def test_layer_by_layer_equals_the_whole_model(arch: str) -> None:
    """``run_layer`` with its explicit mask, on all rows and on a second half, gives what one forward gives."""
    model, whole = family(arch)["receiver"], contexts(arch, TOKENS)["receiver"]
    hidden = whole.hidden[0]
    positions = torch.arange(TOKENS)
    for layer in range(NUM_LAYERS):
        assert_close(hidden, whole.hidden[layer], f"hidden states entering layer {layer}")
        before = whole.keys[layer][:40], whole.values[layer][:40], positions[:40]
        late, keys, values = oracle.run_layer(model, layer, hidden[40:], positions[40:], *before)
        assert_close(keys, whole.keys[layer][40:], f"late keys of layer {layer}")
        none = whole.keys[layer][:0], whole.values[layer][:0], positions[:0]
        hidden, keys, values = oracle.run_layer(model, layer, hidden, positions, *none)
        assert_close(late, hidden[40:], f"late rows leaving layer {layer}")
        assert_close(keys, whole.keys[layer], f"keys of layer {layer}")
        assert_close(values, whole.values[layer], f"values of layer {layer}")
    assert_close(model.lm_head(model.model.norm(hidden))[-1], whole.logits, "logits")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_suffix_over_a_cache_equals_one_forward(arch: str) -> None:
    model, whole, ids = family(arch)["receiver"], contexts(arch, TOKENS)["receiver"], prompt(TOKENS)
    for split in (1, 33, TOKENS - 1):
        state = oracle.compute(model, oracle.private(model, ids[:split]), ids[split:])
        assert_same(state, whole)
        assert_close(state.logits, whole.logits, "logits")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@torch.inference_mode()
def test_greedy_tokens_are_those_of_transformers(arch: str) -> None:
    """Its own ``generate`` with the cache of the config, which drops old keys of sliding layers."""
    model, ids = family(arch)["receiver"], prompt(TOKENS)
    _, choices, _ = oracle.generate(model, contexts(arch, TOKENS)["receiver"], 12)
    out = model.generate(
        torch.tensor([ids]),
        past_key_values=DynamicCache(config=model.config),
        max_new_tokens=12,
        min_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert out[0, TOKENS:].tolist() == choices


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", SHAPES)
def test_exact_shapes_are_private_and_others_are_not(arch: str, name: str) -> None:
    """The oracle agrees with DESIGN's table on what is exact; and an inexact shape differs so much that a test can tell."""
    receiver, plan, exact = SHAPES[name](Geometry(8, 16, 48, TOKENS))
    held = contexts(arch, TOKENS)
    state = oracle.execute(family(arch)[receiver], prompt(TOKENS), plan, held)
    if exact:
        assert_same(state, held[receiver])
    else:
        differ = [(state.keys[layer] - held[receiver].keys[layer]).abs().max() for layer in range(NUM_LAYERS)]
        assert max(differ) > 0.1


def test_the_receivers_own_states_make_a_group_exact() -> None:
    """DroidSpeak with sender = receiver changes nothing, whatever the group."""
    held = contexts("mistral", TOKENS)
    for group in ((0, 2), (1, 4), (3, NUM_LAYERS)):
        plan = plan_of(partial(0, 48, group, "twin"), computed(48, TOKENS))
        assert_same(oracle.execute(family("mistral")["receiver"], prompt(TOKENS), plan, held), held["receiver"])


def test_the_window_decides() -> None:
    """The Mistral family of these tests sees a window shorter than its contexts, and no other one does."""
    assert SLIDING_WINDOW < 40
    queries, keys = torch.arange(5), torch.arange(5)
    assert oracle.visible(queries, keys, 2).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    windows = {arch: oracle.window_of(family(arch)["receiver"], 0) for arch in ARCHITECTURES}
    assert windows == {"llama": None, "mistral": SLIDING_WINDOW, "qwen2": None, "qwen3": None, "mixtral": None}
    mixed = family("qwen2-window")["receiver"]
    assert [oracle.window_of(mixed, layer) for layer in range(NUM_LAYERS)] == [None, None, 10, 10, 10]
