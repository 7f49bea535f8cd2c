"""Files in SQuAD format, typed: what ``kvkin finetune --task qa`` reads. Keys that are not listed are passed over."""

from __future__ import annotations

import codecs
from pathlib import Path

import msgspec

from kvkin.kv.errors import ConfigError


class _Answer(msgspec.Struct):
    text: str


class _Question(msgspec.Struct):
    question: str
    answers: list[_Answer]


class _Context(msgspec.Struct):
    context: str
    qas: list[_Question]


class Article(msgspec.Struct):
    title: str
    paragraphs: list[_Context]


class _Squad(msgspec.Struct):
    """The part of a SQuAD file that is read."""

    data: list[Article]


def read_articles(path: Path) -> tuple[bytes, list[Article]]:
    """The file's bytes, and the articles in them. Raises ConfigError with the place that is of another form."""
    try:
        raw = path.read_bytes()
        return raw, msgspec.json.decode(raw.removeprefix(codecs.BOM_UTF8), type=_Squad).data
    except OSError as error:
        raise ConfigError("data", f"cannot read {path}: {error.strerror}", "a SQuAD-format JSON file") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError("data", f"{path} is not SQuAD format: {error}", "a SQuAD-format JSON file") from None
