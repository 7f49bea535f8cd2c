"""A cluster of real processes for failure tests: killed, frozen, restarted, looked at from outside, and never left behind.

The processes are ``kvkin`` roles of a cluster file on free ports; everything is asked of them through the client, and what they
use is read from the kernel (descriptors, threads, bytes through sockets).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
import yaml
from tiny_cluster import BASE, FULL, UPPER, make_family

from kvkin.configs.loader import load_cluster
from kvkin.tools.cluster_processes import ClusterProcesses, NodeState
from kvkin.tools.ports import check_ports, free_ports
from kvkin.transport.client import Client, SyncStream
from kvkin.transport.messages import Finished, NodeLoad, NodeStatus, Sampling, StatusReply

BLOCK = 16
ROUTER, PREFILL = "router-0", "prefill-0"
ON_BASE, ON_FULL, SPARE = "decode-base", "decode-full", "decode-spare"
WAIT_S = 60.0
# Prompts of this many tokens are prefilled in a hundred chunks, so that there is a middle to act in.
LONG = 1600
# A process may hold so many more without a leak: a connection that is just being torn down, the last worker of a pool.
MORE_DESCRIPTORS, MORE_THREADS = 2, 1
# What a link to one more holder may cost: its sockets, and workers of the event loop's pool that nothing had asked for yet.
LINK_DESCRIPTORS, LINK_THREADS = 25, min(32, (os.cpu_count() or 1) + 4)


def write_cluster(folder: Path, backend: str) -> Path:
    """A cluster file: one node for the base, two that serve the same fine-tune, one prefill node."""
    family = make_family(folder)
    family["tiny"]["chunk_tokens"] = BLOCK
    client_port, node_port = free_ports(2)
    small = {"kv_bytes": "24MiB", "e_bytes": "24MiB", "threads": 1, "port": 0, "max_running": 2}
    nodes: dict[str, Any] = {
        ROUTER: {"role": "router", "client_port": client_port, "node_port": node_port},
        PREFILL: {"role": "prefill", "models": [BASE], **{k: v for k, v in small.items() if k != "max_running"}},
        ON_BASE: {"role": "decode", "models": [BASE], **small},
        ON_FULL: {"role": "decode", "models": [FULL], **small},
        SPARE: {"role": "decode", "models": [FULL, UPPER], **small},
    }
    cluster = {
        "state_dir": str(folder / "state"),
        "families": family,
        "nodes": nodes,
        # what is queued counts for nothing, so that an order that was announced is always worth waiting for
        "router": {"policy": {"bypass_tokens": 0, "min_reuse_tokens": 16}, "load_half_life_s": 1e-6},
        # nothing runs but what a test asks for
        "drift": {"share": 0},
        "timeouts": {
            "heartbeat_s": 0.1,
            "node_dead_s": 5,
            "lease_s": 3,
            "lease_grace_s": 1,
            "order_s": 60,
            "drain_s": 10,
            "start_s": 170,
        },
        "transport": {"backend": backend},
    }
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster, sort_keys=False))
    return file


def prompt(seed: int, num_tokens: int = LONG) -> tuple[int, ...]:
    """Token ids that no other seed begins with."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(int(token) for token in torch.randint(3, 256, (num_tokens,), generator=generator))


class Used(msgspec.Struct, frozen=True):
    """What a process holds of the system."""

    descriptors: int
    threads: int
    links: int
    """Connections to stream sockets of other nodes."""


