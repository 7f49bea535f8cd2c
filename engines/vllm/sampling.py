"""Between kvkin's sampling and vLLM's: what a request asks for, and what comes back of its tokens."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from kvkin.engines.api import EngineRequest
from kvkin.engines.vllm.entries import PARAMETER
from kvkin.engines.vllm.first_logits import PARAMETER as FIRST
from kvkin.kv.generation import TokenLogprob


def sampling_params(request: EngineRequest, eos: frozenset[int], key: str) -> Any:
    """vLLM's parameters. It is told to ignore the checkpoint's own EOS ids: ``eos`` are the model's, and text is decoded here."""
    extra: dict[str, Any] = {"kv_transfer_params": {PARAMETER: key}}
    sampling = request.sampling
    if sampling is None:
        return SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, extra_args=extra)
    if request.first_distribution:
        extra[FIRST] = key
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        ignore_eos=True,
        stop_token_ids=[] if sampling.ignore_eos else sorted(eos),
        logprobs=sampling.logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=extra,
    )


def token_logprobs(completion: Any, asked: int | None) -> list[TokenLogprob | None]:
    """vLLM's log probabilities of a completion's new tokens, as kvkin has them: the chosen one's, and the ``asked`` most likely."""
    if asked is None or completion.logprobs is None:
        return [None] * len(completion.token_ids)
    found: list[TokenLogprob | None] = []
    for token, entries in zip(completion.token_ids, completion.logprobs, strict=True):
        ranked = sorted(entries.items(), key=lambda entry: (entry[1].rank, entry[0]))[:asked]
        top = tuple((int(other), float(entry.logprob)) for other, entry in ranked)
        found.append(TokenLogprob(int(token), float(entries[token].logprob), top))
    return found
