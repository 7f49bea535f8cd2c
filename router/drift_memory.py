"""The file that keeps which pairs are switched off for drift over a restart of the router. Thin IO, called by router/node.py."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import structlog

from kvkin.router.drift_types import SwitchedOff

log = structlog.get_logger()

MAX_BYTES = 16 << 20
"""More is no memory of pairs: an entry has a kilobyte."""


class _Entry(msgspec.Struct, frozen=True):
    """``since`` is the time of day (seconds since 1970): the router's own clock starts anew with it."""

    since: float
    pair: SwitchedOff


def read_memory(path: Path, clock: Callable[[], float] = time.time) -> tuple[SwitchedOff, ...]:
    """What is remembered; nothing without the file. What cannot be read is logged and kept aside, entry by entry."""
    entries: list[_Entry] = []
    data = _bytes_of(path)
    if data is None:
        return ()
    try:
        # nesting beyond all reason is a RecursionError
        for raw in msgspec.json.decode(data, type=list[msgspec.Raw]):
            try:
                entries.append(msgspec.json.decode(raw, type=_Entry))
            except (msgspec.DecodeError, RecursionError) as error:
                _keep_aside(path, data, error)
    except (msgspec.DecodeError, RecursionError) as error:
        _keep_aside(path, data, error)
    now = clock()
    return tuple(msgspec.structs.replace(one.pair, off_s=max(0.0, now - one.since)) for one in entries)


def _bytes_of(path: Path) -> bytes | None:
    """The file's content; None, logged unless it is not there, where it is none that this module wrote."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            problem = "is no regular file"  # a pipe would be read for ever
        elif found.st_size > MAX_BYTES:
            problem = f"has {found.st_size} bytes, more than {MAX_BYTES}"
        else:
            return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        problem = str(error)
    log.error("what was switched off for drift cannot be read", file=str(path), problem=problem)
    return None


def _keep_aside(path: Path, data: bytes, error: Exception) -> None:
    """The next change replaces the file: whoever wants to know what stood there finds it beside it."""
    aside = path.with_name(f"{path.name}.unreadable")
    log.error("what was switched off for drift cannot be read", file=str(path), kept=str(aside), problem=str(error))
    with contextlib.suppress(OSError):
        aside.write_bytes(data)


def write_memory(path: Path, pairs: Sequence[SwitchedOff], clock: Callable[[], float] = time.time) -> None:
    """Replace the file at once. Failing is logged: it costs the memory, not the router."""
    now = clock()
    entries = [_Entry(now - pair.off_s, pair) for pair in pairs]
    staging = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with staging.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(entries)))
            file.flush()
            os.fsync(file.fileno())  # a pair that is off stays off even if the host loses power
        staging.replace(path)
    except OSError as error:
        log.error("what was switched off for drift cannot be kept", file=str(path), problem=str(error))
