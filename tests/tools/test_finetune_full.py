"""kvkin finetune --method full: which weights move, what stays the base's to the bit, and that a cluster can serve the result."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from checkpoint_edits import edit_weights, identity, lineage, load_model, shard
from finetune_jobs import interrupt_after, write_squad
from safetensors.torch import load_file
from tiny_models import ARCHITECTURES, make_tiny

from kvkin.kv.errors import ConfigError
from kvkin.kv.lineage import shared_depth, shared_transition
from kvkin.tools import finetune_full
from kvkin.tools.cli import main
from kvkin.tools.finetune import EXIT_INTERRUPTED, Finetune
from kvkin.tools.finetune_loop import Trainer

NUM_LAYERS = 4
TOKENS = torch.arange(3, 60)[None]


def make_base(folder: Path, arch: str = "llama", **overrides: Any) -> Path:
    """A tiny base in bfloat16, as most are."""
    base = make_tiny(arch, folder, num_layers=NUM_LAYERS, **overrides)

    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}

    return edit_weights(base, narrow)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("models") / "tiny-base")


@pytest.fixture(scope="module")
def squad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_squad(tmp_path_factory.mktemp("data") / "towns.json")


@pytest.fixture
def job(base: Path, squad: Path, tmp_path: Path) -> Finetune:
    """A run of a second: about 20 steps of 2 short samples, fast enough for every weight to leave its bfloat16 value."""
    return Finetune(
        task="qa",
        data=str(squad),
        out=tmp_path / "tuned",
        method="full",
        base=base,
        learning_rate=1e-2,
        epochs=2,
        max_tokens_budget=3000,
        seq_len=200,
        batch_samples=2,
        threads=1,
        eval_samples=0,
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("model*.safetensors"):
        found |= load_file(str(file))
    return found


def moved(job: Finetune) -> set[str]:
    """Names of the tensors that are not the base's to the bit; both checkpoints have the same names, shapes and types."""
    assert job.base is not None
    before, after = weights(job.base), weights(job.out)
    kinds = [{name: (tensor.shape, tensor.dtype) for name, tensor in each.items()} for each in (before, after)]
    assert kinds[0] == kinds[1]
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


def in_layers(names: set[str], *layers: int) -> set[str]:
    return {name for name in names for layer in layers if f".layers.{layer}." in name}


def test_a_run_writes_a_checkpoint_and_its_card(job: Finetune) -> None:
    job = replace(job, eval_samples=4)
    assert job.run() == 0
    assert job.base is not None
    copied = {path.name for path in job.base.iterdir()}
    assert {path.name for path in job.out.iterdir()} == copied | {"README.md", "kvkin_card.json"}
    for name in copied - {"model.safetensors"}:
        assert (job.out / name).read_bytes() == (job.base / name).read_bytes(), name
    assert oct((job.out / "model.safetensors").stat().st_mode)[-3:] == "644"
    card = json.loads((job.out / "kvkin_card.json").read_text())
    assert card["settings"]["method"] == "full"
    assert not {"rank", "alpha", "targets"} & set(card["settings"])
    assert card["training"]["loss_curve"][-1]["loss"] < card["training"]["loss_curve"][0]["loss"]
    assert card["scores"]["decoding"] == "greedy, float32, checkpoint reloaded from bfloat16"
    readme = (job.out / "README.md").read_text()
    assert "A fully tuned checkpoint of tiny-base, made with `kvkin finetune --method full --task qa`." in readme
    assert "all parameters of all layers and the final norm" in readme
    for path in job.out.iterdir():
        assert str(job.out.parent).encode() not in path.read_bytes(), f"{path.name} names a path of this machine"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_layers_below_share_exactly_and_those_above_do_not(arch: str, job: Finetune, tmp_path: Path) -> None:
    base = make_base(tmp_path / arch, arch)
    job = replace(job, base=base, layers="2-4", max_tokens_budget=600)
    assert job.run() == 0
    names = set(weights(base))
    assert moved(job) <= in_layers(names, 2, 3)
    # an expert that no token was sent to has no gradient
    assert moved(job) >= {name for name in in_layers(names, 2, 3) if ".experts." not in name}
    old, new = lineage(base), lineage(job.out)
    assert [one == other for one, other in zip(old.kv, new.kv, strict=True)] == [True, True, False, False]
    assert (shared_depth(old, new), shared_transition(old, new)) == (2, 2)
    with torch.inference_mode():
        before = load_model(base)(TOKENS, output_hidden_states=True).hidden_states
        after = load_model(job.out)(TOKENS, output_hidden_states=True).hidden_states
    same = [torch.equal(one, other) for one, other in zip(before, after, strict=True)]
    assert same == [True, True, True, False, False]  # what enters layers 0, 1 and 2, then what leaves 2 and 3


