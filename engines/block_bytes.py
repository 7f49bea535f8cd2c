"""Blocks as they lie in an arena, seen as tensors: views of the bytes by the words of ``kv/layout.py``, never copies.

Engines write pulled blocks into their memory through these views, and computed rows out of it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvkin.kv.layout import KVLayout


def kv_views(data: NDArray[np.uint8], layout: KVLayout) -> list[Tensor]:
    """Bytes of whole KV blocks of one layer -> one view (blocks, block_size, kv_heads, head_dim) a plane."""
    flat = _typed(data, layout).view(-1, layout.kv_block_bytes // layout.dtype_bytes)
    views, offset = [], 0
    for plane in layout.planes:
        width = layout.block_size * plane.elements_per_token
        shape = (len(flat), layout.block_size, plane.kv_heads, plane.head_dim)
        # blocks are strided, the inner dimensions contiguous: a view, never a copy
        views.append(flat[:, offset : offset + width].view(shape))
        offset += width
    return views


def e_view(data: NDArray[np.uint8], layout: KVLayout) -> Tensor:
    """Bytes of whole E blocks -> hidden states (tokens, hidden)."""
    return _typed(data, layout).view(-1, layout.hidden_size)


def _typed(data: NDArray[np.uint8], layout: KVLayout) -> Tensor:
    dtype: torch.dtype = getattr(torch, layout.dtype)
    return torch.from_numpy(data).view(dtype)
