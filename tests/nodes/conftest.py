"""The tiny family and the scripted router of the node tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch
from node_harness import Member, ScriptedRouter, scripted_router, tiny_members


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Member]:
    torch.set_num_threads(1)
    return tiny_members(tmp_path_factory.mktemp("models"))


@pytest.fixture
async def router() -> AsyncIterator[ScriptedRouter]:
    async with scripted_router() as router:
        yield router
