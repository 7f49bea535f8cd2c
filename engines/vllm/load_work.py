"""What a worker does for loads: writes what arrived, runs units on it, moves preempted loads out of the cache and back.

Used by the worker side, in whichever process the model runs. An order that fails ends its own load and no other. Everything is started on
the lane's slice (``lanes.py``), and said once the device has done it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvkin.engines.vllm.layers import LayerRunner, Rows
from kvkin.engines.vllm.loads import rows_of
from kvkin.engines.vllm.orders import BeginLoad, Bytes, RunUnit, Serve, SwapIn, SwapOut, WriteData
from kvkin.engines.vllm.rank_memory import KeptStates, RankMemory
from kvkin.engines.vllm.reports import LoadFailed, Report, StatesKept, UnitRan
from kvkin.kv.execution import Unit
from kvkin.kv.layout import KVLayout
from kvkin.kv.pulls import E_LAYER


@dataclass
class Served:
    """One request as a worker knows it."""

    serve: Serve
    states: KeptStates
    announced: list[int] = field(default_factory=list)


@dataclass
class Loading:
    """A load with blocks: the states that enter each chunk's next unit, and its rows."""

    begin: BeginLoad
    hidden: dict[int, Tensor] = field(default_factory=dict)
    rows: dict[int, Rows] = field(default_factory=dict)
    failed: bool = False


class LoadWork:
    """``served`` are the requests that the worker knows; ``say`` hears what was done."""

    def __init__(
        self,
        runner: LayerRunner,
        memory: RankMemory,
        served: dict[str, Served],
        say: Callable[[Report], None],
        num_ranks: int,
    ) -> None:
        self._runner, self._memory, self._served, self._say = runner, memory, served, say
        self._num_ranks = num_ranks
        self._swapped: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.in_unit = False
        """Whether layers are run by themselves, not by vLLM's forward."""

    def swap_out(self, order: SwapOut) -> None:
        """Call it in ``Lane.saving``."""
        if order.key not in self._swapped:
            self._swapped[order.key] = self._memory.keep(order.block_ids, order.num_tokens)

    def forget(self, key: str) -> None:
        self._swapped.pop(key, None)

    def carry_out(self, load: Loading, order: WriteData | RunUnit | SwapIn) -> None:
        served = self._served.get(order.key)
        # the other ranks wait in a unit for this one: after an error it runs on whatever is there, and nothing of it is used
        if served is None or (load.failed and self._num_ranks == 1):
            return
        try:
            match order:
                case WriteData():
                    self.write(load, served.serve.layout, order)
                case RunUnit(_, unit):
                    self._run(load, served, unit)
                case SwapIn():
                    self._memory.restore(self._swapped[order.key], load.begin.block_ids, load.begin.cached)
        except Exception as error:
            if isinstance(order, RunUnit) and self._num_ranks > 1:
                raise  # ends the engine: another rank may wait in the middle of this unit
            if not load.failed:
                load.failed = True
                self._then(LoadFailed(order.key, reason(error)))

    def write(self, load: Loading, layout: KVLayout, order: WriteData) -> None:
        """Raises LocalTransportError."""
        if order.layer != E_LAYER:
            for start, data in order.parts:
                self._memory.write_kv(order.layer, load.begin.block_ids, load.begin.cached, start, data, layout)
            return
        if self._num_ranks > 1:
            # in their place if they cannot be read
            count = sum(_num_bytes(data) for _, data in order.parts) // (layout.hidden_size * layout.dtype_bytes)
            shape = (count, self._runner.hidden_size)
            load.hidden[order.chunk] = torch.zeros(shape, dtype=self._runner.dtype, device=self._runner.device)
        load.hidden[order.chunk] = self._memory.hidden(order.parts, layout)

    def keep_states(self, served: Served, layer: int, start: int, hidden: Tensor) -> None:
        """Keep hidden states (n, hidden), of the device, of tokens from ``start`` on, if this layer is tapped."""
        if served.states.has(layer):
            rows = self._runner.lane.to_host(hidden)
            self._runner.lane.then(lambda: self.kept(served, layer, start, rows))

    def kept(self, served: Served, layer: int, start: int, rows: Tensor) -> None:
        """The same with rows in host memory, now."""
        kept = served.states.record(layer, start, rows)
        if kept:
            self._say(StatesKept(served.serve.key, layer, start, start + kept))

    def _run(self, load: Loading, served: Served, unit: Unit) -> None:
        span = self._runner.lane.begin()
        positions = rows_of(unit, load.begin.cached)
        if positions:
            hidden = self._entering(load, unit, positions)
            if unit.rows is None:
                self.keep_states(served, unit.layer, positions[0], hidden)
            self._runner.adapters.use(load.begin.lora_id, len(positions))
            rows = load.rows.get(unit.chunk)
            if rows is None:
                rows = load.rows[unit.chunk] = self._runner.rows(positions, load.begin.block_ids)
            self.in_unit = True
            try:
                out = self._runner.run(unit.layer, unit.mode, hidden, rows)
            finally:
                self.in_unit = False
            if out is None:
                del load.rows[unit.chunk]
            else:
                load.hidden[unit.chunk] = out
        span.end()
        key = load.begin.key
        self._runner.lane.then(lambda: self._say(UnitRan(key, unit, positions, span.seconds)))

    def _entering(self, load: Loading, unit: Unit, positions: Sequence[int]) -> Tensor:
        """Hidden states (n, hidden) entering the unit: pulled, left by the unit below, or embedded."""
        hidden = load.hidden.pop(unit.chunk, None)
        if hidden is None:
            assert unit.first, unit
            self._runner.adapters.use(load.begin.lora_id, len(positions))
            return self._runner.embed([load.begin.token_ids[position] for position in positions])
        # pulled states are those of the whole chunk
        return hidden[len(hidden) - len(positions) :]

    def _then(self, report: Report) -> None:
        self._runner.lane.then(lambda: self._say(report))


def _num_bytes(data: Bytes) -> int:
    return data.nbytes if isinstance(data, np.ndarray) else data.num_bytes


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
