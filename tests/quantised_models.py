"""Tiny quantised checkpoints, made of tiny plain ones by the packages that define the formats (AWQ and GPTQ: by hand)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
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
    "awq": "gptqmodel",
    "gptq": "gptqmodel",
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
    if kind in ("awq", "gptq"):
        _pack(base, out, kind, dtype)
    elif kind in _COMPRESSED:
        _compress(base, out, dtype, *_COMPRESSED[kind])
    else:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, quantization_config=_settings(kind))
        model.save_pretrained(str(out))
    for file in base.iterdir():
        if not (out / file.name).exists() and file.suffix != ".safetensors":
            shutil.copyfile(file, out / file.name)
    return out


def _pack(base: Path, out: Path, kind: str, dtype: torch.dtype) -> None:
    """By hand, as AutoAWQ and AutoGPTQ lay 4-bit weights out: eight to an int32, along the outputs (AWQ) or the inputs (GPTQ)."""
    tensors = {}
    for name, weight in load_file(str(base / "model.safetensors")).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight.to(dtype)
            continue
        stem, columns = name.removesuffix(".weight"), weight.shape[1]
        parts = weight.view(len(weight), -1, GROUP)
        low, high = parts.amin(-1), parts.amax(-1)
        scale = ((high - low) / 15).to(torch.float16)
        zero = (-low / scale).round().clamp(0, 15).to(torch.int64)  # (outputs, groups)
        levels = (parts / scale[..., None]).round().to(torch.int64) + zero[..., None]
        levels = levels.clamp(0, 15).view(len(weight), columns)
        tensors[f"{stem}.scales"] = scale.T.contiguous()  # (groups, outputs)
        if kind == "awq":
            order = (0, 2, 4, 6, 1, 3, 5, 7)
            tensors[f"{stem}.qweight"] = _eight(levels.T, order)  # (inputs, outputs / 8)
            tensors[f"{stem}.qzeros"] = _eight(zero.T, order)
        else:
            tensors[f"{stem}.qweight"] = _eight(levels, range(8)).T.contiguous()  # (inputs / 8, outputs)
            tensors[f"{stem}.qzeros"] = _eight(zero.T - 1 & 15, range(8))  # this format stores zero - 1
            tensors[f"{stem}.g_idx"] = (torch.arange(columns) // GROUP).to(torch.int32)
    out.mkdir()
    save_file(tensors, str(out / "model.safetensors"), {"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    settings: dict[str, Any] = {"quant_method": kind, "bits": 4, "group_size": GROUP}
    settings |= {"zero_point": True, "version": "gemm"} if kind == "awq" else {"desc_act": False, "sym": False}
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def _eight(levels: torch.Tensor, order: Iterable[int]) -> torch.Tensor:
    """Numbers 0 to 15 of each row, eight to an int32: the i-th of ``order`` in bits [4 i, 4 i + 4)."""
    eights = levels.reshape(len(levels), -1, 8)
    packed = sum(eights[..., place] << 4 * index for index, place in enumerate(order))
    assert isinstance(packed, torch.Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32).contiguous()


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
