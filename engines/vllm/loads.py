"""Loads: the part of a plan that is there before vLLM's own scheduler computes the rest. Pure: no vllm, no torch.

vLLM knows "a prefix of external tokens, then computed ones". So everything up to the end of the last reusing segment is one
asynchronous load: pulled data is written, and units are run in slices between vLLM's steps, until it is complete.

=========  ==========================================  =========================================
state      on                                          then
=========  ==========================================  =========================================
queued     vLLM allocates blocks for it                loading
queued     vLLM's own cache has all of it              done (once all data arrived)
loading    everything is written and computed          ended
loading    the request ends                            ended
ended      vLLM took the report                        done
done       preempted (a copy is kept), blocks again    loading (the copy is written back)
=========  ==========================================  =========================================
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvkin.engines.vllm.orders import BeginLoad, Bytes, EndLoad, Order, RunUnit, SwapIn, WriteData
from kvkin.kv.execution import (
    ComputeUnit,
    DataArrived,
    Instruction,
    PlanExecution,
    PrefillFinished,
    Unit,
    UnitDone,
    UnitMode,
)
from kvkin.kv.plan import ReusePlan
from kvkin.kv.pulls import E_LAYER


class LoadState(enum.StrEnum):
    QUEUED = "queued"
    LOADING = "loading"
    ENDED = "ended"
    DONE = "done"


def load_stop(plan: ReusePlan) -> int:
    """Tokens before this are the load: up to the end of the last segment that reuses anything. 0: there is nothing to load."""
    return max((segment.stop for segment in plan.segments if segment.sources), default=0)


class Load:
    """One request's load. The engine's thread feeds ``arrived``; the scheduler side allocates, takes orders and ends it."""

    def __init__(
        self, key: str, plan: ReusePlan, token_ids: Sequence[int], lora_id: int, num_layers: int, chunk_tokens: int
    ) -> None:
        self.key, self.stop, self.lora_id = key, load_stop(plan), lora_id
        self.token_ids = tuple(token_ids[: self.stop])
        self.state = LoadState.QUEUED if self.stop else LoadState.DONE
        self.cached = 0
        self.block_ids: tuple[int, ...] = ()
        self.swapped = False
        whole = PlanExecution(plan, num_layers, chunk_tokens)
        self.chunks = whole.chunks
        first_after = next((chunk.index for chunk in self.chunks if chunk.start >= self.stop), len(self.chunks))
        self.execution = PlanExecution(plan, num_layers, chunk_tokens, stop_chunk=first_after)
        self.own_chunks = self.chunks[:first_after]
        self.later_chunks = self.chunks[first_after:]
        self._pending: deque[WriteData] = deque()
        self.received: list[WriteData] = []
        """All data that came, in its order."""
        self._known: set[tuple[int, int]] = set()
        self._written: set[int] = set()
        self._next: Unit | None = None
        self._complete = False
        self._restoring = False
        self._take(self.execution.start())

    # --- what happens to it ----------------------------------------------------------------------------------------------

    def arrived(self, chunk: int, layer: int, parts: Sequence[tuple[int, Bytes]] = ()) -> bool:
        """Data is here; False if this plan does not expect it (late, repeated): it must not touch what was computed since."""
        pair = (chunk, layer)
        if pair in self._known or not self.execution.expects(chunk, layer):
            return False
        self._known.add(pair)
        write = WriteData(self.key, chunk, layer, tuple(parts))
        self._pending.append(write)
        self.received.append(write)
        return True

    @property
    def all_arrived(self) -> bool:
        return self.execution.missing == len(self._pending)

    def allocated(self, block_ids: Sequence[int], cached: int) -> list[Order]:
        """vLLM has blocks for tokens [cached, stop); those below are in its own cache."""
        self.block_ids, self.cached, self.state = tuple(block_ids), cached, LoadState.LOADING
        begin = BeginLoad(self.key, self.block_ids, cached, self.token_ids, self.lora_id)
        if self.swapped:
            self._restoring = True
            return [begin, SwapIn(self.key)]
        return [begin]

    def covered(self, block_ids: Sequence[int]) -> None:
        """vLLM's own cache has all of it: nothing is written, nothing computed."""
        self.block_ids, self.cached, self.state = tuple(block_ids), self.stop, LoadState.DONE

    def end(self, request_id: str, *, early: bool = False) -> EndLoad:
        assert self.state is LoadState.LOADING, f"{self.key} is {self.state}"
        self.state = LoadState.ENDED
        return EndLoad(self.key, request_id, early)

    @property
    def only_pulls(self) -> bool:
        """Whether nothing is computed for it: then a layer is needed no earlier than the rest of the prompt comes to it."""
        return not self._restoring and not any(chunk.computes for chunk in self.own_chunks)

    @property
    def num_missing(self) -> int:
        """(chunk, layer) pairs that have not come."""
        return self.execution.missing - len(self._pending)

    def misses(self, layer: int) -> bool:
        """Whether data of a layer has not been ordered to be written."""
        return any(self.execution.expects(chunk.index, layer) for chunk in self.own_chunks)

    def layer_writes(self, layer: int) -> list[WriteData]:
        """Orders for what came of one layer and was not ordered yet."""
        chosen = [write for write in self._pending if write.layer == layer]
        self._pending = deque(write for write in self._pending if write.layer != layer)
        for write in chosen:
            self._ordered(write)
        return chosen

    # --- what is to be done ----------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        return self._complete or self._restoring

    @property
    def written_tokens(self) -> int:
        """Tokens of which KV of some layer was written: those that were in vLLM's own cache are not."""
        chunks = (self.chunks[index] for index in self._written)
        return sum(max(0, chunk.stop - max(chunk.start, self.cached)) for chunk in chunks)

    @property
    def runnable(self) -> bool:
        """Whether a slice would do anything."""
        return bool(self._pending or self._next)

    def rows(self, unit: Unit) -> range | tuple[int, ...]:
        """Positions that the unit computes: its rows that are not in vLLM's own cache."""
        return rows_of(unit, self.cached)

    def writes(self, budget: int) -> Iterator[WriteData]:
        """Orders for data that arrived, until ``budget`` tokens (each in one layer) are exceeded."""
        while self._pending and budget > 0:
            write = self._pending.popleft()
            chunk = self.chunks[write.chunk]
            budget -= chunk.stop - chunk.start
            self._ordered(write)
            yield write

    def slice(self, budget: int) -> tuple[list[RunUnit], int]:
        """Units of chunks with up to ``budget`` rows together, in the order in which they must run; and how many rows that is.

        A chunk goes through as many layers as it can: the bound is what a prefill chunk of ``budget`` tokens would take.
        """
        orders: list[RunUnit] = []
        touched: set[int] = set()
        used = 0
        while self._next is not None:
            unit = self._next
            rows = 0 if unit.chunk in touched else len(self.rows(unit))
            if used + rows > budget:
                break
            touched.add(unit.chunk)
            used += rows
            orders.append(RunUnit(self.key, unit))
            self._next = None
            # the worker carries orders out one after the other: what comes later may build on this
            self._take(self.execution.handle(UnitDone(unit)))
        return orders, used

    def _ordered(self, write: WriteData) -> None:
        self._take(self.execution.handle(DataArrived(write.chunk, write.layer)))
        if write.layer != E_LAYER:
            self._written.add(write.chunk)

    def _take(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case ComputeUnit(unit):
                    self._next = unit
                case PrefillFinished():
                    self._complete = True
                case _:
                    pass


class LoadTable:
    """All loads that have blocks, in turns. ``orders`` makes one step's slice."""

    def __init__(self, chunk_tokens: int, num_layers: int) -> None:
        self._chunk_tokens, self._num_layers = chunk_tokens, num_layers
        self._turns: list[tuple[Load, str]] = []

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, load: Load, request_id: str) -> None:
        self._turns.append((load, request_id))

    def remove(self, load: Load) -> None:
        self._turns = [turn for turn in self._turns if turn[0] is not load]

    def orders(self, ends_early: Callable[[Load], bool] = lambda load: False) -> list[Order]:
        """Writes and at most one slice of units (``chunk_tokens`` rows over all loads), then the ends of what is complete, or may be
        waited for by a forward (``ends_early``).

        Nothing here looks at the clock: vLLM steps again at once if there is more to do, and takes in new requests between.
        """
        orders: list[Order] = []
        rows, tokens = self._chunk_tokens, self._chunk_tokens * self._num_layers
        last = 0
        for position, (load, request_id) in enumerate(self._turns, 1):
            for write in load.writes(tokens):
                chunk = load.chunks[write.chunk]
                tokens -= chunk.stop - chunk.start
                orders.append(write)
            units, used = load.slice(rows)
            if units:
                last = position
            rows -= used
            orders += units
            if load.complete:
                orders.append(load.end(request_id))
            elif load.only_pulls and ends_early(load):
                orders.append(load.end(request_id, early=True))
        # the next step begins after the last one that computed in this
        self._turns = [
            turn for turn in (*self._turns[last:], *self._turns[:last]) if turn[0].state is LoadState.LOADING
        ]
        return orders


def rows_of(unit: Unit, cached: int) -> range | tuple[int, ...]:
    """Positions of the unit's rows from ``cached`` on."""
    if unit.rows is None:
        return range(max(unit.start, min(cached, unit.stop)), unit.stop)
    return tuple(row for row in unit.rows if row >= cached)


def own_unit(chunk_index: int, layer: int, start: int, stop: int, num_layers: int, *, last: bool) -> Unit:
    """The unit that says that vLLM itself computed a chunk's rows of a layer."""
    mode = UnitMode.FULL
    if layer == num_layers - 1:
        mode = UnitMode.LAST_ROW if last else UnitMode.KV_ONLY
    return Unit(chunk_index, layer, start, stop, mode, layer == 0, recompute=False)
