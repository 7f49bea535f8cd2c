"""vLLM passes the engine contract on a Qwen2 family of LoRA adapters: biases on q, k and v."""

from __future__ import annotations

from collections.abc import Iterator

import check_engine_turns as turns
import pytest
from check_engine import GEOMETRIES, SHAPES, check_shape
from vllm_bench import SharedEngine, lora_family

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    engine = SharedEngine(lora_family("qwen2", tmp_path_factory.mktemp("family")))
    yield engine
    engine.close()


@pytest.mark.parametrize("shape", SHAPES)
def test_plan_shape(qwen2: SharedEngine, shape: str) -> None:
    check_shape(qwen2.make, qwen2.family.name, shape, GEOMETRIES[:2])


def test_a_chain_of_approximations(qwen2: SharedEngine) -> None:
    turns.check_a_chain_of_approximations(qwen2.make, qwen2.family.name)
