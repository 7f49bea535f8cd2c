"""``kvkin config check`` and ``kvkin config show``: is a cluster file usable, and what does it say with all defaults?

Runs in the CLI's process and imports no torch. ``check`` reads every checkpoint of the file and prints which layers each model
shares with its base, so that a fine-tune which shares nothing is noticed before it is served, and which pairs of models are
profiled.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from kvkin.configs.convert import child_key
from kvkin.configs.families import ResolvedCluster, ResolvedFamily, resolve_cluster
from kvkin.configs.loader import load_cluster, show_cluster
from kvkin.configs.pairs import PairReuse, pair_reuse
from kvkin.configs.quantised import check_packages
from kvkin.configs.schema import ClusterConfig
from kvkin.configs.vllm_install import check_installed, missing_warnings
from kvkin.configs.vllm_node import vllm_node
from kvkin.configs.vllm_rules import family_name, node_engine, vllm_nodes
from kvkin.kv.errors import ConfigError
from kvkin.kv.lineage import shared_depth, shared_transition
from kvkin.tools.cluster_processes import local_nodes
from kvkin.tools.out_folder import check_out_folder
from kvkin.tools.pairs_view import groups_text

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
            config = load_cluster(self.file)
            here = _vllm_nodes_here(config)
            check_installed(config, here)
            if _nodes_here(config):
                check_out_folder("state_dir", config.state_path)
            cluster = resolve_cluster(config, progress=_Progress())
            _check_packages(cluster)
            for name in here:
                vllm_node(config, cluster.families[family_name(config, name)], name)
        except ConfigError as error:
            return _refuse(self.file, error)
        # a pipe has no width: rich would wrap at 80 columns and break names
        console = Console(width=None if sys.stdout.isatty() else 160)
        for family in cluster.families.values():
            console.print(_family_table(cluster, family))
        pairs = pair_reuse(cluster.families.values())
        if pairs:
            console.print(_pairs_table(pairs))
        for warning in (*cluster.warnings, *missing_warnings(config, here)):
            console.print(f"warning: {warning}", markup=False, highlight=False, soft_wrap=True)
        models = sum(len(family.models) for family in cluster.families.values())
        counts = f"models: {models}, families: {len(config.families)}, nodes: {len(config.nodes)}"
        for family in cluster.families.values():
            for profile in family.profiles.refused:
                if profile.malformed:
                    return _refuse(self.file, ConfigError(str(profile.path), f"is no profile: {profile.reason}"))
        console.print(f"{self.file}: usable ({counts})", markup=False, highlight=False, soft_wrap=True)
        return 0


@dataclass(frozen=True)
class ConfigShow:
    """Print a cluster file with every default filled in; it is a cluster file again. Comments name the pairs that are profiled."""

    file: Annotated[Path, tyro.conf.Positional]
    """The cluster file."""

    def run(self) -> int:
        """Print YAML on stdout. Returns 0, or 2 after one line on stderr."""
        try:
            config = load_cluster(self.file)
        except ConfigError as error:
            return _refuse(self.file, error)
        print(show_cluster(config), end="")
        for line in _pair_comments(config):
            print(f"# {line}")
        return 0


def _vllm_nodes_here(config: ClusterConfig) -> list[str]:
    """Nodes that would run on this host's vLLM."""
    nodes = vllm_nodes(config)
    return [name for name in _nodes_here(config) if name in nodes] if nodes else []


def _nodes_here(config: ClusterConfig) -> list[str]:
    try:
        return local_nodes(config)
    except ConfigError:  # none of the cluster's hosts is this one
        return []


def _pair_comments(config: ClusterConfig) -> list[str]:
    """A line for each pair, where profiles are configured; whether they hold only the checkpoints can tell."""
    if not any(family.profiles for family in config.families.values()):
        return []
    try:
        pairs = pair_reuse(resolve_cluster(config, progress=_Progress()).families.values())
    except ConfigError as error:
        return [f"which profiles hold is not known: {' '.join(str(error).split())}"]
    return [" ".join(f"{one.sender} -> {one.receiver}: {one.state}, {_points_text(one)}".split()) for one in pairs]


def _pairs_table(pairs: list[PairReuse]) -> Table:
    table = Table(title="reuse across models beyond what is shared exactly", title_justify="left")
    for column in ("sender", "receiver", "state", "recomputed layers: loss", "profile"):
        table.add_column(column, overflow="fold")
    for one in pairs:
        table.add_row(one.sender, one.receiver, one.state.value, groups_text(_groups(one)), one.why)
    return table


def _groups(pair: PairReuse) -> list[tuple[tuple[int, int] | None, float | None]]:
    return [
        (None if one.group is None else (one.group.start, one.group.stop), None if math.isinf(one.loss) else one.loss)
        for one in pair.points
    ]


def _points_text(pair: PairReuse) -> str:
    return f"{groups_text(_groups(pair)) or 'exact reuse only'}{f' ({pair.why})' if pair.why else ''}"


def _check_packages(cluster: ResolvedCluster) -> None:
    """What loads quantised checkpoints is asked for here: this host is taken for one of the nodes'."""
    for family in cluster.families.values():
        for name, model in family.models.items():
            key = child_key(f"{child_key('families', family.name)}.models", name)
            check_packages(model.geometry.quantisation, f"{key}.checkpoint")


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
    for name, node in (cluster.config.prefill_nodes | cluster.config.decode_nodes | cluster.config.attached).items():
        for served_model in node.models:
            engine = _engine_of(cluster.config, name)
            served.setdefault(served_model, []).append(f"{name}{engine}")
    for name, model in family.models.items():
        depth = shared_depth(model.lineage, base.lineage)
        layers = "all layers" if depth == base.num_layers else f"layers [0, {depth})" if depth else "none"
        own_template = model.chat_template is not None and model.chat_template_digest != base.chat_template_digest
        table.add_row(
            f"{name} (base)" if name == family.config.base else name,
            model.numerics.split("/")[0].split("@")[0] + (" + LoRA" if model.adapter_path else ""),
            layers,
            f"layer {shared_transition(model.lineage, base.lineage)}",
            ("own" if own_template else "family") + (", own tokens" if name in family.own_root else ""),
            ", ".join(served.get(name, [])) or "nobody",
        )
    return table


def _engine_of(config: ClusterConfig, name: str) -> str:
    if name in config.attached:
        return " (vllm serve)"
    return "" if node_engine(config, name) == "reference" else " (vllm)"


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
