"""Nodes on vLLM, with their checkpoints read: what the engine starts with, what cannot be served, and what quantising changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_models import make_tiny, make_tiny_lora
from vllm_fakes import install_fake_vllm, without_vllm

from kvkin.configs import vllm_rules
from kvkin.configs.families import ResolvedCluster, resolve_cluster, resolve_family
from kvkin.configs.loader import parse_cluster
from kvkin.configs.vllm_node import VllmNode, vllm_node
from kvkin.kv.errors import ConfigError
from kvkin.kv.lineage import shared_depth
from kvkin.tools.config_command import ConfigCheck

CONTEXT = 512
# 6 layers, keys and values of 2 heads x 16 floats
TOKEN_BYTES = 6 * 2 * 2 * 16 * 4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("vllm_node") / "base", num_layers=6)


def cluster_text(base: Path, state: Path, vllm: dict[str, Any], *, engine: str = "vllm", **family: Any) -> str:
    return yaml.safe_dump(
        {
            "state_dir": str(state),
            "families": {
                "fam": {
                    "base": "base",
                    "models": {"base": {"checkpoint": str(base)}},
                    "device": "cpu",
                    "engine": engine,
                    "vllm": vllm,
                    **family,
                }
            },
            "nodes": {
                "router": {"role": "router"},
                "prefill": {"role": "prefill", "port": 0, "models": ["base"], "engine": engine, "kv_bytes": "1MiB"},
                "decode": {"role": "decode", "port": 0, "models": ["base"], "kv_bytes": "64MiB", "threads": 2},
            },
        }
    )


def resolve(base: Path, state: Path, vllm: dict[str, Any], **family: Any) -> ResolvedCluster:
    return resolve_cluster(parse_cluster(cluster_text(base, state, vllm, **family), "f.yaml"))


def node(cluster: ResolvedCluster, name: str) -> VllmNode:
    found = vllm_node(cluster.config, cluster.families["fam"], name)
    assert found is not None
    return found


def test_the_tiny_model_is_what_the_figures_are_made_for(base: Path, tmp_path: Path) -> None:
    layout = resolve(base, tmp_path, {}).families["fam"].layout
    assert layout.num_layers * layout.kv_token_bytes == TOKEN_BYTES


def test_what_an_engine_starts_with(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_vllm(tmp_path / "site", monkeypatch)
    cluster = resolve(base, tmp_path, {"enforce_eager": True, "cpu_offload_params": ["a", "b"]})
    decode = node(cluster, "decode")
    assert decode.options == {
        "enforce_eager": True,
        "cpu_offload_params": {"a", "b"},
        "kv_cache_memory_bytes": 64 << 20,  # as much as the node keeps
        "max_model_len": CONTEXT,
        "dtype": "float32",
    }
    assert (decode.device, decode.threads, decode.ranks) == ("cpu", 2, 1)
    assert decode.merged_path == tmp_path / "merged"
    # less would not even hold one request: four blocks of 128 tokens and two to spare
    assert node(cluster, "prefill").options["kv_cache_memory_bytes"] == max(1 << 20, 6 * 128 * TOKEN_BYTES)


def test_the_files_word_counts(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_vllm(tmp_path / "site", monkeypatch)
    chosen = {"max_model_len": 600, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.5}
    cluster = resolve(base, tmp_path, chosen, chunk_tokens=4096)
    assert node(cluster, "decode").options == chosen | {"dtype": "float32"}
    cluster = resolve(base, tmp_path, {}, chunk_tokens=4096, max_context_tokens=256)
    options = node(cluster, "decode").options
    assert (options["max_num_batched_tokens"], options["max_model_len"]) == (4096, 256)


def test_a_gpu_node_is_left_to_vllm(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_vllm(tmp_path / "site", monkeypatch, name="vllm")
    cluster = resolve(base, tmp_path, {"block_size": 16}, device="cuda")
    assert node(cluster, "decode").options == {"block_size": 16, "max_model_len": CONTEXT, "dtype": "bfloat16"}


def test_reference_nodes_need_no_vllm(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)
    cluster = resolve(base, tmp_path, {}, engine="reference")
    assert vllm_node(cluster.config, cluster.families["fam"], "decode") is None
    # a router of vLLM nodes needs none either
    cluster = resolve(base, tmp_path, {})
    with pytest.raises(ConfigError, match="no vLLM is installed"):
        vllm_node(cluster.config, cluster.families["fam"], "decode")


def test_mixed_engines_have_one_lineage(base: Path, tmp_path: Path) -> None:
    lineages = {
        resolve(base, tmp_path, {}, engine=engine).families["fam"].base.lineage.id for engine in ("reference", "vllm")
    }
    assert len(lineages) == 1


def test_quantised_weights_have_another(base: Path, tmp_path: Path) -> None:
    plain = resolve(base, tmp_path, {}).families["fam"].base
    quantised = resolve(base, tmp_path, {"quantization": "fp8"}).families["fam"].base
    assert quantised.numerics == "float32+fp8/float32/float32"
    assert shared_depth(plain.lineage, quantised.lineage) == 0
    config = parse_cluster(cluster_text(base, tmp_path, {"quantization": "fp8"}), "f.yaml")
    assert resolve_family(config, "fam", models=["base"]).base.lineage.id == quantised.lineage.id, (
        "as the router has it"
    )


@pytest.mark.parametrize(
    ("vllm", "key", "problem", "allowed"),
    [
        ({"max_model_len": 511}, "max_model_len", "less than the 512 tokens", "max_context_tokens: 511"),
        ({"kv_cache_memory_bytes": CONTEXT * TOKEN_BYTES - 1}, "kv_cache_memory_bytes", "one request of 512", f"at least {CONTEXT * TOKEN_BYTES}"),
        ({"kv_cache_memory_bytes": CONTEXT * TOKEN_BYTES, "block_size": 96}, "kv_cache_memory_bytes", "hold less", f"{6 * 96 * TOKEN_BYTES}"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size", "4 heads with 2 heads of keys and values cannot be divided among 3", "1, 2, 4"),
    ],
)  # fmt: skip
def test_what_these_checkpoints_do_not_allow(
    vllm: dict[str, Any], key: str, problem: str, allowed: str, base: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(base, tmp_path, vllm)
    assert caught.value.key == f"families.fam.vllm.{key}"
    assert problem in caught.value.problem
    assert allowed in caught.value.allowed


@pytest.mark.parametrize(
    ("heads", "kv_heads", "allowed"),
    [(32, 8, {1, 2, 4, 8, 16, 32}), (12, 3, {1, 3, 6, 12}), (9, 3, {1, 3, 9}), (6, 4, {1, 2}), (8, 1, {1, 2, 4, 8})],
)
def test_ranks_that_share_heads(heads: int, kv_heads: int, allowed: set[int]) -> None:
    for ranks in range(1, 40):
        if ranks in allowed:
            vllm_rules.check_ranks("k", ranks, heads, kv_heads)
            continue
        with pytest.raises(ConfigError, match=f"among {ranks} ranks") as caught:
            vllm_rules.check_ranks("k", ranks, heads, kv_heads)
        assert caught.value.allowed == ", ".join(map(str, sorted(allowed)))


def test_memory_that_is_enough(base: Path, tmp_path: Path) -> None:
    resolve(base, tmp_path, {"kv_cache_memory_bytes": CONTEXT * TOKEN_BYTES})
    resolve(base, tmp_path, {"kv_cache_memory_bytes": 1, "num_gpu_blocks_override": 4})
    resolve(base, tmp_path, {"kv_cache_memory_bytes": CONTEXT * TOKEN_BYTES // 2, "tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match="hold less"):  # two KV heads on four ranks: each has one
        resolve(base, tmp_path, {"kv_cache_memory_bytes": CONTEXT * TOKEN_BYTES // 4, "tensor_parallel_size": 4})
    # what is too long is named: here it is not the family's context
    with pytest.raises(ConfigError, match=rf"one request of {2 * CONTEXT} tokens .*or a smaller max_model_len"):
        resolve(base, tmp_path, {"kv_cache_memory_bytes": CONTEXT * TOKEN_BYTES, "max_model_len": 2 * CONTEXT})
    with pytest.raises(ConfigError, match=rf"one request of {CONTEXT} tokens .*or a smaller max_context_tokens"):
        resolve(base, tmp_path, {"kv_cache_memory_bytes": CONTEXT * TOKEN_BYTES - 1})


def test_blocks_of_the_cpu_build(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_vllm(tmp_path / "site", monkeypatch)
    with pytest.raises(ConfigError, match="blocks of 48 tokens") as caught:
        node(resolve(base, tmp_path, {"block_size": 48}), "decode")
    assert caught.value.key == "families.fam.vllm.block_size"
    assert node(resolve(base, tmp_path, {"block_size": 64}), "decode").options["block_size"] == 64


def test_windowed_models_are_refused_on_vllm_only(tmp_path: Path) -> None:
    windowed = make_tiny("mistral", tmp_path / "m", num_layers=2, sliding_window=8)
    resolve(windowed, tmp_path, {}, engine="reference")
    with pytest.raises(ConfigError, match="attention window") as caught:
        resolve(windowed, tmp_path, {})
    assert caught.value.key == "nodes.prefill.engine"
    assert "engine: reference" in caught.value.allowed


def test_config_check_says_what_to_install_and_which_nodes_run_on_vllm(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(cluster_text(base, tmp_path, {}), encoding="utf-8")
    with monkeypatch.context() as patch:
        without_vllm(patch)
        assert ConfigCheck(file).run() == 2
        said = capsys.readouterr()
        assert said.err.count("\n") == 1
        assert "nodes.prefill.engine" in said.err
        assert "make install ENGINE=vllm" in said.err
        # nodes of other hosts: their vLLM is not ours to judge
        remote = yaml.safe_load(file.read_text())
        remote["transport"] = {"insecure": True, "backend": "tcp"}
        for worker in ("prefill", "decode"):
            remote["nodes"][worker] |= {"host": "192.0.2.1", "port": 5580 + len(worker)}
        (tmp_path / "remote.yaml").write_text(yaml.safe_dump(remote), encoding="utf-8")
        assert ConfigCheck(tmp_path / "remote.yaml").run() == 0
        assert "warning: vLLM is not installed here" in capsys.readouterr().out
    install_fake_vllm(tmp_path / "site", monkeypatch)
    assert ConfigCheck(file).run() == 0
    out = capsys.readouterr().out
    assert "prefill (vllm), decode (vllm)" in out
    file.write_text(cluster_text(base, tmp_path, {"max_num_seq": 4}), encoding="utf-8")
    assert ConfigCheck(file).run() == 2
    assert "did you mean max_num_seqs" in capsys.readouterr().err


def test_a_merged_adapter_is_of_the_same_model(base: Path, tmp_path: Path) -> None:
    """The folder of a merged checkpoint is named by this digest: it must change with whatever the adapter changes."""
    adapters = [make_tiny_lora(base, tmp_path / str(seed), [4, 5], seed=seed) for seed in (1, 2)]
    data = yaml.safe_load(cluster_text(base, tmp_path, {}))
    data["families"]["fam"]["models"] |= {
        f"m{index}": {"checkpoint": str(base), "adapter": str(path)} for index, path in enumerate(adapters)
    }
    family = resolve_cluster(parse_cluster(yaml.safe_dump(data), "f.yaml")).families["fam"]
    assert len({model.logits_digest for model in family.models.values()}) == 3
