"""The two committed adapters of the demo family: small, portable, what their cards say, and better than the base."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from kvkin.tools.finetune_card import readme
from kvkin.tools.finetune_data import SPLITS, read_qa, split_of

MODELS = Path(__file__).parents[2] / "configs" / "models"
LAYERS = {"smollm2-135m-qa": range(30), "smollm2-135m-code": range(15, 30)}
MAX_BYTES = 10_000_000


def _json(name: str, file: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((MODELS / name / file).read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize("name", LAYERS)
def test_adapter_is_small_bfloat16_and_portable(name: str) -> None:
    path = MODELS / name / "adapter_model.safetensors"
    assert path.stat().st_size <= MAX_BYTES
    with safe_open(str(path), framework="pt") as tensors:
        keys = list(tensors.keys())
        assert {tensors.get_slice(key).get_dtype() for key in keys} == {"BF16"}
    assert {int(key.split(".layers.")[1].split(".")[0]) for key in keys} == set(LAYERS[name])
    config = _json(name, "adapter_config.json")
    assert config["base_model_name_or_path"] == "smollm2-135m-instruct"
    assert sorted(file.name for file in (MODELS / name).iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "kvkin_card.json",
    ]


@pytest.mark.parametrize("name", LAYERS)
def test_card_states_a_clear_gain_on_held_out_groups(name: str) -> None:
    card = _json(name, "kvkin_card.json")
    scores = card["scores"]
    assert scores["before"]["all"]["n"] == scores["after"]["all"]["n"] >= 100
    gain = scores["gain"]
    assert gain["mean"] - gain["half_width_95"] > 0.05
    for kind, before in scores["before"].items():
        assert scores["after"][kind]["mean"] > before["mean"], kind
    for split in SPLITS:
        assert all(split_of(group) == split for group in card["split"][split])
    assert (MODELS / name / "README.md").read_text(encoding="utf-8") == readme(name, card)


def test_qa_card_names_the_data_it_was_trained_on() -> None:
    folder = Path(os.environ.get("KVKIN_SHARED_DATA") or Path(__file__).parents[3] / "shared" / "data")
    path = folder / "xquad.en.json"
    if not path.is_file():
        pytest.skip(f"XQuAD is not at {path} (set KVKIN_SHARED_DATA to its folder)")
    card, corpus = _json("smollm2-135m-qa", "kvkin_card.json"), read_qa(path)
    assert card["data"]["blake2b"] == corpus.digest
    assert {split: tuple(card["split"][split]) for split in SPLITS} == dict(corpus.splits)
