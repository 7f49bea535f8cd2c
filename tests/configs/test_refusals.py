"""What cannot be shared by lineage is refused by name; damaged and incomplete checkpoints say what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from checkpoint_edits import copy, edit_json, edit_weights, identity, shard
from tiny_models import make_tiny

from kvkin.configs.refusals import SUPPORTED, refuse_unsupported
from kvkin.kv.errors import ConfigError

UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}, "MLA"),
    ({"architectures": ["DeepseekV2ForCausalLM"]}, "MLA"),
    ({"architectures": ["JambaForCausalLM"], "attn_layer_period": 8}, "hybrid"),
    ({"architectures": ["MambaForCausalLM"]}, "linear or hybrid"),
    ({"architectures": ["Qwen3NextForCausalLM"], "layer_types": ["linear_attention", "full_attention"]}, "hybrid"),
    ({"architectures": ["LlamaForCausalLM"], "layer_types": ["chunked_attention"]}, "hybrid"),
    ({"architectures": ["BloomForCausalLM"]}, "ALiBi"),
    ({"architectures": ["FalconForCausalLM"], "alibi": True}, "ALiBi"),
    ({"architectures": ["MPTForCausalLM"], "attn_config": {"alibi": True}}, "ALiBi"),
    ({"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0}, "softcap"),
    ({"architectures": ["Gemma2ForCausalLM"]}, "softcap"),
    ({"architectures": ["Gemma3nForCausalLM"], "num_kv_shared_layers": 15}, "cross-layer KV sharing"),
    ({"architectures": ["LlamaForCausalLM"], "compression_config": {"format": "x"}}, "quantised"),
    ({"architectures": ["LlamaForCausalLM"], "auto_map": {"AutoModelForCausalLM": "x.Y"}}, "code of its own"),
    ({"architectures": ["OlmoForCausalLM"]}, "OlmoForCausalLM is not supported"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification is not supported"),
    ({"architectures": None, "model_type": "llama"}, "names no architecture"),
    ({}, "names no architecture"),
]


@pytest.mark.parametrize(("config", "part"), UNSUPPORTED, ids=[f"{i}-{row[1]}" for i, row in enumerate(UNSUPPORTED)])
def test_kinds_are_refused_by_name(config: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part) as caught:
        refuse_unsupported(config, "families.f.models.m.checkpoint")
    assert caught.value.key == "families.f.models.m.checkpoint"
    assert all(name in caught.value.allowed for name in SUPPORTED)
    for name in config.get("architectures") or []:
        assert name in str(caught.value)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("refusals") / "base", num_layers=2)


def rope(**values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1e4, **values}}


BROKEN_CONFIGS: list[tuple[dict[str, Any], str]] = [
    (rope(rope_type="dynamic", factor=2.0), "dynamic-NTK"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic-NTK"),
    (rope(rope_type="longrope", short_factor=[1.0], long_factor=[2.0]), "longrope"),
    ({"rope_scaling": {"type": "su"}}, "longrope"),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "multimodal"),
    (rope(rope_type="spiral"), "'spiral' is not supported"),
    (rope(rope_type="default", partial_rotary_factor=0.5), "partial_rotary_factor"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differs by layer"),
    (rope(rope_type="linear"), "factor is None"),
    ({"num_hidden_layers": ...}, "num_hidden_layers is None"),
    ({"hidden_size": "64"}, "hidden_size is '64'"),
    ({"num_key_value_heads": 3}, "4 heads over 3 KV heads"),
    ({"hidden_size": 66, "head_dim": ...}, "66 over 4 heads"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    ({"vocab_size": 300}, r"embed_tokens.weight is \[320, 64\], but config.json says \[300, 64\]"),
    ({"num_key_value_heads": 4}, r"model.layers.0.self_attn.k_proj.weight is \[32, 64\]"),
    ({"num_hidden_layers": 3}, "lacks model.layers.2.input_layernorm.weight"),
]


@pytest.mark.parametrize(("change", "part"), BROKEN_CONFIGS, ids=[row[1] for row in BROKEN_CONFIGS])
def test_configs_that_cannot_be_used(base: Path, tmp_path: Path, change: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part) as caught:
        identity(edit_json(copy(base, tmp_path / "m"), **change), key="families.f.models.m")
    assert caught.value.key == "families.f.models.m.checkpoint"
    assert caught.value.allowed


def test_a_model_cut_short_by_its_config_is_read(base: Path, tmp_path: Path) -> None:
    short = identity(edit_json(copy(base, tmp_path / "m"), num_hidden_layers=1))
    assert short.lineage.kv == identity(base).lineage.kv[:1]


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return change


def eight_bits(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (drop("model.embed_tokens.weight"), "lacks model.embed_tokens.weight"),
        (drop("model.layers.1.mlp.up_proj.weight"), "lacks model.layers.1.mlp.up_proj.weight"),
        (eight_bits, "up_proj.weight is F8_E4M3: quantised"),
    ],
    ids=["embedding", "mlp", "float8"],
)
def test_weights_that_cannot_be_used(
    base: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], part: str
) -> None:
    with pytest.raises(ConfigError, match=part):
        identity(edit_weights(copy(base, tmp_path / "m"), change))


@pytest.mark.parametrize(("arch", "name"), [("qwen2", "self_attn.k_proj.bias"), ("qwen3", "self_attn.k_norm.weight"), ("mixtral", "block_sparse_moe.experts.3.w2.weight")])  # fmt: skip
def test_what_an_architecture_needs_is_missed(tmp_path: Path, arch: str, name: str) -> None:
    folder = make_tiny(arch, tmp_path / "m", num_layers=2)
    with pytest.raises(ConfigError, match=f"lacks model.layers.1.{name}"):
        identity(edit_weights(folder, drop(f"model.layers.1.{name}")))


def test_damaged_weight_files(base: Path, tmp_path: Path) -> None:
    folder = copy(base, tmp_path / "m")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    header_bytes = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + header_bytes])
    first = next(name for name in header if name != "__metadata__")
    header[first]["shape"] = [3]
    lying = json.dumps(header).encode()
    cases = [
        (b"", "cut short"),
        (whole[:4], "cut short"),
        (whole[:200], "cut short"),
        (whole[:-100], "beyond the end of the file"),
        (b"<html>not found</html>" * 9, "cut short"),
        ((2).to_bytes(8, "little") + b"[]" * 9, "damaged header"),
        ((4).to_bytes(8, "little") + b"\xff\xfe[]" * 9, "damaged header"),
        (len(lying).to_bytes(8, "little") + lying + whole[8 + header_bytes :], "bytes, which is not F32"),
    ]
    for content, part in cases:
        weights.write_bytes(content)
        with pytest.raises(ConfigError, match=part):
            identity(folder)


def test_incomplete_shards(base: Path, tmp_path: Path) -> None:
    folder = shard(copy(base, tmp_path / "m"), 3)
    index = folder / "model.safetensors.index.json"
    original = json.loads(index.read_text())
    for change, part in (
        ({"model.ghost": "model-00001-of-00003.safetensors"}, "lack model.ghost"),
        ({"model.ghost": "model-00009-of-00003.safetensors"}, "lacks the shard model-00009"),
        ({"model.ghost": "../../etc/passwd"}, "file names beside the index"),
    ):
        index.write_text(json.dumps({"weight_map": original["weight_map"] | change}))
        with pytest.raises(ConfigError, match=part):
            identity(folder)
    index.write_text("{}")
    with pytest.raises(ConfigError, match="no weight_map"):
        identity(folder)


def test_other_formats_and_missing_files(base: Path, tmp_path: Path) -> None:
    folder = copy(base, tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no model.safetensors, only pytorch_model.bin.*save_pretrained"):
        identity(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="holds a list"):
        identity(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        identity(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config.json"):
        identity(folder)
    with pytest.raises(ConfigError, match="no such folder"):
        identity(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="is a file"):
        identity(folder / "tokenizer.json")


def test_a_hub_id_is_downloaded_only_if_it_is_no_folder(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def snapshot_download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert "*.safetensors" in allow_patterns
        asked.append((name, revision))
        return str(base)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert identity(Path("org/name")).lineage == identity(base).lineage
    assert identity(Path("org/name@v2")).path == base
    assert asked == [("org/name", None), ("org/name", "v2")]
    with pytest.raises(ConfigError, match="no such folder"):
        identity(Path("models/deep/name"))
    assert len(asked) == 2


def test_an_unreachable_hub_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: object, **__: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(
        ConfigError, match="the hub cannot provide it: LocalEntryNotFoundError: no connection"
    ) as caught:
        identity(Path("org/name"))
    assert "\n" not in str(caught.value)
