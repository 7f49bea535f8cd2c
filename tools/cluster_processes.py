"""The nodes of a cluster file as child processes of this one: started, watched, restarted, drained, never orphaned.

``kvkin up``, the demo, the benchmarks and the tests use it. A child is ``kvkin ROLE --config F --node NAME`` in a session of its
own (Ctrl-C at the terminal reaches only the parent, which then drains the children in order) with a log file, a ready file, and
the lifeline of ``tools/lifeline.py``. Everything happens on the caller's event loop; the only signals sent are to own children.
"""

from __future__ import annotations

import asyncio
import enum
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from kvkin.configs.checks import is_loopback
from kvkin.configs.convert import child_key, suggest
from kvkin.configs.schema import ClusterConfig, NodeConfig, RouterNode
from kvkin.kv.errors import ConfigError, NodeUnavailable
from kvkin.tools.lifeline import LIFELINE_VARIABLE
from kvkin.tools.ports import check_ports
from kvkin.tools.shared_cores import SHARED_CORES

POLL_S = 0.05
# What a worker gets to close its sockets and memory once it was told to stop.
CLOSE_S = 15.0
# Wait before a dead node is started again: doubled with every death, forgotten once it served for a while.
RESTART_FIRST_S, RESTART_MAX_S, RESTART_FORGET_S = 1.0, 30.0, 60.0
LOG_TAIL_LINES = 15


class NodeState(enum.StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"
    STOPPED = "stopped"
    DIED = "died"


@dataclass
class NodeProcess:
    """One node on this host. ``ended`` says how its process went, once it did."""

    name: str
    role: str
    log_path: Path
    state: NodeState = NodeState.WAITING
    process: subprocess.Popen[bytes] | None = None
    address: str = ""
    ended: str = ""
    deaths: int = 0
    serving_since: float = 0.0
    restart_at: float | None = None

    @property
    def ready_path(self) -> Path:
        return self.log_path.with_suffix(".ready")

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The end of the node's log, for a report of its death."""
        try:
            text = self.log_path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.rstrip().splitlines()[-lines:])


