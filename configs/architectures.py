"""What a config.json means: geometry, rope and the settings that KV depends on, in one canonical form.

Two files that mean the same give equal structs, whatever the spelling (``rope_theta`` of transformers 4 or
``rope_parameters`` of transformers 5, defaults written out or left out): only what is listed here reaches a lineage, so
that ``_name_or_path``, ``torch_dtype`` or a new bookkeeping key cannot change it. Called by ``configs.checkpoints``.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import msgspec

from kvkin.configs.quantised import Quantisation, read_quantisation
from kvkin.configs.refusals import DYNAMIC_ROPE, SUPPORTED, refuse_unsupported
from kvkin.kv.errors import ConfigError
from kvkin.kv.hashing import digest

# What transformers takes for a key that config.json lacks, where architectures differ from _COMMON_DEFAULTS.
_COMMON_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10_000.0,
    "max_position_embeddings": 32_768,
    "num_key_value_heads": None,
    "head_dim": None,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "MixtralForCausalLM": {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    },
}


class Rope(msgspec.Struct, frozen=True):
    """Rotary embedding whose angles depend on the position alone. Fields that ``kind`` does not use are 0."""

    kind: str  # default, linear, llama3, yarn
    theta: float
    factor: float = 0.0
    original_max_tokens: int = 0
    low_freq_factor: float = 0.0  # llama3
    high_freq_factor: float = 0.0  # llama3
    beta_fast: float = 0.0  # yarn
    beta_slow: float = 0.0  # yarn
    attention_factor: float = 0.0  # yarn
    truncate: bool = False  # yarn


class Geometry(msgspec.Struct, frozen=True):
    """Shapes and attention of a model. ``windows[i]``: tokens that layer i sees, its own included; None: all before it.

    ``tied``: where the checkpoint has no head, the embedding is one.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    windows: tuple[int | None, ...]
    rope: Rope
    max_position: int
    rms_norm_eps: float
    hidden_act: str
    num_experts: int = 0
    experts_per_token: int = 0
    tied: bool = False
    quantisation: Quantisation | None = None

    def window(self, layer: int) -> int | None:
        return self.windows[layer]

    @property
    def semantic_digest(self) -> bytes:
        """Digest of what every layer's computation depends on besides weights and its own geometry."""
        # num_layers, vocab_size and max_position say how far a model reaches, not what it computes
        return digest(
            b"semantic",
            self.architecture.encode(),
            struct.pack(
                "<6Q", self.hidden_size, self.intermediate_size, self.num_experts, self.experts_per_token, 0, 0
            ),
            # the norm adds eps in float32, so 1e-5 and a float32's 9.99999974e-06 are the same setting
            struct.pack("<f", self.rms_norm_eps),
            self.hidden_act.encode(),
        )

    @property
    def head_digest(self) -> bytes:
        """Digest of what the logits depend on besides the final norm's and the head's weights.

        No supported architecture scales or caps its logits; one that does enters its settings here.
        """
        return digest(b"head geometry", struct.pack("<fQ", self.rms_norm_eps, self.vocab_size))

    def layer_digest(self, layer: int) -> bytes:
        """Digest of head geometry, rope and window of one layer."""
        window = self.windows[layer]
        return digest(
            b"geometry",
            struct.pack("<3Q", self.num_heads, self.kv_heads, self.head_dim),
            struct.pack("<q", -1 if window is None else window),
            msgspec.json.encode(self.rope),
        )


def read_geometry(config: dict[str, Any], key: str) -> Geometry:
    """The geometry that a config.json describes; ConfigError under ``key`` for what is unsupported or contradicts itself."""
    architecture = refuse_unsupported(config, key)
    quantisation = read_quantisation(config, architecture, key)
    values = {**_COMMON_DEFAULTS, **_DEFAULTS[architecture], **config}
    num_layers = _integer(config, "num_hidden_layers", key)
    hidden_size, num_heads = _integer(config, "hidden_size", key), _integer(config, "num_attention_heads", key)
    kv_heads = num_heads if values["num_key_value_heads"] is None else _integer(values, "num_key_value_heads", key)
    if num_heads % kv_heads:
        raise ConfigError(key, f"{num_heads} heads over {kv_heads} KV heads in config.json", "a divisor of the heads")
    if values["head_dim"] is None and hidden_size % num_heads:
        raise ConfigError(
            key, f"hidden_size {hidden_size} over {num_heads} heads in config.json", "a multiple of the heads"
        )
    moe = architecture == "MixtralForCausalLM"
    if moe and quantisation is not None:
        problem = f"{architecture} has quantised weights, which has not been tried with experts"
        raise ConfigError(key, problem, "experts in float32, bfloat16 or float16")
    return Geometry(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=_integer(config, "intermediate_size", key),
        num_heads=num_heads,
        kv_heads=kv_heads,
        head_dim=hidden_size // num_heads if values["head_dim"] is None else _integer(values, "head_dim", key),
        vocab_size=_integer(config, "vocab_size", key),
        windows=_read_windows(architecture, values, num_layers, key),
        rope=read_rope(values, key),
        max_position=_integer(values, "max_position_embeddings", key),
        rms_norm_eps=_number(values, "rms_norm_eps", key),
        hidden_act=str(values["hidden_act"]),
        num_experts=_integer(values, "num_local_experts", key) if moe else 0,
        experts_per_token=_integer(values, "num_experts_per_tok", key) if moe else 0,
        tied=bool(values["tie_word_embeddings"]),
        quantisation=quantisation,
    )


