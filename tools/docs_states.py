"""``python -m kvkin.tools.docs_states``: writes docs/states.md out of the state tables in the code; a test compares.

Three state machines have their table in the module's docstring, the router's requests have theirs in ``TRANSITIONS``. Nothing is
described twice: whoever changes a table runs this and commits the result.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "states.md"
# Who has such a table, and what goes through these states.
TABLES = (
    ("kv/execution.py", "A plan's execution"),
    ("decode_nodes/core.py", "A request on its decode node"),
    ("decode_nodes/drift.py", "A check for drift on a decode node"),
)
ROUTER = ("router/requests.py", "A request in the router")

HEAD = """# State machines

Made of the tables in the code by `python -m kvkin.tools.docs_states`; edit those, not this file.
"""


@dataclass(frozen=True)
class Row:
    """``state`` is a state's name or "any ..."; ``then`` is the next state's name, perhaps with a remark behind it."""

    state: str
    on: str
    then: str

    @property
    def target(self) -> str:
        return self.then.split()[0]


def rows_of(docstring: str) -> list[Row]:
    """Rows of the one table in a docstring. Raises ValueError if there is none, or one of other columns."""
    lines = docstring.splitlines()
    rules = [number for number, line in enumerate(lines) if re.fullmatch(r"=+( +=+){2}", line)]
    if len(rules) != 3:
        raise ValueError(f"{len(rules)} rules of a table with three columns (allowed: 3)")
    starts = [match.start() for match in re.finditer("=+", lines[rules[0]])]
    bounds = list(zip(starts, [*starts[1:], None], strict=True))
    return [Row(*(line[start:stop].strip() for start, stop in bounds)) for line in lines[rules[1] + 1 : rules[2]]]


def states_of(rows: Iterable[Row]) -> list[str]:
    """States that something leads out of, in the table's order."""
    return list(dict.fromkeys(row.state for row in rows if not row.state.startswith("any")))


def edges_of(rows: list[Row]) -> list[tuple[str, str, str]]:
    """(from, to, on), rows for "any" state written out."""
    return [
        (state, row.target, row.on)
        for row in rows
        for state in (states_of(rows) if row.state.startswith("any") else [row.state])
    ]


def table_section(title: str, file: str, rows: list[Row]) -> str:
    lines = [f"## {title}", "", f"`{file}`", "", "| state | on | then |", "|---|---|---|"]
    lines += [f"| {row.state} | {row.on} | {row.then} |" for row in rows]
    return "\n".join([*lines, "", *diagram(states_of(rows)[0], edges_of(rows)), ""])


def router_section() -> str:
    from kvkin.router.requests import TRANSITIONS, Phase

    file, title = ROUTER
    edges = [(phase.value, after.value, "") for phase in Phase for after in Phase if after in TRANSITIONS[phase]]
    meaning = re.sub(r"\s+", " ", (Phase.__doc__ or "").split("\n\n", 1)[1]).strip().replace("``", "`")
    lines = [f"## {title}", "", f"`{file}`. {meaning}", ""]
    return "\n".join([*lines, *diagram(next(iter(Phase)).value, edges), ""])


def diagram(first: str, edges: list[tuple[str, str, str]]) -> list[str]:
    """Mermaid lines; a state that nothing leads out of is an end."""
    inner = {start for start, _, _ in edges}
    ends = dict.fromkeys(stop for _, stop, _ in edges if stop not in inner)
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first}"]
    lines += [f"    {start} --> {stop}" + (f": {on}" if on else "") for start, stop, on in edges]
    return [*lines, *(f"    {end} --> [*]" for end in ends), "```"]


def render() -> str:
    """The whole document."""
    sections = [router_section()]
    for file, title in TABLES:
        docstring = ast.get_docstring(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        sections.append(table_section(title, file, rows_of(docstring or "")))
    return "\n".join([HEAD, *sections]).rstrip() + "\n"


if __name__ == "__main__":
    OUT.write_text(render(), encoding="utf-8")
