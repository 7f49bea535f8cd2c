"""The first generated token's whole distribution, as the model has it: a vLLM logits processor that only looks.

vLLM calls it with the logits of the batch before temperature and filters. Log probabilities by ``SamplingParams.logprobs`` would
make one Python object for every word of the vocabulary and every token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

from kvkin.engines.sampling import log_distribution

PARAMETER = "kvkin_first"
"""Key in ``extra_args`` of the requests that want it; the value is the name under which it is kept."""

kept: dict[str, NDArray[np.float32]] = {}
"""Natural log probabilities (vocab,) by name, until the engine takes them."""


class FirstLogits(LogitsProcessor):
    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._wanted: dict[int, tuple[str, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False  # greedy requests are looked at as well

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._wanted.pop(index, None)
        for index, params, _, output_ids in batch_update.added:
            self._wanted.pop(index, None)
            name = (params.extra_args or {}).get(PARAMETER)
            if name:
                self._wanted[index] = (name, output_ids)
        for source, target, direction in batch_update.moved:
            moved, back = self._wanted.pop(source, None), self._wanted.pop(target, None)
            if moved is not None:
                self._wanted[target] = moved
            if back is not None and direction is MoveDirectionality.SWAP:
                self._wanted[source] = back

    def apply(self, logits: Tensor) -> Tensor:
        for index, (name, output_ids) in self._wanted.items():
            # of a prompt in pieces the last look counts
            if not output_ids:
                kept[name] = log_distribution(logits[index])
        return logits
