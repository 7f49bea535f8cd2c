"""Choosing a backend: names, and who may listen where."""

from __future__ import annotations

import numpy as np
import psutil
import pytest

from kvkin.kv.errors import ConfigError, LocalTransportError
from kvkin.transport.backends import BACKENDS, is_loopback, open_transport


def test_unknown_backend_names_the_allowed_ones() -> None:
    with pytest.raises(ConfigError, match=r"carrier-pigeon.*ucx, tcp, inproc"):
        open_transport("carrier-pigeon")


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "node-7.cluster"])
def test_other_than_loopback_needs_insecure(name: str, host: str) -> None:
    with pytest.raises(ConfigError, match="insecure"):
        open_transport(name, host=host)


def test_a_wildcard_needs_a_name_to_advertise() -> None:
    with pytest.raises(ConfigError, match="advertise_host"):
        open_transport("tcp", host="0.0.0.0", insecure=True)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("", False),
        ("localhost.evil", False),
    ],
)
def test_is_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize("name", BACKENDS)
async def test_listens_on_loopback_only(name: str) -> None:
    transport = open_transport(name)
    try:
        sockets = psutil.Process().net_connections(kind="inet")
        listening = {entry.laddr.ip for entry in sockets if entry.status == psutil.CONN_LISTEN}
        assert all(is_loopback(host) for host in listening), listening
        assert listening or name == "inproc"
    finally:
        await transport.close()


@pytest.mark.parametrize("name", BACKENDS)
async def test_what_cannot_be_registered(name: str) -> None:
    transport = open_transport(name)
    read_only = np.zeros(8, dtype=np.uint8)
    read_only.flags.writeable = False
    try:
        for bad in (np.zeros(0, np.uint8), np.zeros((2, 2), np.uint8), np.zeros(8, np.uint8)[::2], read_only):
            with pytest.raises(LocalTransportError):
                transport.register(bad)
        with pytest.raises(LocalTransportError, match="region 3"):
            transport.address(3)
    finally:
        await transport.close()
    with pytest.raises(LocalTransportError, match="closed"):
        transport.register(np.zeros(8, np.uint8))


async def test_tcp_port_in_use() -> None:
    first = open_transport("tcp")
    try:
        address = first.address(first.register(np.zeros(8, np.uint8)))
        from kvkin.transport.backends.tcp_wire import decode_metadata

        with pytest.raises(LocalTransportError, match="cannot listen"):
            open_transport("tcp", port=decode_metadata(address.metadata).port)
    finally:
        await first.close()
