"""Which tensor belongs to which part of a lineage, under canonical names.

A checkpoint may prefix its names with ``model.`` or not, and store Mixtral's experts one by one (as uploads do) or fused (as
transformers 5 holds them): the same weights get the same names here. A tensor nobody knows counts as an input of its
layer's KV, or of all layers if it lies outside them: never ignored. Called by ``configs.checkpoints`` and ``configs.adapters``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from kvkin.configs.architectures import Geometry
from kvkin.configs.safetensors_files import WEIGHT_DTYPES, TensorRef
from kvkin.kv.errors import ConfigError

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "norm.weight"

# Read after the last layer, so they determine no KV, but all answers.
_AFTER_LAYERS = ("norm.", "lm_head.")
# Derived from config.json; old transformers saved it, nobody loads it.
_DERIVED = "rotary_emb.inv_freq"
# Parts of a layer that its own KV does not depend on; all else, known or unknown, counts into its KV.
_NOT_KV = (
    "self_attn.q_proj.",
    "self_attn.q_norm.",
    "self_attn.o_proj.",
    "post_attention_layernorm.",
    "mlp.",
    "block_sparse_moe.",
)
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_FUSED = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(gate_up_proj|down_proj)")

# Modules whose weights a quantised checkpoint stores in other tensors; norms and biases it does not.
_LINEAR = re.compile(r"((?:self_attn|mlp)\.\w+_proj)\.(?!bias$).+")

_ATTENTION = ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


class ModelTensors(msgspec.Struct, frozen=True):
    """A checkpoint's tensors, sorted. Names within a layer lack the ``layers.N.`` prefix."""

    embedding: TensorRef
    layers: tuple[dict[str, TensorRef], ...]
    # outside the layers and unknown: part of every layer's lineage
    unknown: dict[str, TensorRef]
    # what makes logits of the last layer's output: the final norm, and the head where it is not the embedding
    after: dict[str, TensorRef]
    # how the linear modules' weights are quantised, as a numerics class calls it; empty: they are not
    quantised: str = ""

    @property
    def head(self) -> TensorRef:
        """The matrix (vocabulary, hidden size) that makes logits: the embedding where both are tied."""
        return self.after.get(HEAD, self.embedding)

    @property
    def weight_dtype(self) -> str:
        """The type that most of the layers' bytes have, or how they are quantised, as a numerics class calls it."""
        if self.quantised:
            return self.quantised
        num_bytes: dict[str, int] = {}
        for layer in self.layers:
            for tensor in layer.values():
                name = WEIGHT_DTYPES[tensor.dtype][0]
                num_bytes[name] = num_bytes.get(name, 0) + tensor.num_bytes
        return max(sorted(num_bytes), key=lambda name: num_bytes[name])


def is_kv_input(name: str) -> bool:
    """Whether a tensor of a layer (canonical, without the layer's prefix) takes part in that layer's own KV."""
    return not name.startswith(_NOT_KV)


def canonical_name(name: str) -> str:
    """A tensor's name without the ``model.`` that checkpoints of a bare base model lack."""
    return re.sub(r"^model\.", "", name)


def sort_tensors(tensors: dict[str, TensorRef], geometry: Geometry, key: str) -> ModelTensors:
    """Sort a checkpoint's tensors; ConfigError under ``key`` where one is missing or has the wrong shape or type."""
    layers: list[dict[str, TensorRef]] = [{} for _ in range(geometry.num_layers)]
    outside: dict[str, TensorRef] = {}
    after: dict[str, TensorRef] = {}
    for original, tensor in tensors.items():
        name = canonical_name(original)
        match = _LAYER.fullmatch(name)
        if name.endswith(_DERIVED):
            continue
        if name.startswith(_AFTER_LAYERS):
            after[name] = tensor
        elif match is None:
            outside[name] = tensor
        elif int(match[1]) < geometry.num_layers:  # layers beyond (of a model cut short) are never run
            layers[int(match[1])] |= {part.name: part for part in _split(match[2], tensor, geometry, key)}
    embedding = outside.pop(EMBEDDING, None)
    if embedding is None:
        raise ConfigError(key, f"the checkpoint lacks model.{EMBEDDING}", "the weights of a whole model")
    _check_dtype(embedding, f"model.{EMBEDDING}", key)
    _check_shape(embedding, (geometry.vocab_size, geometry.hidden_size), key)
    for index, layer in enumerate(layers):
        _check_layer(index, layer, geometry, key)
    _check_head(after, geometry, key)
    quantised = "" if geometry.quantisation is None else geometry.quantisation.weights
    return ModelTensors(embedding, tuple(layers), outside, after, quantised)


