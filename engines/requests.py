"""One request inside the reference engine: its plan execution, workspace, sampler and text.

Stepped by ``engines/reference.py`` on the engine thread; one step is one unit of prefill or one generated token.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from kvkin.engines.answer import Answer
from kvkin.engines.api import Arrival, Counters, EngineRequest, EngineSink
from kvkin.engines.layer_ops import LayerOps
from kvkin.engines.recompute import decode_token, partial_prefill
from kvkin.engines.sampling import Sampler, log_distribution
from kvkin.engines.workspace import Workspace
from kvkin.kv.errors import Cancelled
from kvkin.kv.execution import (
    ComputeUnit,
    DataArrived,
    Instruction,
    PlanExecution,
    PrefillFinished,
    Unit,
    UnitDone,
)
from kvkin.kv.layout import KVLayout
from kvkin.kv.plan import ReusePlan
from kvkin.kv.pulls import E_LAYER

Clock = Callable[[], float]


class RunningRequest:
    """State of one request; ``step`` does one thing and says whether there was anything to do."""

    def __init__(
        self,
        request: EngineRequest,
        sink: EngineSink,
        ops: LayerOps,
        layout: KVLayout,
        tokenizer: Tokenizer | None,
        eos: frozenset[int],
        chunk_tokens: int,
        clock: Clock = time.monotonic,
    ) -> None:
        self.request, self.sink, self.counters = request, sink, Counters()
        self.ended = False
        self._ops, self._layout, self._clock = ops, layout, clock
        self._chunk_tokens = chunk_tokens
        new_tokens = request.sampling.max_tokens if request.sampling else 0
        self._prompt = len(request.token_ids)
        self._ids = torch.tensor(request.token_ids, device=ops.device)
        self.space = Workspace(ops, self._prompt + max(new_tokens, 1), request.taps)
        self._sampler = Sampler(request.sampling) if request.sampling else None
        self._answer = Answer(request, sink, tokenizer, eos)
        self._first_logprobs: NDArray[np.float32] | None = None
        self._waiting_since: float | None = None
        self.execution = self._begin(request.plan)

    def _begin(self, plan: ReusePlan) -> PlanExecution:
        self.execution = PlanExecution(
            plan, self._ops.num_layers, self._chunk_tokens, want_logits=self.request.sampling is not None
        )
        self._hidden: dict[int, Tensor] = {}
        self._rows: dict[int, Tensor] = {}
        self._next: Unit | None = None
        self._last: Tensor | None = None
        self._prefilled = False
        self._loaded: set[int] = set()
        self.counters.loaded_tokens = self.counters.computed_tokens = 0
        self._take(self.execution.start())
        return self.execution

    # --- what the node says --------------------------------------------------------------------------------------------

    def arrived(self, arrival: Arrival) -> None:
        # late data of a plan given up, and repeated data, must not touch what was computed since
        if not self.execution.expects(arrival.chunk, arrival.layer):
            return
        if arrival.layer == E_LAYER:
            parts = sorted(arrival.parts, key=lambda part: part[0])
            states = [self.space.load_e(start, data, self._layout) for start, data in parts]
            self._hidden[arrival.chunk] = torch.cat(states) if len(states) > 1 else states[0]
        else:
            for start, data in arrival.parts:
                self.space.load_kv(arrival.layer, start, data, self._layout)
            self._count_loaded(arrival.chunk)
        self._take(self.execution.handle(DataArrived(arrival.chunk, arrival.layer)))

    def replan(self, plan: ReusePlan) -> None:
        if not self._prefilled:
            self.counters.recomputed_layers.clear()
            self.space.forget_taps()
            self._begin(plan)

    def cancel(self, reason: str) -> None:
        self.fail(Cancelled(reason))

    def fail(self, error: Exception) -> None:
        if not self.ended:
            self.ended = True
            self.sink.failed(self.request.request_id, error)

    # --- steps ---------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one unit or generate one token; False if the request only waits for data."""
        if self._next is not None:
            self._compute(self._next)
            return True
        if self._prefilled and not self.ended:
            self._generate()
            return True
        return False

    def _compute(self, unit: Unit) -> None:
        started = self._clock()
        rows = self._positions(unit)
        hidden = self._hidden.pop(unit.chunk, None)
        if hidden is None:
            assert unit.first, self.execution.story()
            hidden = self._ops.embed(self._ids[rows])
        out = partial_prefill(self._ops, self.space, unit, hidden, rows)
        if out is not None:
            self._hidden[unit.chunk] = out
        self._count(unit, len(rows), self._clock() - started)
        self.sink.unit_done(self.request.request_id, unit, self.space)
        self._next = None
        self._take(self.execution.handle(UnitDone(unit)))

    def _positions(self, unit: Unit) -> Tensor:
        """Positions of the unit's rows (n,) int64: the same tensor for all layers of a chunk."""
        rows = self._rows.get(unit.chunk)
        if rows is None:
            device = self._ops.device
            if unit.rows is None:
                rows = torch.arange(unit.start, unit.stop, device=device)
            else:
                rows = torch.tensor(unit.rows, device=device)
            self._rows[unit.chunk] = rows
        return rows

    def _count(self, unit: Unit, num_rows: int, seconds: float) -> None:
        self.counters.computed_layer_tokens += num_rows
        positions = range(unit.start, unit.stop) if unit.rows is None else unit.rows
        self.counters.computed_positions += sum(positions)
        if unit.recompute:
            self.counters.recompute_s += seconds
            segment = self.execution.chunks[unit.chunk].segment
            self.counters.recomputed_layers.setdefault(segment, set()).add(unit.layer)
        else:
            self.counters.suffix_s += seconds
            self.counters.computed_tokens += num_rows if unit.first else 0

    def _count_loaded(self, chunk: int) -> None:
        """KV of a chunk is here; its other layers bring no more tokens."""
        if chunk not in self._loaded:
            self._loaded.add(chunk)
            self.counters.loaded_tokens += self.execution.chunks[chunk].stop - self.execution.chunks[chunk].start

    def _take(self, instructions: list[Instruction]) -> None:
        now = self._clock()
        for instruction in instructions:
            if self._waiting_since is not None:
                self.counters.wait_s += now - self._waiting_since
                self._waiting_since = None
            match instruction:
                case ComputeUnit(unit):
                    self._next = unit
                case PrefillFinished():
                    self._prefill_finished()
                case _:
                    pass
        if not instructions and self._next is None and not self._prefilled and self._waiting_since is None:
            self._waiting_since = now

    def _prefill_finished(self) -> None:
        self._prefilled = True
        self.counters.prefilled_at = self._clock()
        self._last = self._hidden.pop(len(self.execution.chunks) - 1, None)
        self._hidden.clear()
        self._rows.clear()
        self.sink.prefilled(self.request.request_id)

    def _generate(self) -> None:
        sampling = self.request.sampling
        if sampling is None:
            self._finish("prefill")
            return
        assert self._sampler is not None
        if self._last is not None:
            logits = self._ops.logits(self._last)[-1]
            self._last = None
        else:
            position = self._prompt + len(self._answer.tokens) - 1
            logits = decode_token(self._ops, self.space, self._answer.tokens[-1], position)
        if not self._answer.tokens and self.request.first_distribution:
            self._first_logprobs = log_distribution(logits)
        token, logprob = self._sampler.choose(logits)
        if not self._answer.tokens:
            self.counters.first_token_at = self._clock()
        reason = self._answer.add(token, logprob)
        if reason:
            self._finish(reason)

    def _finish(self, reason: str) -> None:
        self.ended = True
        result = self._answer.result(reason, self._first_logprobs)
        self.sink.finished(result, self.space, self.counters)
