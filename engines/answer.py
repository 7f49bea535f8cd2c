"""Answer: the tokens that one request has generated, their text, and when it ends. The same rules for every engine."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from kvkin.engines.api import EngineRequest, EngineSink, Result
from kvkin.engines.text import TextStream
from kvkin.kv.generation import TokenLogprob


class Answer:
    """Fed by an engine token by token; tells the request's sink of each. Without a tokenizer there is no text."""

    def __init__(
        self, request: EngineRequest, sink: EngineSink, tokenizer: Tokenizer | None, eos: Collection[int]
    ) -> None:
        self.tokens: list[int] = []
        self._request, self._sink, self._eos = request, sink, eos
        self._logprobs: list[TokenLogprob] = []
        stop = request.sampling.stop if request.sampling else ()
        self._text = TextStream(tokenizer, stop) if tokenizer is not None and request.sampling else None

    def add(self, token: int, logprob: TokenLogprob | None) -> str:
        """A new token; returns why the answer ends with it (stop, length), or nothing."""
        sampling = self._request.sampling
        assert sampling is not None
        index = len(self.tokens)
        self.tokens.append(token)
        if logprob is not None:
            self._logprobs.append(logprob)
        ended = token in self._eos and not sampling.ignore_eos
        text = "" if self._text is None or ended else self._text.push(token)
        stopped = self._text is not None and self._text.stopped
        reason = "stop" if ended or stopped else "length" if len(self.tokens) >= sampling.max_tokens else ""
        if reason and self._text is not None:
            text += self._text.finish()
        self._sink.tokens(self._request.request_id, index, token, text, logprob)
        return reason

    def result(self, reason: str, first_logprobs: NDArray[np.float32] | None) -> Result:
        """What the sink is told at the end."""
        return Result(
            self._request.request_id,
            tuple(self.tokens),
            self._text.text if self._text else "",
            reason,
            tuple(self._logprobs),
            first_logprobs,
        )