def test_all_layers_are_tuned_but_not_the_embeddings(job: Finetune, tmp_path: Path) -> None:
    base = make_base(tmp_path / "untied", tie_word_embeddings=False)
    job = replace(job, base=base)
    assert job.run() == 0
    assert moved(job) == set(weights(base)) - {"model.embed_tokens.weight", "lm_head.weight"}
    # layer 0 sees the base's embeddings through another norm and other projections
    assert (shared_depth(lineage(base), lineage(job.out)), shared_transition(lineage(base), lineage(job.out))) == (0, 0)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_and_head_on_demand(job: Finetune, tmp_path: Path, tied: bool) -> None:
    base = make_base(tmp_path / "base", tie_word_embeddings=tied)
    job = replace(job, base=base, train_embeddings=True)
    assert job.run() == 0
    assert ("lm_head.weight" in weights(base)) is not tied
    assert moved(job) == set(weights(base))
    assert "final norm, embeddings and head" in (job.out / "README.md").read_text()


def test_a_family_with_such_a_member_is_usable(
    job: Finetune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replace(job, layers="2-4").run() == 0
    models = {"tiny": {"checkpoint": str(job.base)}, "tuned": {"checkpoint": str(job.out)}}
    nodes = {
        "router-0": {"role": "router", "client_port": 5570, "node_port": 5571},
        "decode-0": {"role": "decode", "models": list(models), "port": 5590, "kv_bytes": "1MiB", "e_bytes": "1MiB"},
    }
    cluster = {
        "state_dir": str(tmp_path / "state"),
        "families": {"tiny": {"base": "tiny", "models": models}},
        "nodes": nodes,
    }
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster))
    capsys.readouterr()
    assert main(["config", "check", str(file)]) == 0
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if "tuned" in line)
    assert [cell.strip() for cell in row.split("│")[1:6]] == ["tuned", "bfloat16", "layers [0, 2)", "layer 2", "family"]


def test_types_are_the_base_s(job: Finetune, tmp_path: Path) -> None:
    """A base of several files with norms in float32: rounding those would take away everything that could be shared."""
    base = make_base(tmp_path / "mixed")

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "norm" in name]:
            tensors[name] = tensors[name].float() + 1e-5

    shard(edit_weights(base, widen), 3)
    job = replace(job, base=base, layers="3-4")
    assert job.run() == 0
    assert {name.split(".")[2] for name in moved(job)} == {"3"}
    assert weights(job.out)["model.norm.weight"].dtype == torch.float32
    assert shared_depth(lineage(base), lineage(job.out)) == 3
    assert finetune_full.stored_type(base) == "bfloat16"
    assert identity(job.out).tokenizer_digest == identity(base).tokenizer_digest


