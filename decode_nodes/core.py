"""The decode node's decisions, pure: one request's life, and who may run.

=========  =============================  =========================================
state      on                             then
=========  =============================  =========================================
queued     a place is free                prefilling (submit, pull)
prefilling a source fails                 prefilling (fall back to a private prefill)
prefilling the whole prompt has its KV    decoding (publish the prompt)
decoding   the engine finishes            done (publish, reply)
any        abort, deadline, engine error  done (stop everything, reply once)
=========  =============================  =========================================

Every request ends in exactly one Reply. Signals for requests that have ended are ignored.
"""

from __future__ import annotations

import enum
from collections import deque

import msgspec

from kvkin.transport.node_messages import Execute


class State(enum.StrEnum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"


# events


class ExecuteReceived(msgspec.Struct, frozen=True):
    execute: Execute
    now: float


class SourceFailed(msgspec.Struct, frozen=True):
    request_id: str
    reason: str


class PromptReady(msgspec.Struct, frozen=True):
    request_id: str


class EngineFinished(msgspec.Struct, frozen=True):
    request_id: str


class EngineFailed(msgspec.Struct, frozen=True):
    request_id: str
    code: str
    message: str
    retryable: bool


class AbortReceived(msgspec.Struct, frozen=True):
    request_id: str
    reason: str


class Tick(msgspec.Struct, frozen=True):
    now: float


# instructions


class Start(msgspec.Struct, frozen=True):
    """Submit to the engine and open the plan's streams."""

    request_id: str


class FallBack(msgspec.Struct, frozen=True):
    """Stop the streams and replan to a private prefill."""

    request_id: str
    reason: str


class PublishPrompt(msgspec.Struct, frozen=True):
    request_id: str


class Complete(msgspec.Struct, frozen=True):
    """Publish what was generated, then reply ``done``."""

    request_id: str


class Fail(msgspec.Struct, frozen=True):
    """Stop engine and streams, free everything, reply ``failed``."""

    request_id: str
    code: str
    message: str
    retryable: bool


Event = ExecuteReceived | SourceFailed | PromptReady | EngineFinished | EngineFailed | AbortReceived | Tick
Instruction = Start | FallBack | PublishPrompt | Complete | Fail


class _Request(msgspec.Struct):
    state: State
    deadline: float


class DecodeCore:
    """State of all requests of a node."""

    def __init__(self, max_running: int, max_queue: int) -> None:
        self._max_running, self._max_queue = max_running, max_queue
        self._requests: dict[str, _Request] = {}
        self._queue: deque[str] = deque()
        self.fallbacks = 0
        self.finished = 0
        self.failed = 0

    @property
    def running(self) -> int:
        return len(self._requests) - len(self._queue)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def state(self, request_id: str) -> State | None:
        request = self._requests.get(request_id)
        return None if request is None else request.state

    def handle(self, event: Event) -> list[Instruction]:
        match event:
            case ExecuteReceived(execute, now):
                return self._received(execute, now)
            case SourceFailed(request_id, reason):
                request = self._requests.get(request_id)
                if request is None or request.state is not State.PREFILLING:
                    return []
                self.fallbacks += 1
                return [FallBack(request_id, reason)]
            case PromptReady(request_id):
                request = self._requests.get(request_id)
                if request is None or request.state is not State.PREFILLING:
                    return []
                request.state = State.DECODING
                return [PublishPrompt(request_id)]
            case EngineFinished(request_id):
                if request_id not in self._requests:
                    return []
                self.finished += 1
                return [Complete(request_id), *self._end(request_id)]
            case EngineFailed(request_id, code, message, retryable):
                return self._fail(request_id, code, message, retryable)
            case AbortReceived(request_id, reason):
                return self._fail(request_id, "cancelled", reason, False)
            case Tick(now):
                over = [name for name, request in self._requests.items() if request.deadline < now]
                return [
                    instruction
                    for name in over
                    for instruction in self._fail(name, "deadline", "the request's deadline passed", True)
                ]

    def _received(self, execute: Execute, now: float) -> list[Instruction]:
        request_id = execute.request_id
        if request_id in self._requests:
            # ids are made by the router; a repeated one is the same request sent twice
            return []
        self._requests[request_id] = _Request(State.QUEUED, now + execute.deadline_s)
        self._queue.append(request_id)
        if len(self._queue) > self._max_queue:
            message = f"{self._max_queue} requests are waiting on this node already"
            return self._fail(request_id, "capacity", message, True)
        return self._admit()

    def _admit(self) -> list[Instruction]:
        out: list[Instruction] = []
        while self._queue and self.running < self._max_running:
            request_id = self._queue.popleft()
            self._requests[request_id].state = State.PREFILLING
            out.append(Start(request_id))
        return out

    def _fail(self, request_id: str, code: str, message: str, retryable: bool) -> list[Instruction]:
        if request_id not in self._requests:
            return []
        self.failed += 1
        return [Fail(request_id, code, message, retryable), *self._end(request_id)]

    def _end(self, request_id: str) -> list[Instruction]:
        if self._requests.pop(request_id).state is State.QUEUED:
            self._queue.remove(request_id)
        return self._admit()
