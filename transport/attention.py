"""Standstill: how long this process itself did not run, for whoever judges others by their silence.

A paused machine, a stopped process or one without a CPU finds all its deadlines passed before it has read what came meanwhile; by its
clock everybody else fell silent at once.
"""

from __future__ import annotations


class Standstill:
    """For a look every ``period_s`` seconds, from a timer that runs in the same loop as what reads."""

    def __init__(self, period_s: float, now: float) -> None:
        self._period_s, self._looked_at = period_s, now

    def look(self, now: float) -> float:
        """Seconds by which this look is late; 0 up to another period, as every timer is a little late."""
        late_s = now - self._looked_at - self._period_s
        self._looked_at = now
        return late_s if late_s > self._period_s else 0.0