class LiveCluster:
    """Use through :func:`live_cluster`."""

    def __init__(self, file: Path) -> None:
        self.config = load_cluster(file)
        self.processes = ClusterProcesses(file, self.config, log_dir=file.parent / "logs")
        router = self.config.routers[ROUTER]
        self.client_address = f"tcp://{router.host}:{router.client_port}"
        self.node_address = f"tcp://{router.host}:{router.node_port}"
        self.client = self.new_client()
        self._frozen: set[str] = set()
        self._expected: dict[tuple[str, tuple[int, ...], int], tuple[int, ...]] = {}

    def new_client(self) -> Client:
        """A client that notices within a few seconds what happened to its router."""
        return Client(self.client_address, ping_s=0.3, silence_s=15.0)

    # --- what is done to it --------------------------------------------------------------------------------------------

    def pid(self, name: str) -> int:
        pid = self.processes.nodes[name].pid
        assert pid is not None
        return pid

    def kill(self, name: str) -> None:
        """SIGKILL, and the end of the process."""
        process = self.processes.nodes[name].process
        assert process is not None
        process.kill()
        process.wait(10)
        self._frozen.discard(name)
        self.processes.check()

    def freeze(self, *names: str) -> None:
        for name in names:
            psutil.Process(self.pid(name)).suspend()
            self._frozen.add(name)

    def thaw(self) -> None:
        for name in self._frozen:
            psutil.Process(self.pid(name)).resume()
        self._frozen.clear()

    def dead(self) -> list[str]:
        self.processes.check()
        return [name for name, node in self.processes.nodes.items() if node.state is NodeState.DIED]

    def restart(self, *names: str) -> None:
        """Start killed nodes again under their names, and return once the router knows them."""
        for name in names:
            self.processes.restart(name)
        nodes = [self.processes.nodes[name] for name in names]
        deadline = time.monotonic() + self.config.timeouts.start_s
        while any(node.state is not NodeState.SERVING for node in nodes):
            assert time.monotonic() < deadline, names
            for node in self.processes.check():
                assert node.state is not NodeState.DIED, node.log_tail()
            threading.Event().wait(0.02)
        self.until(lambda status: self.all_alive(status), "registered nodes")

    def stop(self) -> None:
        self.thaw()
        self.client.close()
        asyncio.run(self.processes.stop())

    # --- what it says ----------------------------------------------------------------------------------------------------

    def until(self, condition: Callable[[StatusReply], Any], what: str, limit_s: float = WAIT_S) -> StatusReply:
        """The first status for which ``condition`` holds."""
        deadline = time.monotonic() + limit_s
        while not condition(status := self.client.status()):
            assert time.monotonic() < deadline, f"no {what} within {limit_s:g} s: {status}"
        return status

    def node(self, name: str, status: StatusReply | None = None) -> NodeStatus:
        return next(node for node in (status or self.client.status()).nodes if node.name == name)

    def load(self, name: str, status: StatusReply | None = None) -> NodeLoad:
        return self.node(name, status).load

    def all_alive(self, status: StatusReply) -> bool:
        return {node.name for node in status.nodes if node.state == "alive"} == set(self.config.nodes) - {ROUTER}

    def settled(self) -> StatusReply:
        """Once nothing runs any more: nothing is leased, quarantined or held that nobody could be offered."""
        return self.until(lambda status: not leftovers(status), "end of everything that ran")

    def used(self) -> dict[str, Used]:
        """What each living process holds, by name and pid."""
        found = {}
        nodes = [node for node in self.processes.nodes.values() if node.running]
        ports = {int(node.address.rsplit(":", 1)[1]) for node in nodes if node.role != "router"}
        for node in nodes:
            process = psutil.Process(node.pid)
            remote = [one.raddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED]
            links = sum(port in ports for port in remote)
            found[f"{node.name} {node.pid}"] = Used(process.num_fds(), process.num_threads(), links)
        return found

    def back_to(self, before: dict[str, Used], limit_s: float = 30.0) -> None:
        """Wait until every process that lived before holds no more than it did."""
        deadline = time.monotonic() + limit_s
        while leaks := _more(before, self.used()):
            assert time.monotonic() < deadline, f"held more than before: {leaks}"
            self.client.status()

    # --- requests --------------------------------------------------------------------------------------------------------

    def ask(self, model: str, ids: Sequence[int], max_tokens: int = 4, **how: Any) -> Finished:
        return self.client.generate(model, token_ids=ids, sampling=greedy(max_tokens), timeout_s=WAIT_S, **how)

    def expected(self, model: str, ids: tuple[int, ...], max_tokens: int = 4) -> tuple[int, ...]:
        """The tokens of an undisturbed private run that leaves nothing behind."""
        key = (model, ids, max_tokens)
        if key not in self._expected:
            self._expected[key] = self.ask(model, ids, max_tokens, reuse="off", publish=False).token_ids
        return self._expected[key]

    def order(self, ids: tuple[int, ...]) -> None:
        """Have the prefill node begin with a long context: a fine-tune's agent says that others will follow, and leaves."""
        orders = self.client.status().counters.get("orders", 0)
        how = {"token_ids": ids, "sampling": greedy(4), "reuse": "exact", "share_hint": 8.0}
        with self.client.stream(FULL, **how):
            self.until(lambda status: status.counters.get("orders", 0) > orders, "order")

    @contextlib.contextmanager
    def halfway(self, seed: int, consumers: int = 1) -> Iterator[tuple[tuple[int, ...], list[SyncStream]]]:
        """A live order with answers that pull from it, and the prefill node frozen for certain in the middle of it.

        Whether it was in the middle is known once it is frozen; a context that was done by then is followed by another one.
        """
        how = {"reuse": "exact", "sampling": greedy(4)}
        for attempt in range(10):
            ids = prompt(100 * seed + attempt)
            with contextlib.ExitStack() as stack:
                # frozen meanwhile, so that it begins when everybody is there
                self.freeze(PREFILL)
                self.order(ids)
                before = self.planned("shared-prefix")
                streams = [
                    stack.enter_context(self.client.stream(UPPER, token_ids=ids, **how)) for _ in range(consumers)
                ]
                self.until(lambda s, all_=before + consumers: self.planned("shared-prefix", s) >= all_, "plans")
                self.thaw()
                self.until(lambda s: not s.counters["orders_open"] or self._pulled_by(consumers, s), "pulls")
                self.freeze(PREFILL)
                if self.client.status().running and self.client.status().counters["orders_open"]:
                    yield ids, streams
                    return
                self.thaw()
                for stream in streams:
                    stream.finish()
        raise AssertionError("no order was caught while it ran")

    def planned(self, kind: str, status: StatusReply | None = None) -> int:
        """How many plans of a kind there were so far."""
        return (status or self.client.status()).counters.get(f"plan_{kind}", 0)

    def _pulled_by(self, consumers: int, status: StatusReply) -> bool:
        load = self.load(PREFILL, status)
        return load.running == 1 and load.leases == consumers


