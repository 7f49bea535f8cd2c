"""What a worker does inside vLLM's forwards: keeps taps, announces what is complete layer by layer, waits for late layers of a load.

Called around each layer's attention, by the thread that runs the model. On a device the layer may not have run yet: what is said of it
is said once it has (``lanes.py``). The thread goes on launching layers meanwhile, up to ``LAYERS_AHEAD`` of what is announced, so that
a layer is pulled while the next ones run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvkin.engines.vllm.lanes import Lane
from kvkin.engines.vllm.load_work import Loading, LoadWork, Served, reason
from kvkin.engines.vllm.loads import own_unit
from kvkin.engines.vllm.orders import Progress, WriteData
from kvkin.engines.vllm.reports import LoadFailed, Report, UnitRan
from kvkin.engines.vllm.taps import tapped

LAYERS_AHEAD = 2
"""Layers that were launched and not announced yet. More, and a prompt's KV is announced all at once when its forward has ended."""


class ForwardWatch:
    """``layers``: a layer's name in vLLM -> its number."""

    def __init__(
        self,
        model: Any,
        layers: dict[str, int],
        lane: Lane,
        work: LoadWork,
        served: dict[str, Served],
        say: Callable[[Report], None],
    ) -> None:
        self._model, self._layers, self._lane, self._work = model, layers, lane, work
        self._served, self._say = served, say
        self.await_layer: Callable[[str, int], Sequence[WriteData]] = _nothing_is_awaited
        self.early: dict[str, Loading] = {}
        """Loads that were ended early, and whose forward has not run yet."""
        self._progress: Sequence[Progress] = ()
        self._batch: _Batch | None = None

    def begin(self, progress: Sequence[Progress]) -> None:
        """A step begins."""
        self._progress, self._batch = progress, None

    def end(self) -> None:
        """Its forward, if it had any, was launched."""
        for progress in self._progress:
            self.early.pop(progress.key, None)

    def layer_needed(self, name: str) -> None:
        """vLLM's forward is about to attend in a layer: what a load that was ended early lacks of it is waited for."""
        if self._work.in_unit or not self.early:
            return
        for progress in self._progress:
            load, served = self.early.get(progress.key), self._served.get(progress.key)
            if load is None or load.failed or served is None:
                continue
            try:
                for write in self.await_layer(progress.key, self._layers[name]):
                    self._work.write(load, served.serve.layout, write)
            except Exception as error:  # noqa: BLE001 - nothing of this forward is used
                load.failed = True
                self._say(LoadFailed(progress.key, reason(error), late=True))

    def layer_saved(self, name: str, metadata: Any) -> None:
        """vLLM's forward has the KV of a layer in the cache: keep its taps, announce what is complete at this layer."""
        if self._work.in_unit or not self._progress:
            return
        self._lane.poll()
        layer = self._layers[name]
        if any(load.failed for load in self.early.values()):
            return
        taps: list[tuple[Served, Progress]] = []
        complete: list[UnitRan] = []
        for progress in self._progress:
            served = self._served.get(progress.key)
            if served is None:
                continue
            if served.states.has(layer):
                taps.append((served, progress))
            complete += self._complete(served, layer, progress)
        if taps:
            self._tap(taps, layer, metadata, complete)
        elif complete:
            self._lane.then(lambda: self._announce(complete), weight=1)
        if complete:
            self._lane.pace(LAYERS_AHEAD)

    def _tap(
        self, taps: Sequence[tuple[Served, Progress]], layer: int, metadata: Any, complete: Sequence[UnitRan]
    ) -> None:
        """Keep the rows of requests, then announce: who hears of a layer may ask for its hidden states."""
        num_rows = metadata.num_actual_tokens
        if self._batch is None:
            # by the forward's own stream: the next step's inputs go where this step's were
            self._batch = _Batch(self._lane.to_host(metadata.slot_mapping[:num_rows]))
        batch = self._batch
        with self._lane.tapping():
            rows = self._lane.to_host(tapped(self._model, layer)[:num_rows])

            def keep() -> None:
                for served, progress in taps:
                    first = batch.row_of(progress.first_slot)
                    mine = rows[first : first + progress.stop - progress.start]
                    self._work.kept(served, layer, progress.start, mine)
                self._announce(complete)

            self._lane.then(keep, weight=1 if complete else 0)

    def _announce(self, complete: Sequence[UnitRan]) -> None:
        for report in complete:
            self._say(report)

    def _complete(self, served: Served, layer: int, progress: Progress) -> list[UnitRan]:
        """What is complete at this layer with the rows of this step, and was not announced."""
        num_layers = len(self._layers)
        if not served.announced:
            served.announced = [0] * num_layers
        chunks = served.serve.later_chunks
        complete = []
        while served.announced[layer] < len(chunks) and chunks[served.announced[layer]].stop <= progress.stop:
            chunk = chunks[served.announced[layer]]
            served.announced[layer] += 1
            last = chunk.index == chunks[-1].index
            unit = own_unit(chunk.index, layer, chunk.start, chunk.stop, num_layers, last=last)
            complete.append(UnitRan(progress.key, unit, (), 0.0))
        return complete


class _Batch:
    """Which row of a forward's batch is whose: their order is the runner's, a slot is written by one request only.

    ``slots``: (rows,) int64 in host memory, once the device has come so far.
    """

    def __init__(self, slots: Tensor) -> None:
        self._slots, self._order = slots, np.empty(0, dtype=np.int64)
        self._sorted: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def row_of(self, first_slot: int) -> int:
        """The row of a request's first token in the step."""
        if not len(self._order):
            slots = self._slots.to(torch.int64).numpy()
            self._order = np.argsort(slots, kind="stable")
            self._sorted = slots[self._order]
        place = int(np.searchsorted(self._sorted, first_slot))
        assert self._sorted[place] == first_slot, f"nothing of this batch is written to slot {first_slot}"
        return int(self._order[place])


def _nothing_is_awaited(key: str, layer: int) -> Sequence[WriteData]:
    raise AssertionError(f"nobody can say when layer {layer} of {key} comes")
