"""vLLM in a cluster file: which nodes run on it, which arguments they get, and what is refused, without any vLLM."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest
import yaml

from kvkin.configs.loader import cluster_warnings, parse_cluster, show_cluster
from kvkin.configs.schema import ClusterConfig
from kvkin.configs.vllm_rules import LIMITED, REFUSED, argument_key, engine_key, node_arguments, node_engine, vllm_nodes
from kvkin.kv.errors import ConfigError

DAY = date(2026, 1, 1)
FAMILY: dict[str, Any] = {
    "base": "base",
    "models": {
        "base": {"checkpoint": "models/base"},
        "tuned": {"checkpoint": "models/base", "adapter": "adapters/tuned"},
        "full": {"checkpoint": "models/full"},
    },
}


def cluster_text(family: dict[str, Any], **nodes: dict[str, Any]) -> str:
    workers = {
        "prefill": {"role": "prefill", "port": 0, "models": ["base"]},
        "decode": {"role": "decode", "port": 0, "models": ["base", "tuned"]},
        "other": {"role": "decode", "port": 0, "models": ["full"]},
    }
    for name, changes in nodes.items():
        workers[name] = workers[name] | changes
    data = {"families": {"fam": FAMILY | family}, "nodes": {"router": {"role": "router"}, **workers}}
    return yaml.safe_dump(data, sort_keys=False)


def cluster(family: dict[str, Any], **nodes: dict[str, Any]) -> ClusterConfig:
    return parse_cluster(cluster_text(family, **nodes), "f.yaml")


def test_a_nodes_own_engine_and_arguments_win() -> None:
    config = cluster(
        {"engine": "vllm", "vllm": {"enforce_eager": True, "kv_cache_memory_bytes": "1GiB", "max_num_seqs": 4}},
        prefill={"engine": "reference"},
        decode={
            "vllm": {"max_num_seqs": 16, "enforce_eager": None, "compilation_config": {"level": 2, "sizes": [1, 2]}}
        },
    )
    assert {name: node_engine(config, name) for name in ("prefill", "decode", "other")} == {
        "prefill": "reference",
        "decode": "vllm",
        "other": "vllm",
    }
    assert vllm_nodes(config) == vllm_nodes(config, "fam") == ["decode", "other"]
    assert vllm_nodes(config, "no such family") == []
    assert node_arguments(config, "other") == {
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 30,
        "max_num_seqs": 4,
    }
    assert node_arguments(config, "decode") == {
        "kv_cache_memory_bytes": 1 << 30,
        "max_num_seqs": 16,
        "compilation_config": {"level": 2, "sizes": [1, 2]},
    }
    assert argument_key(config, "decode", "max_num_seqs") == "nodes.decode.vllm.max_num_seqs"
    assert argument_key(config, "other", "max_num_seqs") == "families.fam.vllm.max_num_seqs"
    assert engine_key(config, "prefill") == "nodes.prefill.engine"
    assert engine_key(config, "other") == "families.fam.engine"
    assert parse_cluster(show_cluster(config), "shown") == config


def test_without_a_word_nothing_runs_on_vllm() -> None:
    config = cluster({})
    assert vllm_nodes(config) == []
    assert node_arguments(config, "decode") == {}


def test_single_nodes_of_a_reference_family() -> None:
    config = cluster({"vllm": {"enforce_eager": True}}, decode={"engine": "vllm"})
    assert vllm_nodes(config) == ["decode"]
    assert cluster_warnings(config) == []


def test_arguments_that_nobody_reads_are_warned_of() -> None:
    (warning,) = cluster_warnings(cluster({"vllm": {"enforce_eager": True}}))
    assert warning.startswith("families.fam.vllm: no node")


@pytest.mark.parametrize("argument", sorted(REFUSED))
def test_what_kvkin_sets_itself_is_refused_with_the_reason(argument: str) -> None:
    for family, node, key in (
        ({argument: 1}, {}, f"families.fam.vllm.{argument}"),
        ({}, {argument: None}, f"nodes.other.vllm.{argument}"),
    ):
        with pytest.raises(ConfigError) as caught:
            cluster({"engine": "vllm", "vllm": family}, other={"vllm": node})
        assert caught.value.key == key
        assert REFUSED[argument] in caught.value.problem


@pytest.mark.parametrize("argument", sorted(LIMITED))
def test_values_that_kvkin_cannot_serve_are_refused_and_the_others_taken(argument: str) -> None:
    values, why = LIMITED[argument]
    for value in values:
        assert node_arguments(cluster({"engine": "vllm", "vllm": {argument: value}}), "other") == {argument: value}
    with pytest.raises(ConfigError) as caught:
        cluster({"engine": "vllm", "vllm": {argument: 2 if isinstance(values[0], int) else "fp8"}})
    assert caught.value.key == f"families.fam.vllm.{argument}"
    assert why in caught.value.problem
    assert str(values[0]) in caught.value.allowed


# (what is wrong, family, nodes, key, a part of the message)
BROKEN: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("arguments as a list", {"vllm": ["enforce_eager"]}, {}, "families.fam.vllm", "mapping"),
    ("arguments of a router", {}, {"router": {"vllm": {}}}, "nodes.router.vllm", "unknown key"),
    ("an engine that is none", {}, {"other": {"engine": "vlm"}}, "nodes.other.engine", "did you mean 'vllm'"),
    ("an option as on the command line", {"vllm": {"max-model-len": 1}}, {}, "families.fam.vllm.max-model-len", "max_model_len"),
    ("a private argument", {"vllm": {"_api_process_count": 1}}, {}, "families.fam.vllm._api_process_count", "name"),
    ("a date", {"vllm": {"seed": DAY}}, {}, "families.fam.vllm.seed", "date"),
    ("a date in a list", {"vllm": {"x": [DAY]}}, {}, "families.fam.vllm.x", "list"),
    ("ranks as text", {"vllm": {"tensor_parallel_size": "2"}}, {}, "families.fam.vllm.tensor_parallel_size", "whole number"),
    ("no rank", {"vllm": {"tensor_parallel_size": 0}}, {}, "families.fam.vllm.tensor_parallel_size", "from 1"),
    ("true ranks", {"vllm": {"tensor_parallel_size": True}}, {}, "families.fam.vllm.tensor_parallel_size", "True"),
    ("the length as vLLM likes", {"vllm": {"max_model_len": -1}}, {}, "families.fam.vllm.max_model_len", "from 1"),
    ("no size", {"vllm": {"kv_cache_memory_bytes": "1GB"}}, {}, "families.fam.vllm.kv_cache_memory_bytes", "512MiB"),
    ("replicas", {"vllm": {"data_parallel_rank": 1}}, {}, "families.fam.vllm.data_parallel_rank", "a node of its own"),
    ("no weights", {"vllm": {"load_format": "dummy"}}, {}, "families.fam.vllm.load_format", "no weights"),
    ("quantised by true", {"vllm": {"quantization": True}}, {}, "families.fam.vllm.quantization", "methods"),
    ("quantised by nothing", {"vllm": {"quantization": " "}}, {}, "families.fam.vllm.quantization", "methods"),
    (
        "arguments of a reference node",
        {"engine": "vllm"},
        {"other": {"engine": "reference", "vllm": {"seed": 1}}},
        "nodes.other.vllm",
        "engine: vllm",
    ),
    (
        "two checkpoints on a node",
        {"engine": "vllm"},
        {"decode": {"models": ["base", "tuned", "full"]}},
        "nodes.decode.models[2]",
        "another checkpoint",
    ),
    (
        "steps shorter than a chunk",
        {"engine": "vllm", "chunk_tokens": 512, "vllm": {"max_num_batched_tokens": 256}},
        {},
        "families.fam.vllm.max_num_batched_tokens",
        "at least 512",
    ),
    (
        "steps of one node shorter than a chunk",
        {"engine": "vllm", "chunk_tokens": 512},
        {"other": {"vllm": {"max_num_batched_tokens": 511}}},
        "nodes.other.vllm.max_num_batched_tokens",
        "at least 512",
    ),
    (
        "one node quantises",
        {"engine": "vllm"},
        {"other": {"vllm": {"quantization": "fp8"}}},
        "nodes.other.vllm.quantization",
        "families.fam.vllm.quantization",
    ),
    (
        "one node does not quantise",
        {"engine": "vllm", "vllm": {"quantization": "fp8"}},
        {"other": {"vllm": {"quantization": None}}},
        "nodes.other.vllm.quantization",
        "families.fam.vllm.quantization",
    ),
    (
        "a reference node of a quantised family",
        {"engine": "vllm", "vllm": {"quantization": "fp8"}},
        {"prefill": {"engine": "reference"}},
        "nodes.prefill.engine",
        "cannot quantise",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "nodes", "key", "part"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN]
)
def test_what_is_wrong_is_named_by_its_key(
    family: dict[str, Any], nodes: dict[str, dict[str, Any]], key: str, part: str
) -> None:
    if "router" in nodes:
        data = yaml.safe_load(cluster_text(family))
        data["nodes"]["router"] |= nodes["router"]
        text = yaml.safe_dump(data)
    else:
        text = cluster_text(family, **nodes)
    with pytest.raises(ConfigError) as caught:
        parse_cluster(text, "f.yaml")
    assert caught.value.key == key
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_families_are_left_alone() -> None:
    """A quantised family beside one that runs on the reference engine."""
    data = yaml.safe_load(cluster_text({"engine": "vllm", "vllm": {"quantization": "fp8"}}))
    data["families"]["plain"] = {"base": "alien", "models": {"alien": {"checkpoint": "models/alien"}}}
    data["nodes"]["alien"] = {"role": "decode", "port": 0, "models": ["alien"]}
    config = parse_cluster(yaml.safe_dump(data), "f.yaml")
    assert vllm_nodes(config) == ["prefill", "decode", "other"]
    assert node_arguments(config, "alien") == {}
