"""Runs the points of a serving benchmark one after another on a running cluster: arms x rates x repeats, interleaved.

Every rate of a repeat runs each arm before the next rate begins, and the arm that goes first rotates, so that what the machine does
meanwhile hits all arms alike. Between points the cluster becomes idle, and every point has contexts of its own: no arm warms
another. A point that was interrupted is not reported.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from kvkin.kv.errors import ConfigError, NodeUnavailable
from kvkin.tools.bench_serving_stats import Objective, PointFigures, point_figures
from kvkin.tools.bench_serving_workloads import Workload
from kvkin.tools.load_records import RequestRecord
from kvkin.tools.load_requests import Load
from kvkin.tools.load_runner import Asking, LoadLimits, LoadRun, flag_warm_up
from kvkin.tools.load_tokens import TokenSource
from kvkin.transport.client import AsyncClient
from kvkin.transport.messages import Reuse, StatusReply

Arm = Literal["sharing", "own", "off"]
# How often the status is asked while waiting for an idle cluster: rarely enough to leave the cores to the cluster.
IDLE_POLL_S = 0.1
# Long enough for every mechanism to be used once: spans below 128 tokens are not pulled by default.
WAKE_TOKENS, WAKE_OUTPUT, WAKE_TIMEOUT_S = 192, 2, 120.0


class Point(msgspec.Struct, frozen=True):
    """One measurement. ``place`` is its position in the run."""

    place: int
    arm: Arm
    rate: float
    repeat: int


class PointResult(msgspec.Struct, frozen=True):
    """``router`` is by how much the router's counters grew meanwhile; ``truncated`` counts prompts that were cut to fit."""

    point: Point
    figures: PointFigures
    records: tuple[RequestRecord, ...]
    router: dict[str, int]
    truncated: int


class SweepSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for all points. ``warm_up_requests`` and ``warm_up_s`` are excluded from every point's figures;
    ``ttft_slo_s`` is what requests of the arm sharing tell the router."""

    arms: tuple[Arm, ...]
    repeats: int
    reuse: Reuse
    max_loss: float
    share_hint: float
    deadline_s: float | None
    ttft_slo_s: float | None
    limits: LoadLimits
    objective: Objective
    late_bound_ms: float
    warm_up_requests: int
    warm_up_s: float
    idle_s: float
    salt: str


class Room(msgspec.Struct, frozen=True):
    """What the models and the cluster take of one request, in tokens: prompt and answer together, and each by itself."""

    context_tokens: int
    prompt_tokens: int
    new_tokens: int


class Watcher(Protocol):
    """Who is told how far the sweep is."""

    def waking(self) -> None: ...

    def waiting(self, point: Point) -> None: ...

    def started(self, point: Point, horizon_s: float, run: LoadRun) -> None: ...

    def ended(self, result: PointResult) -> None: ...


def plan_points(arms: Sequence[Arm], rates: Sequence[float], repeats: int) -> list[Point]:
    """All points in the order in which they run."""
    points: list[Point] = []
    for repeat in range(repeats):
        for index, rate in enumerate(rates):
            turn = (repeat + index) % len(arms)
            points += [
                Point(len(points) + place, arm, rate, repeat) for place, arm in enumerate((*arms[turn:], *arms[:turn]))
            ]
    return points


def asking_for(arm: Arm, settings: SweepSettings) -> Asking:
    """What an arm's requests allow. ``own`` reuses what the answering node holds itself, ``off`` nothing, and leaves nothing behind."""
    match arm:
        case "sharing":
            return Asking(
                settings.reuse, settings.max_loss, True, settings.share_hint, settings.deadline_s, settings.ttft_slo_s
            )
        case "own":
            return Asking(Reuse.OWN, deadline_s=settings.deadline_s)
        case "off":
            return Asking(Reuse.OFF, publish=False, deadline_s=settings.deadline_s)


def is_idle(status: StatusReply) -> bool:
    """Nothing runs, waits or is being prefilled in the background. Nodes that are gone do not count."""
    loads = [node.load for node in status.nodes if node.state in ("alive", "draining")]
    busy = status.running or status.counters.get("orders_open", 0)
    return not busy and not any(load.running or load.waiting for load in loads)


