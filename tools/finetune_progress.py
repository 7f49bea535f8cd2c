"""What ``kvkin finetune`` shows while it runs: bars with remaining time on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from kvkin.tools.finetune_data import Sample

if TYPE_CHECKING:
    from kvkin.tools.finetune_loop import Progress as TrainingProgress

LINE_EVERY_S = 20.0


class Reporter:
    """Writes to stderr; ``clock`` in seconds paces the lines of a log."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console or Console(file=sys.stderr)
        self.clock = clock

    def say(self, message: str) -> None:
        self.console.print(f"[finetune] {message}", markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def training(
        self, samples: Sequence[Sample], batch_samples: int, progress: TrainingProgress
    ) -> Iterator[Callable[[Sample, TrainingProgress], None]]:
        """Yields what the loop calls after each sample; counts tokens, since samples differ in length."""
        total = sum(len(sample.ids) for sample in samples)
        steps = -(-len(samples) // batch_samples)
        with self._counter("train", total, done=progress.tokens) as count:

            def on_sample(sample: Sample, now: TrainingProgress) -> None:
                recent = now.losses[-10:]
                loss = f"loss {sum(recent) / len(recent):.3f}" if recent else "loss ..."
                count(len(sample.ids), f"step {now.step}/{steps} {loss}")

            yield on_sample

    @contextmanager
    def scoring(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """Yields what the scoring calls with the number of prompts just finished."""
        with self._counter(f"score {name}", total) as count:
            yield lambda finished: count(finished, "")

    @contextmanager
    def _counter(self, title: str, total: int, done: int = 0) -> Iterator[Callable[[int, str], None]]:
        if self.console.is_terminal:
            bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=self.console,
            )
            with bar:
                task = bar.add_task(title, total=total, completed=done)
                yield lambda amount, note: bar.update(task, advance=amount, description=f"{title} {note}")
            return
        began = said = self.clock()
        count = 0

        def line(amount: int, note: str) -> None:
            nonlocal said, count
            count += amount
            now = self.clock()
            if now - said < LINE_EVERY_S and done + count < total:
                return
            said = now
            rate = count / max(now - began, 1e-9)
            left_s = (total - done - count) / max(rate, 1e-9)
            self.say(f"{title}: {done + count}/{total} ({rate:.1f}/s, {left_s / 60:.1f} min left) {note}")

        yield line
