"""Quantised checkpoints by their files alone, without any package: which are run, why others are not, and what a lineage covers.

What the packages themselves write and compute is in ``tests/engines/test_quantised.py``.
"""

from __future__ import annotations

import importlib.metadata
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import yaml
from checkpoint_edits import copy, edit_json, edit_weights, identity, lineage
from tiny_models import make_tiny, make_tiny_lora

from kvkin.configs import families, quantised
from kvkin.configs.families import resolve_cluster
from kvkin.configs.loader import parse_cluster
from kvkin.configs.quantised import Quantisation, check_packages, read_quantisation
from kvkin.kv.errors import ConfigError
from kvkin.kv.lineage import shared_depth
from kvkin.tools.cli import main
from kvkin.tools.finetune import Finetune

WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None, "output_activations": None}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": GROUP},
    "ignore": ["lm_head"],
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "sparsity_config": {},
    "transform_config": {},
}
FOUR_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "checkpoint_format": "gptq"}
INT8 = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2}}}
NUM_LAYERS = 3


def group(**changes: Any) -> dict[str, Any]:
    return COMPRESSED | {"config_groups": {"group_0": GROUP | changes}}


def read(settings: Any) -> Quantisation | None:
    return read_quantisation({"quantization_config": settings}, "LlamaForCausalLM", "key")


