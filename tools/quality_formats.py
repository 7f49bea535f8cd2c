"""What one example is, and the formats in which data sets hold them: one msgspec struct a format, each with its examples.

Used by ``quality_data.py``; pure. msgspec checks types and names the field that does not fit; what a type cannot say (an empty
context, an answer that is missing) raises ValueError here, and the reader adds the place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import msgspec

Form = Literal["ask", "continue", "plain", "recorded"]
# LongBench's tasks of code: the context is to be continued, nothing is asked about it
_LONGBENCH_CODE = ("lcc", "repobench-p")


@dataclass(frozen=True)
class Example:
    """One example; ``context`` is what other prompts may share, ``answers`` are all accepted ones.

    ``form`` says how they make a prompt: "ask" puts the question about the context; "continue" wants the text
    ``context + question`` continued; "plain" is the prompt ``context + question`` as it stands. A "recorded" example has token ids
    in their place: ids before ``suffix_start`` are the context.
    """

    id: str
    group: str
    context: str
    question: str
    answers: tuple[str, ...]
    form: Form = "ask"
    token_ids: tuple[int, ...] = ()
    suffix_start: int = 0


class _SquadAnswer(msgspec.Struct):
    text: str


class _SquadQuestion(msgspec.Struct):
    question: str
    answers: list[_SquadAnswer]
    id: str = ""


class _SquadParagraph(msgspec.Struct):
    context: str
    qas: list[_SquadQuestion]


class _SquadArticle(msgspec.Struct):
    title: str
    paragraphs: list[_SquadParagraph]


class SquadFile(msgspec.Struct):
    """SQuAD v1.1 and v2.0; questions without an answer are left out."""

    expected: ClassVar[str] = (
        'SQuAD: {"data": [{"title", "paragraphs": [{"context", "qas": [{"question", "answers"}]}]}]}'
    )
    data: list[_SquadArticle]

    def examples(self) -> Iterator[Example]:
        for article in self.data:
            for paragraph in article.paragraphs:
                context = _filled("context", paragraph.context)
                for asked in paragraph.qas:
                    answers = tuple(dict.fromkeys(answer.text for answer in asked.answers))
                    if answers:
                        yield _example(asked.id, article.title, context, asked.question.strip(), answers)


class HotpotEntry(msgspec.Struct):
    """An entry of HotpotQA's distractor or full-wiki setting."""

    expected: ClassVar[str] = 'HotpotQA: [{"_id", "question", "answer", "context": [[title, [sentences]], ...]}, ...]'
    question: str
    answer: str
    context: list[tuple[str, list[str]]]
    id: str = msgspec.field(default="", name="_id")
    supporting_facts: list[tuple[str, int]] = []


def hotpot_examples(entries: Sequence[HotpotEntry]) -> Iterator[Example]:
    """Groups are articles linked by questions that need both: one of them cannot be trained on and another one tested."""
    needed = [sorted({title for title, _ in entry.supporting_facts}) for entry in entries]
    group_of = linked(needed)
    for entry, titles in zip(entries, needed, strict=True):
        paragraphs = [f"{title}: {''.join(sentences).strip()}" for title, sentences in entry.context]
        context = _filled("context", "\n\n".join(paragraphs))
        group = group_of[titles[0]] if titles else _digest(context)
        yield _example(entry.id, group, context, _filled("question", entry.question), _answers([entry.answer]))


class LongBenchLine(msgspec.Struct):
    """LongBench; several questions about one document are one group."""

    expected: ClassVar[str] = 'LongBench lines: {"input", "context", "answers": [...], "dataset"}'
    input: str
    context: str
    answers: list[str]
    dataset: str = ""
    id: str = msgspec.field(default="", name="_id")

    def example(self) -> Example:
        answers, name = _answers(self.answers), self.dataset
        group = ":".join(part for part in (name, _digest(self.context)) if part)
        given = ":".join(part for part in (name, self.id) if part) if self.id else ""
        if name.removesuffix("_e") in _LONGBENCH_CODE:
            return continued(given, group, f"{_filled('context', self.context)}\n{self.input}", answers)
        return _example(given, group, _filled("context", self.context), self.input.strip(), answers)


