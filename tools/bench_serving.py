"""``kvkin bench serving``: an open-loop load on a running cluster, with and without sharing on the same nodes in one run.

This process only asks (through the ZeroMQ client, like any user) and measures; with ``--start`` it also starts the cluster of
a file and stops it. The parts: options (``bench_serving_options.py``, ``bench_serving_plan.py``), workloads (``load_*.py``), one point (``load_runner.py``), the
sweep (``bench_serving_sweep.py``), figures, report and plots (``bench_serving_*.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import tyro
import uvloop
from rich.console import Console

from kvkin import __version__
from kvkin.configs.families import resolve_cluster
from kvkin.configs.loader import load_cluster, show_cluster
from kvkin.configs.schema import ClusterConfig
from kvkin.kv.errors import ConfigError, KvkinError
from kvkin.tools import bench_serving_report as reports
from kvkin.tools.bench_serving_options import Options
from kvkin.tools.bench_serving_plan import Checked, Plan, check_options, entries_of, plan_load
from kvkin.tools.bench_serving_plots import write_plots
from kvkin.tools.bench_serving_progress import Progress, stderr_console
from kvkin.tools.bench_serving_stats import RESAMPLES
from kvkin.tools.bench_serving_sweep import PointResult, Sweep, plan_points
from kvkin.tools.cluster_processes import ClusterProcesses, local_nodes
from kvkin.tools.demo import demo_config
from kvkin.tools.load_tokens import TokenSource
from kvkin.tools.local import status_until
from kvkin.tools.out_folder import check_out_folder
from kvkin.tools.plots import check_plots
from kvkin.tools.prepare import prepare_missing
from kvkin.tools.router_address import DEFAULT_CONFIG, reach, router_address
from kvkin.transport.client import AsyncClient
from kvkin.transport.messages import ModelEntry

EXIT_NOTHING, EXIT_INTERRUPTED = 1, 130
REGISTER_S = 30.0


@tyro.conf.configure(tyro.conf.OmitArgPrefixes)
@dataclass(frozen=True)
class BenchServing(Options):
    """Load a cluster at rising rates, with sharing and without, and report latencies, goodput and what was reused.

    Latencies count from each request's intended arrival. Ctrl-C reports the points that were completed.

    Example: kvkin bench serving --start --rates 0.5 1 2 --repeats 3 --slo-ttft 2 --out results
    """

    def run(self) -> int:
        checked = check_options(self)
        self.check_output()
        return uvloop.run(Bench(self, checked).run())

    def check_output(self) -> None:
        """ConfigError for a folder that cannot be used, or holds the results of another run, and for a lack of matplotlib."""
        out = self.output.out
        if out is None:
            _refuse_unless(not self.output.overwrite, "--overwrite", "given without --out", "both")
            return
        check_plots("or leave out --out")
        check_out_folder("--out", out)
        there = (out / reports.JSON_FILE).exists()
        _refuse_unless(
            self.output.overwrite or not there,
            "--out",
            f"{out} already holds {reports.JSON_FILE}",
            "--overwrite, or another folder",
        )


class Bench:
    """One call of the command, whose options are ``checked``."""

    def __init__(self, command: BenchServing, checked: Checked) -> None:
        self._command, self._checked = command, checked
        self._settings = checked.settings
        self._console = stderr_console()
        self._sweep: Sweep | None = None
        self._known: dict[str, Any] = {}

    @property
    def results(self) -> list[PointResult]:
        """Of the points that are complete."""
        return [] if self._sweep is None else self._sweep.results

    async def run(self) -> int:
        """Measure until it is done, fails or is interrupted; report what there is in each case. Returns the exit code."""
        interrupted, failure = False, None
        try:
            await _until_signal(self._measure())
        except asyncio.CancelledError:
            interrupted = True
        except KvkinError as error:
            failure = error
        if failure is not None and not self.results:
            raise failure
        # drawing takes seconds, and in tests the cluster lives in this loop
        await asyncio.to_thread(self._report, complete=not interrupted and failure is None)
        if failure is not None:
            raise failure
        if interrupted:
            return EXIT_INTERRUPTED
        return 0 if any(result.figures.counts.finished for result in self.results) else EXIT_NOTHING

    async def _measure(self) -> None:
        cluster = self._command.cluster
        if cluster.start:
            await self._measure_started(demo_config(cluster.config))
            return
        router = router_address(cluster.config, cluster.address)
        config = load_cluster(cluster.config or DEFAULT_CONFIG) if cluster.address is None else None
        async with AsyncClient(router.url) as client:
            known = await reach(client, router, "--start starts one for this run" if config is not None else "")
            await self._sweep_on(client, await self._plan(known, config))

    async def _measure_started(self, config: ClusterConfig) -> None:
        """On a cluster of child processes. What the file and its checkpoints tell is checked before they are started."""
        here = local_nodes(config)
        elsewhere = [name for name in config.nodes if name not in here]
        _refuse_unless(
            not elsewhere,
            "--start",
            f"not on this host: {', '.join(elsewhere)}",
            "a file of this host, or a running cluster",
        )
        check_out_folder("state_dir", config.state_path)
        prepare_missing(config)
        resolved = await asyncio.to_thread(resolve_cluster, config)
        plan = await self._plan(entries_of(resolved), config)
        async with self._started(config) as address, AsyncClient(address) as client:
            workers = set(config.prefill_nodes) | set(config.decode_nodes)
            await status_until(client.status, lambda now: {one.name for one in now.nodes} >= workers, REGISTER_S)
            await self._sweep_on(client, plan)

    async def _plan(self, known: Sequence[ModelEntry], config: ClusterConfig | None) -> Plan:
        # drawing all loads takes seconds
        return await asyncio.to_thread(plan_load, self._command, self._checked, known, config)

    async def _sweep_on(self, client: AsyncClient, plan: Plan) -> None:
        settings, workload = self._settings, plan.workload
        nodes = (await client.status()).nodes
        points = plan_points(settings.arms, workload.rates, settings.repeats)
        self._known = {
            "models": list(plan.models),
            "rates": list(workload.rates),
            "vocabulary_ids": len(plan.vocabulary),
            "salt": settings.salt,
            "nodes": [{"name": node.name, "role": node.role, "models": list(node.models)} for node in nodes],
        }
        progress = Progress([(point, workload.horizon_s(point.rate, point.repeat)) for point in points], self._console)
        self._sweep = Sweep(client, workload, plan.models, settings, _Saving(progress, self))
        async with progress.showing():
            await self._sweep.run(TokenSource(plan.vocabulary, self._command.models.seed, f"{settings.salt}/wake"))

    @contextlib.asynccontextmanager
    async def _started(self, config: ClusterConfig) -> AsyncIterator[str]:
        """The address of a cluster of child processes; they are stopped whatever happens."""
        folder = config.state_path / "bench-serving"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "cluster.yaml"
        file.write_text(show_cluster(config), encoding="utf-8")
        cluster = ClusterProcesses(file, config, log_dir=folder / "logs")
        self._console.print(f"starting {', '.join(cluster.nodes)}; logs in {folder / 'logs'}", soft_wrap=True)
        await cluster.start()
        try:
            router = next(iter(config.routers.values()))
            yield f"tcp://{router.host}:{router.client_port}"
        finally:
            self._console.print("stopping the cluster")
            await cluster.stop()

    # --- what is said ------------------------------------------------------------------------------------------------

    def whole(self, *, complete: bool, resamples: int = RESAMPLES) -> dict[str, Any]:
        """The JSON object."""
        command = self._command
        settings = {
            "kvkin": __version__,
            **_plain(asdict(command.load)),
            **_plain(asdict(command.models)),
            "agents": _plain(asdict(command.agents)),
            "trace": _plain(asdict(command.trace)),
            **_plain(asdict(command.compare)),
            **_plain(asdict(command.limits)),
            "config": None if command.cluster.config is None else str(command.cluster.config),
            "address": command.cluster.address,
            "started": command.cluster.start,
            **self._known,
            "complete": complete,
        }
        objective = self._settings.objective
        return reports.report(settings, self.results, objective, command.models.seed, resamples=resamples)

    def save(self) -> None:
        """Write what there is by now, without what takes long to compute."""
        if self._command.output.out is not None:
            reports.write(self._command.output.out, self.whole(complete=False, resamples=0), self.results)

    def _report(self, *, complete: bool) -> None:
        whole, out = self.whole(complete=complete), self._command.output.out
        if out is not None and self.results:
            reports.write(out, whole, self.results)
            write_plots(out, whole)
        if self._command.output.json:
            print(json.dumps(whole))
        else:
            console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
            console.print(reports.view(self.results, whole))
        if not complete:
            self._console.print(f"not complete: {len(self.results)} points are reported")


class _Saving:
    """A watcher that also writes the files after every point: a long run that dies leaves what it had."""

    def __init__(self, progress: Progress, bench: Bench) -> None:
        self.waking, self.waiting, self.started = progress.waking, progress.waiting, progress.started
        self._progress, self._bench = progress, bench

    def ended(self, result: PointResult) -> None:
        self._progress.ended(result)
        self._bench.save()


async def _until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``; SIGINT and SIGTERM cancel it, a second one cancels its cleaning up as well. Raises CancelledError then."""
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _refuse_unless(fits: bool, option: str, problem: str, allowed: str) -> None:
    if not fits:
        raise ConfigError(option, problem, allowed)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: str(value) if isinstance(value, Path) else msgspec.to_builtins(value) for name, value in values.items()
    }
