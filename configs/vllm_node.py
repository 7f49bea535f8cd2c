"""A node that runs on vLLM: what its checkpoints must be like, and the engine arguments that it starts with.

:func:`check_vllm_family` is for everyone who has read the checkpoints (routers, ``kvkin config check``); :func:`vllm_node` is for the
node itself, on its own host. vLLM is read, not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvkin.configs.convert import child_key
from kvkin.configs.schema import ClusterConfig
from kvkin.configs.vllm_arguments import read_arguments
from kvkin.configs.vllm_install import check_installed, installed_vllm
from kvkin.configs.vllm_rules import (
    argument_key,
    check_ranks,
    check_windows,
    engine_key,
    node_arguments,
    node_engine,
    vllm_nodes,
    worker_node,
)
from kvkin.kv.errors import ConfigError

if TYPE_CHECKING:
    from kvkin.configs.families import ResolvedFamily

# vLLM's attention on CPUs takes blocks of a multiple of this many tokens.
CPU_BLOCK_TOKENS = 32
# vLLM's least default of max_num_batched_tokens. A longer chunk needs a larger one.
_DEFAULT_STEP_TOKENS = 2048
# Blocks that vLLM keeps for itself, and one in reserve.
_SPARE_BLOCKS = 2
# What the CPU build takes unless block_size says otherwise.
_DEFAULT_BLOCK_TOKENS = 128


class VllmNode(msgspec.Struct, frozen=True):
    """How one node runs on vLLM: everything that its engine is started with."""

    options: dict[str, Any]  # engine arguments: the file's and kvkin's
    device: str  # cpu or cuda
    threads: int  # compute threads; 0: as many as there are
    # folder in which checkpoints with an adapter merged in are kept
    merged_path: Path
    # host memory beside the node's arena: for copies of pulled KV, for hidden states
    swap_bytes: int | None = None
    e_bytes: int | None = None
    # how long a step may wait for the last layers of a context
    sync_wait_s: float = 0.0

    @property
    def ranks(self) -> int:
        """Processes that share the model's heads."""
        return int(self.options.get("tensor_parallel_size", 1))


def check_vllm_family(config: ClusterConfig, family: ResolvedFamily) -> None:
    """Raise ConfigError for the first node of ``family`` whose vLLM could not serve these checkpoints, on whatever host."""
    for name in vllm_nodes(config, family.name):
        _check_node(config, family, name)


def vllm_node(config: ClusterConfig, family: ResolvedFamily, name: str) -> VllmNode | None:
    """What the node ``name`` of this host starts with; None if it runs on the reference engine.

    Raises ConfigError if this host has no vLLM that can run it.
    """
    node = worker_node(config, name)
    if node_engine(config, name) != "vllm":
        return None
    check_installed(config, [name])
    _check_node(config, family, name)
    options = node_arguments(config, name)
    if family.device == "cpu":
        _fit_to_cpu(config, family, name, options)
    options.setdefault("max_model_len", family.max_context_tokens)
    chunk = family.config.chunk_tokens
    if chunk > _DEFAULT_STEP_TOKENS:
        options.setdefault("max_num_batched_tokens", chunk)
    options["dtype"] = family.compute_dtype
    return VllmNode(
        _python_sets(options),
        family.device,
        node.threads,
        config.state_path / "merged",
        swap_bytes=node.kv_bytes,
        e_bytes=node.e_bytes,
        sync_wait_s=family.config.sync_wait_ms / 1000,
    )


def _check_node(config: ClusterConfig, family: ResolvedFamily, name: str) -> None:
    arguments = node_arguments(config, name)
    geometry, ranks = family.base.geometry, arguments.get("tensor_parallel_size", 1)
    check_windows(engine_key(config, name), geometry.windows, "engine: reference for models with a window")
    key = argument_key(config, name, "tensor_parallel_size")
    check_ranks(key, ranks, geometry.num_heads, geometry.kv_heads)
    longest = arguments.get("max_model_len", family.max_context_tokens)
    if longest < family.max_context_tokens:
        key = argument_key(config, name, "max_model_len")
        problem = f"{longest} is less than the {family.max_context_tokens} tokens of context that the router admits"
        allowed = f"at least that, or {child_key('families', family.name)}.max_context_tokens: {longest}"
        raise ConfigError(key, problem, allowed)
    _check_memory(config, family, name, arguments)


def _check_memory(config: ClusterConfig, family: ResolvedFamily, name: str, arguments: Mapping[str, Any]) -> None:
    """vLLM refuses to start if its cache cannot hold one request of the longest kind; say it before weights are loaded."""
    given = arguments.get("kv_cache_memory_bytes")
    if given is None or "num_gpu_blocks_override" in arguments:
        return
    needed = _context_bytes(family, arguments, default_block=1)
    if given < needed:
        key = argument_key(config, name, "kv_cache_memory_bytes")
        longest = arguments.get("max_model_len", family.max_context_tokens)
        shorter = "max_model_len" if longest > family.max_context_tokens else "max_context_tokens of the family"
        problem = f"{given} bytes a rank hold less than one request of {longest} tokens"
        raise ConfigError(key, problem, f"at least {needed}, or a smaller {shorter}")


def _context_bytes(
    family: ResolvedFamily, arguments: Mapping[str, Any], *, default_block: int, spare_blocks: int = 0
) -> int:
    """KV of the longest request on one rank, in whole blocks."""
    block = arguments.get("block_size", default_block)
    longest = arguments.get("max_model_len", family.max_context_tokens)
    tokens = (-(-longest // block) + spare_blocks) * block
    layout, ranks = family.layout, arguments.get("tensor_parallel_size", 1)
    heads = family.base.geometry.kv_heads
    # a rank has at least one head: with more ranks than heads they are replicated
    share = -(-heads // ranks) / heads
    return int(tokens * layout.num_layers * layout.kv_token_bytes * share)


def _fit_to_cpu(config: ClusterConfig, family: ResolvedFamily, name: str, options: dict[str, Any]) -> None:
    """What the CPU build needs besides: its blocks, and a bound on a cache that would otherwise take nearly all memory."""
    block = options.get("block_size", CPU_BLOCK_TOKENS)
    if block % CPU_BLOCK_TOKENS:
        key = argument_key(config, name, "block_size")
        raise ConfigError(
            key, f"vLLM's attention on CPUs cannot use blocks of {block} tokens", f"a multiple of {CPU_BLOCK_TOKENS}"
        )
    node = worker_node(config, name)
    if not {"kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override"} & set(options):
        least = _context_bytes(family, options, default_block=_DEFAULT_BLOCK_TOKENS, spare_blocks=_SPARE_BLOCKS)
        options["kv_cache_memory_bytes"] = max(node.kv_bytes, least)


def _python_sets(options: dict[str, Any]) -> dict[str, Any]:
    """Lists as sets where vLLM wants sets, which YAML has no plain form of."""
    vllm = installed_vllm()
    known = None if vllm is None else read_arguments(vllm.folder)
    if known is None:
        return options
    return {
        name: set(value) if isinstance(value, list) and name in known.names and known.type_of(name).is_set else value
        for name, value in options.items()
    }
