"""Ports of the nodes of a cluster on this host: free ones for a cluster that is made up here, and whether those of a file are free."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from collections.abc import Iterable
from pathlib import Path

from kvkin.configs.convert import child_key
from kvkin.configs.schema import ClusterConfig, RouterNode
from kvkin.kv.errors import ConfigError

FIRST_PORT, MOST_PROBES = 10_000, 500
EPHEMERAL = 32_768
"""First port that Linux gives to outgoing connections, where it does not say."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Different ports that nothing listens on now; none that the system gives out by itself, as a connection could have it before it is
    listened on. Raises ConfigError."""
    with contextlib.ExitStack() as held:
        found: list[int] = []
        for port in random.SystemRandom().sample(_own_ports(), k=MOST_PROBES):
            probe = held.enter_context(socket.socket())
            try:
                probe.bind((host, port))
            except OSError:
                continue
            found.append(port)
            if len(found) == count:
                return found
    raise ConfigError(
        "port", f"{host} has no {count} free ports in {MOST_PROBES} tries", "a host on which fewer programs listen"
    )


def _own_ports() -> range:
    """Ports that nobody has without asking for them."""
    try:
        given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
        first = int(given.split()[0])
    except (OSError, ValueError, IndexError):
        first = EPHEMERAL
    # a system that gives out nearly all leaves no choice
    return range(FIRST_PORT, first if first > FIRST_PORT + 2 * MOST_PROBES else 2 * EPHEMERAL)


def check_ports(config: ClusterConfig, names: Iterable[str]) -> None:
    """Raise ConfigError for the first port of ``names`` that cannot be bound, as something listens on it already."""
    for name in names:
        node = config.nodes[name]
        if isinstance(node, RouterNode):
            ports = {"client_port": node.client_port, "node_port": node.node_port}
        else:
            ports = {"port": node.port}
        for field, port in ports.items():
            key = f"{child_key('nodes', name)}.{field}"
            problem = _why_not(node.bind_host, port) if port else ""
            if problem:
                raise ConfigError(
                    key, f"{node.bind_host}:{port} {problem}", "a free port; is this cluster running already?"
                )


def _why_not(host: str, port: int) -> str:
    """Why ``host:port`` cannot be bound; empty if it can."""
    host = "0.0.0.0" if host == "*" else host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # as ZeroMQ does: connections of a cluster that has just ended do not count
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return "is in use" if error.errno == errno.EADDRINUSE else f"cannot be bound ({error.strerror})"
    return ""
