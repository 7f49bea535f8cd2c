"""Loading checkpoints for the reference engine: a transformers model, its adapter merged in, on the configured device.

The weights are merged once at load: a LoRA member costs a full copy in memory but no extra work per token.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from kvkin.engines.layer_ops import ReferenceOps
from kvkin.engines.reference import LoadedModel
from kvkin.engines.text import load_tokenizer
from kvkin.kv.errors import ConfigError

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MixtralForCausalLM")


def pick_device(device: str) -> torch.device:
    """``auto`` is CUDA where there is one. Raises ConfigError for a device that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "cuda is not available on this host", "auto, cpu")
    return torch.device(device)


def pick_dtype(compute_dtype: str, device: torch.device) -> torch.dtype:
    """``auto`` is float32 on CPU (faster than bfloat16 there) and bfloat16 on CUDA."""
    if compute_dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[compute_dtype]


def load_model(
    checkpoint: Path,
    adapter: Path | None,
    *,
    device: str = "auto",
    compute_dtype: str = "auto",
    eos: frozenset[int] = frozenset(),
) -> LoadedModel:
    """Load ``checkpoint`` (safetensors folder), merge ``adapter`` into it, return it ready to run.

    Raises ConfigError for an architecture that the recompute executor does not know.
    """
    place = pick_device(device)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=pick_dtype(compute_dtype, place), attn_implementation="sdpa", local_files_only=True
    )
    if type(model).__name__ not in SUPPORTED:
        raise ConfigError("checkpoint", f"architecture {type(model).__name__} is not supported", ", ".join(SUPPORTED))
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    model = model.to(place).eval().requires_grad_(False)
    has_tokenizer = (checkpoint / "tokenizer.json").exists()
    return LoadedModel(ReferenceOps(model), load_tokenizer(checkpoint) if has_tokenizer else None, eos)
