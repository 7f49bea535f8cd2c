"""Nodes on vLLM for the tests of nodes: engines of their own, and what they publish held against what the reference engine does."""

from __future__ import annotations

from typing import Any

import torch
from node_harness import BLOCK, CHUNK, LAYERS, Member
from vllm_bench import OPTIONS

from kvkin.engines.vllm.engine import VllmEngine, VllmModel

TOKENS = tuple(int(t) for t in torch.randint(3, 320, (101,), generator=torch.Generator().manual_seed(5)))
CONTEXT = 96


def node_engine(member: Member, **options: Any) -> VllmEngine:
    """An engine that owns its vLLM and runs on its own thread, one of several in this process. Its node closes it."""
    model = VllmModel(member.path, None, None, frozenset(), member.lineage.id)
    return VllmEngine(
        {member.name: model},
        block_size=BLOCK,
        chunk_tokens=CHUNK,
        transition_layers=(1, 2),
        options=OPTIONS | {"enable_prefix_caching": True} | options,
    )


def assert_same_kv(node: Any, block: Any, reference: Any, twin: Any) -> None:
    """A node's block holds, layer by layer, what the block of the reference engine's node does."""
    for layer in range(LAYERS):
        ours = node.runtime.memory.arena.kv_block(layer, block.slot).view("float32")
        theirs = reference.runtime.memory.arena.kv_block(layer, twin.slot).view("float32")
        assert abs(ours - theirs).max() <= 1e-4 * max(1.0, abs(theirs).max())
