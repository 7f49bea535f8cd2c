"""A source that is held back, evicted, killed, frozen or replaced costs the request a private prefill at most."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from node_harness import (
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

from kvkin.decode_nodes import node as decode_module
from kvkin.decode_nodes.running import LoopSink
from kvkin.kv.execution import Unit
from kvkin.kv.plan import PlanKind, private_plan
from kvkin.prefill_nodes import node as prefill_module
from kvkin.transport.node_messages import Abort, Done, Failed, Generated, OrderDone, PrefillOrder

TOKENS = tuple(int(t) for t in torch.randint(3, 320, (101,), generator=torch.Generator().manual_seed(6)))
CONTEXT = 96
TESTS = Path(__file__).parent.parent


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> list[Unit]:
    """Every unit that a decode node's engine has computed, in order."""
    seen: list[Unit] = []
    original = LoopSink.unit_done

    def record(self: Any, request_id: str, unit: Unit, space: Any) -> None:
        seen.append(unit)
        original(self, request_id, unit, space)

    monkeypatch.setattr(LoopSink, "unit_done", record)
    return seen


@contextlib.contextmanager
def child_node(role: str, name: str, member: Member, cache: Path, router: str, backend: str) -> Iterator[int]:
    """A node in a process of its own; killed at the end if it still lives."""
    arguments = [role, name, member.name, str(member.path), str(cache), router, backend]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])}
    process = subprocess.Popen([sys.executable, str(TESTS / "node_child.py"), *arguments], env=environment)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait(10)


async def test_held_back_layer_stops_only_what_needs_it(
    members: dict[str, Member], router: ScriptedRouter, units: list[Unit]
) -> None:
    base, tune = members["base"], members["tune"]
    async with contextlib.AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(running("prefill", "prefill-0", [base], router))
        node = await stack.enter_async_context(running("decode", "decode-tune", [tune], router))
        await router.order("prefill-0", "order", "base", TOKENS)
        plan = partial_plan(pulled(base, "prefill-0"), CONTEXT, len(TOKENS), 1, 3)
        expected = await router.execute("decode-tune", "free", "tune", TOKENS, plan, publish=False)
        units.clear()

        node.runtime.transport.hold(LAYERS - 1)
        await router.start("decode-tune", "held", "tune", TOKENS, plan, publish=False)
        await node.runtime.transport.holding.wait()
        await router.until(lambda: len([u for u in units if not u.recompute]) == LAYERS - 1)
        assert not [u for u in units if u.layer == LAYERS - 1]
        assert sorted({u.layer for u in units if u.recompute}) == [1, 2]
        assert sorted(u.layer for u in units if not u.recompute) == list(range(LAYERS - 1))
        assert not router.of(Generated, "held")
        node.runtime.transport.release()
        done = await router.ended("held")
        assert isinstance(done, Done)
        assert done.token_ids == expected.token_ids
        assert not done.report.fallback
        assert done.timings.wait_ms > 0
        await until_clean(router, prefill, node)


async def test_evicted_blocks_and_wrong_lineage_fall_back(members: dict[str, Member], router: ScriptedRouter) -> None:
    base, tune = members["base"], members["tune"]
    async with contextlib.AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(running("prefill", "prefill-0", [base], router))
        node = await stack.enter_async_context(running("decode", "decode-tune", [tune], router))
        expected = greedy(tune, TOKENS, 6)
        plan = partial_plan(pulled(base, "prefill-0"), CONTEXT, len(TOKENS), 1, 3)
        done = await router.execute("decode-tune", "never-there", "tune", TOKENS, plan)
        assert list(done.token_ids) == expected
        assert "not here" in done.report.fallback
        assert (done.report.kind, done.report.planned) == (PlanKind.PRIVATE, PlanKind.PARTIAL)
        # a fallback is exact again, and published as such
        assert all(p.exact for holdings in router.holdings["decode-tune"] for p in holdings.provenances)

        await router.order("prefill-0", "order", "base", TOKENS)
        lie = exact_plan(pulled(base, "prefill-0"), CONTEXT, len(TOKENS))
        done = await router.execute("decode-tune", "lie", "tune", TOKENS, lie, publish=False)
        assert "lineage" in done.report.fallback
        assert list(done.token_ids) == expected

        own = exact_plan(pulled(tune, "decode-tune"), CONTEXT, len(TOKENS))
        node.runtime.store.drop_all()
        done = await router.execute("decode-tune", "own-gone", "tune", TOKENS, own, publish=False)
        assert "evicted" in done.report.fallback
        assert list(done.token_ids) == expected
        assert router.of(Failed, "own-gone") == []
    assert_clean(prefill, node)


