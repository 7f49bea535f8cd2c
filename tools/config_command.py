"""``kvkin config check`` and ``kvkin config show``: is a cluster file usable, and what does it say with all defaults?

Runs in the CLI's process and imports no torch. ``check`` reads every checkpoint of the file and prints which layers each model
shares with its base, so that a fine-tune which shares nothing is noticed before it is served.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from kvkin.configs.families import ResolvedCluster, ResolvedFamily, resolve_cluster
from kvkin.configs.loader import load_cluster, show_cluster
from kvkin.kv.errors import ConfigError
from kvkin.kv.lineage import shared_depth, shared_transition

EXIT_UNUSABLE = 2
# Hashing that takes longer than this says how far it is.
_PROGRESS_AFTER_S = 2.0


@dataclass(frozen=True)
class ConfigCheck:
    """Check a cluster file and all checkpoints that it names; exit status 2 and one line if it cannot be used."""

    file: Annotated[Path, tyro.conf.Positional]
    """The cluster file."""

    def run(self) -> int:
        """Print models, shared layers and warnings. Returns 0, or 2 after one line on stderr."""
        try:
            cluster = resolve_cluster(load_cluster(self.file), progress=_Progress())
        except ConfigError as error:
            return _refuse(self.file, error)
        # a pipe has no width: rich would wrap at 80 columns and break names
        console = Console(width=None if sys.stdout.isatty() else 160)
        for family in cluster.families.values():
            console.print(_family_table(cluster, family))
        for warning in cluster.warnings:
            console.print(f"warning: {warning}", markup=False, highlight=False, soft_wrap=True)
        config, models = cluster.config, sum(len(family.models) for family in cluster.families.values())
        counts = f"models: {models}, families: {len(config.families)}, nodes: {len(config.nodes)}"
        console.print(f"{self.file}: usable ({counts})", markup=False, highlight=False, soft_wrap=True)
        return 0


@dataclass(frozen=True)
class ConfigShow:
    """Print a cluster file with every default filled in; it is a cluster file again."""

    file: Annotated[Path, tyro.conf.Positional]
    """The cluster file."""

    def run(self) -> int:
        """Print YAML on stdout. Returns 0, or 2 after one line on stderr."""
        try:
            print(show_cluster(load_cluster(self.file)), end="")
        except ConfigError as error:
            return _refuse(self.file, error)
        return 0


def _refuse(file: Path, error: ConfigError) -> int:
    where = "" if error.key == str(file) else f"{file}: "
    print(f"kvkin: {where}{error}", file=sys.stderr)
    return EXIT_UNUSABLE


def _family_table(cluster: ResolvedCluster, family: ResolvedFamily) -> Table:
    base = family.base
    layout = family.layout
    kib_per_token = layout.num_layers * layout.kv_token_bytes / 1024
    title = (
        f"{family.name}: {base.architecture}, {base.num_layers} layers, {family.compute_dtype} on {family.device}, "
        f"{kib_per_token:.1f} KiB of KV a token, {family.max_context_tokens} tokens of context"
    )
    table = Table(title=title, title_justify="left")
    for column in ("model", "weights", "KV shared with base", "E shared up to", "template", "served by"):
        table.add_column(column, overflow="fold")
    served: dict[str, list[str]] = {}
    for name, node in (cluster.config.prefill_nodes | cluster.config.decode_nodes).items():
        for served_model in node.models:
            served.setdefault(served_model, []).append(name)
    for name, model in family.models.items():
        depth = shared_depth(model.lineage, base.lineage)
        layers = "all layers" if depth == base.num_layers else f"layers [0, {depth})" if depth else "none"
        own_template = model.chat_template is not None and model.chat_template_digest != base.chat_template_digest
        table.add_row(
            f"{name} (base)" if name == family.config.base else name,
            model.numerics.split("/")[0] + (" + LoRA" if model.adapter_path else ""),
            layers,
            f"layer {shared_transition(model.lineage, base.lineage)}",
            ("own" if own_template else "family") + (", own tokens" if name in family.own_root else ""),
            ", ".join(served.get(name, [])) or "nobody",
        )
    return table


class _Progress:
    """Says on stderr how far the first hashing of large checkpoints is, a line at a time, at most once a second."""

    def __init__(self) -> None:
        self._next_s = time.monotonic() + _PROGRESS_AFTER_S

    def __call__(self, what: str, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + 1.0
        gib = 1 << 30
        print(f"digesting {what}: {done_bytes / gib:.1f} of {total_bytes / gib:.1f} GiB", file=sys.stderr, flush=True)
