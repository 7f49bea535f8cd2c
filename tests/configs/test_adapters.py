"""LoRA adapters: which layers stay shared, what counts as the same adapter, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_edits import copy, edit_json, edit_weights, kv_of, lineage, load_model
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny, make_tiny_lora

from kvkin.configs.adapters import read_adapter
from kvkin.configs.architectures import read_geometry
from kvkin.configs.layer_tensors import sort_tensors
from kvkin.configs.safetensors_files import read_json, read_tensors
from kvkin.kv.errors import ConfigError
from kvkin.kv.lineage import shared_depth, shared_transition

NUM_LAYERS = 6
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TOKENS = list(range(5, 45))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("lora") / "base", num_layers=NUM_LAYERS)


def test_an_adapter_on_the_upper_half_shares_the_lower(base: Path, tmp_path: Path) -> None:
    adapter = make_tiny_lora(base, tmp_path / "a", range(3, NUM_LAYERS))
    tuned, original = lineage(base, adapter), lineage(base)
    assert (shared_depth(tuned, original), shared_transition(tuned, original)) == (3, 3)


@pytest.mark.parametrize(
    ("targets", "depth"),
    [(["k_proj"], 2), (["v_proj"], 2), (["q_proj"], 3), (["o_proj"], 3), (["q_proj", "v_proj"], 2)],
)
def test_what_an_adapter_touches_decides_as_in_the_base(
    base: Path, tmp_path: Path, targets: list[str], depth: int
) -> None:
    adapter = make_tiny_lora(base, tmp_path / "a", [2], targets=targets)
    assert shared_depth(lineage(base, adapter), lineage(base)) == depth
    assert shared_transition(lineage(base, adapter), lineage(base)) == 2


def test_lineage_agrees_with_the_kv_that_peft_computes(base: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    adapter = make_tiny_lora(base, tmp_path / "a", [2, 4])
    depth = shared_depth(lineage(base, adapter), lineage(base))
    merged: Any = PeftModel.from_pretrained(load_model(base), str(adapter)).merge_and_unload()
    pairs = zip(kv_of(load_model(base), TOKENS), kv_of(merged, TOKENS), strict=True)
    same = [
        torch.equal(keys, keys_too) and torch.equal(values, values_too)
        for (keys, values), (keys_too, values_too) in pairs
    ]
    assert same == [layer < depth for layer in range(NUM_LAYERS)]


def test_new_weights_under_the_old_name_are_another_model(base: Path, tmp_path: Path) -> None:
    adapter = make_tiny_lora(base, tmp_path / "a", [2, 3], seed=1)
    before = lineage(base, adapter)
    make_tiny_lora(base, adapter, [2, 3], seed=2)
    assert shared_depth(before, lineage(base, adapter)) == 2


def test_the_same_adapter_under_another_name_is_the_same_model(base: Path, tmp_path: Path) -> None:
    adapter = make_tiny_lora(base, tmp_path / "a", [2, 3])
    other = edit_json(
        copy(adapter, tmp_path / "b"), CONFIG, base_model_name_or_path="elsewhere", revision="main", lora_dropout=0.1
    )

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace(".weight", ".default.weight")] = tensors.pop(name)

    edit_weights(other, rename, WEIGHTS)
    assert lineage(base, other) == lineage(base, adapter)


def test_scaling_counts_by_its_effect(base: Path, tmp_path: Path) -> None:
    adapter = make_tiny_lora(base, tmp_path / "a", [2, 3], rank=4)  # lora_alpha 8: scaling 2
    variants: dict[str, tuple[dict[str, Any], int]] = {
        "half": ({"lora_alpha": 4}, 2),
        "rslora": ({"use_rslora": True}, 2),
        "rslora of the same effect": ({"use_rslora": True, "lora_alpha": 4}, NUM_LAYERS),
        "pattern of the same effect": ({"lora_alpha": 99, "alpha_pattern": {".*_proj": 8}}, NUM_LAYERS),
        "pattern on layer 3": ({"alpha_pattern": {"layers.3.self_attn.v_proj": 16}}, 3),
        "rank by pattern": ({"r": 16, "rank_pattern": {"q_proj": 4, "k_proj": 4, "v_proj|o_proj": 4}}, NUM_LAYERS),
    }
    for name, (change, depth) in variants.items():
        variant = edit_json(copy(adapter, tmp_path / name), CONFIG, **change)
        assert shared_depth(lineage(base, variant), lineage(base, adapter)) == depth, name


def test_scaling_is_what_peft_uses(base: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    adapter = make_tiny_lora(
        base, tmp_path / "a", [2, 3], use_rslora=True, alpha_pattern={"layers.3.self_attn.v_proj": 5, "k_proj": 7}
    )
    geometry = read_geometry(read_json(base / "config.json", "k"), "k")
    modules = read_adapter(adapter, sort_tensors(read_tensors(base, "model", "k"), geometry, "k"), "k").modules
    model: Any = PeftModel.from_pretrained(load_model(base), str(adapter))
    assert len(modules) == 8
    for module in modules:
        layer = model.base_model.model.model.layers[module.layer].get_submodule(module.module)
        assert module.scaling == pytest.approx(layer.scaling["default"])


def test_an_adapter_on_the_head_changes_no_kv(base: Path, tmp_path: Path) -> None:
    adapter = make_tiny_lora(base, tmp_path / "a", [4])

    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["base_model.model.lm_head.weight"] = torch.ones(320, 64)

    trained = edit_weights(
        edit_json(copy(adapter, tmp_path / "b"), CONFIG, modules_to_save=["lm_head"]), add_head, WEIGHTS
    )
    assert lineage(base, trained) == lineage(base, adapter)


def rename(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def only_a(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["base_model.model.model.layers.2.self_attn.k_proj.lora_B.weight"]


REFUSED_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type is IA3"),
    ({"use_dora": True}, "use_dora"),
    ({"modules_to_save": ["embed_tokens"]}, "modules_to_save holds embed_tokens"),
    ({"modules_to_save": ["model.embed_tokens", "lm_head"]}, "embed_tokens"),
    ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
    ({"bias": "lora_only"}, "trained biases"),
    ({"lora_bias": True}, "lora_bias"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    ({"init_lora_weights": "pissa_niter_4"}, "changes the base"),
    ({"a_variant_of_tomorrow": 3}, "a_variant_of_tomorrow is set"),
    ({"r": 8}, "at rank 8"),
    ({"lora_alpha": None}, "lora_alpha None"),
]


@pytest.mark.parametrize(("settings", "part"), REFUSED_SETTINGS, ids=[part for _, part in REFUSED_SETTINGS])
def test_variants_are_refused_by_name(base: Path, tmp_path: Path, settings: dict[str, Any], part: str) -> None:
    adapter = edit_json(make_tiny_lora(base, tmp_path / "a", [2]), CONFIG, **settings)
    with pytest.raises(ConfigError, match=part) as caught:
        lineage(base, adapter, key="families.f.models.m")
    assert caught.value.key == "families.f.models.m.adapter"
    assert caught.value.allowed


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (rename("layers.2.", "layers.7."), "layers.7.self_attn.k_proj"),
        (rename("k_proj", "w_proj"), "which the base does not have"),
        (rename("model.layers.2.self_attn.k_proj", "model.embed_tokens"), "changes embeddings"),
        (rename("lora_A.weight", "lora_embedding_A"), "changes embeddings"),
        (rename("k_proj.lora_A.weight", "k_proj.lora_magnitude_vector"), "no LoRA matrix"),
        (only_a, "has only lora_A"),
    ],
    ids=["layer", "module", "embedding", "embedding LoRA", "DoRA", "half"],
)
def test_tensors_that_do_not_fit_are_refused(
    base: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], part: str
) -> None:
    adapter = edit_weights(make_tiny_lora(base, tmp_path / "a", [2]), change, WEIGHTS)
    with pytest.raises(ConfigError, match=part) as caught:
        lineage(base, adapter)
    assert caught.value.key == "models.m.adapter"


def test_an_adapter_for_another_model_is_refused(base: Path, tmp_path: Path) -> None:
    wide = make_tiny("llama", tmp_path / "wide", num_layers=2, hidden_size=128)
    adapter = make_tiny_lora(wide, tmp_path / "a", [0])
    with pytest.raises(ConfigError, match="do not fit"):
        lineage(base, adapter)


def test_missing_files_are_named(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json"):
        lineage(base, base)
    adapter = make_tiny_lora(base, tmp_path / "a", [2])
    tensors = load_file(str(adapter / WEIGHTS))
    (adapter / WEIGHTS).rename(adapter / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"only adapter_model\.bin"):
        lineage(base, adapter)
    save_file({name: tensor.to(torch.int32) for name, tensor in tensors.items()}, str(adapter / WEIGHTS))
    with pytest.raises(ConfigError, match="I32"):
        lineage(base, adapter)
