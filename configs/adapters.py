"""LoRA adapters in peft's format: which layers they touch and with what, so that all others stay shared with the base.

A module's contribution is (A, B, effective scaling): the same numbers whatever the adapter is called. The head may be changed
as well: no KV depends on it, but answers do. What this project's engines do not run the plain way (DoRA, trained embeddings, new
spellings of peft) is refused by name. Called by ``configs.checkpoints``.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvkin.configs.digests import DigestCache, Progress, tensor_digests
from kvkin.configs.layer_tensors import HEAD, ModelTensors, canonical_name
from kvkin.configs.safetensors_files import WEIGHT_DTYPES, TensorRef, read_json, read_tensors
from kvkin.kv.errors import ConfigError
from kvkin.kv.hashing import digest

ADAPTER_CONFIG = "adapter_config.json"

# Settings that either do not change what a trained adapter computes, or are handled below by name.
_KNOWN = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "bias", "use_rslora", "modules_to_save",
    "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "megatron_core",
    "qalora_group_size", "runtime_config", "ensure_weight_tying",
}  # fmt: skip
# Initialisations after which the stored adapter is only right on a changed base model.
_INIT_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")

_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")
# The head's own weights as peft stores them: trained (modules_to_save), or the base's beside a LoRA on it.
_HEAD_WEIGHT = re.compile(r"lm_head\.(?:modules_to_save\.(?:default\.)?|base_layer\.)?weight")
_HEAD_MODULE = "lm_head"
HEAD_LAYER = -1  # where a module of the head stands
_LAYER_MODULE = re.compile(r"layers\.(\d+)\.(.+)")


class AdapterModule(msgspec.Struct, frozen=True):
    """LoRA on one linear module of a layer, or of the head (``HEAD_LAYER``): its weight becomes W + scaling x B A."""

    layer: int
    module: str  # canonical, e.g. self_attn.k_proj
    a: TensorRef
    b: TensorRef
    scaling: float


class Adapter(msgspec.Struct, frozen=True):
    """What an adapter changes. ``head`` takes the place of the base's head (none: it is kept)."""

    modules: tuple[AdapterModule, ...]
    head: TensorRef | None = None


def read_adapter(folder: Path, base: ModelTensors, key: str) -> Adapter:
    """What an adapter changes; ConfigError under ``key`` if it cannot be used on ``base``."""
    if base.quantised:
        # adapters are merged into the weights at load, which these cannot take up
        problem = f"an adapter on weights that are quantised by {base.quantised.split('@')[0]}"
        raise ConfigError(
            key, problem, "an adapter on plain weights, or a checkpoint that was quantised with it merged in"
        )
    config = read_json(folder / ADAPTER_CONFIG, key)
    _refuse_variants(config, key)
    halves: dict[str, dict[str, TensorRef]] = {}
    head: TensorRef | None = None
    for name, tensor in read_tensors(folder, "adapter_model", key).items():
        stripped = canonical_name(re.sub(r"^base_model\.model\.", "", name))
        if _HEAD_WEIGHT.fullmatch(stripped):
            head = tensor
            continue
        if "embedding" in stripped or stripped.startswith("embed_tokens."):
            raise ConfigError(key, f"{name}: the adapter changes embeddings", "LoRA on the linear modules of layers")
        match = _TENSOR.fullmatch(stripped)
        if match is None:
            raise ConfigError(key, f"{name} is no LoRA matrix", "tensors named ...lora_A.weight and ...lora_B.weight")
        halves.setdefault(match["module"], {})[match["half"]] = tensor
    _check_head(head, _HEAD_MODULE in halves, config, base, key)
    return Adapter(tuple(_module(module, pair, config, base, key) for module, pair in sorted(halves.items())), head)


def _check_head(head: TensorRef | None, lora: bool, config: dict[str, Any], base: ModelTensors, key: str) -> None:
    tied = HEAD not in base.after
    if tied and (lora or (head is not None and config.get("ensure_weight_tying"))):
        # merged into the one matrix that both are, it would change the KV of every layer
        problem = "the adapter changes lm_head, which is the embedding of its base (tie_word_embeddings)"
        raise ConfigError(key, problem, "modules_to_save: lm_head, or a base with a head of its own")
    if head is not None and head.shape != base.head.shape:
        problem = f"lm_head {list(head.shape)} does not fit {list(base.head.shape)}"
        raise ConfigError(key, problem, "an adapter made for this checkpoint")
    if head is not None and head.dtype not in WEIGHT_DTYPES:
        raise ConfigError(key, f"lm_head is {head.dtype}", ", ".join(WEIGHT_DTYPES))


