"""Lineages of real checkpoint files: equal exactly where plain transformers computes equal KV.

The numbers 3 and 4 in the names below are those of the rule: k, v, k_norm and input norm of layer 3 decide on KV from 3 on,
everything else of layer 3 from 4 on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_edits import copy, edit_json, edit_weights, identity, kv_of, lineage, load_model, nudge, nudged, shard
from safetensors.torch import load_file
from tiny_models import ARCHITECTURES, make_tiny

from kvkin.kv.lineage import shared_depth, shared_transition

NUM_LAYERS = 5
KV_PARTS = ("input_layernorm", "self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm")
KV = tuple[torch.Tensor, torch.Tensor]
TOKENS = torch.randint(3, 320, (60,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.fixture(scope="module", params=ARCHITECTURES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param) / "base", num_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama") / "base", num_layers=NUM_LAYERS)


def tensor_names(folder: Path) -> Iterator[str]:
    """Tensors of layer 3 (one expert stands for the others) and those outside the layers."""
    for name in sorted(load_file(str(folder / "model.safetensors"))):
        in_layer_3 = ".layers.3." in name and (".experts." not in name or ".experts.1." in name)
        if in_layer_3 or ".layers." not in name:
            yield name


def equal_layers(one: list[KV], other: list[KV]) -> list[bool]:
    """Per layer, whether two models' keys and values are equal to the bit."""
    pairs = zip(one, other, strict=True)
    return [
        torch.equal(keys, keys_too) and torch.equal(values, values_too)
        for (keys, values), (keys_too, values_too) in pairs
    ]


def test_a_change_misses_from_the_layer_on_where_kv_changes(base: Path, tmp_path: Path) -> None:
    original, model = lineage(base), load_model(base)
    kv = kv_of(model, TOKENS)
    names = list(tensor_names(base))
    assert len(names) >= 11
    for index, name in enumerate(names):
        changed = nudge(copy(base, tmp_path / str(index)), name)
        part = name.partition(".layers.3.")[2]
        expected = (3 if part.startswith(KV_PARTS) else 4) if part else 0 if "embed" in name else NUM_LAYERS
        new = lineage(changed)
        assert shared_depth(original, new) == expected, name
        # hidden states entering layer 3 are the same in any case
        assert shared_transition(original, new) == (3 if part else expected), name
        with nudged(model, name):
            changed_kv = kv_of(model, TOKENS)
        assert equal_layers(kv, changed_kv) == [layer < expected for layer in range(NUM_LAYERS)], name


def test_reading_twice_gives_the_same(base: Path) -> None:
    assert identity(base) == identity(base)
    assert len(set(lineage(base).kv + lineage(base).hidden)) == 2 * NUM_LAYERS + 1


def test_another_path_and_sharding_is_the_same_model(base: Path, tmp_path: Path) -> None:
    moved = shard(copy(base, tmp_path / "elsewhere"), 3)
    assert lineage(moved) == lineage(base)


def test_names_without_the_model_prefix_are_the_same_model(base: Path, tmp_path: Path) -> None:
    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    assert lineage(edit_weights(copy(base, tmp_path / "bare"), strip)) == lineage(base)


def test_what_says_nothing_about_kv_does_not_matter(base: Path, tmp_path: Path) -> None:
    noisy = edit_json(
        copy(base, tmp_path / "noisy"),
        _name_or_path="somebody/else",
        transformers_version="4.40.0",
        dtype=...,
        torch_dtype="float32",
        use_cache=False,
        initializer_range=0.5,
        attention_dropout=0.1,
        max_position_embeddings=256,
        eos_token_id=[1, 2],
        a_key_of_tomorrow={"x": 1},
    )
    assert lineage(noisy) == lineage(base)


def test_what_layers_compute_with_matters(base: Path, tmp_path: Path) -> None:
    original = lineage(base)
    changes: dict[str, dict[str, Any]] = {
        "eps": {"rms_norm_eps": 1e-6},
        "activation": {"hidden_act": "gelu"},
        "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
    }
    for name, change in changes.items():
        assert shared_depth(original, lineage(edit_json(copy(base, tmp_path / name), **change))) == 0, name
    assert shared_depth(original, lineage(base, compute_dtype="bfloat16")) == 0


