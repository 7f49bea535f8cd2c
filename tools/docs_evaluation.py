"""``python -m kvkin.tools.docs_evaluation``: writes the tables of docs/evaluation.md from the results beside it.

A result is the JSON of ``kvkin evaluate`` in docs/evaluation/NAME.json, or a profile in profiles/NAME.json. Its table goes between
``<!-- NAME: begin -->`` and ``<!-- NAME: end -->``, and nothing else is touched: no figure is typed in by hand. A test compares.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvkin.configs.profiles import read_profile
from kvkin.tools.evaluate_report import ARM_HEAD, EQUAL_HEAD, arm_rows, equal_rows
from kvkin.tools.profile_report import HEAD, rows, verdict

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "evaluation.md"
_MARKED = re.compile(r"(<!-- (?P<name>[\w./-]+): begin -->\n)(?P<body>.*?)(<!-- (?P=name): end -->)", re.DOTALL)


def filled(text: str) -> str:
    """``text`` with what stands between each pair of marks replaced. Raises FileNotFoundError for a result that is not there."""
    return _MARKED.sub(lambda found: f"{found[1]}{_body(found['name'])}{found[4]}", text)


def names(text: str) -> list[str]:
    """The results that ``text`` shows."""
    return [found["name"] for found in _MARKED.finditer(text)]


def _body(name: str) -> str:
    kind, _, stem = name.partition("/")
    shown: dict[str, Callable[[str], str]] = {"evaluation": _evaluation, "profile": _profile}
    return shown[kind](stem)


def _evaluation(stem: str) -> str:
    result: dict[str, Any] = json.loads((DOCUMENT.parent / "evaluation" / f"{stem}.json").read_text(encoding="utf-8"))
    context, made = result["context_tokens"], result["made"]
    head = (
        f"`{result['receiver']}` on the KV of `{result['sender']}`: {result['cases']} cases of {result['data']['name']} (split "
        f"{result['data']['split']}), contexts of {context['min']} to {context['max']} tokens (median {context['p50']}), "
        f"{result['metric']['title']}; {made['device']}, {made['dtype']}, {made['threads']} threads.\n\n"
        f"    {result['command']}\n\n"
    )
    text = head + _table(ARM_HEAD, arm_rows(result))
    if result["equal_latency"]:
        text += "\nAt equal latency:\n\n" + _table(EQUAL_HEAD, equal_rows(result))
    return text


def _profile(stem: str) -> str:
    profile = read_profile(ROOT / "profiles" / f"{stem}.json")
    data = profile.data
    head = (
        f"`{profile.receiver.name}` on the KV of `{profile.sender.name}`: {data.samples} cases of {data.name} (split {data.split}), "
        f"contexts of {data.context_tokens.min} to {data.context_tokens.max} tokens. {verdict(profile)}\n\n"
    )
    return head + _table(HEAD, rows(profile, frontier_only=True))


def _table(head: tuple[str, ...], body: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *body))


if __name__ == "__main__":
    DOCUMENT.write_text(filled(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
