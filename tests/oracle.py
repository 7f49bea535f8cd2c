"""The independent oracle: what a reuse plan means by its definition in docs/design.md section 5, computed by brute force.

It calls unmodified transformers models and decoder layers over a plain ``DynamicCache`` and never imports ``kvkin.engines``;
of kvkin it only reads plans. A computed segment is one forward of the whole model over the cache of everything before it. A
reused segment takes its KV from the holders' contexts, and each layer of its recompute is one call of that decoder layer.

Two details matter. Caches are made without a config, so that a sliding layer keeps old keys (``DynamicCache(config=...)``
drops them, and a later recompute would miss them). Masks of single layer calls are explicit, by position and window, and name
the position of every key, so that keys may stand in the cache in any order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvkin.kv.plan import LayerGroup, ReusePlan, Segment, TokenRows


@dataclass
class State:
    """KV of every layer, (tokens, kv_heads, head_dim); hidden states entering every layer, (tokens, hidden), NaN where
    no model computed or received them; and the logits (vocab,) after the last token."""

    keys: list[Tensor]
    values: list[Tensor]
    hidden: list[Tensor]
    logits: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def num_tokens(self) -> int:
        return len(self.keys[0])

    @property
    def num_layers(self) -> int:
        return len(self.keys)

    def head(self, num_tokens: int) -> State:
        """The state of the first ``num_tokens`` tokens (logits are those of the end, so they are dropped)."""
        cut = [[tensor[:num_tokens] for tensor in part] for part in (self.keys, self.values, self.hidden)]
        return State(*cut)


def window_of(model: Any, layer: int) -> int | None:
    """Sliding window of a layer from the model's config, None where it sees everything."""
    config = model.config
    window = getattr(config, "sliding_window", None)
    if config.model_type in ("mistral", "mixtral"):
        return window
    if config.model_type in ("qwen2", "qwen3"):
        return window if config.layer_types[layer] == "sliding_attention" else None
    assert config.model_type == "llama", config.model_type
    return None


def visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Whether a query at a position may see a key at a position: (queries, keys) bool."""
    seen = keys[None, :] <= queries[:, None]
    return seen if window is None else seen & (keys[None, :] > queries[:, None] - window)


def private(model: Any, token_ids: Sequence[int]) -> State:
    """The reference: the model's own prefill of the whole prompt, in one forward."""
    return compute(model, empty(model), token_ids)


def contexts(models: Mapping[str, Any], token_ids: Sequence[int]) -> dict[str, State]:
    """What each node holds after a private prefill of ``token_ids`` by its model."""
    return {node: private(model, token_ids) for node, model in models.items()}


def execute(model: Any, token_ids: Sequence[int], plan: ReusePlan, held: Mapping[str, State]) -> State:
    """Carry out ``plan`` on ``model`` for ``token_ids``, with what each holder (by node name) has of its own context."""
    state = empty(model)
    for segment in plan.segments:
        if segment.sources:
            state = reuse(model, state, segment, token_ids[segment.start : segment.stop], held)
        else:
            state = compute(model, state, token_ids[segment.start : segment.stop])
    return state


@torch.inference_mode()
def compute(model: Any, before: State, token_ids: Sequence[int]) -> State:
    """A computed segment (a prompt's suffix, a generated token): the whole model over the cache of everything before."""
    cache = DynamicCache()
    if before.num_tokens:
        for layer in range(before.num_layers):
            cache.update(_cached(before.keys[layer]), _cached(before.values[layer]), layer)
    out = model(
        torch.tensor([list(token_ids)]),
        past_key_values=cache,
        use_cache=True,
        output_hidden_states=True,
        logits_to_keep=1,
    )
    return State(
        [_uncached(layer.keys) for layer in cache.layers],
        [_uncached(layer.values) for layer in cache.layers],
        # the last entry of hidden_states is normed already: it enters no layer
        [torch.cat([old, new[0]]) for old, new in zip(before.hidden, out.hidden_states, strict=False)],
        out.logits[0, -1].float(),
    )


@torch.inference_mode()
def reuse(model: Any, before: State, segment: Segment, token_ids: Sequence[int], held: Mapping[str, State]) -> State:
    """A reused segment: KV from its holders, then the recompute of its layers or rows over what is there."""
    taken = _pulled(model, segment, held)
    match segment.recompute:
        case LayerGroup(start, stop):
            return _recompute_layers(model, before, segment, token_ids, taken, range(start, stop), held)
        case TokenRows(rows):
            return _recompute_rows(model, before, segment, token_ids, taken, rows)
        case _:
            unknown = [_unknown(model, segment.num_tokens)] * before.num_layers
            keys, values = zip(*(taken[layer] for layer in range(before.num_layers)), strict=True)
            return _append(before, list(keys), list(values), unknown)


def _recompute_layers(
    model: Any,
    before: State,
    segment: Segment,
    token_ids: Sequence[int],
    taken: dict[int, tuple[Tensor, Tensor]],
    layers: range,
    held: Mapping[str, State],
) -> State:
    """DroidSpeak: the receiver's layers [a, b) run on the holder's hidden states entering layer a (or on embeddings).

    Each attends, in its own layer, over the KV of all tokens before the segment, however that came to be.
    """
    if segment.e_holder is None:
        hidden = model.model.embed_tokens(torch.tensor(list(token_ids)))
    else:
        assert segment.e_layer == layers.start
        hidden = held[segment.e_holder.node].hidden[layers.start][_span(segment)]
        assert not hidden.isnan().any(), "the holder has no such hidden states"
    positions, earlier = torch.arange(segment.start, segment.stop), torch.arange(segment.start)
    entering = [_unknown(model, segment.num_tokens)] * before.num_layers
    for layer in layers:
        entering[layer] = hidden
        past = before.keys[layer], before.values[layer], earlier
        hidden, keys, values = run_layer(model, layer, hidden, positions, *past)
        taken[layer] = keys, values
    keys, values = zip(*(taken[layer] for layer in range(before.num_layers)), strict=True)
    return _append(before, list(keys), list(values), entering)


