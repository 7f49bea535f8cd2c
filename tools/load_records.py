"""What became of each request of a load: one record for every planned request, whether it was sent or not.

Times are seconds from the start of the point, measured by the client; latencies count from the *intended* arrival, so a generator or
a cluster that is late cannot hide it.
"""

from __future__ import annotations

import enum

import msgspec


class Outcome(enum.StrEnum):
    """How a request ended, exactly one each. The last three were never sent."""

    FINISHED = "finished"
    FAILED = "failed"  # an error of the cluster, see ``code``
    TIMED_OUT = "timed_out"  # no end within the client's own limit
    CUT_OFF = "cut_off"  # still running when the point ended
    NOT_SENT = "not_sent"  # as many requests in flight as allowed
    ABANDONED = "abandoned"  # the answer that it continues never came
    NEVER_DUE = "never_due"  # the point ended before its turn came


# Phases of a request that follow each other; a pull runs beside them, and what it holds up is ``wait``.
SEQUENTIAL = ("hash", "route", "queue", "wait", "recompute", "suffix")
SENT = frozenset({Outcome.FINISHED, Outcome.FAILED, Outcome.TIMED_OUT, Outcome.CUT_OFF})


class RequestRecord(msgspec.Struct, frozen=True):
    """One request. None: it never came to that. ``gaps_s`` are the times between its tokens, in order; tokens that came in
    one message have gaps of 0 between them. ``loss`` is the profiled one; None also for reuse that nobody has profiled."""

    number: int
    session: int
    turn: int
    model: str
    prompt_tokens: int
    asked_tokens: int
    outcome: Outcome
    code: str = ""
    message: str = ""
    warm_up: bool = False
    intended_s: float | None = None
    sent_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    tokens: int = 0
    gaps_s: tuple[float, ...] = ()
    node: str = ""
    kind: str = ""
    quality: str = ""
    fallback: str = ""
    tokens_reused: int = 0
    bytes_pulled: int = 0
    phases_ms: dict[str, float] = {}
    loss: float | None = None

    @property
    def ttft_ms(self) -> float | None:
        """From the intended arrival to the first token, whatever came after it."""
        if self.first_token_s is None or self.intended_s is None:
            return None
        return (self.first_token_s - self.intended_s) * 1e3

    @property
    def other_ms(self) -> float:
        """The part of the TTFT that is in no phase: the client's and the network's, and on the node the steps of other requests."""
        return max(0.0, (self.ttft_ms or 0.0) - sum(self.phases_ms.get(phase, 0.0) for phase in SEQUENTIAL))

    @property
    def e2e_ms(self) -> float | None:
        """From the intended arrival to the end of a whole answer."""
        if self.outcome is not Outcome.FINISHED or self.ended_s is None or self.intended_s is None:
            return None
        return (self.ended_s - self.intended_s) * 1e3

    @property
    def mean_gap_ms(self) -> float:
        """Mean time between tokens; 0 for an answer of one token."""
        return 1e3 * sum(self.gaps_s) / len(self.gaps_s) if self.gaps_s else 0.0

    @property
    def late_s(self) -> float:
        """How much later than intended the generator sent it."""
        if self.sent_s is None or self.intended_s is None:
            return 0.0
        return max(0.0, self.sent_s - self.intended_s)
