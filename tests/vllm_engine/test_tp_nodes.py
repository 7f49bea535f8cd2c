"""Nodes of two ranks next to nodes of one and to the reference engine: real sockets, ranks that map the node's arena."""

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
from vllm_bench import still_running, worker_processes
from vllm_nodes import CONTEXT, TOKENS, assert_same_kv, node_engine

from kvkin.kv.plan import PlanKind, private_plan
from kvkin.transport.node_messages import Failed, Generated

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


async def test_nodes_of_two_ranks(members: dict[str, Member], router: ScriptedRouter) -> None:
    """An order on two ranks is pulled by the reference engine, and one of the reference engine by two ranks, exactly and in part."""
    base, tune = members["base"], members["tune"]
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        prefill = await enter(
            running("prefill", "prefill-v", [base], router, node_engine(base, tensor_parallel_size=2))
        )
        decode = await enter(running("decode", "decode-v", [tune], router, node_engine(tune, tensor_parallel_size=2)))
        other = await enter(running("prefill", "prefill-r", [base], router))
        own = await enter(running("decode", "base-r", [base], router))
        reference = await enter(running("decode", "decode-r", [tune], router))

        order = await router.order("prefill-v", "order-1", "base", TOKENS)
        assert (order.num_tokens, order.computed_tokens) == (len(TOKENS), CONTEXT)
        await router.order("prefill-r", "order-2", "base", TOKENS)
        for block in other.runtime.store.blocks():
            twin = prefill.runtime.store.get(*block.key)
            assert twin is not None
            assert set(twin.e_slots) == set(block.e_slots) == {1, 2}
            assert_same_kv(prefill, twin, other, block)
            for layer, slot in block.e_slots.items():
                theirs = other.runtime.memory.arena.e_block(slot).view("float32")
                ours = prefill.runtime.memory.arena.e_block(twin.e_slots[layer]).view("float32")
                assert abs(ours - theirs).max() <= 1e-4 * max(1.0, abs(theirs).max())

        plan = exact_plan(pulled(base, "prefill-v"), CONTEXT, len(TOKENS))
        done = await router.execute("base-r", "exact", "base", TOKENS, plan)
        assert list(done.token_ids) == greedy(base, TOKENS, 6)

        plan = partial_plan(pulled(base, "prefill-r"), CONTEXT, len(TOKENS), 1, 3)
        done = await router.execute("decode-v", "partial-v", "tune", TOKENS, plan)
        wanted = await router.execute("decode-r", "partial-r", "tune", TOKENS, plan)
        assert done.token_ids == wanted.token_ids
        assert done.report.kind is PlanKind.PARTIAL
        assert not done.report.fallback
        assert done.report.layers_recomputed == 2
        layout = prefill.settings.layout
        assert done.report.bytes_pulled == CONTEXT // BLOCK * (2 * layout.kv_block_bytes + layout.e_block_bytes)
        assert len(decode.runtime.store) == (len(TOKENS) + 5) // BLOCK
        for block in decode.runtime.store.blocks():
            twin = reference.runtime.store.get(*block.key)
            assert twin is not None
            assert_same_kv(decode, block, reference, twin)

        # its own blocks, and those of the other node of two ranks
        again = await router.execute("decode-v", "again", "tune", TOKENS, private_plan(len(TOKENS)), publish=False)
        assert list(again.token_ids) == greedy(tune, TOKENS, 6)
        plan = partial_plan(pulled(base, "prefill-v"), CONTEXT, len(TOKENS), 1, 3)
        both = await router.execute("decode-v", "both", "tune", TOKENS, plan, publish=False)
        assert both.token_ids == wanted.token_ids
        gone = partial_plan(pulled(base, "nobody"), CONTEXT, len(TOKENS), 1, 3)
        lost = await router.execute("decode-v", "lost", "tune", TOKENS, gone, publish=False)
        assert list(lost.token_ids) == greedy(tune, TOKENS, 6)
        assert lost.report.fallback
        await until_clean(router, prefill, decode, own, reference)


async def test_a_node_whose_rank_is_killed_ends_its_requests(
    members: dict[str, Member], router: ScriptedRouter
) -> None:
    base = members["base"]
    engine = node_engine(base, tensor_parallel_size=2)
    processes = worker_processes(engine._runtime)
    async with running("decode", "decode-v", [base], router, engine):
        await router.start("decode-v", "r", "base", TOKENS, private_plan(len(TOKENS)), max_tokens=300)
        await router.until(lambda: router.of(Generated, "r"))
        processes[1].kill()
        ended = await router.ended("r")
        assert isinstance(ended, Failed)
        assert ended.retryable
        assert engine.failure.done(), "by which its process ends (kvkin decode: exit code 1)"
    assert not still_running(processes)
