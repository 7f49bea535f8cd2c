"""The wide tiny family and the scripted router of the tests of nodes on vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from node_harness import Member, ScriptedRouter, scripted_router, tiny_members


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Member]:
    from vllm_bench import WIDE

    return tiny_members(tmp_path_factory.mktemp("models"), **WIDE)


@pytest.fixture
async def router() -> AsyncIterator[ScriptedRouter]:
    async with scripted_router() as router:
        yield router