class HumanEvalLine(msgspec.Struct):
    """HumanEval's problems (Chen et al., 2021): scored is how the completion compares with the canonical one; nothing is run."""

    expected: ClassVar[str] = 'HumanEval lines: {"task_id", "prompt", "canonical_solution"}'
    task_id: str
    prompt: str
    canonical_solution: str

    def example(self) -> Example:
        answers = _answers([self.canonical_solution.strip("\n")])
        return continued(_filled("task_id", self.task_id), self.task_id, self.prompt, answers)


class PlainLine(msgspec.Struct):
    """A prompt with its answer, or a context with a question and its answers."""

    expected: ClassVar[str] = (
        'lines of {"prompt", "answer"} or of {"context", "question", "answer"}; '
        '"answers": [...] in place of "answer", and "group" and "id", may be given'
    )
    prompt: str | None = None
    context: str | None = None
    question: str | None = None
    answer: str | None = None
    answers: list[str] | None = None
    group: str = ""
    id: str = ""

    def example(self) -> Example:
        if (self.answer is None) == (self.answers is None):
            raise ValueError("needs one of answer and answers")
        answers = _answers(self.answers if self.answers is not None else [self.answer or ""])
        if self.prompt is not None:
            if self.context is not None or self.question is not None:
                raise ValueError("has a prompt and a context or question as well")
            context, question = last_line(_filled("prompt", self.prompt, strip=False))
            group = self.group or _digest(self.prompt)
            return _example(self.id, group, context, question, answers, "plain")
        if self.context is None or self.question is None:
            raise ValueError(f"has no {'context' if self.context is None else 'question'}")
        context = _filled("context", self.context)
        return _example(self.id, self.group or _digest(context), context, _filled("question", self.question), answers)


class RecordedLine(msgspec.Struct):
    """The ids of a prompt that a cluster served, and where its context ended."""

    expected: ClassVar[str] = (
        'lines of {"token_ids": [...], "suffix_start": n}, n at least 1 and below the number of ids'
    )
    token_ids: list[int]
    suffix_start: int

    def example(self) -> Example:
        if not 0 < self.suffix_start < len(self.token_ids):
            raise ValueError(f"suffix_start is {self.suffix_start} of {len(self.token_ids)} token ids")
        if min(self.token_ids) < 0:
            raise ValueError(f"token id {min(self.token_ids)} is negative")
        name = _digest(*map(str, (self.suffix_start, *self.token_ids)))
        return Example(name, name, "", "", (), "recorded", tuple(self.token_ids), self.suffix_start)


Line = LongBenchLine | HumanEvalLine | PlainLine | RecordedLine


def last_line(text: str) -> tuple[str, str]:
    """``text`` without line breaks at its end as (everything up to its last line, that line); one line is all context.

    >>> last_line("def f():\\n    return 1\\n")
    ('def f():\\n', '    return 1')
    """
    text = text.rstrip("\n")
    head, end, tail = text.rpartition("\n")
    return (head + end, tail) if head.strip() else (text, "")


def linked(sets: Iterable[Sequence[str]]) -> Mapping[str, str]:
    """For each name the first (by alphabet) of all names that it is linked to, by sharing sets directly or over others.

    >>> linked([["b", "c"], ["a", "b"], ["d"]])["c"]
    'a'
    """
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        parent.setdefault(name, name)
        while parent[name] != name:
            parent[name] = name = parent[parent[name]]
        return name

    for names in sets:
        for name in names:
            first, other = sorted((root(names[0]), root(name)))
            parent[other] = first
    return {name: root(name) for name in parent}


def _example(
    given_id: str, group: str, context: str, question: str, answers: tuple[str, ...], form: Form = "ask"
) -> Example:
    name = given_id or _digest(form, group, context, question, *answers)
    return Example(name, group, context, question, answers, form)


def continued(given_id: str, group: str, text: str, answers: Sequence[str]) -> Example:
    """An example of the form "continue": ``text`` is to be continued by one of ``answers``."""
    context, question = last_line(_filled("prompt", text, strip=False))
    return _example(given_id, group, context, question, tuple(answers), "continue")


def _filled(name: str, text: str, *, strip: bool = True) -> str:
    if not text.strip():
        raise ValueError(f"{name} is empty")
    return text.strip() if strip else text


def _answers(texts: Sequence[str]) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(text for text in texts if text.strip()))
    if not found:
        raise ValueError("no answer that is not empty")
    return found


def _digest(*parts: str) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(f"{len(part)}:{part};".encode())
    return digest.hexdigest()
