"""How far a serving benchmark is, on stderr: one line that is rewritten on a terminal, one line a point elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence

from rich.console import Console
from rich.status import Status

from kvkin.tools.bench_serving_sweep import Point, PointResult
from kvkin.tools.cluster_view import duration
from kvkin.tools.load_runner import LoadRun

REFRESH_S = 0.5


class Progress:
    """The watcher of a sweep. Use as ``async with showing()``."""

    def __init__(
        self, points: Sequence[tuple[Point, float]], console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``points``: each with the seconds for which its requests arrive."""
        self._horizons_s = [horizon_s for _, horizon_s in points]
        self._console, self._clock = console, clock
        self._status: Status | None = None
        self._done = 0
        self._began = self._done_s = 0.0
        self._point: Point | None = None
        self._run: LoadRun | None = None

    @contextlib.asynccontextmanager
    async def showing(self) -> AsyncIterator[None]:
        if not self._console.is_terminal:
            yield
            return
        with self._console.status("") as self._status:
            ticking = asyncio.create_task(self._tick())
            try:
                yield
            finally:
                ticking.cancel()
                await asyncio.gather(ticking, return_exceptions=True)

    def say(self, text: str) -> None:
        if self._status is None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._status.update(text)

    def waking(self) -> None:
        self.say("every model answers once")

    def waiting(self, point: Point) -> None:
        self._point, self._run = point, None
        if self._status is not None:
            self.say(f"{self._title(point)}: waiting until the cluster is idle")

    def started(self, point: Point, horizon_s: float, run: LoadRun) -> None:
        self._point, self._run, self._began = point, run, self._clock()
        if self._status is None:
            left = duration(self.left_s())
            self.say(f"{self._title(point)}: {run.total} requests over {duration(horizon_s)}; about {left} left")
        else:
            self.say(self.line())

    def ended(self, result: PointResult) -> None:
        self._done_s += self._clock() - self._began
        self._done += 1
        self._run = None
        figures, counts = result.figures, result.figures.counts
        ttft = "no answer" if figures.ttft_ms is None else f"p95 TTFT {figures.ttft_ms.p95:,.0f} ms"
        text = f"{self._title(result.point)}: {counts.finished} of {counts.planned} finished, {ttft}"
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def line(self) -> str:
        """What is going on now, with the time that is left."""
        if self._point is None or self._run is None:
            return ""
        run = self._run
        return (
            f"{self._title(self._point)}: {run.in_flight} in flight, {run.done} of {run.total} done, "
            f"about {duration(self.left_s())} left"
        )

    def left_s(self) -> float:
        """Points take about as much longer than their arrivals do as those that are done."""
        done_horizon_s = sum(self._horizons_s[: self._done])
        stretch = self._done_s / done_horizon_s if done_horizon_s > 0 else 1.0
        now_s = self._clock() - self._began if self._run is not None else 0.0
        return max(0.0, sum(self._horizons_s[self._done :]) * stretch - now_s)

    def _title(self, point: Point) -> str:
        number = f"{point.place + 1}/{len(self._horizons_s)}"
        return f"{number} {point.arm} at {point.rate:.4g}/s, repeat {point.repeat + 1}"

    async def _tick(self) -> None:
        while True:
            if self._run is not None:
                self.say(self.line())
            await asyncio.sleep(REFRESH_S)


def stderr_console() -> Console:
    return Console(file=sys.stderr, highlight=False)
