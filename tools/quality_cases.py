"""Cases: examples turned into the prompts on which ``kvkin profile`` and ``kvkin evaluate`` measure quality.

Called by both in their own process; pure. A case's prompt has the form that fine-tunes were trained on (``finetune_data.py``): the
context first, the question last, as chat where the tokenizer has a template. It is tokenized once, as a server would, and then cut
at the end of the last block that lies wholly in the context: context ids + suffix ids are the prompt's ids. Which examples are taken
is decided by hashes, so everybody who asks with the same arguments gets the same cases, and 50 cases are the first 50 of 100.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvkin.kv.errors import ConfigError
from kvkin.tools.finetune_data import CONTINUE, Prompts, ask
from kvkin.tools.quality_formats import Example
from kvkin.tools.scoring import EvaluationMetric, first_lines, metric_named

TEXT_CONTEXT_TOKENS = 512  # of a text that is to be continued, where the caller names no number
_LENT_CHARS = 3_000  # of a text, for the contexts of others: about 800 tokens
_MISSES = 8  # paragraphs in a row that were too long before the search for a fitting one ends
_RESERVE_TOKENS = 4  # a special token or a line break may be added at either end of a joined text


@dataclass(frozen=True)
class Case:
    """One prompt: ``context_ids`` (a whole number of blocks, at least one) may be reused, ``suffix_ids`` (at least one) never are.

    ``answers`` are the accepted ones, cut to ``num_lines`` lines as a generated text is to be (0: all of it counts), and
    ``answer_ids`` is the first of them as the model would say it: what a likelihood is taken of.
    """

    id: str
    group: str
    context_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    answers: tuple[str, ...]
    max_new_tokens: int
    num_lines: int
    answer_ids: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.context_ids) + len(self.suffix_ids)

    @property
    def context_key(self) -> str:
        """Names the context in records: cases that share one are not independent of each other."""
        return hashlib.blake2b(repr(self.context_ids).encode(), digest_size=8).hexdigest()


def make_cases(
    examples: Sequence[Example],
    tokenizer: Any,
    *,
    count: int,
    seed: int = 0,
    block_size: int,
    context_tokens: int = 0,
    chat: bool = True,
    metric: str | EvaluationMetric,
    max_tokens: int | None = None,
    max_new_tokens: int | None = None,
) -> list[Case]:
    """``count`` cases of ``examples`` (all of one split), fewer where there are no more; groups take turns.

    ``tokenizer`` is transformers'; ``chat`` counts only where it has a chat template. ``context_tokens`` > 0 sets the example's
    paragraph among paragraphs of other groups, about so many tokens altogether; which ones and where depends on the paragraph
    alone (and on ``examples``), so questions about one paragraph share the whole context. Texts that are to be continued have
    their own text before the place, at most so many tokens (0: 512), and texts of other groups only before that. Examples whose
    context fills no block are left out, and those that with their answer exceed ``max_tokens``. ``max_new_tokens`` replaces the
    metric's. Raises ConfigError where nothing is left, or for an argument that cannot be.
    """
    metric = metric_named(metric) if isinstance(metric, str) else metric
    for key, value, least in (
        ("count", count, 1),
        ("context_tokens", context_tokens, 0),
        ("block_size", block_size, 1),
    ):
        if value < least:
            raise ConfigError(key, f"{value} is too small", f"{least} or more")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ConfigError("max_new_tokens", f"{max_new_tokens} is too small", "1 or more")
    maker = _CaseMaker(examples, Prompts(tokenizer), seed, block_size, context_tokens, chat, metric, max_new_tokens)
    cases: list[Case] = []
    for example in _by_turns(examples, seed):
        case = maker.case(example)
        if case is None or (max_tokens is not None and case.num_tokens + case.max_new_tokens > max_tokens):
            continue
        cases.append(case)
        if len(cases) == count:
            break
    if not cases:
        limit = "" if max_tokens is None else f" and fits into {max_tokens} tokens"
        problem = f"no prompt of {len(examples)} example(s) has a context of one block ({block_size} tokens){limit}"
        raise ConfigError("data", problem, "longer contexts: --context-tokens, or other data")
    return cases


def by_context(cases: Sequence[Case]) -> list[list[Case]]:
    """The cases grouped by their context, in order of first appearance: what a context costs is then paid once."""
    found: dict[tuple[int, ...], list[Case]] = {}
    for case in cases:
        found.setdefault(case.context_ids, []).append(case)
    return list(found.values())


def cases_digest(cases: Sequence[Case]) -> str:
    """BLAKE2b-128 of the cases, to tell whether two measurements were taken on the same."""
    digest = hashlib.blake2b(digest_size=16)
    for case in cases:
        for part in (
            case.id,
            case.group,
            ",".join(map(str, case.context_ids)),
            ",".join(map(str, case.suffix_ids)),
            f"{case.max_new_tokens}/{case.num_lines}/{len(case.answers)}",
            *case.answers,
        ):
            digest.update(f"{len(part)}:{part};".encode())
    return digest.hexdigest()


class _CaseMaker:
    """Makes the case of one example; remembers what the tokenizer said about paragraphs."""

    def __init__(
        self,
        examples: Sequence[Example],
        prompts: Prompts,
        seed: int,
        block_size: int,
        context_tokens: int,
        chat: bool,
        metric: EvaluationMetric,
        max_new_tokens: int | None,
    ) -> None:
        self.prompts, self.metric = prompts, metric
        self.block_size, self.context_tokens = block_size, context_tokens
        self.chat = chat and prompts.has_chat
        self.max_new_tokens = metric.max_new_tokens if max_new_tokens is None else max_new_tokens
        self._vocab = len(prompts.tokenizer)
        # every paragraph once, with its group; sorted, so that the data's order decides nothing
        self._paragraphs = sorted({(example.group, _paragraph(example)) for example in examples})
        self._sizes: dict[str, int] = {}

    def case(self, example: Example) -> Case | None:
        """None if no block lies wholly in the context."""
        if example.form == "recorded":
            ids, num_shared = self._recorded(example), example.suffix_start
        else:
            context = self._context(example)
            prompt, num_shared_chars = self._prompt(example, context)
            ids = self.prompts.encode(prompt)
            num_shared = _common(ids, self.prompts.encode(prompt[:num_shared_chars]))
        num_context = min(num_shared, len(ids) - 1) // self.block_size * self.block_size
        if num_context == 0:
            return None
        answers, num_lines = self._answers(example)
        return Case(
            example.id,
            example.group,
            tuple(ids[:num_context]),
            tuple(ids[num_context:]),
            answers,
            self.max_new_tokens,
            num_lines,
            tuple(self.prompts.encode(self._said(example.form, answers[0]))) if answers else (),
        )

    def _recorded(self, example: Example) -> list[int]:
        if self.context_tokens:
            raise ConfigError("context_tokens", "recorded prompts are used as they are", "0")
        if max(example.token_ids) >= self._vocab:
            problem = f"recorded prompt {example.id} has token {max(example.token_ids)}"
            raise ConfigError("data", problem, f"ids below {self._vocab}, of the family's tokenizer")
        return list(example.token_ids)

    def _prompt(self, example: Example, context: str) -> tuple[str, int]:
        """The whole prompt, and how many of its characters a prompt with another question would share."""
        prompt = self._rendered(example.form, context, example.question)
        # a question that begins differently; whatever the chat template does to the text, it did to both
        other = self._rendered(example.form, context, "?" if not example.question.startswith("?") else "!")
        return prompt, _common(prompt, other)

    def _rendered(self, form: str, context: str, question: str) -> str:
        if form == "ask":
            text = ask(question, context)
        elif form == "continue":
            text = context + question + (f"\n\n{CONTINUE}" if self.chat else "")
        else:
            text = context + question
        return self.prompts.chat([{"role": "user", "content": text}], answer_next=True) if self.chat else text

    def _said(self, form: str, answer: str) -> str:
        """The answer as it follows the prompt: raw prompts end before the space or line break that it begins with."""
        return answer if self.chat or form == "plain" else f" {answer}" if form == "ask" else f"\n{answer}"

    def _answers(self, example: Example) -> tuple[tuple[str, ...], int]:
        """The answers that a text is compared with, and the lines of it that count.

        Of texts that are continued just the next lines; an answer of several lines to a question is compared as a whole.
        """
        lines = self.metric.num_lines
        if example.form == "continue":
            cut = tuple(dict.fromkeys(first_lines(answer, lines) for answer in example.answers))
            return (cut if lines else example.answers), lines
        several = (
            any(first_lines(answer, lines + 1).count("\n") >= lines for answer in example.answers) if lines else False
        )
        return example.answers, 0 if several else lines

    # --- contexts --------------------------------------------------------------------------------------------------------

    def _context(self, example: Example) -> str:
        if example.form == "continue":
            own = self._end_of(example.context, self.context_tokens or TEXT_CONTEXT_TOKENS)
            before = self._others(example, self._size(own)) if self.context_tokens else []
            return "".join(f"{text}\n\n" for text in before) + own
        if not self.context_tokens:
            return example.context
        if example.form == "plain":
            raise ConfigError("context_tokens", "prompts that are given as a whole are used as they are", "0")
        around = self._others(example, self._size(example.context))
        around.insert(random.Random(f"place/{example.context}").randint(0, len(around)), example.context)
        return "\n\n".join(around)

    def _others(self, example: Example, size: int) -> list[str]:
        """Paragraphs of other groups that fill up ``context_tokens`` beside ``size`` tokens, in random order by its own."""
        order = list(self._paragraphs)
        random.Random(f"others/{example.context}").shuffle(order)
        chosen: list[str] = []
        left, misses = self.context_tokens - size - _RESERVE_TOKENS, 0
        own = example.context
        for group, text in order:
            if misses == _MISSES or left <= 0:
                break
            if group == example.group or text == own or text in chosen:
                continue
            if (needed := self._size(text)) > left:
                misses += 1
                continue
            chosen.append(text)
            left, misses = left - needed, 0
        return chosen

    def _size(self, text: str) -> int:
        """Tokens of a paragraph with the blank line after it."""
        if text not in self._sizes:
            self._sizes[text] = len(self.prompts.encode(f"{text}\n\n"))
        return self._sizes[text]

    def _end_of(self, text: str, num_tokens: int) -> str:
        """The last lines of ``text`` that have at most ``num_tokens`` tokens by themselves; at least one line."""
        lines = text.splitlines(keepends=True)
        kept, size = len(lines), 0
        while kept:
            size += len(self.prompts.encode(lines[kept - 1]))
            if size > num_tokens and kept < len(lines):
                break
            kept -= 1
        return "".join(lines[kept:])


def _paragraph(example: Example) -> str:
    """What an example lends to the contexts of others: its context, of a text that is to be continued only the end."""
    if example.form != "continue":
        return example.context
    text = example.context + example.question
    return text if len(text) <= _LENT_CHARS else text[-_LENT_CHARS:].partition("\n")[2]


def _by_turns(examples: Sequence[Example], seed: int) -> Iterator[Example]:
    """All examples in hashed order: of each group one, then of each a second one, and so on."""
    groups: dict[str, list[Example]] = {}
    for example in sorted(examples, key=lambda example: _hash(f"{seed}/{example.id}")):
        groups.setdefault(example.group, []).append(example)
    order = sorted(groups, key=lambda group: _hash(f"{seed}/group/{group}"))
    for turn in range(max(map(len, groups.values()), default=0)):
        for group in order:
            if turn < len(groups[group]):
                yield groups[group][turn]


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _common(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Length of the common beginning."""
    for number, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return number
    return min(len(left), len(right))