def test_frozen_lower_layers_are_shared(llama: Path, tmp_path: Path) -> None:
    def train_upper_half(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.startswith(("model.layers.3.", "model.layers.4.")) or name == "model.norm.weight":
                tensors[name] = tensor * 1.01

    tuned = lineage(edit_weights(copy(llama, tmp_path / "tuned"), train_upper_half))
    assert (shared_depth(lineage(llama), tuned), shared_transition(lineage(llama), tuned)) == (3, 3)


def test_a_swap_of_two_layers_is_a_change(llama: Path, tmp_path: Path) -> None:
    def swap(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".layers.1." in name]:
            other = name.replace(".layers.1.", ".layers.2.")
            tensors[name], tensors[other] = tensors[other], tensors[name]

    assert shared_depth(lineage(llama), lineage(edit_weights(copy(llama, tmp_path / "swap"), swap))) == 1


def test_a_tensor_nobody_knows_counts(llama: Path, tmp_path: Path) -> None:
    def in_a_layer(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.3.self_attn.k_scale"] = torch.ones(1)

    def outside(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.position_table"] = torch.ones(4)

    assert shared_depth(lineage(llama), lineage(edit_weights(copy(llama, tmp_path / "in"), in_a_layer))) == 3
    assert shared_depth(lineage(llama), lineage(edit_weights(copy(llama, tmp_path / "out"), outside))) == 0


def test_saved_rope_frequencies_of_old_checkpoints_do_not_count(llama: Path, tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.3.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    assert lineage(edit_weights(copy(llama, tmp_path / "old"), add)) == lineage(llama)


def test_another_dtype_of_the_same_numbers_is_another_model(llama: Path, tmp_path: Path) -> None:
    def half(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(torch.bfloat16)

    tuned = identity(edit_weights(copy(llama, tmp_path / "half"), half))
    assert tuned.numerics == "bfloat16/float32/float32"
    assert shared_depth(lineage(llama), tuned.lineage) == 0


def test_fused_and_separate_experts_are_the_same_model(tmp_path: Path) -> None:
    folder = make_tiny("mixtral", tmp_path / "separate", num_layers=2)

    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(2):
            old, new = f"model.layers.{layer}.block_sparse_moe", f"model.layers.{layer}.mlp"
            w1, w2, w3 = (
                [tensors.pop(f"{old}.experts.{e}.{part}.weight") for e in range(4)] for part in ("w1", "w2", "w3")
            )
            tensors[f"{new}.experts.gate_up_proj"] = torch.cat([torch.stack(w1), torch.stack(w3)], dim=1)
            tensors[f"{new}.experts.down_proj"] = torch.stack(w2)
            tensors[f"{new}.gate.weight"] = tensors.pop(f"{old}.gate.weight")

    assert lineage(edit_weights(copy(folder, tmp_path / "fused"), fuse)) == lineage(folder)


def test_fused_experts_as_transformers_itself_writes_them(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_tiny("mixtral", tmp_path / "separate", num_layers=2)
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    model.save_pretrained(str(tmp_path / "fused"), save_original_format=False)
    assert any("gate_up_proj" in name for name in load_file(str(tmp_path / "fused" / "model.safetensors")))
    assert lineage(tmp_path / "fused") == lineage(folder)


def test_tokens_added_by_a_fine_tune_do_not_hide_what_it_shares(llama: Path, tmp_path: Path) -> None:
    def grow(tensors: dict[str, torch.Tensor]) -> None:
        rows = tensors["model.embed_tokens.weight"]
        tensors["model.embed_tokens.weight"] = torch.cat([rows, torch.randn(8, rows.shape[1])])

    grown = edit_json(edit_weights(copy(llama, tmp_path / "grown"), grow), vocab_size=328)
    assert lineage(grown, family_vocab=320) == lineage(llama)
    assert shared_depth(lineage(grown), lineage(llama)) == 0


def test_windows_count_only_where_they_are(tmp_path: Path) -> None:
    full = make_tiny("qwen2", tmp_path / "full", num_layers=4)
    window = make_tiny(
        "qwen2", tmp_path / "window", num_layers=4, use_sliding_window=True, sliding_window=8, max_window_layers=2
    )
    assert identity(window).geometry.windows == (None, None, 8, 8)
    # KV of layer 2 does not depend on that layer's own window, but the rule takes geometry whole: a miss, never a wrong hit
    assert shared_depth(lineage(full), lineage(window)) == 2
    # transformers 4 wrote no layer_types
    assert lineage(edit_json(copy(window, tmp_path / "old"), layer_types=...)) == lineage(window)
    assert json.loads((window / "config.json").read_text())["layer_types"][1:3] == [
        "full_attention",
        "sliding_attention",
    ]


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ({"rope_type": "default", "rope_theta": 5000.0}, {"rope_theta": 5000}),
        ({"rope_type": "default", "rope_theta": 10000.0}, {}),
        ({"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}, {"rope_theta": 5000, "rope_scaling": {"type": "linear", "factor": 2}}),
        ({"rope_type": "linear", "rope_theta": 5000.0, "factor": 1.0}, {"rope_theta": 5000}),
        (
            {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128},
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 128}},
        ),
        (
            {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128},
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1, "truncate": True}},
        ),
    ],
    ids=["default", "default theta", "linear", "linear 1", "llama3", "yarn"],
)  # fmt: skip
def test_old_and_new_spelling_of_rope_mean_the_same(
    llama: Path, tmp_path: Path, new: dict[str, Any], old: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM

    five = edit_json(copy(llama, tmp_path / "five"), rope_parameters=new)
    four = edit_json(copy(llama, tmp_path / "four"), rope_parameters=..., **old)
    assert lineage(five) == lineage(four)
    ropes = [AutoModelForCausalLM.from_pretrained(str(folder)).model.rotary_emb for folder in (five, four)]
    assert torch.equal(ropes[0].inv_freq, ropes[1].inv_freq)
    rope = identity(five).geometry.rope
    if rope.kind == "yarn":
        assert rope.attention_factor == pytest.approx(ropes[0].attention_scaling)
    assert (lineage(five) == lineage(llama)) == torch.equal(
        ropes[0].inv_freq, AutoModelForCausalLM.from_pretrained(str(llama)).model.rotary_emb.inv_freq
    )


def test_geometry_agrees_with_transformers(base: Path) -> None:
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(str(base))
    geometry = identity(base).geometry
    assert (geometry.num_layers, geometry.hidden_size) == (config.num_hidden_layers, config.hidden_size)
    assert (geometry.num_heads, geometry.kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    assert geometry.head_dim == getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    assert geometry.rope.theta == config.rope_parameters["rope_theta"]
    window = config.sliding_window if config.model_type == "mistral" else None
    assert geometry.windows == (window,) * NUM_LAYERS
    layout = identity(base).layout("float32", 16)
    keys, values = kv_of(load_model(base), TOKENS)[0]
    assert [plane.name for plane in layout.planes] == ["keys", "values"]
    for plane, tensor in zip(layout.planes, (keys, values), strict=True):
        assert tensor.shape == (1, plane.kv_heads, len(TOKENS), plane.head_dim)


def test_defaults_left_out_mean_what_transformers_takes(tmp_path: Path) -> None:
    """Hand-written configs lack keys; the class's defaults then count, which differ by architecture."""
    from transformers import AutoConfig

    from kvkin.configs.architectures import read_geometry

    needed = {
        "hidden_size": 4096,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "vocab_size": 320,
    }
    for arch in ARCHITECTURES:
        name = f"{arch.capitalize()}ForCausalLM"
        config: Any = AutoConfig.for_model(arch, **needed)
        geometry = read_geometry({"architectures": [name], **needed}, "k")
        assert geometry.kv_heads == config.num_key_value_heads, arch
        assert geometry.head_dim == getattr(config, "head_dim", None) or 128, arch
        assert geometry.rope.theta == config.rope_parameters["rope_theta"], arch
        assert geometry.rms_norm_eps == config.rms_norm_eps, arch
        assert geometry.hidden_act == config.hidden_act, arch
        assert geometry.max_position == config.max_position_embeddings, arch
        window = config.sliding_window if arch in ("mistral", "mixtral") else None
        assert geometry.windows == (window, window), arch
        if arch == "mixtral":
            assert geometry.num_experts == config.num_local_experts
            assert geometry.experts_per_token == config.num_experts_per_tok
