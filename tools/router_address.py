"""Which router a command talks to: ``--address``, or the first router of ``--config``, or of the local cluster file.

``reach`` is the first thing that a command asks of it: where nobody answers, the user is told which address was tried, where it
comes from, and what to do.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kvkin.configs.convert import child_key
from kvkin.configs.loader import load_cluster
from kvkin.kv.errors import ConfigError, NodeUnavailable
from kvkin.transport.client import AsyncClient
from kvkin.transport.messages import ModelEntry

DEFAULT_CONFIG = Path("configs/clusters/local.yaml")
# A router answers within milliseconds; a busy one, or one that is just starting, within this.
REACH_S = 5.0
CONNECT_S = 2.0


@dataclass(frozen=True)
class RouterAddress:
    """A client endpoint. ``origin``: the setting that it comes from; ``file``: the cluster file, if it comes from one."""

    url: str
    origin: str
    file: Path | None = None

    def hint(self, otherwise: str = "") -> str:
        """What to do if nobody answers there; ``otherwise``: the command's own way to do without a running cluster."""
        start = f"`kvkin up {self.file or 'FILE'}` starts a cluster"
        other = "" if self.file is None else "--config or --address names another one"
        return f"The address comes from {self.origin}; {'; '.join(part for part in (start, otherwise, other) if part)}"


def router_address(config: Path | None, address: str | None, option: str = "--address") -> RouterAddress:
    """The client endpoint; ``option`` is how ``address`` was given.

    Raises ConfigError if both are given, or neither and there is no local cluster file.
    """
    if address is not None:
        if config is not None:
            raise ConfigError(option, "given together with --config", "one of them")
        return RouterAddress(address if "://" in address else f"tcp://{address}", option)
    if config is None and not DEFAULT_CONFIG.exists():
        raise ConfigError(
            "--config", f"not given, and there is no {DEFAULT_CONFIG} here", "--config FILE or --address ADDRESS"
        )
    file = config or DEFAULT_CONFIG
    name, router = next(iter(load_cluster(file).routers.items()))
    chosen = "--config" if config is not None else "the default, as neither --config nor --address is given"
    key = f"{child_key('nodes', name)}.client_port"
    return RouterAddress(f"tcp://{router.host}:{router.client_port}", f"{key} of {file} ({chosen})", file)


async def reach(
    client: AsyncClient, router: RouterAddress, otherwise: str = "", timeout_s: float = REACH_S
) -> tuple[ModelEntry, ...]:
    """The models of the cluster. Raises NodeUnavailable with :meth:`RouterAddress.hint` if its router does not answer."""
    try:
        return await client.models(timeout_s)
    except NodeUnavailable as error:
        why = await _what_is_there(router.url)
        raise NodeUnavailable(f"{error}{why and f': {why}'}. {router.hint(otherwise)}") from None


async def _what_is_there(url: str) -> str:
    """Why nobody may answer at an address that does not: what a plain connection to it says."""
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        return ""
    if parts.scheme != "tcp" or host is None or port is None:
        return ""
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return "no connection comes up"
    except ConnectionRefusedError:
        return "nothing listens there"
    except OSError as error:
        return error.strerror or str(error)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return "something listens there that is no router, is not for clients (a node_port?), or hangs"
