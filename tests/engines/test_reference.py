"""The reference engine passes the engine contract on tiny models of every architecture."""

from __future__ import annotations

import pytest
from check_engine import GEOMETRIES, SHAPES, check_shape
from engine_harness import VARIANTS
from reference_bench import make_reference
from tiny_models import ARCHITECTURES


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_plan_shape(arch: str, shape: str) -> None:
    # the geometry is the executor's business, not the architecture's: two of them see every one
    check_shape(make_reference, arch, shape, GEOMETRIES if arch in ("llama", "mistral") else GEOMETRIES[:2])


@pytest.mark.parametrize("shape", ["private", "partial_middle", "agent_turn"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_windows_of_single_layers(variant: str, shape: str) -> None:
    check_shape(make_reference, variant, shape)
