"""What an attached server's two files may say: the cluster file, and the command line with its connector's settings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tiny_models import make_tiny, make_tiny_lora

from kvkin.configs.families import resolve_cluster
from kvkin.configs.loader import load_cluster
from kvkin.decode_nodes.attached_models import AttachedModels
from kvkin.engines.vllm.serving import ServingOptions, Wishes, serving_options, taps_of, wishes_of
from kvkin.engines.vllm.serving_checks import check_before_loading, check_serving
from kvkin.kv.errors import ConfigError
from kvkin.router.configured import settings_from
from kvkin.tools.cluster_processes import ClusterProcesses, local_nodes
from kvkin.transport.messages import Reuse
from kvkin.transport.node_settings import node_settings


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    paths = {name: make_tiny("llama", root / name, seed=seed) for name, seed in (("base", 1), ("tune", 2))}
    paths["windowed"] = make_tiny("mistral", root / "windowed", seed=3)
    paths["lora"] = make_tiny_lora(paths["base"], root / "lora", range(4), seed=4)
    paths["other-lora"] = make_tiny_lora(paths["base"], root / "other-lora", range(4), seed=5)
    return paths


def write(folder: Path, checkpoints: dict[str, Path], *, family: dict[str, Any] | None = None, **node: Any) -> Path:
    models = {
        "base": {"checkpoint": str(checkpoints["base"])},
        "tune": {"checkpoint": str(checkpoints["tune"])},
        "adapted": {"checkpoint": str(checkpoints["base"]), "adapter": str(checkpoints["lora"])},
    }
    members = {"base": "base", "device": "cpu", "transition_layers": [2], "chunk_tokens": 64, "models": models}
    attached = {"role": "attached", "port": 0, "models": ["base", "adapted"], "kv_bytes": "1MiB", "e_bytes": "1MiB"}
    cluster = {
        "state_dir": str(folder / "state"),
        "families": {"tiny": members | (family or {})},
        "nodes": {
            "router-0": {"role": "router"},
            "decode-0": {"role": "decode", "port": 0, "models": ["tune"]},
            "vllm-0": attached | node,
        },
    }
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster, sort_keys=False))
    return file


@pytest.fixture
def file(tmp_path: Path, checkpoints: dict[str, Path]) -> Path:
    return write(tmp_path, checkpoints)


# --- the cluster file ---------------------------------------------------------------------------------------------------------


def test_an_attached_server_is_a_node_that_nobody_starts(file: Path, tmp_path: Path) -> None:
    config = load_cluster(file)
    assert list(config.attached) == ["vllm-0"]
    assert local_nodes(config) == ["router-0", "decode-0"]
    with pytest.raises(ConfigError, match=r"nodes\.vllm-0: is an attached server .*vllm serve starts it"):
        ClusterProcesses(file, config, ["vllm-0"], log_dir=tmp_path)


def test_the_router_lets_it_in_under_its_name(file: Path) -> None:
    cluster = resolve_cluster(load_cluster(file))
    settings = settings_from(cluster, "router-0")
    assert (settings.nodes["vllm-0"].role, settings.nodes["vllm-0"].models) == ("attached", ("base", "adapted"))
    assert not [warning for warning in cluster.warnings if "no decode node serves this model" in warning]
    node = node_settings(cluster.config, cluster.families["tiny"], "vllm-0")
    assert (node.role, node.name, [model.name for model in node.models]) == ("attached", "vllm-0", ["base", "adapted"])
    assert (node.chunk_tokens, node.transition_layers, node.kv_bytes) == (64, (2,), 1 << 20)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"models": []}, r"nodes\.vllm-0\.models: is empty"),
        ({"models": ["base", "tune"]}, r"nodes\.vllm-0\.models\[1\]: 'tune' is another checkpoint than 'base'"),
        ({"models": ["nobody"]}, r"nodes\.vllm-0\.models\[0\]: no model named 'nobody'"),
        ({"engine": "vllm"}, r"nodes\.vllm-0\.engine: unknown key"),
        ({"threads": 2}, r"nodes\.vllm-0\.threads: unknown key"),
        ({"port": 5571}, r"nodes\.vllm-0\.port: 127\.0\.0\.1:5571 is taken by nodes\.router-0\.node_port"),
    ],
)
def test_what_no_server_can_be_is_refused(
    tmp_path: Path, checkpoints: dict[str, Path], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_cluster(write(tmp_path, checkpoints, **changes))


def test_weights_that_vllm_quantises_are_no_servers(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    family = {"engine": "vllm", "vllm": {"quantization": "fp8"}}
    with pytest.raises(ConfigError, match=r"nodes\.vllm-0\.role: families\.tiny\.vllm\.quantization is set"):
        load_cluster(write(tmp_path, checkpoints, family=family))


def test_models_with_a_window_are_no_servers(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    models = {
        "base": {"checkpoint": str(checkpoints["windowed"])},
        "tune": {"checkpoint": str(checkpoints["windowed"])},
    }
    config = load_cluster(write(tmp_path, checkpoints, family={"models": models}, models=["base"]))
    with pytest.raises(ConfigError, match=r"nodes\.vllm-0\.models: vLLM drops KV behind an attention window"):
        resolve_cluster(config)


# --- the connector's settings -------------------------------------------------------------------------------------------------


def test_settings_are_read(file: Path) -> None:
    options = serving_options({"config": str(file), "node": "vllm-0", "reuse": "any", "max_loss": 1})
    assert (options.name, options.family_name, options.node.models) == ("vllm-0", "tiny", ("base", "adapted"))
    assert options.wishes == Wishes(Reuse.ANY, 1.0)
    assert taps_of({"config": str(file), "node": "vllm-0"}) == (2,)
    assert taps_of({"taps": [1, 3]}) == (1, 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": None}, r"kv_connector_extra_config\.config: cannot be None \(allowed: the cluster file\)"),
        ({"config": "/nowhere.yaml"}, r"/nowhere\.yaml"),
        ({"node": ""}, r"kv_connector_extra_config\.node: cannot be ''"),
        (
            {"node": "decode-0"},
            r"kv_connector_extra_config\.node: .*no node 'decode-0' of role attached \(allowed: vllm-0\)",
        ),
        ({"nodes": "vllm-0"}, r"kv_connector_extra_config\.nodes: no such key \(allowed: did you mean 'node'"),
        ({"reuse": "sometimes"}, r"kv_connector_extra_config\.reuse: cannot be 'sometimes' .*bounded"),
        ({"max_loss": -0.5}, r"kv_connector_extra_config\.max_loss: cannot be -0\.5 .*at least 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(file: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        serving_options({"config": str(file), "node": "vllm-0"} | changes)


def test_a_key_that_is_missing_is_named(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config\.node: is missing"):
        serving_options({"config": str(file)})
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config\.config: is missing"):
        serving_options({})


def test_a_requests_wishes_take_the_place_of_the_servers() -> None:
    server = Wishes(Reuse.ANY, 0.3)
    assert wishes_of({}, server, "x") == server
    assert wishes_of({"reuse": "exact", "publish": False}, server, "x") == Wishes(Reuse.EXACT, 0.3, False)
    for given, words in (
        ([], "x: cannot be"),
        ({"share_hint": float("inf")}, r"x\.share_hint"),
        ({"max_loss": float("nan")}, r"x\.max_loss"),
        ({"publish": "yes"}, r"x\.publish"),
        ({"plan": 1}, r"x\.plan: unknown key"),
    ):
        with pytest.raises(ConfigError, match=words):
            wishes_of(given, server, "x")


# --- vLLM's own configuration -------------------------------------------------------------------------------------------------


def resolved(**changes: Any) -> SimpleNamespace:
    """As much of vLLM's configuration as is looked at; ``parallel__nnodes=2`` changes one attribute."""
    parts: dict[str, dict[str, Any]] = {
        "parallel_config": {
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "nnodes": 1,
            "distributed_executor_backend": "mp",
        },
        "model_config": {"hf_overrides": {}, "quantization": None, "dtype": "torch.float32"},
        "scheduler_config": {"async_scheduling": False, "max_num_batched_tokens": 64},
        "load_config": {"load_format": "auto"},
        "cache_config": {"cache_dtype": "auto"},
        "device_config": {"device_type": "cuda"},
        "lora_config": {
            "max_loras": 1,
            "lora_dtype": "torch.float32",
            "target_modules": None,
            "enable_mixed_moe_lora_format": False,
        },
    }
    for key, value in changes.items():
        part, _, name = key.partition("__")
        parts[f"{part}_config"][name] = value
    return SimpleNamespace(speculative_config=None, **{name: SimpleNamespace(**part) for name, part in parts.items()})


