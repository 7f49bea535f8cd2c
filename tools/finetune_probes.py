"""Held-out prompts on which ``kvkin finetune`` scores the base and the fine-tune, and the scoring itself.

Prompts come from groups (articles, modules) of the test split only; which ones is decided by hashes, not by the seed
of the training, so that two runs on the same data are scored on the same prompts. Called by ``finetune.py``.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvkin.tools.finetune_data import CONTINUE, Corpus, Paragraph, Probe, Prompts, Source, Split, ask
from kvkin.tools.scoring import (
    Summary,
    edit_similarity,
    first_lines,
    greedy,
    has_lines,
    summarize,
    token_f1,
)

CODE_LINES = 2  # a completion is compared with the next so many lines that are not blank


@dataclass(frozen=True)
class Metric:
    """How one task is scored: greedy tokens at most, lines of the answer that count, and the score of (text, answers)."""

    name: str
    max_new_tokens: int
    num_lines: int
    score: Callable[[str, Sequence[str]], float]


METRICS: Mapping[str, Metric] = {
    "qa": Metric("token F1", 28, 1, token_f1),
    "code": Metric("edit similarity of the next two lines", 56, CODE_LINES, edit_similarity),
}


@dataclass(frozen=True)
class Scores:
    """The score of every probe, in the probes' order, with their kinds."""

    kinds: tuple[str, ...]
    values: tuple[float, ...]

    def of(self, kind: str | None = None) -> Summary:
        """Mean over the probes of ``kind``, or over all."""
        pairs = zip(self.kinds, self.values, strict=True)
        return summarize([value for name, value in pairs if kind in (None, name)])

    def as_dict(self) -> dict[str, Any]:
        names = sorted(set(self.kinds))
        return {"all": self.of().as_dict()} | {name: self.of(name).as_dict() for name in names}


def gain(before: Scores, after: Scores) -> Summary:
    """Mean paired difference after - before; its interval leaves out 0 where the fine-tune is clearly different."""
    return summarize([new - old for old, new in zip(before.values, after.values, strict=True)])


def probes(corpus: Corpus, prompts: Prompts, *, count: int, seq_len: int, split: Split = "test") -> list[Probe]:
    """``count`` held-out prompts of ``split`` (fewer where the data holds no more), raw and, where the tokenizer has a
    chat template, as chat: half of each for code; for qa half raw, a quarter with a long context, a quarter as chat."""
    items = corpus.of(split)
    if isinstance(items[0], Paragraph):
        return _qa_probes(items, prompts, count, seq_len)
    return _text_probes(items, prompts, count, seq_len)


def probes_digest(chosen: Sequence[Probe]) -> str:
    """Digest of the prompts and answers, to tell whether two scores were taken on the same."""
    digest = hashlib.blake2b(digest_size=16)
    for probe in chosen:
        for part in (probe.kind, probe.group, probe.prompt, *probe.answers):
            digest.update(f"{len(part)}:{part};".encode())
    return digest.hexdigest()


def run_probes(
    model: Any,
    prompts: Prompts,
    chosen: Sequence[Probe],
    metric: Metric,
    on_prompt: Callable[[int], None] = lambda count: None,
) -> tuple[Scores, list[str]]:
    """Scores and the texts scored, of ``model`` (in eval mode) on ``chosen``."""
    texts = greedy(
        model,
        prompts.tokenizer,
        [prompts.encode(probe.prompt) for probe in chosen],
        max_new_tokens=metric.max_new_tokens,
        done=lambda text: has_lines(text, metric.num_lines),
        on_prompt=on_prompt,
    )
    texts = [first_lines(text, metric.num_lines) for text in texts]
    values = [metric.score(text, probe.answers) for text, probe in zip(texts, chosen, strict=True)]
    return Scores(tuple(probe.kind for probe in chosen), tuple(values)), texts


