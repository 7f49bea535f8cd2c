"""The demo family for tests: SmolLM2-135M and its adapters as plain transformers models, and a real text.

Adapters are added by hand (W + scale x B A), so that what an engine loads is checked against their definition. Whoever asks for what
is not there skips.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvkin.kv.errors import ConfigError
from kvkin.tools.smollm2 import prepare_base

ROOT = Path(__file__).resolve().parents[1]
LAYERS = 30
ADAPTERS = ("smollm2-135m-qa", "smollm2-135m-code")


def base_folder() -> Path:
    """The converted base; skips where the package is not installed."""
    try:
        return prepare_base(ROOT)
    except ConfigError as error:
        pytest.skip(str(error))


def adapter_path(name: str) -> Path:
    path = ROOT / "configs" / "models" / name
    if not (path / "adapter_model.safetensors").is_file():
        pytest.skip(f"the adapter {name} is not there; make it with kvkin finetune")
    return path


def load(path: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def add_adapter(model: Any, path: Path) -> Any:
    """The model with a LoRA adapter added, by its definition."""
    model = copy.deepcopy(model)
    config = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
    assert not config["use_dora"]
    assert not config["rank_pattern"]
    assert not config["alpha_pattern"]
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    tensors = load_file(str(path / "adapter_model.safetensors"))
    for name, down in tensors.items():
        if ".lora_A." in name:
            up = tensors[name.replace("lora_A", "lora_B")].float()
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            model.get_submodule(module).weight += scale * (up @ down.float())
    return model


def text_tokens(base: Path, num_tokens: int) -> list[int]:
    """Tokens of a real text, an instruction at their end."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    text = (ROOT / "LICENSE").read_text(encoding="utf-8").split("TERMS AND CONDITIONS", 1)[1]
    question = tokenizer("\nQuestion: What does the license say about patents?\nAnswer:").input_ids
    ids: list[int] = tokenizer(" ".join(text.split())).input_ids[: num_tokens - len(question)] + question
    assert len(ids) == num_tokens
    return ids
