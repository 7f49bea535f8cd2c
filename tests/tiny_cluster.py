"""A cluster file of a tiny random family on free ports: base, an adapter on all layers, an adapter on the upper half.

Small enough that four processes start within seconds once torch is imported; used by the tests of ``kvkin up``, of
``kvkin ask --local`` and of clients.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from tiny_models import make_tiny, make_tiny_lora

from kvkin.tools.ports import free_ports

LAYERS = 8
BASE, FULL, UPPER = "tiny-base", "tiny-full", "tiny-upper"
# Adapters of this family: FULL differs from the base in every layer, UPPER from layer SPLIT on.
SPLIT = 4


def make_family(folder: Path, **overrides: Any) -> dict[str, Any]:
    """Write the checkpoints below ``folder``; returns the ``families`` part of a cluster file. ``overrides`` are config fields."""
    fields = {"max_position_embeddings": 2048, **overrides}
    base = make_tiny("llama", folder / "base", num_layers=LAYERS, **fields)
    full = make_tiny_lora(base, folder / "full", range(LAYERS), seed=1)
    upper = make_tiny_lora(base, folder / "upper", range(SPLIT, LAYERS), seed=2)
    return {
        "tiny": {
            "base": BASE,
            "transition_layers": [2, SPLIT],
            "chunk_tokens": 128,
            "recompute_groups": [
                {"receiver": FULL, "group": [2, 5]},
                {"receiver": UPPER, "group": [SPLIT, LAYERS]},
                {"receiver": BASE, "group": [2, 5]},
            ],
            "models": {
                BASE: {"checkpoint": str(base)},
                FULL: {"checkpoint": str(base), "adapter": str(full)},
                UPPER: {"checkpoint": str(base), "adapter": str(upper)},
            },
        }
    }


def make_cluster(folder: Path, *, backend: str = "tcp", models: tuple[str, ...] = (BASE, FULL, UPPER)) -> Path:
    """Write checkpoints and a cluster file with a router, a prefill node and a decode node for each of ``models``."""
    client_port, node_port = free_ports(2)
    small = {"kv_bytes": "16MiB", "e_bytes": "8MiB", "threads": 1, "port": 0}
    nodes: dict[str, Any] = {
        "router-0": {"role": "router", "client_port": client_port, "node_port": node_port},
        "prefill-0": {"role": "prefill", "models": [BASE], **small},
    }
    for model in models:
        nodes[f"decode-{model.removeprefix('tiny-')}"] = {"role": "decode", "models": [model], **small}
    cluster = {
        "state_dir": str(folder / "state"),
        "families": make_family(folder),
        "nodes": nodes,
        "router": {"policy": {"bypass_tokens": 0, "min_reuse_tokens": 16}},
        "timeouts": {"heartbeat_s": 0.2, "node_dead_s": 5, "drain_s": 10, "start_s": 100},
        "transport": {"backend": backend},
    }
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster, sort_keys=False))
    return file
