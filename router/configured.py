"""From a resolved cluster to ``RouterSettings``: the only place where the router reads the configuration's types."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvkin.configs.families import ResolvedCluster, ResolvedFamily
from kvkin.configs.pairs import PairReuse, pair_reuse
from kvkin.configs.schema import ClusterConfig, RouterNode
from kvkin.kv.cost import CostSettings
from kvkin.kv.errors import ConfigError
from kvkin.router.drift_bounds import drift_settings
from kvkin.router.policy_types import GroupChoice, PolicySettings
from kvkin.router.settings import (
    ATTACHED,
    FamilySettings,
    Limits,
    ModelSettings,
    NodeSettings,
    RouterSettings,
    Timeouts,
)
from kvkin.transport.messages import PairGroup, PairStatus

# A status reply tells of so many pairs: fifty adapters make 2,450.
MAX_PAIRS = 200


def settings_from(resolved: ResolvedCluster, name: str) -> RouterSettings:
    """Settings of the router ``name``. Raises ConfigError if the configuration has no such router."""
    config = resolved.config
    node = config.nodes.get(name)
    if not isinstance(node, RouterNode):
        raise ConfigError(f"nodes.{name}", "no router of this name", ", ".join(sorted(config.routers)) or "none")
    families = resolved.families.values()
    return RouterSettings(
        name=name,
        families={family.name: _family(family) for family in families},
        models={model.name: model for family in families for model in _models(family)},
        nodes=_nodes(config),
        client_address=f"tcp://{node.bind_host}:{node.client_port}",
        node_address=f"tcp://{node.bind_host}:{node.node_port}",
        insecure=config.transport.insecure,
        scope=config.router.scope,
        load_half_life_s=config.router.load_half_life_s,
        index_max_blocks=config.router.index_max_blocks,
        fan_out_half_life_s=config.router.policy.fan_out_half_life_s,
        limits=_limits(config),
        timeouts=_timeouts(config),
        policy=_policy(config),
        pairs=tuple(map(_pair_status, pair_reuse(families)[:MAX_PAIRS])),
        drift=drift_settings(config, families, name),
    )


def _family(family: ResolvedFamily) -> FamilySettings:
    names = list(family.config.models)
    groups = {(sender, receiver): _choices(family, sender, receiver) for sender in names for receiver in names}
    return FamilySettings(
        name=family.name,
        base_model=family.config.base,
        layout=family.layout,
        tokenizer_digest=family.tokenizer_digest,
        vocab_size=family.vocab_size,
        transition_layers=family.transition_layers,
        groups={pair: choices for pair, choices in groups.items() if choices},
        notes=tuple(family.profiles.warnings(family.name)),
    )


def _choices(family: ResolvedFamily, sender: str, receiver: str) -> tuple[GroupChoice, ...]:
    """What a pair may recompute: the points of its profile with their losses, else the configured group, unprofiled."""
    profiled = family.profiles.pairs.get((sender, receiver))
    if profiled is not None:
        return tuple(GroupChoice(one.group, one.loss) for one in profiled.points)
    group = family.group(sender, receiver)
    return () if group is None else (GroupChoice(group),)


def _pair_status(pair: PairReuse) -> PairStatus:
    groups = tuple(
        PairGroup(
            None if one.group is None else (one.group.start, one.group.stop),
            one.loss if math.isfinite(one.loss) else None,
        )
        for one in pair.points
    )
    return PairStatus(pair.sender, pair.receiver, pair.state.value, groups, pair.why)


def _models(family: ResolvedFamily) -> list[ModelSettings]:
    return [
        ModelSettings(
            name=name,
            family=family.name,
            lineage=model.lineage,
            tokenizer_dir=str(family.model_tokenizer_path(name)),
            vocab_size=model.vocab_size,
            max_context_tokens=family.model_max_context(name),
            chat_template=family.chat_template(name),
            bos_id=family.tokenizer.bos_id,
            own_digest=model.tokenizer_digest if name in family.own_root else b"",
            logits_digest=model.logits_digest,
        )
        for name, model in family.models.items()
    ]


def _nodes(config: ClusterConfig) -> Mapping[str, NodeSettings]:
    prefill = {name: NodeSettings(name, "prefill", node.models) for name, node in config.prefill_nodes.items()}
    decode = {name: NodeSettings(name, "decode", node.models) for name, node in config.decode_nodes.items()}
    return (
        prefill | decode | {name: NodeSettings(name, ATTACHED, node.models) for name, node in config.attached.items()}
    )


def _limits(config: ClusterConfig) -> Limits:
    limits = config.limits
    return Limits(
        max_request_bytes=limits.max_request_bytes,
        max_prompt_tokens=limits.max_prompt_tokens,
        max_new_tokens=limits.max_new_tokens,
        max_queue=limits.max_queue,
        max_clients=limits.max_clients,
        max_stop_strings=limits.max_stop_strings,
        max_stop_chars=limits.max_stop_chars,
    )


def _timeouts(config: ClusterConfig) -> Timeouts:
    times = config.timeouts
    return Timeouts(
        heartbeat_s=times.heartbeat_s,
        node_dead_s=times.node_dead_s,
        register_s=times.register_s,
        request_s=times.request_s,
        order_s=times.order_s,
        drain_s=times.drain_s,
        # a node that outlives a restart of its router is back within a heartbeat or two
        node_wait_s=3 * times.heartbeat_s,
    )


def _policy(config: ClusterConfig) -> PolicySettings:
    policy = config.router.policy
    chunk_tokens = min(family.chunk_tokens for family in config.families.values())
    return PolicySettings(
        beta=policy.beta,
        exact_preference=policy.exact_preference,
        min_pull_tokens=max(policy.min_reuse_tokens, policy.bypass_tokens),
        min_order_tokens=policy.min_order_tokens,
        min_fan_out=policy.min_fan_out,
        max_pool_queue_s=policy.max_pool_queue_s,
        live_margin=policy.live_margin,
        cost=CostSettings(
            default_layer_tokens_per_s=policy.default_layer_tokens_per_s,
            default_pull_bytes_per_s=policy.default_pull_bytes_per_s,
            context_half_tokens=policy.context_half_tokens,
            stream_overhead_s=policy.stream_overhead_s,
            chunk_tokens=chunk_tokens,
        ),
        spill_s=policy.spill_s,
        max_segments=policy.max_segments,
        ttft_slo_s=policy.ttft_slo_s,
    )
