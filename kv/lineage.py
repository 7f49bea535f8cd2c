"""Lineage: a digest of exactly those weights and settings that determine the KV (or the E cache) of one layer.

``configs.checkpoints`` streams the tensors and calls :func:`fold_lineage`; two models share the KV of layer i exactly where
``kv[i]`` is equal, whatever their names are (docs/design.md section 4). Lineages are chains: once they differ, all later ones do.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvkin.kv.hashing import digest


class LayerWeights(msgspec.Struct, frozen=True):
    """Digests of one layer's weights, made by the checkpoint reader.

    ``kv_inputs`` covers what turns the layer's entering hidden states into keys and values: input norm, k, v and k_norm with
    their biases and adapters. ``whole`` covers every tensor of the layer. ``geometry`` is head geometry, rope and window of
    this layer.
    """

    kv_inputs: bytes
    whole: bytes
    geometry: bytes


class Lineage(msgspec.Struct, frozen=True):
    """``hidden[i]`` identifies the hidden states that enter layer i (L + 1 entries), ``kv[i]`` the KV of layer i (L entries)."""

    hidden: tuple[bytes, ...]
    kv: tuple[bytes, ...]

    @property
    def num_layers(self) -> int:
        return len(self.kv)

    @property
    def id(self) -> bytes:
        """One name for the KV of all layers; equal ids mean exact sharing of everything."""
        return digest(b"lineage", *self.kv)


def fold_lineage(root: bytes, numerics: bytes, layers: Sequence[LayerWeights]) -> Lineage:
    """Fold layer digests into a lineage.

    ``root`` digests the semantic config, rope and the embedding rows of the family's vocabulary; ``numerics`` is the
    numerics class (weight dtype or quantisation, compute dtype, KV dtype).
    """
    hidden = [digest(b"hidden0", root, numerics)]
    kv: list[bytes] = []
    for layer in layers:
        kv.append(digest(b"kv", hidden[-1], layer.kv_inputs, layer.geometry, numerics))
        hidden.append(digest(b"hidden", hidden[-1], layer.whole, layer.geometry))
    return Lineage(tuple(hidden), tuple(kv))


def shared_depth(one: Lineage, other: Lineage) -> int:
    """Number of leading layers whose KV is the same for both; E at every layer up to it is the same, too.

    ``kv[i]`` includes ``hidden[i]``, so a depth of s guarantees equal hidden states entering layers 0 .. s-1; those
    entering layer s are equal only if ``hidden[s]`` is (see :func:`shared_transition`).
    """
    depth = 0
    for left, right in zip(one.kv, other.kv, strict=False):
        if left != right:
            break
        depth += 1
    return depth


def shared_transition(one: Lineage, other: Lineage) -> int:
    """The deepest layer a such that KV of [0, a) and the hidden states entering a are the same for both models."""
    depth = shared_depth(one, other)
    if depth == min(one.num_layers, other.num_layers):
        return depth
    return depth if one.hidden[depth] == other.hidden[depth] else max(0, depth - 1)
