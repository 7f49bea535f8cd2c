"""What turns text into token ids and back: tokenizer digest, chat template, BOS rule and end tokens of a checkpoint.

Reads JSON only, no tokenizer library. The tokenizer's digest covers text -> ids: decoder, padding and offsets do not
count, nor does the spelling of defaults. Called by ``configs.checkpoints`` and compared by ``configs.families``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from kvkin.configs.safetensors_files import read_json
from kvkin.kv.errors import ConfigError
from kvkin.kv.hashing import digest

# The sections of tokenizer.json that decide on ids. The post-processor adds BOS, which the BOS rule covers.
SECTIONS = ("normalizer", "pre_tokenizer", "model", "added_tokens")


class TokenizerIdentity(msgspec.Struct, frozen=True):
    """A tokenizer by what it does. ``sections`` digests each of SECTIONS, so that a difference can be named."""

    path: Path  # folder with tokenizer.json
    sections: tuple[bytes, ...]
    num_ids: int  # highest id + 1
    bos_id: int | None  # put before a plain prompt (a chat template writes its own)
    added: tuple[tuple[int, bytes], ...]  # (id, digest) of each added token, by id

    @property
    def digest(self) -> bytes:
        """One name for text -> ids."""
        return digest(b"tokenizer", *self.sections)

    def added_beyond(self, base: TokenizerIdentity) -> bool | None:
        """Whether this is ``base`` with tokens added after its last id; None if it differs in any other way."""
        if self.sections == base.sections:
            return False
        same = all(mine == theirs for mine, theirs in zip(self.sections[:-1], base.sections[:-1], strict=True))
        common = tuple(entry for entry in self.added if entry[0] < base.num_ids)
        return True if same and common == base.added else None

    def difference(self, base: TokenizerIdentity) -> str:
        """Names of the sections that differ."""
        return ", ".join(n for n, one, two in zip(SECTIONS, self.sections, base.sections, strict=True) if one != two)


def read_tokenizer(folder: Path, key: str) -> TokenizerIdentity | None:
    """The tokenizer in a folder; None if it has none. ConfigError under ``key`` if it is in a form without tokenizer.json."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        slow = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (folder / name).is_file()]
        if slow:
            problem = f"{folder} has {slow[0]}, but no tokenizer.json"
            raise ConfigError(key, problem, "tokenizer.json: load with AutoTokenizer and save_pretrained")
        return None
    data = read_json(file, key)
    try:
        added = sorted(data.get("added_tokens") or [], key=lambda token: int(token["id"]))
        vocab = data["model"].get("vocab") or {}
        ids = vocab.values() if isinstance(vocab, dict) else [len(vocab) - 1]  # Unigram lists (token, score) pairs
        num_ids = 1 + max([*ids, *(int(token["id"]) for token in added)])
        sections = tuple(digest(name.encode(), _canonical_json(_section(name, data))) for name in SECTIONS)
        tokens = tuple((int(token["id"]), digest(b"added", _canonical_json(token))) for token in added)
        bos_id = _bos_id(data, folder, key)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(key, f"{file} is damaged: {error!r}", "a tokenizer.json of the tokenizers library") from None
    return TokenizerIdentity(folder, sections, num_ids, bos_id, tokens)


def _section(name: str, data: dict[str, Any]) -> Any:
    section = data.get(name)
    if name != "model" or not isinstance(section, dict):
        return sorted(section, key=lambda token: int(token["id"])) if name == "added_tokens" and section else section
    # older tokenizers wrote a merge as "a b", newer ones as ["a", "b"]
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in section.get("merges") or []]
    return {**section, "merges": merges}


def _canonical_json(value: Any) -> bytes:
    return json.dumps(_canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _canonical(value: Any) -> Any:
    """``value`` without what means nothing: absent, null, false and "" are one, and offsets do not change ids."""
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "ByteLevel":
        value = {"use_regex": True, **value}
    # ids are integers, so no entry of a vocabulary is dropped: 0 stays, as only these three go
    return {
        k: _canonical(v)
        for k, v in value.items()
        if k != "trim_offsets" and v is not None and v is not False and v != ""
    }


def _bos_id(data: dict[str, Any], folder: Path, key: str) -> int | None:
    """The id that the tokenizer puts before a plain text, if it does."""
    settings = folder / "tokenizer_config.json"
    config = read_json(settings, key) if settings.is_file() else {}
    explicit = config.get("add_bos_token")
    if explicit is False:
        return None
    if explicit is True:
        bos = config.get("bos_token")
        text = bos.get("content") if isinstance(bos, dict) else bos
        return _id_of(str(text), data)
    return _template_bos(data.get("post_processor"))


def _template_bos(processor: Any) -> int | None:
    if not isinstance(processor, dict):
        return None
    if processor.get("type") == "Sequence":
        found = [_template_bos(inner) for inner in processor.get("processors") or []]
        return next((token for token in found if token is not None), None)
    single = processor.get("single")
    if processor.get("type") != "TemplateProcessing" or not single or "SpecialToken" not in single[0]:
        return None
    return int(processor["special_tokens"][single[0]["SpecialToken"]["id"]]["ids"][0])


def _id_of(token: str, data: dict[str, Any]) -> int | None:
    for entry in data.get("added_tokens") or []:
        if entry["content"] == token:
            return int(entry["id"])
    vocab = data["model"].get("vocab")
    return vocab.get(token) if isinstance(vocab, dict) else None


def read_chat_template(folder: Path, key: str) -> str | None:
    """The chat template of a folder: its own file, or the (default) entry of tokenizer_config.json; None if there is none."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(key, f"{file} cannot be read: {error}", "a Jinja template in UTF-8") from None
    for name in ("chat_template.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            continue
        template = read_json(folder / name, key).get("chat_template")
        if isinstance(template, list):  # several by name
            named = {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = named.get("default")
        if isinstance(template, str) and template:
            return template
    return None


def read_eos_ids(folder: Path, config: dict[str, Any], vocab_size: int, key: str) -> tuple[int, ...]:
    """Ids that end an answer: those of config.json and of generation_config.json together, ascending."""
    file = folder / "generation_config.json"
    ids: set[int] = set()
    for settings in (config, read_json(file, key) if file.is_file() else {}):
        value = settings.get("eos_token_id")
        found = [] if value is None else value if isinstance(value, list) else [value]
        for token in found:
            if not isinstance(token, int) or isinstance(token, bool):
                raise ConfigError(key, f"eos_token_id is {value!r} in {folder}", "an id or a list of ids")
            # some configs name ids that the model never had (-1)
            if 0 <= token < vocab_size:
                ids.add(token)
    return tuple(sorted(ids))
