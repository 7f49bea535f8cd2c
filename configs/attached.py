"""Attached servers of a cluster file: what a plain ``vllm serve`` with kvkin's connector can be (docs/vllm.md).

Its engine arguments are on its command line and checked by the connector when the server starts; here is what the file and the
checkpoints say already. Every process that reads the file calls :func:`check_attached`, whoever has read the checkpoints
:func:`check_attached_family`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkin.configs.convert import child_key
from kvkin.configs.schema import ClusterConfig
from kvkin.configs.vllm_rules import check_one_checkpoint, check_windows, quantization
from kvkin.kv.errors import ConfigError

if TYPE_CHECKING:
    from kvkin.configs.families import ResolvedFamily


def check_attached(config: ClusterConfig) -> None:
    """Raise ConfigError for the first attached server that no ``vllm serve`` could be."""
    for name, node in config.attached.items():
        key = child_key("nodes", name)
        family_name = config.family_of(node.models[0])
        assert family_name is not None, "nodes are checked before"
        family = config.families[family_name]
        check_one_checkpoint(key, family, node.models, "server", "a server for each")
        if quantization(family.vllm) is not None:
            problem = f"{child_key('families', family_name)}.vllm.quantization is set, and a server quantises by itself"
            raise ConfigError(f"{key}.role", problem, "decode, or a family whose weights are not quantised")


def check_attached_family(config: ClusterConfig, family: ResolvedFamily) -> None:
    """Raise ConfigError for the first attached server of ``family`` whose vLLM could not share these checkpoints' KV."""
    for name, node in config.attached.items():
        if config.family_of(node.models[0]) != family.name:
            continue
        key = f"{child_key('nodes', name)}.models"
        check_windows(key, family.base.geometry.windows, "models without a window")
        for index, model in enumerate(node.models):
            identity = family.models.get(model)
            if identity is not None and identity.geometry.quantisation is not None:
                problem = f"the checkpoint of {model} is quantised, which has not been tried on vLLM"
                raise ConfigError(f"{key}[{index}]", problem, "weights that are not quantised")
