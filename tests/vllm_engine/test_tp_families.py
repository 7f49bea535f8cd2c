"""Two ranks on Qwen2 (biases) and Mixtral (experts): every plan shape."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from check_engine import GEOMETRIES, SHAPES, check_shape
from vllm_bench import Family, SharedEngine, lora_family, plain_family
from vllm_checks import ONE_OF_EACH, check_batch

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

OF_UPPER = ("shared_prefix", "shared_prefix_below_the_split")


@pytest.fixture(scope="module", params=["qwen2", "mixtral"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    root = tmp_path_factory.mktemp("family")
    family: Family = plain_family("mixtral", root) if request.param == "mixtral" else lora_family("qwen2", root)
    engine = SharedEngine(family, tensor_parallel_size=2)
    yield engine
    engine.close()


@pytest.mark.parametrize("shape", SHAPES)
def test_plan_shape(shared: SharedEngine, shape: str) -> None:
    if shape in OF_UPPER and "upper" not in shared.family.members:
        pytest.skip("an engine of full fine-tunes serves one model, and this shape is another's")
    check_shape(shared.make, shared.family.name, shape, GEOMETRIES[:2])


def test_batch(shared: SharedEngine) -> None:
    check_batch(shared, ONE_OF_EACH, 10)
