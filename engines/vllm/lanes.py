"""Lanes: what a worker's own device work runs on, beside vLLM's forward. ``HostLane`` on CPUs; ``CudaLane`` is in ``cuda_lane.py``.

A device does what it was given later than the call that gave it. So work is started by a call here, and what is to be said of it
(a unit ran, a load is complete, a block is stored) is a callback of ``then``: it runs once the device is through with everything that the
call before it started. Callbacks of slices, of a forward and of saves are three queues, each in its order: what a forward has computed is
announced while a long slice still runs. They run inside the worker's own calls (``poll``), never by themselves.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from torch import Tensor


class Span(Protocol):
    """A piece of device work. Its times are known to callbacks that were given to ``then`` after ``end``."""

    def end(self) -> None: ...

    @property
    def seconds(self) -> float:
        """How long the device worked on it."""

    @property
    def step_s(self) -> float:
        """How much longer a step of vLLM took because of it."""


class Lane(Protocol):
    """Used by one thread, which is also the one that runs the model's forwards."""

    def begin_step(self) -> None:
        """A step begins: the coming forward overwrites nothing that ``tapping`` still reads. Polls."""

    def saving(self) -> AbstractContextManager[None]:
        """Around reads of what the coming forward may overwrite; it waits for them, on the device."""

    def slice(self) -> AbstractContextManager[None]:
        """Around writes and units between two forwards: they come after everything that the forward's stream was given so far."""

    def tapping(self) -> AbstractContextManager[None]:
        """Around reads, inside a forward, of what the next forward overwrites: this one does not wait for them."""

    def begin(self) -> Span:
        """A piece of work begins here."""

    def to_device(self, tensor: Tensor) -> Tensor:
        """A tensor in host memory on the model's device. Its bytes may change as soon as this returns."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """A tensor of the model's device in host memory: to be read by callbacks that are given to ``then`` afterwards, only.

        Where the model runs in host memory it is ``tensor`` itself.
        """

    def read(self, fetch: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
        """Copies in host memory of what ``fetch`` gives, now: waits for this alone, not for slices or forwards.

        What is read must have been reported as done.
        """

    def then(self, callback: Callable[[], None], weight: int = 0) -> None:
        """Have ``callback`` run once the device has done what it was given so far in this context. ``weight``: see ``pace``."""

    def pace(self, weight: int) -> None:
        """Wait until callbacks of this context that have not run weigh at most ``weight`` together."""

    def poll(self) -> None:
        """Run the callbacks of what the device has done."""

    def end_forward(self) -> None:
        """Wait for what a forward was tapped and announced by: its output is about to be taken, and nothing of it comes after that."""

    def settle(self, slices: int) -> None:
        """Wait until at most ``slices`` (callbacks of weight) of the slices, and nothing else, is still to be done."""

    def close(self) -> None:
        """Wait for the device; callbacks that have not run never do. Idempotent."""


class HostLane:
    """The model runs in host memory: everything is done when it was called."""

    def begin_step(self) -> None:
        pass

    @contextmanager
    def saving(self) -> Iterator[None]:
        yield

    slice = tapping = saving

    def begin(self) -> Span:
        return HostSpan()

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor

    def read(self, fetch: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
        return list(fetch())

    def then(self, callback: Callable[[], None], weight: int = 0) -> None:
        callback()

    def pace(self, weight: int) -> None:
        pass

    def poll(self) -> None:
        pass

    def end_forward(self) -> None:
        pass

    def settle(self, slices: int) -> None:
        pass

    def close(self) -> None:
        pass


class HostSpan:
    """By the clock of the host."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began, self.seconds = clock, clock(), 0.0

    def end(self) -> None:
        self.seconds = self._clock() - self._began

    @property
    def step_s(self) -> float:
        return self.seconds


class Mark(Protocol):
    """A place in what a device was given, as ``torch.cuda.Event``."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Pending:
    """Callbacks in the order in which they were added, each once the device has come to its mark."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Mark, Callable[[], None], int]] = deque()
        self.weight = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, mark: Mark, callback: Callable[[], None], weight: int = 0) -> None:
        self._waiting.append((mark, callback, weight))
        self.weight += weight

    def poll(self) -> None:
        """Run those whose mark was reached."""
        while self._waiting and self._waiting[0][0].query():
            self._run()

    def pace(self, weight: int) -> None:
        """Wait for the oldest until those that are left weigh at most ``weight``."""
        while self.weight > weight:
            self._next()

    def settle(self) -> None:
        """Wait for all."""
        while self._waiting:
            self._next()

    def clear(self) -> None:
        """Wait for all, and run none."""
        while self._waiting:
            self._waiting.popleft()[0].synchronize()
        self.weight = 0

    def _next(self) -> None:
        self._waiting[0][0].synchronize()
        self._run()

    def _run(self) -> None:
        # taken out first: a callback may ask for more
        _, callback, weight = self._waiting.popleft()
        self.weight -= weight
        callback()
