"""CudaLane: a worker's own device work beside vLLM's forward on a CUDA device. NEVER RUN YET ON ONE: written without a GPU at hand.

Three streams, ordered by events; nothing here waits for the whole device, and nothing but ``read``, ``pace``, ``end_forward`` and ``settle`` waits at all.

- *main* is vLLM's: the forward, the sampling, and (without ``overlap``) the slices.
- *work* has the slices with ``overlap``: each comes after what main was given before it, and no forward waits for it. A load is reported
  once the device is through, so the forward that computes its suffix comes later by itself.
- *copies* has reads: of what a forward is about to overwrite (it waits for the gather, on the device), of taps, and of what was announced
  (which waits for nothing of the other two: a slice may take longer than a step).

Every tensor that is made here is used on the stream that it was made on. What goes between host and device is staged in pinned memory, which
torch's allocator takes back when the copy is done and not before. Callbacks hold what they read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import structlog
import torch
from torch import Tensor

from kvkin.engines.vllm.lanes import HostLane, Lane, Pending, Span
from kvkin.engines.vllm.overlap import why_not_beside

log = structlog.get_logger(__name__)


class Cuda:
    """What a lane needs of ``torch.cuda`` and of vLLM; tests have one that only writes down what it was told."""

    def __init__(self, device: torch.device) -> None:
        from vllm.utils.torch_utils import current_stream

        self._device = device
        # vLLM gives each thread a stream of its own, the first time that anything asks it for the thread's
        self.current: Callable[[], Any] = current_stream
        self.use: Callable[[Any], Any] = torch.cuda.stream

    def stream(self, priority: int) -> Any:
        return torch.cuda.Stream(self._device, priority=priority)  # type: ignore[no-untyped-call]  # torch has no types there

    def event(self, *, timed: bool = False) -> Any:
        # who waits for one sleeps, and leaves the CPU to the node's other threads
        return torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]  # as above

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def to_device(self, pinned: Tensor) -> Tensor:
        return pinned.to(self._device, non_blocking=True)


class CudaLane:
    """``overlap``: slices run beside the forwards (``overlap.py`` says whether they may), else between them."""

    def __init__(self, cuda: Cuda, *, overlap: bool) -> None:
        self._cuda, self.overlap = cuda, overlap
        self._work = cuda.stream(0) if overlap else None
        # its gathers are short, and forwards wait for some of them
        self._copies = cuda.stream(-1)
        self._slices, self._forward, self._saves = Pending(), Pending(), Pending()
        self._queue = self._forward
        self._gathered: Any = None  # the last read of this context has left the device's memory for a place of its own
        self._tapped: Any = None  # what was tapped in the forward before has left its buffers

    # --- contexts ----------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        if self._tapped is not None:
            self._cuda.current().wait_event(self._tapped)
            self._tapped = None
        self.poll()

    @contextmanager
    def saving(self) -> Iterator[None]:
        main = self._cuda.current()
        self._copies.wait_stream(main)
        self._gathered = None
        with self._on(self._copies, self._saves):
            yield
        if self._gathered is not None:
            main.wait_event(self._gathered)

    @contextmanager
    def slice(self) -> Iterator[None]:
        main = self._cuda.current()
        stream = self._work or main
        if stream is not main:
            stream.wait_stream(main)
        # what was swapped out may be written back
        stream.wait_stream(self._copies)
        with self._on(stream, self._slices):
            yield

    @contextmanager
    def tapping(self) -> Iterator[None]:
        self._copies.wait_stream(self._cuda.current())
        with self._on(self._copies, self._forward):
            yield
        self._tapped = self._mark(self._copies)

    @contextmanager
    def _on(self, stream: Any, queue: Pending) -> Iterator[None]:
        before, self._queue = self._queue, queue
        try:
            with self._cuda.use(stream):
                yield
        finally:
            self._queue = before

    # --- work --------------------------------------------------------------------------------------------------------------

    def begin(self) -> Span:
        return _CudaSpan(self._cuda, overlap=self.overlap)

    def to_device(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor
        if tensor.is_pinned():
            # a copy that was swapped out: nobody changes it
            return self._cuda.to_device(tensor)
        staged = self._cuda.pinned(tensor.shape, tensor.dtype)
        staged.copy_(tensor)
        return self._cuda.to_device(staged)

    def to_host(self, tensor: Tensor) -> Tensor:
        # dense, or the copy would be staged in pageable memory
        tensor = tensor.contiguous()
        self._gathered = self._mark(self._cuda.current())
        staged = self._cuda.pinned(tensor.shape, tensor.dtype)
        staged.copy_(tensor, non_blocking=True)
        return staged

    def read(self, fetch: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
        with self._cuda.use(self._copies):
            found = [self.to_host(tensor) for tensor in fetch()]
            self._mark(self._copies).synchronize()
        return found

    # --- what is said of it ------------------------------------------------------------------------------------------------

    def then(self, callback: Callable[[], None], weight: int = 0) -> None:
        self._queue.add(self._mark(self._cuda.current()), callback, weight)

    def pace(self, weight: int) -> None:
        self._queue.pace(weight)

    def poll(self) -> None:
        self._forward.poll()
        self._saves.poll()
        self._slices.poll()

    def end_forward(self) -> None:
        self._forward.settle()

    def settle(self, slices: int) -> None:
        self._forward.settle()
        self._saves.settle()
        if slices:
            self._slices.pace(slices)
        else:
            self._slices.settle()

    def close(self) -> None:
        for queue in (self._forward, self._saves, self._slices):
            queue.clear()

    def _mark(self, stream: Any) -> Any:
        event = self._cuda.event()
        event.record(stream)
        return event


class _CudaSpan:
    """By the device's clock; what a step lost by it is known at the host, if forwards do not wait for it."""

    def __init__(self, cuda: Cuda, *, overlap: bool) -> None:
        self._cuda, self._overlap = cuda, overlap
        self._began, self._launching = time.monotonic(), 0.0
        self._first, self._last = cuda.event(timed=True), cuda.event(timed=True)
        self._first.record(cuda.current())

    def end(self) -> None:
        self._last.record(self._cuda.current())
        self._launching = time.monotonic() - self._began

    @property
    def seconds(self) -> float:
        milliseconds: float = self._first.elapsed_time(self._last)
        return milliseconds / 1e3

    @property
    def step_s(self) -> float:
        return self._launching if self._overlap else self.seconds


def lane_for(vllm_config: Any, device: torch.device, backend: str) -> Lane:
    """The lane of a worker whose model is on ``device``, with attention ``backend``."""
    if device.type != "cuda":
        return HostLane()
    why_not = why_not_beside(vllm_config, backend)
    if why_not:
        log.info("recompute of loads runs between vLLM's steps, not beside them", reason=why_not)
    return CudaLane(Cuda(device), overlap=not why_not)
