"""Scores of generated text: token F1, exact match, ROUGE-L, edit similarity, likelihood; greedy decoding.

``kvkin finetune`` scores the base and the fine-tune with it on identical prompts, ``kvkin profile`` and ``kvkin evaluate``
score by the metrics in ``METRICS``. Pure except for ``greedy``, which runs a transformers model in the caller's process. F1,
exact match and their normalisation follow the SQuAD v1.1 evaluation script (Rajpurkar et al., 2016); ROUGE-L is the
sentence-level F-measure of Lin, 2004, with the words of the ``rouge-score`` package (no stemming); edit similarity is the
one of CodeXGLUE's line completion (1 - Levenshtein distance / longer length), here between 0 and 1.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rapidfuzz.distance import LCSseq, Levenshtein

from kvkin.kv.errors import ConfigError

if TYPE_CHECKING:
    import torch

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WORD = re.compile(r"[^\W_]+")  # of ASCII text the words that rouge-score sees; other scripts have words here, too


def normalize_answer(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces: the SQuAD normalisation."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """Best harmonic mean of word precision and recall over the accepted ``answers``, between 0 and 1."""
    return max((_pair_f1(prediction, answer) for answer in answers), default=0.0)


def _pair_f1(prediction: str, answer: str) -> float:
    got, wanted = normalize_answer(prediction).split(), normalize_answer(answer).split()
    if not got or not wanted:
        return float(got == wanted)
    common = sum((Counter(got) & Counter(wanted)).values())
    return 2 * common / (len(got) + len(wanted))


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the normalised prediction is one of the normalised ``answers``, else 0."""
    return float(normalize_answer(prediction) in {normalize_answer(answer) for answer in answers})


def rouge_l(prediction: str, answers: Sequence[str]) -> float:
    """Best F-measure over ``answers`` of the longest common subsequence of words, between 0 and 1."""
    return max((_pair_rouge(prediction, answer) for answer in answers), default=0.0)


def _pair_rouge(prediction: str, answer: str) -> float:
    got, wanted = _WORD.findall(prediction.lower()), _WORD.findall(answer.lower())
    if not got or not wanted:
        return 0.0
    return 2 * float(LCSseq.similarity(got, wanted)) / (len(got) + len(wanted))


def edit_similarity(prediction: str, answers: Sequence[str]) -> float:
    """Best 1 - Levenshtein distance / longer length over ``answers``, characters compared, between 0 and 1."""
    return max((float(Levenshtein.normalized_similarity(prediction, answer)) for answer in answers), default=0.0)


def first_lines(text: str, num_lines: int) -> str:
    """The first ``num_lines`` lines that are neither blank nor a Markdown code fence, right-stripped.

    Blank lines and fences are skipped so that a chatty model is judged by what it says, not by how it begins.
    """
    lines = (line.rstrip() for line in text.split("\n"))
    return "\n".join([line for line in lines if line and not line.lstrip().startswith("```")][:num_lines])


def has_lines(text: str, num_lines: int) -> bool:
    """Whether ``first_lines(text, num_lines)`` can no longer change: that many lines are complete."""
    complete = text.rpartition("\n")[0]
    return first_lines(complete, num_lines).count("\n") + 1 >= num_lines and bool(first_lines(complete, 1))


@dataclass(frozen=True)
class EvaluationMetric:
    """How an evaluation scores answers; every score lies between 0 and 1 and higher is better.

    ``score`` compares generated text with the accepted answers, after both were cut by ``cut``. A metric that
    ``needs_logits`` has none: it is ``likelihood_score`` of the gold answer's tokens, and nothing is generated.
    """

    name: str
    title: str
    max_new_tokens: int  # greedy tokens at most, unless the caller says otherwise
    num_lines: int  # lines of an answer that count; 0: all of it
    score: Callable[[str, Sequence[str]], float]
    needs_logits: bool = False

    def cut(self, text: str, num_lines: int | None = None) -> str:
        """The part of a generated text that is scored; ``num_lines`` in place of the metric's own if it is given."""
        lines = self.num_lines if num_lines is None else num_lines
        return first_lines(text, lines) if lines else text.strip()


