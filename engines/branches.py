"""Branches: one suffix continued over several contexts at once, as profiling and evaluation compare them.

All branches have the same token positions, so projections, MLP and head run on their stacked rows and the weights are read once
for all of them; only attention is per branch. Contexts are never copied per branch: ``SharedContext`` keeps one copy of a
context's KV with room behind it, into which each branch in turn lays its own few rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvkin.engines.layer_ops import LayerOps

STACKED_ROWS = 512
"""Rows that run through a layer at once: enough for full speed, few enough that what lies between them stays in the cache."""


class SharedContext:
    """A context's keys and values at one layer, with room for ``tail_tokens`` more behind them."""

    def __init__(self, keys: Tensor, values: Tensor, tail_tokens: int) -> None:
        self._num_tokens = len(keys)
        self._keys = keys.new_empty((len(keys) + tail_tokens, *keys.shape[1:]))
        self._values = values.new_empty((len(values) + tail_tokens, *values.shape[1:]))
        self._keys[: self._num_tokens] = keys
        self._values[: self._num_tokens] = values

    def attend(self, ops: LayerOps, layer: int, q: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Queries (rows, heads, head_dim) of one branch over the context and the branch's own keys and values behind it."""
        end = self._num_tokens + len(keys)
        self._keys[self._num_tokens : end] = keys
        self._values[self._num_tokens : end] = values
        return ops.attend(layer, q, positions, self._keys[:end], self._values[:end])


def shared_contexts(kv: Sequence[tuple[Tensor, Tensor]], tail_tokens: int) -> list[SharedContext]:
    """One for each branch's keys and values at a layer; branches with the very same tensors share one."""
    made: dict[tuple[int, int], SharedContext] = {}
    for keys, values in kv:
        if (id(keys), id(values)) not in made:
            made[id(keys), id(values)] = SharedContext(keys, values, tail_tokens)
    return [made[id(keys), id(values)] for keys, values in kv]


class Tails:
    """Each branch's own keys and values behind the context, kept from step to step: by layer (branches, tokens, kv_heads, head_dim)."""

    def __init__(self, ops: LayerOps, num_branches: int, num_tokens: int) -> None:
        self.keys, self.values = (
            [
                torch.empty(
                    (num_branches, num_tokens, plane.kv_heads, plane.head_dim), dtype=ops.dtype, device=ops.device
                )
                for _ in range(ops.num_layers)
            ]
            for plane in ops.planes
        )
        self.filled = 0

    def keep(self, branches: Sequence[int]) -> None:
        """Go on with these branches only."""
        self.keys = [keys[list(branches)] for keys in self.keys]
        self.values = [values[list(branches)] for values in self.values]


class BranchRows:
    """The rows at positions ``first`` .. ``first + num_rows - 1`` of every branch, and one layer's work on them."""

    def __init__(self, ops: LayerOps, first: int, num_rows: int) -> None:
        self._ops, self.num_rows = ops, num_rows
        self._positions = torch.arange(first, first + num_rows, device=ops.device)
        self._stacked: dict[int, Tensor] = {}  # the same tensor for every layer: LayerOps keep what depends on it

    def run(self, layer: int, hidden: Tensor, contexts: Sequence[SharedContext], tails: Tails | None = None) -> Tensor:
        """Hidden states entering and leaving ``layer``, (branches, rows, hidden); ``contexts`` has one entry a branch.

        With ``tails`` the rows come after those that are there already, and are written to them (not counted as filled).
        """
        out = torch.empty_like(hidden)
        step = max(1, STACKED_ROWS // self.num_rows)
        for first in range(0, len(hidden), step):
            branches = range(first, min(first + step, len(hidden)))
            part = hidden[branches.start : branches.stop].flatten(0, 1)
            q, keys, values = self._ops.project_qkv(layer, part, self._stacked_positions(len(branches)))
            attended = []
            for index, branch in enumerate(branches):
                rows = slice(index * self.num_rows, (index + 1) * self.num_rows)
                own = keys[rows], values[rows]
                if tails is not None:
                    own = _extend(tails, layer, branch, *own)
                attended.append(contexts[branch].attend(self._ops, layer, q[rows], self._positions, *own))
            finished = self._ops.finish(layer, part, torch.cat(attended))
            out[branches.start : branches.stop] = finished.view(len(branches), self.num_rows, -1)
        return out

    def _stacked_positions(self, count: int) -> Tensor:
        if count not in self._stacked:
            self._stacked[count] = self._positions.repeat(count)
        return self._stacked[count]


def _extend(tails: Tails, layer: int, branch: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Write the new rows behind the branch's tail; the whole tail."""
    end = tails.filled + len(keys)
    tails.keys[layer][branch, tails.filled : end] = keys
    tails.values[layer][branch, tails.filled : end] = values
    return tails.keys[layer][branch, :end], tails.values[layer][branch, :end]
