"""The engines that ``kvkin bench engine`` compares, each timed by itself inside its own child process (``bench_engine_child.py``).

All of them are asked the same: a prefill until the first token, and greedy decoding of several requests side by side. Which engine
runs which weights comes from a node of a cluster file, so that every arm has the arguments that a node would have.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvkin.configs.families import ResolvedFamily
from kvkin.configs.vllm_node import VllmNode
from kvkin.engines.api import Counters, Engine, EngineRequest, Result
from kvkin.engines.spaces import Space
from kvkin.kv.errors import DeadlineExceeded
from kvkin.kv.execution import Unit
from kvkin.kv.generation import Sampling, TokenLogprob
from kvkin.kv.plan import ReusePlan, private_plan
from kvkin.tools.bench_engine_messages import Timed

# Of one command: a child that hangs must not hang the bench.
DEADLINE_S = 600.0


class Arm(Protocol):
    """One engine. ``settings`` are JSON values that say what it was resolved to."""

    settings: dict[str, Any]

    def prefill(self, token_ids: Sequence[int]) -> Timed:
        """Seconds from the request to its first token."""

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Timed:
        """Tokens of all requests, and seconds, since the last of them had its first token."""

    def close(self) -> None: ...


class Clocked:
    """When the tokens of requests that run side by side came; ``clock`` in seconds."""

    def __init__(self, requests: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._requests, self._seen = requests, dict[str, int]()
        self._before = 0
        self._all_first_at = self._last_at = 0.0

    def tokens(self, key: str, count: int) -> None:
        """``count`` more tokens of a request are here."""
        if not count:
            return
        self._last_at = self._clock()
        self._seen[key] = self._seen.get(key, 0) + count
        if len(self._seen) == self._requests and not self._all_first_at:
            self._all_first_at, self._before = self._last_at, sum(self._seen.values())

    def timed(self, cached_tokens: int) -> Timed:
        """From the last request's first token to the last token of all."""
        return Timed(self._last_at - self._all_first_at, sum(self._seen.values()) - self._before, cached_tokens)


# --- vLLM by itself ----------------------------------------------------------------------------------------------------------


class PlainArm:
    """vLLM without kvkin."""

    def __init__(self, family: ResolvedFamily, model: str, node: VllmNode) -> None:
        from kvkin.engines.vllm.plain import PlainVllm
        from kvkin.tools.vllm_engine import node_weights

        checkpoint, _ = node_weights(family, family.models[model], (model,), node)
        self._vllm = PlainVllm(checkpoint, node.options)
        self.settings = self._vllm.settings

    def prefill(self, token_ids: Sequence[int]) -> Timed:
        started = time.perf_counter()
        cached = self._run([token_ids], 1, lambda key, count: None)
        return Timed(time.perf_counter() - started, len(token_ids), cached)

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Timed:
        clocked = Clocked(len(prompts))
        return clocked.timed(self._run(prompts, new_tokens, clocked.tokens))

    def _run(self, prompts: Sequence[Sequence[int]], new_tokens: int, tokens: Callable[[str, int], None]) -> int:
        for number, ids in enumerate(prompts):
            self._vllm.add(str(number), ids, new_tokens)
        cached, left = 0, len(prompts)
        while left:
            for progress in self._vllm.step():
                tokens(progress.key, len(progress.new_tokens))
                cached += progress.cached_tokens if progress.finished else 0
                left -= progress.finished
        return cached

    def close(self) -> None:
        self._vllm.close()


# --- vLLM under kvkin --------------------------------------------------------------------------------------------------------


class Listening:
    """Hears of requests of an engine, and lets another thread wait for their end."""

    def __init__(self, requests: int, tokens: Callable[[str, int], None]) -> None:
        self._tokens, self._left = tokens, requests
        self._done = threading.Event()
        self.counters: dict[str, Counters] = {}
        self.failure: Exception | None = None

    def unit_done(self, request_id: str, unit: Unit, space: Space) -> None: ...

    def prefilled(self, request_id: str) -> None: ...

    def tokens(self, request_id: str, index: int, token_id: int, text: str, logprob: TokenLogprob | None) -> None:
        self._tokens(request_id, 1)

    def finished(self, result: Result, space: Space, counters: Counters) -> None:
        space.release()
        self.counters[result.request_id] = counters
        self._ended()

    def failed(self, request_id: str, error: Exception) -> None:
        self.failure = self.failure or error
        self._ended()

    def _ended(self) -> None:
        self._left -= 1
        if not self._left:
            self._done.set()

    def wait(self) -> None:
        """Until all have ended; raises what one of them failed with."""
        if not self._done.wait(DEADLINE_S):
            raise DeadlineExceeded(f"a run took longer than {DEADLINE_S:.0f} s")
        if self.failure is not None:
            raise self.failure


