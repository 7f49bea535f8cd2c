"""docs/evaluation.md shows what was measured: its tables are those of the results beside it."""

from __future__ import annotations

import re

import pytest

from kvkin.tools.docs_evaluation import DOCUMENT, ROOT, filled, names


def test_tables_are_those_of_the_results() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert names(text), "no marks"
    assert filled(text) == text, "run python -m kvkin.tools.docs_evaluation"


def test_a_changed_figure_is_noticed() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    score = re.search(r"\| 0\.\d{3} ", text)
    assert score is not None
    changed = text.replace(score[0], "| 0.999 ", 1)
    assert changed != text
    assert filled(changed) == text


def test_results_that_nobody_shows_and_shown_ones_that_are_missing() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    shown = [
        name for name in names(text) if not name.startswith("summary/") and not _says_that_it_is_missing(text, name)
    ]
    results = sorted((DOCUMENT.parent / "evaluation").glob("*.json"))
    kinds = ("serving", "pipeline", "engine")
    there = [
        f"{next((kind for kind in kinds if file.stem.startswith(kind)), 'evaluation')}/{file.stem}" for file in results
    ]
    there += [f"profile/{file.stem}" for file in sorted((ROOT / "profiles").glob("*.json"))]
    assert sorted(shown) == sorted(there)
    with pytest.raises((OSError, KeyError)):
        filled("<!-- evaluation/never-measured: begin -->\n<!-- evaluation/never-measured: end -->")


def _says_that_it_is_missing(text: str, name: str) -> bool:
    """Only the comparison with vLLM may be unmeasured, and then the document says so."""
    return name.startswith("engine/") and f"<!-- {name}: begin -->\nNot measured yet:" in text
