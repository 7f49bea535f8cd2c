"""Chats over several turns with the real policy: what a node published is planned into the next turn."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from mock_node import BLOCK_SIZE, EOS_ID, MockNode, make_settings, until

from kvkin.kv.plan import PlanKind
from kvkin.router.node import RouterNode
from kvkin.router.settings import RouterSettings
from kvkin.transport.client import AsyncClient
from kvkin.transport.node_messages import Execute


@pytest.fixture
def settings(tmp_path: Path) -> RouterSettings:
    settings = make_settings(tmp_path)
    # contexts of a test are short, and it is not about when reuse pays
    policy = msgspec.structs.replace(settings.policy, min_pull_tokens=0, min_order_tokens=10_000, beta=0.0)
    return msgspec.structs.replace(settings, policy=policy)


@pytest.fixture
async def router(settings: RouterSettings) -> AsyncIterator[RouterNode]:
    async with RouterNode(settings) as router:
        yield router


async def test_every_full_block_of_the_earlier_turns_is_planned_for_reuse(router: RouterNode) -> None:
    letters = router._workers._builders["base"]._tokenizer.token_to_id
    async with (
        MockNode(router.node_address, "d0", text="the answer") as node,
        AsyncClient(router.client_address) as client,
    ):
        node.publishing = True
        # spelled letter by letter, as no tokenizer would: found again only if the router remembers the ids
        node.answer = (*(letters("Ġ" if char == " " else char) for char in "the answer"), EOS_ID)
        messages = [("user", "the first question, and a long one")]
        context = 0
        for turn in range(3):
            await client.generate("base", messages=messages)
            execute = [one for one in node.received if isinstance(one, Execute)][-1]
            assert execute.plan.reused_tokens == context // BLOCK_SIZE * BLOCK_SIZE
            assert execute.plan.kind is (PlanKind.EXACT if turn else PlanKind.PRIVATE)
            context = len(execute.token_ids) + len(node.answer) - 1
            messages += [("assistant", "the answer"), ("user", f"question {turn}")]


async def test_another_models_exact_blocks_are_not_taken_for_ones_own(router: RouterNode) -> None:
    async with (
        MockNode(router.node_address, "d0", models=["base"]) as base,
        MockNode(router.node_address, "d1", models=["tuned"]) as tuned,
        AsyncClient(router.client_address) as client,
    ):
        base.publishing = True
        await client.generate("base", messages=[("user", "the same question")], reuse="any")
        await client.generate("tuned", messages=[("user", "the same question")], reuse="exact")
        assert (await tuned.expect(Execute)).plan.kind is PlanKind.PRIVATE


async def test_reuse_off_is_private_and_publish_off_leaves_nothing(router: RouterNode) -> None:
    async with MockNode(router.node_address, "d0") as node, AsyncClient(router.client_address) as client:
        node.publishing = True
        messages = [("user", "the same question")]
        await client.generate("base", messages=messages)
        await client.generate("base", messages=messages, reuse="off", publish=False)
        await client.generate("base", messages=messages)
        executes = [one for one in node.received if isinstance(one, Execute)]
        assert [one.plan.kind for one in executes] == [PlanKind.PRIVATE, PlanKind.PRIVATE, PlanKind.EXACT]
        assert [one.publish for one in executes] == [True, False, True]


async def test_a_node_that_is_gone_is_in_no_plan(router: RouterNode) -> None:
    async with AsyncClient(router.client_address) as client, MockNode(router.node_address, "d1") as second:
        async with MockNode(router.node_address, "d0") as first:
            first.publishing = second.publishing = True
            messages = [("user", "the same question")]
            await client.generate("base", messages=messages)
            first.leave()
            second.leave()
            await until(lambda: router.core.membership.serving("base") == ())
        second.say(second.registration)
        await until(lambda: router.core.membership.serving("base") == ("d1",))
        answer = await client.generate("base", messages=messages)
        assert answer.node == "d1"
        execute = [one for one in second.received if isinstance(one, Execute)][-1]
        assert "d0" not in {node for segment in execute.plan.segments for node in segment.nodes}
