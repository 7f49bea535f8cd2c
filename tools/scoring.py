"""Scores of generated text: token F1 for question answering, edit similarity for code, greedy decoding for both.

``kvkin finetune`` scores the base and the fine-tune with it on identical prompts; profiles and quality checks may use
the same functions. Pure except for ``greedy``, which runs a transformers model in the caller's process. F1 and its
normalisation follow the SQuAD v1.1 evaluation script (Rajpurkar et al., 2016); edit similarity is the one of
CodeXGLUE's line completion (1 - Levenshtein distance / longer length), here between 0 and 1.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rapidfuzz.distance import Levenshtein

if TYPE_CHECKING:
    import torch

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


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
