"""``kvkin demo``: the SmolLM2 family on a cluster of this machine, a scripted agent workload, and what reuse did for it.

Parent process without torch: starts the nodes of the local cluster file on free ports, sends ``demo_workload.py`` through the
ZeroMQ client, stops the cluster, has ``demo_reference.py`` repeat every request with plain transformers, prints one table and
writes ``.kvkin/demo.json``. Exits 1 if any request got another plan than it states, or other tokens than the reference.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import tyro
from rich.console import Console

import kvkin.configs
from kvkin.configs.families import ResolvedCluster, resolve_cluster
from kvkin.configs.loader import load_cluster, show_cluster
from kvkin.configs.schema import ClusterConfig, FamilyConfig, local_path
from kvkin.configs.vllm_install import check_installed
from kvkin.configs.vllm_rules import on_reference
from kvkin.kv.errors import ConfigError
from kvkin.tools.cluster_processes import ClusterProcesses
from kvkin.tools.demo_view import record_view, summary, table
from kvkin.tools.demo_workload import Names, Record, Step, run_workload, workload
from kvkin.tools.local import status_until
from kvkin.tools.memory import PeakMemory
from kvkin.tools.ports import free_ports
from kvkin.tools.prepare import prepare_missing
from kvkin.tools.router_address import DEFAULT_CONFIG
from kvkin.tools.shared_cores import SHARED_CORES
from kvkin.tools.start_view import SlowLines, narrate
from kvkin.transport.client import AsyncClient

EXIT_FAILED = 1
# A mismatch counts only where the reference itself is decided: at a gap below this, rounding chooses the token.
TIE = 1e-3
# Beside the default cluster file: the same cluster on vLLM.
VLLM_CONFIG = "local-vllm.yaml"
REFERENCE_S = 600.0
SCREEN_EVERY_S = 0.5


@dataclass(frozen=True)
class Demo:
    """Prepare the SmolLM2 family, run an agent workload on a cluster of this machine, and show what each request reused.

    Every request states the plan that it expects and is followed by a private run of the same prompt on the same node. Ends by
    itself, leaves nothing running, writes .kvkin/demo.json.
    """

    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Cluster file of the family; default: local.yaml of configs/clusters, or local-vllm.yaml with --engine vllm. Its ports are
    replaced by free ones."""

    engine: Literal["reference", "vllm"] | None = None
    """Run all nodes on this engine; default: as the cluster file says."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Where the report goes; default: demo.json in the cluster file's state_dir."""

    def run(self) -> int:
        config = demo_config(self.config, self.engine)
        check_installed(config, list(config.nodes))
        prepare_missing(config)
        return asyncio.run(run_demo(config, workload(Names()), Names(), self.out or config.state_path / "demo.json"))


