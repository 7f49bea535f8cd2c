"""Checkpoints whose KV depends on more than a lineage covers, refused by name (docs/design.md section 4).

Each would give wrong answers without an error: a key that changes with the length of the context, state that is not KV at
all, or layers that share KV. Called by ``configs.architectures`` on every config.json.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvkin.kv.errors import ConfigError

SUPPORTED = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
)

_MLA = "multi-head latent attention (MLA): its KV is a compressed latent"
_HYBRID = "linear or hybrid attention: part of its state is not KV by token"
_ALIBI = "ALiBi position biases"
_SOFTCAP = "attention logit softcapping"
_SHARED_KV = "cross-layer KV sharing"

# Parts of architecture names -> what makes them unsupported. Better words than "unknown architecture".
_BY_NAME = {
    "DeepseekV2": _MLA,
    "DeepseekV3": _MLA,
    "MiniCPM3": _MLA,
    "LongcatFlash": _MLA,
    "Kimi": _MLA,
    "Mamba": _HYBRID,
    "Jamba": _HYBRID,
    "Bamba": _HYBRID,
    "Zamba": _HYBRID,
    "Qwen3Next": _HYBRID,
    "Qwen3_5": _HYBRID,
    "Rwkv": _HYBRID,
    "RecurrentGemma": _HYBRID,
    "NemotronH": _HYBRID,
    "MoeHybrid": _HYBRID,
    "FalconH1": _HYBRID,
    "Lfm2": _HYBRID,
    "MiniMax": _HYBRID,
    "Bloom": _ALIBI,
    "MPT": _ALIBI,
    "Mpt": _ALIBI,
    "Gemma2": _SOFTCAP,
    "Gemma3n": _SHARED_KV,
    "Gemma4": _SHARED_KV,
}

_ATTENTION_KINDS = ("full_attention", "sliding_attention")


def _other_layer_types(config: dict[str, Any]) -> bool:
    kinds = config.get("layer_types") or config.get("layers_block_type") or []
    return any(kind not in _ATTENTION_KINDS for kind in kinds)


# (key shown in the error, whether the config has the feature, the feature). Seen before the architecture's name, so
# that a new architecture with one of these is refused for the right reason.
_FEATURES: tuple[tuple[str, Callable[[dict[str, Any]], object], str], ...] = (
    ("compression_config", lambda c: c.get("compression_config"), "quantised weights in an old spelling"),
    ("kv_lora_rank", lambda c: c.get("kv_lora_rank"), _MLA),
    ("layer_types", _other_layer_types, _HYBRID),
    ("attn_layer_period", lambda c: c.get("attn_layer_period"), _HYBRID),
    ("linear_num_key_heads", lambda c: c.get("linear_num_key_heads"), _HYBRID),
    ("alibi", lambda c: c.get("alibi") or c.get("position_embedding_type") == "alibi", _ALIBI),
    ("attn_config", lambda c: (c.get("attn_config") or {}).get("alibi"), _ALIBI),
    ("num_kv_shared_layers", lambda c: c.get("num_kv_shared_layers"), _SHARED_KV),
    ("attn_logit_softcapping", lambda c: c.get("attn_logit_softcapping"), _SOFTCAP),
    ("auto_map", lambda c: c.get("auto_map"), "code of its own (auto_map), so what it computes is unknown"),
)

# rope types -> why; all other types are checked by architectures.read_rope.
DYNAMIC_ROPE = {
    "dynamic": "dynamic-NTK scaling: a key's rotation changes with the length of the context",
    "longrope": "longrope scaling: a key's rotation changes with the length of the context",
    "su": "longrope scaling: a key's rotation changes with the length of the context",
    "mrope": "multimodal rope: positions are not those of the tokens",
    "proportional": "proportional rope: rotates a part of each head only",
}


def refuse_unsupported(config: dict[str, Any], key: str) -> str:
    """The architecture's name if it is supported; otherwise ConfigError under ``key`` that names what is not."""
    names = config.get("architectures") or []
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    shown = architecture or f"model_type {config.get('model_type')!r}"
    for name, present, feature in _FEATURES:
        if present(config):
            raise ConfigError(key, f"{shown} uses {feature} ({name} in config.json)", _allowed())
    for part, feature in _BY_NAME.items():
        if part in architecture:
            raise ConfigError(key, f"{shown} uses {feature}", _allowed())
    if not architecture:
        raise ConfigError(key, "config.json names no architecture", _allowed())
    if architecture not in SUPPORTED:
        raise ConfigError(key, f"the architecture {architecture} is not supported", _allowed())
    return architecture


def _allowed() -> str:
    return ", ".join(SUPPORTED)
