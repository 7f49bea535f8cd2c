"""vLLM passes the engine contract on Mixtral: experts; one model an engine.

In a module of its own: vLLM sets up its groups of ranks once a process, and those of a dense model have none for experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import check_engine_drift as drift
import check_engine_steps as steps
import pytest
from check_engine import GEOMETRIES, SHAPES, Tally, check_shape, run_tiny
from check_engine_steps import PARTIAL, TOTAL
from engine_harness import computed, greedy, plan_of
from vllm_bench import SharedEngine, plain_family
from vllm_checks import ONE_OF_EACH, check_batch

pytestmark = pytest.mark.vllm

OF_UPPER = ("shared_prefix", "shared_prefix_below_the_split")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    engine = SharedEngine(plain_family("mixtral", tmp_path_factory.mktemp("family")))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def mixtral_upper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    engine = SharedEngine(plain_family("mixtral", tmp_path_factory.mktemp("family"), ("upper",)))
    yield engine
    engine.close()


@pytest.mark.parametrize("shape", [name for name in SHAPES if name not in OF_UPPER])
def test_mixtral(mixtral: SharedEngine, shape: str) -> None:
    check_shape(mixtral.make, mixtral.family.name, shape, GEOMETRIES[:2])


@pytest.mark.parametrize("shape", OF_UPPER)
def test_mixtral_shared_prefix(mixtral_upper: SharedEngine, shape: str) -> None:
    """Experts of single layers are called out of their order: each by its name, also next to another engine's."""
    tally = Tally()
    for seed, geometry in enumerate(GEOMETRIES[:2]):
        run_tiny(mixtral_upper.make, mixtral_upper.family.name, shape, geometry, tally, seed)
    tally.close()


def test_mixtral_batch(mixtral: SharedEngine) -> None:
    """Decodes, a private prefill and recomputes of different groups at once."""
    check_batch(mixtral, {**ONE_OF_EACH, "private": plan_of(computed(0, TOTAL))}, 20)


def test_mixtral_prefill_order(mixtral: SharedEngine) -> None:
    steps.check_prefill_order(mixtral.make, mixtral.family.name, chunk_by_chunk=False)


def test_mixtral_first_distribution(mixtral: SharedEngine) -> None:
    drift.check_first_distribution(mixtral.make, mixtral.family.name, PARTIAL, greedy(3))
