"""What all tests share: hypothesis without a clock, because a busy machine is no reason to fail; and logging as they found it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import HealthCheck, settings

settings.register_profile("kvkin", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvkin")


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    """Commands set up logging for their process; tests that call them in this one put it back."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    structlog.reset_defaults()
