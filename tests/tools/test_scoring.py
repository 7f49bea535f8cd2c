"""Scores: SQuAD's token F1, edit similarity, the lines of an answer that count, and means with intervals."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkin.kv.errors import ConfigError
from kvkin.tools.scoring import (
    METRICS,
    edit_similarity,
    exact_match,
    first_lines,
    has_lines,
    likelihood_score,
    metric_named,
    normalize_answer,
    rouge_l,
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


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("The 308, points!", ["a 308 points"], 1.0),
        ("308 points", ["308"], 0.0),
        ("points 308", ["308 points"], 0.0),
        ("b", ["a", "x", "B."], 1.0),
        ("", ["cat"], 0.0),
        ("the", [""], 1.0),
        ("anything", [], 0.0),
    ],
)
def test_exact_match(prediction: str, answers: list[str], expected: float) -> None:
    assert exact_match(prediction, answers) == expected


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("police killed the gunman", ["police kill the gunman"], 3 / 4),  # Lin, 2004: the example of section 3.1
        ("police kill the gunman", ["the gunman kill police"], 2 / 4),
        ("the gunman police killed", ["police killed the gunman"], 2 / 4),
        ("A-b, c!", ["a b c"], 1.0),
        ("a b", ["x", "a b c d"], 4 / 6),
        ("snake_case", ["snake case"], 1.0),
        ("Größe zählt", ["größe zählt"], 1.0),
        ("", ["a"], 0.0),
        ("!", ["!"], 0.0),
        ("a", [], 0.0),
    ],
)
def test_rouge_l(prediction: str, answers: list[str], expected: float) -> None:
    assert rouge_l(prediction, answers) == pytest.approx(expected)


@given(st.lists(st.sampled_from("abc"), max_size=7), st.lists(st.sampled_from("abc"), max_size=7))
def test_rouge_l_is_the_longest_common_subsequence(left: list[str], right: list[str]) -> None:
    common = {part for size in range(len(right) + 1) for part in itertools.combinations(right, size)}
    longest = max(size for size in range(len(left) + 1) if any(p in common for p in itertools.combinations(left, size)))
    expected = 2 * longest / (len(left) + len(right)) if left and right else 0.0
    assert rouge_l(" ".join(left), [" ".join(right)]) == pytest.approx(expected)


@given(st.text("ab. \n"), st.lists(st.text("ab. \n"), min_size=1, max_size=3))
def test_scores_of_text_are_shares_and_more_answers_never_hurt(text: str, answers: list[str]) -> None:
    for metric in METRICS.values():
        if metric.needs_logits:
            continue
        scores = [metric.score(text, answers[:count]) for count in range(1, len(answers) + 1)]
        assert all(0.0 <= score <= 1.0 for score in scores)
        assert scores == sorted(scores)
        if normalize_answer(text):
            assert metric.score(text, [text]) == pytest.approx(1.0)


def test_likelihood_is_the_geometric_mean_of_the_tokens_probabilities() -> None:
    chances = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], dtype=torch.float64)
    assert likelihood_score(chances.log(), [0, 2]) == pytest.approx(math.sqrt(0.5 * 0.8), rel=1e-6)
    assert likelihood_score(chances.log() + 7, [0, 2]) == pytest.approx(math.sqrt(0.5 * 0.8), rel=1e-6)
    assert likelihood_score(torch.zeros(3, 10), [1, 2, 3]) == pytest.approx(0.1)
    for logits, ids in ((torch.zeros(2, 3), [1]), (torch.zeros(0, 3), [])):
        with pytest.raises(ValueError, match=r"rows of logits for \d answer tokens \(allowed: as many, 1 or more\)"):
            likelihood_score(logits, ids)


def test_metrics_by_name() -> None:
    assert list(METRICS) == ["f1", "exact_match", "rouge_l", "edit_similarity", "loss"]
    assert all(metric_named(name).name == name for name in METRICS)
    with pytest.raises(ConfigError, match=r"^metric: no metric 'bleu' \(allowed: f1, exact_match, rouge_l"):
        metric_named("bleu")
    assert [name for name, metric in METRICS.items() if metric.needs_logits] == ["loss"]
    with pytest.raises(TypeError, match="likelihood_score"):
        METRICS["loss"].score("a", ["a"])


def test_a_metric_cuts_what_is_scored() -> None:
    text = "\n first \n\nsecond\nthird\n"
    assert METRICS["f1"].cut(text) == " first"
    assert METRICS["edit_similarity"].cut(text) == " first\nsecond"
    assert METRICS["rouge_l"].cut(text) == "first \n\nsecond\nthird"
    assert METRICS["f1"].cut(text, 0) == "first \n\nsecond\nthird"
    assert METRICS["rouge_l"].cut(text, 1) == " first"
