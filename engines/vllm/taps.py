"""E taps: the hidden states that enter a transition layer, kept as vLLM's forward goes by.

The input norm of a tapped layer is given a class that copies what enters it (residual included) into a buffer first. Names, weights
and LoRA wrapping stay; the copy is part of the graph under torch.compile, and a captured CUDA graph repeats it. It must be there
before the model is profiled and compiled, so it is put in when the model is built. The compile cache does not know of it: engines
with other taps need another ``additional_config`` (``launch.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.layernorm import RMSNorm


class TapNorm(RMSNorm):
    """An input norm that keeps what enters: ``tap_buffer`` (rows, hidden), the rows in the order of the batch."""

    tap_buffer: Tensor
    muted = False

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if self.muted:
            return super().forward(x, residual)
        if residual is None:
            self.tap_buffer[: x.shape[0]].copy_(x)
            return super().forward(x)
        out, entering = super().forward(x, residual)
        self.tap_buffer[: x.shape[0]].copy_(entering)
        return out, entering


def install_taps(model: Any, layers: Sequence[int], num_rows: int) -> None:
    """Tap ``layers`` of a model that was just built; ``num_rows`` is the most that a batch has."""
    for layer in layers:
        norm = model.model.layers[layer].input_layernorm
        assert type(norm) is RMSNorm, f"layer {layer} has another input norm: {type(norm).__name__}"
        norm.register_buffer("tap_buffer", torch.zeros(num_rows, norm.hidden_size), persistent=False)
        norm.__class__ = TapNorm


@contextmanager
def untapped() -> Iterator[None]:
    """Around layers that are run by themselves: the buffers are those of the forward, which a device may be in the middle of.

    What was compiled or captured before keeps its copies.
    """
    TapNorm.muted = True
    try:
        yield
    finally:
        TapNorm.muted = False


def tapped(model: Any, layer: int) -> Tensor:
    """The buffer of a tapped layer: the rows of the batch that last went through it."""
    buffer: Tensor = model.model.layers[layer].input_layernorm.tap_buffer
    return buffer
