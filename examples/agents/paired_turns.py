"""Each turn twice: as the cluster would serve it, and as its private twin, which reuses nothing and leaves nothing behind.

Both are computed by the same node from the same conversation, one after the other, so they differ in nothing but the reuse. What
the shared run answered goes on in the conversation. Talks to the cluster through kvkin's client alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dialogue import Line, marks

from kvkin.kv.errors import KvkinError, NodeUnavailable
from kvkin.kv.plan import PlanKind
from kvkin.tools.local import status_until
from kvkin.tools.scoring import edit_similarity
from kvkin.transport.client import AsyncClient
from kvkin.transport.messages import Finished, Reuse, StatusReply

REQUEST_S = 180.0
# Prefills that the router ordered in the background share the cores with what is timed: they are waited for, but not for ever.
QUIET_S = 60.0


@dataclass(frozen=True)
class Turn:
    """One turn of an agent: the answer with reuse, and the private one."""

    line: Line
    model: str
    answer: Finished
    private: Finished

    @property
    def agreement(self) -> float:
        """Share of the answer's tokens up to the first that differs from the private answer; 1 if none does."""
        mine, theirs = self.answer.token_ids, self.private.token_ids
        longer = max(len(mine), len(theirs))
        pairs = enumerate(zip(mine, theirs, strict=False))
        first = next((index for index, (one, other) in pairs if one != other), min(len(mine), len(theirs)))
        return first / longer if longer else 1.0

    @property
    def similarity(self) -> float:
        """Edit similarity of the two texts, between 0 and 1."""
        return edit_similarity(self.answer.text, [self.private.text])

    @property
    def marks(self) -> tuple[bool, bool]:
        """Whether the task was done: by the answer, and by the private one."""
        both = [marks(self.line, each.text, cut_off=each.finish_reason == "length") for each in self._both]
        return both[0], both[1]

    @property
    def problems(self) -> list[str]:
        """What makes the comparison unfair, or says that a plan was given up."""
        found = []
        if self.answer.report.fallback:
            found.append(f"fell back to a private prefill: {self.answer.report.fallback}")
        if self.private.report.kind is not PlanKind.PRIVATE:
            found.append(f"the private twin got a {self.private.report.kind} plan")
        if self.private.node != self.answer.node:
            found.append(f"the private twin ran on {self.private.node}, not on {self.answer.node}")
        return found

    @property
    def _both(self) -> tuple[Finished, Finished]:
        return self.answer, self.private


def compute_ms(answer: Finished) -> float:
    """Milliseconds that the engine computed for the prompt, up to the first token."""
    return answer.timings.recompute_ms + answer.timings.suffix_ms


class Player:
    """Plays turns on one cluster. ``models`` says which model each agent is; ``turns`` and ``stopped`` are what came of it."""

    def __init__(self, client: AsyncClient, models: dict[str, str], reuse: Reuse, max_tokens: int) -> None:
        self.turns: list[Turn] = []
        self.stopped = ""
        """Why the conversation ended early; empty: it did not."""
        self._client, self._models = client, models
        self._reuse, self._max_tokens = reuse, max_tokens
        self._quiet_s = QUIET_S

    async def play(self, lines: Sequence[Line], on_turn: Callable[[Turn], None]) -> None:
        """All turns in order. One that fails ends the conversation, for every later one would build on it."""
        messages: list[tuple[str, str]] = []
        try:
            for model in dict.fromkeys(self._models.values()):
                # what a process does on its first request only is nobody's share
                await self._ask(model, prompt="Good morning.", max_tokens=2, publish=False)
            for line in lines:
                messages.append(("user", line.text))
                turn = await self._both_ways(line, messages)
                messages.append(("assistant", turn.answer.text))
                self.turns.append(turn)
                on_turn(turn)
        except KvkinError as error:
            failed = lines[len(self.turns)]
            self.stopped = f"round {failed.round}, {failed.agent}: {error.code}: {error}"

    async def _both_ways(self, line: Line, messages: list[tuple[str, str]]) -> Turn:
        """Which way comes first alternates by round, so that neither always finds the machine warmer."""
        model, answers = self._models[line.agent], dict[bool, Finished]()
        for private in (True, False) if line.round % 2 == 0 else (False, True):
            await self._until_quiet()
            answers[private] = await self._ask(
                model,
                messages=messages,
                max_tokens=self._max_tokens,
                reuse=Reuse.OFF if private else self._reuse,
                publish=not private,
            )
        return Turn(line, model, answers[False], answers[True])

    async def _ask(self, model: str, **request: Any) -> Finished:
        return await self._client.generate(model, timeout_s=REQUEST_S, **request)

    async def _until_quiet(self) -> None:
        """Return once no node has anything to do. Somebody else's cluster may never be quiet: it is waited for only once."""
        try:
            await status_until(self._client.status, is_quiet, self._quiet_s)
        except NodeUnavailable:
            await self._client.status()  # a router that is gone is a failure, a busy one is not
            self._quiet_s = 0.0


def is_quiet(status: StatusReply) -> bool:
    """Whether no request, prefill order or check runs that would share the cores with what is timed."""
    loads = [node.load for node in status.nodes]
    busy = any(load.running or load.waiting or load.checks_running for load in loads)
    return not (busy or status.running or status.counters.get("orders_open"))
