"""Prompts of checked requests, kept for ``kvkin profile --refresh`` where the operator allows it. Thin IO of the decode node.

One file a pair and host, ``state_dir/recorded/<sender>-<receiver>.jsonl``, written by every decode node there; readable by the
cluster's user alone.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

from kvkin.configs.profiles import profile_name

FOLDER = "recorded"


class Record(msgspec.Struct, frozen=True):
    """One line. Tokens before ``suffix_start`` are the context that ``receiver`` reused of ``sender``."""

    token_ids: tuple[int, ...]
    suffix_start: int
    sender: str
    receiver: str


class Records:
    """Appends to the files in ``folder``, each bounded by ``most_bytes``: beyond it the older half goes."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder, self._most_bytes = folder, most_bytes

    def path(self, sender: str, receiver: str) -> Path:
        return self._folder / f"{profile_name(sender, receiver).removesuffix('.json')}.jsonl"

    def add(self, record: Record) -> bool:
        """Append a line; False if it alone is longer than a file may be. Raises OSError."""
        line = msgspec.json.encode(record) + b"\n"
        if len(line) > self._most_bytes:
            return False
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.path(record.sender, record.receiver)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        with open(descriptor, "r+b", closefd=True) as file:
            # other nodes of this host write there, too
            fcntl.flock(file, fcntl.LOCK_EX)
            size = file.seek(0, os.SEEK_END)
            if size + len(line) > self._most_bytes:
                file.seek(0)
                kept = b"".join(newest(file.readlines(), min(self._most_bytes // 2, self._most_bytes - len(line))))
                file.truncate(0)
                size, line = 0, kept + line
            try:
                file.write(line)
                file.flush()
            except OSError:  # a full disk takes a part of it; half a line would spoil the file for its readers
                os.ftruncate(descriptor, size)
                raise
        return True


def newest(lines: list[bytes], most_bytes: int) -> list[bytes]:
    """The last of the lines, as many as fit."""
    size, start = 0, len(lines)
    while start and size + len(lines[start - 1]) <= most_bytes:
        start -= 1
        size += len(lines[start])
    return lines[start:]
