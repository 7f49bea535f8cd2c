"""Whether slices may run beside vLLM's forwards on a device: only where no module of the model has memory that both would write. Pure.

Weights, and what a call allocates for itself, are safe on two streams at once. What else vLLM 0.32 keeps with the model or in the process
is named here, with where it lies (docs/vllm-internals.md, section 3.5). Where it forbids that, slices run between the forwards.
"""

from __future__ import annotations

from typing import Any

BACKENDS_APART = ("FLASH_ATTN", "TRITON_ATTN")
"""Attention backends whose scratch is allocated by call, or belongs to the metadata's builder, of which slices have their own."""


def why_not_beside(vllm_config: Any, backend: str) -> str:
    """Why slices may not run beside the forwards of a model with attention ``backend``; empty if they may."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if parallel.world_size > 1:
        return "a unit reduces over the ranks, and one communicator takes no two streams at once"
    if parallel.use_ubatching:
        return "the forward itself is split over streams, with workspaces that are told apart by no more than its own halves"
    if vllm_config.lora_config is not None:
        return "which rows have which adapter stands in buffers that all layers share (lora/punica_wrapper/)"
    if model.is_moe:
        return "experts work in one workspace of the process (v1/worker/workspace.py)"
    if model.quantization is not None:
        return "kernels of quantised weights have locks and workspaces, which are fixed after the warm-up (marlin_utils.py)"
    if backend not in BACKENDS_APART:
        return f"{backend} plans and works in workspaces of the process"
    return ""
