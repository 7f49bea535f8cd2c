"""Tiny quantised checkpoints, made of tiny plain ones by the packages that define the formats. Needs those packages."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

# kind -> the package that makes and loads it
KINDS = {
    "int4": "compressed_tensors",
    "int4-asymmetric": "compressed_tensors",
    "int8": "compressed_tensors",
    "float8": "compressed_tensors",
    "nf4": "bitsandbytes",
    "nf4-double": "bitsandbytes",
    "torchao-int8": "torchao",
}
GROUP = 32
# kind -> format, bits, type, symmetric, strategy of the weights
_COMPRESSED: dict[str, tuple[str, int, str, bool, str]] = {
    "int4": ("pack-quantized", 4, "int", True, "group"),
    "int4-asymmetric": ("pack-quantized", 4, "int", False, "group"),
    "int8": ("int-quantized", 8, "int", True, "channel"),
    "float8": ("float-quantized", 8, "float", True, "channel"),
}


def quantise(base: Path, out: Path, kind: str, dtype: torch.dtype = torch.float32) -> Path:
    """Write ``base`` with the linear modules of its layers quantised into ``out``, everything else in ``dtype``, and return it."""
    if kind in _COMPRESSED:
        _compress(base, out, dtype, *_COMPRESSED[kind])
    else:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, quantization_config=_settings(kind))
        model.save_pretrained(str(out))
    for file in base.iterdir():
        if not (out / file.name).exists() and file.suffix != ".safetensors":
            shutil.copyfile(file, out / file.name)
    return out


def _settings(kind: str) -> Any:
    import transformers

    if kind.startswith("nf4"):
        return transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=kind == "nf4-double",
            bnb_4bit_compute_dtype=torch.float32,
        )
    from torchao.quantization import Int8WeightOnlyConfig

    return transformers.TorchAoConfig(Int8WeightOnlyConfig(version=2))


def _compress(
    base: Path, out: Path, dtype: torch.dtype, form: str, bits: int, number: str, symmetric: bool, strategy: str
) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    group = GROUP if strategy == "group" else None
    weights = QuantizationArgs(num_bits=bits, type=number, symmetric=symmetric, strategy=strategy, group_size=group)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=form)
    apply_quantization_config(
        model,
        QuantizationConfig(
            config_groups={"group_0": scheme}, ignore=["lm_head"], format=form, quantization_status="initialized"
        ),
    )
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        weight = module.weight.detach()
        parts = weight.view(len(weight), -1, group or weight.shape[1])
        scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), module.quantization_scheme.weights)
        module.weight_scale.data = scale.to(module.weight_scale.dtype).view_as(module.weight_scale)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data = zero.to(module.weight_zero_point.dtype).view_as(module.weight_zero_point)
        module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(str(out))
    compressor.update_config(str(out))
