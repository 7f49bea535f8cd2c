"""When the requests of an open-loop load arrive: pure, and the same random numbers at every rate.

A process is drawn once at one arrival per second and stretched to the rate that is wanted, so that two rates, and all arms at one
rate, see the same pattern of gaps.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Literal

import msgspec

ArrivalKind = Literal["poisson", "fixed"]


class Arrivals(msgspec.Struct, frozen=True):
    """``times_s``, ascending, from the start of the point; ``horizon_s`` is when the next one would have come, or the time was up."""

    times_s: tuple[float, ...]
    horizon_s: float


def arrivals(kind: ArrivalKind, rate_per_s: float, duration_s: float | None, limit: int | None, seed: str) -> Arrivals:
    """Arrivals before ``duration_s``, at most ``limit`` of them; one of the two bounds must be given.

    ``fixed``: at 0, 1 / rate, 2 / rate, ...; ``poisson``: the first after an exponential gap, as all others. Where only ``limit``
    bounds them, it is a Poisson process of which exactly that many arrive within limit / rate: the gaps of a few arrivals add up
    to anything from a third to three times of that, and the point would be one of another rate.
    """
    assert duration_s is not None or limit is not None, "an endless load"
    if duration_s is None and limit is not None and kind == "poisson":
        return _exactly(limit, rate_per_s, seed)
    times: list[float] = []
    for at_s in _process(kind, seed):
        if duration_s is not None and at_s / rate_per_s >= duration_s:
            return Arrivals(tuple(times), duration_s)
        if limit is not None and len(times) >= limit:
            return Arrivals(tuple(times), at_s / rate_per_s)
        times.append(at_s / rate_per_s)
    raise AssertionError("a process has no end")


def _exactly(count: int, rate_per_s: float, seed: str) -> Arrivals:
    *drawn, after = itertools.islice(_process("poisson", seed), count + 1)
    horizon_s = count / rate_per_s
    return Arrivals(tuple(at_s / after * horizon_s for at_s in drawn), horizon_s)


def _process(kind: ArrivalKind, seed: str) -> Iterator[float]:
    """Arrival times of one a second, without end."""
    if kind == "fixed":
        yield from map(float, itertools.count())
        return
    generator = random.Random(f"arrivals {seed}")
    at_s = 0.0
    while True:
        at_s += generator.expovariate(1.0)
        yield at_s
