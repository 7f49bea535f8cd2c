"""A CUDA device that does in its own time what it was given: streams, events and waits as they are ordered, on tensors in host memory.

What is computed is computed when it is called, so answers are right; but an event is not reached before the test lets the device run so
far (``run``), or somebody waits for it. ``needs`` says what must have run before a place in a stream, by the order of the waits alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class FakeStream:
    """``given``: names of work, or (stream, place) to be waited for."""

    name: str
    given: list[Any] = field(default_factory=list)
    done: int = 0

    def wait_stream(self, other: FakeStream) -> None:
        self.given.append((other, len(other.given)))

    def wait_event(self, event: FakeEvent) -> None:
        assert event.stream is not None, "an event that was not recorded"
        self.given.append((event.stream, event.place))


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.stream: FakeStream | None = None
        self.place = 0

    def record(self, stream: FakeStream) -> None:
        self.stream, self.place = stream, len(stream.given)

    def query(self) -> bool:
        assert self.stream is not None
        if self._cuda.source is not None and self._cuda.source.random() < 0.3:
            self._cuda.run(self.stream, self.place)
        return self.stream.done >= self.place

    def synchronize(self) -> None:
        assert self.stream is not None
        self._cuda.waited.append((self.stream, self.place))
        self._cuda.run(self.stream, self.place)

    def elapsed_time(self, other: FakeEvent) -> float:
        """Milliseconds: one for each piece of work between two events of one stream, which both were reached."""
        assert self.stream is other.stream is not None
        assert other.stream.done >= other.place, "the device has not come so far"
        return float(sum(isinstance(work, str) for work in self.stream.given[self.place : other.place]))


class FakeCuda:
    """As ``cuda_lane.Cuda``. With a ``source`` the device makes some progress by itself, else none."""

    def __init__(self, source: random.Random | None = None) -> None:
        self.source = source
        self.main = FakeStream("main")
        self.streams = [self.main]
        self.ran: list[tuple[FakeStream, str]] = []
        self.waited: list[tuple[FakeStream, int]] = []
        """Where the host waited for the device."""
        self._current = [self.main]

    def current(self) -> FakeStream:
        return self._current[-1]

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def stream(self, priority: int) -> FakeStream:
        self.streams.append(FakeStream(f"side {len(self.streams)}"))
        return self.streams[-1]

    def event(self, *, timed: bool = False) -> FakeEvent:
        return FakeEvent(self)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.launch("copy")
        return torch.empty(shape, dtype=dtype)

    def to_device(self, pinned: Tensor) -> Tensor:
        return pinned.clone()

    def launch(self, work: str) -> None:
        self.current().given.append(work)

    def run(self, stream: FakeStream, place: int | None = None) -> None:
        """Let the device do everything that a stream was given (before ``place``), and what that waits for."""
        place = len(stream.given) if place is None else place
        while stream.done < place:
            work = stream.given[stream.done]
            if isinstance(work, str):
                self.ran.append((stream, work))
            else:
                self.run(*work)
            stream.done += 1

    def run_all(self) -> None:
        for stream in self.streams:
            self.run(stream)

    def needs(self, stream: FakeStream, place: int | None = None) -> set[str]:
        """Names of all work that runs before a place of a stream (its end)."""
        names: set[str] = set()
        reached: dict[FakeStream, int] = {}
        waiting = [(stream, len(stream.given) if place is None else place)]
        while waiting:
            at, until = waiting.pop()
            for work in at.given[reached.get(at, 0) : until]:
                if isinstance(work, str):
                    names.add(work)
                else:
                    waiting.append(work)
            reached[at] = max(until, reached.get(at, 0))
        return names