def _by_hash(items: Sequence[Any], key: Callable[[Any], str]) -> list[Any]:
    return sorted(items, key=lambda item: hashlib.blake2b(key(item).encode(), digest_size=8).digest())


def _qa_probes(paragraphs: Sequence[Paragraph], prompts: Prompts, count: int, seq_len: int) -> list[Probe]:
    asked = [(paragraph, question) for paragraph in paragraphs for question in paragraph.questions]
    chosen: list[Probe] = []
    for paragraph, (question, answers) in _by_hash(asked, lambda pair: pair[0].context + pair[1][0])[:count]:
        # a fixed rhythm, so that any number of first probes has about the same mixture
        kind = ("raw", "joined", "raw", "chat" if prompts.has_chat else "raw")[len(chosen) % 4]
        rng = random.Random(question)
        context = paragraph.context
        if kind == "joined":
            context = _joined(paragraph, paragraphs, prompts, rng, seq_len * 3 // 4)
        prompt = ask(question, context)
        if kind == "chat":
            prompt = prompts.chat([{"role": "user", "content": prompt}], answer_next=True)
        chosen.append(Probe(kind, paragraph.group, prompt, answers))
    return chosen


def _joined(
    paragraph: Paragraph, others: Sequence[Paragraph], prompts: Prompts, rng: random.Random, num_tokens: int
) -> str:
    """The paragraph's context among those of other articles, at a random place, ``num_tokens`` tokens at most."""
    contexts = [paragraph.context]
    size = len(prompts.encode(paragraph.context))
    strangers = [other for other in others if other.group != paragraph.group]
    for other in rng.sample(strangers, min(len(strangers), 8)):
        size += len(prompts.encode(other.context))
        if size > num_tokens:
            break
        contexts.append(other.context)
    rng.shuffle(contexts)
    return "\n\n".join(contexts)


def _text_probes(sources: Sequence[Source], prompts: Prompts, count: int, seq_len: int) -> list[Probe]:
    """One place in each file in turn, then a second one, and so on, so that no big file dominates."""
    files = [(source, _places(source)) for source in _by_hash(sources, lambda source: source.name + source.group)]
    chosen: list[Probe] = []
    for source, place in _round_robin(files):
        if len(chosen) == count:
            break
        lines = source.text.split("\n")
        answer = first_lines("\n".join(lines[place:]), CODE_LINES)
        # A prompt ends without its line break: tokens such as "\n   " span the break and the next line's indentation.
        before = "\n".join(lines[:place]).rstrip("\n")
        text = _tail(before, prompts, seq_len // 2)
        kind = "chat" if prompts.has_chat and len(chosen) % 2 else "raw"
        if kind == "chat":
            text = prompts.chat([{"role": "user", "content": f"{text}\n\n{CONTINUE}"}], answer_next=True)
        chosen.append(Probe(kind, source.group, text, (answer,)))
    return chosen


def _places(source: Source) -> Iterator[int]:
    """Line numbers at which a completion may begin: not blank, with a dozen lines before it, in hashed order."""
    lines = source.text.split("\n")
    places = [number for number in range(12, len(lines) - 3) if len(lines[number].strip()) > 3]
    yield from _by_hash(places, lambda number: f"{source.name}:{number}")


def _round_robin(files: Sequence[tuple[Source, Iterator[int]]]) -> Iterator[tuple[Source, int]]:
    left = list(files)
    while left:
        for entry in list(left):
            place = next(entry[1], None)
            if place is None:
                left.remove(entry)
            else:
                yield entry[0], place


def _tail(text: str, prompts: Prompts, num_tokens: int) -> str:
    """The last lines of ``text`` that fit in ``num_tokens`` tokens, at least one."""
    lines = text.split("\n")
    kept: list[str] = []
    size = 0
    for line in reversed(lines):
        size += len(prompts.encode(line + "\n"))
        if size > num_tokens and kept:
            break
        kept.append(line)
    return "\n".join(reversed(kept))
