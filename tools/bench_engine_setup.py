"""What ``kvkin bench engine`` runs: a cluster file of its own, made of the user's (or of a checkpoint), with nodes of equal threads and KV.

Every arm is a node of that file, kvkin's real nodes and vLLM by itself alike: so all of them have the same weights, engine arguments, threads
and bytes of KV, and the file says which.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvkin.configs.families import ResolvedFamily, resolve_family
from kvkin.configs.loader import show_cluster
from kvkin.configs.schema import (
    ClusterConfig,
    DecodeNode,
    FamilyConfig,
    ModelConfig,
    NodeConfig,
    PrefillNode,
    RecomputeGroup,
    RouterNode,
)
from kvkin.configs.vllm_install import check_installed
from kvkin.kv.errors import ConfigError
from kvkin.kv.plan import LayerGroup
from kvkin.tools.bench_engine_options import ModelOptions
from kvkin.tools.demo import demo_config
from kvkin.tools.out_folder import check_out_folder
from kvkin.tools.ports import free_ports
from kvkin.tools.prepare import prepare_missing

ROUTER, PREFILL = "router-0", "prefill-0"
START_S = 900.0
"""Until a process has loaded: many at once compile on few cores."""
STEP_TOKENS = 2048
"""Tokens of one step of vLLM, prefills and decodes together, where the cluster file says nothing."""
BLOCK_ROOM = 256
"""Tokens of KV that vLLM's cache has besides: what it rounds up to blocks, and keeps for itself."""


@dataclass(frozen=True)
class Shape:
    """What a part wants of its nodes: ``longest`` tokens of one request, ``side_by_side`` requests of ``kv_tokens`` together."""

    longest: int
    kv_tokens: int
    side_by_side: int
    threads: int
    compiled: bool
    chunk_tokens: int | None = None
    step_tokens: int | None = None
    prefix_caching: bool | None = None


@dataclass(frozen=True)
class Bench:
    """The bench's cluster file, written to ``file``, and its family with all members that the nodes run."""

    config: ClusterConfig
    file: Path
    family: ResolvedFamily

    @property
    def logs(self) -> Path:
        return self.file.parent / "logs"

    def decode_node(self, model: str) -> str:
        """Name of the decode node of ``model``."""
        return next(name for name, node in self.config.decode_nodes.items() if model in node.models)


def user_config(models: ModelOptions) -> ClusterConfig:
    """The cluster that the options name, all of it on vLLM. Raises ConfigError; makes the demo family's base if it is missing."""
    if models.checkpoint is not None:
        return checkpoint_config(models.checkpoint)
    config = demo_config(models.config, "vllm")
    check_installed(config, list(config.nodes))
    prepare_missing(config)
    return config