@pytest.mark.parametrize(
    ("settings", "method", "packages"),
    [
        (AWQ, "awq", ["gptqmodel"]),
        (GPTQ, "gptq", ["gptqmodel", "optimum"]),
        (COMPRESSED, "compressed-tensors", ["compressed-tensors"]),
        (group(format="float-quantized"), "compressed-tensors", ["compressed-tensors"]),
        (group(weights=WEIGHTS | {"actorder": "weight"}), "compressed-tensors", ["compressed-tensors"]),
        (FOUR_BITS, "bitsandbytes", ["bitsandbytes"]),
        (INT8, "torchao", ["torchao"]),
    ],
)
def test_what_is_run(settings: dict[str, Any], method: str, packages: list[str]) -> None:
    found = read(settings)
    assert found is not None
    assert (found.method, [name for name, _ in found.packages]) == (method, packages)
    # the settings count, their order in the file does not
    again = read(dict(reversed(settings.items())))
    assert again == found
    changed = read(settings | {"modules_to_not_convert": ["lm_head"]})
    assert changed is not None
    assert changed.weights != found.weights
    assert found.weights.startswith(f"{method}@")
    assert read(None) is None


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (AWQ | {"bits": 8}, "by awq, in 8 bits, which has not been tried"),
        (AWQ | {"version": "gemv"}, "in the layout gemv, which has not been tried"),
        (GPTQ | {"bits": 3}, "by gptq, in 3 bits"),
        (GPTQ | {"desc_act": True}, r"in the order of their activations \(desc_act\)"),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 8}}}, r"differently by module \(dynamic\)"),
        (GPTQ | {"checkpoint_format": "marlin"}, "in the layout marlin"),
        (
            {"quant_method": "fp8"},
            r"by fp8, and it rounds activations too, so a token's KV depends on how the prompt is cut",
        ),
        ({"quant_method": "hqq"}, "by hqq, which has not been tried with kvkin"),
        ({"bits": 4}, "by an unnamed method, which has not been tried"),
        (COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}, r"with KV rounded as well \(kv_cache_scheme\)"),
        (COMPRESSED | {"transform_config": {"config_groups": {"R1": {}}}}, "with transforms of activations"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "with sparse weights"),
        (COMPRESSED | {"config_groups": {}}, "its config_groups say nothing"),
        (COMPRESSED | {"config_groups": {"group_0": 3}}, "its config_groups say nothing"),
        (COMPRESSED | {"config_groups": ["W4A16"]}, "its config_groups say nothing"),
        (group(input_activations={"num_bits": 8, "dynamic": True, "strategy": "token"}), "it rounds activations too"),
        (group(output_activations={"num_bits": 8}), "it rounds activations too"),
        (group(format="nvfp4-pack-quantized"), "stored as nvfp4-pack-quantized, which has not been tried"),
        (COMPRESSED | {"format": None}, "stored as None"),
        (group(weights=None), "without fixed scales"),
        (group(weights=WEIGHTS | {"dynamic": True}), "without fixed scales"),
        (group(weights=WEIGHTS | {"actorder": "group"}), r"actorder: group\), which has not been tried"),
        (
            FOUR_BITS | {"load_in_8bit": True},
            r"in 8 bits, and it chooses what to round by all tokens of a step \(LLM.int8\)",
        ),
        (FOUR_BITS | {"load_in_4bit": False}, "in neither 4 nor 8 bits"),
        (
            INT8 | {"quant_type": {"default": {"_type": "Int8DynamicActivationInt8WeightConfig"}}},
            "rounds activations too",
        ),
        (
            INT8 | {"quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}},
            "as Int4WeightOnlyConfig, which has not",
        ),
        (INT8 | {"quant_type": "int8_weight_only"}, "as int8_weight_only, which has not been tried"),
        (INT8 | {"quant_type": {"one": {}, "two": {}}}, "which has not been tried"),
        (INT8 | {"include_input_output_embeddings": True}, "embeddings and head as well"),
        ("awq", "quantization_config is 'awq'"),
    ],
)
def test_what_is_not_run_is_refused_in_a_word(settings: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        read(settings)
    assert refused.value.key == "key"
    assert refused.value.allowed
    if isinstance(settings, dict):
        assert str(refused.value).startswith("key: LlamaForCausalLM has weights quantised by")
        assert "compressed-tensors" in refused.value.allowed


@pytest.mark.parametrize(
    ("version", "fits"),
    [("0.15.0", True), ("0.20.1+cpu", True), ("1.0", True), ("0.15.0rc1", True), ("0.14.9", False), ("0.9", False)],
)
def test_the_package_is_asked_for(version: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised.importlib.metadata, "version", lambda name: version)
    if fits:
        check_packages(read(COMPRESSED), "key")
        return
    with pytest.raises(ConfigError, match=rf"need compressed-tensors 0\.15\.0, and {version} is installed here"):
        check_packages(read(COMPRESSED), "key")


def test_the_extra_names_the_packages_that_are_asked_for() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = [read(settings) for settings in (FOUR_BITS, COMPRESSED, INT8)]
    assert project["optional-dependencies"]["quantised"] == [
        f"{package}>={least}" for one in wanted if one is not None for package, least in one.packages
    ]


# --- whole checkpoints ---------------------------------------------------------------------------------------------------


def pack(folder: Path, settings: dict[str, Any] = COMPRESSED, seed: int = 0) -> Path:
    """Put packed weights of some kind in the places of a tiny checkpoint's linear modules."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "_proj.weight" in name]:
            weight, stem = tensors.pop(name), name.removesuffix(".weight")
            rows, columns = weight.shape
            level = (weight * 20).clamp(-8, 7).round().to(torch.int32) + seed
            tensors[f"{stem}.weight_packed"] = level[:, : columns // 8].contiguous()
            tensors[f"{stem}.weight_scale"] = weight.abs().amax(1, keepdim=True)
            tensors[f"{stem}.weight_shape"] = torch.tensor([rows, columns])

    edit_weights(folder, change)
    return edit_json(folder, quantization_config=settings)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen2", tmp_path_factory.mktemp("plain") / "base", num_layers=NUM_LAYERS)


@pytest.fixture
def packed(base: Path, tmp_path: Path) -> Path:
    return pack(copy(base, tmp_path / "packed"))


def test_a_quantised_checkpoint_shares_nothing_with_the_plain_one(base: Path, packed: Path, tmp_path: Path) -> None:
    plain, model = lineage(base), identity(packed)
    assert model.numerics.startswith("compressed-tensors@")
    assert not {*plain.hidden, *plain.kv} & {*model.lineage.hidden, *model.lineage.kv}
    twin = pack(copy(base, tmp_path / "twin"))
    assert lineage(twin) == model.lineage
    # the very same tensors under other settings mean other weights
    other = pack(copy(base, tmp_path / "other"), group(weights=WEIGHTS | {"symmetric": False}))
    assert not {*lineage(other).hidden, *lineage(other).kv} & {*model.lineage.hidden, *model.lineage.kv}


@pytest.mark.parametrize("tensor", ["weight_packed", "weight_scale", "weight_shape"])
@pytest.mark.parametrize(("module", "own"), [("k_proj", True), ("v_proj", True), ("q_proj", False), ("o_proj", False)])
def test_every_packed_tensor_counts_from_its_layer_on(
    packed: Path, tmp_path: Path, tensor: str, module: str, own: bool
) -> None:
    before = lineage(packed)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"model.layers.1.self_attn.{module}.{tensor}"] += 1

    after = lineage(edit_weights(copy(packed, tmp_path / "changed"), change))
    # k and v make the KV of their own layer, the others that of the layers above
    assert shared_depth(before, after) == (1 if own else 2)
    assert [one == two for one, two in zip(before.hidden, after.hidden, strict=True)] == [True, True, False, False]


def remove(*names: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if any(part in name for part in names)]:
            del tensors[name]

    return change


def half_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight_packed"] = torch.zeros(320, 8, dtype=torch.int32)


def integer(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].to(torch.int8)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (remove("layers.1.self_attn.k_proj.weight"), r"lacks model\.layers\.1\.self_attn\.k_proj\.weight"),
        (remove("layers.0.mlp.up_proj"), r"lacks model\.layers\.0\.mlp\.up_proj\.weight"),
        (remove("layers.1.self_attn.q_proj.bias"), r"lacks model\.layers\.1\.self_attn\.q_proj\.bias"),
        (remove("layers.2.input_layernorm"), r"lacks model\.layers\.2\.input_layernorm\.weight"),
        (half_head, r"lm_head\.weight_packed: the head is quantised"),
        (integer("model.layers.1.input_layernorm.weight"), r"input_layernorm\.weight is I8: quantised, and config"),
        (integer("model.layers.1.self_attn.k_proj.bias"), r"k_proj\.bias is I8: quantised"),
        (integer("model.embed_tokens.weight"), r"embed_tokens\.weight is I8: quantised"),
    ],
)
def test_checkpoints_that_cannot_be_used(
    packed: Path, change: Callable[[dict[str, torch.Tensor]], None], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        identity(edit_weights(packed, change))


def test_quantised_weights_without_a_word_in_the_config_are_refused(packed: Path) -> None:
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.0\.self_attn\.q_proj\.weight"):
        identity(edit_json(packed, quantization_config=...))


def test_quantised_experts_are_refused(tmp_path: Path) -> None:
    experts = make_tiny("mixtral", tmp_path / "experts", num_layers=1)
    with pytest.raises(
        ConfigError, match="MixtralForCausalLM has quantised weights, which has not been tried with experts"
    ):
        identity(edit_json(experts, quantization_config=COMPRESSED))


# --- in a cluster file, and in commands ----------------------------------------------------------------------------------


def cluster_file(folder: Path, base: Path, packed: Path, adapter: Path | None = None, **family: Any) -> Path:
    small = {"checkpoint": str(packed)} | ({} if adapter is None else {"adapter": str(adapter)})
    cluster = {
        "state_dir": str(folder / "state"),
        "families": {
            "f": {
                "base": "plain",
                "device": "cpu",
                "models": {"plain": {"checkpoint": str(base)}, "small": small},
                **family,
            }
        },
        "nodes": {
            "router": {"role": "router"},
            "decode": {"role": "decode", "port": 0, "models": ["small"]},
        },
    }
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster))
    return file


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def found(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(quantised.importlib.metadata, "version", found)


def test_config_check_asks_for_the_package_and_shows_what_is_shared(
    base: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = cluster_file(tmp_path, base, packed)
    installed(monkeypatch, None)
    assert main(["config", "check", str(file)]) == 2
    assert capsys.readouterr().err == (
        f"kvkin: {file}: families.f.models.small.checkpoint: weights quantised by compressed-tensors need the package "
        "compressed-tensors, which is not installed here (allowed: pip install 'compressed-tensors>=0.15.0')\n"
    )
    # a router loads no weights and needs no package
    cluster = resolve_cluster(parse_cluster(file.read_text(), str(file)))
    assert set(cluster.families["f"].models) == {"plain", "small"}
    installed(monkeypatch, "0.20.1")
    assert main(["config", "check", str(file)]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "small compressed-tensors none layer 0 family decode" in out
    assert "usable" in out


def test_vllm_is_not_given_one(base: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = cluster_file(tmp_path, base, packed)
    config = parse_cluster(file.read_text(), str(file))
    monkeypatch.setattr(families, "check_vllm_family", lambda config, family: None)  # what else vLLM needs
    nodes = {**config.nodes, "decode": msgspec.structs.replace(config.decode_nodes["decode"], engine="vllm")}
    with pytest.raises(ConfigError, match=r"^nodes\.decode\.engine: the checkpoint of small is quantised"):
        resolve_cluster(msgspec.structs.replace(config, nodes=nodes))


def test_an_adapter_on_it_is_refused_with_the_key(base: Path, packed: Path, tmp_path: Path) -> None:
    adapter = make_tiny_lora(base, tmp_path / "adapter", range(NUM_LAYERS))
    file = cluster_file(tmp_path, base, packed, adapter)
    said = r"^families\.f\.models\.small\.adapter: an adapter on weights that are quantised by compressed-tensors \("
    with pytest.raises(ConfigError, match=said):
        resolve_cluster(parse_cluster(file.read_text(), str(file)))


def test_a_quantised_base_is_not_fine_tuned(packed: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.json"
    articles = [
        {
            "title": f"Town {number}",
            "paragraphs": [{"context": "c", "qas": [{"question": "q", "answers": [{"text": "a"}]}]}],
        }
        for number in range(30)
    ]
    data.write_text(json.dumps({"data": articles}))
    job = Finetune(task="qa", data=str(data), out=tmp_path / "out", base=packed, seq_len=64)
    with pytest.raises(
        ConfigError, match=r"^base: its weights are quantised by compressed-tensors .*the plain weights"
    ):
        job.run()
