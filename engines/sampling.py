"""Choosing the next token: temperature, top-k, top-p, seed, log probabilities. Same seed and logits, same token."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvkin.kv.generation import Sampling, TokenLogprob


def log_distribution(logits: Tensor) -> NDArray[np.float32]:
    """Logits (vocab,) of any float dtype -> natural log probabilities (vocab,) float32 in host memory of their own."""
    logprobs: NDArray[np.float32] = torch.log_softmax(logits.float(), dim=-1).cpu().numpy()
    return logprobs


class Sampler:
    """One request's sampler with its own random generator (seeded by the request, or from the system)."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def choose(self, logits: Tensor) -> tuple[int, TokenLogprob | None]:
        """Logits (vocab,) float32 -> token id and, where asked for, its log probability and the most likely ones.

        Log probabilities are those of the model, before temperature and filters.
        """
        sampling = self._sampling
        logits = logits.cpu()
        token = int(logits.argmax()) if sampling.temperature == 0 else self._draw(logits / sampling.temperature)
        if sampling.logprobs is None:
            return token, None
        logprobs = torch.log_softmax(logits, dim=-1)
        best = torch.topk(logprobs, min(sampling.logprobs, len(logprobs)))
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return token, TokenLogprob(token, float(logprobs[token]), top)

    def _draw(self, logits: Tensor) -> int:
        values, indices = torch.sort(logits, descending=True)
        if self._sampling.top_k:
            values, indices = values[: self._sampling.top_k], indices[: self._sampling.top_k]
        probabilities = torch.softmax(values, dim=-1)
        if self._sampling.top_p < 1:
            # keep the smallest set that reaches top_p; the first is always kept
            before = probabilities.cumsum(-1) - probabilities
            probabilities = probabilities.masked_fill(before >= self._sampling.top_p, 0.0)
        return int(indices[torch.multinomial(probabilities, 1, generator=self._generator)])
