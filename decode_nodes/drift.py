"""Checks for drift on a decode node, pure: what waits, when one may run, what gives way to what.

A request that the router has chosen runs once more, privately, when the node has nothing else to do; the two are compared and the
router hears of it (docs/operations.md, Drift). Nothing waits for a check, and a check gives way to everything.

=======  ===============================  ==========================================
state    on                               then
=======  ===============================  ==========================================
waiting  the node has been idle for long  running (a private run)
waiting  too many wait, it is the oldest  done (dropped)
running  work arrives                     waiting (stop the run, first in the queue)
running  work arrives the third time      done (stop the run, dropped)
running  the private run ends             done (compare, tell the routers)
running  the private run fails            done (dropped)
=======  ===============================  ==========================================
"""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvkin.transport.node_messages import DriftCheck, DriftSample

MAX_TRIES = 3
"""A check that had to give way so often needs more time than this node ever has; its work would be done for nothing again."""

MAX_DIVERGENCE = 20.0
"""Nats. More is not told apart, so that one wild sample (or a NaN) does not decide a mean for ever."""


class State(enum.StrEnum):
    WAITING = "waiting"
    RUNNING = "running"


@dataclass(frozen=True, eq=False)
class Check:
    """A finished request that is to be compared. ``tokens`` are its first generated ones if they were chosen greedily, else none.

    ``first_logprobs`` (vocab,) float32 are the log probabilities of its first token, ``suffix_start`` is where its reused context ends.
    ``recordable``: its prompt may be kept.
    """

    request_id: str
    model: str
    receiver: bytes
    token_ids: tuple[int, ...]
    suffix_start: int
    asked: DriftCheck
    tokens: tuple[int, ...]
    first_logprobs: NDArray[np.float32]
    recordable: bool

    @property
    def num_tokens(self) -> int:
        """How many tokens the private run generates: of a sampled request only the first distribution can be compared."""
        return max(1, min(self.asked.tokens, len(self.tokens)))


# events


class Chosen(msgspec.Struct, frozen=True):
    """A request that was to be checked has finished, its plan as it was meant."""

    check: Check
    now: float


class WorkArrived(msgspec.Struct, frozen=True):
    now: float


class Tick(msgspec.Struct, frozen=True):
    """``busy``: the node has something to do, or is about to stop."""

    now: float
    busy: bool


class RunEnded(msgspec.Struct, frozen=True):
    run_id: str
    tokens: tuple[int, ...]
    first_logprobs: NDArray[np.float32]


class RunFailed(msgspec.Struct, frozen=True):
    run_id: str
    reason: str


# instructions


class StartRun(msgspec.Struct, frozen=True):
    run_id: str
    check: Check


class StopRun(msgspec.Struct, frozen=True):
    """Before the engine's next step."""

    run_id: str


class Report(msgspec.Struct, frozen=True):
    check: Check
    sample: DriftSample


class Dropped(msgspec.Struct, frozen=True):
    request_id: str
    reason: str


Event = Chosen | WorkArrived | Tick | RunEnded | RunFailed
Instruction = StartRun | StopRun | Report | Dropped


class _Entry(msgspec.Struct):
    check: Check
    tries: int = 0


