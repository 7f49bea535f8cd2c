"""The reference engine over several turns: the third part of the engine contract."""

from __future__ import annotations

import check_engine_turns as turns
import pytest
from reference_bench import make_reference
from tiny_models import ARCHITECTURES


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_three_turns_of_two_agents(arch: str) -> None:
    turns.check_three_turns_of_two_agents(make_reference, arch)


def test_exact_turns_equal_one_prefill() -> None:
    turns.check_exact_turns_equal_one_prefill(make_reference, "mistral")


@pytest.mark.parametrize("arch", ["llama", "mistral"])
def test_a_chain_of_approximations(arch: str) -> None:
    turns.check_a_chain_of_approximations(make_reference, arch)
