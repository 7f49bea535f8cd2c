"""What the worker side says back, as plain data. Pure: no vllm, no torch.

With the workers in the engine's own process a report is heard at once, in the middle of the step; from other processes the reports of
a step come together when it has ended, and what several ranks did counts once all of them say so (``RankReports``). On a device a report
may come steps after its order.
"""

from __future__ import annotations

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
    """The orders of a step were carried out, the worker's ``number``-th slice (``is_slice``); in how many seconds, and by how many a step
    of vLLM took longer because of it."""

    seconds: float
    step_s: float = 0.0
    number: int = 0


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


class RankReports:
    """Reports of ``num_ranks`` workers -> those of one worker.

    Units, stores and slices are done when every rank has done them, and take as long as the slowest; a store has failed if it has on one
    rank, a load as soon as it has on one. Ranks need not say so in the same step.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._parts: dict[object, list[Report]] = {}
        self._failed: set[object] = set()

    def add(self, by_rank: Sequence[Sequence[Report]]) -> list[Report]:
        """One step's reports, of the ranks that had any -> what is known by them, in the order of the first that says it, after the failures:
        what a rank did for a failed load is not to be used."""
        failures: list[Report] = []
        said: dict[object, Report | None] = {}
        for report in (report for reports in by_rank for report in reports):
            match report:
                case StatesKept():
                    said[report] = report
                case LoadFailed(key, _, late):
                    if (key, late) not in self._failed:
                        self._failed.add((key, late))
                        failures.append(report)
                case UnitRan() | Stored() | SliceTook():
                    what = _identity(report)
                    parts = self._parts.setdefault(what, [])
                    parts.append(report)
                    said.setdefault(what)
                    if len(parts) == self._num_ranks:
                        said[what] = _joined(self._parts.pop(what))
        return failures + [report for report in said.values() if report is not None]

    def forget(self, key: str) -> None:
        """A request is gone: who has not said anything of it yet need not. Idempotent."""
        for what in [what for what, parts in self._parts.items() if getattr(parts[0], "key", None) == key]:
            del self._parts[what]
        self._failed -= {(key, late) for late in (False, True)}


def _identity(report: UnitRan | Stored | SliceTook) -> object:
    """What a report is about, the same for every rank."""
    match report:
        case UnitRan(key, unit):
            return UnitRan, key, unit
        case Stored(ticket):
            return Stored, ticket
        case SliceTook():
            return SliceTook, report.number


def _joined(parts: Sequence[Report]) -> Report:
    """Reports of all ranks about the same."""
    first = parts[0]
    match first:
        case UnitRan():
            return replace(first, seconds=max(part.seconds for part in parts if isinstance(part, UnitRan)))
        case SliceTook():
            took = [part for part in parts if isinstance(part, SliceTook)]
            return SliceTook(max(part.seconds for part in took), max(part.step_s for part in took), first.number)
        case Stored(ticket):
            return Stored(ticket, next((part.why for part in parts if isinstance(part, Stored) and part.why), ""))
    raise AssertionError(first)
