"""The link of an attached server, without vLLM: real sockets and a real data plane, a scripted router, and the test in vLLM's place."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq.asyncio
from node_harness import (
    BLOCK,
    CHUNK,
    LAYERS,
    ROOT,
    Member,
    ScriptedRouter,
    exact_plan,
    greedy,
    load_member,
    pulled,
    running,
    scripted_router,
    settings_for,
    until_clean,
)
from tiny_models import make_tiny

from kvkin.decode_nodes.attached import AttachedServer
from kvkin.engines.vllm.serving import (
    LinkEvent,
    PartsArrived,
    PlanReady,
    Published,
    Question,
    SourcesFailed,
    StoreWanted,
    Wishes,
)
from kvkin.kv.errors import ConfigError
from kvkin.kv.hashing import block_hashes
from kvkin.kv.plan import PlanKind, private_plan
from kvkin.transport.arena import Arena
from kvkin.transport.messages import Reuse
from kvkin.transport.node_messages import AskPlan, PlanDone, Planned, PlanRefused, Refused

pytestmark = pytest.mark.timeout(120)

TOKENS = tuple(int(t) for t in torch.randint(3, 320, (101,), generator=torch.Generator().manual_seed(5)))
CONTEXT = 96
WAIT_S = 30.0


class OneModel:
    def model_of(self, lora: tuple[str, str] | None) -> str | None:
        return "base" if lora is None else None


class Everywhere:
    """Hidden states of all tokens of some layers."""

    def __init__(self, *layers: int) -> None:
        self._layers = layers

    def has(self, layer: int, start: int, stop: int) -> bool:
        return layer in self._layers


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Member:
    root = tmp_path_factory.mktemp("models")
    return load_member("base", make_tiny("llama", root / "base", seed=1, num_layers=LAYERS), root / "cache")


@pytest.fixture
async def router() -> AsyncIterator[ScriptedRouter]:
    async with scripted_router() as router:
        yield router


class Attached:
    """A started link, and the events that it had so far."""

    def __init__(self, server: AttachedServer) -> None:
        self.server = server
        self.events: list[LinkEvent] = []

    async def until(self, kind: type, fits: Callable[[Any], bool] = lambda event: True) -> Any:
        """The first event of ``kind`` that fits, from now or before."""
        async with asyncio.timeout(WAIT_S):
            while True:
                while (event := self.server.take()) is not None:
                    self.events.append(event)
                found = [event for event in self.events if isinstance(event, kind) and fits(event)]
                if found:
                    return found[0]
                await asyncio.sleep(0.005)  # the queue has no event of its own: vLLM looks once a step

    def all(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def settled(self) -> None:
        """Once the link has heard all that was said to it and nothing of its runs on."""
        server = self.server
        done = asyncio.run_coroutine_threadsafe(server.runtime.settle(), server._loop)
        await asyncio.wrap_future(done)


@contextlib.asynccontextmanager
async def attached(
    base: Member, router: str, plan_s: float = WAIT_S, wait_s: float = WAIT_S
) -> AsyncIterator[Attached]:
    settings = settings_for("attached", "server", [base], router)
    server = AttachedServer(settings, OneModel(), plan_s)
    before = threading.active_count()
    try:
        await asyncio.to_thread(server.start, wait_s)
        yield Attached(server)
    finally:
        await asyncio.to_thread(server.close)
    assert not server._thread.is_alive()
    assert threading.active_count() <= before + 1  # to_thread keeps one


async def asked(router: ScriptedRouter, key: str) -> AskPlan:
    found = await router.until(lambda: [m for m in router.messages if isinstance(m, AskPlan) and m.question_id == key])
    assert len(found) == 1
    question: AskPlan = found[0]
    return question


def addresses(router: ScriptedRouter) -> dict[str, str]:
    return {name: register.source_address for name, register in router.registers.items()}


def bytes_of(node: Any, member: Member, layer: int, block: int) -> bytes:
    """KV of one block of TOKENS in a node's arena."""
    found = node.runtime.store.get(block_hashes(TOKENS, ROOT, BLOCK)[block], member.lineage.id)
    assert found is not None
    return bytes(node.runtime.memory.arena.kv_block(layer, found.slot))


