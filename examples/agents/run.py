"""A coder and a tester of one model family pass a conversation back and forth, and share its KV cache.

    python examples/agents/run.py
    python examples/agents/run.py --rounds 5 --json agents.json
    python examples/agents/run.py --router tcp://127.0.0.1:5570

Starts the needed nodes of a cluster file on free ports of this machine, or talks to a running cluster; plays the dialogue of
``dialogue.py`` through kvkin's client, each turn with sharing and privately (``paired_turns.py``); prints and writes what came of it
(``paired_figures.py``). Exit codes: 0, 1 (a turn failed, or the comparison was not fair), 2 (cannot be done as asked), 130 (Ctrl-C).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from dialogue import CODER, TESTER, Script, lines, script
from paired_figures import report, summary, table, turn_view
from paired_turns import Player
from rich.console import Console

from kvkin.configs.loader import show_cluster
from kvkin.configs.schema import ClusterConfig
from kvkin.kv.errors import ConfigError, KvkinError
from kvkin.tools.cluster_processes import ClusterProcesses
from kvkin.tools.demo import demo_config
from kvkin.tools.local import status_until
from kvkin.tools.prepare import prepare_missing
from kvkin.tools.router_address import RouterAddress, reach, router_address
from kvkin.transport.client import AsyncClient
from kvkin.transport.messages import Reuse

EXIT_FAILED, EXIT_UNUSABLE, EXIT_INTERRUPTED = 1, 2, 130
REGISTERED_S = 60.0


@dataclass(frozen=True)
class Agents:
    """A coder and a tester take turns on one task; each reads the whole conversation and reuses what the other's node holds.

    Every turn is run twice on the same node: as the cluster serves it, and privately, reusing nothing. Shown are plan, reused
    tokens and time to first token of both, and at the end what sharing saved and whether the answers got worse.
    """

    rounds: int = 3
    """Rounds to play, 1 to 6: the coder writes a function, the tester says what a test must expect."""

    coder: Annotated[str, tyro.conf.arg(metavar="MODEL")] = "smollm2-135m-code"
    """Model that writes the code."""

    tester: Annotated[str, tyro.conf.arg(metavar="MODEL")] = "smollm2-135m-qa"
    """Model that answers the questions."""

    reuse: Literal["exact", "bounded", "any"] = "any"
    """What may be reused: only what gives the same answer; also what a profile bounds; anything."""

    max_tokens: int = 48
    """Most tokens of an answer."""

    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Cluster file whose nodes are started, on free ports; default: configs/clusters/local.yaml."""

    router: Annotated[str | None, tyro.conf.arg(metavar="ADDRESS")] = None
    """Talk to the router of a running cluster instead of starting one, such as tcp://127.0.0.1:5570."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Where the report goes; default: .kvkin/agents.json, or agents.json in the cluster file's state_dir."""

    def run(self, played: Script | None = None) -> int:
        """Play ``played`` (default: the example's own script). Returns the exit code; raises ConfigError."""
        chosen = script() if played is None else played
        self.check(chosen)
        if self.router is not None:
            return asyncio.run(self._on_running(router_address(None, self.router, "--router"), chosen))
        config = demo_config(self.config)
        self.nodes(config)
        prepare_missing(config)
        return asyncio.run(self._on_own(config, chosen))

    def check(self, played: Script) -> None:
        """ConfigError for an option that cannot be used."""
        if not 1 <= self.rounds <= len(played.rounds):
            raise ConfigError("--rounds", f"{self.rounds}", f"1 to {len(played.rounds)}")
        if self.max_tokens < 1:
            raise ConfigError("--max-tokens", f"{self.max_tokens} is too small", "1 or more")
        if self.router is not None and self.config is not None:
            raise ConfigError("--router", "given together with --config", "one of them")
        if self.json is not None and self.json.is_dir():
            raise ConfigError("--json", f"{self.json} is a folder", "a file")

    def nodes(self, config: ClusterConfig) -> list[str]:
        """Nodes of ``config`` that the two agents need: routers, the family's prefill nodes, decode nodes of their models."""
        models = {self.coder: "--coder", self.tester: "--tester"}
        served = [name for name, node in config.decode_nodes.items() if models.keys() & set(node.models)]
        for model, option in models.items():
            if not any(model in config.decode_nodes[name].models for name in served):
                known = sorted({each for node in config.decode_nodes.values() for each in node.models})
                raise ConfigError(option, f"no decode node serves {model}", ", ".join(known))
        families = {config.family_of(model) for model in models}
        self._check_families(families)
        prefill = [name for name, node in config.prefill_nodes.items() if config.family_of(node.models[0]) in families]
        return [*config.routers, *prefill, *served]

    def _check_families(self, families: Collection[str | None]) -> None:
        if len(set(families)) > 1:
            raise ConfigError("--tester", f"{self.tester} and {self.coder} are of different families", "one family")

    async def _on_own(self, config: ClusterConfig, played: Script) -> int:
        folder = config.state_path / "agents"
        file = folder / "cluster.yaml"
        _write(file, show_cluster(config), "state_dir")
        names = self.nodes(config)
        console = _console()
        console.print(f"starting {', '.join(names)}; logs in {folder / 'logs'}", soft_wrap=True)
        async with ClusterProcesses(file, config, names, log_dir=folder / "logs"):
            router = next(iter(config.routers.values()))
            async with AsyncClient(f"tcp://{router.host}:{router.client_port}") as client:
                workers = set(names) - set(config.routers)
                await status_until(
                    client.status, lambda status: {node.name for node in status.nodes} >= workers, REGISTERED_S
                )
                return await self.play(client, played, self.json or config.state_path / "agents.json", console)

    async def _on_running(self, router: RouterAddress, played: Script) -> int:
        async with AsyncClient(router.url) as client:
            known = await reach(client, router, "without --router a cluster is started for this run")
            families = {entry.name: entry.family for entry in known if entry.nodes}
            for option, model in (("--coder", self.coder), ("--tester", self.tester)):
                if model not in families:
                    problem = f"the cluster at {router.url} does not serve {model} now"
                    raise ConfigError(option, problem, ", ".join(sorted(families)))
            self._check_families({families[self.coder], families[self.tester]})
            return await self.play(client, played, self.json or Path(".kvkin") / "agents.json", _console())

    async def play(self, client: AsyncClient, played: Script, out: Path, console: Console) -> int:
        """The conversation on a cluster that serves both models. What was played is shown and written however it ends."""
        player = Player(client, {CODER: self.coder, TESTER: self.tester}, Reuse(self.reuse), self.max_tokens)
        setting = {
            "coder": self.coder,
            "tester": self.tester,
            "rounds": self.rounds,
            "reuse": self.reuse,
            "max_tokens": self.max_tokens,
        }
        async with _finally_shown(player, setting, out, console):
            await player.play(list(lines(played, self.rounds)), lambda turn: console.print(turn_view(turn)))
        problems = any(turn.problems for turn in player.turns)
        return EXIT_FAILED if player.stopped or problems else 0


