"""Quantised checkpoints: which are run, through transformers and the package that transformers needs for them, and why others are not.

Run is what rounds *weights* alone. A scheme that rounds activations too makes KV depend on how a prompt is cut into steps (a sum in
another order rounds to another level), and one that looks at a whole batch to choose its scale makes it depend on the other tokens of
the batch: a lineage covers neither. Such checkpoints, and formats that nobody tried here, are refused by name.

``configs.architectures`` reads the ``quantization_config`` of every config.json; the packages are asked for where models are loaded and
by ``kvkin config check``, not on a router's host.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from typing import Any

import msgspec

from kvkin.kv.errors import ConfigError
from kvkin.kv.hashing import digest

_ROUNDS_ACTIVATIONS = "it rounds activations too, so a token's KV depends on how the prompt is cut into steps"
_BY_THE_BATCH = "it chooses what to round by all tokens of a step (LLM.int8), so a token's KV depends on the others"
_NOT_TRIED = "which has not been tried with kvkin"

_PACKED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_TORCHAO_TYPES = ("Int8WeightOnlyConfig",)
_ALLOWED = (
    "weights in float32, bfloat16 or float16, or quantised alone: awq and gptq (4 bits), compressed-tensors (int4, int8, float8), "
    f"bitsandbytes 4-bit, torchao {', '.join(_TORCHAO_TYPES)}"
)


class Quantisation(msgspec.Struct, frozen=True):
    """How a checkpoint's weights are stored. ``config_digest`` covers all of its quantization_config; ``packages`` are those that
    transformers needs to load it, with the least versions that it takes."""

    method: str
    packages: tuple[tuple[str, str], ...]
    config_digest: bytes

    @property
    def weights(self) -> str:
        """What stands for the weights' type in a numerics class: equal for equal settings only, never that of a plain type."""
        return f"{self.method}@{self.config_digest.hex()}"


def read_quantisation(config: dict[str, Any], shown: str, key: str) -> Quantisation | None:
    """The quantisation of a config.json, None for plain weights; ConfigError under ``key`` for one that is not run.

    ``shown`` names the architecture.
    """
    settings = config.get("quantization_config")
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise ConfigError(key, f"quantization_config is {settings!r} in config.json", "a JSON object")
    method = str(settings.get("quant_method", "an unnamed method"))
    known = _METHODS.get(method)
    why = _REFUSED.get(method, _NOT_TRIED) if known is None else known[1](settings)
    if known is None or why:
        problem = f"{shown} has weights quantised by {method}, {why} (quantization_config in config.json)"
        raise ConfigError(key, problem, _ALLOWED)
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return Quantisation(method, known[0], digest(b"quantization_config", text.encode()))


def check_packages(quantisation: Quantisation | None, key: str) -> None:
    """ConfigError under ``key`` unless the packages that load such weights are installed here."""
    for package, least in () if quantisation is None else quantisation.packages:
        assert quantisation is not None
        how = f"pip install '{package}>={least}'"
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            problem = (
                f"weights quantised by {quantisation.method} need the package {package}, which is not installed here"
            )
            raise ConfigError(key, problem, how) from None
        if _numbers(version) < _numbers(least):
            problem = (
                f"weights quantised by {quantisation.method} need {package} {least}, and {version} is installed here"
            )
            raise ConfigError(key, problem, how)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, enough to tell releases of these packages apart."""
    numbers: list[int] = []
    for part in version.split("+")[0].split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        numbers.append(int(digits or 0))
    return tuple(numbers)


def _compressed_tensors(settings: dict[str, Any]) -> str:
    """Why such a checkpoint is not run; empty if it is."""
    if settings.get("kv_cache_scheme"):
        return "with KV rounded as well (kv_cache_scheme), which kvkin does not store"
    if settings.get("transform_config"):
        return f"with transforms of activations (transform_config), {_NOT_TRIED}"
    if settings.get("sparsity_config") and settings["sparsity_config"].get("format") not in (None, "dense"):
        return f"with sparse weights (sparsity_config), {_NOT_TRIED}"
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        return "and its config_groups say nothing of them"
    for group in groups.values():
        if group.get("input_activations") or group.get("output_activations"):
            return f"and {_ROUNDS_ACTIVATIONS}"
        stored = group.get("format") or settings.get("format")
        if stored not in _PACKED_FORMATS:
            return f"stored as {stored}, {_NOT_TRIED}"
        weights = group.get("weights")
        if not isinstance(weights, dict) or weights.get("dynamic"):
            return f"without fixed scales, {_NOT_TRIED}"
        if weights.get("actorder") == "group":
            return f"with columns in the order of their activations (actorder: group), {_NOT_TRIED}"
    return ""


def _bitsandbytes(settings: dict[str, Any]) -> str:
    if settings.get("load_in_8bit"):
        return f"in 8 bits, and {_BY_THE_BATCH}"
    return "" if settings.get("load_in_4bit") else f"in neither 4 nor 8 bits, {_NOT_TRIED}"


def _torchao(settings: dict[str, Any]) -> str:
    kinds = settings.get("quant_type")
    kind = kinds.get("default") if isinstance(kinds, dict) and len(kinds) == 1 else None
    name = kind.get("_type") if isinstance(kind, dict) else kinds
    if settings.get("include_input_output_embeddings"):
        return f"embeddings and head as well, {_NOT_TRIED}"
    if isinstance(name, str) and "Dynamic" in name:
        return f"as {name}, and {_ROUNDS_ACTIVATIONS}"
    return "" if name in _TORCHAO_TYPES else f"as {name}, {_NOT_TRIED}"


def _awq(settings: dict[str, Any]) -> str:
    if settings.get("bits", settings.get("w_bit")) != 4:
        return f"in {settings.get('bits')} bits, {_NOT_TRIED}"
    layout = str(settings.get("format", settings.get("version", "gemm"))).lower()
    return "" if layout == "gemm" else f"in the layout {layout}, {_NOT_TRIED}"


def _gptq(settings: dict[str, Any]) -> str:
    if settings.get("bits") != 4:
        return f"in {settings.get('bits')} bits, {_NOT_TRIED}"
    if settings.get("desc_act"):
        return f"with columns in the order of their activations (desc_act), {_NOT_TRIED}"
    if settings.get("dynamic"):
        return f"differently by module (dynamic), {_NOT_TRIED}"
    layout = str(settings.get("checkpoint_format", "gptq")).lower()
    return "" if layout == "gptq" and not settings.get("is_marlin_format") else f"in the layout {layout}, {_NOT_TRIED}"


# quant_method -> packages with the least versions that transformers takes (gptqmodel: that was tried), and why a checkpoint with
# these settings is not run
_METHODS: dict[str, tuple[tuple[tuple[str, str], ...], Callable[[dict[str, Any]], str]]] = {
    "awq": ((("gptqmodel", "7.7.0"),), _awq),
    "bitsandbytes": ((("bitsandbytes", "0.46.1"),), _bitsandbytes),
    "compressed-tensors": ((("compressed-tensors", "0.15.0"),), _compressed_tensors),
    "gptq": ((("gptqmodel", "7.7.0"), ("optimum", "1.24.0")), _gptq),
    "torchao": ((("torchao", "0.15.0"),), _torchao),
}
_REFUSED = {"fp8": f"and {_ROUNDS_ACTIVATIONS}"}
