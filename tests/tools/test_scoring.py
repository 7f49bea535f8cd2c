"""Scores: SQuAD's token F1, edit similarity, the lines of an answer that count, and means with intervals."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkin.tools.scoring import (
    edit_similarity,
    first_lines,
    has_lines,
    normalize_answer,
    summarize,
    token_f1,
)


def test_normalisation_drops_case_punctuation_articles_and_spaces() -> None:
    assert normalize_answer("  The  cat, an owl & A dog! ") == "cat owl dog"
    assert normalize_answer("theatre") == "theatre"


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("308", ["308"], 1.0),
        ("The 308 points.", ["308 points"], 1.0),
        ("308 points", ["308"], 2 / 3),
        ("Denver Broncos won", ["Carolina", "the Denver Broncos"], 4 / 5),
        ("cat cat", ["cat"], 2 / 3),
        ("dog", ["cat"], 0.0),
        ("", ["cat"], 0.0),
        ("the", ["a"], 1.0),
        ("anything", [], 0.0),
    ],
)
def test_token_f1(prediction: str, answers: list[str], expected: float) -> None:
    assert token_f1(prediction, answers) == pytest.approx(expected)


def test_edit_similarity_takes_the_best_answer() -> None:
    assert edit_similarity("return x", ["return x"]) == 1.0
    assert edit_similarity("return x", ["return y", "pass"]) == pytest.approx(7 / 8)
    assert edit_similarity("", ["abc"]) == 0.0
    assert edit_similarity("abc", []) == 0.0


def test_first_lines_skip_blank_lines_and_fences_and_keep_indentation() -> None:
    text = "\n```python\n    a = 1  \n\n    b = 2\n```\n    c = 3\n"
    assert first_lines(text, 1) == "    a = 1"
    assert first_lines(text, 2) == "    a = 1\n    b = 2"
    assert first_lines(text, 9) == "    a = 1\n    b = 2\n    c = 3"
    assert first_lines("\n \n", 2) == ""


@pytest.mark.parametrize(
    ("text", "num_lines", "expected"),
    [
        ("", 1, False),
        ("a", 1, False),
        ("\n\n", 1, False),
        ("a\n", 1, True),
        ("\na\nb", 2, False),
        ("\na\nb\n", 2, True),
    ],
)
def test_has_lines(text: str, num_lines: int, expected: bool) -> None:
    assert has_lines(text, num_lines) is expected


@given(st.text("ab` \n"), st.text("ab` \n"), st.integers(1, 3))
def test_once_lines_are_complete_more_text_changes_nothing(text: str, more: str, num_lines: int) -> None:
    if has_lines(text, num_lines):
        assert first_lines(text + more, num_lines) == first_lines(text, num_lines)


def test_summary_of_scores() -> None:
    summary = summarize([0.0, 1.0, 0.0, 1.0])
    assert (summary.mean, summary.n) == (0.5, 4)
    assert summary.half_width == pytest.approx(1.96 * math.sqrt((4 * 0.25 / 3) / 4))
    assert summarize([]).as_dict() == {"mean": 0.0, "half_width_95": 0.0, "n": 0}
    assert summarize([0.7]).as_dict() == {"mean": 0.7, "half_width_95": 0.0, "n": 1}
