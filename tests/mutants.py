"""Mutants of the executor: each patches one thing as a plausible mistake would, and names the check that must notice.

``engines/test_mutations.py`` runs them. Here are the registry and those that take wrong layers, positions or masks; there, those
of what is read and written and in which order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from check_engine import GEOMETRIES, Tally, check_shape, run_tiny
from reference_bench import make_reference
from torch.nn import functional as F

from kvkin.engines import layer_ops, recompute, requests
from kvkin.engines.layer_ops import ReferenceOps
from kvkin.engines.workspace import Workspace
from kvkin.kv import execution
from kvkin.kv.execution import UnitMode

Patch = pytest.MonkeyPatch
Check = Callable[[], None]
MUTANTS: dict[str, tuple[Callable[[Patch], None], Check]] = {}


@functools.cache
def shapes(arch: str, *names: str) -> Check:
    """The contract's comparison for some plan shapes in two geometries (a one-token suffix; one block a chunk)."""

    def check() -> None:
        for name in names:
            for seed, geometry in enumerate(GEOMETRIES[:2]):
                run_tiny(make_reference, arch, name, geometry, Tally(), seed)

    return check


LLAMA = shapes("llama", "partial_middle")
MISTRAL = shapes("mistral", "partial_middle")


def mutant(check: Check) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def register(function: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTANTS[function.__name__] = function, check
        return function

    return register


def in_unit(patch: Patch, change: Callable[..., tuple[Any, ...]]) -> None:
    """Change the arguments (ops, space, unit, hidden, positions) of every unit."""
    original = recompute.partial_prefill
    patch.setattr(requests, "partial_prefill", lambda *arguments: original(*change(*arguments)))


class Shifted:
    """Ops that take the weights of another layer."""

    def __init__(self, ops: ReferenceOps, by: int) -> None:
        self._ops, self._by = ops, by

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        if name not in ("project_kv", "project_qkv", "attend", "finish"):
            return found
        return lambda layer, *rest: found((layer + self._by) % self._ops.num_layers, *rest)


# --- which layers --------------------------------------------------------------------------------------------------------


@mutant(LLAMA)
def group_shifted_up(patch: Patch) -> None:
    in_unit(patch, lambda ops, space, unit, *rest: (Shifted(ops, 1) if unit.recompute else ops, space, unit, *rest))


@mutant(LLAMA)
def group_shifted_down(patch: Patch) -> None:
    in_unit(patch, lambda ops, space, unit, *rest: (Shifted(ops, -1) if unit.recompute else ops, space, unit, *rest))


@mutant(LLAMA)
def group_one_layer_short(patch: Patch) -> None:
    """The last recomputed layer is left out, though nobody pulls it either."""
    original = execution.cut

    def short(*arguments: Any) -> Any:
        chunks = original(*arguments)
        return tuple(
            msgspec.structs.replace(chunk, stop_layer=chunk.stop_layer - 1) if chunk.pulled else chunk
            for chunk in chunks
        )

    patch.setattr(execution, "cut", short)


@mutant(shapes("llama", "private"))
def layers_in_wrong_order(patch: Patch) -> None:
    original = ReferenceOps.__init__

    def swapped(self: ReferenceOps, model: Any) -> None:
        original(self, model)
        self._layers[1], self._layers[2] = self._layers[2], self._layers[1]

    patch.setattr(ReferenceOps, "__init__", swapped)


@mutant(LLAMA)
def e_of_the_layer_below(patch: Patch) -> None:
    """Pulled hidden states are taken as those entering the layer below: they run through one layer too many."""

    def change(ops: Any, space: Any, unit: Any, hidden: Any, positions: Any) -> tuple[Any, ...]:
        if unit.recompute and unit.first:
            q, keys, values = ops.project_qkv(unit.layer, hidden, positions)
            hidden = ops.finish(unit.layer, hidden, ops.attend(unit.layer, q, positions - positions[0], keys, values))
        return ops, space, unit, hidden, positions

    in_unit(patch, change)


@mutant(LLAMA)
def e_ignored(patch: Patch) -> None:
    """The group starts from the receiver's embeddings although it starts above layer 0."""
    original = requests.RunningRequest._compute

    def forget(self: Any, unit: Any) -> None:
        if unit.first and unit.recompute:
            self._hidden[unit.chunk] = self._ops.embed(self._ids[unit.start : unit.stop])
        original(self, unit)

    patch.setattr(requests.RunningRequest, "_compute", forget)


@mutant(lambda: check_shape(make_reference, "llama", "partial_middle"))
def e_parts_in_order_of_arrival(patch: Patch) -> None:
    patch.setattr(requests, "sorted", lambda parts, key: parts, raising=False)


@mutant(LLAMA)
def taps_of_the_next_layer(patch: Patch) -> None:
    original = Workspace.tap
    patch.setattr(Workspace, "tap", lambda self, layer, *rest: original(self, layer + 1, *rest))


@mutant(LLAMA)
def taps_only_in_prefill(patch: Patch) -> None:
    original = recompute.decode_token

    def silent(ops: Any, space: Workspace, *rest: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Workspace, "tap", lambda *_: None)
            return original(ops, space, *rest)

    patch.setattr(requests, "decode_token", silent)


# --- positions and masks -------------------------------------------------------------------------------------------------


@mutant(shapes("llama", "private"))
def rope_skipped(patch: Patch) -> None:
    patch.setattr(layer_ops, "_rotate", lambda x, cos, sin: x)


@mutant(LLAMA)
def rope_skipped_in_the_recompute(patch: Patch) -> None:
    in_unit(
        patch, lambda *a: (*a[:4], torch.zeros_like(a[4]) if a[2].recompute and a[2].mode is UnitMode.KV_ONLY else a[4])
    )


@mutant(shapes("llama", "exact_reuse"))
def stale_suffix_position(patch: Patch) -> None:
    """Positions of a chunk counted from its own start, for keys and queries; the mask is right."""
    original = ReferenceOps._rope
    patch.setattr(
        ReferenceOps, "_rope", lambda self, hidden, positions: original(self, hidden, positions - positions[0])
    )


@mutant(shapes("llama", "private"))
def decode_position_off_by_one(patch: Patch) -> None:
    original = recompute.decode_token
    patch.setattr(
        requests, "decode_token", lambda ops, space, token, position: original(ops, space, token, position - 1)
    )


def _attend(patch: Patch, change: Callable[..., Any]) -> None:
    original = ReferenceOps.attend
    patch.setattr(ReferenceOps, "attend", lambda self, *arguments: change(original, self, *arguments))


@mutant(shapes("llama", "private"))
def causal_mask_ignores_the_offset(patch: Patch) -> None:
    """A bare ``is_causal``: right for the first chunk, and aligned to the wrong corner for all later ones."""

    def wrong(original: Any, self: ReferenceOps, layer: int, q: Any, positions: Any, keys: Any, values: Any) -> Any:
        if len(q) == 1:
            return original(self, layer, q, positions, keys, values)
        parts = (part.transpose(0, 1)[None] for part in (q, keys, values))
        out = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(len(q), -1)

    _attend(patch, wrong)


@mutant(shapes("llama", "private"))
def no_mask_inside_a_chunk(patch: Patch) -> None:
    _attend(
        patch, lambda attend, self, layer, q, at, *kv: attend(self, layer, q, torch.full_like(at, len(kv[0]) - 1), *kv)
    )


@mutant(MISTRAL)
def window_ignored(patch: Patch) -> None:
    patch.setattr(layer_ops, "_window_of", lambda attention, config: None)


@mutant(shapes("mistral", "private"))
def window_one_too_long(patch: Patch) -> None:
    patch.setattr(layer_ops, "_window_of", lambda attention, config: config.sliding_window + 1)


@mutant(shapes("mistral", "exact_reuse"))
def window_one_too_short_in_decode(patch: Patch) -> None:
    def wrong(attend: Any, self: ReferenceOps, layer: int, q: Any, at: Any, keys: Any, values: Any) -> Any:
        if len(q) == 1 and len(keys) > 30:
            keys, values, at = keys[-23:], values[-23:], torch.tensor([22])
        return attend(self, layer, q, at, keys, values)

    _attend(patch, wrong)


@mutant(shapes("qwen2-window", "private"))
def one_window_for_all_layers(patch: Patch) -> None:
    patch.setattr(layer_ops, "_window_of", lambda attention, config: config.sliding_window)


@mutant(LLAMA)
def own_chunk_not_seen(patch: Patch) -> None:
    def wrong(attend: Any, self: ReferenceOps, layer: int, q: Any, at: Any, keys: Any, values: Any) -> Any:
        before = int(at[0])
        return (
            attend(self, layer, q, at, keys[:before], values[:before])
            if before
            else attend(self, layer, q, at, keys, values)
        )

    _attend(patch, wrong)


@mutant(shapes("llama", "private"))
def query_heads_on_the_wrong_kv_heads(patch: Patch) -> None:
    def wrong(attend: Any, self: ReferenceOps, layer: int, q: Any, at: Any, keys: Any, values: Any) -> Any:
        return attend(self, layer, q, at, keys.flip(1), values.flip(1))

    _attend(patch, wrong)


@mutant(shapes("qwen3", "private"))
def key_norm_skipped(patch: Patch) -> None:
    original = ReferenceOps._keys_values

    def wrong(self: ReferenceOps, attention: Any, normed: Any, cos: Any, sin: Any) -> Any:
        k = attention.k_proj(normed).view(len(normed), -1, self._head_dim)
        return layer_ops._rotate(k, cos, sin), original(self, attention, normed, cos, sin)[1]

    patch.setattr(ReferenceOps, "_keys_values", wrong)


@mutant(shapes("mixtral", "private"))
def residual_lost(patch: Patch) -> None:
    original = ReferenceOps.finish
    patch.setattr(ReferenceOps, "finish", lambda self, layer, hidden, out: original(self, layer, hidden, out) - hidden)


@mutant(shapes("llama", "private"))
def final_norm_skipped(patch: Patch) -> None:
    patch.setattr(ReferenceOps, "logits", lambda self, hidden: self._head(hidden).float())
