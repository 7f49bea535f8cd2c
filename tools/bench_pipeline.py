"""``kvkin bench pipeline``: does pulling while recomputing come close to the ideal schedule, and what does it save?

A real prefill node in another process holds the sender's KV of one context; this process is the receiver: the same layer
streams, engine and executor as a decode node. The link is paced by the kernel (tcp). Schedules, interleaved in one run:

- ``naive``: pull everything of the partial plan, then compute;
- ``reuse_only``: pull the KV of all layers, recompute nothing (full reuse);
- ``pipelined``: compute as data arrives, what kvkin does;
- ``private``: no reuse at all;
- ``ideal``: max(transfer alone, E transfer + compute alone) + the suffix's last layer, from separate runs (DESIGN: what must
  be measured).
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.console import Console
from rich.table import Table

from kvkin.configs.families import resolve_family
from kvkin.configs.loader import load_cluster
from kvkin.kv.errors import ConfigError
from kvkin.tools.bench_pipeline_arms import Bench, Measured, open_bench

SCHEDULES = ("naive", "reuse_only", "pipelined", "private", "ideal")


@dataclass(frozen=True)
class BenchPipeline:
    """Time to first token of partial reuse by schedule, over shaped links."""

    config: Path = Path("configs/clusters/local.yaml")
    """Cluster file that names the family."""
    sender: str = "smollm2-135m-instruct"
    """Model whose KV is reused."""
    receiver: str = "smollm2-135m-qa"
    """Model that answers."""
    context: int = 1024
    """Context tokens (whole blocks)."""
    suffix: int = 32
    """Tokens after the context."""
    group: tuple[int, int] | None = None
    """Layers that are recomputed, half-open; the family's configured group if left out."""
    rates: tuple[float, ...] = (0.1, 0.5, 2.0)
    """Further link rates to sweep, in Gbit/s; the balanced rate is found by measurement and always run."""
    repeats: int = 7
    """Interleaved runs of every schedule at the balanced rate (the sweep takes at most 3)."""
    threads: int = 2
    """Compute threads of the receiver, the same in every schedule."""
    seed: int = 0
    """Seed of the token ids and of the bootstrap."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object instead of tables."""

    def run(self) -> int:
        if self.repeats < 1:
            raise ConfigError("repeats", f"{self.repeats} runs measure nothing", "1 or more")
        outcome = asyncio.run(self._measure())
        if self.json:
            print(json.dumps(outcome.as_json()))
        else:
            outcome.show(Console())
        return 0

    async def _measure(self) -> Outcome:
        torch.set_num_threads(self.threads)
        config = load_cluster(self.config)
        family_name = config.family_of(self.receiver)
        if family_name is None or config.family_of(self.sender) != family_name:
            raise ConfigError("sender", f"{self.sender!r} and {self.receiver!r} are not of one family", "two members")
        family = resolve_family(config, family_name, models=(self.sender, self.receiver))
        configured = family.group(self.sender, self.receiver)
        if self.group is None and configured is None:
            raise ConfigError("group", "the family has no group for this pair", "start and stop layer")
        group = self.group or (configured.start, configured.stop) if configured else self.group
        assert group is not None
        bench = await open_bench(
            family, self.sender, self.receiver, group, self._context(family.layout.block_size), self.suffix, self.seed
        )
        try:
            return await self._sweep(bench, group)
        finally:
            await bench.close()

    def _context(self, block_size: int) -> int:
        if self.context % block_size or self.context <= 0:
            raise ConfigError("context", f"{self.context} is not a multiple of the block size", f"k x {block_size}")
        return self.context

    async def _sweep(self, bench: Bench, group: tuple[int, int]) -> Outcome:
        await bench.warm_up()
        compute = await bench.compute_only()
        balanced = bench.pulled_bytes * 8 / compute.recompute_s / 1e9
        outcome = Outcome(group, self.context, self.suffix, balanced, self.seed)
        outcome.runs[balanced] = await self._at(bench, balanced, self.repeats)
        for rate in self.rates:
            outcome.runs[rate] = await self._at(bench, rate, min(self.repeats, 3))
        return outcome

    async def _at(self, bench: Bench, gbit_per_s: float, repeats: int) -> list[Measured]:
        await bench.set_rate(gbit_per_s)
        measured = []
        for number in range(repeats):
            # the order alternates, so that drift hits no schedule more than another
            measured.append(await bench.measure_all(reverse=bool(number % 2)))
        return measured


@dataclass
class Outcome:
    """All runs by link rate, and what they say."""

    group: tuple[int, int]
    context: int
    suffix: int
    balanced: float
    seed: int
    runs: dict[float, list[Measured]] = field(default_factory=dict)

    def ratio(self, over: str, under: str) -> tuple[float, float, float]:
        """Median of the paired ratios at the balanced rate with its 95 % bootstrap interval."""
        pairs = [run.seconds[over] / run.seconds[under] for run in self.runs[self.balanced]]
        rng = random.Random(self.seed)
        medians = sorted(statistics.median(rng.choices(pairs, k=len(pairs))) for _ in range(2000))
        return statistics.median(pairs), medians[50], medians[1949]

    def as_json(self) -> dict[str, object]:
        rows = [
            {
                "schedule": schedule,
                "ttft_ms": round(statistics.median(run.seconds[schedule] for run in runs) * 1e3, 2),
                "gbit_per_s": round(rate, 4),
                "runs": len(runs),
            }
            for rate, runs in self.runs.items()
            for schedule in SCHEDULES
        ]
        balance = statistics.median(run.transfer_s / run.recompute_s for run in self.runs[self.balanced])
        return {
            "results": rows,
            "group": list(self.group),
            "context_tokens": self.context,
            "suffix_tokens": self.suffix,
            "balanced_gbit_per_s": round(self.balanced, 4),
            "transfer_over_recompute": round(balance, 3),
            "pipelined_over_ideal": [round(value, 3) for value in self.ratio("pipelined", "ideal")],
            "naive_over_pipelined": [round(value, 3) for value in self.ratio("naive", "pipelined")],
            "pipelined_over_private": [round(value, 3) for value in self.ratio("pipelined", "private")],
        }

    def show(self, console: Console) -> None:
        summary = self.as_json()
        table = Table(title=f"time to first token, ms ({self.context} + {self.suffix} tokens, group {self.group})")
        table.add_column("Gbit/s", justify="right")
        for schedule in SCHEDULES:
            table.add_column(schedule, justify="right")
        for rate, runs in sorted(self.runs.items()):
            medians = [statistics.median(run.seconds[schedule] for run in runs) * 1e3 for schedule in SCHEDULES]
            table.add_row(f"{rate:.3f}", *(f"{value:.0f}" for value in medians))
        console.print(table)
        console.print(f"transfer / recompute at the balanced rate: {summary['transfer_over_recompute']}")
        for name in ("pipelined_over_ideal", "naive_over_pipelined", "pipelined_over_private"):
            middle, low, high = self.ratio(*name.split("_over_"))
            console.print(f"{name.replace('_', ' ')}: {middle:.3f} (95 % {low:.3f} to {high:.3f})")
