"""Paged KV caches of vLLM's attention backends, read by token slots. Pure torch.

A slot is ``block_id * block_size + offset``. vLLM 0.32 gives every backend's cache of a layer one logical shape,
``(num_blocks, kv_heads, block_size, 2 * head_dim)``, whose memory order is a permutation of strides; what differs is how keys and
values lie in it. Writing goes through the layer's own ``do_kv_cache_update`` (all backends have it, and it writes by slots, never
whole blocks: the rest of a block may belong to tokens that were computed already). Only CPU_ATTN can run where there is no GPU;
the split layout of FlashAttention, Triton and FlashInfer is covered by tests on strided tensors, and by ``check_round_trip`` at
the start of every engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kvkin.kv.errors import ConfigError

CPU_ISAS = ("vec", "vec16")
"""Instruction sets of vLLM's CPU attention whose cache is plain; amx and neon pack keys in tiles."""
SPLIT_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER")


class PagedLayout(Protocol):
    """How keys and values lie in one layer's cache."""

    def read(self, cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Cache (num_blocks, kv_heads, block_size, 2 * head_dim), slots (n,) int64 -> keys and values (n, kv_heads, head_dim).

        Both are copies.
        """


class SplitLayout:
    """Keys are the first half of the last dimension, values the second; any order in memory (HND, NHD)."""

    def read(self, cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        block_size, head_dim = cache.shape[2], cache.shape[3] // 2
        rows = cache.transpose(1, 2)[slots // block_size, slots % block_size]
        return rows[..., :head_dim], rows[..., head_dim:]


class CpuVectorLayout:
    """CPU_ATTN: of each (block, head), the first half is keys transposed, (head_dim, block_size), the second values."""

    def read(self, cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        num_blocks, heads, block_size, width = cache.shape
        head_dim = width // 2
        halves = cache.view(num_blocks, heads, 2, block_size * head_dim)
        offsets = slots % block_size
        blocks, place = torch.unique(slots // block_size, return_inverse=True)
        keys = halves[blocks, :, 0].view(len(blocks), heads, head_dim, block_size)
        values = halves[blocks, :, 1].view(len(blocks), heads, block_size, head_dim)
        return keys[place, :, :, offsets], values[place, :, offsets]


def layout_for(backend: str, isa: str | None) -> PagedLayout:
    """The layout of an attention backend by vLLM's name for it; ``isa`` is that of CPU_ATTN. Raises ConfigError."""
    if backend == "CPU_ATTN":
        if isa not in CPU_ISAS:
            problem = f"the KV cache of CPU attention with {isa} instructions is packed in tiles"
            raise ConfigError("vllm.dtype", problem, f"a dtype for which vLLM takes {' or '.join(CPU_ISAS)}: float32")
        return CpuVectorLayout()
    if backend in SPLIT_BACKENDS:
        return SplitLayout()
    raise ConfigError(
        "vllm.attention_backend",
        f"{backend} has a KV cache that kvkin cannot read",
        ", ".join(["CPU_ATTN", *SPLIT_BACKENDS]),
    )


def slots_of(block_ids: Sequence[int], block_size: int, start: int, stop: int) -> Tensor:
    """Slots (stop - start,) int64 of tokens [start, stop) of a request with these blocks, in host memory."""
    first, last = start // block_size, -(-stop // block_size)
    if last > len(block_ids):
        raise ValueError(f"tokens [{start}, {stop}) need {last} blocks of {block_size}, there are {len(block_ids)}")
    blocks = torch.tensor(block_ids[first:last], dtype=torch.int64)
    slots = (blocks[:, None] * block_size + torch.arange(block_size)).reshape(-1)
    return slots[start - first * block_size : stop - first * block_size]


def write(attention: Any, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Keys and values (n, kv_heads, head_dim) into ``slots`` (n,) of the cache of vLLM's attention module."""
    attention.impl.do_kv_cache_update(attention, keys.contiguous(), values.contiguous(), attention.kv_cache, slots)


def check_round_trip(layout: PagedLayout, attention: Any, cache: Tensor, block_size: int) -> None:
    """Write rows as vLLM does, read them as we do, leave zeros. Raises ConfigError if they differ: reading would be wrong."""
    num_blocks, heads, _, width = cache.shape
    slots = slots_of([num_blocks - 1, max(num_blocks - 2, 0)], block_size, 1, min(2, num_blocks) * block_size - 1)
    slots = slots.to(cache.device)
    shape = (len(slots), heads, width // 2)
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(shape, generator=generator).to(cache) for _ in range(2))
    write(attention, keys, values, slots)
    read = layout.read(cache, slots)
    write(attention, torch.zeros_like(keys), torch.zeros_like(values), slots)
    if not (torch.equal(read[0], keys) and torch.equal(read[1], values)):
        name = type(layout).__name__
        raise ConfigError(
            "vllm", f"the KV cache is not laid out as {name} reads it", "another attention backend or dtype"
        )
