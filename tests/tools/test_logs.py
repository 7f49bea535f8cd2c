"""Logging never costs what it tells of."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import TextIO

import pytest
import structlog

from kvkin.tools.logs import setup_logging


def closed() -> tuple[TextIO, Callable[[], None]]:
    file = io.StringIO()
    return file, file.close


def full_disk() -> tuple[TextIO, Callable[[], None]]:
    return open("/dev/full", "w", buffering=1), lambda: None


def pipe_that_nobody_reads() -> tuple[TextIO, Callable[[], None]]:
    read_end, write_end = os.pipe()
    return os.fdopen(write_end, "w"), lambda: os.close(read_end)


@pytest.mark.parametrize("kind", [closed, full_disk, pipe_that_nobody_reads])
def test_what_cannot_be_written_is_lost_and_nothing_else(
    kind: Callable[[], tuple[TextIO, Callable[[], None]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, break_it = kind()
    monkeypatch.setattr(sys, "stderr", file)
    setup_logging("debug")
    break_it()
    with pytest.raises((OSError, ValueError)):
        print("x", file=file, flush=True)
    for method in ("debug", "info", "warning", "error", "critical", "exception"):
        getattr(structlog.get_logger(), method)("falling back to a private prefill", request="r-1")
    with contextlib.suppress(OSError):  # what print() left in its buffer
        file.close()


def test_what_can_be_written_is(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    setup_logging("info")
    structlog.get_logger().error("the engine failed", node="decode-0")
    structlog.get_logger().debug("not shown")
    (line,) = file.getvalue().splitlines()
    assert "the engine failed" in line
    assert "decode-0" in line
