"""The worker side of kvkin's connector: carries out the scheduler side's orders between two forwards, and watches each forward.

Runs in the process and on the thread that runs the model, on every rank. Orders are executed from the first to the last, nothing is
decided here (``orders.py``). What it has to say goes to ``report``: with the scheduler side in the same process that is heard at once,
else the reports of a step go back with its output (``reports.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from kvkin.engines.vllm.first_logits import kept as first_distributions
from kvkin.engines.vllm.layers import LayerRunner, Rows
from kvkin.engines.vllm.loads import own_unit, rows_of
from kvkin.engines.vllm.models import built_model
from kvkin.engines.vllm.orders import (
    BeginLoad,
    Bytes,
    EndLoad,
    Forget,
    HoldAdapter,
    Order,
    Progress,
    ReleaseBlocks,
    RunUnit,
    Serve,
    Store,
    StoreE,
    StoreKV,
    SwapIn,
    SwapOut,
    WriteData,
)
from kvkin.engines.vllm.paged_kv import slots_of
from kvkin.engines.vllm.rank_memory import CacheShape, KeptStates, RankMemory
from kvkin.engines.vllm.reports import LoadFailed, Report, SliceTook, StatesKept, Stored, UnitRan
from kvkin.engines.vllm.taps import tapped
from kvkin.kv.execution import Unit
from kvkin.kv.layout import KVLayout
from kvkin.kv.pulls import E_LAYER
from kvkin.transport.arena import AttachedArenas


@dataclass
class Served:
    """One request as a worker knows it."""

    serve: Serve
    states: KeptStates
    announced: list[int] = field(default_factory=list)


@dataclass
class _Loading:
    """A load with blocks: the states that enter each chunk's next unit, and its rows."""

    begin: BeginLoad
    hidden: dict[int, Tensor] = field(default_factory=dict)
    rows: dict[int, Rows] = field(default_factory=dict)
    failed: bool = False


