"""Training samples and held-out prompts for ``kvkin finetune``, from SQuAD-format or plain-text data.

Called by ``finetune.py`` in its own process; pure apart from reading the data. Everything here is a function of the
data and the seed, so that a resumed run sees the very same samples in the same order, and the split is a function of
the group's name alone (an article's title, a module's name), so that no article or module is both trained on and tested.

Prompts put the long, shareable part first and the question last::

    Context: <context>\\nQuestion: <question>\\nAnswer: <answer>\\n             qa, as raw text
    user: Context: ...\\nQuestion: ...\\nAnswer:     assistant: <answer>        qa, through the chat template
    <source text>                                                            code, as raw text
    user: <source text>\\n\\nContinue this text.     assistant: <next lines>    code, through the chat template
"""

from __future__ import annotations

import hashlib
import random
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jinja2

from kvkin.kv.errors import ConfigError
from kvkin.tools.finetune_squad import read_articles

Split = Literal["train", "profile", "test"]
SPLITS: tuple[Split, ...] = ("train", "profile", "test")
SPLIT_RULE = "blake2b-64 of the group's name: below 0.70 train, below 0.80 profile, else test"
IGNORED = -100  # the label that torch's cross entropy leaves out
CONTINUE = "Continue this text."
TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst")
_GENERATED = re.compile(r"auto-?generated|generated (by|from|file)|do not edit", re.IGNORECASE)
_STDLIB_SKIPPED = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "lib2to3",
    "turtledemo",
}


