"""One request in the router: its phases, what may follow what, and its story (for the error that should never happen)."""

from __future__ import annotations

import enum

from kvkin.kv.errors import KvkinError
from kvkin.router.policy_types import Decision
from kvkin.router.prompts import Prompt
from kvkin.transport.messages import Generate


class Phase(enum.StrEnum):
    """Where a request is.

    ``preparing``: its prompt is being tokenized. ``waiting``: no node for its model is there. ``running``: a node has it and
    the client has seen nothing, so it can be retried elsewhere. ``streaming``: the client has seen tokens. ``ended``: its one
    terminal reply was sent, or its client is gone.
    """

    PREPARING = "preparing"
    WAITING = "waiting"
    RUNNING = "running"
    STREAMING = "streaming"
    ENDED = "ended"


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.PREPARING: frozenset({Phase.WAITING, Phase.RUNNING, Phase.ENDED}),
    Phase.WAITING: frozenset({Phase.WAITING, Phase.RUNNING, Phase.ENDED}),
    Phase.RUNNING: frozenset({Phase.WAITING, Phase.RUNNING, Phase.STREAMING, Phase.ENDED}),
    Phase.STREAMING: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}

# Steps of a story that are kept.
MAX_STORY = 32


class Failure:
    """Why an attempt failed, in the client's terms."""

    def __init__(self, code: str, message: str, retryable: bool) -> None:
        self.code, self.message, self.retryable = code, message, retryable

    @classmethod
    def of(cls, error: KvkinError) -> Failure:
        return cls(error.code, str(error), error.retryable)


class Request:
    """A running request. Times are the core's clock, in seconds."""

    def __init__(
        self, request_id: str, client: bytes, message: Generate, now: float, deadline_at: float, receiver: str = ""
    ) -> None:
        """``receiver`` is the attached server that has the request already (empty: the policy chooses a node)."""
        self.request_id, self.client, self.message, self.receiver = request_id, client, message, receiver
        self.received_at, self.deadline_at = now, deadline_at
        self.phase = Phase.PREPARING
        self.prompt: Prompt | None = None
        self.attempt = 0
        self.attempt_id = ""
        self.node = ""
        self.peer = b""
        self.failed_on: set[tuple[str, str]] = set()  # (node, incarnation)
        self.failure: Failure | None = None
        self.waiting_until = 0.0
        self.orders: set[str] = set()
        self.num_tokens = 0  # generated so far by this attempt
        self.text_chars = 0  # of their text
        self.first_token_at: float | None = None
        self.last_sent_at = now
        self.route_ms = 0.0
        self.decision: Decision | None = None  # of the last attempt
        self._story: list[str] = [f"{now:.3f} received"]

    @property
    def key(self) -> tuple[bytes, str]:
        return self.client, self.message.id

    def move(self, phase: Phase, now: float, why: str) -> None:
        """Change the phase. An illegal change is our own bug and tells the request's story."""
        self._story.append(f"{now:.3f} {self.phase} -> {phase}: {why}")
        del self._story[1:-MAX_STORY]
        assert phase in TRANSITIONS[self.phase], f"illegal transition of {self.request_id}:\n" + "\n".join(self._story)
        self.phase = phase

    def begin_attempt(self, node: str, peer: bytes) -> str:
        """Each attempt has its own id, so that late messages of an earlier one are nobody's."""
        self.attempt += 1
        self.attempt_id = self.request_id if self.attempt == 1 else f"{self.request_id}.{self.attempt}"
        self.node, self.peer = node, peer
        self.num_tokens, self.text_chars = 0, 0
        self.first_token_at = None
        return self.attempt_id