def _split(name: str, tensor: TensorRef, geometry: Geometry, key: str) -> Iterable[TensorRef]:
    """The canonical tensors that one stored tensor of a layer holds: itself, or the experts of a fused one."""
    if geometry.num_experts:
        name = re.sub(r"^mlp\.", "block_sparse_moe.", name)
    fused = _FUSED.fullmatch(name)
    if fused is None:
        return [_renamed(tensor, name)]
    experts, width, hidden = geometry.num_experts, geometry.intermediate_size, geometry.hidden_size
    if fused[1] == "down_proj":
        _check_shape(tensor, (experts, hidden, width), key)
        return [tensor.entry(e, f"block_sparse_moe.experts.{e}.w2.weight") for e in range(experts)]
    _check_shape(tensor, (experts, 2 * width, hidden), key)
    parts = []
    for expert in range(experts):
        both = tensor.entry(expert, "")
        prefix = f"block_sparse_moe.experts.{expert}"
        parts += [both.rows(0, width, f"{prefix}.w1.weight"), both.rows(width, 2 * width, f"{prefix}.w3.weight")]
    return parts


def _renamed(tensor: TensorRef, name: str) -> TensorRef:
    return msgspec.structs.replace(tensor, name=name)


def _check_head(after: dict[str, TensorRef], geometry: Geometry, key: str) -> None:
    """What lacks here would be made up at random by whoever loads the model."""
    if FINAL_NORM not in after:
        raise ConfigError(key, f"the checkpoint lacks model.{FINAL_NORM}", "the weights of a whole model")
    if HEAD not in after and not geometry.tied:
        problem = f"the checkpoint lacks {HEAD}, and tie_word_embeddings is off in config.json"
        raise ConfigError(key, problem, "the weights of a whole model, or a head tied to the embedding")
    for name, shape in ((FINAL_NORM, (geometry.hidden_size,)), (HEAD, (geometry.vocab_size, geometry.hidden_size))):
        if name in after:
            _check_dtype(after[name], name, key)
            _check_shape(after[name], shape, key)
    packed = next((name for name in after if name.startswith("lm_head.") and name not in (HEAD, "lm_head.bias")), None)
    if packed is not None:
        raise ConfigError(key, f"{packed}: the head is quantised", "a head and embeddings in plain numbers")


def _check_layer(index: int, layer: dict[str, TensorRef], geometry: Geometry, key: str) -> None:
    required = [f"{module}.weight" for module in (*_ATTENTION, "post_attention_layernorm")]
    if geometry.num_experts:
        required += [
            f"block_sparse_moe.experts.{expert}.{part}.weight"
            for expert in range(geometry.num_experts)
            for part in ("w1", "w2", "w3")
        ]
        required.append("block_sparse_moe.gate.weight")
    else:
        required += [f"{module}.weight" for module in _MLP]
    if geometry.architecture == "Qwen3ForCausalLM":
        required += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    if geometry.architecture == "Qwen2ForCausalLM":
        required += [f"self_attn.{part}_proj.bias" for part in "qkv"]
    packed = {match[1] for name in layer if (match := _LINEAR.fullmatch(name))}
    for name in required:
        # a quantised weight is several tensors, whose names its format decides
        stored = geometry.quantisation is not None and name.removesuffix(".weight") in packed
        if name not in layer and not stored:
            raise ConfigError(key, f"the checkpoint lacks model.layers.{index}.{name}", "the weights of a whole model")
    for name, tensor in layer.items():
        if geometry.quantisation is None or not _LINEAR.match(name):
            _check_dtype(tensor, f"model.layers.{index}.{name}", key)
    hidden, heads, kv_heads, width = geometry.hidden_size, geometry.num_heads, geometry.kv_heads, geometry.head_dim
    for name, shape in (
        ("q_proj", (heads * width, hidden)),
        ("k_proj", (kv_heads * width, hidden)),
        ("v_proj", (kv_heads * width, hidden)),
    ):
        weight = layer.get(f"self_attn.{name}.weight")
        if weight is not None and weight.dtype in WEIGHT_DTYPES:  # else it is packed as its format does
            _check_shape(weight, shape, key, f"model.layers.{index}.")


def _check_dtype(tensor: TensorRef, name: str, key: str) -> None:
    if tensor.dtype not in WEIGHT_DTYPES:
        problem = f"{name} is {tensor.dtype}: quantised, and config.json does not say that it is"
        raise ConfigError(key, problem, ", ".join(WEIGHT_DTYPES))


def _check_shape(tensor: TensorRef, shape: tuple[int, ...], key: str, prefix: str = "") -> None:
    if tensor.shape != shape:
        problem = f"{prefix}{tensor.name} is {list(tensor.shape)}, but config.json says {list(shape)}"
        raise ConfigError(key, problem, "weights and config.json of one model")
