"""Publication where the engine cannot give what it computed: the answer comes all the same, and nothing half copied is offered to others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import structlog
import torch
from node_harness import (
    BLOCK,
    LAYERS,
    ROOT,
    Member,
    ScriptedRouter,
    exact_plan,
    greedy,
    partial_plan,
    pulled,
    running,
    until_clean,
)

from kvkin.decode_nodes import publication
from kvkin.kv.hashing import block_hashes
from kvkin.kv.plan import Holder, LayerGroup, LayerSource, PlanKind, ReusePlan, Segment, private_plan, provenances

TOKENS = tuple(int(t) for t in torch.randint(3, 320, (101,), generator=torch.Generator().manual_seed(5)))
CONTEXT = 96
SAID = "blocks are not published: they could not be copied"


def failing(patch: pytest.MonkeyPatch, what: str, fails: Callable[[int], bool]) -> list[int]:
    """Have copies (``store_layer`` or ``store_states``) fail by their number, after half of the bytes; which numbers there were."""
    original = getattr(publication, what)
    numbers: list[int] = []

    def copy(arena: Any, space: Any, layer: int, first_token: int, slots: Any) -> None:
        numbers.append(len(numbers))
        original(arena, space, layer, first_token, slots)
        if fails(numbers[-1]):
            half = arena.kv_block(layer, slots[0]) if what == "store_layer" else arena.e_block(slots[0])
            half[: half.nbytes // 2] = 255
            raise OSError("a copy engine is lost")

    patch.setattr(publication, what, copy)
    return numbers


def held(router: ScriptedRouter, node: str) -> list[bytes]:
    return [holding.block for part in router.holdings[node] for holding in part.added]


@pytest.mark.parametrize("what", ["store_layer", "store_states"])
async def test_the_answer_comes_and_nothing_is_announced(
    members: dict[str, Member], router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    base = members["base"]
    failing(monkeypatch, what, lambda number: True)
    with structlog.testing.capture_logs() as events:
        async with running("decode", "decode", [base], router) as node:
            done = await router.execute("decode", "r", "base", TOKENS, private_plan(len(TOKENS)))
            assert list(done.token_ids) == greedy(base, TOKENS, 6)
            assert len(node.runtime.store) == 0
            assert node.core.finished == 1
            assert node.core.failed == 0
            await until_clean(router, node)
    said = [event for event in events if event["event"] == SAID]
    assert [(one["log_level"], one["blocks"]) for one in said] == [("error", CONTEXT // BLOCK)] * 2
    assert "a copy engine is lost" in said[0]["error"]
    assert not held(router, "decode")


@pytest.mark.parametrize("shape", ["private", "exact", "partial"])
async def test_what_failed_at_the_prompts_end_is_published_at_the_answers(
    members: dict[str, Member], router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    """Whole and right, what was pulled as well: another node goes on with it."""
    base, tune = members["base"], members["tune"]
    asked = tune if shape == "partial" else base
    tokens = (*TOKENS, *TOKENS[:BLOCK])
    plans: dict[str, ReusePlan] = {
        "private": private_plan(len(tokens)),
        "exact": exact_plan(pulled(base, "prefill"), CONTEXT, len(tokens)),
        "partial": partial_plan(pulled(base, "prefill"), CONTEXT, len(tokens), 1, 3),
    }
    async with contextlib.AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(running("prefill", "prefill", [base], router))
        first = await stack.enter_async_context(running("decode", "first", [asked], router))
        second = await stack.enter_async_context(running("decode", "second", [asked], router))
        await router.order("prefill", "order", "base", TOKENS)
        numbers = failing(monkeypatch, "store_layer", lambda number: number == 1)
        done = await router.execute("first", "r", asked.name, tokens, plans[shape])
        assert len(numbers) > 2, "nothing was tried again"
        assert done.report.fallback == ""
        assert held(router, "first") == block_hashes(tokens, ROOT, BLOCK)

        made = provenances(plans[shape], asked.lineage.id)[0]
        whole = LayerSource(LayerGroup(0, LAYERS), Holder("first", made))
        again = ReusePlan((Segment(0, CONTEXT, (whole,), kind=PlanKind.EXACT), Segment(CONTEXT, len(tokens))))
        reused = await router.execute("second", "s", asked.name, tokens, again)
        assert reused.token_ids == done.token_ids
        assert reused.report.tokens_reused == CONTEXT
        await until_clean(router, prefill, first, second)
