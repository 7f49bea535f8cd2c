"""PlanExecution: how one reuse plan is carried out, as a pure state machine (docs/design.md section 5, DroidSpeak section 4).

The prompt is cut into chunks. Work is a *unit*: the rows of one chunk through one layer. A unit may run when the hidden states
entering its layer are there (embedded, pulled as E, or left by the unit one layer below) and every earlier chunk has its KV
of that layer, pulled or computed. All overlap follows from this one rule: the recompute of [a, b) starts when E_a is there,
the suffix walks up the layers and waits only for a layer that has not arrived. Engines drive it (``engines/requests.py``), the
simulator too; prefill nodes run private plans through the same machine.

=============  ==========================================  =======================
state          on                                          then
=============  ==========================================  =======================
waiting        data arrives, a unit becomes runnable       computing
computing      unit done, none runnable                    waiting
computing      last unit done                              finished
any but final  a source fails                              failed (caller falls back)
any but final  cancelled                                   cancelled
=============  ==========================================  =======================
"""

from __future__ import annotations

import enum
from collections import deque

import msgspec

from kvkin.kv.plan import LayerGroup, ReusePlan, TokenRows
from kvkin.kv.pulls import E_LAYER


class UnitMode(enum.StrEnum):
    """How much of a layer a unit computes: all of it, only k and v (nobody needs its output), or output for the last row."""

    FULL = "full"
    KV_ONLY = "kv_only"
    LAST_ROW = "last_row"


class Unit(msgspec.Struct, frozen=True):
    """Rows [start, stop) of the prompt (or only ``rows`` of them) through ``layer``; ``recompute`` if they lie in a reused segment."""

    chunk: int
    layer: int
    start: int
    stop: int
    mode: UnitMode
    first: bool
    recompute: bool
    rows: tuple[int, ...] | None = None


class Chunk(msgspec.Struct, frozen=True):
    """Tokens [start, stop) of one segment: which layers arrive, which are computed, whether E is pulled."""

    index: int
    segment: int
    start: int
    stop: int
    pulled: frozenset[int]
    first_layer: int
    stop_layer: int
    e_layer: int | None
    rows: tuple[int, ...] | None

    @property
    def computes(self) -> bool:
        return self.first_layer < self.stop_layer


# events


class DataArrived(msgspec.Struct, frozen=True):
    """KV of ``layer`` (or E, layer -1) of ``chunk`` is in the workspace."""

    chunk: int
    layer: int


class UnitDone(msgspec.Struct, frozen=True):
    unit: Unit


class SourceFailed(msgspec.Struct, frozen=True):
    reason: str


class Cancel(msgspec.Struct, frozen=True):
    reason: str


# instructions


class ComputeUnit(msgspec.Struct, frozen=True):
    unit: Unit


class PrefillFinished(msgspec.Struct, frozen=True):
    """Every unit ran; the last row's hidden states are ready for the head."""


class GiveUp(msgspec.Struct, frozen=True):
    """The plan cannot be completed; the caller falls back or ends the request."""

    reason: str
    cancelled: bool


Event = DataArrived | UnitDone | SourceFailed | Cancel
Instruction = ComputeUnit | PrefillFinished | GiveUp


class State(enum.StrEnum):
    WAITING = "waiting"
    COMPUTING = "computing"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


FINAL = frozenset({State.FINISHED, State.FAILED, State.CANCELLED})


def cut(plan: ReusePlan, num_layers: int, chunk_tokens: int) -> tuple[Chunk, ...]:
    """Cut a plan's segments into chunks of at most ``chunk_tokens`` tokens, counted from each segment's start."""
    chunks: list[Chunk] = []
    for number, segment in enumerate(plan.segments):
        pulled = frozenset(segment.pulled_layers())
        computed = segment.recomputed_layers(num_layers)
        rows = segment.recompute.rows if isinstance(segment.recompute, TokenRows) else None
        for start in range(segment.start, segment.stop, chunk_tokens):
            stop = min(start + chunk_tokens, segment.stop)
            own_rows = None if rows is None else tuple(row for row in rows if start <= row < stop)
            layers = computed if own_rows is None or own_rows else range(0)
            chunks.append(
                Chunk(len(chunks), number, start, stop, pulled, layers.start, layers.stop, segment.e_layer, own_rows)
            )
    return tuple(chunks)