def adapter_digests(
    modules: Sequence[AdapterModule], cache: DigestCache, key: str, progress: Progress | None = None
) -> dict[int, dict[str, bytes]]:
    """Layer (``HEAD_LAYER``: the head) -> canonical name -> digest of what the adapter does there."""
    named: list[TensorRef] = []
    for index, module in enumerate(modules):
        named += [
            msgspec.structs.replace(module.a, name=f"{index}A"),
            msgspec.structs.replace(module.b, name=f"{index}B"),
        ]
    tensors = tensor_digests(named, cache, key, progress)
    layers: dict[int, dict[str, bytes]] = {}
    for index, module in enumerate(modules):
        value = digest(b"lora", tensors[f"{index}A"], tensors[f"{index}B"], struct.pack("<d", module.scaling))
        layers.setdefault(module.layer, {})[f"{module.module}.lora"] = value
    return layers


def _module(
    module: str, pair: dict[str, TensorRef], config: dict[str, Any], base: ModelTensors, key: str
) -> AdapterModule:
    match = _LAYER_MODULE.fullmatch(module)
    weight: TensorRef | None
    if module == _HEAD_MODULE:
        layer, name, weight = HEAD_LAYER, module, base.head
    elif match is None or int(match[1]) >= len(base.layers):
        allowed = f"modules of layers 0 to {len(base.layers) - 1}, and {_HEAD_MODULE}"
        raise ConfigError(key, f"the adapter changes {module}", allowed)
    else:
        layer, name = int(match[1]), match[2]
        weight = base.layers[layer].get(f"{name}.weight")
    if weight is None or len(weight.shape) != 2:
        raise ConfigError(
            key, f"the adapter changes {module}, which the base does not have", "linear modules of the base"
        )
    if set(pair) != {"A", "B"}:
        raise ConfigError(key, f"{module} has only lora_{next(iter(pair))}", "lora_A and lora_B")
    a, b = pair["A"], pair["B"]
    rank = _pattern(config.get("rank_pattern"), module, config.get("r"))
    alpha = _pattern(config.get("alpha_pattern"), module, config.get("lora_alpha"))
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise ConfigError(key, f"r is {rank!r} and lora_alpha {alpha!r} for {module}", "a rank from 1 on and a number")
    if a.shape != (rank, weight.shape[1]) or b.shape != (weight.shape[0], rank):
        problem = f"{module}: A {list(a.shape)} and B {list(b.shape)} do not fit W {list(weight.shape)} at rank {rank}"
        raise ConfigError(key, problem, "an adapter made for this checkpoint")
    for tensor in (a, b):
        if tensor.dtype not in WEIGHT_DTYPES:
            raise ConfigError(key, f"{module} is {tensor.dtype}", ", ".join(WEIGHT_DTYPES))
    return AdapterModule(layer, name, a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _pattern(pattern: Any, module: str, default: Any) -> Any:
    """The entry of a rank_pattern or alpha_pattern for ``module``, matched as peft does: a regular expression's tail."""
    for name, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({name})$", f"model.{module}"):
            return value
    return default


def _refuse_variants(config: dict[str, Any], key: str) -> None:
    allowed = "plain LoRA (r, lora_alpha, use_rslora, rank_pattern, alpha_pattern) on linear modules of layers"
    kind = str(config.get("peft_type"))
    if kind != "LORA":
        raise ConfigError(key, f"peft_type is {kind} in {ADAPTER_CONFIG}", allowed)
    saved = [name for name in config.get("modules_to_save") or [] if str(name).split(".")[-1] != "lm_head"]
    if saved:
        raise ConfigError(key, f"modules_to_save holds {saved[0]} in {ADAPTER_CONFIG}", "lm_head only, or none")
    if config.get("bias", "none") != "none":
        raise ConfigError(key, f"bias is {config['bias']!r} in {ADAPTER_CONFIG}: trained biases", "bias: none")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_INIT_CHANGES_BASE):
        raise ConfigError(
            key, f"init_lora_weights is {init!r}: it changes the base", "an adapter converted to plain LoRA"
        )
    # whatever else is set may change the result: peft grows new variants with every release
    for name, value in config.items():
        if name not in _KNOWN and value:
            raise ConfigError(key, f"{name} is set in {ADAPTER_CONFIG}, which is not supported", allowed)
