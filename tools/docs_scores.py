"""``python -m kvkin.tools.docs_scores``: writes the demo family's scores into README.md, from the cards of its adapters.

Between two marks, and nothing else: no figure is typed in by hand. A test compares once there are cards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- scores: begin -->\n", "<!-- scores: end -->"
HEAD = "| model | task | metric | prompts | n | base | fine-tune | gain (95 %) |\n|---|---|---|---|---|---|---|---|\n"
TASKS = {"qa": "extractive question answering", "code": "Python completion"}


def cards() -> dict[str, dict[str, Any]]:
    """Model name -> its card, for every adapter that was scored."""
    files = sorted((ROOT / "configs" / "models").glob("*/kvkin_card.json"), reverse=True)
    found = {file.parent.name: json.loads(file.read_text(encoding="utf-8")) for file in files}
    return {name: card for name, card in found.items() if "scores" in card}


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: for each model one row over all held-out prompts, then one for each kind of prompt."""
    rows = []
    for name, card in found.items():
        scores = card["scores"]
        for kind, before in scores["before"].items():
            after, gained = scores["after"][kind], scores["gain"]
            means = f"{before['n']} | {before['mean']:.3f} | {after['mean']:.3f}"
            if kind == "all":
                task, layers = TASKS[card["task"]], card["settings"]["layers"]
                what = f"`{name}` (LoRA on layers {layers}) | {task} | {scores['metric']}"
                rows.append(f"| {what} | all | {means} | {gained['mean']:+.3f} ± {gained['half_width_95']:.3f} |")
            else:
                rows.append(f"| | | | {kind} | {means} | |")
    return HEAD + "".join(f"{row}\n" for row in rows)


def with_scores(text: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    """``text`` with the part between the marks replaced."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table(found) + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    README.write_text(with_scores(README.read_text(encoding="utf-8"), cards()), encoding="utf-8")