class PlanExecution:
    """One request's prefill. ``start()`` and ``handle(event)`` return what to do next; at most one unit is out at a time.

    ``want_logits`` off (a prefill order) lets the last layer compute only k and v. With ``stop_chunk`` only the chunks before it
    are run (an engine computes the others by itself): ``PrefillFinished`` then says that those have their KV.
    """

    def __init__(
        self,
        plan: ReusePlan,
        num_layers: int,
        chunk_tokens: int,
        *,
        want_logits: bool = True,
        stop_chunk: int | None = None,
    ) -> None:
        plan.validate(num_layers)
        self.plan, self.num_layers, self.want_logits = plan, num_layers, want_logits
        self.chunks = cut(plan, num_layers, chunk_tokens)
        self._stop_chunk = len(self.chunks) if stop_chunk is None else stop_chunk
        self.state = State.WAITING
        self._kv = [bytearray(num_layers) for _ in self.chunks]  # KV final in this chunk and layer
        self._pulled = [bytearray(num_layers) for _ in self.chunks]  # arrived, perhaps not final (token-wise)
        self._prefix = [0] * num_layers  # leading chunks whose KV of this layer is final
        self._next_layer = [chunk.first_layer for chunk in self.chunks]
        self._entered = [chunk.computes and chunk.e_layer is None for chunk in self.chunks]
        self._running: Unit | None = None
        self._story: deque[str] = deque(maxlen=64)

    def pull_pairs(self, segment: int) -> list[tuple[int, int]]:
        """(chunk, layer) pairs that ``segment`` pulls, E as layer -1."""
        pairs: list[tuple[int, int]] = []
        for chunk in self.chunks:
            if chunk.segment == segment:
                pairs += [(chunk.index, layer) for layer in sorted(chunk.pulled)]
                if chunk.e_layer is not None:
                    pairs.append((chunk.index, E_LAYER))
        return pairs

    @property
    def missing(self) -> int:
        """How many (chunk, layer) pairs have not arrived yet."""
        return sum(len(chunk.pulled) - sum(self._pulled[chunk.index]) for chunk in self.chunks) + sum(
            chunk.e_layer is not None and not self._entered[chunk.index] for chunk in self.chunks
        )

    def expects(self, index: int, layer: int) -> bool:
        """Whether this plan pulls the pair (E as layer -1) and it has not arrived: false for a late or a repeated arrival."""
        if self.state in FINAL or not 0 <= index < len(self.chunks):
            return False
        chunk = self.chunks[index]
        if layer == E_LAYER:
            return chunk.e_layer is not None and not self._entered[index]
        return layer in chunk.pulled and not self._pulled[index][layer]

    def start(self) -> list[Instruction]:
        return self._dispatch()

    def handle(self, event: Event) -> list[Instruction]:
        """Advance. Events after a final state and repeated arrivals are ignored; an impossible UnitDone is our bug."""
        self._story.append(repr(event))
        if self.state in FINAL:
            return []
        match event:
            case DataArrived(chunk, layer):
                self._arrived(chunk, layer)
            case UnitDone(unit):
                assert unit == self._running, f"{unit} is not running:\n{self.story()}"
                self._running = None
                self._finish(unit)
            case SourceFailed(reason):
                self.state = State.FAILED
                return [GiveUp(reason, cancelled=False)]
            case Cancel(reason):
                self.state = State.CANCELLED
                return [GiveUp(reason, cancelled=True)]
        return self._dispatch()

    def story(self) -> str:
        """The last events of this request, for the error message of an illegal transition."""
        return "\n".join([f"state {self.state}", *self._story])

    def _arrived(self, index: int, layer: int) -> None:
        chunk = self.chunks[index]
        if layer == E_LAYER:
            assert chunk.e_layer is not None, f"chunk {index} pulls no E:\n{self.story()}"
            self._entered[index] = True
            return
        assert layer in chunk.pulled, f"chunk {index} does not pull layer {layer}:\n{self.story()}"
        self._pulled[index][layer] = 1
        if not (chunk.rows and chunk.computes):
            self._final(index, layer)

    def _finish(self, unit: Unit) -> None:
        self._final(unit.chunk, unit.layer)
        self._next_layer[unit.chunk] = unit.layer + 1

    def _final(self, index: int, layer: int) -> None:
        self._kv[index][layer] = 1
        while self._prefix[layer] < len(self.chunks) and self._kv[self._prefix[layer]][layer]:
            self._prefix[layer] += 1

    def _dispatch(self) -> list[Instruction]:
        if self._running is not None:
            return []
        unit = self._runnable()
        if unit is not None:
            self._running, self.state = unit, State.COMPUTING
            return [ComputeUnit(unit)]
        if all(prefix >= self._stop_chunk for prefix in self._prefix):
            self.state = State.FINISHED
            return [PrefillFinished()]
        self.state = State.WAITING
        return []

    def _runnable(self) -> Unit | None:
        """The first runnable unit, chunk by chunk: finishing a chunk before the next keeps its hidden states hot."""
        for chunk in self.chunks[: self._stop_chunk]:
            layer = self._next_layer[chunk.index]
            if not self._entered[chunk.index] or layer >= chunk.stop_layer or self._prefix[layer] < chunk.index:
                continue
            if chunk.rows and not self._pulled[chunk.index][layer]:
                continue
            return self._unit(chunk, layer)
        return None

    def _unit(self, chunk: Chunk, layer: int) -> Unit:
        mode = UnitMode.FULL
        if layer == chunk.stop_layer - 1:
            last = chunk.index == len(self.chunks) - 1 and self.want_logits
            mode = UnitMode.LAST_ROW if last else UnitMode.KV_ONLY
        return Unit(
            chunk=chunk.index,
            layer=layer,
            start=chunk.start,
            stop=chunk.stop,
            mode=mode,
            first=layer == chunk.first_layer,
            recompute=bool(self.plan.segments[chunk.segment].sources),
            rows=chunk.rows,
        )


__all__ = [
    "Cancel",
    "Chunk",
    "ComputeUnit",
    "DataArrived",
    "GiveUp",
    "LayerGroup",
    "PlanExecution",
    "PrefillFinished",
    "SourceFailed",
    "State",
    "Unit",
    "UnitDone",
    "UnitMode",
    "cut",
]
