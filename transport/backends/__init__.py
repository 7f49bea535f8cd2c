"""Data-plane backends. ``open_transport`` picks one by the name in the cluster file; nodes, tests and benches call it.

Backends are imported on first use: a router, or a node that speaks ``tcp``, never loads UCX.
"""

from __future__ import annotations

import ipaddress

from kvkin.kv.errors import ConfigError
from kvkin.transport.data_plane import Transport

if not __name__.startswith("kvkin."):
    raise ImportError(f"import kvkin.transport.backends instead of the bare name {__name__!r}")

BACKENDS = ("ucx", "tcp", "inproc")
DEFAULT_QUARANTINE_BYTES = 256 << 20


def open_transport(
    name: str,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    insecure: bool = False,
    advertise_host: str | None = None,
    quarantine_max_bytes: int = DEFAULT_QUARANTINE_BYTES,
    max_connections: int = 256,
) -> Transport:
    """Open the backend ``name`` (``ucx``, ``tcp`` or ``inproc``) in this process.

    ``host`` is the interface that peers may reach us on; all but loopback ones are refused unless ``insecure`` says that
    the network is trusted, for the data plane has no keys. ``port`` (tcp only) 0 picks a free one. ``advertise_host`` is
    what peers dial where it differs from ``host`` (needed for a wildcard). ``quarantine_max_bytes`` bounds the
    destinations that a silent peer may hold back before it is disconnected; ``max_connections`` bounds tcp's serving side.

    Raises ConfigError for an unknown name or a refused host, LocalTransportError where the backend cannot start.
    """
    if name not in BACKENDS:
        raise ConfigError("transport", f"unknown backend {name!r}", ", ".join(BACKENDS))
    if not is_loopback(host) and not insecure:
        raise ConfigError(
            "host",
            f"{host!r} is not a loopback address and the data plane is not encrypted",
            "127.0.0.1, ::1, or insecure: true",
        )
    if name == "ucx":
        from kvkin.transport.backends.ucx import UcxTransport

        return UcxTransport(loopback_only=is_loopback(host), quarantine_max_bytes=quarantine_max_bytes)
    if name == "tcp":
        from kvkin.transport.backends.tcp import TcpTransport

        return TcpTransport(host, port, advertise_host=advertise_host, max_connections=max_connections)
    from kvkin.transport.backends.inproc import InprocTransport

    return InprocTransport()


def is_loopback(host: str) -> bool:
    """Whether ``host`` names this machine only. Names other than ``localhost`` are not resolved: they count as remote."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
