"""The worker side of kvkin's connector: carries out the scheduler side's orders between two forwards, and watches each forward.

Runs in the process and on the thread that runs the model. Orders are executed from the first to the last, nothing is decided here
(``orders.py``). What it has to say (units done, failures) goes to a ``Listener``; in one process that is the engine itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from kvkin.engines.api import Arrival
from kvkin.engines.block_bytes import e_view, kv_views
from kvkin.engines.vllm.layers import LayerRunner, Rows
from kvkin.engines.vllm.loads import own_unit, rows_of
from kvkin.engines.vllm.models import built_model
from kvkin.engines.vllm.orders import (
    BeginLoad,
    EndLoad,
    Forget,
    Order,
    Progress,
    ReleaseBlocks,
    RunUnit,
    SwapIn,
    SwapOut,
    WriteData,
)
from kvkin.engines.vllm.paged_kv import slots_of
from kvkin.engines.vllm.spaces import ETaps
from kvkin.engines.vllm.taps import tapped
from kvkin.kv.execution import Chunk, Unit
from kvkin.kv.layout import KVLayout
from kvkin.kv.pulls import E_LAYER


class Listener(Protocol):
    """Hears of one request what the worker does for it. Must not raise."""

    def unit_done(self, unit: Unit, positions: Sequence[int], seconds: float) -> None:
        """A unit's KV is in the blocks; ``positions`` were computed now (the others were cached), outside of a forward in ``seconds``."""

    def load_failed(self, error: Exception) -> None:
        """An order of its load could not be carried out; later ones of it are skipped."""


@dataclass
class Served:
    """One request as the worker knows it. ``later_chunks`` are those that vLLM's own forward computes."""

    listener: Listener
    taps: ETaps
    layout: KVLayout
    later_chunks: Sequence[Chunk]
    mailbox: dict[tuple[int, int], Arrival] = field(default_factory=dict)
    announced: list[int] = field(default_factory=list)


@dataclass
class _Loading:
    """A load with blocks: the states that enter each chunk's next unit, and its rows."""

    begin: BeginLoad
    hidden: dict[int, Tensor] = field(default_factory=dict)
    rows: dict[int, Rows] = field(default_factory=dict)
    failed: bool = False


