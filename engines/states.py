"""What a context leaves behind on one model: its KV, whole, under a recompute group, or blended token by token.

Profiling and evaluation (``kvkin profile``, ``kvkin evaluate``) compare ways to reuse a context offline, on one process that holds
both models. Here the context's states are made over an engine's LayerOps; ``engines/answers.py`` continues from them. No chunks
of other nodes, no blocks, no plans: what a plan yields for the context is ``group_states`` (docs/design.md section 5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvkin.engines.layer_ops import LayerOps
from kvkin.kv.plan import LayerGroup

CHUNK_TOKENS = 256
"""Rows of a context that run through a layer at once: enough for full speed, few enough that masks stay small."""


@dataclass
class ContextStates:
    """States of one context of n tokens on L layers. Tensors may be shared with other states: nobody writes to them."""

    keys: list[Tensor]
    """Keys after RoPE by layer, each (n, kv_heads, head_dim)."""
    values: list[Tensor]
    """Values by layer, each (n, kv_heads, head_dim)."""
    hidden: list[Tensor] = field(default_factory=list)
    """Hidden states entering each layer, (n, hidden); empty where they were not kept."""

    @property
    def num_tokens(self) -> int:
        return len(self.keys[0])

    @property
    def num_layers(self) -> int:
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, those shared with other states included."""
        return sum(tensor.nbytes for part in (self.keys, self.values, self.hidden) for tensor in part)


