"""Tables of a running cluster for people: what ``kvkin status`` prints and ``kvkin up`` keeps on the screen.

Pure: from the router's ``status`` reply (and, under ``up``, the state of the own child processes) to rich renderables.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvkin.tools.cluster_processes import NodeProcess, NodeState
from kvkin.tools.drift_view import drift_table
from kvkin.tools.pairs_view import pairs_table
from kvkin.transport.messages import NodeStatus, StatusReply

_STYLES = {
    "alive": "green",
    "serving": "green",
    "died": "bold red",
    "dead": "bold red",
    "starting": "yellow",
    "draining": "yellow",
}
# Counters that a person asks for first; the rest follows by name.
_FIRST = (
    "requests",
    "finished",
    "fallbacks",
    "plan_exact",
    "plan_shared-prefix",
    "plan_partial",
    "plan_private",
    "orders",
)


def status_view(status: StatusReply) -> RenderableType:
    """A whole status reply: one line on the router, the nodes, the counters, pairs of models, and their drift."""
    parts: list[RenderableType] = [_router_line(status), _nodes_table({node.name: node for node in status.nodes}, {})]
    parts.append(counters_line(status))
    if status.pairs:
        parts += [Text(), pairs_table(status.pairs)]
    if status.drift:
        parts += [Text(), drift_table(status.drift)]
    return Group(*parts)


def up_view(processes: Mapping[str, NodeProcess], status: StatusReply | None, note: str) -> RenderableType:
    """The screen of ``kvkin up``: every node of this host, whatever the router knows of it, and of other hosts' nodes."""
    known = {} if status is None else {node.name: node for node in status.nodes}
    parts: list[RenderableType] = [
        Text(note) if status is None else _router_line(status),
        _nodes_table(known, processes),
    ]
    if status is not None:
        parts.append(counters_line(status))
        off = [pair for pair in status.drift if pair.state == "off"]
        if off:
            parts.append(drift_table(off))
    parts += [
        Text(f"{node.name} {node.ended}; its log: {node.log_path}", style="red")
        for node in processes.values()
        if node.state is NodeState.DIED
    ]
    if status is not None:
        parts.append(Text(note, style="dim"))
    return Group(*parts)


def counters_line(status: StatusReply) -> Text:
    """The router's counters in one line, zeros left out."""
    counters = status.counters
    names = [name for name in _FIRST if name in counters] + sorted(name for name in counters if name not in _FIRST)
    text = ", ".join(f"{name.replace('_', ' ')} {counters[name]}" for name in names if counters[name])
    return Text(text or "no request yet")


def _router_line(status: StatusReply) -> Text:
    return Text(
        f"{status.router}: up {duration(status.uptime_s)}, {status.running} running, {status.index_blocks} blocks in the index"
    )


def _nodes_table(known: Mapping[str, NodeStatus], processes: Mapping[str, NodeProcess]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("node", "role", "state"):
        table.add_column(column, no_wrap=True)
    for column in (
        "run",
        "wait",
        "KV",
        "E",
        "blocks",
        "leases",
        "done",
        "failed",
        "fallbacks",
        "layer tok/s",
        "pull MB/s",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("models", overflow="fold")
    for name in dict.fromkeys([*processes, *known]):
        process, node = processes.get(name), known.get(name)
        state = _state(process, node)
        role = process.role if process is not None else node.role if node is not None else ""
        shown = Text(state, style=_STYLES.get(state, ""))
        if node is None:
            table.add_row(name, role, shown)
        else:
            table.add_row(name, role, shown, *_load_cells(node), ", ".join(node.models))
    return table


def _state(process: NodeProcess | None, node: NodeStatus | None) -> str:
    """The process's own state as long as it is not simply serving; then what the router thinks of it."""
    if process is not None and (process.state is not NodeState.SERVING or node is None):
        return process.state.value
    assert node is not None
    return node.state


def _load_cells(node: NodeStatus) -> list[str]:
    load = node.load
    return [
        str(load.running),
        str(load.waiting),
        _share(load.kv_slots_used, load.kv_slots_total),
        _share(load.e_slots_used, load.e_slots_total),
        str(node.holdings),
        str(load.leases),
        str(load.finished),
        str(load.failed),
        str(load.fallbacks) if node.role == "decode" else "",
        # a model of L layers prefills an L-th of it in tokens
        f"{load.prefill_layer_tokens_per_s:,.0f}" if load.prefill_layer_tokens_per_s else "",
        f"{load.pull_bytes_per_s / 1e6:,.0f}" if load.pull_bytes_per_s else "",
    ]


def _share(used: int, total: int) -> str:
    return f"{100 * used / total:.0f}%" if total else ""


def duration(seconds: float) -> str:
    """1 h 02 min, 3 min 04 s, 5 s."""
    whole = int(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 60} min {whole % 60:02} s" if whole >= 60 else f"{whole} s"
