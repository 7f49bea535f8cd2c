"""Sends a load to a running cluster and records every request: the thin IO of ``kvkin bench serving``.

Open loop: a request is sent at its time whatever became of the others; only one with ``after`` waits for the answer before it. What
runs when the point is over is cancelled. Every planned request has one state from the beginning and leaves one record,
so none is lost or counted twice, whatever happens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from kvkin.kv.errors import KvkinError
from kvkin.tools.load_records import Outcome, RequestRecord
from kvkin.tools.load_requests import Load, LoadRequest, with_answers
from kvkin.tools.report_view import phases_ms
from kvkin.transport.client import AnswerStream, AsyncClient
from kvkin.transport.messages import Finished, Reuse, Sampling, Tokens

# Between the creation of all tasks and the first arrival, so that the first requests are not late.
LEAD_S = 0.05


class Asking(msgspec.Struct, frozen=True):
    """What every request of a point asks for besides its prompt. ``deadline_s`` is enforced by the router, by
    ``ttft_slo_s`` it chooses the plan."""

    reuse: Reuse
    max_loss: float = 0.05
    publish: bool = True
    share_hint: float = -1.0
    deadline_s: float | None = None
    ttft_slo_s: float | None = None


class LoadLimits(msgspec.Struct, frozen=True):
    """``timeout_s`` bounds a request from its intended arrival; ``drain_s`` is what running ones get after the last arrival."""

    max_in_flight: int = 256
    timeout_s: float = 120.0
    drain_s: float = 60.0
    think_s: float = 0.0


@dataclass
class _State:
    """One request on its way."""

    request: LoadRequest
    prompt: tuple[int, ...]
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: Outcome | None = None
    code: str = ""
    message: str = ""
    intended_s: float | None = None
    sent_s: float | None = None
    first_s: float | None = None
    last_s: float = 0.0
    ended_s: float | None = None
    answer: list[int] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    finished: Finished | None = None

    def arrived(self, tokens: Tokens, now_s: float) -> None:
        if not tokens.token_ids:
            return
        if self.first_s is None:
            self.first_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_s)
        self.gaps_s += [0.0] * (len(tokens.token_ids) - 1)
        self.answer += tokens.token_ids
        self.last_s = now_s

    def record(self) -> RequestRecord:
        """What is to be said of it now that the point is over."""
        outcome = self.outcome or (Outcome.NEVER_DUE if self.sent_s is None else Outcome.CUT_OFF)
        record = RequestRecord(
            number=self.request.number,
            session=self.request.session,
            turn=self.request.turn,
            model=self.request.model,
            prompt_tokens=len(self.prompt),
            asked_tokens=self.request.output_tokens,
            outcome=outcome,
            code=self.code,
            message=self.message,
            intended_s=self.intended_s,
            sent_s=self.sent_s,
            first_token_s=self.first_s,
            ended_s=self.ended_s,
            tokens=len(self.answer),
            gaps_s=tuple(self.gaps_s),
        )
        if self.finished is None:
            return record
        report = self.finished.report
        return msgspec.structs.replace(
            record,
            node=self.finished.node,
            kind=report.kind.value,
            quality=report.quality.value,
            fallback=report.fallback,
            tokens_reused=report.tokens_reused,
            bytes_pulled=report.bytes_pulled,
            phases_ms=phases_ms(self.finished.timings),
            loss=report.loss,
        )


class LoadRun:
    """One point: make it, ``await run()`` once. ``in_flight`` and ``done`` may be read meanwhile."""

    def __init__(
        self,
        client: AsyncClient,
        load: Load,
        asking: Asking,
        limits: LoadLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` gives seconds; it must run as the event loop's timers do."""
        self._client, self._asking, self._limits, self._clock = client, asking, limits, clock
        self._states = [_State(request, request.token_ids) for request in load.requests]
        self._end_s = load.horizon_s + limits.drain_s
        self._began = 0.0
        self.in_flight = 0

    @property
    def total(self) -> int:
        return len(self._states)

    @property
    def done(self) -> int:
        """Requests of which nothing more will come."""
        return sum(state.outcome is not None for state in self._states)

    async def run(self) -> list[RequestRecord]:
        """Send everything, wait for the ends or the end of the point, and return a record for every request, in order.

        Cancelling this cancels what is in flight at the router, too.
        """
        self._began = self._clock() + LEAD_S
        tasks = [asyncio.create_task(self._one(state)) for state in self._states]
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=self._end_s + LEAD_S, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            # what the cluster may do to a request is in its record; this is a fault of the generator
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result
        return [state.record() for state in self._states]

    def _now_s(self) -> float:
        return self._clock() - self._began

    async def _one(self, state: _State) -> None:
        try:
            due_s = await self._due(state)
            if due_s is None:
                state.outcome = Outcome.ABANDONED
                return
            await self._sleep_until(due_s)
            state.intended_s = due_s
            if self.in_flight >= self._limits.max_in_flight:
                state.outcome = Outcome.NOT_SENT
            else:
                await self._ask(state, due_s)
        finally:
            state.ended.set()

    async def _due(self, state: _State) -> float | None:
        """When the request is to be sent; None if the answer that it goes on with did not come."""
        after = state.request.after
        if after is None:
            return state.request.at_s
        earlier = self._states[after]
        await earlier.ended.wait()
        if earlier.outcome is not Outcome.FINISHED or earlier.ended_s is None:
            return None
        answers = {place.number: self._states[place.number].answer for place in state.request.answers}
        state.prompt = with_answers(state.request, answers)
        return max(state.request.at_s, earlier.ended_s + self._limits.think_s)

    async def _sleep_until(self, due_s: float) -> None:
        # timers of some loops count in whole milliseconds and may wake early
        while (left_s := due_s - self._now_s()) > 0:  # noqa: ASYNC110 - a time of the clock, no event
            await asyncio.sleep(left_s)

    async def _ask(self, state: _State, due_s: float) -> None:
        self.in_flight += 1
        state.sent_s = self._now_s()
        left_s = due_s + self._limits.timeout_s - state.sent_s
        try:
            async with asyncio.timeout(left_s), self._stream(state) as stream:
                async for tokens in stream:
                    state.arrived(tokens, self._now_s())
            state.finished, state.outcome = stream.finished, Outcome.FINISHED
        except TimeoutError:
            state.outcome = Outcome.TIMED_OUT
        except KvkinError as error:
            state.outcome, state.code, state.message = Outcome.FAILED, error.code, str(error)
        finally:
            self.in_flight -= 1
            state.ended_s = self._now_s()

    def _stream(self, state: _State) -> AnswerStream:
        asking = self._asking
        return self._client.stream(
            state.request.model,
            token_ids=state.prompt,
            sampling=Sampling(max_tokens=state.request.output_tokens, ignore_eos=True),
            reuse=asking.reuse,
            max_loss=asking.max_loss,
            publish=asking.publish,
            share_hint=asking.share_hint,
            deadline_s=asking.deadline_s,
            ttft_slo_s=asking.ttft_slo_s,
        )


def flag_warm_up(load: Load, records: Sequence[RequestRecord], requests: int, seconds: float) -> list[RequestRecord]:
    """The records with the warm-up marked: the first ``requests``, and those that arrive within ``seconds``.

    By the planned arrival alone (of a turn that waits for an answer: its session's), so the same requests are measured in every arm.
    """
    by_arrival = sorted(load.requests, key=lambda one: (one.at_s, one.number))
    excluded = {one.number for one in by_arrival[:requests]} | {one.number for one in by_arrival if one.at_s < seconds}
    return [msgspec.structs.replace(record, warm_up=record.number in excluded) for record in records]
