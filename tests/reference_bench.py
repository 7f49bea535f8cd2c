"""The reference engine as the contract suite wants it: stepped by hand, its workspace open to view."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from kvkin.engines.layer_ops import ReferenceOps
from kvkin.engines.reference import LoadedModel, ReferenceEngine
from kvkin.engines.workspace import Workspace


class ReferenceBench:
    """A ``Bench`` over a ``ReferenceEngine`` without a thread of its own."""

    def __init__(self, engine: ReferenceEngine) -> None:
        self.engine = engine

    def step(self) -> bool:
        return self.engine.step()

    def kv(self, space: Workspace, layer: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        return space.keys[layer][:num_tokens], space.values[layer][:num_tokens]

    def e(self, space: Workspace, layer: int, start: int, stop: int) -> Tensor | None:
        return space.e_taps[layer][start:stop] if space.has_e(layer, start, stop) else None


def make_reference(
    models: Mapping[str, Any],
    *,
    block_size: int,
    chunk_tokens: int,
    tokenizer: Tokenizer | None = None,
    eos: frozenset[int] = frozenset(),
) -> ReferenceBench:
    loaded = {name: LoadedModel(ReferenceOps(model), tokenizer, eos) for name, model in models.items()}
    return ReferenceBench(ReferenceEngine(loaded, block_size=block_size, chunk_tokens=chunk_tokens, start=False))
