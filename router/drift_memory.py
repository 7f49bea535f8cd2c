"""The file that keeps which pairs are switched off for drift over a restart of the router. Thin IO, called by router/node.py."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import structlog

from kvkin.router.drift_types import SwitchedOff

log = structlog.get_logger()


class _Entry(msgspec.Struct, frozen=True):
    """``since`` is the time of day (seconds since 1970): the router's own clock starts anew with it."""

    since: float
    pair: SwitchedOff


def read_memory(path: Path, clock: Callable[[], float] = time.time) -> tuple[SwitchedOff, ...]:
    """What is remembered; nothing without the file. What cannot be read is logged and kept aside, entry by entry."""
    entries: list[_Entry] = []
    try:
        data = path.read_bytes()
        for raw in msgspec.json.decode(data, type=list[msgspec.Raw]):
            try:
                entries.append(msgspec.json.decode(raw, type=_Entry))
            except msgspec.DecodeError as error:
                _keep_aside(path, data, error)
    except FileNotFoundError:
        return ()
    except msgspec.DecodeError as error:
        _keep_aside(path, data, error)
    except OSError as error:
        log.error("what was switched off for drift cannot be read", file=str(path), problem=str(error))
    now = clock()
    return tuple(msgspec.structs.replace(one.pair, off_s=max(0.0, now - one.since)) for one in entries)


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
        staging.write_bytes(msgspec.json.format(msgspec.json.encode(entries)))
        staging.replace(path)
    except OSError as error:
        log.error("what was switched off for drift cannot be kept", file=str(path), problem=str(error))
