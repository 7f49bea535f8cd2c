"""Which KV heads a rank has. Pure, and without vllm.

vLLM splits KV heads evenly over the ranks of tensor parallelism; with more ranks than heads, each head is on several ranks, next to
each other. KV on the wire and in arenas has all heads, so a node of any number of ranks reads what one of any other wrote: each rank
takes its heads out of every block, and puts them back. E is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def heads_of(kv_heads: int, num_ranks: int, rank: int) -> range:
    """KV heads of ``rank``, as vLLM shards them. ``kv_heads`` and ``num_ranks``: one is a multiple of the other."""
    assert kv_heads % num_ranks == 0 or num_ranks % kv_heads == 0, f"{kv_heads} heads on {num_ranks} ranks"
    assert 0 <= rank < num_ranks
    if kv_heads >= num_ranks:
        count = kv_heads // num_ranks
        return range(rank * count, (rank + 1) * count)
    head = rank * kv_heads // num_ranks
    return range(head, head + 1)


def is_writer(kv_heads: int, num_ranks: int, rank: int) -> bool:
    """Whether ``rank`` puts its heads into arenas: the first of those that have the same."""
    return rank == 0 or heads_of(kv_heads, num_ranks, rank) != heads_of(kv_heads, num_ranks, rank - 1)


def joined(parts: Sequence[Tensor], kv_heads: int) -> Tensor:
    """Rows (n, heads of the rank, head_dim) of every rank -> (n, kv_heads, head_dim)."""
    writers = [part for rank, part in enumerate(parts) if is_writer(kv_heads, len(parts), rank)]
    return writers[0] if len(writers) == 1 else torch.cat(writers, dim=1)
