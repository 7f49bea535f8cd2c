"""From token ids to text while they come: UTF-8 that is split over tokens, stop strings that are split over tokens.

Uses the ``tokenizers`` library. Text is held back only as long as it may still turn into something else: an unfinished
character, or the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"


def load_tokenizer(path: Path) -> Tokenizer:
    """The checkpoint's ``tokenizer.json``."""
    return Tokenizer.from_file(str(path / "tokenizer.json" if path.is_dir() else path))


class TextStream:
    """Decodes one answer. ``push`` returns the text that is certain now; ``stopped`` is set when a stop string appeared."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, [text for text in stop if text]
        self._ids: list[int] = []
        self._prefix = 0  # ids before this are decoded and settled
        self._settled = 0  # ids before this have been turned into text
        self._pending = ""
        self.text = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        if self.stopped:
            return ""
        self._ids.append(token_id)
        before = self._tokenizer.decode(self._ids[self._prefix : self._settled], skip_special_tokens=True)
        after = self._tokenizer.decode(self._ids[self._prefix :], skip_special_tokens=True)
        if after.endswith(REPLACEMENT):
            return ""
        new = after[len(before) :]
        if new:
            # ids that decode to nothing are no context: some decoders strip what they take for the beginning of a text
            self._prefix = self._settled
        self._settled = len(self._ids)
        return self._release(new, final=False)

    def finish(self) -> str:
        """What was held back, at the end of the answer."""
        if self.stopped:
            return ""
        before = self._tokenizer.decode(self._ids[self._prefix : self._settled], skip_special_tokens=True)
        after = self._tokenizer.decode(self._ids[self._prefix :], skip_special_tokens=True)
        return self._release(after[len(before) :], final=True)

    def _release(self, new: str, *, final: bool) -> str:
        self._pending += new
        found = [index for text in self._stop if (index := self._pending.find(text)) >= 0]
        if found:
            self.stopped = True
            out, self._pending = self._pending[: min(found)], ""
        else:
            keep = 0 if final else self._possible_stop()
            out = self._pending[: len(self._pending) - keep]
            self._pending = self._pending[len(self._pending) - keep :]
        self.text += out
        return out

    def _possible_stop(self) -> int:
        """Length of the longest end of the pending text that begins a stop string."""
        for length in range(min(max(map(len, self._stop), default=1) - 1, len(self._pending)), 0, -1):
            if any(text.startswith(self._pending[-length:]) for text in self._stop):
                return length
        return 0
