"""Admission: how a request with a plan becomes one of vLLM's. Used by the engine, on its thread.

Each plan of a request has a key of its own, because ids come again and plans are replaced. The salt of vLLM's prefix cache is the
provenance of the plan's result, so that approximate KV is never found by who asked for exact KV.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping

import structlog

from kvkin.engines.api import EngineRequest
from kvkin.engines.vllm.entries import Entry
from kvkin.engines.vllm.launch import Runtime, VllmModel
from kvkin.engines.vllm.loads import Load
from kvkin.engines.vllm.orders import Serve
from kvkin.engines.vllm.running import RunningRequest
from kvkin.engines.vllm.sampling import sampling_params
from kvkin.engines.vllm.spaces import losing
from kvkin.kv.errors import InvalidRequest
from kvkin.kv.hashing import digest
from kvkin.kv.layout import KVLayout
from kvkin.kv.plan import ReusePlan, provenances

log = structlog.get_logger()


class Admission:
    """``layout`` is that of blocks outside of vLLM."""

    def __init__(self, runtime: Runtime, models: Mapping[str, VllmModel], layout: KVLayout, chunk_tokens: int) -> None:
        self._runtime, self._models = runtime, models
        self._layout, self._chunk_tokens = layout, chunk_tokens
        # one that no other engine has: blocks of models without a lineage are found by their own requests only
        self._nonce = digest(b"vllm engine", time.time_ns().to_bytes(8, "little"), id(self).to_bytes(8, "little"))
        self._numbers = itertools.count()

    def enter(self, running: RunningRequest, plan: ReusePlan) -> str:
        """Make ``plan`` the request's and tell the scheduler side of it; returns its key. Raises InvalidRequest."""
        request, runtime = running.request, self._runtime
        vocabulary = runtime.llm.model_config.get_vocab_size()
        if not all(0 <= token < vocabulary for token in request.token_ids):
            raise InvalidRequest(f"token ids must be below {vocabulary}")
        key = f"{next(self._numbers)}.{self._nonce.hex()[:8]}"
        adapter = self._models[request.model].adapter
        lora_id = 0 if adapter is None else runtime.adapters[adapter].lora_int_id
        load = Load(key, plan, request.token_ids, lora_id, self._layout.num_layers, self._chunk_tokens)
        new_tokens = request.sampling.max_tokens if request.sampling else 1
        capacity = running.prompt + new_tokens
        taps = self._taps_of(request, key, capacity)
        entry = Entry(load, running.prompt, new_tokens, losing(running.space), running, tapped=bool(taps))
        running.begun(entry, plan)
        running.space.key.current = key
        runtime.scheduler.enter(entry, Serve(key, self._layout, taps, capacity, load.later_chunks))
        return key

    def add(self, running: RunningRequest, plan: ReusePlan, key: str) -> str:
        """Hand the request to vLLM; returns vLLM's own name for it. Raises InvalidRequest."""
        from vllm.exceptions import VLLMClientError

        request, model = running.request, self._models[running.request.model]
        adapter = None if model.adapter is None else self._runtime.adapters[model.adapter]
        prompt = {"prompt_token_ids": list(request.token_ids), "cache_salt": self._salt(request, plan, key)}
        try:
            internal_id: str = self._runtime.llm.add_request(
                key, prompt, sampling_params(request, model.eos, key), lora_request=adapter
            )
        except (ValueError, VLLMClientError) as error:
            raise InvalidRequest(str(error)) from error
        return internal_id

    def _taps_of(self, request: EngineRequest, key: str, capacity: int) -> tuple[int, ...]:
        """Layers whose hidden states are kept: those that it asks for, if there is room. An order is asked for nothing else."""
        num_bytes = len(request.taps) * capacity * self._layout.e_block_bytes // self._layout.block_size
        if request.sampling is None or not num_bytes or self._runtime.scheduler.states.take(key, num_bytes):
            return request.taps
        log.info("no room for hidden states", request=request.request_id, bytes=num_bytes)
        return ()

    def _salt(self, request: EngineRequest, plan: ReusePlan, key: str) -> str:
        """Salt of vLLM's prefix cache: the model, how the KV under this plan comes to be, and who may know of it."""
        lineage = self._models[request.model].lineage_id or digest(b"model", self._nonce, request.model.encode())
        parts = [lineage.hex(), provenances(plan, lineage)[-1].key.hex(), request.root.hex()]
        if not request.engine_cache or (request.sampling is None and request.taps):
            # a salt that nobody else has. An order must give the hidden states of what it computes: vLLM's cache has none
            parts.append(key)
        return ".".join(parts)
