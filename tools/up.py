"""``kvkin up FILE``: keep this host's nodes of a cluster file running, with live status; Ctrl-C drains and stops them.

Thin IO around ``cluster_processes.py`` (the children) and ``cluster_view.py`` (the screen). A node that dies is reported, the
others keep serving. Off a terminal (a service, Slurm, a pipe) every change is one line instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.live import Live

from kvkin.configs.loader import load_cluster
from kvkin.configs.schema import ClusterConfig
from kvkin.configs.vllm_install import check_installed
from kvkin.kv.errors import KvkinError
from kvkin.tools.cluster_processes import ClusterProcesses, NodeProcess, NodeState, local_nodes
from kvkin.tools.cluster_view import up_view
from kvkin.tools.out_folder import check_out_folder
from kvkin.tools.prepare import prepare_missing
from kvkin.tools.start_view import LINE_EVERY_S, narrate
from kvkin.transport.client import AsyncClient
from kvkin.transport.messages import StatusReply

EXIT_INTERRUPTED = 130
CHECK_S = 0.25
STATUS_S = 1.0


@dataclass(frozen=True)
class Up:
    """Start every node of the cluster file that is on this host, and keep them running until Ctrl-C.

    Logs go to state_dir/logs/NODE.log. Ctrl-C finishes the running requests first; a second one stops at once.
    """

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """The cluster file, such as configs/clusters/local.yaml."""

    nodes: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = ()
    """Start only these nodes; default: all whose host is an address of this machine."""

    restart: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Start a node that died again, after a pause that grows with every death."""

    plain: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """One line per change instead of a live screen, also on a terminal."""

    def run(self) -> int:
        config = load_cluster(self.file)
        # what cannot work on this host is said before processes are started
        check_installed(config, self.nodes or local_nodes(config))
        check_out_folder("state_dir", config.state_path)
        prepare_missing(config)
        return asyncio.run(self._serve(config))

    async def _serve(self, config: ClusterConfig) -> int:
        cluster = ClusterProcesses(self.file, config, self.nodes or None, log_dir=config.state_path / "logs")
        screen = _Screen(cluster, live=sys.stdout.isatty() and not self.plain)
        with _signals() as signals, screen.shown():
            starting = asyncio.create_task(cluster.start(screen.changed))
            telling = asyncio.create_task(narrate(cluster.nodes.values(), screen.say, screen.every_s))
            await _first(starting, signals.stop)
            telling.cancel()
            if not starting.done():
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                return EXIT_INTERRUPTED
            starting.result()
            screen.shows_ends = True
            screen.say("all nodes serve; Ctrl-C drains and stops them")
            screen.note = "Ctrl-C drains and stops the cluster"
            try:
                return await self._watch(config, cluster, screen, signals)
            finally:
                screen.say("draining: running requests are finished, Ctrl-C again stops at once")
                await self._stop(cluster, screen, signals)

    async def _watch(self, config: ClusterConfig, cluster: ClusterProcesses, screen: _Screen, signals: _Signals) -> int:
        """Until Ctrl-C (0), or until no node is left (1)."""
        router = next(iter(config.routers.values()))
        async with AsyncClient(f"tcp://{router.host}:{router.client_port}") as client:
            asking = asyncio.create_task(_keep_asking(client, screen))
            try:
                while not signals.stop.is_set():
                    for node in cluster.check():
                        screen.changed(node)
                    if self.restart:
                        for node in cluster.restart_dead():
                            screen.changed(node)
                    elif all(node.state is NodeState.DIED for node in cluster.nodes.values()):
                        screen.say("no node is left")
                        return 1
                    screen.refresh()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(signals.stop.wait(), CHECK_S)
                return 0
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

    async def _stop(self, cluster: ClusterProcesses, screen: _Screen, signals: _Signals) -> None:
        stopping = asyncio.create_task(cluster.stop())
        while not stopping.done():
            await _first(stopping, signals.hurry, timeout_s=CHECK_S)
            if signals.hurry.is_set() and not stopping.done():
                stopping.cancel()
            screen.refresh()
        with contextlib.suppress(asyncio.CancelledError):
            await stopping
        screen.say("stopped, nothing is left running")


class _Signals:
    """The first SIGINT or SIGTERM sets ``stop``, the next ``hurry``."""

    def __init__(self) -> None:
        self.stop, self.hurry = asyncio.Event(), asyncio.Event()

    def came(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()


@contextlib.contextmanager
def _signals() -> Iterator[_Signals]:
    signals, loop = _Signals(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.came)
    try:
        yield signals
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _first(task: asyncio.Task[None], event: asyncio.Event, timeout_s: float | None = None) -> None:
    """Return when the task is done, the event set, or the time is up."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait([task, waiting], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


async def _keep_asking(client: AsyncClient, screen: _Screen) -> None:
    while True:
        try:
            screen.status = await client.status(timeout_s=2 * STATUS_S)
        except KvkinError as error:
            screen.status, screen.note = None, str(error)
        await asyncio.sleep(STATUS_S)


class _Screen:
    """What the user sees: a live table, or lines."""

    def __init__(self, cluster: ClusterProcesses, *, live: bool) -> None:
        self.status: StatusReply | None = None
        self.note = "starting"
        self.shows_ends = False
        """Whether a death is shown with the end of the node's log: while the cluster starts, the error that ends it has that."""
        self._cluster = cluster
        self._console = Console(highlight=False, soft_wrap=not live)
        self._live = Live(console=self._console, auto_refresh=False, transient=False) if live else None
        self.every_s = STATUS_S if live else LINE_EVERY_S

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        if self._live is None:
            yield
            return
        with self._live:
            yield

    def changed(self, node: NodeProcess) -> None:
        """A node's process has a new state."""
        if self._live is None:
            how = node.ended if node.state is NodeState.DIED else node.state.value
            where = f" (pid {node.pid}, log {node.log_path})" if node.state is NodeState.STARTING else ""
            self._console.print(f"{node.name} {how}{where}", markup=False)
        if node.state is NodeState.DIED and self.shows_ends:
            self._console.print(f"the end of {node.log_path}:\n{node.log_tail(5)}", markup=False)
        self.refresh()

    def say(self, note: str) -> None:
        self.note = note
        if self._live is None:
            self._console.print(note, markup=False)
        self.refresh()

    def refresh(self) -> None:
        if self._live is not None:
            self._live.update(up_view(self._cluster.nodes, self.status, self.note), refresh=True)
