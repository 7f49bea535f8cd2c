"""Examples for ``kvkin profile`` and ``kvkin evaluate``, read from the usual formats of question answering and completion.

Called by both commands in their own process; reads files, knows nothing of models. What a file holds is found out from its
content; a file that is none of these is refused with the path, the line and what was expected. Groups (articles, modules, tasks)
decide the split by their name alone, as in ``kvkin finetune``: what an adapter was trained on is never tested.

=========  ==========================================================================================  ===============
kind       one example                                                                                 group
=========  ==========================================================================================  ===============
squad      a question in SQuAD JSON                                                                    article
hotpotqa   an entry of a JSON list: ``_id, question, answer, context: [[title, [sentences]], ...]``    linked articles
longbench  a line: ``input, context, answers``                                                         document
humaneval  a line: ``task_id, prompt, canonical_solution``                                             task
jsonl      a line: ``prompt, answer`` or ``context, question, answer``                                 as given, or text
recorded   a line: ``token_ids, suffix_start``, without an answer                                      the line
text       a place in a source: ``stdlib``, a folder or a text file                                    module
=========  ==========================================================================================  ===============

Files may be gzipped.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from kvkin.kv.errors import ConfigError
from kvkin.tools.finetune_data import SPLITS, TEXT_SUFFIXES, Source, Split, read_text, split_of
from kvkin.tools.quality_formats import (
    Example,
    HotpotEntry,
    HumanEvalLine,
    Line,
    LongBenchLine,
    PlainLine,
    RecordedLine,
    SquadFile,
    continued,
    hotpot_examples,
)
from kvkin.tools.scoring import first_lines

__all__ = ["KINDS", "AnySplit", "Example", "ExampleSet", "Kind", "read_examples"]

Kind = Literal["squad", "hotpotqa", "longbench", "humaneval", "jsonl", "recorded", "text"]
AnySplit = Split | Literal["all"]

KINDS: tuple[Kind, ...] = ("squad", "hotpotqa", "longbench", "humaneval", "jsonl", "recorded", "text")
# Fields by which a line is recognised, the more particular ones first.
_LINES: Mapping[Kind, tuple[type[Line], tuple[set[str], ...]]] = {
    "recorded": (RecordedLine, ({"token_ids"},)),
    "humaneval": (HumanEvalLine, ({"task_id", "prompt"},)),
    "longbench": (LongBenchLine, ({"input", "context", "answers"},)),
    "jsonl": (PlainLine, ({"prompt"}, {"context", "question"})),
}
_EXPECTED: Mapping[Kind, str] = {
    "squad": SquadFile.expected,
    "hotpotqa": HotpotEntry.expected,
    **{kind: struct.expected for kind, (struct, _) in _LINES.items()},
    "text": f"stdlib, a folder, or a file that ends in {', '.join(TEXT_SUFFIXES)}",
}
_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"

PLACES_PER_FILE = 8  # places of a source that become examples
TEXT_LINES = 2  # not blank: what is to come next
_LINES_BEFORE = 12  # of a place, at least
_CONTEXT_CHARS = 24_000  # before a place, at most: about 6,000 tokens of code

Decoded = TypeVar("Decoded")


@dataclass(frozen=True)
class ExampleSet:
    """All examples of ``label`` (a file's name, never its path); ``digest`` is the BLAKE2b-128 of what was read."""

    label: str
    digest: str
    kind: Kind
    examples: tuple[Example, ...]

    def of_split(self, split: AnySplit) -> tuple[Example, ...]:
        """The examples whose group falls into ``split``, in the data's order; "all" is for data that nobody trained on.

        Raises ConfigError for a split that is unknown or empty.
        """
        if split not in (*SPLITS, "all"):
            raise ConfigError("split", f"no split {split!r}", ", ".join((*SPLITS, "all")))
        found = tuple(example for example in self.examples if split == "all" or split_of(example.group) == split)
        if not found:
            groups = len({example.group for example in self.examples})
            raise ConfigError(
                "split", f"none of {self.label}'s {groups} group(s) is in {split}", "all, for data never trained on"
            )
        return found


def read_examples(path: str | Path, *, kind: Kind | Literal["auto"] = "auto") -> ExampleSet:
    """Read ``path`` (a file, a folder of texts, or "stdlib"); ``kind`` says what it must be.

    Examples that occur twice are taken once. Raises ConfigError for what cannot be read or is none of the formats.
    """
    if kind not in ("auto", *KINDS):
        raise ConfigError("kind", f"no kind {kind!r}", ", ".join(("auto", *KINDS)))
    file = Path(path)
    if kind == "text" or (kind == "auto" and (str(path) == "stdlib" or file.is_dir() or file.suffix in TEXT_SUFFIXES)):
        corpus = read_text(str(path))
        texts = _text_examples(item for item in corpus.items if isinstance(item, Source))
        found = _once(_placed(texts, file, "text"), file)
        if not found:
            raise ConfigError("data", f"{path} holds no text of more than {_LINES_BEFORE} lines", "longer texts")
        return ExampleSet(corpus.label, corpus.digest, "text", found)
    raw = _read(file)
    if kind == "auto":
        kind = _detect(raw, file)
    if kind == "squad":
        placed = _placed(_whole(raw, file, kind, SquadFile).examples(), file, kind)
    elif kind == "hotpotqa":
        entries = _whole(raw, file, kind, list[HotpotEntry])
        placed = _placed(hotpot_examples(entries), file, kind)
    else:
        placed = _line_examples(raw, file, kind)
    found = _once(placed, file)
    if not found:
        raise ConfigError("data", f"{file} holds no example with an answer", _EXPECTED[kind])
    return ExampleSet(file.name, hashlib.blake2b(raw, digest_size=16).hexdigest(), kind, found)


def _read(file: Path) -> bytes:
    """The file's bytes, unpacked if they are gzipped. Raises ConfigError."""
    try:
        raw = file.read_bytes()
        raw = gzip.decompress(raw) if raw.startswith(_GZIP) else raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError("data", f"{file} is no whole gzip file: {error}", "a whole file") from error
    except OSError as error:
        allowed = "a data file, a folder of texts, or stdlib"
        raise ConfigError("data", f"cannot read {file}: {error.strerror}", allowed) from error
    raw = raw.removeprefix(_BOM)
    if not raw.strip():
        raise ConfigError("data", f"{file} is empty", " | ".join(_EXPECTED.values()))
    return raw


def _detect(raw: bytes, file: Path) -> Kind:
    """The kind of a file from how it begins. Raises ConfigError naming the first line that tells nothing."""
    if raw.lstrip().startswith(b"["):
        return "hotpotqa"
    number, line = next(_lines(raw))
    known = " | ".join(_EXPECTED.values())
    try:
        fields = set(msgspec.json.decode(line, type=dict[str, msgspec.Raw]))
    except msgspec.DecodeError as error:
        try:  # not one object a line, then: one object over many lines
            fields = set(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]))
        except msgspec.DecodeError:
            raise ConfigError("data", f"{file}:{number}: {error}", known) from error
    if "data" in fields:
        return "squad"
    for kind, (_, wanted) in _LINES.items():
        if any(names <= fields for names in wanted):
            return kind
    raise ConfigError("data", f"{file}:{number} has the fields {', '.join(sorted(fields)) or '(none)'}", known)


