"""``kvkin status``: the nodes of a running cluster with their load, holdings and leases, and the router's counters."""

from __future__ import annotations

import asyncio
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import tyro
from rich.console import Console

from kvkin.kv.errors import ConfigError
from kvkin.tools.cluster_view import status_view
from kvkin.tools.router_address import RouterAddress, reach, router_address
from kvkin.transport.client import AsyncClient
from kvkin.transport.messages import StatusReply


@dataclass(frozen=True)
class Status:
    """Show the nodes of a running cluster: load, KV held, leases, and what the router counted."""

    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Cluster file whose first router is asked; default: configs/clusters/local.yaml."""

    address: Annotated[str | None, tyro.conf.arg(metavar="ADDRESS")] = None
    """Address of a router instead, such as tcp://10.0.0.1:5570."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the whole reply as JSON."""

    timeout_s: float = 5.0
    """How long to wait for the router."""

    def run(self) -> int:
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise ConfigError("--timeout-s", f"{self.timeout_s}", "seconds above 0")
        reply = asyncio.run(self._ask(router_address(self.config, self.address)))
        if self.json:
            print(msgspec.json.format(msgspec.json.encode(reply)).decode())
        else:
            # a pipe has no width: rich would wrap at 80 columns and break names
            Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(status_view(reply))
        return 0

    async def _ask(self, router: RouterAddress) -> StatusReply:
        async with AsyncClient(router.url) as client:
            await reach(client, router, timeout_s=self.timeout_s)
            return await client.status(timeout_s=self.timeout_s)