async def run_demo(config: ClusterConfig, steps: list[Step], names: Names, out: Path) -> int:
    """The whole demo on ``config``. Returns the exit code."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    _family_name(config, names)
    folder = config.state_path / "demo"
    file = folder / "cluster.yaml"
    _write(file, show_cluster(config))
    # what cannot work is said before processes are started, and checkpoints are digested once instead of in each of them
    resolved = await asyncio.to_thread(resolve_cluster, config)
    cluster = ClusterProcesses(file, config, log_dir=folder / "logs")
    began, memory = time.monotonic(), PeakMemory()
    with _activity(console, "starting a router, a prefill node and three decode nodes") as say:
        async with memory.watching(), _running(cluster, say):
            started_s = time.monotonic() - began
            console.print(f"cluster up in {started_s:.1f} s; logs in {folder / 'logs'}")
            records = await _workload(config, steps, names, cluster, console, say)
            workload_s = time.monotonic() - began - started_s
            say("stopping the cluster")
        say("repeating every request with plain transformers in a process of its own")
        await _compare(resolved, names, records, folder, say)
    times = {"start_s": started_s, "workload_s": workload_s, "total_s": time.monotonic() - began}
    failures = [f"{record.step.name}: {problem}" for record in records for problem in record.problems]
    report: dict[str, Any] = {
        "requests": [record.as_json() for record in records],
        "failures": failures,
        "peak_memory_bytes": memory.peak_bytes,
        **{name: round(value, 2) for name, value in times.items()},
    }
    _write(out, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    console.print(table(records))
    console.print(summary(records, memory.peak_bytes, times, out))
    for failure in failures:
        console.print(f"demo failed: {failure}", style="bold red", markup=False)
    return EXIT_FAILED if failures else 0


@contextlib.asynccontextmanager
async def _running(cluster: ClusterProcesses, say: Callable[[str], None]) -> AsyncIterator[None]:
    telling = asyncio.create_task(narrate(cluster.nodes.values(), say, SCREEN_EVERY_S))
    try:
        await cluster.start()
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
    say("all nodes serve")
    try:
        yield
    finally:
        await cluster.stop()


async def _workload(
    config: ClusterConfig,
    steps: list[Step],
    names: Names,
    cluster: ClusterProcesses,
    console: Console,
    say: Callable[[str], None],
) -> list[Record]:
    router = next(iter(config.routers.values()))
    family = config.families[_family_name(config, names)]
    workers = {name for name, node in cluster.nodes.items() if node.role != "router"}
    async with AsyncClient(f"tcp://{router.host}:{router.client_port}") as client:
        await status_until(client.status, lambda status: {node.name for node in status.nodes} >= workers, 30.0)
        return await run_workload(
            client,
            steps,
            names,
            family.block_size,
            lambda number, step: say(f"{number}/{len(steps)} {step.title}"),
            lambda number, record: console.print(record_view(number, record)),
        )


async def _compare(
    resolved: ResolvedCluster, names: Names, records: list[Record], folder: Path, say: Callable[[str], None]
) -> None:
    """Have a plain transformers process answer the same requests, and note every difference in the records."""
    spec_file, out_file = folder / "reference.json", folder / "reference_answers.json"
    _write(spec_file, json.dumps(reference_spec(resolved, names, records)))
    out_file.unlink(missing_ok=True)
    problem = await _run_reference(spec_file, out_file, len(records), say)
    if problem:
        for record in records:
            record.problems.append(problem)
        return
    for record, answer in zip(records, json.loads(out_file.read_text(encoding="utf-8")), strict=True):
        compare(record, answer)


async def _run_reference(spec_file: Path, out_file: Path, count: int, say: Callable[[str], None]) -> str:
    """Run the child to its end; returns what went wrong, or nothing."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvkin.tools.demo_reference", str(spec_file), str(out_file)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**SHARED_CORES, **os.environ},
    )
    assert child.stdout is not None
    assert child.stderr is not None
    reading = asyncio.create_task(child.stderr.read())
    try:
        async with asyncio.timeout(REFERENCE_S):
            async for line in child.stdout:
                say(f"plain transformers: {line.decode().strip()} of {count} requests repeated")
            code = await child.wait()
    except TimeoutError:
        return f"the reference process was not done after {REFERENCE_S:g} s"
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
        errors = (await reading).decode(errors="replace").strip().splitlines()
    return f"the reference process failed: {errors[-1] if errors else code}" if code else ""


def compare(record: Record, reference: dict[str, Any]) -> None:
    """Fill in ``same_as_reference``; a difference is a problem unless rounding decides between two equal logits."""
    tokens, expected = list(record.answer.token_ids), reference["tokens"]
    record.same_as_reference = tokens == expected
    if reference["prompt_tokens"] != record.answer.usage.prompt_tokens:
        record.problems.append(
            f"prompt of {record.answer.usage.prompt_tokens} tokens, the reference's has {reference['prompt_tokens']}"
        )
    elif not record.same_as_reference:
        pairs = enumerate(zip(tokens, expected, strict=False))
        first = next((index for index, (mine, theirs) in pairs if mine != theirs), min(len(tokens), len(expected)))
        gap = reference["gaps"][first] if first < len(reference["gaps"]) else float("inf")
        if gap >= TIE:
            record.problems.append(f"token {first} differs from plain transformers' (gap of its logits: {gap:.4f})")


