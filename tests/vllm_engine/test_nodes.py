"""Prefill and decode nodes on vLLM, and next to nodes on the reference engine: real sockets, a real data plane, honest reports."""

from __future__ import annotations

import contextlib

import pytest
from node_harness import (
    BLOCK,
    Member,
    ScriptedRouter,
    exact_plan,
    greedy,
    partial_plan,
    pulled,
    running,
    until_clean,
)
from vllm_nodes import CONTEXT, TOKENS, assert_same_kv, node_engine

from kvkin.kv.plan import PlanKind, private_plan
from kvkin.kv.provenance import Quality

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


async def test_nodes_on_vllm(members: dict[str, Member], router: ScriptedRouter) -> None:
    """An order on vLLM is pulled, exactly and in part, by vLLM and by the reference engine, which agree; so the other way round."""
    base, tune = members["base"], members["tune"]
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        prefill = await enter(running("prefill", "prefill-v", [base], router, node_engine(base)))
        decode = await enter(running("decode", "decode-v", [tune], router, node_engine(tune)))
        own = await enter(running("decode", "base-v", [base], router, node_engine(base)))
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
            assert_same_kv(decode, block, reference, twin)
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
        await until_clean(router, prefill, decode, own, reference)
