"""``LocalCluster``: router, prefill and decode nodes of a cluster file in one process and one event loop.

The same nodes as everywhere, over real loopback sockets for the control plane and the ``inproc`` backend for KV, on ports of
its own: it runs beside a cluster of the same file. ``kvkin ask --local`` and tests use it; engines run on threads. vLLM wants a
process for each engine, so its nodes run on the reference engine here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection
from types import TracebackType
from typing import Self

import msgspec
import structlog

from kvkin.configs.families import ResolvedCluster, resolve_cluster
from kvkin.configs.schema import ClusterConfig, NodeConfig, RouterNode, WorkerNode
from kvkin.configs.vllm_rules import on_reference, vllm_nodes
from kvkin.kv.errors import ConfigError, NodeUnavailable, UnknownModel
from kvkin.router.configured import settings_from
from kvkin.router.node import RouterNode as RouterServer
from kvkin.tools.roles import build_engine, build_worker, worker_settings
from kvkin.transport.client import AsyncClient
from kvkin.transport.messages import StatusReply

log = structlog.get_logger()

POLL_S = 0.02


class LocalCluster:
    """Use as ``async with``. ``models`` limits which decode nodes are built; their families' prefill nodes always are."""

    def __init__(self, config: ClusterConfig, models: Collection[str] | None = None) -> None:
        if moved := vllm_nodes(config):
            log.info("on the reference engine in this process", nodes=moved)
        config = on_reference(config)
        self.config = msgspec.structs.replace(
            config,
            nodes={name: _on_any_port(node) for name, node in config.nodes.items()},
            transport=msgspec.structs.replace(config.transport, backend="inproc", insecure=False),
        )
        self.workers = _workers(self.config, models)
        self._stop = asyncio.Event()
        self._exits = contextlib.AsyncExitStack()
        self._serving: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Load weights and return once every node is registered. Raises ConfigError."""
        try:
            resolved = await asyncio.to_thread(resolve_cluster, self.config)
            name = next(iter(self.config.routers))
            settings = settings_from(resolved, name)
            settings = msgspec.structs.replace(
                settings,
                client_address="tcp://127.0.0.1:0",
                node_address="tcp://127.0.0.1:0",
                # it ends with its last answer, and must not rewrite what the real router of this name has switched off
                drift=msgspec.structs.replace(settings.drift, share=0.0),
            )
            self.router = await self._exits.enter_async_context(RouterServer(settings))
            for worker in self.workers:
                await self._start_worker(resolved, worker)
            self.client = await self._exits.enter_async_context(AsyncClient(self.router.client_address))
            await self.until(self._complete)
        except BaseException:
            await self.close()
            raise

    async def _start_worker(self, resolved: ResolvedCluster, name: str) -> None:
        node = self.config.nodes[name]
        assert isinstance(node, WorkerNode)
        family = resolved.family_of(node.models[0])
        assert family is not None, "the loader checks that node models exist"
        engine = await asyncio.to_thread(build_engine, family, node.models)
        settings = worker_settings(self.config, family, name)
        worker = build_worker(msgspec.structs.replace(settings, routers=(self.router.node_address,)), engine)
        self._serving.append(asyncio.create_task(worker.serve(self._stop), name=name))

    def _complete(self, status: StatusReply) -> bool:
        for task in self._serving:
            if task.done():
                task.result()  # raises what ended the node
                raise NodeUnavailable(f"{task.get_name()} ended while starting")
        return {node.name for node in status.nodes} >= set(self.workers)

    async def until(self, condition: Callable[[StatusReply], bool], timeout_s: float = 60.0) -> StatusReply:
        """The first ``status`` for which ``condition`` holds. Raises NodeUnavailable after ``timeout_s``."""
        return await status_until(self.client.status, condition, timeout_s)

    async def close(self) -> None:
        """End nodes, then router. Idempotent."""
        self._stop.set()
        results = await asyncio.gather(*self._serving, return_exceptions=True)
        await self._exits.aclose()
        for task, result in zip(self._serving, results, strict=True):
            if isinstance(result, Exception):
                log.error("node ended badly", node=task.get_name(), error=repr(result))
        self._serving = []

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


async def status_until(
    ask: Callable[[], Awaitable[StatusReply]], condition: Callable[[StatusReply], bool], timeout_s: float
) -> StatusReply:
    """Ask for the router's status until ``condition`` holds. Raises NodeUnavailable after ``timeout_s``."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        status = await ask()
        if condition(status):
            return status
        if loop.time() > deadline:
            seen = ", ".join(f"{node.name} {node.state}, {node.holdings} blocks" for node in status.nodes)
            raise NodeUnavailable(f"the cluster did not get ready within {timeout_s:g} s ({seen})")
        await asyncio.sleep(POLL_S)


def _on_any_port(node: NodeConfig) -> NodeConfig:
    if isinstance(node, RouterNode):
        return node  # its addresses are replaced as a whole
    return msgspec.structs.replace(node, host="127.0.0.1", bind=None, port=0)


def _workers(config: ClusterConfig, models: Collection[str] | None) -> list[str]:
    """Decode nodes for ``models`` (one each is enough), and the prefill nodes of their families."""
    known = [model for family in config.families.values() for model in family.models]
    if models is None:
        return [*config.prefill_nodes, *config.decode_nodes]
    decoders: list[str] = []
    for model in models:
        if model not in known:
            raise UnknownModel(f"no model {model!r} in this cluster; it has {', '.join(known)}")
        name = next((name for name, node in config.decode_nodes.items() if model in node.models), None)
        if name is None:
            raise ConfigError("nodes", f"no decode node serves {model}", "a decode node with this model")
        decoders.append(name)
    families = {config.family_of(model) for model in models}
    prefill = [name for name, node in config.prefill_nodes.items() if config.family_of(node.models[0]) in families]
    return list(dict.fromkeys([*prefill, *decoders]))
