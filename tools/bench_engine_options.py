"""The options of ``kvkin bench engine``, in the groups in which ``--help`` shows them, and what they mean for each part. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from kvkin.kv.errors import ConfigError

Part = Literal["overhead", "stall", "ttft", "disaggregated"]


@dataclass(frozen=True)
class ModelOptions:
    """What is run: a family of a cluster file, or any checkpoint."""

    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Cluster file that names the family, and vLLM's arguments for it. Default: configs/clusters/local-vllm.yaml."""

    checkpoint: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """One checkpoint instead of a cluster file; for overhead and stall, which need no fine-tunes."""

    model: str | None = None
    """Model that answers. Default: the family's base; ttft: its first fine-tune; disaggregated: the base, and all members over shared contexts."""

    sender: str | None = None
    """ttft: model whose KV is reused. Default: the family's base."""

    group: tuple[int, int] | None = None
    """stall, ttft: layers that a partial plan recomputes, half-open. Default: the family's group for these models."""


@dataclass(frozen=True)
class SizeOptions:
    """How much is asked for. What is left out is what the part has by default (docs/evaluation.md)."""

    context: Annotated[tuple[int, ...], tyro.conf.arg(metavar="TOKENS ...")] = ()
    """Prompt, or its part that is reused; ttft takes several. Default: 512; stall: 2000; ttft: 512 1024 2048 4000."""

    suffix: int | None = None
    """stall, ttft, disaggregated: tokens behind the context. Default: 32."""

    requests: int | None = None
    """overhead, stall: requests that decode side by side; disaggregated: requests in flight. Default: 8; stall: 7; disaggregated: 3."""

    new_tokens: int | None = None
    """overhead: tokens that each of them generates; stall: without an event; disaggregated: of every answer. Default: 32; disaggregated: 16."""

    budget: int | None = None
    """stall: tokens of a prefill chunk, and of a slice of the recompute. Default: 512."""

    documents: int | None = None
    """disaggregated: contexts of a round. Default: 3."""


@dataclass(frozen=True)
class RunOptions:
    """How it is run; the same in all arms."""

    repeats: int | None = None
    """Interleaved rounds. Default: 7; ttft and disaggregated: 3."""

    threads: int | None = None
    """Compute threads of each process. Default: 2; disaggregated: 1."""

    mode: Literal["compiled", "eager"] | None = None
    """Whether vLLM compiles its models, which takes a minute a process. Default: compiled; disaggregated: eager."""

    seed: int = 0
    """Seed of the token ids and of the bootstrap."""


@dataclass(frozen=True)
class OutputOptions:
    """Where the figures go."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object instead of tables."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the same JSON."""


@dataclass(frozen=True)
class Options:
    """All of them."""

    part: tyro.conf.Positional[Part] = "overhead"
    """overhead: vLLM under kvkin against vLLM; stall: tokens of others during a recompute; ttft: reuse against vLLM's prefill; disaggregated: against vLLM's NIXL mode."""
    models: Annotated[ModelOptions, tyro.conf.arg(name="model")] = field(default_factory=ModelOptions)
    sizes: Annotated[SizeOptions, tyro.conf.arg(name="size")] = field(default_factory=SizeOptions)
    runs: Annotated[RunOptions, tyro.conf.arg(name="run")] = field(default_factory=RunOptions)
    output: Annotated[OutputOptions, tyro.conf.arg(name="output")] = field(default_factory=OutputOptions)


@dataclass(frozen=True)
class Sizes:
    """What one part asks for, all of it said; 0 where the part has no use for it."""

    context: tuple[int, ...]
    suffix: int
    requests: int
    new_tokens: int
    budget: int
    documents: int
    repeats: int
    threads: int
    mode: str

    @property
    def compiled(self) -> bool:
        return self.mode == "compiled"

    @property
    def longest(self) -> int:
        """Tokens of the longest context with what comes behind it."""
        return max(self.context) + self.suffix


DEFAULTS: dict[Part, Sizes] = {
    "overhead": Sizes((512,), 0, 8, 32, 0, 0, 7, 2, "compiled"),
    "stall": Sizes((2000,), 32, 7, 32, 512, 0, 7, 2, "compiled"),
    "ttft": Sizes((512, 1024, 2048, 4000), 32, 0, 0, 0, 0, 3, 2, "compiled"),
    "disaggregated": Sizes((512,), 32, 3, 16, 0, 3, 3, 1, "eager"),
}
# Options that only some parts have a use for.
_ONLY: dict[str, tuple[Part, ...]] = {
    "suffix": ("stall", "ttft", "disaggregated"),
    "requests": ("overhead", "stall", "disaggregated"),
    "new_tokens": ("overhead", "stall", "disaggregated"),
    "budget": ("stall",),
    "documents": ("disaggregated",),
    "sender": ("ttft",),
    "group": ("stall", "ttft"),
    "checkpoint": ("overhead", "stall"),
}


def sizes_of(options: Options) -> Sizes:
    """What is asked for, with the part's defaults. ConfigError for what is out of range, or of no use to the part."""
    part, defaults = options.part, DEFAULTS[options.part]
    given = {**vars(options.models), **vars(options.sizes), **vars(options.runs)}
    for key, parts in _ONLY.items():
        if given[key] is not None and part not in parts:
            raise ConfigError(_option(key), f"given, and {part} has no use for it", f"for {', '.join(parts)}")
    if options.models.checkpoint is not None and options.models.config is not None:
        raise ConfigError("--checkpoint", "given next to --config", "one of them")
    chosen = {key: given[key] if given[key] not in (None, ()) else getattr(defaults, key) for key in vars(defaults)}
    for key in ("suffix", "requests", "new_tokens", "budget", "documents", "repeats", "threads"):
        if chosen[key] < 1 and getattr(defaults, key):
            raise ConfigError(_option(key), f"{chosen[key]} is too small", "1 or more")
    if options.runs.seed < 0:
        raise ConfigError("--seed", f"{options.runs.seed} is too small", "0 or more")
    contexts: tuple[int, ...] = chosen["context"]
    if len(contexts) > 1 and part != "ttft":
        raise ConfigError("--context", f"{len(contexts)} are given", "one; ttft takes several")
    if min(contexts) < 1 or len(set(contexts)) < len(contexts):
        raise ConfigError("--context", f"{', '.join(map(str, contexts))}", "1 or more, each once")
    out = options.output.out
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise ConfigError("--out", f"{out} cannot be written", "a file in a folder that is there")
    return Sizes(**chosen)


def _option(key: str) -> str:
    return f"--{key.replace('_', '-')}"
