"""Families: members that fit, members that do not, what they share, and what ``config check`` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from checkpoint_edits import copy, edit_json, edit_weights
from tiny_models import make_tiny, make_tiny_lora, make_tiny_tokenizer

from kvkin.configs.families import ResolvedCluster, resolve_cluster, resolve_family
from kvkin.configs.loader import parse_cluster
from kvkin.configs.numerics import COMPATIBLE, lineage_class, numerics_class, resolve_compute_dtype, resolve_device
from kvkin.kv.errors import ConfigError
from kvkin.kv.hashing import root_hash
from kvkin.kv.lineage import shared_depth
from kvkin.kv.plan import LayerGroup
from kvkin.tools.config_command import ConfigCheck, ConfigShow

KEY = "families.fam.models.member"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("families") / "base", num_layers=6)


def cluster_text(base: Path, state: Path, member: dict[str, str], **family: Any) -> str:
    models = {"base": {"checkpoint": str(base)}, "member": member}
    return yaml.safe_dump(
        {
            "state_dir": str(state),
            "families": {"fam": {"base": "base", "models": models, "device": "cpu", **family}},
            "nodes": {
                "router": {"role": "router"},
                "prefill": {"role": "prefill", "port": 0, "models": ["base"]},
                "decode": {"role": "decode", "port": 0, "models": ["base", "member"]},
            },
        }
    )


def resolve(base: Path, state: Path, checkpoint: Path, adapter: Path | None = None, **family: Any) -> ResolvedCluster:
    member = {"checkpoint": str(checkpoint)} | ({} if adapter is None else {"adapter": str(adapter)})
    return resolve_cluster(parse_cluster(cluster_text(base, state, member, **family), "f.yaml"))


@pytest.mark.parametrize(("more", "warned"), [(-1, True), (0, False)])
def test_a_node_that_holds_no_block_is_warned_of(base: Path, tmp_path: Path, more: int, warned: bool) -> None:
    data = yaml.safe_load(cluster_text(base, tmp_path, {"checkpoint": str(base)}))
    block = 6 * 2 * 16 * 2 * 16 * 4  # layers, keys and values, tokens, heads, their width, bytes
    data["nodes"]["prefill"]["kv_bytes"] = block + more
    warnings = resolve_cluster(parse_cluster(yaml.safe_dump(data), "f")).warnings
    told = [
        each
        for each in warnings
        if each.startswith(f"nodes.prefill.kv_bytes: {block - 1} bytes") and str(block) in each
    ]
    assert (len(warnings), len(told)) == (warned, warned)


def test_a_family_knows_what_its_nodes_need(base: Path, tmp_path: Path) -> None:
    adapter = make_tiny_lora(base, tmp_path / "a", [4, 5])
    groups = [{"sender": "base", "receiver": "member", "group": [2, 5]}, {"receiver": "member", "group": [0, 3]}]
    cluster = resolve(base, tmp_path, base, adapter, transition_layers=[2, 4], recompute_groups=groups)
    family = cluster.families["fam"]
    assert cluster.family_of("member") is family
    assert cluster.family_of("stranger") is None
    assert cluster.warnings == ()
    assert (family.device, family.compute_dtype) == ("cpu", "float32")
    assert (family.layout.num_layers, family.layout.block_size, family.layout.dtype) == (6, 16, "float32")
    assert family.max_context_tokens == 512
    assert family.model_max_context("member") == 512
    assert family.vocab_size == 320
    assert family.tokenizer_path == base
    assert family.model_tokenizer_path("member") == base
    assert family.transition_layers == (2, 4)
    assert family.chat_template("member") == family.base.chat_template
    assert family.group("base", "member") == LayerGroup(2, 5)
    assert family.group("member", "member") == LayerGroup(0, 3)
    assert family.group("member", "base") is None
    assert family.block_root("tenant") == root_hash(family.tokenizer_digest, 16, "tenant")
    assert shared_depth(family.base.lineage, family.models["member"].lineage) == 4
    assert list(family.models) == ["base", "member"]


def test_a_node_reads_only_what_it_serves(base: Path, tmp_path: Path) -> None:
    text = cluster_text(base, tmp_path, {"checkpoint": str(tmp_path / "not-here")})
    config = parse_cluster(text, "f.yaml")
    assert list(resolve_family(config, "fam", models=["base"]).models) == ["base"]
    assert resolve_family(config, "fam", models=["base"], device="cuda").compute_dtype == "bfloat16"
    with pytest.raises(ConfigError, match="no such folder") as caught:
        resolve_family(config, "fam")
    assert caught.value.key == f"{KEY}.checkpoint"
    with pytest.raises(ConfigError, match="did you mean 'member'"):
        resolve_family(config, "fam", models=["membre"])
    with pytest.raises(ConfigError, match="did you mean 'fam'"):
        resolve_family(config, "fan")


MISFITS: list[tuple[str, dict[str, Any], str]] = [
    ("layers", {"num_layers": 5}, "number of layers differs from the base's: 5"),
    ("hidden", {"num_layers": 6, "hidden_size": 128}, "hidden size"),
    ("heads", {"num_layers": 6, "num_attention_heads": 8}, "number of heads"),
    ("kv heads", {"num_layers": 6, "num_key_value_heads": 4}, "number of KV heads"),
    ("head size", {"num_layers": 6, "head_dim": 32}, "head size"),
    ("rope", {"num_layers": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope .*theta 500000"),
    ("vocabulary", {"num_layers": 6, "vocab_size": 300}, "fewer than the base"),
]


@pytest.mark.parametrize(("config", "part"), [row[1:] for row in MISFITS], ids=[row[0] for row in MISFITS])
def test_a_member_that_does_not_fit_is_refused(base: Path, tmp_path: Path, config: dict[str, Any], part: str) -> None:
    member = make_tiny("llama", tmp_path / "m", **config)
    with pytest.raises(ConfigError, match=part) as caught:
        resolve(base, tmp_path, member)
    assert caught.value.key == f"{KEY}.checkpoint"
    assert caught.value.allowed


def test_another_architecture_or_attention_kind_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="architecture differs from the base's: Qwen2ForCausalLM"):
        resolve(base, tmp_path, make_tiny("qwen2", tmp_path / "qwen", num_layers=6))
    mistral = make_tiny("mistral", tmp_path / "mistral", num_layers=2)
    wide = make_tiny("mistral", tmp_path / "wide", num_layers=2, sliding_window=None)
    with pytest.raises(ConfigError, match=r"attention window differs from the base's: full \(allowed: 24"):
        resolve(mistral, tmp_path, wide)
    dynamic = edit_json(copy(base, tmp_path / "dyn"), rope_scaling={"type": "dynamic", "factor": 2.0})
    with pytest.raises(ConfigError, match="dynamic-NTK") as caught:
        resolve(base, tmp_path, dynamic)
    assert caught.value.key == f"{KEY}.checkpoint"


def test_another_tokenizer_is_refused_where_it_comes_from(base: Path, tmp_path: Path) -> None:
    member = copy(base, tmp_path / "m")
    text = (member / "tokenizer.json").read_text()
    (member / "tokenizer.json").write_text(text.replace('"add_prefix_space": false', '"add_prefix_space": true', 1))
    with pytest.raises(ConfigError, match="differs from the base's in: pre_tokenizer") as caught:
        resolve(base, tmp_path, member)
    assert caught.value.key == f"{KEY}.checkpoint"
    adapter = make_tiny_lora(base, tmp_path / "a", [4])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (adapter / name).write_text((member / name).read_text())
    with pytest.raises(ConfigError, match="differs from the base's in: pre_tokenizer") as caught:
        resolve(base, tmp_path, base, adapter)
    assert caught.value.key == f"{KEY}.adapter"


def test_a_member_without_tokenizer_uses_the_familys(base: Path, tmp_path: Path) -> None:
    member = copy(base, tmp_path / "m")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (member / name).unlink()
    family = resolve(base, tmp_path, member).families["fam"]
    assert family.model_tokenizer_path("member") == base
    assert family.chat_template("member") == family.base.chat_template
    with pytest.raises(ConfigError, match="has no tokenizer") as caught:
        resolve(member, tmp_path, base)
    assert caught.value.key == "families.fam.models.base.checkpoint"


def test_a_member_with_added_tokens_has_a_root_of_its_own(base: Path, tmp_path: Path) -> None:
    def grow(tensors: dict[str, torch.Tensor]) -> None:
        rows = tensors["model.embed_tokens.weight"]
        tensors["model.embed_tokens.weight"] = torch.cat([rows, torch.randn(8, rows.shape[1])])

    member = edit_json(edit_weights(copy(base, tmp_path / "m"), grow), vocab_size=328)
    make_tiny_tokenizer(member, ["<tool>"])
    family = resolve(base, tmp_path, member).families["fam"]
    assert family.own_root == {"member"}
    assert family.models["member"].lineage == family.base.lineage
    assert family.block_root("t", own_tokens_of="member") != family.block_root("t")
    assert family.model_tokenizer_path("member") == member
    small = make_tiny("llama", tmp_path / "small", num_layers=6, vocab_size=267)
    make_tiny_tokenizer(tiny := copy(small, tmp_path / "tiny"), ["<tool>"])
    with pytest.raises(ConfigError, match="268 tokens, but the weights embed 267"):
        resolve(small, tmp_path, tiny)


def test_odd_members_are_warned_about(base: Path, tmp_path: Path) -> None:
    member = edit_json(copy(base, tmp_path / "m"), max_position_embeddings=256)
    (member / "chat_template.jinja").write_text("{{ messages }}")
    edit_json(member, "tokenizer_config.json", add_bos_token=True, bos_token="<|im_start|>")
    cluster = resolve(base, tmp_path, member)
    assert len(cluster.warnings) == 3
    for warning, part in zip(cluster.warnings, ("no cross-model hits", "puts 1 before", "256 tokens"), strict=True):
        assert warning.startswith(f"{KEY}: ")
        assert part in warning
    family = cluster.families["fam"]
    assert family.chat_template("member") == "{{ messages }}"
    assert family.model_max_context("member") == 256


def test_a_base_without_template_and_hosts_that_may_choose_differently(base: Path, tmp_path: Path) -> None:
    bare = copy(base, tmp_path / "m")
    (bare / "chat_template.jinja").unlink()
    data = yaml.safe_load(cluster_text(bare, tmp_path, {"checkpoint": str(bare)}, device="auto"))
    data["nodes"]["decode"]["host"], data["transport"] = "gpu-1", {"insecure": True}
    first, second = resolve_cluster(parse_cluster(yaml.safe_dump(data), "f")).warnings
    assert "no chat template" in first
    assert "hosts that choose differently" in second


@pytest.mark.parametrize(
    ("family", "key", "part"),
    [
        ({"transition_layers": [6]}, "transition_layers[0]", "layers 1 to 5"),
        ({"recompute_groups": [{"group": [0, 7]}]}, "recompute_groups[0].group[1]", "at most 6"),
        ({"max_context_tokens": 513}, "max_context_tokens", "at most 512"),
    ],
)
def test_settings_beyond_the_base_are_refused(
    base: Path, tmp_path: Path, family: dict[str, Any], key: str, part: str
) -> None:
    with pytest.raises(ConfigError, match=part) as caught:
        resolve(base, tmp_path, base, **family)
    assert caught.value.key == f"families.fam.{key}"


def test_numerics_classes() -> None:
    assert numerics_class("bfloat16", "float32", "float32") == "bfloat16/float32/float32"
    assert lineage_class("bfloat16/float32/float32") == lineage_class("float32/float32/float32")
    assert lineage_class("bfloat16/bfloat16/bfloat16") != lineage_class("float32/bfloat16/bfloat16")
    assert not set(COMPATIBLE) & set(COMPATIBLE.values()), "a class stands for itself or for another, not both"
    assert resolve_compute_dtype("auto", "cpu", "k") == "float32"
    assert resolve_compute_dtype("auto", "cuda", "k") == "bfloat16"
    assert resolve_compute_dtype("float16", "cpu", "k") == "float16"


def test_device_is_found_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device("cuda") == "cuda"
    assert resolve_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device("auto") == "cpu"


def test_config_check_prints_what_is_shared(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = make_tiny_lora(base, tmp_path / "a", [4, 5])
    file = tmp_path / "cluster.yaml"
    file.write_text(cluster_text(base, tmp_path, {"checkpoint": str(base), "adapter": str(adapter)}))
    assert ConfigCheck(file).run() == 0
    out = capsys.readouterr().out
    assert "all layers" in out
    assert "layers [0, 4)" in out
    assert "float32 + LoRA" in out
    assert "usable (models: 2, families: 1, nodes: 3)" in out
    assert ConfigShow(file).run() == 0
    assert yaml.safe_load(capsys.readouterr().out)["timeouts"]["lease_s"] == 15


def test_config_check_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.yaml"
    for command in (ConfigCheck(file), ConfigShow(file)):
        assert command.run() == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(f"kvkin: {file}: no such file")
        assert captured.err.count("\n") == 1
    file.write_text("nodes: {}\nfamlies: {}\n")
    assert ConfigCheck(file).run() == 2
    assert f"{file}: famlies: unknown key, line 2" in capsys.readouterr().err
