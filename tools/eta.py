"""Lines of a long measurement on stderr: what it does, how many cases are done, how long the rest will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.console import Console

LINE_EVERY_S = 10.0


def speaker(command: str) -> Callable[[str], None]:
    """What ``command`` says lines with."""
    console = Console(file=sys.stderr)
    return lambda message: console.print(f"[{command}] {message}", markup=False, highlight=False, soft_wrap=True)


class Eta:
    """``step`` counts a finished case and says a line now and then; ``clock`` in seconds."""

    def __init__(
        self,
        title: str,
        total: int,
        done: int,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        every_s: float = LINE_EVERY_S,
    ) -> None:
        self._title, self._total, self._done, self._say = title, total, done, say
        self._clock, self._every_s = clock, every_s
        self._began = self._said = clock()
        self._counted = 0

    def step(self, note: str = "") -> None:
        """One more is done."""
        self._done += 1
        self._counted += 1
        now = self._clock()
        if now - self._said < self._every_s and self._done < self._total:
            return
        self._said = now
        left_s = (now - self._began) / self._counted * (self._total - self._done)
        self._say(f"{self._title}: {self._done}/{self._total}, {_span(left_s)} left{f', {note}' if note else ''}")


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
