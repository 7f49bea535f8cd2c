"""``kvkin bench pipeline``: does pulling while recomputing come close to the ideal schedule, and what does it save?

A real prefill node in another process holds the sender's KV of one context; this process is the receiver: the same layer
streams, engine and executor as a decode node. The link is paced by the kernel (tcp). Schedules, interleaved in one run:

- ``naive``: pull everything of the partial plan, then compute;
- ``reuse_only``: pull the KV of all layers, recompute nothing (full reuse);
- ``pipelined``: compute as data arrives, what kvkin does;
- ``private``: no reuse at all;
- ``ideal``: max(transfer alone, E transfer + compute alone) + the suffix's last layer, from separate runs (docs/design.md
  section 11).

Each context is measured at its balanced rate, at which the transfer takes as long as the recompute, and at the rates of the sweep, where
the router's policy is asked as well what it would do (``bench_pipeline_policy.py``). Ctrl-C ends everything and reports nothing.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import math
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import tyro
from rich.console import Console

from kvkin.configs.families import ResolvedCluster, ResolvedFamily
from kvkin.configs.loader import load_cluster
from kvkin.configs.schema import ClusterConfig
from kvkin.kv.errors import ConfigError
from kvkin.kv.plan import LayerGroup
from kvkin.router.configured import settings_from
from kvkin.router.policy_types import PolicySettings
from kvkin.tools.bench_pipeline_policy import Situation
from kvkin.tools.bench_pipeline_report import show
from kvkin.tools.bench_pipeline_result import LinkRuns, Measured, context_result
from kvkin.tools.eta import Eta, speaker
from kvkin.tools.model_pair import resolve_pair

if TYPE_CHECKING:
    from kvkin.tools.bench_pipeline_arms import Arms, Bench

EXIT_INTERRUPTED = 130
# The kernel's pacing takes bytes per second as a C int.
MAX_GBIT_PER_S = 17.0


@dataclass(frozen=True)
class BenchPipeline:
    """Time to first token of partial reuse by schedule, for several contexts and over shaped links."""

    config: Path = Path("configs/clusters/local.yaml")
    """Cluster file that names the family; its router's policy is asked."""
    sender: str = "smollm2-135m-instruct"
    """Model whose KV is reused."""
    receiver: str = "smollm2-135m-qa"
    """Model that answers."""
    context: tuple[int, ...] = (1024,)
    """Context tokens (whole blocks); several are measured one after the other."""
    suffix: int = 32
    """Tokens after the context."""
    group: tuple[int, int] | None = None
    """Layers that are recomputed, half-open; the family's configured group if left out."""
    rates: tuple[float, ...] = (0.1, 0.5, 2.0)
    """Further link rates to sweep, in Gbit/s; the balanced rate is found by measurement and always run."""
    repeats: int = 7
    """Interleaved runs of every schedule at the balanced rate."""
    sweep_repeats: int = 3
    """Interleaved runs of every schedule at each of the other rates; 0 leaves the sweep out."""
    threads: int = 2
    """Compute threads of the receiver, the same in every schedule."""
    seed: int = 0
    """Seed of the token ids and of the bootstrap."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object instead of tables."""
    out: Path | None = None
    """File for the same JSON."""

    def run(self) -> int:
        """Measure everything, then report. Returns 0, or 130 after Ctrl-C."""
        self.check()
        config = load_cluster(self.config)
        family = resolve_pair(config, self.sender, self.receiver)
        self.check_contexts(family)
        group = self.chosen_group(family)
        say = speaker("bench pipeline")
        try:
            result = asyncio.run(self._measure(config, family, group, say))
        except KeyboardInterrupt:
            say("stopped, nothing is reported")
            return EXIT_INTERRUPTED
        text = json.dumps(result)
        if self.out is not None:
            self.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if self.json:
            print(text)
        else:
            show(Console(width=None if sys.stdout.isatty() else 200), result)
        return 0

    # --- what was asked for ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """ConfigError for a setting that cannot be used, naming it and what is allowed."""
        for key, least in {"suffix": 1, "repeats": 1, "sweep_repeats": 0, "threads": 1, "seed": 0}.items():
            if getattr(self, key) < least:
                raise ConfigError(key, f"{getattr(self, key)} is too small", f"{least} or more")
        lists: dict[str, tuple[float, ...]] = {"context": self.context, "rates": self.rates}
        for key, values in lists.items():
            if not values:
                otherwise = "; sweep_repeats 0 leaves the sweep out" if key == "rates" else ""
                raise ConfigError(key, "none is given", f"one or more{otherwise}")
            if len(set(values)) < len(values):
                raise ConfigError(key, "one of them is given twice", "each once")
        for rate in self.rates:
            if not (math.isfinite(rate) and 1e-6 <= rate <= MAX_GBIT_PER_S):
                raise ConfigError("rates", f"{rate:g} cannot be paced", f"0.000001 to {MAX_GBIT_PER_S:g} Gbit/s")
        if self.out is not None and (self.out.is_dir() or not self.out.parent.is_dir()):
            raise ConfigError("out", f"{self.out} cannot be written", "a file in a folder that is there")

    def check_contexts(self, family: ResolvedFamily) -> None:
        """ConfigError for contexts that are not whole blocks, or for which a model has no room."""
        size = family.layout.block_size
        room = min(family.model_max_context(name) for name in (self.sender, self.receiver))
        most = (room - self.suffix - 1) // size * size
        for tokens in self.context:
            if tokens % size or tokens <= 0:
                raise ConfigError("context", f"{tokens} is not a multiple of the block size", f"k x {size}, k >= 1")
            if tokens > most:
                problem = f"{tokens} with a suffix of {self.suffix} and an answer exceed the models' {room} tokens"
                raise ConfigError("context", problem, f"at most {most}")

    def chosen_group(self, family: ResolvedFamily) -> LayerGroup:
        """The group that is recomputed. ConfigError if there is none, or if it cannot be."""
        layers = family.layout.num_layers
        allowed = f"START STOP with 0 <= START < STOP <= {layers}, and not all layers"
        configured = family.group(self.sender, self.receiver)
        group = configured if self.group is None else LayerGroup(*self.group)
        if group is None:
            raise ConfigError("group", "the family has no group for this pair", allowed)
        if not 0 <= group.start < group.stop <= layers or group.stop - group.start == layers:
            raise ConfigError("group", f"[{group.start}, {group.stop}) of {layers} layers", allowed)
        return group

    # --- measuring -------------------------------------------------------------------------------------------------------

    async def _measure(
        self, config: ClusterConfig, family: ResolvedFamily, group: LayerGroup, say: Callable[[str], None]
    ) -> dict[str, Any]:
        import torch

        from kvkin.tools.bench_pipeline_open import open_bench

        torch.set_num_threads(self.threads)
        longest = max(self.context)
        policy = policy_of(config)
        say(f"the holder computes {longest:,} tokens, the receiver loads")
        async with open_bench(
            family,
            self.sender,
            self.receiver,
            group,
            context_tokens=longest,
            suffix_tokens=self.suffix,
            threads=self.threads,
            seed=self.seed,
            slowest_gbit_per_s=min(self.rates),
        ) as bench:
            contexts = []
            for number, tokens in enumerate(self.context, 1):
                links = await self._context(bench, tokens, f"{number}/{len(self.context)}", say)
                contexts.append(
                    context_result(Situation(family.layout, group, tokens, self.suffix), links, policy, self.seed)
                )
        return {
            "settings": self._settings(family, group, policy),
            "made": _made(family),
            "contexts": contexts,
        }

    async def _context(self, bench: Bench, tokens: int, place: str, say: Callable[[str], None]) -> list[LinkRuns]:
        """All rounds of one context, first at its balanced rate."""
        arms = bench.arms(tokens)
        await bench.set_rate(0)
        computed = await arms.warm_up()
        balanced = min(arms.bytes_of(arms.partial) * 8 / computed.recompute_s / 1e9, MAX_GBIT_PER_S)
        sweep = [(rate, False, self.sweep_repeats) for rate in self.rates] if self.sweep_repeats else []
        plan = [(balanced, True, self.repeats), *sweep]
        say(f"{place}: {tokens:,} + {self.suffix} tokens at {', '.join(f'{rate:.3g}' for rate, _, _ in plan)} Gbit/s")
        eta = Eta(f"{place}: rounds", sum(repeats for _, _, repeats in plan), 0, say)
        return [
            LinkRuns(rate, is_balanced, await _rounds(bench, arms, rate, repeats, eta))
            for rate, is_balanced, repeats in plan
        ]

    # --- what is said ----------------------------------------------------------------------------------------------------

    def _settings(self, family: ResolvedFamily, group: LayerGroup, policy: PolicySettings) -> dict[str, Any]:
        return {
            "command": self.command(),
            "family": family.name,
            "num_layers": family.layout.num_layers,
            "sender": self.sender,
            "receiver": self.receiver,
            "context_tokens": list(self.context),
            "suffix_tokens": self.suffix,
            "group": [group.start, group.stop],
            "rates": list(self.rates) if self.sweep_repeats else [],
            "repeats": self.repeats,
            "sweep_repeats": self.sweep_repeats,
            "threads": self.threads,
            "seed": self.seed,
            "policy": msgspec.to_builtins(policy),
        }

    def command(self) -> str:
        """The command that measures this again, without paths of this machine."""
        words = ["kvkin", "bench", "pipeline"]
        for key, field in type(self).__dataclass_fields__.items():
            value = getattr(self, key)
            if value == field.default or key in ("json", "out"):
                continue
            values = value if isinstance(value, tuple) else (value.name if isinstance(value, Path) else value,)
            words += [
                f"--{key.replace('_', '-')}",
                *(f"{one:g}" if isinstance(one, float) else str(one) for one in values),
            ]
        return shlex.join(words)


async def _rounds(bench: Bench, arms: Arms, gbit_per_s: float, repeats: int, eta: Eta) -> list[Measured]:
    await bench.set_rate(gbit_per_s)
    await arms.connect()
    measured = []
    for number in range(repeats):
        # the order alternates, so that drift hits no schedule more than another
        measured.append(await arms.measure_all(reverse=bool(number % 2)))
        eta.step(f"{gbit_per_s:.3g} Gbit/s")
    return measured


def policy_of(config: ClusterConfig) -> PolicySettings:
    """The policy of the cluster's routers: all have the same."""
    name = next(iter(config.routers), None)
    return PolicySettings() if name is None else settings_from(ResolvedCluster(config, {}, ()), name).policy


def _made(family: ResolvedFamily) -> dict[str, Any]:
    from importlib.metadata import version

    import torch

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": family.device,
        "dtype": family.compute_dtype,
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("kvkin", "torch", "transformers")},
    }