def _recompute_rows(
    model: Any,
    before: State,
    segment: Segment,
    token_ids: Sequence[int],
    taken: dict[int, tuple[Tensor, Tensor]],
    rows: Sequence[int],
) -> State:
    """Token-wise (CacheBlend, KVShare): the chosen rows run through all layers; of the others the pulled KV stays."""
    chosen = torch.tensor(sorted(rows), dtype=torch.long)
    local = chosen - segment.start
    others = torch.ones(segment.num_tokens, dtype=torch.bool)
    others[local] = False
    positions = torch.cat([torch.arange(segment.start), torch.arange(segment.start, segment.stop)[others]])
    hidden = model.model.embed_tokens(torch.tensor(list(token_ids))[local])
    entering, all_keys, all_values = [], [], []
    for layer in range(before.num_layers):
        keys, values = (tensor.clone() for tensor in taken[layer])
        if len(chosen):
            states = _unknown(model, segment.num_tokens).clone()
            states[local] = hidden
            entering.append(states)
            past_keys = torch.cat([before.keys[layer], keys[others]])
            past_values = torch.cat([before.values[layer], values[others]])
            hidden, keys[local], values[local] = run_layer(
                model, layer, hidden, chosen, past_keys, past_values, positions
            )
        else:
            entering.append(_unknown(model, segment.num_tokens))
        all_keys.append(keys)
        all_values.append(values)
    return _append(before, all_keys, all_values, entering)


def run_layer(
    model: Any, layer: int, hidden: Tensor, positions: Tensor, keys: Tensor, values: Tensor, key_positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One decoder layer on rows at ``positions`` over earlier ``keys`` and ``values`` at ``key_positions``.

    Returns the rows' hidden states leaving the layer and their new keys and values.
    """
    cache = DynamicCache()
    if len(key_positions):
        cache.update(_cached(keys), _cached(values), layer)
    mask = visible(positions, torch.cat([key_positions, positions]), window_of(model, layer))[None, None]
    out = model.model.layers[layer](
        hidden[None],
        attention_mask=torch.where(mask, 0.0, float("-inf")).to(hidden.dtype),
        position_ids=positions[None],
        position_embeddings=model.model.rotary_emb(hidden[None], positions[None]),
        past_key_values=cache,
        use_cache=True,
    )
    new = slice(len(key_positions), None)
    return out[0], _uncached(cache.layers[layer].keys)[new], _uncached(cache.layers[layer].values)[new]


def generate(model: Any, state: State, num_tokens: int, forced: Sequence[int] = ()) -> tuple[State, list[int], Tensor]:
    """Greedy tokens after a prefilled ``state``; ``forced`` ones replace the oracle's own choice of what comes next.

    Returns the state of prompt + generated - 1 tokens, the oracle's choices and the logits (num_tokens, vocab) behind them.
    """
    choices, logits = [], []
    for index in range(num_tokens):
        logits.append(state.logits)
        choices.append(int(state.logits.argmax()))
        if index < num_tokens - 1:
            state = compute(model, state, [forced[index] if index < len(forced) else choices[-1]])
    return state, choices, torch.stack(logits)


def empty(model: Any) -> State:
    """The state before the first token."""
    config = model.config
    num_layers, attention = config.num_hidden_layers, model.model.layers[0].self_attn
    none = torch.empty(0, config.num_key_value_heads, attention.head_dim, dtype=model.dtype)
    return State([none] * num_layers, [none] * num_layers, [_unknown(model, 0)] * num_layers)


def _pulled(model: Any, segment: Segment, held: Mapping[str, State]) -> dict[int, tuple[Tensor, Tensor]]:
    span = _span(segment)
    return {
        layer: (held[source.holder.node].keys[layer][span], held[source.holder.node].values[layer][span])
        for source in segment.sources
        for layer in range(source.layers.start, source.layers.stop)
    }


def _span(segment: Segment) -> slice:
    """Where the segment lies in its holders' contexts; keys are rotated for their position, so it must be the same."""
    assert segment.source_first_position in (-1, segment.start), "moved spans need their keys rotated again"
    return slice(segment.start, segment.stop)


def _append(before: State, keys: list[Tensor], values: list[Tensor], entering: list[Tensor]) -> State:
    parts = ((before.keys, keys), (before.values, values), (before.hidden, entering))
    return State(*([torch.cat(pair) for pair in zip(old, new, strict=True)] for old, new in parts))


def _unknown(model: Any, num_tokens: int) -> Tensor:
    return torch.full((num_tokens, model.config.hidden_size), float("nan"), dtype=model.dtype)


def _cached(rows: Tensor) -> Tensor:
    """(tokens, kv_heads, head_dim) -> (1, kv_heads, tokens, head_dim) as caches hold it."""
    return rows.transpose(0, 1)[None]


def _uncached(cached: Tensor) -> Tensor:
    return cached[0].transpose(0, 1)