def greedy(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens, ignore_eos=True)


def leftovers(status: StatusReply) -> list[str]:
    """Everything in a status that should not be there when no request runs."""
    found = [] if not status.running else [f"{status.running} requests in the router"]
    found += [f"{status.counters['orders_open']} orders"] if status.counters["orders_open"] else []
    for node in status.nodes:
        load = node.load
        if node.state != "alive":
            found.append(f"{node.name} is {node.state}")
        for what in ("running", "waiting", "leases", "quarantined_bytes"):
            if getattr(load, what):
                found.append(f"{node.name}: {what} {getattr(load, what)}")
        if load.kv_slots_used != node.holdings:
            found.append(f"{node.name}: {load.kv_slots_used} slots for {node.holdings} blocks")
    return found


def _more(before: dict[str, Used], now: dict[str, Used]) -> list[str]:
    """Processes that hold more than before; a link to one more living holder is no leak, one to a dead holder is."""
    found = []
    for key in before.keys() & now.keys():
        was, has = before[key], now[key]
        links = max(0, has.links - was.links)
        descriptors = was.descriptors + MORE_DESCRIPTORS + LINK_DESCRIPTORS * links
        threads = was.threads + MORE_THREADS + LINK_THREADS * bool(links)
        if has.descriptors > descriptors or has.threads > threads:
            found.append(f"{key}: {was} -> {has}")
    return found


@contextlib.contextmanager
def live_cluster(folder: Path, backend: str, file: Path | None = None) -> Iterator[LiveCluster]:
    """All processes of a cluster (``file``, or the usual one); at the end they stop by themselves, or the test fails."""
    cluster = LiveCluster(file or write_cluster(folder, backend))
    pids: list[int] = []
    try:
        asyncio.run(cluster.processes.start())
        cluster.until(cluster.all_alive, "registered nodes")
        yield cluster
        pids = [cluster.pid(name) for name in cluster.processes.nodes]
    finally:
        cluster.stop()
    ends = {node.name: node.ended for node in cluster.processes.nodes.values()}
    assert set(ends.values()) == {"ended with exit code 0"}, ends
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    check_ports(cluster.config, cluster.config.nodes)


@contextlib.contextmanager
def bystander(cluster: LiveCluster, model: str, ids: tuple[int, ...], max_tokens: int = 40) -> Iterator[None]:
    """Somebody who asks the same again and again meanwhile; every answer must be the one of an undisturbed run."""
    expected, wrong = cluster.expected(model, ids, max_tokens), list[str]()
    over, once = threading.Event(), threading.Event()

    def work() -> None:
        with cluster.new_client() as client:
            while not over.is_set():
                try:
                    sampling = greedy(max_tokens)
                    answer = client.generate(
                        model, token_ids=ids, sampling=sampling, reuse="off", publish=False, timeout_s=WAIT_S
                    )
                    if answer.token_ids != expected:
                        wrong.append(f"{answer.token_ids} instead of {expected}")
                except Exception as error:  # noqa: BLE001 - any error is what the test is about
                    wrong.append(repr(error))
                once.set()
                if wrong:
                    return

    thread = threading.Thread(target=work, name="bystander")
    thread.start()
    try:
        assert once.wait(WAIT_S)
        yield
    finally:
        over.set()
        thread.join(WAIT_S + 10)
    assert not wrong, wrong