class Sweep:
    """``results`` holds the points that are complete, also while ``run`` runs and after it was cancelled."""

    def __init__(
        self, client: AsyncClient, workload: Workload, models: Sequence[str], settings: SweepSettings, watcher: Watcher
    ) -> None:
        self.results: list[PointResult] = []
        self._client, self._workload, self._models = client, workload, models
        self._settings, self._watcher = settings, watcher

    async def run(self, wake: TokenSource) -> None:
        """All points. Raises ConfigError for a load that cannot be sent, NodeUnavailable if the cluster does not become idle."""
        points = plan_points(self._settings.arms, self._workload.rates, self._settings.repeats)
        self._watcher.waking()
        await self._wake(wake)
        for point in points:
            self.results.append(await self._run(point))
            self._watcher.ended(self.results[-1])

    async def _wake(self, source: TokenSource) -> None:
        """Let every model answer in every arm once, so that the first point does not pay for connections and first calls."""
        for number, arm in enumerate(self._settings.arms):
            asking = asking_for(arm, self._settings)
            for model in self._models:
                await self._client.generate(
                    model,
                    token_ids=source.draw(WAKE_TOKENS, "wake", number),
                    max_tokens=WAKE_OUTPUT,
                    reuse=asking.reuse,
                    max_loss=asking.max_loss,
                    publish=asking.publish,
                    timeout_s=WAKE_TIMEOUT_S,
                )

    async def _run(self, point: Point) -> PointResult:
        settings = self._settings
        rate_index = self._workload.rates.index(point.rate)
        load = self._workload.load(point.rate, point.repeat, f"{settings.salt}/{point.arm}/{rate_index}/{point.repeat}")
        self._watcher.waiting(point)
        before = await self._idle()
        run = LoadRun(self._client, load, asking_for(point.arm, settings), settings.limits)
        self._watcher.started(point, load.horizon_s, run)
        records = await run.run()
        after = await self._idle()
        records = flag_warm_up(load, records, settings.warm_up_requests, settings.warm_up_s)
        return PointResult(
            point,
            point_figures(records, load.horizon_s, settings.objective, settings.late_bound_ms),
            tuple(records),
            grown(before, after),
            sum(request.truncated > 0 for request in load.requests),
        )

    async def _idle(self) -> StatusReply:
        """The first status of an idle cluster. A router that is too busy to answer is asked again until the time is up."""
        deadline = time.monotonic() + self._settings.idle_s
        while True:
            try:
                status = await self._client.status()
                if is_idle(status):
                    return status
                loads = ", ".join(f"{node.name} {node.load.running} running" for node in status.nodes)
                problem = f"{status.running} requests ({loads}); does somebody else use it?"
            except NodeUnavailable as error:
                problem = str(error)
            if time.monotonic() > deadline:
                raise NodeUnavailable(f"the cluster was not idle within {self._settings.idle_s:g} s: {problem}")
            await asyncio.sleep(IDLE_POLL_S)


def check_loads(workload: Workload, settings: SweepSettings, room: Room) -> None:
    """Raise ConfigError for a point without measured requests, or with one that there is no room for."""
    for rate in workload.rates:
        for repeat in range(settings.repeats if workload.repeats_differ else 1):
            load = workload.load(rate, repeat, "check")
            warm_up = max(
                sum(request.at_s < settings.warm_up_s for request in load.requests),
                min(settings.warm_up_requests, len(load.requests)),
            )
            if warm_up == len(load.requests):
                problem = (
                    f"at {rate:g} requests/s {len(load.requests)} requests arrive, {warm_up} of them in the warm-up"
                )
                raise ConfigError("--duration", problem, "more time or sessions, a higher rate, or less --warm-up")
            _check_sizes(load, room)


def _check_sizes(load: Load, room: Room) -> None:
    prompt = max(len(one.token_ids) for one in load.requests)
    answer = max(one.output_tokens for one in load.requests)
    for option, what, tokens, most in (
        ("--output-tokens", "an answer", answer, room.new_tokens),
        ("--context-tokens", "a prompt with its answer", load.longest, room.context_tokens),
        ("--context-tokens", "a prompt", prompt, room.prompt_tokens),
    ):
        if tokens > most:
            raise ConfigError(option, f"{what} has {tokens} tokens", f"up to {most}, what the models have room for")


def grown(before: StatusReply, after: StatusReply) -> dict[str, int]:
    """The router's counters that are not what they were, and by how much. ``orders_open`` is a state, not a counter."""
    names = sorted((before.counters.keys() | after.counters.keys()) - {"orders_open"})
    deltas = {name: after.counters.get(name, 0) - before.counters.get(name, 0) for name in names}
    return {name: delta for name, delta in deltas.items() if delta}