class ContextRows:
    """Rows of a context at ascending positions, in chunks, and one layer's work on them.

    ``keys`` and ``values`` are those of the whole context at that layer, (n, kv_heads, head_dim): the rows' own are written
    into them first, then every row attends over all positions up to its own. Rows that are left out keep what is there.
    """

    def __init__(self, ops: LayerOps, positions: Sequence[int], chunk_tokens: int = CHUNK_TOKENS) -> None:
        self._ops = ops
        self._chunks: list[tuple[slice, Tensor, int]] = []  # which rows, their positions, how many keys they may see
        for first in range(0, len(positions), chunk_tokens):
            chunk = positions[first : first + chunk_tokens]
            where = torch.tensor(chunk, dtype=torch.long, device=ops.device)
            self._chunks.append((slice(first, first + len(chunk)), where, chunk[-1] + 1))

    def project(self, layer: int, hidden: Tensor, keys: Tensor, values: Tensor) -> None:
        """Only write the k and v of the rows, whose hidden states (rows, hidden) enter ``layer``."""
        for rows, positions, _ in self._chunks:
            keys[positions], values[positions] = self._ops.project_kv(layer, hidden[rows], positions)

    def run(self, layer: int, hidden: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Write the k and v of the rows and return their hidden states leaving ``layer`` (rows, hidden)."""
        out = torch.empty_like(hidden)
        for rows, positions, seen in self._chunks:
            q, keys[positions], values[positions] = self._ops.project_qkv(layer, hidden[rows], positions)
            attended = self._ops.attend(layer, q, positions, keys[:seen], values[:seen])
            out[rows] = self._ops.finish(layer, hidden[rows], attended)
        return out


@torch.inference_mode()
def full_states(
    ops: LayerOps, token_ids: Sequence[int], *, keep_hidden: bool = False, chunk_tokens: int = CHUNK_TOKENS
) -> ContextStates:
    """A private prefill of the context: KV of all layers, and with ``keep_hidden`` the hidden states entering each.

    Raises ValueError for an empty context or a chunk of no tokens.
    """
    check_tokens("token_ids", token_ids)
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens: {chunk_tokens} is not at least 1")
    rows = ContextRows(ops, range(len(token_ids)), chunk_tokens)
    states = ContextStates([], [])
    entering = embed(ops, token_ids)
    for layer in range(ops.num_layers):
        if keep_hidden:
            states.hidden.append(entering)
        entering = _append(states, rows, ops, layer, entering, last=layer == ops.num_layers - 1)
    return states


def group_states(
    ops: LayerOps, token_ids: Sequence[int], sender: ContextStates, group: LayerGroup | None
) -> ContextStates:
    """What a partial plan yields for the context (DroidSpeak, section 4): KV inside ``group`` is the receiver's, outside the sender's.

    The receiver's layers run on the sender's hidden states entering ``group.start``, or on its own embeddings at 0; of the last
    of them only k and v are computed. None is full reuse. Layers outside are the sender's tensors, not copies.

    Raises ValueError where ``sender`` is of another context or model, lacks the hidden states, or the group is outside of it.
    """
    return states_of_groups(ops, token_ids, sender, [group])[0]


@torch.inference_mode()
def states_of_groups(
    ops: LayerOps, token_ids: Sequence[int], sender: ContextStates, groups: Sequence[LayerGroup | None]
) -> list[ContextStates]:
    """``group_states`` of several groups. Those that start at the same layer share what is computed, and its tensors."""
    check_sender(ops, token_ids, sender)
    reach: dict[int, int] = {}  # how far the groups of each start go
    for group in groups:
        if group is not None:
            _check_group(ops, group)
            reach[group.start] = max(group.stop, reach.get(group.start, 0))
    rows = ContextRows(ops, range(len(token_ids)))
    computed = {start: ContextStates([], []) for start in reach}
    for start, stop in reach.items():
        entering = entering_states(ops, token_ids, sender, start)
        for layer in range(start, stop):
            entering = _append(computed[start], rows, ops, layer, entering, last=layer == stop - 1)
    return [_merged(sender, group, computed) for group in groups]


@torch.inference_mode()
def blend_states(
    ops: LayerOps,
    token_ids: Sequence[int],
    sender: ContextStates,
    *,
    ratio: float,
    check_layer: int = 1,
    update_check_layer: bool = False,
) -> tuple[ContextStates, int]:
    """CacheBlend's choice and recompute of token rows, for a context that is reused whole; and the layer-tokens it computes.

    The rule (CacheBlend, EuroSys'25, section 4, and its public implementation ``vllm_blend``, attention/backends/xformers.py):

    - layers below ``check_layer`` are computed for all tokens by the receiver, from its embeddings;
    - at the check layer the receiver's k and v of all tokens are computed; a token's deviation is the squared difference of its
      fresh V from the sender's, summed over heads and dimensions; the ``int(ratio * n)`` tokens of highest deviation are chosen
      (of equal ones the earlier), once for all layers;
    - from the check layer on only the chosen rows are computed: their fresh k and v replace the sender's, and they attend over
      the merged KV of all earlier positions. Of the last layer only their k and v are needed.

    What becomes of the fresh KV of the tokens that were *not* chosen, at the check layer alone, is where implementations part:
    LMCache's blender leaves the sender's in place (the default here), ``vllm_blend`` keeps the fresh ones at no further cost
    (``update_check_layer``). Masks go by position and window, where ``vllm_blend`` aligns a triangle to the last row.

    The paper's scheme of narrowing the choice further on later layers is in neither.

    Layer-tokens: all n in each layer up to and with the check layer, then the chosen rows in each.

    Raises ValueError for a ratio outside of 0 .. 1, a check layer that is none, a ``sender`` of another context or model.
    """
    check_sender(ops, token_ids, sender)
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"ratio: {ratio} is outside of 0 .. 1")
    if not 0 <= check_layer < ops.num_layers:
        raise ValueError(f"check_layer: {check_layer} is none of the layers 0 .. {ops.num_layers - 1}")
    num_tokens = len(token_ids)
    every = ContextRows(ops, range(num_tokens))
    states, hidden = ContextStates([], []), embed(ops, token_ids)
    for layer in range(check_layer):
        hidden = _append(states, every, ops, layer, hidden, last=False)
    fresh = new_kv(ops, num_tokens)
    every.project(check_layer, hidden, *fresh)
    chosen = _most_deviating(fresh[1], sender.values[check_layer], int(ratio * num_tokens))
    rows = ContextRows(ops, chosen)
    hidden = hidden[torch.tensor(chosen, dtype=torch.long, device=ops.device)]
    for layer in range(check_layer, ops.num_layers):
        keys, values = sender.keys[layer], sender.values[layer]
        if layer == check_layer and update_check_layer:
            keys, values = fresh
        if chosen:
            keys, values = keys.clone(), values.clone()
            if layer < ops.num_layers - 1:
                hidden = rows.run(layer, hidden, keys, values)
            else:
                rows.project(layer, hidden, keys, values)
        states.keys.append(keys)
        states.values.append(values)
    computed = num_tokens * (check_layer + 1) + len(chosen) * (ops.num_layers - 1 - check_layer)
    return states, computed


def embed(ops: LayerOps, token_ids: Sequence[int]) -> Tensor:
    """Hidden states entering layer 0, (n, hidden)."""
    return ops.embed(torch.tensor(list(token_ids), dtype=torch.long, device=ops.device))


def entering_states(ops: LayerOps, token_ids: Sequence[int], sender: ContextStates, layer: int) -> Tensor:
    """What a group that starts at ``layer`` runs on, (n, hidden). Raises ValueError where the sender's were not kept."""
    if layer == 0:
        return embed(ops, token_ids)
    if not sender.hidden:
        raise ValueError(
            f"sender: its hidden states entering layer {layer} were not kept (keep_hidden=True keeps them)"
        )
    return sender.hidden[layer]


def new_kv(ops: LayerOps, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Uninitialised keys and values of one layer, each (num_tokens, kv_heads, head_dim)."""
    keys, values = (
        torch.empty((num_tokens, plane.kv_heads, plane.head_dim), dtype=ops.dtype, device=ops.device)
        for plane in ops.planes
    )
    return keys, values


def check_tokens(name: str, token_ids: Sequence[int]) -> None:
    if not len(token_ids):
        raise ValueError(f"{name}: at least one token is needed")


def check_sender(ops: LayerOps, token_ids: Sequence[int], sender: ContextStates, name: str = "sender") -> None:
    """Raise ValueError unless ``sender`` are states of these tokens on a model of this shape."""
    check_tokens("token_ids", token_ids)
    if sender.num_layers != ops.num_layers:
        raise ValueError(f"{name}: states of {sender.num_layers} layers, the model has {ops.num_layers}")
    if sender.num_tokens != len(token_ids):
        raise ValueError(f"{name}: states of {sender.num_tokens} tokens, token_ids has {len(token_ids)}")


def _check_group(ops: LayerOps, group: LayerGroup) -> None:
    if not 0 <= group.start < group.stop <= ops.num_layers:
        raise ValueError(
            f"group: [{group.start}, {group.stop}) is empty or outside of the layers 0 .. {ops.num_layers}"
        )


def _merged(sender: ContextStates, group: LayerGroup | None, computed: Mapping[int, ContextStates]) -> ContextStates:
    """The sender's KV with that of ``group`` out of what was computed from its start on."""
    keys, values = list(sender.keys), list(sender.values)
    if group is not None:
        inside = slice(group.start, group.stop)
        keys[inside] = computed[group.start].keys[: len(group)]
        values[inside] = computed[group.start].values[: len(group)]
    return ContextStates(keys, values)


def _append(states: ContextStates, rows: ContextRows, ops: LayerOps, layer: int, hidden: Tensor, last: bool) -> Tensor:
    """Add the KV of one more layer, computed; returns the hidden states leaving it, or those entering it if it is the last."""
    keys, values = new_kv(ops, len(hidden))
    if last:
        rows.project(layer, hidden, keys, values)
    else:
        hidden = rows.run(layer, hidden, keys, values)
    states.keys.append(keys)
    states.values.append(values)
    return hidden


def _most_deviating(fresh: Tensor, old: Tensor, count: int) -> list[int]:
    """Ascending positions of the ``count`` tokens whose values, (n, kv_heads, head_dim), differ most."""
    deviation = (fresh.float() - old.float()).square().sum(dim=(1, 2))
    chosen: list[int] = deviation.argsort(descending=True, stable=True)[:count].tolist()
    return sorted(chosen)