class KvkinArm:
    """vLLM as a decode node has it: ``VllmEngine`` with the family's taps, under private plans."""

    def __init__(self, family: ResolvedFamily, model: str, node: VllmNode) -> None:
        from kvkin.engines.vllm.engine import VllmEngine
        from kvkin.engines.vllm.plain import settings_under_kvkin
        from kvkin.tools.vllm_engine import build_vllm

        engine = build_vllm(family, (model,), node)
        assert isinstance(engine, VllmEngine)
        self.engine: Engine = engine
        self.model, self._taps = model, family.transition_layers
        self._serial = 0
        self.settings: dict[str, Any] = {
            **settings_under_kvkin(engine),
            "taps": list(self._taps),
            "chunk_tokens": family.config.chunk_tokens,
        }

    def prefill(self, token_ids: Sequence[int]) -> Timed:
        started = time.perf_counter()
        first_at: list[float] = []
        cached = self._run([token_ids], 1, lambda key, count: first_at.append(time.perf_counter()))
        return Timed(first_at[0] - started, len(token_ids), cached)

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Timed:
        clocked = Clocked(len(prompts))
        return clocked.timed(self._run(prompts, new_tokens, clocked.tokens))

    def request(self, token_ids: Sequence[int], max_tokens: int, plan: ReusePlan | None = None) -> EngineRequest:
        """As a decode node would make it of a request that is to be published."""
        self._serial += 1
        ids = tuple(token_ids)
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        return EngineRequest(
            f"run-{self._serial}", self.model, ids, plan or private_plan(len(ids)), sampling, self._taps
        )

    def _run(self, prompts: Sequence[Sequence[int]], new_tokens: int, tokens: Callable[[str, int], None]) -> int:
        listening = Listening(len(prompts), tokens)
        for ids in prompts:
            self.engine.submit(self.request(ids, new_tokens), listening)
        listening.wait()
        return sum(counters.cached_tokens for counters in listening.counters.values())

    def close(self) -> None:
        self.engine.close()


# --- transformers ------------------------------------------------------------------------------------------------------------


class TransformersArm:
    """transformers' own model and cache; requests of one length side by side are one batch."""

    def __init__(self, family: ResolvedFamily, model: str, node: VllmNode) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        from kvkin.tools.vllm_engine import node_weights

        disable_progress_bar()
        checkpoint, _ = node_weights(family, family.models[model], (model,), node)
        dtype = getattr(torch, family.compute_dtype)
        loaded: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, attn_implementation="sdpa")
        self._model = loaded.to(family.device).eval()
        self._device = family.device
        self.settings: dict[str, Any] = {"attention": "sdpa", "dtype": family.compute_dtype, "prefix_caching": False}

    def prefill(self, token_ids: Sequence[int]) -> Timed:
        started = time.perf_counter()
        self._run([token_ids], 1, lambda key, count: None)
        return Timed(time.perf_counter() - started, len(token_ids))

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Timed:
        clocked = Clocked(len(prompts))
        self._run(prompts, new_tokens, clocked.tokens)
        return clocked.timed(0)

    def _run(self, prompts: Sequence[Sequence[int]], new_tokens: int, tokens: Callable[[str, int], None]) -> None:
        import torch
        from transformers import DynamicCache

        with torch.inference_mode():
            ids = torch.tensor([list(prompt) for prompt in prompts], device=self._device)
            cache = DynamicCache(config=self._model.config)
            for _ in range(new_tokens):
                out = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                ids = out.logits[:, -1:].argmax(-1)
                chosen = ids.tolist()  # the host has it, as the engines' callers do
                for number in range(len(chosen)):
                    tokens(str(number), 1)

    def close(self) -> None: ...