@pytest.fixture
def options(file: Path) -> ServingOptions:
    return serving_options({"config": str(file), "node": "vllm-0"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel__pipeline_parallel_size": 2}, "--pipeline-parallel-size: cannot be 2"),
        ({"parallel__data_parallel_size": 4}, "--data-parallel-size: cannot be 4"),
        ({"parallel__nnodes": 2}, "--nnodes: cannot be 2"),
        ({"parallel__distributed_executor_backend": "ray"}, "--distributed-executor-backend: cannot be 'ray'"),
        ({"scheduler__async_scheduling": True}, r"--async-scheduling: .*allowed: --no-async-scheduling"),
        ({"scheduler__max_num_batched_tokens": 32}, r"--max-num-batched-tokens: 32 .*chunk_tokens, 64"),
        ({"model__hf_overrides": {"rope_theta": 1}}, "--hf-overrides"),
        ({"model__quantization": "fp8"}, "--quantization: weights quantised by fp8"),
        ({"load__load_format": "dummy"}, "--load-format"),
        ({"cache__cache_dtype": "fp8"}, r"--kv-cache-dtype: cannot be fp8: .*allowed: auto"),
        ({"lora__target_modules": ["q_proj"]}, "--lora-target-modules: an adapter of which vLLM leaves out modules"),
        ({"lora__lora_dtype": "torch.bfloat16"}, r"--lora-dtype: cannot be bfloat16: the model is float32 .*auto"),
        ({"lora__enable_mixed_moe_lora_format": True}, "--enable-mixed-moe-lora-format"),
        (
            {"device__device_type": "cpu"},
            r"--max-loras: 1 is too few: on CPUs .*at least 2, one more than the adapters of nodes\.vllm-0\.models",
        ),
    ],
)
def test_a_server_that_could_not_share_kv_is_refused(
    options: ServingOptions, changes: dict[str, Any], words: str
) -> None:
    check_serving(resolved(), options)
    with pytest.raises(ConfigError, match=words):
        check_serving(resolved(**changes), options)


