"""What the worker side says back, as plain data. Pure: no vllm, no torch.

With the workers in the engine's own process a report is heard at once, in the middle of the step; from other processes the reports of
a step come together when it has ended, and what several ranks did counts once all of them say so (``merged``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvkin.kv.execution import Unit


@dataclass(frozen=True)
class UnitRan:
    """A unit's KV is in the blocks; ``positions`` were computed now (the others were cached), outside of a forward in ``seconds``."""

    key: str
    unit: Unit
    positions: Sequence[int]
    seconds: float


@dataclass(frozen=True)
class StatesKept:
    """Hidden states entering ``layer`` of tokens [start, stop) are kept."""

    key: str
    layer: int
    start: int
    stop: int


@dataclass(frozen=True)
class LoadFailed:
    """An order of a load could not be carried out: what is in its blocks is not to be used.

    ``late``: a forward waited for its data in vain, so what this forward computed is not to be used either.
    """

    key: str
    why: str
    late: bool = False


@dataclass(frozen=True)
class Stored:
    """A store has ended; ``why`` it failed, or nothing."""

    ticket: int
    why: str = ""


@dataclass(frozen=True)
class SliceTook:
    """Seconds that the orders of a step took."""

    seconds: float


Report = UnitRan | StatesKept | LoadFailed | Stored | SliceTook


class Listener(Protocol):
    """Hears of one request what the workers do for it. Must not raise."""

    def unit_done(self, unit: Unit, positions: Sequence[int], seconds: float) -> None:
        """See ``UnitRan``."""

    def states_kept(self, layer: int, start: int, stop: int) -> None:
        """See ``StatesKept``."""

    def load_failed(self, why: str) -> None:
        """See ``LoadFailed``; later orders of this load are skipped."""

    def step_wasted(self, why: str) -> None:
        """It was in a forward of which nothing is to be used: it has to start over."""

    def load_lost(self, why: str) -> None:
        """Its blocks went to others, and no copy of its load could be kept: it cannot go on as its plan says."""


def merged(by_rank: Sequence[Sequence[Report]], num_ranks: int) -> list[Report]:
    """One step's reports of the ranks as those of one worker.

    Units and stores are done when every rank has done them, and take as long as the slowest; a load or a store that fails on one rank
    has failed. The order is the first rank's, after the failures: what a rank did for a failed load is not to be used.
    """
    done: Counter[object] = Counter()
    seconds: dict[object, float] = {}
    failed: dict[object, str] = {}
    for report in (report for reports in by_rank for report in reports):
        what = _identity(report)
        done[what] += 1
        match report:
            case UnitRan() | SliceTook():
                seconds[what] = max(seconds.get(what, 0.0), report.seconds)
            case LoadFailed() | Stored() if report.why:
                failed.setdefault(what, report.why)
    failures: list[Report] = []
    result: list[Report] = []
    seen: set[object] = set()
    for report in (report for reports in by_rank for report in reports):
        what = _identity(report)
        if what in seen:
            continue
        seen.add(what)
        match report:
            case StatesKept():
                result.append(report)
            case LoadFailed():
                failures.append(replace(report, why=failed[what]))
            case Stored():
                if done[what] == num_ranks or what in failed:
                    result.append(replace(report, why=failed.get(what, "")))
            case UnitRan() | SliceTook():
                if done[what] == num_ranks:
                    result.append(replace(report, seconds=seconds[what]))
    return failures + result


def _identity(report: Report) -> object:
    """What a report is about, the same for every rank."""
    match report:
        case UnitRan(key, unit):
            return UnitRan, key, unit
        case LoadFailed(key):
            return LoadFailed, key
        case Stored(ticket):
            return Stored, ticket
        case SliceTook():
            return SliceTook
        case StatesKept():
            return report
