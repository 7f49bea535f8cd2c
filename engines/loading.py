"""Loading checkpoints for the reference engine: a transformers model, its adapter merged in, on the configured device.

The weights are merged once at load: a LoRA member costs a full copy in memory but no extra work per token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvkin.configs.quantised import Quantisation, check_packages, read_quantisation
from kvkin.configs.safetensors_files import read_json
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

    Raises ConfigError for an architecture that the recompute executor does not know, and for quantised weights that are not run,
    or not without a package that is not installed, or not with an adapter.
    """
    place = pick_device(device)
    quantised = _quantisation(checkpoint, adapter)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint,
        dtype=pick_dtype(compute_dtype, place),
        attn_implementation="sdpa",
        local_files_only=True,
        # packed weights are put where they stay: some cannot be moved, and where there is a GPU bitsandbytes takes it unasked
        device_map={"": place} if quantised else None,
    )
    if type(model).__name__ not in SUPPORTED:
        raise ConfigError("checkpoint", f"architecture {type(model).__name__} is not supported", ", ".join(SUPPORTED))
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    model = (model if quantised else model.to(place)).eval().requires_grad_(False)
    if quantised:
        _wake(model)
    has_tokenizer = (checkpoint / "tokenizer.json").exists()
    return LoadedModel(ReferenceOps(model), load_tokenizer(checkpoint) if has_tokenizer else None, eos)


def _quantisation(checkpoint: Path, adapter: Path | None) -> Quantisation | None:
    config = read_json(checkpoint / "config.json", "checkpoint")
    quantisation = read_quantisation(config, str((config.get("architectures") or ["it"])[0]), "checkpoint")
    check_packages(quantisation, "checkpoint")
    if quantisation is not None and adapter is not None:
        raise ConfigError("adapter", f"given for weights quantised by {quantisation.method}", "plain weights")
    return quantisation


def _wake(model: Any) -> None:
    """Run one token through the whole model: compressed-tensors unpacks weights in a hook of its first forward pass, which single
    layers and modules do not make."""
    with torch.no_grad():  # in inference mode what is unpacked could never be moved or copied
        model(torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=False)
