"""``kvkin up`` with real processes: a cluster that serves, survives the death of a node, drains on Ctrl-C and leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tiny_cluster import BASE, make_cluster

from kvkin.configs.loader import load_cluster
from kvkin.configs.schema import ClusterConfig
from kvkin.kv.errors import ConfigError, NodeUnavailable
from kvkin.tools.cli import main
from kvkin.tools.cluster_processes import ClusterProcesses, NodeState, local_nodes
from kvkin.tools.ports import check_ports
from kvkin.transport.client import Client
from kvkin.transport.messages import Sampling, StatusReply

START_S = 90.0
STOP_S = 45.0


class UpProcess:
    """``kvkin up`` as a child whose output is read line by line, with a deadline on every wait."""

    def __init__(self, file: Path, *options: str) -> None:
        self.output = (file.parent / "up.log").open("w+b")
        command = [sys.executable, "-m", "kvkin.tools.cli", "up", str(file), *options]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True
        )

    def text(self) -> str:
        return Path(self.output.name).read_text(encoding="utf-8")

    def wait_for(self, condition: Callable[[str], bool], limit_s: float, what: str) -> str:
        deadline = time.monotonic() + limit_s
        while not condition(text := self.text()):
            assert self.process.poll() is None, f"up ended while waiting for {what}:\n{self.text()}"
            assert time.monotonic() < deadline, f"no {what} within {limit_s} s:\n{text}"
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)
        return text

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextlib.contextmanager
def up(file: Path, *options: str) -> Iterator[UpProcess]:
    """A running ``up``; whatever the test does, its children are gone afterwards, or the test fails."""
    started = UpProcess(file, *options)
    children: list[psutil.Process] = []
    try:
        started.wait_for(lambda text: "all nodes serve" in text, START_S, "serving cluster")
        children = started.children()
        yield started
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            children = list({*children, *started.children()})
        if started.process.poll() is None:
            started.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.process.wait(STOP_S)
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait(5)
        _, left = psutil.wait_procs(children, timeout=15)
        for process in left:
            process.kill()
        started.output.close()
    assert not left, f"up left {left}"


def client_of(config: ClusterConfig) -> Client:
    router = next(iter(config.routers.values()))
    return Client(f"tcp://{router.host}:{router.client_port}")


def status_when(client: Client, condition: Callable[[StatusReply], bool], limit_s: float = 30.0) -> StatusReply:
    deadline = time.monotonic() + limit_s
    while not condition(status := client.status()):
        assert time.monotonic() < deadline, status
    return status


def orphaned_shared_memory() -> set[str]:
    """Files in /dev/shm that no living process maps or has open: other programs of this host keep theirs mapped."""
    found = {str(path) for path in Path("/dev/shm").glob("*")}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found -= {line.split(maxsplit=5)[-1].strip() for line in (process / "maps").open() if "/dev/shm/" in line}
            found -= {os.readlink(descriptor) for descriptor in (process / "fd").iterdir()}
    return found


@pytest.mark.timeout(240)
def test_up_serves_survives_a_death_and_drains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = make_cluster(tmp_path, backend="ucx", models=(BASE,))
    config = load_cluster(file)
    before = orphaned_shared_memory()
    with up(file, "--restart") as running, client_of(config) as client:
        status = status_when(client, lambda status: len(status.nodes) == 2)
        assert {node.name for node in status.nodes} == {"prefill-0", "decode-base"}
        assert client.generate(BASE, prompt="one", max_tokens=4, timeout_s=30).usage.completion_tokens == 4

        # the other commands, as somebody else would type them
        assert main(["status", "--config", str(file)]) == 0
        shown = capsys.readouterr().out
        assert re.search(r"^decode-base +decode +alive .* tiny-base", shown, re.MULTILINE), shown
        assert "plan private 1" in shown
        router = f"127.0.0.1:{config.routers['router-0'].client_port}"
        assert main(["status", "--address", router, "--json"]) == 0
        assert {node["name"] for node in json.loads(capsys.readouterr().out)["nodes"]} == {"prefill-0", "decode-base"}
        assert main(["ask", BASE, "Hello", "--config", str(file), "--max-tokens", "4"]) == 0
        assert re.search(r"\nprivate prefill of \d+ prompt tokens on decode-base; first token", capsys.readouterr().out)
        assert main(["ask", "tiny-bas", "Hello", "--config", str(file)]) == 2
        assert "tiny-bas" in capsys.readouterr().err

        # the very same file again: refused before anything is started, naming the key
        second = subprocess.run(
            [sys.executable, "-m", "kvkin.tools.cli", "up", str(file)],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert second.returncode == 2
        port = config.routers["router-0"].client_port
        assert second.stderr.startswith(f"kvkin: nodes.router-0.client_port: 127.0.0.1:{port} is in use")
        assert second.stdout == ""

        # a node is killed: reported with its signal, the other one keeps serving, and it comes back
        incarnation = next(node.incarnation for node in status.nodes if node.name == "prefill-0")
        victim = next(child for child in running.children() if "prefill-0" in child.cmdline())
        victim.kill()
        running.wait_for(lambda text: "prefill-0 was killed by SIGKILL" in text, 20, "report of the death")
        assert client.generate(BASE, prompt="two", max_tokens=4, timeout_s=30).usage.completion_tokens == 4
        running.wait_for(lambda text: text.count("prefill-0 serving") == 2, START_S, "restarted node")
        status_when(
            client,
            lambda status: any(
                node.name == "prefill-0" and node.state == "alive" and node.incarnation != incarnation
                for node in status.nodes
            ),
        )

        children = running.children()
        assert all(os.getpgid(child.pid) == child.pid for child in children), "Ctrl-C must not reach them twice"
        with client.stream(BASE, prompt="three", sampling=Sampling(max_tokens=200, ignore_eos=True)) as stream:
            next(iter(stream))
            running.process.send_signal(signal.SIGINT)
            assert stream.finish().usage.completion_tokens == 200, "what runs is finished first"
        assert running.process.wait(STOP_S) == 0
        assert "stopped, nothing is left running" in running.text()
        assert not any(child.is_running() for child in children)
    check_ports(config, config.nodes)  # every port is free again
    assert not list((config.state_path / "logs").glob("*.ready"))
    assert orphaned_shared_memory() <= before


@pytest.mark.timeout(240)
def test_children_do_not_outlive_an_up_that_is_killed(tmp_path: Path) -> None:
    file = make_cluster(tmp_path, backend="tcp", models=(BASE,))
    with up(file) as running:
        children = running.children()
        assert len(children) == 3
        running.process.kill()
        running.process.wait(5)
        gone, left = psutil.wait_procs(children, timeout=20)
        assert len(gone) == 3, left
    check_ports(load_cluster(file), load_cluster(file).nodes)


async def test_a_node_that_cannot_start_is_shown_with_its_log(tmp_path: Path) -> None:
    """The cluster file is good, the checkpoint is not: the child says why, and its siblings are stopped."""
    file = make_cluster(tmp_path, models=(BASE,))
    config = load_cluster(file)
    (tmp_path / "base" / "config.json").write_text("{}")
    cluster = ClusterProcesses(file, config, ["router-0"], log_dir=tmp_path / "logs")
    with pytest.raises(
        NodeUnavailable, match=r"router-0 ended with exit code 2 while starting; .*\nkvkin: families\.tiny"
    ):
        await cluster.start()
    assert cluster.nodes["router-0"].state is NodeState.DIED
    assert not cluster.nodes["router-0"].running


def test_up_shows_the_end_of_a_dying_nodes_log_once(tmp_path: Path) -> None:
    """While the cluster starts by the error that ends it, later as it happens."""
    file = make_cluster(tmp_path, models=(BASE,))
    weights = tmp_path / "base" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    ended = subprocess.run(
        [sys.executable, "-m", "kvkin.tools.cli", "up", str(file), "--nodes", "router-0"],
        check=False,
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert ended.returncode != 0
    shown = ended.stdout + ended.stderr
    assert shown.count("router-0 ended with exit code 2") == 2, "when it happens, and as the reason of the end"
    assert shown.count("the end of ") == 1, shown
    (said,) = {line for line in shown.splitlines() if line.startswith("kvkin: families.tiny")}
    assert shown.count(said) == 1


async def test_a_death_while_the_cluster_serves_is_shown_with_the_end_of_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvkin.tools.up import _Screen

    config = load_cluster(make_cluster(tmp_path, models=(BASE,)))
    cluster = ClusterProcesses(tmp_path / "cluster.yaml", config, ["router-0"], log_dir=tmp_path)
    node = cluster.nodes["router-0"]
    node.log_path.write_text("first\nlast words\n")
    node.state, node.ended = NodeState.DIED, "was killed by SIGKILL"
    screen = _Screen(cluster, live=False)
    for starts in (True, False):
        screen.shows_ends = not starts
        screen.changed(node)
        shown = capsys.readouterr().out
        assert "router-0 was killed by SIGKILL" in shown
        assert shown.count("last words") == (0 if starts else 1)


def test_ports_that_are_taken_are_named(tmp_path: Path) -> None:
    import socket

    config = load_cluster(make_cluster(tmp_path, models=(BASE,)))
    with socket.socket() as other:
        other.bind(("127.0.0.1", config.routers["router-0"].node_port))
        other.listen()
        with pytest.raises(ConfigError, match=r"^nodes\.router-0\.node_port: 127\.0\.0\.1:\d+ is in use"):
            check_ports(config, config.nodes)
    check_ports(config, config.nodes)


@pytest.mark.parametrize("words", [["up"], ["config", "check"]])
def test_a_state_dir_that_cannot_be_written_is_named_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    file, blocked = make_cluster(tmp_path, models=(BASE,)), tmp_path / "a file"
    blocked.write_text("in the way")
    state = str(load_cluster(file).state_path)
    file.write_text(file.read_text().replace(state, str(blocked / "state")))
    assert main([*words, str(file)]) == 2
    assert re.search(rf"state_dir: {re.escape(str(blocked))} is no folder", capsys.readouterr().err)


def test_only_nodes_of_this_host_are_chosen(tmp_path: Path) -> None:
    text = make_cluster(tmp_path, models=(BASE,)).read_text().replace("backend: tcp", "backend: tcp\n  insecure: true")
    file = tmp_path / "hosts.yaml"
    file.write_text(text.replace("role: prefill", "role: prefill\n    host: 203.0.113.7"))
    config = load_cluster(file)
    assert local_nodes(config) == ["router-0", "decode-base"]
    with pytest.raises(ConfigError, match=r"nodes\.decode-bas: no such node .*did you mean 'decode-base'"):
        ClusterProcesses(file, config, ["decode-bas"], log_dir=tmp_path)
    file.write_text(text.replace("role: ", "host: 203.0.113.7\n    role: "))
    with pytest.raises(ConfigError, match=r"nodes: none is on this host; the file names 203\.0\.113\.7"):
        local_nodes(load_cluster(file))