@dataclass(frozen=True)
class Sample:
    """One training sequence: token ids and, of equal length, the labels (``IGNORED`` where nothing is to be learned)."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]

    @property
    def num_targets(self) -> int:
        """Tokens that are learned; the first token is never predicted."""
        return sum(label != IGNORED for label in self.labels[1:])


@dataclass(frozen=True)
class Probe:
    """One held-out prompt: ``kind`` names its format, ``group`` the article or module it comes from."""

    kind: str
    group: str
    prompt: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Paragraph:
    """A context with its questions, each with its accepted answers; ``group`` is the article's title."""

    group: str
    context: str
    questions: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Source:
    """One text file; ``group`` is its top-level module (or, of a single file, its block), ``name`` where it lies."""

    group: str
    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Everything that was read: ``items`` are paragraphs (qa) or sources (code)."""

    label: str
    digest: str
    items: tuple[Paragraph | Source, ...]
    splits: Mapping[Split, tuple[str, ...]] = field(default_factory=dict)

    def of(self, split: Split) -> list[Any]:
        groups = set(self.splits[split])
        return [item for item in self.items if item.group in groups]


def split_of(group: str) -> Split:
    """The split of an article or module, from its name alone (``SPLIT_RULE``)."""
    share = int.from_bytes(hashlib.blake2b(group.encode(), digest_size=8).digest(), "big") / 2**64
    return "train" if share < 0.70 else "profile" if share < 0.80 else "test"


def _corpus(label: str, items: Sequence[Paragraph | Source], digest: Any) -> Corpus:
    groups = sorted({item.group for item in items})
    splits: dict[Split, tuple[str, ...]] = {name: tuple(g for g in groups if split_of(g) == name) for name in SPLITS}
    for name in ("train", "test"):
        if not splits[name]:
            raise ConfigError("data", f"{label}: {len(groups)} group(s) leave the {name} split empty", "more data")
    return Corpus(label, digest.hexdigest(), tuple(items), splits)


def read_qa(path: Path) -> Corpus:
    """Read SQuAD-format JSON: ``{"data": [{"title", "paragraphs": [{"context", "qas": [...]}]}]}``; split by title."""
    raw, articles = read_articles(path)
    items = [
        Paragraph(
            article.title,
            paragraph.context.strip(),
            tuple(
                (qa.question.strip(), tuple(dict.fromkeys(answer.text for answer in qa.answers)))
                for qa in paragraph.qas
                if qa.answers
            ),
        )
        for article in articles
        for paragraph in article.paragraphs
    ]
    return _corpus(path.name, [item for item in items if item.questions], hashlib.blake2b(raw, digest_size=16))


def read_text(data: str) -> Corpus:
    """Read plain text: ``stdlib`` (this interpreter's own sources), a folder of text files, or one text file.

    Groups are top-level modules: all of ``json/`` is one group, ``bisect.py`` another. One file alone is cut into
    blocks of 100 lines, each its own group.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if data == "stdlib" else Path(data)
    if root.is_dir():
        files = sorted(path for path in root.rglob("*") if path.suffix in TEXT_SUFFIXES and path.is_file())
        if data == "stdlib":
            files = [path for path in files if path.suffix == ".py" and _is_stdlib_module(path.relative_to(root))]
    elif root.is_file():
        files = [root]
    else:
        raise ConfigError("data", f"{data} does not exist", "stdlib, a folder or a file of plain text")
    items: list[Source] = []
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ConfigError("data", f"cannot read {path}: {error.strerror}", "files that can be read") from None
        if data == "stdlib" and _GENERATED.search(text[:600]):
            continue
        name = path.relative_to(root).as_posix() if root.is_dir() else path.name
        digest.update(f"{len(name)}:{name}:{len(text)}:".encode() + text.encode())
        items.extend(_sources(name, text, whole=root.is_dir()))
    if not items:
        raise ConfigError("data", f"{data} holds no text", f"files that end in {', '.join(TEXT_SUFFIXES)}")
    label = f"standard library of Python {sys.version.split()[0]}" if data == "stdlib" else root.name
    return _corpus(label, items, digest)


def _is_stdlib_module(path: Path) -> bool:
    return not _STDLIB_SKIPPED & set(path.parts) and not path.name.startswith(("_sysconfigdata", "test_"))


def _sources(name: str, text: str, whole: bool) -> Iterator[Source]:
    if whole:
        yield Source(name.split("/")[0].removesuffix(".py"), name, text)
        return
    lines = text.split("\n")
    for start in range(0, len(lines), 100):
        yield Source(f"{name}:{start + 1}", name, "\n".join(lines[start : start + 100]))


class Prompts:
    """Text to token ids for one tokenizer, raw or through its chat template; knows where answers begin and end."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.has_chat = bool(getattr(tokenizer, "chat_template", None))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def chat(self, messages: Sequence[Mapping[str, str]], *, answer_next: bool) -> str:
        """The rendered conversation, ending where the assistant is to speak if ``answer_next``."""
        try:
            rendered: str = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=answer_next
            )
        except jinja2.TemplateError as error:
            problem = f"its chat template fails: {type(error).__name__}: {error}"
            raise ConfigError("base", problem, "a template that renders a user's question and an answer") from None
        return rendered

    def join(self, pieces: Sequence[tuple[str, bool]], seq_len: int) -> Sample:
        """One sample of ``(text, learned)`` pieces, cut to ``seq_len`` tokens."""
        ids: list[int] = []
        labels: list[int] = []
        for text, learned in pieces:
            piece = self.encode(text)
            ids += piece
            labels += piece if learned else [IGNORED] * len(piece)
        return Sample(tuple(ids[:seq_len]), tuple(labels[:seq_len]))

    def chat_pieces(self, turns: Sequence[tuple[str, str]]) -> list[tuple[str, bool]]:
        """A conversation of (user, assistant) turns as pieces in which only the assistant's words are learned."""
        messages: list[dict[str, str]] = []
        pieces: list[tuple[str, bool]] = []
        done = ""
        for user, assistant in turns:
            messages.append({"role": "user", "content": user})
            asked = self.chat(messages, answer_next=True)
            messages.append({"role": "assistant", "content": assistant})
            answered = self.chat(messages, answer_next=False)
            if not (asked.startswith(done) and answered.startswith(asked)):
                raise ConfigError("base", "its chat template rewrites earlier turns", "a template that only appends")
            pieces += [(asked[len(done) :], False), (answered[len(asked) :], True)]
            done = answered
        return pieces


def ask(question: str, context: str | None = None) -> str:
    """The qa prompt, ready for the answer; without ``context`` it is a further question about the same one."""
    head = "" if context is None else f"Context: {context}\n"
    return f"{head}Question: {question}\nAnswer:"


def epoch_samples(corpus: Corpus, prompts: Prompts, *, epoch: int, seed: int, seq_len: int) -> Iterator[Sample]:
    """The training samples of one epoch, in order; a function of its arguments alone."""
    rng = random.Random(f"{seed}/{epoch}")
    items = corpus.of("train")
    rng.shuffle(items)
    if isinstance(items[0], Paragraph):
        yield from _qa_samples(items, prompts, rng, seq_len)
    else:
        yield from _text_samples(items, prompts, rng, seq_len)


def _qa_samples(
    paragraphs: Sequence[Paragraph], prompts: Prompts, rng: random.Random, seq_len: int
) -> Iterator[Sample]:
    """Each paragraph once an epoch: alone, or joined with the next ones (other articles, as they are shuffled) to a
    context of 400 tokens up to 3/4 of ``seq_len``; several questions a context, raw or as the turns of a chat."""
    sizes = [len(prompts.encode(paragraph.context)) for paragraph in paragraphs]
    longest = seq_len * 3 / 4
    index = 0
    while index < len(paragraphs):
        goal = rng.uniform(min(400, longest), longest) if rng.random() < 0.4 else 0
        joined, size = [paragraphs[index]], sizes[index]
        index += 1
        while index < len(paragraphs) and size + sizes[index] <= goal:
            joined, size = [*joined, paragraphs[index]], size + sizes[index]
            index += 1
        context = "\n\n".join(paragraph.context for paragraph in joined)
        asked = [question for paragraph in joined for question in paragraph.questions]
        asked = rng.sample(asked, min(len(asked), 6 if len(joined) == 1 else 10))
        turns = [(q, rng.choice(answers)) for q, answers in asked]
        chat = prompts.has_chat and rng.random() < 0.4
        sample = prompts.join(_qa_pieces(prompts, context, turns, chat=chat), seq_len)
        if sample.num_targets:
            yield sample


def _qa_pieces(
    prompts: Prompts, context: str, turns: Sequence[tuple[str, str]], *, chat: bool
) -> list[tuple[str, bool]]:
    asked = [(ask(q, context if turn == 0 else None), answer) for turn, (q, answer) in enumerate(turns)]
    if chat:
        return prompts.chat_pieces(asked)
    return [piece for question, answer in asked for piece in ((question, False), (f" {answer}\n", True))]


def _text_samples(sources: Sequence[Source], prompts: Prompts, rng: random.Random, seq_len: int) -> Iterator[Sample]:
    """Windows of about ``seq_len`` tokens, each text once an epoch in random order; eight of ten as a chat.

    A raw window is learned as a whole, of a chat only what the assistant says. Going on with raw text is what a base model
    was made for; what it does not know is where to go on in a chat, so that is where most of the samples are.
    """
    windows = [window for source in sources for window in _windows(source.text, seq_len * 5 // 2)]
    rng.shuffle(windows)
    for window in windows:
        sample = prompts.join([(window, True)], seq_len)
        if prompts.has_chat and rng.random() < 0.8:
            chat = prompts.join(prompts.chat_pieces(_turns(window, rng)), seq_len)
            sample = chat if chat.num_targets else sample
        if sample.num_targets:
            yield sample


def _turns(window: str, rng: random.Random) -> list[tuple[str, str]]:
    """The window as a chat: the user shows some lines, the assistant goes on with the next few, and so on.

    Every turn asks to find the place where the user's text ends. When later turns let the assistant go on from its own
    words, it learned that instead, and began the user's last function all over again.
    """
    lines = window.split("\n")
    turns: list[tuple[str, str]] = []
    place = 0
    while place < len(lines):
        # mostly a few lines, so that a sample holds many turns; sometimes as many as a real question shows
        middle = place + (rng.randint(12, 36) if rng.random() < 0.25 else rng.randint(3, 10))
        end = middle + rng.randint(2, 4)
        shown, said = "\n".join(lines[place:middle]).strip("\n"), "\n".join(lines[middle:end]).strip("\n")
        if shown and said:
            turns.append((f"{shown}\n\n{CONTINUE}", said))
        place = end
    return turns


def _windows(text: str, num_chars: int) -> Iterator[str]:
    """Consecutive pieces of ``text`` of at least ``num_chars`` characters (the last may be shorter), cut at lines."""
    lines: list[str] = []
    size = 0
    for line in text.split("\n"):
        lines.append(line)
        size += len(line) + 1
        if size >= num_chars:
            yield "\n".join(lines)
            lines, size = [], 0
    if size > num_chars // 4:
        yield "\n".join(lines)
