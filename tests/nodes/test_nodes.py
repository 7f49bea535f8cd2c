"""Prefill and decode nodes with real sockets and a real data plane: every plan shape, publication, honest reports."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from node_harness import (
    BLOCK,
    LAYERS,
    ROOT,
    Member,
    ScriptedRouter,
    assert_clean,
    exact_plan,
    greedy,
    partial_plan,
    pulled,
    running,
    until_clean,
)

from kvkin.decode_nodes.node import DecodeNode
from kvkin.engines.api import Counters
from kvkin.kv.cost import CostSettings, prefill_work
from kvkin.kv.hashing import block_hashes
from kvkin.kv.plan import Holder, LayerGroup, LayerSource, PlanKind, ReusePlan, Segment, private_plan, provenances
from kvkin.kv.provenance import Provenance, Quality
from kvkin.prefill_nodes.node import PrefillNode
from kvkin.transport.node_messages import Done, Generated, OrderDone, PrefillOrder

TOKENS = tuple(int(t) for t in torch.randint(3, 320, (101,), generator=torch.Generator().manual_seed(5)))
CONTEXT = 96


@pytest.mark.parametrize("backend", ["tcp", "ucx"])
async def test_private_order_exact_and_partial(
    members: dict[str, Member], router: ScriptedRouter, backend: str
) -> None:
    base, tune = members["base"], members["tune"]
    async with contextlib.AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(running("prefill", "prefill-0", [base], router, backend=backend))
        node = await stack.enter_async_context(running("decode", "decode-base", [base], router, backend=backend))
        other = await stack.enter_async_context(running("decode", "decode-tune", [tune], router, backend=backend))

        private = private_plan(len(TOKENS))
        done = await router.execute("decode-base", "private", "base", TOKENS, private, publish=False)
        expected = greedy(base, TOKENS, 6)
        assert list(done.token_ids) == expected
        assert done.report.kind is PlanKind.PRIVATE
        assert done.report.bytes_pulled == 0
        assert len(node.runtime.store) == 0

        order = await router.order("prefill-0", "order-1", "base", TOKENS)
        assert (order.num_tokens, order.computed_tokens) == (len(TOKENS), CONTEXT)
        again = await router.order("prefill-0", "order-2", "base", TOKENS)
        assert again.computed_tokens == 0

        plan = exact_plan(pulled(base, "prefill-0"), CONTEXT, len(TOKENS))
        done = await router.execute("decode-base", "exact", "base", TOKENS, plan)
        assert list(done.token_ids) == expected
        assert done.report.quality is Quality.EXACT
        assert done.report.bytes_pulled == CONTEXT // BLOCK * prefill.settings.layout.kv_slot_bytes
        assert done.report.bytes_pulled == node.runtime.transport.pulled_bytes
        assert (done.report.tokens_reused, done.report.layers_recomputed) == (CONTEXT, 0)
        counted = (done.report.tokens_cached, done.report.tokens_loaded, done.report.tokens_computed)
        assert counted == (0, CONTEXT, len(TOKENS) - CONTEXT)

        plan = partial_plan(pulled(base, "prefill-0"), CONTEXT, len(TOKENS), 1, 3)
        done = await router.execute("decode-tune", "partial", "tune", TOKENS, plan)
        assert done.report.quality is Quality.UNPROFILED
        assert done.report.layers_recomputed == 2
        layout = prefill.settings.layout
        assert done.report.bytes_pulled == CONTEXT // BLOCK * (2 * layout.kv_block_bytes + layout.e_block_bytes)
        assert done.report.bytes_pulled == other.runtime.transport.pulled_bytes

        full = partial_plan(pulled(base, "prefill-0"), CONTEXT, len(TOKENS), 0, LAYERS - 1)
        done = await router.execute("decode-tune", "most", "tune", TOKENS, full, publish=False)
        assert done.report.layers_recomputed == LAYERS - 1

        await until_clean(router, prefill, node, other)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_rate_that_a_node_reports_counts_how_far_tokens_attend(
    members: dict[str, Member], router: ScriptedRouter, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, half, counted = members["base"], 2.0, list[Counters]()
    kind, method = (PrefillNode, "ended") if role == "prefill" else (DecodeNode, "_measure")
    original = getattr(kind, method)

    def noting(self: Any, *arguments: Any) -> Any:
        counted.extend(each for each in arguments if isinstance(each, Counters))
        return original(self, *arguments)

    monkeypatch.setattr(kind, method, noting)
    async with running(role, "node", [base], router, context_half_tokens=half) as node:
        if role == "prefill":
            await router.order("node", "order", "base", TOKENS)
        else:
            await router.execute("node", "request", "base", TOKENS, private_plan(len(TOKENS)))
        (counters,) = counted
        tokens = CONTEXT if role == "prefill" else len(TOKENS)
        assert counters.computed_layer_tokens == tokens * LAYERS
        assert counters.computed_positions == sum(range(tokens)) * LAYERS
        work = prefill_work(tokens, 0, LAYERS, CostSettings(context_half_tokens=half))
        seconds = counters.recompute_s + counters.suffix_s
        assert node.load().prefill_layer_tokens_per_s == pytest.approx(work / seconds, rel=0.02)


async def test_next_turn_hits_own_blocks_and_other_agent_gets_them(
    members: dict[str, Member], router: ScriptedRouter
) -> None:
    base, tune = members["base"], members["tune"]
    async with contextlib.AsyncExitStack() as stack:
        node = await stack.enter_async_context(running("decode", "decode-base", [base], router))
        other = await stack.enter_async_context(running("decode", "decode-tune", [tune], router))
        first = await router.execute("decode-base", "turn-1", "base", TOKENS, private_plan(len(TOKENS)), max_tokens=20)
        published = (*TOKENS, *first.token_ids[:-1])
        whole = len(published) // BLOCK * BLOCK
        held = {h.block: h for holdings in router.holdings["decode-base"] for h in holdings.added}
        hashes = block_hashes(published, ROOT, BLOCK)
        assert [held[block].kv_layers for block in hashes] == [LAYERS] * len(hashes)
        # E at both transition layers, tapped in prefill and decode alike
        assert [held[block].e_layers for block in hashes] == [(1, 2)] * len(hashes)
        assert {p.exact for holdings in router.holdings["decode-base"] for p in holdings.provenances} == {True}

        turn = (*TOKENS, *first.token_ids, 7, 8, 9)
        second = await router.execute(
            "decode-base", "turn-2", "base", turn, exact_plan(pulled(base, "decode-base"), whole, len(turn))
        )
        assert list(second.token_ids) == greedy(base, turn, 6)
        assert second.report.bytes_pulled == 0
        assert second.report.tokens_reused == whole
        assert second.report.sources == ("decode-base",)

        plan = partial_plan(pulled(base, "decode-base"), whole, len(turn), 2, LAYERS)
        handed = await router.execute("decode-tune", "hand-over", "tune", turn, plan)
        assert handed.report.kind is PlanKind.PARTIAL
        assert handed.report.layers_recomputed == 2
        # what the receiver publishes is tainted, the computed tail included
        tainted = [p for holdings in router.holdings["decode-tune"] for p in holdings.provenances]
        assert tainted
        assert not any(p.exact for p in tainted)

        # its own tainted blocks come back as they are: nothing moves, the quality is inherited
        segments, before = plan.segments, provenances(plan, tune.lineage.id)
        own = tuple(
            Segment(s.start, s.stop // BLOCK * BLOCK, _own(p, "decode-tune"), kind=PlanKind.EXACT)
            for s, p in zip(segments, before, strict=True)
            if s.stop // BLOCK * BLOCK > s.start
        )
        end = own[-1].stop
        again = await router.execute(
            "decode-tune", "again", "tune", turn, ReusePlan((*own, Segment(end, len(turn)))), publish=False
        )
        assert again.token_ids == handed.token_ids
        assert again.report.quality is Quality.UNPROFILED
        assert again.report.bytes_pulled == 0
    assert_clean(node, other)


def _own(provenance: Provenance, node: str) -> tuple[LayerSource, ...]:
    return (LayerSource(LayerGroup(0, LAYERS), Holder(node, provenance)),)


async def test_live_order_is_pulled_while_it_is_computed(members: dict[str, Member], router: ScriptedRouter) -> None:
    """The stream is opened before the order even arrives; layers come as they are announced."""
    base, tune = members["base"], members["tune"]
    async with contextlib.AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(running("prefill", "prefill-0", [base], router))
        node = await stack.enter_async_context(running("decode", "decode-base", [base], router))
        other = await stack.enter_async_context(running("decode", "decode-tune", [tune], router))
        exact = exact_plan(pulled(base, "prefill-0", "order-9"), CONTEXT, len(TOKENS))
        partial = partial_plan(pulled(base, "prefill-0", "order-9"), CONTEXT, len(TOKENS), 1, 3)
        await router.start("decode-base", "live", "base", TOKENS, exact)
        await router.start("decode-tune", "live-partial", "tune", TOKENS, partial)
        await router.until(lambda: router.load("decode-tune").running == 1)
        await router.send("prefill-0", PrefillOrder("order-9", "base", TOKENS, ROOT, 30.0))
        await router.send("prefill-0", PrefillOrder("order-10", "base", TOKENS, ROOT, 30.0))
        done, approximate = await router.ended("live"), await router.ended("live-partial")
        assert list(done.token_ids) == greedy(base, TOKENS, 6)
        assert not done.report.fallback
        assert not approximate.report.fallback
        orders = await router.until(lambda: len(router.messages) and router.of(OrderDone, "order-10"))
        assert orders[0].computed_tokens in (0, CONTEXT)
        await until_clean(router, prefill, node, other)


async def test_a_stopping_node_finishes_what_runs(members: dict[str, Member], router: ScriptedRouter) -> None:
    base = members["base"]
    async with running("decode", "decode-base", [base], router) as node:
        await router.start("decode-base", "long", "base", TOKENS, private_plan(len(TOKENS)), max_tokens=60)
        await router.until(lambda: router.of(Generated, "long"))
        assert not router.of(Done, "long")
    assert len((await router.ended("long")).token_ids) == 60
    assert_clean(node)
