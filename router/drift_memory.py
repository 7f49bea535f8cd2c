"""The file that keeps which pairs are switched off for drift over a restart of the router. Thin IO, called by router/node.py."""

from __future__ import annotations

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
    """What is remembered; nothing without the file. A file that cannot be read is logged and left alone until the next change."""
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=list[_Entry])
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.DecodeError) as error:
        log.error("what was switched off for drift cannot be read", file=str(path), problem=str(error))
        return ()
    now = clock()
    return tuple(msgspec.structs.replace(one.pair, off_s=max(0.0, now - one.since)) for one in entries)


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