def _lines(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank with their numbers, from 1; split at line feeds only: JSON may hold other separators."""
    for number, line in enumerate(raw.split(b"\n"), 1):
        if line.strip():
            yield number, line


def _whole(raw: bytes, file: Path, kind: Kind, cls: type[Decoded]) -> Decoded:
    try:
        return msgspec.json.decode(raw, type=cls)
    except msgspec.DecodeError as error:
        raise ConfigError("data", f"{file}: {error}", _EXPECTED[kind]) from error


def _line_examples(raw: bytes, file: Path, kind: Kind) -> Iterator[tuple[int, Example]]:
    struct, _ = _LINES[kind]
    for number, line in _lines(raw):
        try:
            read = msgspec.json.decode(line, type=struct)
        except msgspec.DecodeError as error:
            raise ConfigError("data", f"{file}:{number}: {error}", _EXPECTED[kind]) from error
        try:
            yield number, read.example()
        except ValueError as error:
            raise ConfigError("data", f"{file}:{number}: {error}", _EXPECTED[kind]) from error


def _placed(examples: Iterable[Example], file: Path, kind: Kind) -> Iterator[tuple[int, Example]]:
    """Examples of a file that is read as a whole: line 0."""
    try:
        for example in examples:
            yield 0, example
    except ValueError as error:
        raise ConfigError("data", f"{file}: {error}", _EXPECTED[kind]) from error


def _once(placed: Iterable[tuple[int, Example]], file: Path) -> tuple[Example, ...]:
    """Each example once. Raises ConfigError if two that differ have one id."""
    found: dict[str, Example] = {}
    for number, example in placed:
        if found.setdefault(example.id, example) != example:
            place = f"{file}:{number}" if number else f"{file}"
            raise ConfigError("data", f"{place}: a second example with the id {example.id!r}", "an id for each")
    return tuple(found.values())


def _text_examples(sources: Iterable[Source]) -> Iterator[Example]:
    """Places in each source at which a completion may begin: not blank, some lines before it, chosen by hash.

    Context and question are the text before the place without its line break: tokens such as "\\n   " span the break and the next
    line's indentation, so a prompt that ends with one wants a token that hardly ever follows it.
    """
    for source in sources:
        lines = source.text.split("\n")
        places = [number for number in range(_LINES_BEFORE, len(lines)) if len(lines[number].strip()) > 3]
        places.sort(key=lambda place: _hash(f"{source.group}:{source.name}:{place}"))
        found = (example for place in places if (example := _place_example(source, lines, place)) is not None)
        yield from itertools.islice(found, PLACES_PER_FILE)


def _place_example(source: Source, lines: Sequence[str], place: int) -> Example | None:
    """None where too little follows or nothing precedes."""
    answer = first_lines("\n".join(lines[place : place + 20]), TEXT_LINES)
    before = "\n".join(lines[:place]).rstrip("\n")
    if len(before) > _CONTEXT_CHARS:
        before = before[-_CONTEXT_CHARS:].partition("\n")[2]
    if answer.count("\n") + 1 < TEXT_LINES or not before.strip():
        return None
    return continued(f"{source.group}:{source.name}:{place + 1}", source.group, before, (answer,))


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
