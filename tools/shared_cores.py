"""Compute threads on cores that several processes share: they must wait for each other without burning the core.

OpenMP threads wait in a busy loop by default. Where another process wants the core, that keeps the very thread from running that is
waited for: a prefill then takes ten times as long. So they spin for microseconds only; the user's own setting wins.
"""

from __future__ import annotations

import os

SHARED_CORES = {"GOMP_SPINCOUNT": "1000"}


def spin_briefly() -> None:
    """For this process and its children; has an effect only before torch is imported."""
    for name, value in SHARED_CORES.items():
        os.environ.setdefault(name, value)
