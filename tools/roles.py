"""Starting one role: ``kvkin router|prefill|decode --config F --node NAME``. The launch scripts of real hosts call these, too.

Each role is one process: it reads the cluster file, resolves what it needs of it, loads its weights, serves until SIGINT or
SIGTERM, and exits 0. A configuration that cannot be used ends it with exit code 2 and one line that says why. A router needs
no torch and no weights, so engines and nodes are imported by the workers only.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, overload

import structlog
import tyro
import uvloop

from kvkin.configs.families import ResolvedFamily, resolve_cluster, resolve_family
from kvkin.configs.loader import load_cluster
from kvkin.configs.schema import ClusterConfig, DecodeNode, PrefillNode, RouterNode
from kvkin.configs.vllm_node import VllmNode, vllm_node
from kvkin.decode_nodes.drift_records import FOLDER
from kvkin.kv.errors import ConfigError
from kvkin.transport.node_runtime import CheckSettings, NodeSettings, stop_on_signals, write_ready_file
from kvkin.transport.node_settings import node_settings

if TYPE_CHECKING:
    from kvkin.decode_nodes.node import DecodeNode as DecodeServer
    from kvkin.engines.api import Engine
    from kvkin.engines.reference import ReferenceEngine
    from kvkin.prefill_nodes.node import PrefillNode as PrefillServer
    from kvkin.router.node import RouterNode as RouterServer
    from kvkin.transport.data_plane import Transport

log = structlog.get_logger()

Worker = PrefillNode | DecodeNode


def worker_settings(config: ClusterConfig, family: ResolvedFamily, name: str) -> NodeSettings:
    """Everything that the worker ``name`` needs to know of the cluster."""
    node = config.nodes[name]
    assert isinstance(node, Worker)
    drift = config.drift
    checks = CheckSettings(
        idle_s=drift.idle_s,
        max_pending=drift.max_pending,
        record=config.state_path / FOLDER if drift.record else None,
        record_bytes=drift.record_bytes,
    )
    return node_settings(config, family, name, checks)


@overload
def build_engine(family: ResolvedFamily, models: tuple[str, ...]) -> ReferenceEngine: ...


@overload
def build_engine(family: ResolvedFamily, models: tuple[str, ...], vllm: VllmNode | None) -> Engine: ...


def build_engine(family: ResolvedFamily, models: tuple[str, ...], vllm: VllmNode | None = None) -> Engine:
    """Load ``models`` and start an engine on them: vLLM with the settings of ``vllm``, or the reference engine."""
    if vllm is not None:
        from kvkin.tools.vllm_engine import build_vllm

        return build_vllm(family, models, vllm)
    from transformers.utils.logging import disable_progress_bar

    from kvkin.engines.loading import load_model
    from kvkin.engines.reference import ReferenceEngine

    disable_progress_bar()  # "loading" says it; a bar is noise in a log file
    loaded = {}
    for name in models:
        identity = family.models[name]
        log.info("loading", model=name, path=str(identity.path), adapter=str(identity.adapter_path or ""))
        loaded[name] = load_model(
            identity.path,
            identity.adapter_path,
            device=family.device,
            compute_dtype=family.compute_dtype,
            eos=frozenset(identity.eos_ids),
        )
    size = family.layout.block_size
    return ReferenceEngine(loaded, block_size=size, chunk_tokens=family.config.chunk_tokens)


def build_worker(
    settings: NodeSettings, engine: Engine, transport: Transport | None = None
) -> PrefillServer | DecodeServer:
    """The node that ``settings`` describe, on the running event loop."""
    if settings.role == "prefill":
        from kvkin.prefill_nodes.node import PrefillNode as PrefillServer

        return PrefillServer(settings, engine, transport)
    from kvkin.decode_nodes.node import DecodeNode as DecodeServer

    return DecodeServer(settings, engine, transport)


def resolve_worker(config: ClusterConfig, name: str) -> ResolvedFamily:
    """The family of the worker ``name``, with only the models that it runs digested."""
    node = config.nodes[name]
    assert isinstance(node, Worker)
    family = config.family_of(node.models[0])
    assert family is not None, "the loader checks that node models exist"
    return resolve_family(config, family, models=node.models)


@dataclass(frozen=True)
class _Role:
    """Start one node of the cluster and serve until Ctrl-C or SIGTERM."""

    config: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """The cluster file, the same on every host."""
    node: Annotated[str, tyro.conf.arg(metavar="NAME")]
    """Name of the node in the cluster file."""
    ready_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Written once the node serves; for scripts that wait for it."""

    def load(self, kind: type, role: str) -> ClusterConfig:
        config = load_cluster(self.config)
        node = config.nodes.get(self.node)
        if not isinstance(node, kind):
            names = ", ".join(name for name, each in config.nodes.items() if isinstance(each, kind))
            raise ConfigError(f"nodes.{self.node}", f"{self.config} has no {role} of this name", names or "none")
        return config


