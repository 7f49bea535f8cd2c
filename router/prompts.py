"""Prompts: chat messages or text to token ids and block hashes, paying only for what is new (docs/design.md section 6).

Called by ``front.py`` on the router's worker threads, never on its event loop. No torch, no transformers.

A rendered prompt is cut into pieces, each beginning with a special token. Tokenizers extract those first, so the pieces'
ids, one after the other, are the ids of the whole. A piece that was seen before costs a dictionary lookup, and turn n+1 of a
chat is the pieces of turn n and a few new ones.

An assistant's answer is not tokenized again: its text may have other ids than those that the model generated, and then no
block of its KV would be hit. ``remember`` keeps the generated ids under everything that stood before them; the same answer in
the same place is spliced in as it was generated. Block hashes go on from the longest known beginning in the same way.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import numpy as np
from tokenizers import Tokenizer, decoders

from kvkin.kv.errors import ConfigError, InvalidRequest, PromptTooLong
from kvkin.kv.hashing import DIGEST_BYTES, digest, extend_hashes, root_hash
from kvkin.router.templates import ChatTemplate
from kvkin.transport.messages import ChatMessage

# How many trailing ids of an answer may go beyond its text (EOS, a stop string) before it is not worth remembering.
MAX_DROPPED_IDS = 128
# Answers that are remembered under one and the same beginning (one context, many questions sampled anew).
MAX_ANSWERS_PER_PLACE = 64
# Rough cost of an entry besides its text and ids.
ENTRY_BYTES = 256

T = TypeVar("T")


class Lru(Generic[T]):
    """Least recently used entries go once their sizes exceed ``max_bytes``. The caller locks."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._entries: OrderedDict[object, tuple[T, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: object) -> T | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: object, value: T, num_bytes: int) -> None:
        old = self._entries.pop(key, None)
        self.num_bytes += num_bytes - (old[1] if old else 0)
        self._entries[key] = (value, num_bytes)
        while self.num_bytes > self.max_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self.num_bytes -= freed


class Piece(msgspec.Struct, frozen=True):
    """Ids of a stretch of text and their digest, which chains into the identity of everything up to here."""

    ids: array[int]
    digest: bytes


class Answer(msgspec.Struct, frozen=True):
    """A remembered answer: ``text`` is the piece in which it stood, up to where ``ids`` reach; ``answer`` its whole text."""

    text: str
    ids: array[int]
    answer: str

    @property
    def num_bytes(self) -> int:
        return 2 * len(self.text) + len(self.answer) + 4 * len(self.ids) + ENTRY_BYTES


class Tail(msgspec.Struct, frozen=True):
    """Where a prompt's answer will begin: the digest of what stands before the last piece, and that piece."""

    before: bytes
    text: str
    ids: array[int]


class Prompt(msgspec.Struct, frozen=True):
    """A prompt ready for routing. ``hash_ms`` is what rendering, tokenizing and hashing took together."""

    token_ids: tuple[int, ...]
    root: bytes
    hashes: tuple[bytes, ...]
    hash_ms: float = 0.0
    tail: Tail | None = None
    tokenized_chars: int = 0


class HashRoots(msgspec.Struct, frozen=True):
    """Which root a prompt's blocks hang on: the family's, or the member's own if it uses ids that only the member has."""

    family_digest: bytes
    member_digest: bytes
    family_vocab: int
    block_size: int
    scope: str

    def root(self, largest_id: int) -> bytes:
        tokenizer = self.family_digest if largest_id < self.family_vocab else self.member_digest
        return root_hash(tokenizer, self.block_size, self.scope)


class _Draft:
    """Ids and chained digests while a prompt is put together."""

    def __init__(self) -> None:
        self.ids: array[int] = array("I")
        self.chains: list[tuple[bytes, int]] = [
            (b"", 0)
        ]  # (digest of all before, number of tokens) at each piece's start
        self.tokenized_chars = 0

    def add(self, piece: Piece) -> None:
        self.ids.extend(piece.ids)
        self.chains.append((digest(b"pieces", self.chains[-1][0], piece.digest), len(self.ids)))