async def test_a_plan_is_asked_for_and_what_it_names_is_pulled_into_the_arena(
    base: Member, router: ScriptedRouter
) -> None:
    async with running("prefill", "prefill", [base], router) as prefill, attached(base, router.address) as link:
        await router.order("prefill", "order", "base", TOKENS)
        link.server.ask(Question("q", "base", TOKENS, Wishes(Reuse.ANY, 0.5, True, 3.0)))
        question = await asked(router, "q")
        assert (question.model, question.token_ids) == ("base", TOKENS)
        assert (question.reuse, question.max_loss, question.publish, question.share_hint) == (Reuse.ANY, 0.5, True, 3.0)
        plan = exact_plan(pulled(base, "prefill"), CONTEXT, len(TOKENS))
        await router.send("server", Planned("q", ROOT, plan, addresses(router)))
        ready = await link.until(PlanReady)
        assert (ready.key, ready.plan, ready.publishable) == ("q", plan, True)
        assert ready.provenance.exact
        chunks = CONTEXT // CHUNK
        await link.until(PartsArrived, lambda _: len(link.all(PartsArrived)) == chunks * LAYERS)

        mapped = Arena.attach(link.server.arena)
        for arrived in link.all(PartsArrived):
            for start, place in arrived.parts:
                content = bytes(mapped.buffer[place.offset : place.offset + place.num_bytes])
                blocks = range(start // BLOCK, start // BLOCK + len(content) // link.server.layout.kv_block_bytes)
                assert content == b"".join(bytes_of(prefill, base, arrived.layer, block) for block in blocks)
        mapped.close()

        link.server.ended("q", CONTEXT, "")
        await router.until(lambda: [m for m in router.messages if isinstance(m, PlanDone)])
        assert PlanDone("q", len(TOKENS), CONTEXT, "") in router.messages
        await link.settled()
        await until_clean(router, link.server, prefill)
        assert link.server.load().pulled_bytes == CONTEXT // BLOCK * link.server.layout.kv_slot_bytes


async def store_all(link: Attached, source: Any, base: Member, why: str = "") -> None:
    """Do what workers do about the stores that are wanted: copy the same KV from another node's arena."""
    mapped = Arena.attach(link.server.arena)
    done: set[int] = set()

    def waiting(event: StoreWanted) -> bool:
        return event.ticket not in done

    while True:
        event = await link.until(
            object, lambda one: isinstance(one, Published) or (isinstance(one, StoreWanted) and waiting(one))
        )
        if isinstance(event, Published) and not any(map(waiting, link.all(StoreWanted))):
            break
        for wanted in filter(waiting, link.all(StoreWanted)):
            done.add(wanted.ticket)
            for number, slot in enumerate(wanted.slots):
                for layer in wanted.layers:
                    content = bytes_of(source, base, layer, wanted.start // BLOCK + number)
                    mapped.kv_block(layer, slot)[:] = memoryview(content)
            link.server.stored(wanted.ticket, why)
    mapped.close()


async def test_what_the_server_computed_is_stored_announced_and_pulled_by_a_decode_node(
    base: Member, router: ScriptedRouter
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(running("prefill", "prefill", [base], router))
        decode = await stack.enter_async_context(running("decode", "decode", [base], router))
        link = await stack.enter_async_context(attached(base, router.address))
        await router.order("prefill", "order", "base", TOKENS)
        link.server.ask(Question("q", "base", TOKENS, Wishes()))
        await asked(router, "q")
        plan = private_plan(len(TOKENS))
        await router.send("server", Planned("q", ROOT, plan, {}))
        await link.until(PlanReady)
        link.server.computed("q", plan, TOKENS, Everywhere(), last=True)
        link.server.ended("q", 0, "")
        await store_all(link, prefill, base)
        wanted = link.all(StoreWanted)
        assert [(one.key, one.start, len(one.slots), list(one.layers)) for one in wanted] == [
            ("q", 0, CONTEXT // BLOCK, list(range(LAYERS)))
        ]
        held = [holding for part in router.holdings["server"] for holding in part.added]
        assert [one.block for one in held] == block_hashes(TOKENS, ROOT, BLOCK)
        assert {one.kv_layers for one in held} == {LAYERS}

        plan = exact_plan(pulled(base, "server"), CONTEXT, len(TOKENS))
        done = await router.execute("decode", "reuse", "base", TOKENS, plan)
        assert list(done.token_ids) == greedy(base, TOKENS, 6)
        assert (done.report.kind, done.report.fallback, done.report.tokens_reused) == (PlanKind.EXACT, "", CONTEXT)
        await link.settled()
        await until_clean(router, link.server, prefill, decode)


async def computed_privately(link: Attached, router: ScriptedRouter, covered: Everywhere) -> None:
    """A prefill node has the prompt, for its bytes; the server computed it itself, under a plan that reuses nothing."""
    await router.order("prefill", "order", "base", TOKENS)
    link.server.ask(Question("q", "base", TOKENS, Wishes()))
    plan = private_plan(len(TOKENS))
    await asked(router, "q")
    await router.send("server", Planned("q", ROOT, plan, {}))
    await link.until(PlanReady)
    link.server.computed("q", plan, TOKENS, covered, last=True)


async def test_e_is_stored_where_it_was_kept(base: Member, router: ScriptedRouter) -> None:
    async with running("prefill", "prefill", [base], router) as prefill, attached(base, router.address) as link:
        await computed_privately(link, router, Everywhere(2))
        await store_all(link, prefill, base)
        stores = [one for one in link.all(StoreWanted) if one.e_layer is not None]
        assert [(one.start, one.e_layer, len(one.slots)) for one in stores] == [
            (start, 2, 1) for start in range(0, CONTEXT, BLOCK)
        ]
        held = [holding for part in router.holdings["server"] for holding in part.added]
        assert {one.e_layers for one in held} == {(2,)}
        link.server.ended("q", 0, "")
        await link.settled()
        await until_clean(router, link.server, prefill)


@pytest.mark.parametrize("answered", [True, False])
async def test_what_was_computed_before_the_answer_waits_for_it(
    base: Member, router: ScriptedRouter, answered: bool
) -> None:
    """A request that does not wait for a plan may be over before a router says on what its blocks hang."""
    plan_s = WAIT_S if answered else 0.3
    node, server = running("prefill", "prefill", [base], router), attached(base, router.address, plan_s=plan_s)
    async with node as prefill, server as link:
        await router.order("prefill", "order", "base", TOKENS)
        link.server.ask(Question("q", "base", TOKENS, Wishes(Reuse.OFF)))
        await asked(router, "q")
        link.server.computed("q", private_plan(len(TOKENS)), TOKENS, Everywhere(), last=True)
        link.server.ended("q", 0, "")
        await router.until(lambda: [m for m in router.messages if isinstance(m, PlanDone)])
        assert not link.all(StoreWanted)
        if answered:
            await router.send("server", Planned("q", ROOT, private_plan(len(TOKENS)), {}))
        await store_all(link, prefill, base)
        await link.settled()
        assert len(link.server.runtime.store) == (CONTEXT // BLOCK if answered else 0)
        assert link.server.load().running == 0
        await until_clean(router, link.server)


async def test_what_could_not_be_stored_is_not_announced(base: Member, router: ScriptedRouter) -> None:
    async with running("prefill", "prefill", [base], router) as prefill, attached(base, router.address) as link:
        await computed_privately(link, router, Everywhere())
        await store_all(link, prefill, base, why="the blocks were given back")
        link.server.ended("q", 0, "")
        await link.settled()
        assert not [holding for part in router.holdings["server"] for holding in part.added]
        assert len(link.server.runtime.store) == 0
        await until_clean(router, link.server)


async def test_a_source_that_is_not_there_is_told_once_and_leaves_nothing(base: Member, router: ScriptedRouter) -> None:
    async with attached(base, router.address) as link:
        link.server.ask(Question("q", "base", TOKENS, Wishes()))
        await asked(router, "q")
        plan = exact_plan(pulled(base, "nobody"), CONTEXT, len(TOKENS))
        await router.send("server", Planned("q", ROOT, plan, {}))
        failed = await link.until(SourcesFailed)
        assert (failed.key, "nobody" in failed.why) == ("q", True)
        link.server.unneeded("q")
        link.server.ended("q", 0, failed.why)
        await router.until(lambda: [m for m in router.messages if isinstance(m, PlanDone) and m.fallback])
        await link.settled()
        assert len(link.all(SourcesFailed)) == 1
        await until_clean(router, link.server)
        assert link.server.load().fallbacks == 1


@pytest.mark.parametrize("how", ["silence", "refusal", "nonsense"])
async def test_without_a_usable_answer_the_prompt_is_computed(base: Member, router: ScriptedRouter, how: str) -> None:
    async with attached(base, router.address, plan_s=0.05 if how == "silence" else WAIT_S) as link:
        link.server.ask(Question("q", "base", TOKENS, Wishes()))
        await asked(router, "q")
        if how == "refusal":
            await router.send("server", PlanRefused("q", "unknown_model", "not here"))
        elif how == "nonsense":
            await router.send("server", Planned("q", ROOT, private_plan(7), {}))
        ready = await link.until(PlanReady)
        assert ready.plan.kind is PlanKind.PRIVATE
        assert ready.plan.num_tokens == len(TOKENS)
        assert {"silence": "plan_s", "refusal": "not here", "nonsense": "covers 7 of 101"}[how] in ready.plan.reason
        if how == "silence":
            # in time to publish what was computed meanwhile, too late to pull
            await router.send("server", Planned("q", ROOT, exact_plan(pulled(base, "x"), CONTEXT, len(TOKENS)), {}))
            link.server.computed("q", ready.plan, TOKENS[:BLOCK], Everywhere(), last=True)
            await link.until(object, lambda one: isinstance(one, StoreWanted | Published))
        assert not link.all(SourcesFailed)
        assert len(link.all(PlanReady)) == 1


async def test_a_router_that_fell_silent_holds_up_one_request_only(base: Member, router: ScriptedRouter) -> None:
    async with attached(base, router.address, plan_s=0.05) as link:
        link.server.ask(Question("first", "base", TOKENS, Wishes()))
        await link.until(PlanReady)
        link.server.ask(Question("second", "base", TOKENS, Wishes()))
        ready = await link.until(PlanReady, lambda event: event.key == "second")
        assert "no router" in ready.plan.reason
        # it says something: it is asked again
        await router.send("server", PlanRefused("long ago", "internal", "late"))
        while not any(isinstance(m, AskPlan) and m.question_id.startswith("again") for m in router.messages):
            key = f"again{len(link.events)}"
            link.server.ask(Question(key, "base", TOKENS, Wishes()))
            # an answer to an earlier one would be there at once, and the router of this very loop never hear anything
            await link.until(PlanReady, lambda event, key=key: event.key == key)
        assert not [m for m in router.messages if isinstance(m, AskPlan) and m.question_id == "second"]


async def test_without_a_router_it_answers_at_once_and_joins_when_there_is_one(base: Member) -> None:
    context = zmq.asyncio.Context()
    probe = ScriptedRouter(context)
    address = probe.address
    await probe.close()
    async with attached(base, address, wait_s=0.1) as link:
        link.server.ask(Question("q", "base", TOKENS, Wishes()))
        ready = await link.until(PlanReady)
        assert (ready.plan.kind, ready.publishable) == (PlanKind.PRIVATE, False)
        assert "no router" in ready.plan.reason
        link.server.computed("q", ready.plan, TOKENS, Everywhere(), last=True)
        await link.until(Published)
        assert not link.all(StoreWanted)
        link.server.ended("q", 0, "")
    context.destroy(linger=0)


async def test_a_request_that_ends_while_it_waits_or_pulls_leaves_nothing(base: Member, router: ScriptedRouter) -> None:
    async with running("prefill", "prefill", [base], router) as prefill, attached(base, router.address) as link:
        await router.order("prefill", "order", "base", TOKENS)
        link.server.ask(Question("waits", "base", TOKENS, Wishes()))
        await asked(router, "waits")
        link.server.ended("waits", 0, "")
        plan = exact_plan(pulled(base, "prefill"), CONTEXT, len(TOKENS))
        await router.send("server", Planned("waits", ROOT, plan, addresses(router)))
        link.server.ask(Question("pulls", "base", TOKENS, Wishes()))
        await asked(router, "pulls")
        await router.send("server", Planned("pulls", ROOT, plan, addresses(router)))
        await link.until(PlanReady, lambda event: event.key == "pulls")
        link.server.ended("pulls", 0, "aborted")
        link.server.ended("pulls", 0, "twice")
        await router.until(lambda: [m for m in router.messages if isinstance(m, PlanDone) and m.question_id == "pulls"])
        await link.settled()
        assert not [event for event in link.all(PlanReady) if event.key == "waits"]
        await until_clean(router, link.server, prefill)


async def test_a_router_that_refuses_it_ends_the_start_and_later_only_the_link(base: Member, tmp_path: Path) -> None:
    context = zmq.asyncio.Context()

    class Refusing(ScriptedRouter):
        async def _listen(self) -> None:
            while True:
                peer, _ = await self._socket.recv_multipart()
                from kvkin.transport.codec import encode

                await self._socket.send_multipart([peer, encode(Refused("lineage", "other weights"))])

    refusing = Refusing(context)
    server = AttachedServer(settings_for("attached", "server", [base], refusing.address), OneModel(), 1.0)
    with pytest.raises(ConfigError, match=r"nodes\.server.*lineage.*other weights"):
        await asyncio.to_thread(server.start, WAIT_S)
    assert not server.alive
    server.ask(Question("q", "base", TOKENS, Wishes()))  # nobody hears it, nothing breaks
    await asyncio.to_thread(server.close)
    await refusing.close()
    context.destroy(linger=0)
