"""A LoRA adapter's life for ``kvkin finetune``: put onto a base, saved in bfloat16, loaded again. Uses peft.

What is saved names the base by a portable name, never by a path, and sorts its lists, so that the same training writes
the same files. Called by ``finetune.py``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from kvkin.kv.errors import ConfigError
from kvkin.tools.finetune_checks import parse_layers


def load_base(base: Path) -> Any:
    """The base in float32 on the CPU, in eval mode."""
    return AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32).eval()


def check_targets(base: Path, targets: Sequence[str]) -> None:
    """ConfigError unless every one of ``targets`` is the name of a linear module of ``base``. Loads no weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(base)))
    present = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    unknown = sorted(set(targets) - present)
    if unknown or not targets:
        problem = f"no linear module is called {', '.join(unknown)}" if unknown else "none is given"
        raise ConfigError("targets", problem, ", ".join(sorted(present)))


def add_adapter(base: Path, *, rank: int, alpha: float, targets: tuple[str, ...], layers: str, seed: int) -> Any:
    """The base with a fresh, trainable LoRA adapter on the ``targets`` of ``layers``; everything else is frozen."""
    model = load_base(base)
    first, last = parse_layers(layers, model.config.num_hidden_layers)
    torch.manual_seed(seed)  # the start values of the A matrices
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules=list(targets),
        layers_to_transform=None if layers == "all" else list(range(first, last)),
        layers_pattern=None if layers == "all" else "layers",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def save_adapter(model: Any, out: Path, *, base_name: str) -> None:
    """Write ``adapter_model.safetensors`` (bfloat16) and ``adapter_config.json`` in peft's format."""
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in get_peft_model_state_dict(model).items()
    }
    weights = out / "adapter_model.safetensors"
    save_file(tensors, str(weights), metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors makes it private
    config = model.peft_config["default"].to_dict()
    config |= {"base_model_name_or_path": base_name, "inference_mode": True}
    config["target_modules"] = sorted(config["target_modules"])
    text = json.dumps(config, indent=1, sort_keys=True, default=sorted)  # default: what is left are sets
    (out / "adapter_config.json").write_text(text + "\n", encoding="utf-8")


def load_adapter(model: Any, out: Path) -> Any:
    """``model`` (a fresh base) with the adapter that lies in ``out``, its bfloat16 values computed in float32."""
    return PeftModel.from_pretrained(model, str(out)).float().eval()