def _read_windows(architecture: str, values: dict[str, Any], num_layers: int, key: str) -> tuple[int | None, ...]:
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    if architecture in ("MistralForCausalLM", "MixtralForCausalLM"):
        window = None if values["sliding_window"] is None else _integer(values, "sliding_window", key)
        return (window,) * num_layers
    # Qwen: a switch, and either a list of kinds or a layer from which on windows slide
    on = bool(values.get("use_sliding_window", False)) and values["sliding_window"] is not None
    window = _integer(values, "sliding_window", key) if on else None
    kinds = values.get("layer_types")
    if kinds is None:
        first = values.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(kinds) < num_layers:
        raise ConfigError(key, f"layer_types has {len(kinds)} entries in config.json", f"{num_layers}, one a layer")
    if window is None and "sliding_attention" in kinds:
        raise ConfigError(
            key, "layer_types slides without a window in config.json", "use_sliding_window and sliding_window"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds[:num_layers])


def read_rope(values: dict[str, Any], key: str) -> Rope:
    """The rope of a config.json in either spelling; types whose angles depend on the context's length are refused."""
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ConfigError(key, "rope differs by layer in config.json", "one rope for all layers")
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if kind in DYNAMIC_ROPE:
        raise ConfigError(key, f"config.json uses {DYNAMIC_ROPE[kind]}", "rope types default, linear, llama3, yarn")
    rotary = given.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    if rotary != 1.0:
        raise ConfigError(key, f"partial_rotary_factor is {rotary} in config.json", "1.0, whole heads")
    theta = _number({"rope_theta": values["rope_theta"], **given}, "rope_theta", key)
    if kind == "default":
        return Rope("default", theta)
    if kind == "linear":
        factor = _number(given, "factor", key)
        return Rope("default", theta) if factor == 1.0 else Rope("linear", theta, factor)
    original = values.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    original = int(original or values["max_position_embeddings"])
    if kind == "llama3":
        low, high = _number(given, "low_freq_factor", key), _number(given, "high_freq_factor", key)
        return Rope("llama3", theta, _number(given, "factor", key), original, low, high)
    if kind == "yarn":
        return _read_yarn(given, theta, original, int(values["max_position_embeddings"]), key)
    raise ConfigError(key, f"the rope type {kind!r} is not supported", "default, linear, llama3, yarn")


def _read_yarn(given: dict[str, Any], theta: float, original: int, max_position: int, key: str) -> Rope:
    """YaRN with its derived defaults worked out, as transformers does."""
    factor = max_position / original if given.get("factor") is None else _number(given, "factor", key)

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    attention_factor = given.get("attention_factor")
    if attention_factor is None:
        all_dim, scale = given.get("mscale_all_dim"), given.get("mscale")
        attention_factor = magnitude(scale) / magnitude(all_dim) if scale and all_dim else magnitude(1.0)
    return Rope(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=float(given.get("beta_fast") or 32),
        beta_slow=float(given.get("beta_slow") or 1),
        attention_factor=float(attention_factor),
        truncate=bool(given.get("truncate", True)),
    )


def _integer(values: dict[str, Any], name: str, key: str) -> int:
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(key, f"{name} is {value!r} in config.json", "a whole number from 1 on")
    return value


def _number(values: dict[str, Any], name: str, key: str) -> float:
    value = values.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ConfigError(key, f"{name} is {value!r} in config.json", "a number above 0")
    return float(value)


assert set(_DEFAULTS) == set(SUPPORTED)
