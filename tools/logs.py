"""Logging of every kvkin process: structlog on stderr, readable on a terminal, JSON lines otherwise.

Called once by ``tools/cli.py`` before a command runs. What libraries log through the standard library comes out the same way.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any, Literal, TextIO

import structlog

Level = Literal["debug", "info", "warning", "error"]


class Lines(structlog.PrintLogger):
    """Prints events. One that cannot be written (a full disk, a closed pipe) is lost, and nothing else is: what happened is
    told in the middle of acting on it, and an error there would cost the request its answer."""

    def msg(self, message: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the file was closed
            super().msg(message)

    log = debug = info = warn = warning = fatal = failure = err = error = critical = exception = msg


def lines_to(file: TextIO) -> Any:
    """A factory of loggers that print to ``file``."""
    return lambda *_: Lines(file)


def setup_logging(level: Level) -> None:
    """From now on, events of ``level`` and above go to stderr."""
    terminal = sys.stderr.isatty()
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if terminal else "iso", utc=not terminal),
    ]
    output: list[structlog.typing.Processor]
    if terminal:
        output = [structlog.dev.ConsoleRenderer()]
    else:
        output = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    structlog.configure(
        processors=[*shared, *output],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lines_to(sys.stderr),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *output],
        )
    )
    # libraries tell their own story at info; only their trouble is ours
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)
