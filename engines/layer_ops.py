"""LayerOps: the few operations on one model that the recompute executor needs; each engine implements them over its weights.

``ReferenceOps`` does it with the modules of a transformers decoder (Llama, Mistral, Qwen2, Qwen3, Mixtral: pre-norm attention with
RoPE, then an MLP or a mixture of experts), called one by one, so that a layer can stop after k and v or after one row.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from kvkin.kv.layout import KVLayout, Plane

ROWS_CACHED = 16
"""Chunks of interleaved requests whose rotation and masks are kept."""


class LayerOps(Protocol):
    """All tensors on ``device`` in ``dtype``; ``n`` rows of one request."""

    num_layers: int
    hidden_size: int
    device: torch.device
    dtype: torch.dtype
    planes: tuple[Plane, ...]

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids (n,) int64 -> hidden states entering layer 0 (n, hidden)."""

    def project_kv(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden (n, hidden), positions (n,) -> keys after RoPE and values, each (n, kv_heads, head_dim)."""

    def project_qkv(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Like ``project_kv`` with the queries (n, heads, head_dim) first."""

    def attend(self, layer: int, q: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Queries at ``positions`` over keys and values (m, kv_heads, head_dim) of positions 0 .. m-1 -> (n, heads * head_dim).

        Masked by position: a query sees keys at positions up to its own, within the layer's window.
        """

    def finish(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """Output projection, residual, MLP: hidden states entering the next layer (n, hidden)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states leaving the last layer (n, hidden) -> (n, vocab) float32."""


class _Rows:
    """What depends on positions alone and is the same in every layer: rotation, and masks by (number of keys, window)."""

    def __init__(self, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        self.positions, self.cos, self.sin = positions, cos, sin
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def mask(self, num_keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask (n, num_keys): 0 where a query sees a key, else -inf."""
        found = self._masks.get((num_keys, window))
        if found is None:
            device = self.positions.device
            distance = self.positions[:, None] - torch.arange(num_keys, device=device)[None, :]
            unseen = distance < 0 if window is None else (distance < 0) | (distance >= window)
            # a float mask: the CPU kernel handles it without first converting it for every head
            found = torch.zeros(unseen.shape, dtype=dtype, device=device).masked_fill_(unseen, float("-inf"))
            self._masks = {(num_keys, window): found, **({} if len(self._masks) > 1 else self._masks)}
        return found


class ReferenceOps:
    """LayerOps over an unmodified transformers ``...ForCausalLM``.

    Callers pass the same ``positions`` tensor for all layers of a chunk, so what depends on it is computed once.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._layers = model.model, list(model.model.layers)
        self._head = model.lm_head
        config = model.config
        self.num_layers: int = len(self._layers)
        self.hidden_size: int = config.hidden_size
        attention = self._layers[0].self_attn
        self._head_dim: int = attention.head_dim
        self._heads: int = config.num_attention_heads
        kv_heads: int = config.num_key_value_heads
        self.planes: tuple[Plane, ...] = (
            Plane("keys", kv_heads, self._head_dim),
            Plane("values", kv_heads, self._head_dim),
        )
        self._grouped = kv_heads != self._heads
        self._windows: list[int | None] = [_window_of(layer.self_attn, config) for layer in self._layers]
        self._row_cache: dict[int, _Rows] = {}
        # a linear module's weight may be quantised, or stored in other tensors; a norm's is what it is
        weight = self._layers[0].input_layernorm.weight
        self.device: torch.device = weight.device
        self.dtype: torch.dtype = weight.dtype

    def window(self, layer: int) -> int | None:
        """How many positions back a query of this layer sees, its own included; None: all."""
        return self._windows[layer]

    def embed(self, token_ids: Tensor) -> Tensor:
        embedded: Tensor = self._model.embed_tokens(token_ids)
        return embedded

    def project_kv(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        block = self._layers[layer]
        normed = block.input_layernorm(hidden)
        return self._keys_values(block.self_attn, normed, *self._rope(hidden, positions))

    def project_qkv(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        block = self._layers[layer]
        attention = block.self_attn
        normed = block.input_layernorm(hidden)
        cos, sin = self._rope(hidden, positions)
        q = attention.q_proj(normed).view(len(hidden), self._heads, self._head_dim)
        if hasattr(attention, "q_norm"):
            q = attention.q_norm(q)
        return _rotate(q, cos, sin), *self._keys_values(attention, normed, cos, sin)

    def attend(self, layer: int, q: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        num_keys = len(keys)
        window = self._windows[layer]
        mask: Tensor | None = None
        # the executor hands over keys up to the last row: a single row sees all of them, but for the window
        single = len(q) == 1
        if single and window is not None and window < num_keys:
            keys, values = keys[-window:], values[-window:]
        elif not single:
            mask = self._rows(q, positions).mask(num_keys, window, q.dtype)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=mask,
            scale=self._layers[layer].self_attn.scaling,
            enable_gqa=self._grouped,
        )
        return out[0].transpose(0, 1).reshape(len(q), -1)

    def finish(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        block = self._layers[layer]
        hidden = hidden + block.self_attn.o_proj(attended)
        # experts expect (batch, n, hidden)
        out: Tensor = hidden + block.mlp(block.post_attention_layernorm(hidden)[None])[0]
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self._head(self._model.norm(hidden))
        return out.float()

    def _rope(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        rows = self._rows(hidden, positions)
        return rows.cos, rows.sin

    def _rows(self, like: Tensor, positions: Tensor) -> _Rows:
        rows = self._row_cache.pop(id(positions), None)
        if rows is None:
            cos, sin = self._model.rotary_emb(like[None], positions[None])
            rows = _Rows(positions, cos[0][:, None], sin[0][:, None])
            if len(self._row_cache) >= ROWS_CACHED:
                del self._row_cache[next(iter(self._row_cache))]
        # the entry keeps the tensor alive, so its id cannot be taken by another one meanwhile
        self._row_cache[id(positions)] = rows
        return rows

    def _keys_values(self, attention: Any, normed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        k = attention.k_proj(normed).view(len(normed), -1, self._head_dim)
        if hasattr(attention, "k_norm"):
            k = attention.k_norm(k)
        return _rotate(k, cos, sin), attention.v_proj(normed).view(len(normed), -1, self._head_dim)


def layout_of(ops: LayerOps, block_size: int) -> KVLayout:
    """The KV layout that this model's blocks have on the wire."""
    return KVLayout(ops.num_layers, ops.planes, ops.hidden_size, str(ops.dtype).removeprefix("torch."), block_size)


def _window_of(attention: Any, config: Any) -> int | None:
    """A layer's sliding window. Qwen's attention knows its own; Mistral's and Mixtral's take the config's in every layer."""
    if config.model_type in ("mistral", "mixtral"):
        window: int | None = config.sliding_window
        return window
    return getattr(attention, "sliding_window", None)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE as in transformers' ``apply_rotary_pos_emb``: x (n, heads, head_dim), cos and sin (n, 1, head_dim)."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin
