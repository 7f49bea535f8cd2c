"""The two workloads of ``kvkin bench serving`` with all their settings: (rate, repeat, salt) -> the load of one measured point. Pure.

Arrivals, lengths and models follow from (seed, repeat) alone: every arm, and every rate but for the pace, gets the same. Token ids
follow from the salt as well, which differs for every point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvkin.tools.load_agents import AgentShape, agent_load
from kvkin.tools.load_arrivals import ArrivalKind, Arrivals, arrivals
from kvkin.tools.load_requests import Assignment, Load, Turns
from kvkin.tools.load_tokens import TokenSource
from kvkin.tools.load_trace import Link, TraceLine, TraceScale, arrival_times, native_rate, trace_horizon_s, trace_load


class Workload(Protocol):
    """What a sweep needs of a workload. ``rates`` are requests/s; a load is empty if nothing arrives in time."""

    @property
    def rates(self) -> tuple[float, ...]: ...

    @property
    def repeats_differ(self) -> bool:
        """Whether another repeat has other lengths and arrivals."""

    def horizon_s(self, rate: float, repeat: int) -> float: ...

    def load(self, rate: float, repeat: int, salt: str) -> Load: ...


@dataclass(frozen=True)
class Common:
    """What both workloads need. ``vocabulary``: (num_ids,) int64."""

    models: tuple[str, ...]
    assign: Assignment
    turns: Turns
    vocabulary: NDArray[np.int64]
    seed: int
    duration_s: float | None

    def source(self, salt: str) -> TokenSource:
        return TokenSource(self.vocabulary, self.seed, salt)


@dataclass(frozen=True)
class AgentWorkload:
    """Sessions arrive at the rate that makes ``rate`` requests/s of them; at most ``sessions``."""

    common: Common
    shape: AgentShape
    rates: tuple[float, ...]
    arrival_kind: ArrivalKind
    sessions: int | None
    think_s: float
    repeats_differ: bool = True

    def horizon_s(self, rate: float, repeat: int) -> float:
        return self._starts(rate, repeat).horizon_s

    def load(self, rate: float, repeat: int, salt: str) -> Load:
        common = self.common
        return agent_load(
            self.shape,
            self._starts(rate, repeat),
            common.source(salt),
            f"{common.seed}/{repeat}",
            common.models,
            common.assign,
            common.turns,
            self.think_s,
        )

    def _starts(self, rate: float, repeat: int) -> Arrivals:
        turns = (self.shape.turns.low + self.shape.turns.high) / 2
        seed = f"{self.common.seed}/{repeat}"
        return arrivals(self.arrival_kind, rate / turns, self.common.duration_s, self.sessions, seed)


class TraceWorkload:
    """A trace, or its first requests, sped up to each rate."""

    repeats_differ = False

    def __init__(
        self,
        common: Common,
        lines: Sequence[TraceLine],
        links: Sequence[Link],
        scale: TraceScale,
        *,
        spread: bool,
        rates: tuple[float, ...] = (),
        speed_ups: tuple[float, ...] = (1.0,),
    ) -> None:
        """``rates`` decide if given, otherwise ``speed_ups``. ``lines`` and ``links`` are alike long and not empty."""
        self._common, self._lines, self._links, self._scale = common, lines, links, scale
        self._times_s = arrival_times(lines, spread=spread)
        # requests that all come at once have no pace of their own: what they are called is the speed-up
        self._native = native_rate(self._times_s) or 1.0
        self.rates = rates or tuple(speed_up * self._native for speed_up in speed_ups)

    def speed_up(self, rate: float) -> float:
        return rate / self._native

    def horizon_s(self, rate: float, repeat: int) -> float:
        return trace_horizon_s(self._times_s, self.speed_up(rate), self._common.duration_s)

    def load(self, rate: float, repeat: int, salt: str) -> Load:
        common = self._common
        return trace_load(
            self._lines,
            self._links,
            self._times_s,
            self.speed_up(rate),
            common.duration_s,
            self._scale,
            common.source(salt),
            f"{common.seed}/{repeat}",
            common.models,
            common.assign,
            common.turns,
        )
