"""Logging of every kvkin process: structlog on stderr, readable on a terminal, JSON lines otherwise.

Called once by ``tools/cli.py`` before a command runs. What libraries log through the standard library comes out the same way.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog

Level = Literal["debug", "info", "warning", "error"]


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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
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
