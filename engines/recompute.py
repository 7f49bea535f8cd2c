"""The recompute executor: runs one unit of a plan (rows x one layer) over an engine's LayerOps.

One function for all plan shapes: a private prefill, the recompute of a group [a, b) from the sender's hidden states (DroidSpeak,
section 4), the suffix, chosen token rows (KVShare, CacheBlend). What may run when is ``kv.execution``'s decision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvkin.engines.layer_ops import LayerOps
from kvkin.engines.workspace import Workspace
from kvkin.kv.execution import Unit, UnitMode


def partial_prefill(ops: LayerOps, space: Workspace, unit: Unit, hidden: Tensor, positions: Tensor) -> Tensor | None:
    """Compute ``unit``: write its k and v, attend over everything before, return the hidden states entering the next layer.

    ``hidden`` (n, hidden) are the states entering the unit's layer, ``positions`` (n,) int64 their tokens' positions. Returns
    None in KV_ONLY mode, one row in LAST_ROW mode.
    """
    layer = unit.layer
    if unit.rows is None:
        space.tap(layer, unit.start, hidden)
    if unit.mode is UnitMode.KV_ONLY:
        _write(space, unit, positions, *ops.project_kv(layer, hidden, positions))
        return None
    if unit.mode is UnitMode.LAST_ROW:
        _write(space, unit, positions, *ops.project_kv(layer, hidden, positions))
        hidden, positions = hidden[-1:], positions[-1:]
        q = ops.project_qkv(layer, hidden, positions)[0]
    else:
        q, keys, values = ops.project_qkv(layer, hidden, positions)
        _write(space, unit, positions, keys, values)
    # keys up to the last row: nothing later can be seen, and a single row needs no mask
    seen = unit.stop if unit.rows is None else unit.rows[-1] + 1
    attended = ops.attend(layer, q, positions, space.keys[layer][:seen], space.values[layer][:seen])
    return ops.finish(layer, hidden, attended)


def decode_token(ops: LayerOps, space: Workspace, token_id: int, position: int) -> Tensor:
    """Run one generated token at ``position`` through all layers, leaving its KV (and E taps); logits (vocab,) float32."""
    positions = torch.tensor([position], device=ops.device)
    hidden = ops.embed(torch.tensor([token_id], device=ops.device))
    for layer in range(ops.num_layers):
        space.tap(layer, position, hidden)
        q, keys, values = ops.project_qkv(layer, hidden, positions)
        space.keys[layer][position] = keys[0]
        space.values[layer][position] = values[0]
        attended = ops.attend(
            layer, q, positions, space.keys[layer][: position + 1], space.values[layer][: position + 1]
        )
        hidden = ops.finish(layer, hidden, attended)
    return ops.logits(hidden)[0]


def _write(space: Workspace, unit: Unit, positions: Tensor, keys: Tensor, values: Tensor) -> None:
    if unit.rows is None:
        space.keys[unit.layer][unit.start : unit.stop] = keys
        space.values[unit.layer][unit.start : unit.stop] = values
    else:
        space.keys[unit.layer][positions] = keys
        space.values[unit.layer][positions] = values
