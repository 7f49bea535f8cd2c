"""The ``kvkin`` command: finds the subcommand, reads its options, runs it, and turns what goes wrong into one line.

Every command is a frozen dataclass with a ``run() -> int``, read by tyro. It is imported only when it is asked for: torch takes
seconds to import, and ``kvkin --help`` must not. Exit codes: 0, 1 (it ran and found something wrong), 2 (it cannot be
done as asked), 130 (Ctrl-C).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkin import __version__
from kvkin.kv.errors import ConfigError, KvkinError
from kvkin.tools.lifeline import LIFELINE_VARIABLE, watch_parent
from kvkin.tools.shared_cores import spin_briefly

if TYPE_CHECKING:
    from kvkin.tools.logs import Level

EXIT_UNUSABLE = 2
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class Command:
    """One subcommand: ``words`` call it, ``target`` (module:class) is what runs."""

    words: str
    target: str
    usage: str
    summary: str
    log_level: Level = "warning"


@dataclass(frozen=True)
class Group:
    title: str
    commands: tuple[Command, ...]


_TOOLS = "kvkin.tools"
GROUPS = (
    Group(
        "See it work",
        (
            Command(
                "demo",
                f"{_TOOLS}.demo:Demo",
                "",
                "prepare the SmolLM2 family and run an agent workload on a cluster here",
            ),
            Command("prepare", f"{_TOOLS}.prepare:Prepare", "smollm2", "convert the demo family's base model, once"),
        ),
    ),
    Group(
        "Run a cluster",
        (
            Command(
                "up", f"{_TOOLS}.up:Up", "FILE", "start this host's nodes of a cluster file; Ctrl-C drains them", "info"
            ),
            Command("router", f"{_TOOLS}.roles:Router", "--config FILE --node NAME", "start one router", "info"),
            Command(
                "prefill", f"{_TOOLS}.roles:Prefill", "--config FILE --node NAME", "start one prefill node", "info"
            ),
            Command("decode", f"{_TOOLS}.roles:Decode", "--config FILE --node NAME", "start one decode node", "info"),
        ),
    ),
    Group(
        "Use it",
        (
            Command(
                "ask", f"{_TOOLS}.ask:Ask", 'MODEL "TEXT"', "stream an answer and show what was reused for it", "error"
            ),
            Command(
                "status", f"{_TOOLS}.status:Status", "", "nodes, loads, holdings and counters of a running cluster"
            ),
        ),
    ),
    Group(
        "Cluster files",
        (
            Command(
                "config check", f"{_TOOLS}.config_command:ConfigCheck", "FILE", "is it usable, and what is shared?"
            ),
            Command(
                "config show", f"{_TOOLS}.config_command:ConfigShow", "FILE", "print it with every default filled in"
            ),
        ),
    ),
    Group(
        "Fine-tune and measure",
        (
            Command(
                "finetune",
                f"{_TOOLS}.finetune:FinetuneCommand",
                "...",
                "train a fine-tune and score it against its base",
            ),
            Command(
                "profile",
                f"{_TOOLS}.profile:Profile",
                "--sender S --receiver R --data D",
                "which layers must a receiver recompute when it reuses a sender's KV?",
            ),
            Command(
                "evaluate",
                f"{_TOOLS}.evaluate:Evaluate",
                "--sender S --receiver R --data D",
                "full prefill, full reuse, CacheBlend and DroidSpeak on the same cases",
            ),
            Command("bench transport", f"{_TOOLS}.bench_transport:BenchTransport", "", "bandwidth of the data plane"),
            Command(
                "bench router", f"{_TOOLS}.bench_router:BenchRouter", "", "time of a routing decision and of the front"
            ),
            Command(
                "bench pipeline", f"{_TOOLS}.bench_pipeline:BenchPipeline", "", "do pulls overlap with the recompute?"
            ),
            Command(
                "bench serving",
                f"{_TOOLS}.bench_serving:BenchServing",
                "",
                "latency and throughput under load, with sharing and without",
            ),
            Command(
                "bench engine",
                f"{_TOOLS}.bench_engine:BenchEngine",
                "[PART]",
                "vLLM under kvkin against vLLM by itself: overhead, first token, ...",
            ),
        ),
    ),
)
COMMANDS = {command.words: command for group in GROUPS for command in group.commands}

EXAMPLES = (
    ("kvkin demo", "the whole tour, in about three minutes"),
    ("kvkin up configs/clusters/local.yaml", "a cluster on this machine, with live status"),
    ('kvkin ask smollm2-135m-qa "Who wrote it?" --context-file report.txt --reuse any', ""),
    ("kvkin status --json", ""),
    ("kvkin COMMAND --help", "all options of a command"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point. Returns the exit code and never raises for what a user can do."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    spin_briefly()
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except KvkinError as error:
        print(f"kvkin: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    except BrokenPipeError:
        # `kvkin ... | head`: nothing more can be said, and the interpreter must not try when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED


def _dispatch(arguments: list[str]) -> int:
    arguments, level = _take_log_level(arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if arguments[0] in ("version", "--version"):
        print(version_text())
        return 0
    found = find_command(arguments)
    if isinstance(found, int):
        return found
    command, rest = found
    if LIFELINE_VARIABLE in os.environ:
        watch_parent()
    from kvkin.tools.logs import setup_logging

    setup_logging(level or command.log_level)
    return _run(command, rest)


def _run(command: Command, arguments: list[str]) -> int:
    import tyro

    module, name = command.target.split(":")
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        what = "this installation lacks it" if error.name == module else f"the package {error.name} is not installed"
        print(f"kvkin {command.words}: {what}; `make` in a checkout installs everything", file=sys.stderr)
        return EXIT_UNUSABLE
    chosen = tyro.cli(getattr(loaded, name), prog=f"kvkin {command.words}", args=arguments)
    result: int = chosen.run()
    return result


def find_command(arguments: list[str]) -> tuple[Command, list[str]] | int:
    """The command that ``arguments`` begin with, and what follows it; an exit code, after a word to the user, if none fits."""
    for count in (2, 1):
        command = COMMANDS.get(" ".join(arguments[:count]))
        if command is not None:
            return command, arguments[count:]
    first = arguments[0]
    inside = [command for command in COMMANDS.values() if command.words.startswith(f"{first} ")]
    if inside and (len(arguments) == 1 or arguments[1] in ("-h", "--help")):
        print("\n".join(_command_lines(inside)))
        return 0 if len(arguments) > 1 else EXIT_UNUSABLE
    import difflib

    wanted = " ".join(arguments[:2]) if inside else first
    known = [command.words for command in inside] or [*COMMANDS, "version"]
    close = difflib.get_close_matches(wanted, known, n=1, cutoff=0.5)
    hint = f"did you mean `kvkin {close[0]}`?" if close else f"one of: {', '.join(known)}"
    print(f"kvkin: no command {wanted!r}; {hint} (`kvkin --help` explains them)", file=sys.stderr)
    return EXIT_UNUSABLE


def help_text() -> str:
    """What ``kvkin --help`` says."""
    lines = [
        "kvkin serves the fine-tunes of one base model on a prefill/decode cluster and lets them share a context's KV cache.",
        "",
        "Usage: kvkin [--log-level LEVEL] COMMAND ...",
    ]
    for group in GROUPS:
        lines += ["", group.title, *_command_lines(group.commands)]
    lines += ["", "Examples"]
    lines += [f"  {call}" + (f"   # {what}" if what else "") for call, what in EXAMPLES]
    lines += ["", f"Log levels: {', '.join(LOG_LEVELS)}. Logs go to stderr: readable on a terminal, else JSON lines."]
    return "\n".join(lines)


def version_text() -> str:
    """Versions of what decides how KV looks; read from metadata, nothing is imported."""
    from importlib.metadata import PackageNotFoundError, version

    parts = [f"python {sys.version.split()[0]}"]
    for package in ("torch", "transformers", "nixl-cu12"):
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            parts.append(f"{package} missing")
    return f"kvkin {__version__} ({', '.join(parts)})"


def _command_lines(commands: Sequence[Command]) -> list[str]:
    calls = [f"kvkin {command.words} {command.usage}".rstrip() for command in commands]
    width = max(45, *map(len, calls))
    return [f"  {call:<{width}}  {command.summary}" for call, command in zip(calls, commands, strict=True)]


def _take_log_level(arguments: list[str]) -> tuple[list[str], Level | None]:
    """Take ``--log-level LEVEL`` out, wherever it stands before a ``--``."""
    rest: list[str] = []
    level: Level | None = None
    position = 0
    while position < len(arguments):
        word, _, value = arguments[position].partition("=")
        if word == "--":
            return rest + arguments[position:], level
        position += 1
        if word != "--log-level":
            rest.append(arguments[position - 1])
            continue
        if not value and position < len(arguments):
            value, position = arguments[position], position + 1
        match value:
            case "debug" | "info" | "warning" | "error":
                level = value
            case _:
                raise ConfigError("--log-level", f"{value!r} is no level", ", ".join(LOG_LEVELS))
    return rest, level


if __name__ == "__main__":
    sys.exit(main())