def checkpoint_config(folder: Path) -> ClusterConfig:
    """A family of one model, with a recompute group and a transition layer at a third of its layers."""
    try:
        layers = int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("--checkpoint", f"{folder} is no checkpoint: {error}", "a folder with config.json") from None
    third = max(1, layers // 3)
    name = folder.resolve().name
    family = FamilyConfig(
        base=name,
        models={name: ModelConfig(checkpoint=str(folder.resolve()))},
        engine="vllm",
        transition_layers=(third,),
        recompute_groups=(RecomputeGroup(group=(third, min(2 * third, layers - 1))),),
    )
    nodes: dict[str, NodeConfig] = {ROUTER: RouterNode(), "decode-0": DecodeNode(port=0, models=(name,))}
    config = ClusterConfig(families={"bench": family}, nodes=nodes)
    check_installed(config, ["decode-0"])
    return config


def family_name(config: ClusterConfig, model: str | None) -> str:
    """The family of ``model``; none: the file's first. Raises ConfigError for a model that it does not have."""
    if model is None:
        return next(iter(config.families))
    found = config.family_of(model)
    if found is None:
        known = [name for each in config.families.values() for name in each.models]
        raise ConfigError("--model", f"no model {model!r} in this cluster file", ", ".join(known))
    return found


def arrange(
    config: ClusterConfig, family: str, models: tuple[str, ...], shape: Shape, prefill: str | None = None
) -> Bench:
    """Write the bench's cluster file: a router, a prefill node of the base (or ``prefill``), a decode node for each of ``models``.

    Raises ConfigError.
    """
    folder = config.state_path / "bench-engine"
    check_out_folder("state_dir", folder)
    users = config.families[family]
    prefill = users.base if prefill is None else prefill
    bare = msgspec.structs.replace(config, families={family: users}, nodes={})
    resolved = resolve_family(bare, family, models=(*models, prefill))
    if shape.longest > resolved.max_context_tokens:
        problem = f"requests of {shape.longest} tokens, and {family} takes {resolved.max_context_tokens}"
        raise ConfigError("--context", problem, "less")
    chosen = _family_config(users, shape)
    layout = resolved.layout
    kv_bytes = (shape.kv_tokens + BLOCK_ROOM) * layout.num_layers * layout.kv_token_bytes
    e_bytes = (shape.kv_tokens + BLOCK_ROOM) // layout.block_size * layout.e_block_bytes * len(chosen.transition_layers)
    arguments = {**chosen.vllm, "kv_cache_memory_bytes": kv_bytes}
    client_port, node_port = free_ports(2)
    sizes: dict[str, Any] = {"port": 0, "kv_bytes": kv_bytes, "e_bytes": e_bytes, "threads": shape.threads}
    nodes: dict[str, NodeConfig] = {
        ROUTER: RouterNode(client_port=client_port, node_port=node_port),
        PREFILL: PrefillNode(models=(prefill,), **sizes),
    }
    for model in models:
        nodes[f"decode-{model.replace('/', '_')}"] = DecodeNode(
            models=(model,), max_running=shape.side_by_side, **sizes
        )
    whole = msgspec.structs.replace(
        bare,
        families={family: msgspec.structs.replace(chosen, vllm=arguments)},
        nodes=nodes,
        timeouts=msgspec.structs.replace(config.timeouts, start_s=START_S),
        # a check is a private run in idle time: nothing runs here but what is measured
        drift=msgspec.structs.replace(config.drift, share=0.0),
    )
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "cluster.yaml"
    file.write_text(show_cluster(whole), encoding="utf-8")
    check_installed(whole, list(nodes))
    return Bench(
        whole,
        file.resolve(),
        msgspec.structs.replace(resolved, config=whole.families[family], max_context_tokens=shape.longest),
    )


def _family_config(family: FamilyConfig, shape: Shape) -> FamilyConfig:
    """The family as the bench runs it: the user's arguments but for those that the measurement is about."""
    arguments: dict[str, Any] = {**family.vllm, "enforce_eager": not shape.compiled}
    arguments["max_num_seqs"] = max(shape.side_by_side, int(arguments.get("max_num_seqs") or 0))
    if shape.step_tokens is not None:
        arguments["max_num_batched_tokens"] = shape.step_tokens
    if shape.prefix_caching is not None:
        arguments["enable_prefix_caching"] = shape.prefix_caching
    arguments.pop("max_model_len", None)
    chunk = family.chunk_tokens if shape.chunk_tokens is None else shape.chunk_tokens
    # vLLM's own default shrinks with the longest request, which is short here
    arguments.setdefault("max_num_batched_tokens", max(chunk, STEP_TOKENS))
    return msgspec.structs.replace(
        family, engine="vllm", vllm=arguments, chunk_tokens=chunk, max_context_tokens=shape.longest
    )


def chosen_group(family: ResolvedFamily, sender: str, receiver: str, group: tuple[int, int] | None) -> LayerGroup:
    """The layers that a partial plan recomputes. ConfigError if there are none, or they cannot be."""
    layers = family.layout.num_layers
    allowed = f"START STOP with 0 <= START < STOP <= {layers}, and not all layers"
    found = family.group(sender, receiver) if group is None else LayerGroup(*group)
    if found is None:
        raise ConfigError("--group", f"the family has no group for {receiver} on {sender}", allowed)
    if not 0 <= found.start < found.stop <= layers or len(found) == layers:
        raise ConfigError("--group", f"[{found.start}, {found.stop}) of {layers} layers", allowed)
    return found


def differing(settings: Mapping[str, Mapping[str, Any]], keys: tuple[str, ...]) -> list[str]:
    """Of ``keys``, those in which the arms differ: they would not be compared on equal terms."""
    return [key for key in keys if len({json.dumps(each.get(key)) for each in settings.values()}) > 1]
