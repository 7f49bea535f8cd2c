"""Free ports: different ones, free, and none that an outgoing connection could be given before somebody listens on it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvkin.kv.errors import ConfigError
from kvkin.tools import ports
from kvkin.tools.ports import free_ports


def test_different_ports_that_can_be_listened_on() -> None:
    found = free_ports(20)
    assert len(set(found)) == 20
    for port in found:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_none_of_them_is_given_to_an_outgoing_connection() -> None:
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not given.exists():
        pytest.skip("only Linux says which ports it gives")
    first = int(given.read_text(encoding="ascii").split()[0])
    if first <= ports.FIRST_PORT + 2 * ports.MOST_PROBES:
        pytest.skip("this system gives out nearly all ports")
    assert max(free_ports(20)) < first


def test_taken_ports_are_passed_over_and_at_last_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    (taken, free) = free_ports(2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", taken))
        monkeypatch.setattr(ports, "MOST_PROBES", 2)
        monkeypatch.setattr(ports, "_own_ports", lambda: [taken, free])
        assert free_ports(1) == [free]
        with pytest.raises(ConfigError, match="has no 2 free ports in 2 tries"):
            free_ports(2)
