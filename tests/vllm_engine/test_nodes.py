"""Prefill and decode nodes on vLLM, and next to nodes on the reference engine: real sockets, a real data plane, honest reports."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
import torch
import zmq.asyncio
from node_harness import (
    BLOCK,
    CHUNK,
    LAYERS,
    Member,
    ScriptedRouter,
    assert_clean,
    exact_plan,
    greedy,
    load_member,
    partial_plan,
    pulled,
    running,
)
from tiny_models import make_tiny
from vllm_bench import OPTIONS, WIDE

from kvkin.engines.vllm.engine import VllmEngine, VllmModel
from kvkin.kv.plan import PlanKind, private_plan
from kvkin.kv.provenance import Quality

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

TOKENS = tuple(int(t) for t in torch.randint(3, 320, (101,), generator=torch.Generator().manual_seed(5)))
CONTEXT = 96


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Member]:
    root = tmp_path_factory.mktemp("models")
    paths = {
        name: make_tiny("llama", root / name, seed=seed, num_layers=LAYERS, **WIDE)
        for name, seed in (("base", 1), ("tune", 2))
    }
    return {name: load_member(name, path, root / "cache") for name, path in paths.items()}


@pytest.fixture
async def router() -> AsyncIterator[ScriptedRouter]:
    context = zmq.asyncio.Context()
    router = ScriptedRouter(context)
    yield router
    await router.close()
    context.destroy(linger=0)


@pytest.fixture
def on_vllm() -> Callable[[Member], VllmEngine]:
    """Engines that own their vLLM and run on their own threads, several in this process. The nodes close them."""

    def make(member: Member) -> VllmEngine:
        model = VllmModel(member.path, None, None, frozenset(), member.lineage.id)
        return VllmEngine(
            {member.name: model},
            block_size=BLOCK,
            chunk_tokens=CHUNK,
            transition_layers=(1, 2),
            options=OPTIONS | {"enable_prefix_caching": True},
        )

    return make


async def test_nodes_on_vllm(
    members: dict[str, Member], router: ScriptedRouter, on_vllm: Callable[[Member], VllmEngine]
) -> None:
    """An order on vLLM is pulled, exactly and in part, by vLLM and by the reference engine, which agree; so the other way round."""
    base, tune = members["base"], members["tune"]
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        prefill = await enter(running("prefill", "prefill-v", [base], router, on_vllm(base)))
        decode = await enter(running("decode", "decode-v", [tune], router, on_vllm(tune)))
        own = await enter(running("decode", "base-v", [base], router, on_vllm(base)))
        reference = await enter(running("decode", "decode-r", [tune], router))

        order = await router.order("prefill-v", "order-1", "base", TOKENS)
        assert (order.num_tokens, order.computed_tokens) == (len(TOKENS), CONTEXT)
        again = await router.order("prefill-v", "order-2", "base", TOKENS)
        assert again.computed_tokens == 0
        assert len(prefill.runtime.store) == CONTEXT // BLOCK

        plan = exact_plan(pulled(base, "prefill-v"), CONTEXT, len(TOKENS))
        done = await router.execute("base-v", "exact", "base", TOKENS, plan)
        assert list(done.token_ids) == greedy(base, TOKENS, 6)
        assert done.report.quality is Quality.EXACT
        assert (done.report.tokens_reused, done.report.layers_recomputed) == (CONTEXT, 0)
        assert len(own.runtime.store) == (len(TOKENS) + 5) // BLOCK

        plan = partial_plan(pulled(base, "prefill-v"), CONTEXT, len(TOKENS), 1, 3)
        done = await router.execute("decode-v", "partial-v", "tune", TOKENS, plan)
        wanted = await router.execute("decode-r", "partial-r", "tune", TOKENS, plan)
        assert done.token_ids == wanted.token_ids
        assert done.report.kind is PlanKind.PARTIAL
        assert done.report.quality is Quality.UNPROFILED
        assert done.report.layers_recomputed == 2
        layout = prefill.settings.layout
        assert done.report.bytes_pulled == CONTEXT // BLOCK * (2 * layout.kv_block_bytes + layout.e_block_bytes)

        # what both published is the same, block by block and layer by layer
        for block in decode.runtime.store.blocks():
            twin = reference.runtime.store.get(*block.key)
            assert twin is not None
            for layer in range(LAYERS):
                ours = decode.runtime.memory.arena.kv_block(layer, block.slot).view("float32")
                theirs = reference.runtime.memory.arena.kv_block(layer, twin.slot).view("float32")
                assert abs(ours - theirs).max() <= 1e-4 * max(1.0, abs(theirs).max())
            assert set(block.e_slots) <= set(twin.e_slots)

        # a lost source: a private prefill on vLLM, told as such
        gone = partial_plan(pulled(base, "nobody"), CONTEXT, len(TOKENS), 1, 3)
        done = await router.execute("decode-v", "lost", "tune", TOKENS, gone, publish=False)
        assert list(done.token_ids) == greedy(tune, TOKENS, 6)
        assert done.report.kind is PlanKind.PRIVATE
        assert done.report.fallback

        private = private_plan(len(TOKENS))
        done = await router.execute("decode-v", "private", "tune", TOKENS, private, publish=False)
        assert list(done.token_ids) == greedy(tune, TOKENS, 6)
        await router.until(lambda: router.load("prefill-v").leases == 0)
        assert_clean(prefill, decode, own, reference)
