"""``kvkin bench engine``: what kvkin costs on top of vLLM, and what it saves against vLLM's own ways.

- ``overhead``: prefill and decode of vLLM by itself, of vLLM under kvkin (private plans), and of transformers;
- ``stall``: the time between tokens of a decoding batch while a partial plan is recomputed, and while vLLM prefills;
- ``ttft``: the first token of exact and partial plans, against vLLM's prefill and the ideal schedule;
- ``disaggregated``: kvkin's cluster against vLLM's disaggregated mode (NIXL connector).

Every arm is a child process of its own, with the engine arguments of a node of the bench's cluster file; they are asked in turn, so that only one of
them computes at a time (but for ``disaggregated``, where the arms are systems of several processes). One process for two vLLM engines would do, but
they would share a thread pool, a compile cache in memory and a garbage collector. Ctrl-C ends everything and reports nothing.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import shlex
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from kvkin.configs.schema import ClusterConfig
from kvkin.tools.bench_engine_disaggregated import disaggregated
from kvkin.tools.bench_engine_options import ModelOptions, Options, Part, Sizes, sizes_of
from kvkin.tools.bench_engine_parts import Measured, overhead, stall
from kvkin.tools.bench_engine_report import show
from kvkin.tools.bench_engine_setup import user_config
from kvkin.tools.bench_engine_ttft import ttft
from kvkin.tools.eta import speaker

EXIT_INTERRUPTED = 130

Measure = Callable[[ClusterConfig, ModelOptions, Sizes, int, Callable[[str], None]], Coroutine[Any, Any, Measured]]
PARTS: dict[Part, Measure] = {
    "overhead": overhead,
    "stall": stall,
    "ttft": ttft,
    "disaggregated": disaggregated,
}


@tyro.conf.configure(tyro.conf.OmitArgPrefixes)
@dataclass(frozen=True)
class BenchEngine(Options):
    """vLLM under kvkin against vLLM by itself: overhead, stalls, time to first token, disaggregated serving.

    Example: kvkin bench engine overhead --repeats 9 --json --out engine-overhead.json
    """

    def run(self) -> int:
        """Measure, then report. Returns 0, or 130 after Ctrl-C."""
        sizes = sizes_of(self)
        config = user_config(self.models)
        say = speaker(f"bench engine {self.part}")
        try:
            measured = asyncio.run(PARTS[self.part](config, self.models, sizes, self.runs.seed, say))
        except KeyboardInterrupt:
            say("stopped, nothing is reported")
            return EXIT_INTERRUPTED
        result = self.result(sizes, measured)
        if self.output.out is not None:
            self.output.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if self.output.json:
            print(json.dumps(result))
        else:
            show(Console(width=None if sys.stdout.isatty() else 200), result)
        return 0

    def result(self, sizes: Sizes, measured: Measured) -> dict[str, Any]:
        """The JSON object."""
        return {
            "part": self.part,
            "settings": {
                "command": self.command(),
                **{key: list(value) if isinstance(value, tuple) else value for key, value in vars(sizes).items()},
                "seed": self.runs.seed,
                **measured.settings,
            },
            "made": {**_made(), **measured.made},
            "engines": measured.engines,
            "results": measured.results,
        }

    def command(self) -> str:
        """The command that measures this again, without paths of this machine."""
        words = ["kvkin", "bench", "engine", self.part]
        for group in (self.models, self.sizes, self.runs):
            for field in fields(group):
                value = getattr(group, field.name)
                if value == field.default:
                    continue
                values = value if isinstance(value, tuple) else (value.name if isinstance(value, Path) else value,)
                words += [f"--{field.name.replace('_', '-')}", *map(str, values)]
        return shlex.join(words)


def _made() -> dict[str, Any]:
    from importlib.metadata import version

    from kvkin.engines.vllm.compat import installed_version

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {
            **{name: version(name) for name in ("kvkin", "torch", "transformers")},
            "vllm": installed_version(),
        },
    }