@dataclass(frozen=True)
class Router(_Role):
    """Start a router: it takes the clients' requests, chooses a plan for each, and hands them to the decode nodes."""

    def run(self) -> int:
        from kvkin.router.configured import settings_from
        from kvkin.router.node import serve_router

        config = self.load(RouterNode, "router")

        def on_ready(router: RouterServer) -> None:
            write_ready_file(self.ready_file, router.client_address)

        serve_router(settings_from(resolve_cluster(config), self.node), on_ready)
        log.info("stopped", node=self.node)
        return 0


@dataclass(frozen=True)
class Prefill(_Role):
    """Start a prefill node: it computes shared contexts of its family and serves their KV layer by layer."""

    def run(self) -> int:
        return serve_worker(self.load(PrefillNode, "prefill node"), self.node, self.ready_file)


@dataclass(frozen=True)
class Decode(_Role):
    """Start a decode node: it executes reuse plans for its models, generates, and serves the KV of its own contexts."""

    def run(self) -> int:
        return serve_worker(self.load(DecodeNode, "decode node"), self.node, self.ready_file)


def serve_worker(config: ClusterConfig, name: str, ready_file: Path | None) -> int:
    """Load the weights of the worker ``name`` and serve until a signal. Returns the exit code."""
    node = config.nodes[name]
    assert isinstance(node, Worker)
    family = resolve_worker(config, name)
    vllm = vllm_node(config, family, name)
    if vllm is not None:
        from kvkin.tools.vllm_engine import prepare_environment

        prepare_environment(vllm)
    import torch  # reads the environment

    if node.threads:
        torch.set_num_threads(node.threads)
    settings = worker_settings(config, family, name)

    async def serve() -> int:
        stop = asyncio.Event()
        stop_on_signals(stop, name)
        engine = await _built_or_stopped(lambda: build_engine(family, node.models, vllm), stop, name)
        loop = asyncio.get_running_loop()
        engine.failure.add_done_callback(lambda _: loop.call_soon_threadsafe(stop.set))
        worker = build_worker(settings, engine)
        log.info("serving", node=name, streams=worker.runtime.source_address, backend=settings.backend)
        write_ready_file(ready_file, worker.runtime.source_address)
        await worker.serve(stop)
        if not engine.failure.done():
            return 0
        log.error("the engine failed", node=name, why=str(engine.failure.exception()))
        return 1

    code = uvloop.run(serve())
    log.info("stopped", node=name)
    # the collector's last look at all that torch and transformers consist of takes a second of CPU, for nothing
    gc.freeze()
    return code


async def _built_or_stopped(build: Callable[[], Engine], stop: asyncio.Event, name: str) -> Engine:
    """The engine. Ends the process if ``stop`` is set before: compiling cannot be interrupted, and nothing is held yet."""
    building = asyncio.ensure_future(asyncio.to_thread(build))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait([building, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not building.done():
        for rank in multiprocessing.active_children():
            rank.kill()  # by itself it would load its weights before it notices
        log.info("stopped", node=name, when="starting")
        os._exit(0)
    stopping.cancel()
    return building.result()