@contextlib.asynccontextmanager
async def _finally_shown(player: Player, setting: dict[str, Any], out: Path, console: Console) -> AsyncIterator[None]:
    try:
        yield
    except asyncio.CancelledError:
        player.stopped = "interrupted"
        raise
    finally:
        figures = report(player.turns, setting, player.stopped)
        if player.turns:
            console.print(table(player.turns))
            console.print(summary(figures["totals"]))
        if player.stopped:
            console.print(f"\nended early: {player.stopped}", style="bold red", markup=False)
        _write(out, json.dumps(figures, indent=1, ensure_ascii=False) + "\n", "--json")
        console.print(f"\nreport: {out}", markup=False, soft_wrap=True)


def _console() -> Console:
    # a pipe has no width: rich would wrap at 80 columns and break names
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 160)


def _write(file: Path, text: str, key: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "--json", f"cannot write {file}: {error.strerror}", "a file in a folder of your own"
        ) from None


def main(arguments: list[str] | None = None, played: Script | None = None) -> int:
    """Parse, run, and turn what a user can cause into one line."""
    try:
        return tyro.cli(Agents, prog="examples/agents/run.py", args=arguments).run(played)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except KvkinError as error:
        print(f"agents: {error}", file=sys.stderr)
        return EXIT_UNUSABLE


if __name__ == "__main__":
    sys.exit(main())
