"""From a resolved cluster file to one node's ``NodeSettings``: what every node that holds KV needs to know of the cluster.

Called by whoever starts a node: ``tools/roles.py``, and the link of an attached server (``decode_nodes/attached.py``).
"""

from __future__ import annotations

from kvkin.configs.families import ResolvedFamily
from kvkin.configs.schema import ClusterConfig, DecodeNode, RouterNode
from kvkin.transport.node_messages import ServedModel
from kvkin.transport.node_runtime import CheckSettings, NodeSettings


def node_settings(
    config: ClusterConfig, family: ResolvedFamily, name: str, checks: CheckSettings | None = None
) -> NodeSettings:
    """Settings of the node ``name``, which is no router; ``checks`` for drift are a decode node's matter."""
    node = config.nodes[name]
    assert not isinstance(node, RouterNode)
    times, transport = config.timeouts, config.transport
    served = tuple(
        ServedModel(model, family.name, family.models[model].lineage, family.tokenizer_digest) for model in node.models
    )
    return NodeSettings(
        name=name,
        role=str(node.__struct_config__.tag),
        family=family.name,
        host=node.host,
        bind_host=node.bind_host,
        port=node.port,
        models=served,
        layout=family.layout,
        transition_layers=family.transition_layers,
        chunk_tokens=family.config.chunk_tokens,
        context_half_tokens=config.router.policy.context_half_tokens,
        kv_bytes=node.kv_bytes,
        e_bytes=node.e_bytes,
        routers=tuple(f"tcp://{router.host}:{router.node_port}" for router in config.routers.values()),
        backend=transport.backend,
        data_port=node.data_port,
        insecure=transport.insecure,
        quarantine_max_bytes=transport.quarantine_max_bytes,
        pull_window_bytes=transport.pull_window_bytes,
        lease_s=times.lease_s,
        lease_grace_s=times.lease_grace_s,
        heartbeat_s=times.heartbeat_s,
        pull_s=times.pull_s,
        open_stream_s=times.open_stream_s,
        order_s=times.order_s,
        drain_s=times.drain_s,
        max_running=node.max_running if isinstance(node, DecodeNode) else 1,
        max_queue=config.limits.max_queue,
        checks=CheckSettings() if checks is None else checks,
    )
