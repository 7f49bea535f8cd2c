"""The digest of the output head: equal exactly where plain transformers makes the same logits of the same hidden states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_edits import (
    copy,
    edit_json,
    edit_weights,
    identity,
    kv_of,
    lineage,
    load_model,
    nudge,
    nudged,
    shard,
)
from safetensors.torch import load_file
from tiny_models import ARCHITECTURES, VOCAB_SIZE, make_tiny, make_tiny_lora

from kvkin.kv.errors import ConfigError

NUM_LAYERS = 2
HIDDEN = 64
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TOKENS = list(range(5, 45))
STATES = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(3))
# for peft, which goes by the settings and not by what the file holds
ON_THE_HEAD: dict[str, Any] = {
    "target_modules": ["o_proj", "lm_head"],
    "layers_to_transform": None,
    "layers_pattern": None,
}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param) / "base", num_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tied") / "base", num_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("mistral", tmp_path_factory.mktemp("untied") / "base", num_layers=NUM_LAYERS)


def head(folder: Path, adapter: Path | None = None, **options: Any) -> bytes:
    return identity(folder, adapter, **options).head_digest


def logits_of(model: Any) -> torch.Tensor:
    """What plain transformers makes of the same last hidden states."""
    with torch.no_grad():
        logits: torch.Tensor = model.lm_head(model.model.norm(STATES))
    return logits


def untie(folder: Path, change: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> Path:
    """Give a checkpoint with a tied head one of its own, made of the embedding."""

    def add(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = change(tensors["model.embed_tokens.weight"])

    return edit_json(edit_weights(folder, add), tie_word_embeddings=False)


# --- checkpoints ----------------------------------------------------------------------------------------------------------


def test_it_changes_with_the_logits_of_given_hidden_states(base: Path, tmp_path: Path) -> None:
    original, model = identity(base), load_model(base)
    logits = logits_of(model)
    changed = set()
    for index, name in enumerate(sorted(load_file(str(base / "model.safetensors")))):
        if ".layers.1." in name or (".experts." in name and ".experts.1." not in name):
            continue  # one layer and one expert stand for the others
        new = identity(nudge(copy(base, tmp_path / str(index)), name))
        with nudged(model, name):
            same = torch.equal(logits_of(model), logits)
        assert (new.head_digest == original.head_digest) is same, name
        assert new.logits_digest != original.logits_digest, name
        if not same:
            changed.add(name)
    embedding = "model.embed_tokens.weight" if original.geometry.tied else "lm_head.weight"
    assert changed == {"model.norm.weight", embedding}


def test_what_follows_the_last_layers_kv_is_in_the_digest_of_all(untied: Path, tmp_path: Path) -> None:
    """The last layer's MLP is in neither the lineage's id nor the head, and decides answers as well."""
    before = identity(untied)
    after = identity(nudge(copy(untied, tmp_path / "m"), f"model.layers.{NUM_LAYERS - 1}.mlp.up_proj.weight"))
    assert (after.lineage.id, after.head_digest) == (before.lineage.id, before.head_digest)
    assert after.logits_digest != before.logits_digest


def test_another_head_leaves_the_lineage_alone(untied: Path, tmp_path: Path) -> None:
    for name in ("lm_head.weight", "model.norm.weight"):
        other = nudge(copy(untied, tmp_path / name), name)
        assert lineage(other) == lineage(untied)
        assert head(other) != head(untied)


def test_the_norms_epsilon_counts_and_what_computes_no_logits_does_not(untied: Path, tmp_path: Path) -> None:
    assert head(edit_json(copy(untied, tmp_path / "eps"), rms_norm_eps=1e-3)) != head(untied)
    # a float32's spelling of the same number, and settings that concern other things
    quiet = edit_json(copy(untied, tmp_path / "quiet"), rms_norm_eps=9.999999747378752e-06, use_cache=False)
    assert head(quiet) == head(untied)
    assert head(shard(copy(untied, tmp_path / "shards"), 3)) == head(untied)


def test_a_tied_head_and_a_copy_of_the_embedding_are_the_same(tied: Path, tmp_path: Path) -> None:
    same = untie(copy(tied, tmp_path / "same"))
    assert head(same) == head(tied)
    assert torch.equal(logits_of(load_model(same)), logits_of(load_model(tied)))
    other = untie(copy(tied, tmp_path / "other"), lambda rows: rows + 0.05)
    assert head(other) != head(tied)
    assert lineage(other) == lineage(tied)


def test_a_stored_head_counts_though_the_settings_say_that_it_is_tied(tied: Path, tmp_path: Path) -> None:
    for name, change in {"same": torch.clone, "other": lambda rows: rows + 0.05}.items():
        folder = edit_json(untie(copy(tied, tmp_path / name), change), tie_word_embeddings=True)
        same = torch.equal(logits_of(load_model(folder)), logits_of(load_model(tied)))
        assert (head(folder) == head(tied)) is same is (name == "same")


def test_added_tokens_are_another_head(tied: Path, tmp_path: Path) -> None:
    def grow(tensors: Tensors) -> None:
        rows = tensors["model.embed_tokens.weight"]
        tensors["model.embed_tokens.weight"] = torch.cat([rows, torch.randn(8, rows.shape[1])])

    grown = edit_json(edit_weights(copy(tied, tmp_path / "grown"), grow), vocab_size=VOCAB_SIZE + 8)
    assert lineage(grown, family_vocab=VOCAB_SIZE) == lineage(tied)
    assert head(grown, family_vocab=VOCAB_SIZE) != head(tied)
    last = nudge(copy(grown, tmp_path / "last"), "model.embed_tokens.weight")
    assert head(last, family_vocab=VOCAB_SIZE) != head(grown, family_vocab=VOCAB_SIZE)


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def as_eight_bits(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)


def narrow(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:, :-1]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (drop("model.norm.weight"), r"lacks model\.norm\.weight"),
        (drop("lm_head.weight"), r"lacks lm_head\.weight, and tie_word_embeddings is off"),
        (as_eight_bits, r"lm_head\.weight is F8_E4M3: quantised"),
        (narrow, r"lm_head\.weight is \[320, 63\], but config\.json says \[320, 64\]"),
    ],
    ids=["norm", "head", "float8", "shape"],
)
def test_heads_that_cannot_be_used(
    untied: Path, tmp_path: Path, change: Callable[[Tensors], object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        identity(edit_weights(copy(untied, tmp_path / "m"), change))
    assert caught.value.key == "models.m.checkpoint"


# --- adapters -------------------------------------------------------------------------------------------------------------


def with_head(adapter: Path, target: Path, tensors: Tensors, **config: Any) -> Path:
    """A copy of an adapter that holds ``tensors`` of the head as well."""
    prefix = "base_model.model.lm_head."
    added = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    return edit_json(edit_weights(copy(adapter, target), lambda there: there.update(added), WEIGHTS), CONFIG, **config)


def lora(rank: int = 4, rows: int = VOCAB_SIZE, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        "lora_A.weight": torch.randn(rank, HIDDEN, generator=generator) * 0.1,
        "lora_B.weight": torch.randn(rows, rank, generator=generator) * 0.1,
    }


def merged(folder: Path, adapter: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(load_model(folder), str(adapter)).merge_and_unload()


def test_an_adapter_of_layers_leaves_the_head_alone(untied: Path, tmp_path: Path) -> None:
    assert head(untied, make_tiny_lora(untied, tmp_path / "a", [1])) == head(untied)


@pytest.mark.parametrize("name", ["weight", "modules_to_save.weight", "modules_to_save.default.weight"])
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_a_trained_head_is_that_of_a_checkpoint_that_has_it(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, name: str
) -> None:
    base: Path = request.getfixturevalue(kind)
    plain = make_tiny_lora(base, tmp_path / "a", [1])
    trained = torch.randn(VOCAB_SIZE, HIDDEN, generator=torch.Generator().manual_seed(9))
    adapter = with_head(plain, tmp_path / "b", {name: trained}, modules_to_save=["lm_head"])
    assert head(base, adapter) != head(base)
    assert lineage(base, adapter) == lineage(base, plain)
    whole = untie(copy(base, tmp_path / "whole"), lambda _: trained)
    assert head(base, adapter) == head(whole)
    if name == "weight":  # as peft writes it
        assert torch.equal(logits_of(merged(base, adapter)), logits_of(load_model(whole)))


def test_lora_on_the_head(untied: Path, tmp_path: Path) -> None:
    plain = make_tiny_lora(untied, tmp_path / "a", [1])
    digests = {head(untied)}
    settings: list[dict[str, Any]] = [{}, {"lora_alpha": 3}, {"alpha_pattern": {"lm_head": 1}}]
    for index, (tensors, config) in enumerate([*((lora(), one) for one in settings), (lora(seed=1), {})]):
        adapter = with_head(plain, tmp_path / str(index), tensors, **config)
        digests.add(head(untied, adapter))
        assert lineage(untied, adapter).kv[:1] == lineage(untied, plain).kv[:1]
    assert len(digests) == 5
    again = with_head(plain, tmp_path / "again", lora(), alpha_pattern={"lm_head": 8}, **ON_THE_HEAD)
    assert head(untied, again) == head(untied, with_head(plain, tmp_path / "same", lora()))
    assert not torch.equal(logits_of(merged(untied, again)), logits_of(load_model(untied)))


def test_lora_on_a_tied_head_is_refused_because_it_changes_kv(tied: Path, tmp_path: Path) -> None:
    plain = make_tiny_lora(tied, tmp_path / "a", [1], targets=["o_proj"])
    adapter = with_head(plain, tmp_path / "b", lora(), **ON_THE_HEAD)
    with pytest.raises(ConfigError, match="changes lm_head, which is the embedding of its base") as caught:
        identity(tied, adapter)
    assert caught.value.key == "models.m.adapter"
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        changed = kv_of(merged(tied, adapter), TOKENS)[0][0]
    assert not torch.equal(changed, kv_of(load_model(tied), TOKENS)[0][0]), "or nothing would speak against it"


@pytest.mark.parametrize(
    ("tensors", "config", "problem"),
    [
        ({"weight": torch.ones(7, HIDDEN)}, {}, r"lm_head \[7, 64\] does not fit \[320, 64\]"),
        ({"weight": torch.ones(VOCAB_SIZE, HIDDEN, dtype=torch.int32)}, {}, "lm_head is I32"),
        ({"bias": torch.ones(VOCAB_SIZE)}, {}, r"lm_head\.bias is no LoRA matrix"),
        ({"lora_A.weight": torch.ones(4, HIDDEN)}, {}, "lm_head has only lora_A"),
        (lora(rank=5), {}, "do not fit"),
        (lora(rows=7), {}, "do not fit"),
    ],
    ids=["rows", "dtype", "bias", "half", "rank", "other rows"],
)
def test_heads_of_adapters_that_cannot_be_used(
    untied: Path, tmp_path: Path, tensors: Tensors, config: dict[str, Any], problem: str
) -> None:
    adapter = with_head(make_tiny_lora(untied, tmp_path / "a", [1]), tmp_path / "b", tensors, **config)
    with pytest.raises(ConfigError, match=problem) as caught:
        identity(untied, adapter)
    assert caught.value.key == "models.m.adapter"


def test_a_head_that_peft_would_tie_to_the_embedding_is_refused(tied: Path, tmp_path: Path) -> None:
    plain = make_tiny_lora(tied, tmp_path / "a", [1])
    weights = {"weight": torch.ones(VOCAB_SIZE, HIDDEN)}
    adapter = with_head(plain, tmp_path / "b", weights, modules_to_save=["lm_head"], ensure_weight_tying=True)
    with pytest.raises(ConfigError, match="which is the embedding of its base"):
        identity(tied, adapter)