@pytest.mark.parametrize("backend", ["tcp", "ucx"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_holder_killed_or_frozen_in_the_middle_of_a_pull(
    members: dict[str, Member], router: ScriptedRouter, backend: str, number: signal.Signals, tmp_path: Path
) -> None:
    base, tune = members["base"], members["tune"]
    node = running("decode", "decode-tune", [tune], router, backend=backend, pull_s=3.0, open_stream_s=3.0)
    async with node as consumer:
        with child_node("prefill", "prefill-0", base, tmp_path, router.address, backend) as pid:
            await router.order("prefill-0", "order", "base", TOKENS)
            consumer.runtime.transport.hold(3)
            plan = partial_plan(pulled(base, "prefill-0"), CONTEXT, len(TOKENS), 1, 3)
            await router.start("decode-tune", "victim", "tune", TOKENS, plan)
            await consumer.runtime.transport.holding.wait()
            os.kill(pid, number)
            done = await router.ended("victim")
            assert isinstance(done, Done)
            assert done.report.fallback
            assert list(done.token_ids) == greedy(tune, TOKENS, 6)
            consumer.runtime.transport.release()
        # a replacement under the same name works at once
        del router.nodes["prefill-0"]
        with child_node("prefill", "prefill-0", base, tmp_path, router.address, backend):
            await router.order("prefill-0", "order-2", "base", TOKENS)
            done = await router.execute("decode-tune", "after", "tune", TOKENS, plan, publish=False)
            assert not done.report.fallback
    assert_clean(consumer)


async def test_cancel_in_each_phase_frees_everything(
    members: dict[str, Member], router: ScriptedRouter, units: list[Unit]
) -> None:
    base, tune = members["base"], members["tune"]
    async with contextlib.AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(running("prefill", "prefill-0", [base], router))
        node = await stack.enter_async_context(running("decode", "decode-tune", [tune], router, max_running=2))
        await router.order("prefill-0", "order", "base", TOKENS)
        plan = partial_plan(pulled(base, "prefill-0"), CONTEXT, len(TOKENS), 1, 3)
        expected = await router.execute("decode-tune", "alone", "tune", TOKENS, plan, publish=False, max_tokens=200)

        node.runtime.transport.hold(3)
        await router.start("decode-tune", "pulling", "tune", TOKENS, plan)
        await node.runtime.transport.holding.wait()
        node.runtime.transport.held_layer = None  # only the first one is held
        # long enough to be there while the next one waits, in a heartbeat, on the fastest machine
        await router.start("decode-tune", "other", "tune", TOKENS, plan, publish=False, max_tokens=200)
        await router.start("decode-tune", "queued", "tune", TOKENS, plan)
        await router.until(lambda: router.load("decode-tune").waiting == 1)
        for name in ("queued", "pulling"):
            await router.send("decode-tune", Abort(name, "test"))
            reply = await router.ended(name)
            assert isinstance(reply, Failed)
            assert reply.code == "cancelled"
        await router.start("decode-tune", "decoding", "tune", TOKENS, plan, max_tokens=200)
        await router.until(lambda: router.of(Generated, "decoding"))
        await router.send("decode-tune", Abort("decoding", "test"))
        await router.send("decode-tune", Abort("decoding", "again"))
        await router.send("decode-tune", Abort("nobody", "unknown ids are ignored"))
        assert isinstance(await router.ended("decoding"), Failed)
        other = await router.ended("other")
        assert isinstance(other, Done)
        assert other.token_ids == expected.token_ids
        node.runtime.transport.release()
        await router.until(lambda: router.load("prefill-0").leases == 0 and not router.load("decode-tune").running)
    assert_clean(prefill, node)


async def test_lack_of_room_is_a_visible_fallback(members: dict[str, Member], router: ScriptedRouter) -> None:
    """The consumer's arena is too small for the context: no scratch, so a private prefill, nothing published beyond it."""
    base = members["base"]
    layout_slots = 3
    async with contextlib.AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(running("prefill", "prefill-0", [base], router))
        small = layout_slots * prefill.settings.layout.kv_slot_bytes
        node = await stack.enter_async_context(running("decode", "decode-base", [base], router, kv_bytes=small))
        await router.order("prefill-0", "order", "base", TOKENS)
        plan = exact_plan(pulled(base, "prefill-0"), CONTEXT, len(TOKENS))
        done = await router.execute("decode-base", "big", "base", TOKENS, plan)
        assert "KV" in done.report.fallback
        assert list(done.token_ids) == greedy(base, TOKENS, 6)
    assert_clean(prefill, node)


async def test_order_aborted_and_impossible_orders(members: dict[str, Member], router: ScriptedRouter) -> None:
    base = members["base"]
    async with contextlib.AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(running("prefill", "prefill-0", [base], router))
        node = await stack.enter_async_context(running("decode", "decode-base", [base], router, order_s=2.0))
        failed = await router.order("prefill-0", "unknown", "tune", TOKENS)
        assert isinstance(failed, Failed)
        huge = tuple(range(3, 300)) * 5
        failed = await router.order("prefill-0", "huge", "base", huge)
        assert failed.code == "capacity"
        assert failed.retryable
        # a consumer that waits for an order that never comes gives up in time
        plan = exact_plan(pulled(base, "prefill-0", "never"), CONTEXT, len(TOKENS))
        done = await router.execute("decode-base", "waiting", "base", TOKENS, plan)
        assert done.report.fallback
        # too short for a block: nothing to keep, nothing wrong
        tiny = await router.order("prefill-0", "tiny", "base", TOKENS[:5])
        assert tiny.computed_tokens == 0
        # aborting what runs ends it for its readers as well
        await router.send("prefill-0", PrefillOrder("gone", "base", huge[:600], ROOT, 30.0))
        await router.send("prefill-0", Abort("gone", "test"))
        await router.until(lambda: router.load("prefill-0").running == 0)
    assert_clean(prefill, node)


# --- faults of the node itself -------------------------------------------------------------------------------------------


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a fault of our own")


@pytest.mark.parametrize("where", ["PlanSources", "fallback_plan", "reuse_report"])
async def test_a_fault_of_a_decode_node_ends_the_request_at_once_and_no_other(
    members: dict[str, Member], router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """When it starts, falls back, or is about to answer: its client hears of it, and the next request is served."""
    base = members["base"]
    async with running("decode", "node", [base], router) as node:
        with monkeypatch.context() as patch:
            patch.setattr(decode_module, where, broken)
            plan = exact_plan(pulled(base, "nobody"), CONTEXT, len(TOKENS))
            await router.start("node", "unlucky", "base", TOKENS, plan)
            failed = await router.ended("unlucky")
        assert isinstance(failed, Failed)
        assert (failed.code, failed.retryable) == ("internal", False)
        assert "a fault of our own" in failed.message
        done = await router.execute("node", "next", "base", TOKENS, private_plan(len(TOKENS)))
        assert list(done.token_ids) == greedy(base, TOKENS, 6)
        await until_clean(router, node)


@pytest.mark.parametrize("where", ["block_hashes", "arrival_from"])
async def test_a_fault_of_a_prefill_node_ends_the_order_and_the_next_one_is_computed(
    members: dict[str, Member], router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Before anything is reserved, and with half of its blocks there and the engine at work."""
    base = members["base"]
    async with running("prefill", "node", [base], router) as node:
        await router.order("node", "first half", "base", TOKENS[: CONTEXT // 2 + 1])
        with monkeypatch.context() as patch:
            patch.setattr(prefill_module, where, broken)
            failed = await router.order("node", "unlucky", "base", TOKENS)
        assert isinstance(failed, Failed)
        assert (failed.code, failed.message) == ("internal", "a fault of our own")
        done = await router.order("node", "next", "base", TOKENS)
        assert isinstance(done, OrderDone)
        assert (done.num_tokens, done.computed_tokens) == (len(TOKENS), CONTEXT // 2)
        await until_clean(router, node)