@pytest.mark.parametrize("num_samples", [1, 7])
def test_interrupted_and_resumed_equals_uninterrupted(
    job: Finetune, monkeypatch: pytest.MonkeyPatch, num_samples: int
) -> None:
    whole = replace(job, out=job.out.with_name("whole"))
    assert whole.run() == 0
    with interrupt_after(num_samples, monkeypatch):
        assert job.run() == EXIT_INTERRUPTED
    assert [path.name for path in job.out.iterdir()] == ["checkpoint.pt"]
    assert replace(job, resume=True).run() == 0
    assert not (job.out / "checkpoint.pt").exists()
    assert (job.out / "model.safetensors").read_bytes() == (whole.out / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("step", "left"), [("save_file", ["checkpoint.pt"]), ("shutil.copyfile", ["checkpoint.pt", "model.safetensors"])]
)
def test_interrupted_while_saving_leaves_no_usable_half(
    job: Finetune, monkeypatch: pytest.MonkeyPatch, step: str, left: list[str]
) -> None:
    """The folder is a checkpoint once its config is there; the training is not lost."""

    def stop(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"kvkin.tools.finetune_full.{step}", stop)
        with pytest.raises(KeyboardInterrupt):
            job.run()
    assert sorted(path.name for path in job.out.iterdir()) == left

    def never(*args: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(Trainer, "_accumulate", never)
    assert replace(job, resume=True).run() == 0
    assert moved(job)


def test_scores_are_taken_from_what_lies_on_disk(job: Finetune, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_base(model: Any, base: Path, out: Path) -> None:
        shutil.copytree(base, out, dirs_exist_ok=True)

    monkeypatch.setattr(finetune_full, "save_checkpoint", save_base)
    job = replace(job, eval_samples=4)
    assert job.run() == 0
    card = json.loads((job.out / "kvkin_card.json").read_text())
    assert card["scores"]["before"] == card["scores"]["after"]
    assert all(example["base"] == example["fine_tune"] for example in card["examples"])


def test_each_method_has_its_own_learning_rate(job: Finetune) -> None:
    full = replace(job, learning_rate=None)
    assert full.recipe()["learning_rate"] == full.peak_rate
    assert full.peak_rate < replace(full, method="lora").peak_rate
    assert replace(full, learning_rate=0.5).recipe()["learning_rate"] == 0.5


def test_resume_tells_the_methods_apart(job: Finetune, monkeypatch: pytest.MonkeyPatch) -> None:
    with interrupt_after(3, monkeypatch):
        job.run()
    with pytest.raises(ConfigError, match=r"^resume: .*method='full', not 'lora'"):
        replace(job, method="lora", resume=True).run()
    file = job.out / "checkpoint.pt"
    state = torch.load(file, weights_only=True)
    del state["fingerprint"]["method"]  # as a version wrote it that knew adapters only
    torch.save(state, file)
    with pytest.raises(ConfigError, match=r"^resume: .*method='lora', not 'full'"):
        replace(job, resume=True).run()


def test_an_adapter_s_unfinished_run_of_the_version_before_goes_on(
    job: Finetune, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = replace(job, method="lora")
    with interrupt_after(3, monkeypatch):
        job.run()
    file = job.out / "checkpoint.pt"
    state = torch.load(file, weights_only=True)
    del state["fingerprint"]["method"]
    torch.save(state, file)
    assert replace(job, resume=True).run() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "prompt"}, r"^method: 'prompt' .*lora, full"),
        ({"rank": 8}, r"^rank: given together with method full .*method lora"),
        ({"alpha": 8.0}, r"^alpha: given together with method full .*method lora"),
        ({"targets": ("q_proj",)}, r"^targets: given together with method full .*method lora"),
        (
            {"train_embeddings": True, "layers": "2-4"},
            r"^train_embeddings: given together with layers 2-4 .*layers all",
        ),
        ({"train_embeddings": True, "method": "lora"}, r"^train_embeddings: .*method lora .*method full"),
        ({"layers": "0-9"}, r"^layers: '0-9' .*B <= 4"),
        ({"learning_rate": 2.0}, r"^learning_rate: 2\.0 .*above 0 and below 1"),
    ],
)
def test_bad_settings_name_the_key_and_what_is_allowed(job: Finetune, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(job, **change).run()
    assert not list(job.out.glob("model*.safetensors"))


def test_other_results_are_never_overwritten(job: Finetune, base: Path, tmp_path: Path) -> None:
    before = (base / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match=r"^out: .* is the base's own folder"):
        replace(job, out=base, overwrite=True).run()
    assert (base / "model.safetensors").read_bytes() == before
    assert job.run() == 0
    with pytest.raises(ConfigError, match=r"^out: .* already holds model\.safetensors .*--overwrite"):
        job.run()
    with pytest.raises(ConfigError, match=r"^out: .* holds a result of method full .*another folder"):
        replace(job, method="lora", overwrite=True).run()
    assert replace(job, overwrite=True).run() == 0


def test_a_base_without_safetensors_is_refused_before_the_training(job: Finetune, base: Path, tmp_path: Path) -> None:
    other = shutil.copytree(base, tmp_path / "other")
    torch.save(weights(base), other / "pytorch_model.bin")
    (other / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"^base: .* has no model\.safetensors, only pytorch_model\.bin"):
        replace(job, base=other).run()


def test_a_tensor_that_the_base_lacks_gets_the_common_type(base: Path, tmp_path: Path) -> None:
    """A head that a tied base does not store is stored once it is no longer tied."""
    model = finetune_full.open_base(base, layers="all", train_embeddings=False)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    model.config.tie_word_embeddings = False
    finetune_full.save_checkpoint(model, base, tmp_path)
    assert weights(tmp_path)["lm_head.weight"].dtype == torch.bfloat16
