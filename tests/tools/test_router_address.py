"""Commands that ask a router: which one they ask, and what they say where nobody answers."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from mock_node import choose_privately, make_settings

from kvkin.kv.errors import ConfigError, NodeUnavailable
from kvkin.router.node import RouterNode
from kvkin.tools import router_address as module
from kvkin.tools.ask import Ask
from kvkin.tools.bench_serving import BenchServing
from kvkin.tools.bench_serving_options import ClusterOptions, ModelOptions
from kvkin.tools.ports import free_ports
from kvkin.tools.router_address import REACH_S, RouterAddress, reach, router_address
from kvkin.tools.status import Status
from kvkin.transport.client import AsyncClient

WAIT_S = 0.2


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "__defaults__", ("", WAIT_S))


@contextlib.contextmanager
def listening() -> Iterator[int]:
    """A port at which somebody listens who never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def cluster_file(path: Path, port: int) -> Path:
    cluster = {
        "families": {"f": {"base": "m", "models": {"m": {"checkpoint": "./nowhere"}}}},
        "nodes": {
            "front": {"role": "router", "client_port": port, "node_port": 5571},
            "d": {"role": "decode", "port": 0, "models": ["m"]},
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(cluster))
    return path


def test_which_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert router_address(None, "10.0.0.1:5570") == RouterAddress("tcp://10.0.0.1:5570", "--address")
    assert router_address(None, "ipc:///there", "--router") == RouterAddress("ipc:///there", "--router")
    with pytest.raises(ConfigError, match="--address: given together with --config"):
        router_address(Path("x.yaml"), "10.0.0.1:5570")
    with pytest.raises(ConfigError, match=r"--config: not given, and there is no configs/clusters/local\.yaml here"):
        router_address(None, None)
    named = cluster_file(tmp_path / "mine.yaml", 7000)
    origin = f"nodes.front.client_port of {named} (--config)"
    assert router_address(named, None) == RouterAddress("tcp://127.0.0.1:7000", origin, named)
    cluster_file(tmp_path / "configs" / "clusters" / "local.yaml", 7001)
    default = Path("configs/clusters/local.yaml")
    origin = f"nodes.front.client_port of {default} (the default, as neither --config nor --address is given)"
    assert router_address(None, None) == RouterAddress("tcp://127.0.0.1:7001", origin, default)


COMMANDS: dict[str, tuple[Callable[[Path | None, str | None], int], str]] = {
    "ask": (lambda file, address: Ask("m", "text", config=file, address=address).run(), "--local asks without one"),
    "status": (lambda file, address: Status(config=file, address=address, timeout_s=WAIT_S).run(), ""),
    "bench serving": (
        lambda file, address: BenchServing(
            cluster=ClusterOptions(config=file, address=address), models=ModelOptions(vocab=(0, 99))
        ).run(),
        "--start starts one for this run",
    ),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_nobody_at_the_address_of_a_file(command: str, tmp_path: Path) -> None:
    run, otherwise = COMMANDS[command]
    (port,) = free_ports(1)
    file = cluster_file(tmp_path / "mine.yaml", port)
    with pytest.raises(NodeUnavailable) as raised:
        run(file, None)
    middle = f"{otherwise}; " if otherwise else ""
    assert str(raised.value) == (
        f"the router at tcp://127.0.0.1:{port} does not answer (waited 0.2 s): nothing listens there. The address comes from "
        f"nodes.front.client_port of {file} (--config); `kvkin up {file}` starts a cluster; {middle}"
        "--config or --address names another one"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_nobody_at_an_address(command: str) -> None:
    (port,) = free_ports(1)
    with pytest.raises(NodeUnavailable) as raised:
        COMMANDS[command][0](None, f"127.0.0.1:{port}")
    assert str(raised.value).endswith(
        ": nothing listens there. The address comes from --address; `kvkin up FILE` starts a cluster"
    )


def test_somebody_else_at_an_address() -> None:
    with listening() as port, pytest.raises(NodeUnavailable, match="something listens there that is no router"):
        Status(address=f"127.0.0.1:{port}", timeout_s=WAIT_S).run()


def test_a_name_that_cannot_be_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unknown(host: str, port: int) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(module.asyncio, "open_connection", unknown)
    with pytest.raises(NodeUnavailable, match=r"\(waited 0\.2 s\): Name or service not known\. The address comes"):
        Status(address="127.0.0.1:9", timeout_s=WAIT_S).run()


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_status_that_does_not_wait_is_refused(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match=r"--timeout-s: .*seconds above 0"):
        Status(address="127.0.0.1:9", timeout_s=timeout_s).run()


async def test_a_router_that_answers(tmp_path: Path) -> None:
    async with RouterNode(make_settings(tmp_path), choose=choose_privately) as router:
        async with AsyncClient(router.client_address) as client:
            known = await reach(client, RouterAddress(router.client_address, "--address"), timeout_s=REACH_S)
        assert {entry.name for entry in known} == {"base", "tuned"}