class ClusterProcesses:
    """Use as ``async with``: entering starts all ``names`` or none, leaving stops them, whatever happened in between."""

    def __init__(
        self,
        file: Path,
        config: ClusterConfig,
        names: Collection[str] | None = None,
        *,
        log_dir: Path,
        log_level: str = "info",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``config`` is what ``file`` holds; ``names`` are the nodes to start, none: all that are on this host."""
        self._file, self._config = file.resolve(), config
        self._log_level, self._environment = log_level, environment or {}
        chosen = local_nodes(config) if names is None else _known(config, names)
        routers_first = sorted(chosen, key=lambda name: not isinstance(config.nodes[name], RouterNode))
        self.nodes = {
            name: NodeProcess(name, _role(config.nodes[name]), (log_dir / f"{name}.log").resolve())
            for name in routers_first
        }
        self._lifeline: tuple[int, int] | None = None

    # --- starting ----------------------------------------------------------------------------------------------------

    async def start(self, on_change: Callable[[NodeProcess], None] = lambda node: None) -> None:
        """Start routers, then workers, and return when all serve.

        Raises ConfigError for a port that is taken, before anything is started, and NodeUnavailable, with the end of the
        log, for a node that ends or is not ready in time; the others are stopped then.
        """
        check_ports(self._config, self.nodes)
        self._lifeline = os.pipe()
        deadline = time.monotonic() + self._config.timeouts.start_s
        try:
            for first in (True, False):
                batch = [node for node in self.nodes.values() if (node.role == "router") == first]
                for node in batch:
                    self._launch(node)
                    on_change(node)
                await self._until_ready(batch, deadline, on_change)
        except BaseException:
            await self.stop(at_once=True)
            raise

    async def _until_ready(
        self, batch: list[NodeProcess], deadline: float, on_change: Callable[[NodeProcess], None]
    ) -> None:
        while waiting := [node for node in batch if node.state is NodeState.STARTING]:
            for node in self.check():
                on_change(node)
            dead = next((node for node in self.nodes.values() if node.state is NodeState.DIED), None)
            if dead is not None:
                raise NodeUnavailable(f"{dead.name} {dead.ended} while starting; {_log_end(dead)}")
            if time.monotonic() > deadline:
                names = ", ".join(node.name for node in waiting)
                limit = self._config.timeouts.start_s
                why = f"{names} not ready within timeouts.start_s = {limit:g} s"
                raise NodeUnavailable(f"{why}; {_log_end(waiting[0])}")
            await asyncio.sleep(POLL_S)

    def _launch(self, node: NodeProcess) -> None:
        assert self._lifeline is not None, "start comes first"
        node.ready_path.unlink(missing_ok=True)
        node.log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "kvkin.tools.cli", "--log-level", self._log_level, node.role]
        command += ["--config", str(self._file), "--node", node.name, "--ready-file", str(node.ready_path)]
        environment = {**SHARED_CORES, **os.environ, **self._environment, LIFELINE_VARIABLE: str(self._lifeline[0])}
        # a restarted node goes on in the same log, what led to its death stays readable
        with node.log_path.open("ab" if node.deaths else "wb") as log:
            node.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=[self._lifeline[0]],
                start_new_session=True,
            )
        node.state, node.ended, node.restart_at = NodeState.STARTING, "", None

    # --- while they run ----------------------------------------------------------------------------------------------

    def check(self) -> list[NodeProcess]:
        """Look at every child; returns those whose state changed. Call it now and then while the cluster runs."""
        changed = []
        for node in self.nodes.values():
            before = node.state
            if node.process is not None and node.process.poll() is not None and before is not NodeState.DIED:
                node.ended = _how_it_ended(node.process.returncode)
                stopping = before in (NodeState.STOPPING, NodeState.STOPPED)
                node.state = NodeState.STOPPED if stopping else NodeState.DIED
                node.deaths += not stopping
            elif before is NodeState.STARTING and node.ready_path.exists():
                node.address, node.serving_since = node.ready_path.read_text(), time.monotonic()
                node.state = NodeState.SERVING
            if node.state is not before:
                changed.append(node)
        return changed

    def restart_dead(self) -> list[NodeProcess]:
        """Start dead nodes again once their pause is over; returns those that were started now."""
        started, now = [], time.monotonic()
        for node in self.nodes.values():
            if node.state is not NodeState.DIED:
                continue
            if node.restart_at is None:
                if node.serving_since and now - node.serving_since > RESTART_FORGET_S:
                    node.deaths = 1
                node.restart_at = now + min(RESTART_FIRST_S * 2 ** (node.deaths - 1), RESTART_MAX_S)
            elif now >= node.restart_at:
                self._launch(node)
                started.append(node)
        return started

    def restart(self, name: str) -> None:
        """Start a dead node again now; ``check`` says when it serves."""
        node = self.nodes[name]
        assert node.state is NodeState.DIED, f"{name} is {node.state}"
        self._launch(node)

    # --- stopping ----------------------------------------------------------------------------------------------------

    async def stop(self, *, at_once: bool = False) -> None:
        """Drain and end all children: routers finish what runs, then workers close; what is left is killed. Idempotent.

        ``at_once`` skips the drain. Cancelling this (a second Ctrl-C) kills what is left.
        """
        drain_s = 0.0 if at_once else self._config.timeouts.drain_s
        routers = [node for node in self.nodes.values() if node.role == "router"]
        workers = [node for node in self.nodes.values() if node.role != "router"]
        try:
            if not at_once:
                # workers must live while the router still has requests on them
                self._tell(routers, signal.SIGTERM)
                await self._until_ended(routers, drain_s + CLOSE_S)
            self._tell([*routers, *workers], signal.SIGTERM)
            await self._until_ended([*routers, *workers], CLOSE_S)
        finally:
            for node in self.nodes.values():
                if node.running:
                    assert node.process is not None
                    node.process.kill()
                    node.process.wait()
                node.ready_path.unlink(missing_ok=True)
            self.check()
            if self._lifeline is not None:
                for descriptor in self._lifeline:
                    os.close(descriptor)
                self._lifeline = None

    def _tell(self, nodes: Iterable[NodeProcess], number: signal.Signals) -> None:
        for node in nodes:
            if node.running and node.state is not NodeState.STOPPING:
                assert node.process is not None
                node.process.send_signal(number)
                node.state = NodeState.STOPPING
            elif node.state is NodeState.WAITING:
                node.state = NodeState.STOPPED

    async def _until_ended(self, nodes: list[NodeProcess], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while any(node.running for node in nodes) and time.monotonic() < deadline:
            self.check()
            await asyncio.sleep(POLL_S)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()


def local_nodes(config: ClusterConfig) -> list[str]:
    """Nodes whose ``host`` is an address of this machine, without attached servers: others start those."""
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    here = [name for name, node in config.nodes.items() if is_loopback(node.host) or node.host in own]
    here = [name for name in here if name not in config.attached]
    if not here:
        hosts = ", ".join(sorted({node.host for node in config.nodes.values()}))
        raise ConfigError("nodes", f"none is on this host; the file names {hosts}", "run this on one of them")
    return here


def _known(config: ClusterConfig, names: Collection[str]) -> list[str]:
    for name in names:
        if name not in config.nodes:
            raise ConfigError(child_key("nodes", name), "no such node", suggest(name, config.nodes))
        if name in config.attached:
            raise ConfigError(child_key("nodes", name), "is an attached server", "vllm serve starts it (docs/vllm.md)")
    return [name for name in config.nodes if name in names]


def _role(node: NodeConfig) -> str:
    return str(node.__struct_config__.tag)


def _how_it_ended(returncode: int) -> str:
    if returncode < 0:
        try:
            return f"was killed by {signal.Signals(-returncode).name}"
        except ValueError:
            return f"was killed by signal {-returncode}"
    return f"ended with exit code {returncode}"


def _log_end(node: NodeProcess) -> str:
    tail = node.log_tail()
    return f"the end of {node.log_path}:\n{tail}" if tail else f"{node.log_path} is empty"