class PromptBuilder:
    """Templates, tokenizes and hashes for all models that share tokenizer and chat template. Thread-safe."""

    def __init__(self, tokenizer_file: Path, template: ChatTemplate | None, memory_bytes: int = 256 << 20) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        except Exception as error:  # noqa: BLE001 - the Rust library raises bare Exceptions
            raise ConfigError("tokenizer", f"{tokenizer_file} cannot be read: {error}") from None
        # limits belong to the request, not to the file that a trainer happened to save
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = template
        self._cut = _cut_pattern(self._tokenizer)
        # byte-level text of ids is the text of their parts, wherever they are cut
        self._concatenates = isinstance(self._tokenizer.decoder, decoders.ByteLevel)
        self._max_chars_per_token = self._longest_token()
        self._lock = threading.Lock()
        self._pieces: Lru[Piece] = Lru(memory_bytes // 2)
        self._answers: Lru[dict[str, Answer]] = Lru(memory_bytes // 4)
        self._hashes: Lru[tuple[int, list[bytes]]] = Lru(memory_bytes // 4)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    # --- making prompts ----------------------------------------------------------------------------------------------

    def chat(self, messages: Sequence[ChatMessage], roots: HashRoots, max_tokens: int) -> Prompt:
        """Prompt of a conversation, ending where the assistant's answer begins."""
        started = time.perf_counter()
        if self._template is None:
            raise InvalidRequest("messages: this model has no chat template (allowed: prompt or token_ids)")
        text = self._template.render(messages)
        self._check_length(text, max_tokens)
        draft, tail = self._tokenize(text, {message.content for message in messages if message.role == "assistant"})
        return self._finish(draft, roots, started, tail)

    def text(self, text: str, roots: HashRoots, max_tokens: int, bos_id: int | None = None) -> Prompt:
        """Prompt of plain text, after ``bos_id`` where the model begins a text with one."""
        started = time.perf_counter()
        self._check_length(text, max_tokens)
        draft = _Draft()
        ids = array("I", [] if bos_id is None else [bos_id])
        ids.extend(self._tokenizer.encode(text, add_special_tokens=False).ids)
        draft.add(_piece(ids))
        draft.tokenized_chars = len(text)
        return self._finish(draft, roots, started, None)

    def ids(self, token_ids: Sequence[int], roots: HashRoots) -> Prompt:
        """Prompt of ids that the client made itself; the front has checked their range."""
        started = time.perf_counter()
        draft = _Draft()
        draft.add(_piece(array("I", token_ids)))
        return self._finish(draft, roots, started, None)

    # --- remembering answers -----------------------------------------------------------------------------------------

    def remember(self, tail: Tail, answer: str, token_ids: Sequence[int]) -> bool:
        """Keep an answer's ids for the next turn; returns whether they can be spliced.

        Ids beyond the answer's text are dropped (EOS, a stop string): the next turn's template writes what follows. Ids whose
        text is not the answer's are not kept, so that a splice never changes the text of a prompt.
        """
        kept = self._matching_ids(tail, answer, list(token_ids))
        if not kept:
            return False
        text = tail.text + (self.decode(kept) if self._concatenates else answer)
        entry = Answer(text, tail.ids + array("I", kept), answer)
        with self._lock:
            place = dict(self._answers.get(tail.before) or {})
            place.pop(text, None)
            place[text] = entry
            while len(place) > MAX_ANSWERS_PER_PLACE:
                del place[next(iter(place))]
            self._answers.put(tail.before, place, sum(kept_answer.num_bytes for kept_answer in place.values()))
        return True

    def _matching_ids(self, tail: Tail, answer: str, ids: list[int]) -> list[int]:
        """The longest start of ``ids`` whose text is the start of ``answer`` (all of it if text cannot be cut freely)."""
        for _ in range(min(len(ids), MAX_DROPPED_IDS) + 1):
            if not ids:
                return []
            if self._concatenates:
                if answer.startswith(self.decode(ids)):
                    return ids
            elif answer and self.decode([*tail.ids, *ids]).endswith(answer):
                return ids
            ids = ids[:-1]
        return []

    # --- inside ------------------------------------------------------------------------------------------------------

    def _longest_token(self) -> int | None:
        """Most characters that one token can stand for; None where a token may stand for any number of them (unknown words)."""
        if not self._concatenates or self._tokenizer.normalizer is not None:
            return None
        return max((len(token) for token in self._tokenizer.get_vocab()), default=1)

    def _check_length(self, text: str, max_tokens: int) -> None:
        """Refuse a text that cannot possibly fit before seconds are spent on tokenizing it."""
        least = len(text) // self._max_chars_per_token if self._max_chars_per_token else 0
        if least > max_tokens:
            raise PromptTooLong(f"the prompt has at least {least} tokens (allowed: up to {max_tokens})")

    def _tokenize(self, text: str, answers: Collection[str]) -> tuple[_Draft, Tail]:
        draft = _Draft()
        pieces = _cut(self._cut, text)
        for piece in pieces:
            draft.add(self._spliced(draft, piece, answers) or self._tokenized(draft, piece))
        (before, start), last = draft.chains[-2], pieces[-1]
        return draft, Tail(before, last, draft.ids[start:])

    def _spliced(self, draft: _Draft, piece: str, answers: Collection[str]) -> Piece | None:
        if not answers:
            return None
        with self._lock:
            place = self._answers.get(draft.chains[-1][0])
        if place is None:
            return None
        fits = [
            entry
            for text, entry in place.items()
            if entry.answer in answers and (piece.startswith(text) if self._concatenates else piece == text)
        ]
        if not fits:
            return None
        entry = max(fits, key=lambda fit: len(fit.text))
        rest = piece[len(entry.text) :]
        return _piece(entry.ids + self._tokenized(draft, rest).ids) if rest else _piece(entry.ids)

    def _tokenized(self, draft: _Draft, text: str) -> Piece:
        with self._lock:
            known = self._pieces.get(text)
        if known is not None:
            return known
        piece = _piece(array("I", self._tokenizer.encode(text, add_special_tokens=False).ids))
        draft.tokenized_chars += len(text)
        with self._lock:
            self._pieces.put(text, piece, 2 * len(text) + 4 * len(piece.ids) + ENTRY_BYTES)
        return piece

    def _finish(self, draft: _Draft, roots: HashRoots, started: float, tail: Tail | None) -> Prompt:
        largest = int(np.frombuffer(draft.ids, dtype=np.uint32).max()) if draft.ids else 0
        root = roots.root(largest)
        hashes = self._hash(draft, root, roots.block_size)
        took_ms = 1e3 * (time.perf_counter() - started)
        return Prompt(tuple(draft.ids), root, tuple(hashes), took_ms, tail, draft.tokenized_chars)

    def _hash(self, draft: _Draft, root: bytes, block_size: int) -> list[bytes]:
        """Hashes of the full blocks, continuing from the longest beginning that was hashed before."""
        hashes: list[bytes] = []
        with self._lock:
            for chain, num_tokens in reversed(draft.chains[1:]):
                known = self._hashes.get((root, chain))
                if known is not None:
                    hashes = known[1][: num_tokens // block_size]
                    break
        done = len(hashes) * block_size
        hashes = hashes + extend_hashes(hashes[-1] if hashes else root, draft.ids[done:], block_size)
        # the next turn has other text from the last piece on, so the place before it is what it will look for; a prompt
        # of one piece is looked for whole
        chain, num_tokens = draft.chains[-2] if len(draft.chains) > 2 else draft.chains[-1]
        with self._lock:
            size = ENTRY_BYTES + len(hashes) * (DIGEST_BYTES + 48)
            self._hashes.put((root, chain), (num_tokens, hashes[: num_tokens // block_size]), size)
        return hashes


def _piece(ids: array[int]) -> Piece:
    return Piece(ids, digest(b"ids", ids.tobytes()))


def _cut_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Matches the special tokens before which a text may be cut without changing any id.

    Tokens that look at their neighbours (lstrip, single_word) or at normalized text are no such places.
    """
    tokens = [
        token.content
        for token in tokenizer.get_added_tokens_decoder().values()
        if token.content and not (token.normalized or token.lstrip or token.single_word)
    ]
    if not tokens:
        return None
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)))


def _cut(pattern: re.Pattern[str] | None, text: str) -> list[str]:
    """Pieces of ``text``; every piece but the first begins with a special token. An empty text is one empty piece."""
    starts = [match.start() for match in pattern.finditer(text)] if pattern is not None else []
    bounds = [0, *(start for start in starts if start > 0), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(bounds)]
