"""Peak memory of this process and everything that it started, sampled; for figures that are reported, not for decisions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import psutil

SAMPLE_S = 1.0


class PeakMemory:
    """``async with watching()``: ``peak_bytes`` is the largest sum seen. Shared pages count once where the system says so."""

    def __init__(self) -> None:
        self.peak_bytes = 0

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        sampling = asyncio.create_task(self._sample())
        try:
            yield
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)

    async def _sample(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, await asyncio.to_thread(_now))
            await asyncio.sleep(SAMPLE_S)


def _now() -> int:
    me = psutil.Process()
    total = 0
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError, ProcessLookupError):
            memory = process.memory_full_info()
            # proportional: pages that several processes map are divided among them
            total += getattr(memory, "pss", memory.rss)
    return total
