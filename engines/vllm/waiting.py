"""Waiting inside a forward for the last layers of a context: DroidSpeak's fetch by layer, where nothing else would be held up.

A load is complete before vLLM computes the rest of the prompt, so that other requests never wait for a transfer. Where a request is alone
that only costs it time: the rest of the prompt could be at the lower layers by now. So a load that only pulls is ended early once what
is missing is expected within ``wait_s``, and the forward waits for each layer as it comes to it. If the data does not come within that
time, or its plan is given up, nothing of the forward is used and the request starts over. Used by the engine, on its thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvkin.engines.loop import EngineLoop
from kvkin.engines.vllm.loads import Load
from kvkin.engines.vllm.orders import WriteData
from kvkin.engines.vllm.running import RunningRequest
from kvkin.kv.errors import SourceTimeout


@dataclass(frozen=True, eq=False)
class Posted:
    """What another thread wants done about a request: data for it, or (not ``data``) the end of its plan."""

    request_id: str
    data: bool
    action: Callable[[], None]

    def __call__(self) -> None:
        self.action()


class LayerWaits:
    """``wait_s``: how long a forward may wait, all layers together; 0: never. ``running(key)`` is the request of a load."""

    def __init__(
        self,
        wait_s: float,
        loop: EngineLoop,
        running: Callable[[str], RunningRequest | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wait_s, self._loop, self._running, self._clock = wait_s, loop, running, clock
        self._deadlines: dict[str, float] = {}
        self.waited_s = 0.0
        """Seconds that the step spent waiting; whoever reads it sets it back."""

    def may_end(self, load: Load) -> bool:
        """Whether to end a load early: its lowest layer is there, and at the pace of its data so far the rest is soon."""
        running = self._running(load.key)
        if not self._wait_s or running is None or running.started_over or running.request.sampling is None:
            return False
        if load.misses(0) or not load.received:
            return False
        elapsed = self._clock() - running.first_data_at
        return elapsed / len(load.received) * load.num_missing <= self._wait_s

    def layer(self, key: str, layer: int) -> Sequence[WriteData]:
        """All writes of a layer that were not ordered yet, as soon as they are there. Raises SourceTimeout."""
        running = self._running(key)
        if running is None or running.entry is None:
            return []
        load, over = running.entry.load, False

        def wanted(action: Callable[[], None]) -> bool:
            nonlocal over
            if not isinstance(action, Posted) or action.request_id != running.request.request_id:
                return False
            # what comes after the end of a plan belongs to the next one
            over = over or not action.data
            return not over

        writes = load.layer_writes(layer)
        began = self._clock()
        deadline = self._deadlines.setdefault(key, began + self._wait_s)
        try:
            while load.misses(layer):
                left = deadline - self._clock()
                if over or left <= 0:
                    why = "its plan was given up" if over else f"layer {layer} did not come within {self._wait_s:g} s"
                    raise SourceTimeout(why)
                self._loop.sift(wanted, left, lambda: over)
                writes += load.layer_writes(layer)
        finally:
            waited = self._clock() - began
            self.waited_s += waited
            running.counters.wait_s += waited
            if not load.num_missing:
                self._deadlines.pop(key, None)
        return writes

    def forget(self, key: str) -> None:
        """The plan is over. Idempotent."""
        self._deadlines.pop(key, None)
