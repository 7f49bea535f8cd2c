"""Which router a command talks to: ``--address``, or the first router of ``--config``, or of the local cluster file."""

from __future__ import annotations

from pathlib import Path

from kvkin.configs.loader import load_cluster
from kvkin.kv.errors import ConfigError

DEFAULT_CONFIG = Path("configs/clusters/local.yaml")


def router_address(config: Path | None, address: str | None) -> str:
    """The client endpoint. Raises ConfigError if both are given, or neither and there is no local cluster file."""
    if address is not None:
        if config is not None:
            raise ConfigError("--address", "given together with --config", "one of them")
        return address if "://" in address else f"tcp://{address}"
    if config is None and not DEFAULT_CONFIG.exists():
        raise ConfigError(
            "--config", f"not given, and there is no {DEFAULT_CONFIG} here", "--config FILE or --address ADDRESS"
        )
    router = next(iter(load_cluster(config or DEFAULT_CONFIG).routers.values()))
    return f"tcp://{router.host}:{router.client_port}"