def reference_spec(resolved: ResolvedCluster, names: Names, records: list[Record]) -> dict[str, Any]:
    """Everything that the reference process needs, in plain data: it knows nothing of kvkin."""
    family = resolved.families[_family_name(resolved.config, names)]
    holds = {name: node.models[0] for name, node in resolved.config.prefill_nodes.items()}
    holds |= {name: node.models[0] for name, node in resolved.config.decode_nodes.items()}
    requests = []
    for record in records:
        segments = [
            {
                "start": segment.start,
                "stop": segment.stop,
                "kind": segment.kind.value if segment.sources else "computed",
                "group": None if segment.group is None else list(segment.group),
                "holder": holds[segment.sources[0]] if segment.sources else "",
            }
            for segment in record.answer.report.segments
        ]
        requests.append(
            {
                "model": record.step.model,
                "messages": record.messages if record.step.chat else None,
                "prompt": record.step.text,
                "max_tokens": record.step.max_tokens,
                "eos": sorted(family.models[record.step.model].eos_ids),
                "quality": record.answer.report.quality.value,
                "segments": segments,
            }
        )
    models = {
        name: {"checkpoint": str(model.path), "adapter": str(model.adapter_path or "")}
        for name, model in family.models.items()
    }
    return {"tokenizer": str(family.tokenizer_path), "models": models, "requests": requests}


def demo_config(file: Path | None, engine: Literal["reference", "vllm"] | None = None) -> ClusterConfig:
    """The cluster of ``file`` (default: the local one) on free ports, all of it on ``engine`` if that is given. An installed kvkin
    brings file and adapters along."""
    shipped = Path(kvkin.configs.__file__).parent
    if file is None:
        file = DEFAULT_CONFIG.with_name(VLLM_CONFIG) if engine == "vllm" else DEFAULT_CONFIG
        file = file if file.exists() else shipped / "clusters" / file.name
    config = load_cluster(file)
    if engine is not None:
        config = _on_engine(config, engine)
    nodes = dict(config.nodes)
    for name, router in config.routers.items():
        client_port, node_port = free_ports(2)
        nodes[name] = msgspec.structs.replace(router, client_port=client_port, node_port=node_port)
    for name, worker in (config.prefill_nodes | config.decode_nodes).items():
        nodes[name] = msgspec.structs.replace(worker, port=0)
    families = {name: _find_adapters(family, shipped) for name, family in config.families.items()}
    return msgspec.structs.replace(config, nodes=nodes, families=families)


def _on_engine(config: ClusterConfig, engine: Literal["reference", "vllm"]) -> ClusterConfig:
    if engine == "reference":
        return on_reference(config)
    workers = config.prefill_nodes | config.decode_nodes
    nodes = config.nodes | {name: msgspec.structs.replace(node, engine=None) for name, node in workers.items()}
    families = {name: msgspec.structs.replace(family, engine=engine) for name, family in config.families.items()}
    return msgspec.structs.replace(config, nodes=nodes, families=families)


def _find_adapters(family: FamilyConfig, shipped: Path) -> FamilyConfig:
    models = {}
    for name, model in family.models.items():
        models[name] = model
        if model.adapter is not None and not local_path(model.adapter).exists():
            inside = shipped.parent / model.adapter
            if inside.exists():
                models[name] = msgspec.structs.replace(model, adapter=str(inside))
    return msgspec.structs.replace(family, models=models)


def _family_name(config: ClusterConfig, names: Names) -> str:
    family = config.family_of(names.base)
    if family is None:
        raise ConfigError("families", f"no family has the model {names.base}", "the demo's cluster file")
    return family


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _activity(console: Console, first: str) -> Iterator[Callable[[str], None]]:
    """What is being done right now: a spinner on a terminal, elsewhere a line now and then."""
    if not sys.stdout.isatty():
        yield SlowLines(lambda text: console.print(text, markup=False))
        return
    with console.status(first) as status:
        yield status.update
