"""How tokens are chosen and what is said of them: shared by the client messages and the engines."""

from __future__ import annotations

import msgspec


class Sampling(msgspec.Struct, frozen=True):
    """How tokens are chosen. Temperature 0 is greedy; ``top_k`` 0 and ``top_p`` 1 are off; ``logprobs`` counts alternatives."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int = 128
    logprobs: int | None = None
    ignore_eos: bool = False


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural-log probability of the chosen token and of the most likely ones (token id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