def test_speculative_decoding_is_refused(options: ServingOptions) -> None:
    config = resolved()
    config.speculative_config = object()
    with pytest.raises(ConfigError, match="--speculative-config"):
        check_serving(config, options)


def test_adapters_need_lora(options: ServingOptions, tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    config = resolved()
    config.lora_config = None
    with pytest.raises(ConfigError, match=r"--enable-lora: is missing, and adapted of nodes\.vllm-0\.models are LoRA"):
        check_serving(config, options)
    plain = serving_options({"config": str(write(tmp_path, checkpoints, models=["base"])), "node": "vllm-0"})
    check_serving(config, plain)
    # adapters that are no members are the server's own affair
    check_serving(resolved(device__device_type="cpu"), plain)


def test_a_process_that_builds_the_model_refuses_it_before_the_weights(
    file: Path, checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def config(model: Path, extra: dict[str, Any]) -> SimpleNamespace:
        found = resolved(model__model=str(model))
        found.kv_transfer_config = SimpleNamespace(kv_connector_extra_config=extra)
        return found

    extra = {"config": str(file), "node": "vllm-0"}
    check_before_loading(config(checkpoints["base"], extra), 0)
    assert capsys.readouterr().err == ""
    with pytest.raises(ConfigError):
        check_before_loading(config(checkpoints["tune"], extra), 0)
    (line,) = capsys.readouterr().err.splitlines()
    wrong, right = checkpoints["tune"], checkpoints["base"]
    assert line.startswith(f"kvkin: nodes.vllm-0.models[0]: base has other weights than {wrong}, which vllm serve runs")
    assert f"--model {right}" in line
    # once, by the first rank
    check_before_loading(config(checkpoints["tune"], extra), 1)
    # a node's own engine was told its models by the node
    check_before_loading(config(checkpoints["tune"], {"taps": [1]}), 0)
    with pytest.raises(ConfigError, match=r"no node 'nobody'"):
        check_before_loading(config(checkpoints["base"], extra | {"node": "nobody"}), 0)


# --- what it really runs ------------------------------------------------------------------------------------------------------


def test_models_are_known_by_their_weights(
    options: ServingOptions, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    models = AttachedModels(options, str(checkpoints["base"]), "float32")
    assert models.model_of(None) == "base"
    assert models.model_of(("adapted", str(checkpoints["lora"]))) == "adapted"
    assert models.model_of(("stranger", str(checkpoints["lora"]))) is None
    # the same adapter in another folder: once it was read
    copied = tmp_path / "copied"
    copied.symlink_to(checkpoints["lora"])
    assert models.model_of(("adapted", str(copied))) == "adapted"
    models._compare("adapted", str(checkpoints["other-lora"]))
    assert models.model_of(("adapted", str(checkpoints["other-lora"]))) is None
    models._compare("adapted", str(tmp_path / "nothing"))
    assert models.model_of(("adapted", str(tmp_path / "nothing"))) is None


def test_other_weights_and_another_type_are_refused(options: ServingOptions, checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"nodes\.vllm-0\.models\[0\]: base has other weights than .*tune"):
        AttachedModels(options, str(checkpoints["tune"]), "float32")
    with pytest.raises(ConfigError, match=r"families\.tiny\.compute_dtype: vllm serve computes in bfloat16"):
        AttachedModels(options, str(checkpoints["base"]), "bfloat16")


def test_a_server_of_adapters_only_is_compared_as_well(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    """Its requests without an adapter are nobody's, but its adapters are the family's on the family's base only."""
    options = serving_options({"config": str(write(tmp_path, checkpoints, models=["adapted"])), "node": "vllm-0"})
    models = AttachedModels(options, str(checkpoints["base"]), "float32")
    assert models.model_of(None) is None
    assert models.model_of(("adapted", str(checkpoints["lora"]))) == "adapted"
    with pytest.raises(ConfigError, match=r"nodes\.vllm-0\.models\[0\]: adapted has other weights than .*tune"):
        AttachedModels(options, str(checkpoints["tune"]), "float32")