class WorkerSide:
    """``report`` hears everything at once; without one the reports are collected until ``take_reports``."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._config, self._kv_cache_config = vllm_config, kv_cache_config
        self._model = built_model()
        self._rank, self._num_ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self._reports: list[Report] = []
        self.report: Callable[[Report], None] = self._reports.append
        self.served: dict[str, Served] = {}
        self._arenas = AttachedArenas()
        self.await_layer: Callable[[str, int], Sequence[WriteData]] = _nothing_is_awaited
        """Writes that a load which was ended early still lacks of a layer; waits for them, and raises if they do not come in time."""
        self._loads: dict[str, _Loading] = {}
        self._early: dict[str, _Loading] = {}  # ended early, and their forward has not run yet
        self._swapped: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._sent: set[str] = set()
        self._progress: Sequence[Progress] = ()
        self._first_rows: dict[int, int] | None = None  # slot of a request's first token in the batch -> its row
        self._in_unit = False

    @torch.inference_mode()
    def register(self, caches: dict[str, Tensor]) -> None:
        self.runner = LayerRunner(self._model, self._config, self._kv_cache_config, caches)
        kv_heads = self._config.model_config.get_total_num_kv_heads()
        self.memory = RankMemory(self.runner, self._arenas, kv_heads, self._rank, self._num_ranks)
        self._layers = {name: layer for layer, name in enumerate(caches)}

    def close(self) -> None:
        self._arenas.close()

    # --- orders ----------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def before_step(self, orders: Sequence[Order], progress: Sequence[Progress]) -> None:
        """Before anything of the step runs: what it may overwrite is kept or stored."""
        self._progress, self._first_rows = progress, None
        for order in orders:
            match order:
                case Serve(key, _, taps, capacity):
                    # hidden states are the same on every rank
                    layers = taps if self._rank == 0 else ()
                    states = KeptStates(layers, capacity, self.runner.hidden_size, self.runner.dtype)
                    self.served[key] = Served(order, states)
                case SwapOut(key, block_ids, num_tokens) if key not in self._swapped:
                    slots = slots_of(block_ids, self.runner.block_size, 0, num_tokens)
                    kept = [self.runner.read(layer, slots) for layer in range(self.runner.num_layers)]
                    self._swapped[key] = [(keys.cpu(), values.cpu()) for keys, values in kept]
                case StoreKV(ticket) | StoreE(ticket):
                    self._ticketed(ticket, partial(self._store, order))

    @torch.inference_mode()
    def carry_out(self, orders: Sequence[Order]) -> None:
        """The other orders of a step, in order. An error ends its own load only."""
        for progress in self._progress:
            self._early.pop(progress.key, None)
        if not orders:
            return
        started = time.monotonic()
        with self.runner.adapters.restored():
            for order in orders:
                match order:
                    case BeginLoad(key):
                        self._loads[key] = _Loading(order)
                    case WriteData(key) | RunUnit(key) | SwapIn(key):
                        self._guarded(self._loads[key], order)
                    case EndLoad(key, request_id, early, failed):
                        load = self._loads.pop(key)
                        if early:
                            self._early[key] = load
                        self._received.add(request_id)
                        if failed or load.failed:
                            self._failed.add(request_id)
                    case ReleaseBlocks(request_id):
                        self._sent.add(request_id)
                    case HoldAdapter(ticket):
                        self._ticketed(ticket, partial(self.runner.adapters.hold, order))
                    case Forget(key):
                        self._swapped.pop(key, None)
                        self.served.pop(key, None)
                        self._early.pop(key, None)
                        self.runner.adapters.release(key)
                    case Serve() | SwapOut() | StoreKV() | StoreE():
                        pass
        self.report(SliceTook(time.monotonic() - started))

    def take_results(self) -> tuple[set[str], set[str], set[str]]:
        """Requests of vLLM whose blocks were (sent, received) since the last call, each once; and which of the received ones failed."""
        results = self._sent, self._received, self._failed
        self._sent, self._received, self._failed = set(), set(), set()
        return results

    def take_reports(self) -> list[Report]:
        """What was reported since the last call, if nobody heard it at once."""
        taken = list(self._reports)
        self._reports.clear()
        return taken

    def _store(self, order: Store) -> None:
        if self.runner.adapters.mixes:
            raise RuntimeError("an adapter in the last slot was mixed into other requests (--max-loras, docs/vllm.md)")
        if isinstance(order, StoreKV):
            self.memory.store_blocks(order)
        else:
            self.memory.store_states(order, self.served[order.key].states)

    def _ticketed(self, ticket: int, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - told to whoever ordered it
            self.report(Stored(ticket, _reason(error)))
        else:
            self.report(Stored(ticket))

    def _guarded(self, load: _Loading, order: WriteData | RunUnit | SwapIn) -> None:
        served = self.served.get(order.key)
        # the other ranks wait in a unit for this one: after an error it runs on whatever is there, and nothing of it is used
        if served is None or (load.failed and self._num_ranks == 1):
            return
        try:
            match order:
                case WriteData(_, chunk, layer, parts):
                    self._write(load, served.serve.layout, chunk, layer, parts)
                case RunUnit(_, unit):
                    self._run(load, served, unit)
                case SwapIn():
                    self._swap_in(load)
        except Exception as error:
            if isinstance(order, RunUnit) and self._num_ranks > 1:
                raise  # ends the engine: another rank may wait in the middle of this unit
            if not load.failed:
                load.failed = True
                self.report(LoadFailed(order.key, _reason(error)))

    def _write(
        self, load: _Loading, layout: KVLayout, chunk: int, layer: int, parts: Sequence[tuple[int, Bytes]]
    ) -> None:
        if layer == E_LAYER:
            if self._num_ranks > 1:
                # in their place if they cannot be read
                count = sum(_num_bytes(data) for _, data in parts) // (layout.hidden_size * layout.dtype_bytes)
                load.hidden[chunk] = torch.zeros(
                    (count, self.runner.hidden_size), dtype=self.runner.dtype, device=self.runner.device
                )
            load.hidden[chunk] = self.memory.hidden(parts, layout)
            return
        for start, data in parts:
            self.memory.write_kv(layer, load.begin.block_ids, load.begin.cached, start, data, layout)

    def _run(self, load: _Loading, served: Served, unit: Unit) -> None:
        started = time.monotonic()
        positions = rows_of(unit, load.begin.cached)
        if positions:
            hidden = self._entering(load, unit, positions)
            if unit.rows is None:
                self._keep_states(served, unit.layer, positions[0], hidden)
            self.runner.adapters.use(load.begin.lora_id, len(positions))
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
        self.report(UnitRan(load.begin.key, unit, positions, time.monotonic() - started))

    def _entering(self, load: _Loading, unit: Unit, positions: Sequence[int]) -> Tensor:
        """Hidden states (n, hidden) entering the unit: pulled, left by the unit below, or embedded."""
        hidden = load.hidden.pop(unit.chunk, None)
        if hidden is None:
            assert unit.first, unit
            self.runner.adapters.use(load.begin.lora_id, len(positions))
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

    def layer_needed(self, name: str) -> None:
        """vLLM's forward is about to attend in a layer: what a load that was ended early lacks of it is waited for."""
        if self._in_unit or not self._early:
            return
        for progress in self._progress:
            load, served = self._early.get(progress.key), self.served.get(progress.key)
            if load is None or load.failed or served is None:
                continue
            try:
                for write in self.await_layer(progress.key, self._layers[name]):
                    self._write(load, served.serve.layout, write.chunk, write.layer, write.parts)
            except Exception as error:  # noqa: BLE001 - nothing of this forward is used
                load.failed = True
                self.report(LoadFailed(progress.key, _reason(error), late=True))

    def layer_saved(self, name: str, metadata: Any) -> None:
        """vLLM's forward has the KV of a layer in the cache: keep its taps, announce what is complete at this layer."""
        if self._in_unit or not self._progress:
            return
        layer = self._layers[name]
        if any(load.failed for load in self._early.values()):
            return
        for progress in self._progress:
            served = self.served.get(progress.key)
            if served is None:
                continue
            if served.states.has(layer):
                row = self._row_of(progress, metadata)
                rows = tapped(self._model, layer)[row : row + progress.stop - progress.start]
                self._keep_states(served, layer, progress.start, rows)
            self._announce(served, layer, progress)

    def _keep_states(self, served: Served, layer: int, start: int, hidden: Tensor) -> None:
        kept = served.states.record(layer, start, hidden)
        if kept:
            self.report(StatesKept(served.serve.key, layer, start, start + kept))

    def _announce(self, served: Served, layer: int, progress: Progress) -> None:
        if not served.announced:
            served.announced = [0] * self.runner.num_layers
        chunks = served.serve.later_chunks
        while served.announced[layer] < len(chunks) and chunks[served.announced[layer]].stop <= progress.stop:
            chunk = chunks[served.announced[layer]]
            served.announced[layer] += 1
            last = chunk.index == chunks[-1].index
            unit = own_unit(chunk.index, layer, chunk.start, chunk.stop, self.runner.num_layers, last=last)
            self.report(UnitRan(progress.key, unit, (), 0.0))

    def _row_of(self, progress: Progress, metadata: Any) -> int:
        """The batch's row of a request's first token: the order is the runner's, a slot is written by one request only."""
        if self._first_rows is None:
            starts = metadata.query_start_loc[:-1].to("cpu", torch.int64)
            slots = metadata.slot_mapping[starts.to(metadata.slot_mapping.device)].tolist()
            self._first_rows = dict(zip(slots, starts.tolist(), strict=True))
        return self._first_rows[progress.first_slot]

    # --- calls between steps (``workers.py``) ------------------------------------------------------------------------------

    def cache_shape(self) -> CacheShape:
        return self.memory.shape

    @torch.inference_mode()
    def read_kv(self, layer: int, block_ids: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """See ``RankMemory.read_kv``."""
        return self.memory.read_kv(layer, block_ids, start, stop)

    @torch.inference_mode()
    def store_kv(self, layer: int, block_ids: Sequence[int], start: int, place: Bytes, layout: KVLayout) -> None:
        """See ``RankMemory.store_kv``."""
        self.memory.store_kv(layer, block_ids, start, place, layout)

    def states(self, key: str, layer: int, start: int, stop: int) -> Tensor | None:
        """Kept hidden states (stop - start, hidden); None on the ranks that keep none. Raises RuntimeError once they are gone."""
        served = self.served.get(key)
        if served is None:
            raise RuntimeError("the hidden states of this request were given back")
        return served.states.states(layer, start, stop) if self._rank == 0 else None

    def first_distribution(self, key: str) -> NDArray[np.float32] | None:
        """Log probabilities (vocab,) of a request's first token; each once."""
        return first_distributions.pop(key, None)


def _nothing_is_awaited(key: str, layer: int) -> Sequence[WriteData]:
    raise AssertionError(f"nobody can say when layer {layer} of {key} comes")


def _num_bytes(data: Bytes) -> int:
    return data.nbytes if isinstance(data, np.ndarray) else data.num_bytes


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
