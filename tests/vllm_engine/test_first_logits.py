"""The logits processor that keeps a first token's distribution, under vLLM's V2 runner (its default on CUDA), which CPUs do not have.

Under the V1 runner: ``check_engine_drift.py``, in every engine's tests.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.loader import build_custom_logits_processors_params_validator

from kvkin.engines.sampling import log_distribution
from kvkin.engines.vllm.first_logits import PARAMETER, FirstLogits, taken

pytestmark = pytest.mark.vllm

PROMPT = 10


class Runner:
    """Four slots of requests, as the V2 runner has them; those in ``resumed`` go on with tokens of their answer."""

    def __init__(self, resumed: tuple[int, ...] = ()) -> None:
        prefill = np.array([PROMPT + 3 * (slot in resumed) for slot in range(4)])
        self.requests = SimpleNamespace(
            prompt_len=SimpleNamespace(np=np.full(4, PROMPT)), prefill_len=SimpleNamespace(np=prefill)
        )
        self.processor = FirstLogits(None, self.requests)

    def add(self, slot: int, name: str = "") -> bool:
        params = SimpleNamespace(extra_args={PARAMETER: name} if name else None)
        return self.processor.add_request(slot, params)

    def step(self, visible: dict[int, int], seed: int = 0) -> torch.Tensor:
        """Slots in the batch's order, with the tokens that each one's logits have seen."""
        logits = torch.randn((len(visible), 16), generator=torch.Generator().manual_seed(seed))
        given = logits.clone()
        ctx: Any = SimpleNamespace(
            idx_mapping_np=np.array(list(visible)), seq_lens_upper_bound_np=np.array(list(visible.values()))
        )
        assert self.processor.apply(logits, ctx) is logits
        assert torch.equal(logits, given), "it only looks"
        logits.zero_()  # what is kept is not the batch's
        return given


def test_vllm_takes_it() -> None:
    assert issubclass(FirstLogits, LogitsProcessor)
    build_custom_logits_processors_params_validator([FirstLogits])(SimpleNamespace(extra_args=None))  # type: ignore[arg-type]


def test_the_row_of_the_request_is_kept_once() -> None:
    runner = Runner()
    assert not runner.add(1)
    assert runner.add(3, "wanted")
    given = runner.step({1: PROMPT, 3: PROMPT})
    found = taken("wanted")
    assert found is not None
    assert np.array_equal(found, log_distribution(given[1]))
    assert taken("wanted") is None


def test_of_a_prompt_in_pieces_the_last_look_counts_and_of_an_answer_none() -> None:
    runner = Runner()
    runner.add(0, "pieces")
    runner.step({0: 4}, seed=1)
    last = runner.step({0: PROMPT}, seed=2)
    runner.step({0: PROMPT + 1}, seed=3)
    found = taken("pieces")
    assert found is not None
    assert np.array_equal(found, log_distribution(last[0]))


def test_a_request_that_goes_on_after_a_preemption_is_not_looked_at_again() -> None:
    runner = Runner(resumed=(2,))
    runner.add(2, "resumed")
    runner.step({2: 4})
    runner.step({2: PROMPT + 3})
    assert taken("resumed") is None


def test_a_slot_forgets_who_had_it() -> None:
    runner = Runner()
    runner.add(0, "before")
    runner.add(0)
    runner.step({0: PROMPT})
    assert taken("before") is None
