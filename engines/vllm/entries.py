"""Requests as the scheduler side knows them, and what it plans for a step. Pure: no vllm, no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvkin.engines.vllm.loads import Load
from kvkin.engines.vllm.orders import Order, Progress
from kvkin.engines.vllm.reports import Listener, LoadFailed, StatesKept, UnitRan

PARAMETER = "kvkin"
"""Key in a request's ``kv_transfer_params``: the name under which the engine entered it."""


@dataclass
class Entry:
    """One request. ``lost`` is called when blocks that somebody may read are gone, with True if its hidden states are, too;
    ``tapped`` if E is kept, ``hold`` if its blocks are to be kept at the end."""

    load: Load
    num_tokens: int
    max_new_tokens: int
    lost: Callable[[bool], None]
    listener: Listener | None = None
    tapped: bool = False
    hold: bool = True
    request_id: str = ""
    held: tuple[int, ...] | None = None
    scheduled: bool = False
    waits_for_data: bool = False
    cached_tokens: int = 0
    ended: bool = False


@dataclass
class StepPlan:
    """What one step's orders are, and how much vLLM itself computes in it; ``idle``: nothing."""

    orders: list[Order] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    idle: bool = False


def computed_before(output: Any) -> dict[str, int]:
    """Of each request that vLLM's scheduler has put into a step (its ``SchedulerOutput``), how many of its tokens are computed."""
    cached = output.scheduled_cached_reqs
    return {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs} | dict(
        zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    )


def tell(listener: Listener, report: UnitRan | StatesKept | LoadFailed) -> None:
    """Say it to who listens to its request."""
    match report:
        case UnitRan(_, unit, positions, seconds):
            listener.unit_done(unit, positions, seconds)
        case StatesKept(_, layer, start, stop):
            listener.states_kept(layer, start, stop)
        case LoadFailed(_, why):
            listener.load_failed(why)
