"""What a node asks of an engine, and what it hears back: the same for the reference engine and for vLLM.

A node submits requests with a plan, feeds arrivals, and listens through an ``EngineSink``. Engines count what really ran; the reuse
report is made of these counts.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvkin.engines.spaces import Space
from kvkin.kv.execution import PlanExecution, Unit
from kvkin.kv.generation import Sampling, TokenLogprob
from kvkin.kv.layout import KVLayout
from kvkin.kv.plan import ReusePlan

T = TypeVar("T")


@dataclass(frozen=True)
class EngineRequest:
    """One request. Without ``sampling`` it is a prefill only (an order): no logits, no tokens.

    ``taps`` are the transition layers whose entering hidden states are kept for publication. ``first_distribution`` asks for
    ``Result.first_logprobs``. Without ``engine_cache`` a prefix cache of the engine's own gives it nothing, and with it only what requests
    under the same ``root`` (the hash before the first block: tenant scope, tokenizer) left there.
    """

    request_id: str
    model: str
    token_ids: tuple[int, ...]
    plan: ReusePlan
    sampling: Sampling | None
    taps: tuple[int, ...] = ()
    first_distribution: bool = False
    engine_cache: bool = True
    root: bytes = b""


@dataclass(frozen=True)
class Arrival:
    """KV of one (chunk, layer), or its E with layer -1: parts of (first token, bytes of whole blocks), stable until consumed."""

    chunk: int
    layer: int
    parts: tuple[tuple[int, NDArray[np.uint8]], ...]


@dataclass
class Counters:
    """What really happened to a request, in seconds and counts; written by the engine only."""

    recompute_s: float = 0.0
    suffix_s: float = 0.0
    wait_s: float = 0.0
    computed_layer_tokens: int = 0
    computed_positions: int = 0
    """Sum of the positions of what ``computed_layer_tokens`` counts: how far those tokens had to attend."""
    cached_tokens: int = 0
    """Prompt tokens whose KV the engine's own prefix cache had: neither written nor computed for this request."""
    loaded_tokens: int = 0
    """Prompt tokens whose KV, in all layers or some, the plan's sources gave."""
    computed_tokens: int = 0
    """Prompt tokens that went through all layers. With those cached and loaded they are the whole prompt, each token once: work that
    a preemption repeats is in ``computed_layer_tokens`` only."""
    recomputed_layers: dict[int, set[int]] = field(default_factory=dict)
    """Segment -> layers that were computed for it although its KV is reused."""
    first_token_at: float = 0.0
    prefilled_at: float = 0.0


@dataclass(frozen=True)
class Result:
    """A finished request. ``finish_reason``: stop, length, or prefill for an order.

    ``first_logprobs`` (vocab,) float32, on request only: natural log probabilities of the first generated token as the model has
    them, before temperature and filters.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...]
    first_logprobs: NDArray[np.float32] | None = field(default=None, compare=False)


class EngineSink(Protocol):
    """Called from the engine's thread between steps; must return quickly."""

    def unit_done(self, request_id: str, unit: Unit, space: Space) -> None:
        """A unit's KV is in the space (prefill nodes copy it to the arena and announce the layer)."""

    def prefilled(self, request_id: str) -> None:
        """The whole prompt has its KV."""

    def tokens(self, request_id: str, index: int, token_id: int, text: str, logprob: TokenLogprob | None) -> None: ...

    def finished(self, result: Result, space: Space, counters: Counters) -> None:
        """The end. ``space`` holds the KV of prompt + generated - 1 tokens; it may be kept for publication, until ``release``."""

    def failed(self, request_id: str, error: Exception) -> None:
        """The end, badly: cancelled, or an error in the engine."""


class Engine(Protocol):
    """Runs several requests at once, interleaved by step. All methods may be called from any thread."""

    models: tuple[str, ...]
    failure: Future[None]
    """Gets an exception when the engine can run nothing any more; its requests have ended by then. Else it stays as it is."""

    def layout(self, model: str) -> KVLayout: ...

    def plan_execution(self, model: str, plan: ReusePlan) -> PlanExecution:
        """A fresh execution of ``plan`` as this engine would cut it: for its chunks and pairs. Raises InvalidRequest."""
        ...

    def submit(self, request: EngineRequest, sink: EngineSink) -> PlanExecution:
        """Queue a request; returns its execution, to be read for its chunks and pairs only. Raises InvalidRequest."""
        ...

    def arrived(self, request_id: str, arrival: Arrival) -> None:
        """Data for a request is here; ignored when the request has ended or was replanned."""

    def replan(self, request_id: str, plan: ReusePlan) -> None:
        """Start the prefill over with another plan (a source failed). Ignored once the prompt is prefilled."""

    def cancel(self, request_id: str, reason: str) -> None:
        """End a request before its next step; unknown ids are ignored."""

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run ``function`` on the engine's thread between two steps."""
        ...

    def close(self) -> None:
        """Stop after the current step; running requests fail as cancelled. Idempotent."""