class WorkerSide:
    """``served``: requests by key, entered by the engine before it hands them to vLLM."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._config, self._kv_cache_config = vllm_config, kv_cache_config
        self._model = built_model()
        self.served: dict[str, Served] = {}
        self.slice_s = 0.0
        """Seconds that orders took in the last step."""
        self._loads: dict[str, _Loading] = {}
        self._swapped: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._received: set[str] = set()
        self._sent: set[str] = set()
        self._progress: Sequence[Progress] = ()
        self._first_rows: dict[int, int] | None = None  # slot of a request's first token in the batch -> its row
        self._in_unit = False

    @torch.inference_mode()
    def register(self, caches: dict[str, Tensor]) -> None:
        self.runner = LayerRunner(self._model, self._config, self._kv_cache_config, caches)
        self._layers = {name: layer for layer, name in enumerate(caches)}

    # --- orders ----------------------------------------------------------------------------------------------------------

    def before_step(self, orders: Sequence[Order], progress: Sequence[Progress]) -> None:
        """Before anything of the step runs: what vLLM is about to overwrite is kept."""
        self._progress, self._first_rows, self.slice_s = progress, None, 0.0
        for order in orders:
            if isinstance(order, SwapOut) and order.key not in self._swapped:
                slots = slots_of(order.block_ids, self.runner.block_size, 0, order.num_tokens)
                kept = [self.runner.read(layer, slots) for layer in range(self.runner.num_layers)]
                self._swapped[order.key] = [(keys.cpu(), values.cpu()) for keys, values in kept]

    @torch.inference_mode()
    def carry_out(self, orders: Sequence[Order]) -> None:
        """All orders of a step, in order. An error ends its own load only."""
        if not orders:
            return
        started = time.monotonic()
        with self.runner.restored_adapters():
            for order in orders:
                match order:
                    case BeginLoad(key):
                        self._loads[key] = _Loading(order)
                    case WriteData(key) | RunUnit(key) | SwapIn(key):
                        self._guarded(self._loads[key], order)
                    case EndLoad(key, request_id):
                        del self._loads[key]
                        self._received.add(request_id)
                    case ReleaseBlocks(request_id):
                        self._sent.add(request_id)
                    case Forget(key):
                        self._swapped.pop(key, None)
                    case SwapOut():
                        pass
        self.slice_s = time.monotonic() - started

    def take_results(self) -> tuple[set[str], set[str]]:
        """Requests of vLLM whose blocks were (sent, received) since the last call: each once."""
        results = self._sent, self._received
        self._sent, self._received = set(), set()
        return results

    def _guarded(self, load: _Loading, order: WriteData | RunUnit | SwapIn) -> None:
        served = self.served.get(order.key)
        if load.failed or served is None:
            return
        try:
            match order:
                case WriteData(_, chunk, layer):
                    self._write(load, served, served.mailbox.pop((chunk, layer)))
                case RunUnit(_, unit):
                    self._run(load, served, unit)
                case SwapIn():
                    self._swap_in(load)
        except Exception as error:  # noqa: BLE001 - ends this request and no other
            load.failed = True
            served.listener.load_failed(error)

    def _write(self, load: _Loading, served: Served, arrival: Arrival) -> None:
        if arrival.layer == E_LAYER:
            parts = [e_view(data, served.layout) for _, data in sorted(arrival.parts, key=lambda part: part[0])]
            load.hidden[arrival.chunk] = torch.cat(parts).to(self.runner.device)
            return
        for start, data in arrival.parts:
            keys, values = (view.flatten(0, 1) for view in kv_views(data, served.layout))
            skip = min(max(load.begin.cached - start, 0), len(keys))
            if skip < len(keys):
                slots = slots_of(load.begin.block_ids, self.runner.block_size, start + skip, start + len(keys))
                self.runner.write(arrival.layer, keys[skip:], values[skip:], slots)

    def _run(self, load: _Loading, served: Served, unit: Unit) -> None:
        started = time.monotonic()
        positions = rows_of(unit, load.begin.cached)
        if positions:
            hidden = self._entering(load, unit, positions)
            if unit.rows is None:
                served.taps.record(unit.layer, positions[0], hidden)
            self.runner.use_adapter(load.begin.lora_id, len(positions))
            rows = load.rows.get(unit.chunk)
            if rows is None:
                rows = load.rows[unit.chunk] = self.runner.rows(positions, load.begin.block_ids)
            self._in_unit = True
            try:
                out = self.runner.run(unit.layer, unit.mode, hidden, rows)
            finally:
                self._in_unit = False
            if out is None:
                del load.rows[unit.chunk]
            else:
                load.hidden[unit.chunk] = out
        served.listener.unit_done(unit, positions, time.monotonic() - started)

    def _entering(self, load: _Loading, unit: Unit, positions: Sequence[int]) -> Tensor:
        """Hidden states (n, hidden) entering the unit: pulled, left by the unit below, or embedded."""
        hidden = load.hidden.pop(unit.chunk, None)
        if hidden is None:
            assert unit.first, unit
            self.runner.use_adapter(load.begin.lora_id, len(positions))
            return self.runner.embed([load.begin.token_ids[position] for position in positions])
        # pulled states are those of the whole chunk
        return hidden[len(hidden) - len(positions) :]

    def _swap_in(self, load: _Loading) -> None:
        kept = self._swapped[load.begin.key]
        start, stop = load.begin.cached, len(kept[0][0])
        slots = slots_of(load.begin.block_ids, self.runner.block_size, start, stop)
        for layer, (keys, values) in enumerate(kept):
            self.runner.write(layer, keys[start:], values[start:], slots)

    # --- the forward -------------------------------------------------------------------------------------------------------

    def layer_saved(self, name: str, metadata: Any) -> None:
        """vLLM's forward has the KV of a layer in the cache: keep its taps, announce what is complete at this layer."""
        if self._in_unit or not self._progress:
            return
        layer = self._layers[name]
        for progress in self._progress:
            served = self.served.get(progress.key)
            if served is None:
                continue
            if layer in served.taps.layers:
                row = self._row_of(progress, metadata)
                rows = tapped(self._model, layer)[row : row + progress.stop - progress.start]
                served.taps.record(layer, progress.start, rows)
            self._announce(served, layer, progress)

    def _announce(self, served: Served, layer: int, progress: Progress) -> None:
        if not served.announced:
            served.announced = [0] * self.runner.num_layers
        chunks = served.later_chunks
        while served.announced[layer] < len(chunks) and chunks[served.announced[layer]].stop <= progress.stop:
            chunk = chunks[served.announced[layer]]
            served.announced[layer] += 1
            last = chunk.index == chunks[-1].index
            unit = own_unit(chunk.index, layer, chunk.start, chunk.stop, self.runner.num_layers, last=last)
            served.listener.unit_done(unit, (), 0.0)

    def _row_of(self, progress: Progress, metadata: Any) -> int:
        """The batch's row of a request's first token: the order is the runner's, a slot is written by one request only."""
        if self._first_rows is None:
            starts = metadata.query_start_loc[:-1].to("cpu", torch.int64)
            slots = metadata.slot_mapping[starts.to(metadata.slot_mapping.device)].tolist()
            self._first_rows = dict(zip(slots, starts.tolist(), strict=True))
        return self._first_rows[progress.first_slot]