class DriftCore:
    """All checks of a node; one runs at a time."""

    def __init__(self, idle_s: float, max_pending: int) -> None:
        self._idle_s, self._max_pending = idle_s, max_pending
        self._waiting: deque[_Entry] = deque()
        self._running: tuple[str, _Entry] | None = None
        self._busy_at = -math.inf
        self.done = 0
        self.dropped = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return int(self._running is not None)

    def handle(self, event: Event) -> list[Instruction]:
        match event:
            case Chosen(check, now):
                self._busy_at = now
                self._waiting.append(_Entry(check))
                return self._bounded()
            case WorkArrived(now):
                return self._busy(now)
            case Tick(now, busy):
                if busy:
                    return self._busy(now)
                return self._start() if now - self._busy_at >= self._idle_s else []
            case RunEnded(run_id, tokens, first_logprobs):
                entry = self._ended(run_id)
                if entry is None:
                    return []
                self.done += 1
                return [Report(entry.check, compare(entry.check, tokens, first_logprobs))]
            case RunFailed(run_id, reason):
                entry = self._ended(run_id)
                return [] if entry is None else [self._drop(entry, reason)]

    def _start(self) -> list[Instruction]:
        if self._running is not None or not self._waiting:
            return []
        entry = self._waiting.popleft()
        entry.tries += 1
        # each try has its own id: what an earlier one still says is nobody's
        run_id = f"drift/{entry.check.request_id}/{entry.tries}"
        self._running = (run_id, entry)
        return [StartRun(run_id, entry.check)]

    def _busy(self, now: float) -> list[Instruction]:
        self._busy_at = now
        if self._running is None:
            return []
        run_id, entry = self._running
        self._running = None
        if entry.tries >= MAX_TRIES:
            return [StopRun(run_id), self._drop(entry, f"it had to give way {MAX_TRIES} times")]
        self._waiting.appendleft(entry)
        return [StopRun(run_id), *self._bounded()]

    def _bounded(self) -> list[Instruction]:
        over = len(self._waiting) - self._max_pending
        return [self._drop(self._waiting.popleft(), "too many wait") for _ in range(over)]

    def _drop(self, entry: _Entry, reason: str) -> Instruction:
        self.dropped += 1
        return Dropped(entry.check.request_id, reason)

    def _ended(self, run_id: str) -> _Entry | None:
        if self._running is None or self._running[0] != run_id:
            return None
        entry = self._running[1]
        self._running = None
        return entry


# --- comparing -----------------------------------------------------------------------------------------------------------


def compare(check: Check, tokens: tuple[int, ...], first_logprobs: NDArray[np.float32]) -> DriftSample:
    """What a private run (its greedy ``tokens``, the log probabilities (vocab,) of its first one) says of a check's request.

    Tokens count up to the first difference: behind it the two runs answer different texts. Of a sampled request the most likely first
    tokens are compared, one token; a share over fewer tokens is never below the one over more, so this never blames a pair wrongly.
    """
    first = _same_choice(check.first_logprobs, first_logprobs)
    compared = min(check.num_tokens, len(tokens))
    agreement = float(first)
    if check.tokens and compared:
        agreement = _common(check.tokens, tokens, compared) / compared
    return DriftSample(
        request_id=check.request_id,
        receiver=check.receiver,
        sources=check.asked.sources,
        first_token=first,
        agreement=agreement,
        divergence=divergence(first_logprobs, check.first_logprobs),
        tokens=max(1, compared),
        inherited=check.asked.inherited,
        model=check.model,
    )


def divergence(private: NDArray[np.float32], reused: NDArray[np.float32]) -> float:
    """KL(private || reused) in nats of two log distributions (vocab,), within [0, MAX_DIVERGENCE]; NaN counts as the most."""
    ours, theirs = private.astype(np.float64), reused.astype(np.float64)
    weights = np.exp(ours)
    likely = weights > 0
    with np.errstate(invalid="ignore", over="ignore"):
        total = float(np.sum(weights[likely] * (ours[likely] - theirs[likely])))
    if np.isnan(ours).any() or math.isnan(total):
        return MAX_DIVERGENCE
    # rounding can bring equal ones just below 0
    return min(max(total, 0.0), MAX_DIVERGENCE)


def _same_choice(one: NDArray[np.float32], other: NDArray[np.float32]) -> bool:
    if np.isnan(one).any() or np.isnan(other).any():
        return False
    return int(one.argmax()) == int(other.argmax())


def _common(one: tuple[int, ...], other: tuple[int, ...], most: int) -> int:
    """Length of the common beginning, at most ``most``."""
    count = 0
    while count < most and one[count] == other[count]:
        count += 1
    return count