def likelihood_score(logits: torch.Tensor, answer_ids: Sequence[int]) -> float:
    """exp(-mean negative log-likelihood a token) of an answer; logits (m, vocab) that predict its m >= 1 ids."""
    import torch

    if len(logits) != len(answer_ids) or not answer_ids:
        raise ValueError(
            f"{len(logits)} rows of logits for {len(answer_ids)} answer tokens (allowed: as many, 1 or more)"
        )
    targets = torch.tensor(list(answer_ids), device=logits.device)
    return math.exp(-float(torch.nn.functional.cross_entropy(logits.float(), targets)))


def _no_text(prediction: str, answers: Sequence[str]) -> float:
    raise TypeError("this metric scores logits, not text: likelihood_score")


METRICS: Mapping[str, EvaluationMetric] = {
    metric.name: metric
    for metric in (
        EvaluationMetric("f1", "token F1", 28, 1, token_f1),
        EvaluationMetric("exact_match", "exact match", 28, 1, exact_match),
        EvaluationMetric("rouge_l", "ROUGE-L", 96, 0, rouge_l),
        EvaluationMetric("edit_similarity", "edit similarity", 56, 2, edit_similarity),
        EvaluationMetric("loss", "likelihood of the answer", 0, 0, _no_text, needs_logits=True),
    )
}


def metric_named(name: str) -> EvaluationMetric:
    """The metric of ``METRICS``. Raises ConfigError for a name that is none."""
    if name not in METRICS:
        raise ConfigError("metric", f"no metric {name!r}", ", ".join(METRICS))
    return METRICS[name]


@dataclass(frozen=True)
class Summary:
    """Mean of ``n`` scores with the half width of its 95 % interval (normal approximation)."""

    mean: float
    half_width: float
    n: int

    def as_dict(self) -> dict[str, float | int]:
        return {"mean": round(self.mean, 4), "half_width_95": round(self.half_width, 4), "n": self.n}

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.half_width:.3f} (n={self.n})"


def summarize(scores: Sequence[float]) -> Summary:
    """Mean and 95 % interval of ``scores``; an empty sequence has mean 0 and n 0."""
    n = len(scores)
    if n == 0:
        return Summary(0.0, 0.0, 0)
    mean = math.fsum(scores) / n
    variance = math.fsum((score - mean) ** 2 for score in scores) / max(1, n - 1)
    return Summary(mean, 1.96 * math.sqrt(variance / n), n)


def greedy(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    done: Callable[[str], bool],
    batch_size: int = 16,
    batch_tokens: int = 6144,
    on_prompt: Callable[[int], None] = lambda count: None,
) -> list[str]:
    """Greedy continuations of token-id ``prompts``, in their order, decoded without special tokens.

    A continuation ends at the tokenizer's EOS, after ``max_new_tokens``, or once ``done(text)`` holds. Prompts of like
    length run together, padded on the left, up to ``batch_size`` prompts and ``batch_tokens`` padded tokens.
    ``on_prompt(count)`` is called as prompts finish.
    """
    texts = [""] * len(prompts)
    left = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index), reverse=True)
    while left:
        num_rows = max(1, min(batch_size, batch_tokens // len(prompts[left[0]])))  # the longest decides the width
        rows, left = left[:num_rows], left[num_rows:]
        batch = [prompts[row] for row in rows]
        for row, text in zip(rows, _greedy_batch(model, tokenizer, batch, max_new_tokens, done), strict=True):
            texts[row] = text
        on_prompt(len(rows))
    return texts


def _greedy_batch(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, done: Callable[[str], bool]
) -> list[str]:
    import torch

    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros((len(prompts), width), dtype=torch.long)  # (rows, width); the pad id never matters: it is masked
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    generated: list[list[int]] = [[] for _ in prompts]
    texts = [""] * len(prompts)
    running = set(range(len(prompts)))
    cache: Any = None
    with torch.inference_mode():
        for _ in range(max_new_tokens):
            out = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = out.past_key_values
            chosen: torch.Tensor = out.logits[:, -1].argmax(-1)  # (rows,)
            for row in sorted(running):
                token = int(chosen[row])
                if token != tokenizer.eos_token_id:
                    generated[row].append(token)
                    texts[row] = tokenizer.decode(generated[row], skip_special_tokens=True)
                if token == tokenizer.eos_token_id or done(texts[row]):
                    running.discard(row)
            if not running:
                break
            ids, positions = chosen[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones((len(prompts), 1))], dim=1)
    return texts
