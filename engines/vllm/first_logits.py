"""The first generated token's whole distribution, as the model has it: a vLLM logits processor that only looks.

vLLM calls it with the logits of the batch before temperature and filters. Log probabilities by ``SamplingParams.logprobs`` would
make one Python object for every word of the vocabulary and every token. vLLM has two model runners with an interface each: the V1 runner
(on CPUs), which says what changed in the batch, and V2 (its default on CUDA), which says where each request is. One class serves both,
because the engine's arguments are made before vLLM chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

from kvkin.engines.sampling import log_distribution

PARAMETER = "kvkin_first"
"""Key in ``extra_args`` of the requests that want it; the value is the name under which it is kept."""

_kept: dict[str, Callable[[], NDArray[np.float32]]] = {}


def taken(name: str) -> NDArray[np.float32] | None:
    """Natural log probabilities (vocab,) that are kept under ``name``, each once; None if there are none."""
    found = _kept.pop(name, None)
    return None if found is None else found()


class FirstLogits(LogitsProcessor, LogitsProcessorV2):
    """``requests``: the device (V1), or the runner's table of requests (V2)."""

    def __init__(self, vllm_config: Any, requests: Any, is_pin_memory: bool = False) -> None:
        self._requests = requests
        self._wanted: dict[int, tuple[str, list[int]]] = {}  # V1: row -> name, tokens so far
        self._names: dict[int, str] = {}  # V2: slot of a request in the runner's table -> name

    def is_argmax_invariant(self) -> bool:
        return False  # greedy requests are looked at as well

    # --- V1 ----------------------------------------------------------------------------------------------------------------

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._wanted.pop(index, None)
        for index, params, _, output_ids in batch_update.added:
            self._wanted.pop(index, None)
            name = _name_in(params)
            if name:
                self._wanted[index] = (name, output_ids)
        for source, target, direction in batch_update.moved:
            moved, back = self._wanted.pop(source, None), self._wanted.pop(target, None)
            if moved is not None:
                self._wanted[target] = moved
            if back is not None and direction is MoveDirectionality.SWAP:
                self._wanted[source] = back

    # --- V2 ----------------------------------------------------------------------------------------------------------------

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Whether this processor is to see the request."""
        self._names.pop(req_idx, None)
        name = _name_in(sampling_params)
        if name:
            self._names[req_idx] = name
        return bool(name)

    # --- both --------------------------------------------------------------------------------------------------------------

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        # of a prompt in pieces the last look counts
        if ctx is None:
            for index, (name, output_ids) in self._wanted.items():
                if not output_ids:
                    _kept[name] = _look(logits[index])
        elif self._names:
            # without speculation each request of the batch has one row of logits, in their order
            prompt, prefill = self._requests.prompt_len.np, self._requests.prefill_len.np
            for row, slot in enumerate(ctx.idx_mapping_np.tolist()):
                name = self._names.get(slot, "")
                # taken up again after a preemption, tokens of its answer are prefilled as well
                first = prefill[slot] == prompt[slot] and ctx.seq_lens_upper_bound_np[row] <= prompt[slot]
                if name and first:
                    _kept[name] = _look(logits[row])
        return logits


def _name_in(params: Any) -> str:
    name: str = (params.extra_args or {}).get(PARAMETER, "")
    return name


def _look(row: Tensor) -> Callable[[], NDArray[np.float32]]:
    """Logits (vocab,) as they are now -> what gives their log probabilities. Does not wait for a device."""
    if row.device.type == "cpu":
        found = log_distribution(row)
        return lambda: found
    staged = torch.empty(row.shape, dtype=row.dtype, device="cpu", pin_memory=True)
    staged.copy_(row, non_blocking=True)
    arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch has no types there
    arrived.record()

    def wait() -> NDArray[np.float32]:
        arrived.synchronize()
        return log_distribution(staged)

    return wait
