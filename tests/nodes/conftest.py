"""The tiny family and the scripted router of the node tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch
import zmq.asyncio
from node_harness import LAYERS, Member, ScriptedRouter, load_member
from tiny_models import make_tiny


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Member]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    paths = {
        name: make_tiny("llama", root / name, seed=seed, num_layers=LAYERS) for name, seed in (("base", 1), ("tune", 2))
    }
    return {name: load_member(name, path, root / "cache") for name, path in paths.items()}


@pytest.fixture
async def router() -> AsyncIterator[ScriptedRouter]:
    context = zmq.asyncio.Context()
    router = ScriptedRouter(context)
    yield router
    await router.close()
    context.destroy(linger=0)
