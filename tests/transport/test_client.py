"""The client, async and sync, against a real router with mock nodes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from mock_node import NODE_TIMEOUT_S, MockNode, choose_privately, make_settings, no_leaks, until

from kvkin.kv import errors
from kvkin.router.node import RouterNode
from kvkin.router.settings import RouterSettings, Timeouts
from kvkin.transport.client import AsyncClient, Client, error_of
from kvkin.transport.messages import ChatMessage, Error, Reuse, Sampling, Tokens
from kvkin.transport.node_messages import Abort, Execute


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    with no_leaks():
        yield


@pytest.fixture
def settings(tmp_path: Path) -> RouterSettings:
    return make_settings(tmp_path, timeouts=Timeouts(tick_s=0.02, node_wait_s=0.2))


@pytest.fixture
async def router(nothing_leaks: None, settings: RouterSettings) -> AsyncIterator[RouterNode]:
    async with RouterNode(settings, choose=choose_privately) as node:
        yield node


@pytest.fixture
async def client(router: RouterNode) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(router.client_address, ping_s=0.05, silence_s=0.5) as client:
        yield client


async def test_one_shot(router: RouterNode, client: AsyncClient) -> None:
    async with MockNode(router.node_address, "d0", text="yes") as node:
        answer = await client.generate(
            "base",
            messages=[("user", "a"), {"role": "assistant", "content": "b"}, ChatMessage("user", "c")],
            sampling=Sampling(temperature=0.5, seed=3),
            max_tokens=7,
            publish=False,
        )
        assert (answer.text, answer.finish_reason, answer.node) == ("yes", "stop", "d0")
        execute = await node.expect(Execute)
        assert execute.sampling == Sampling(temperature=0.5, seed=3, max_tokens=7)
        assert not execute.publish


async def test_streaming(router: RouterNode, client: AsyncClient) -> None:
    async with MockNode(router.node_address, "d0", text="yes"):
        async with client.stream("base", token_ids=[5, 6, 7], reuse="any") as stream:
            seen = [tokens async for tokens in stream]
        assert all(isinstance(tokens, Tokens) for tokens in seen)
        assert stream.accepted is not None
        assert stream.finished is not None
        assert stream.accepted.prompt_tokens == 3
        assert "".join(tokens.text for tokens in seen) == stream.finished.text == "yes"
        assert stream._message.reuse is Reuse.ANY


async def test_many_requests_at_once_keep_apart(router: RouterNode, client: AsyncClient) -> None:
    async with MockNode(router.node_address, "d0") as node:
        answers = await asyncio.gather(*(client.generate("base", token_ids=[5] * (n + 1)) for n in range(50)))
        assert [answer.usage.prompt_tokens for answer in answers] == list(range(1, 51))
        assert node.count(Execute) == 50
    assert client._waiting == {}


@pytest.mark.parametrize(
    ("request_fields", "error"),
    [
        ({"model": "nobody", "prompt": "x"}, errors.UnknownModel),
        ({"model": "base"}, errors.InvalidRequest),
        ({"model": "base", "token_ids": [5] * 500}, errors.PromptTooLong),
        ({"model": "base", "token_ids": [99999]}, errors.InvalidRequest),
        ({"model": "base", "token_ids": [2**70]}, errors.InvalidRequest),
        ({"model": "tuned", "prompt": "x"}, errors.NodeUnavailable),
    ],
)
async def test_errors_are_raised_as_their_class(
    client: AsyncClient, request_fields: dict[str, object], error: type[errors.KvkinError]
) -> None:
    with pytest.raises(error):
        await client.generate(**request_fields)  # type: ignore[arg-type]
    assert client._waiting == {}


@pytest.mark.parametrize(
    "code", ["invalid_request", "cancelled", "capacity", "internal", "lease_expired", "from_the_future"]
)
@pytest.mark.parametrize("retryable", [False, True])
def test_an_error_keeps_its_code_and_what_the_router_says_of_retrying(code: str, retryable: bool) -> None:
    error = error_of(Error("1", code, "words", retryable))
    assert isinstance(error, errors.KvkinError)
    assert (error.code, error.retryable, str(error)) == (code, retryable, "words")
    assert isinstance(error_of(Error("1", "capacity", "words", retryable)), errors.CapacityError)


def test_every_error_of_the_tree_comes_back_as_itself() -> None:
    def tree(root: type[errors.KvkinError]) -> Iterator[type[errors.KvkinError]]:
        yield root
        for child in root.__subclasses__():
            yield from tree(child)

    for kind in tree(errors.KvkinError):
        if kind in (errors.ConfigError, errors.RequestError) or kind.__module__ != errors.__name__:
            continue  # a configuration is never a request's error; RequestError has InvalidRequest's code
        assert type(error_of(Error("1", kind.code, "words", kind.retryable))) is kind


async def test_leaving_a_stream_early_cancels_it(router: RouterNode, client: AsyncClient) -> None:
    async with MockNode(router.node_address, "d0", mode="stream") as node:
        async with client.stream("base", prompt="x") as stream:
            async for _ in stream:
                break
        await node.expect(Abort)
        assert client._waiting == {}
        await until(lambda: router.core.num_requests == 0)


async def test_cancel(router: RouterNode, client: AsyncClient) -> None:
    async with MockNode(router.node_address, "d0", mode="stream") as node, client.stream("base", prompt="x") as stream:
        async for _ in stream:
            await stream.cancel()
            break
        with pytest.raises(errors.Cancelled):
            await stream.finish()
        await stream.cancel()  # late: nothing to do
        await client.cancel("never-was")
        await node.expect(Abort)


async def test_a_cancelled_task_cancels_its_request(router: RouterNode, client: AsyncClient) -> None:
    async with MockNode(router.node_address, "d0", mode="hold") as node:
        task = asyncio.create_task(client.generate("base", prompt="x"))
        await node.expect(Execute)
        task.cancel()
        await node.expect(Abort)
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_timeout_cancels_and_is_retryable(router: RouterNode, client: AsyncClient) -> None:
    async with MockNode(router.node_address, "d0", mode="hold") as node:
        with pytest.raises(errors.NodeUnavailable, match=r"timeout_s = 0.1 s"):
            await client.generate("base", prompt="x", timeout_s=0.1)
        await node.expect(Abort)


async def test_a_deadline_is_the_routers(router: RouterNode, client: AsyncClient) -> None:
    async with MockNode(router.node_address, "d0", mode="hold") as node:
        with pytest.raises(errors.DeadlineExceeded, match="deadline"):
            await client.generate("base", prompt="x", deadline_s=0.1)
        await node.expect(Abort)


async def test_models_and_status(router: RouterNode, client: AsyncClient) -> None:
    async with MockNode(router.node_address, "d0"):
        models = await client.models()
        assert {model.name: model.nodes for model in models} == {"base": ("d0",), "tuned": ()}
        status = await client.status()
        assert (status.router, [node.name for node in status.nodes]) == ("router-0", ["d0"])


async def test_a_router_that_is_not_there_is_an_error_in_time(nothing_leaks: None) -> None:
    async with AsyncClient("tcp://127.0.0.1:9", ping_s=0.05, silence_s=0.2) as client:
        with pytest.raises(errors.NodeUnavailable, match="silent"):
            await client.generate("base", prompt="x")
        with pytest.raises(errors.NodeUnavailable, match="does not answer"):
            await client.models(timeout_s=0.1)


async def test_an_address_that_is_none_is_a_config_error(nothing_leaks: None) -> None:
    async with AsyncClient("somewhere") as client:
        with pytest.raises(errors.ConfigError, match="somewhere"):
            await client.models()


async def test_a_restarted_router_is_noticed(settings: RouterSettings) -> None:
    first = RouterNode(settings, choose=choose_privately)
    await first.start()
    fixed = msgspec.structs.replace(settings, client_address=first.client_address, node_address=first.node_address)
    async with (
        MockNode(first.node_address, "d0", mode="hold") as node,
        AsyncClient(first.client_address, ping_s=0.05, silence_s=NODE_TIMEOUT_S) as client,
    ):
        request = asyncio.create_task(client.generate("base", prompt="x"))
        await node.expect(Execute)
        # as in a crash: the sockets are gone and nobody was told anything
        first._closed = True
        first._ticking.cancel()
        first._clients.close()
        first._nodes.close()
        first._workers.close()
        await asyncio.to_thread(first._context.term)
        async with RouterNode(fixed, choose=choose_privately) as second:
            with pytest.raises(errors.NodeUnavailable, match="does not know this request"):
                async with asyncio.timeout(NODE_TIMEOUT_S):
                    await request
            node.mode = "answer"
            await until(lambda: second.core.membership.serving("base") == ("d0",))
            assert (await client.generate("base", prompt="x")).finish_reason == "stop"


async def test_closing_ends_what_waits(router: RouterNode) -> None:
    async with MockNode(router.node_address, "d0", mode="hold") as node:
        client = AsyncClient(router.client_address)
        task = asyncio.create_task(client.generate("base", prompt="x"))
        await node.expect(Execute)
        await client.close()
        await client.close()
        with pytest.raises(errors.NodeUnavailable, match="closed"):
            await task
        await node.expect(Abort)
        with pytest.raises(errors.NodeUnavailable, match="closed"):
            await client.models()


async def test_the_sync_client(router: RouterNode) -> None:
    def work() -> None:
        with Client(router.client_address) as client:
            assert client.generate("base", prompt="x").text == "yes"
            with client.stream("base", messages=[("user", "x")]) as stream:
                assert "".join(tokens.text for tokens in stream) == "yes"
                assert stream.finished is not None
                assert stream.accepted is not None
            with pytest.raises(errors.UnknownModel):
                client.generate("nobody", prompt="x")
            assert [model.name for model in client.models()] == ["base", "tuned"]
            assert client.status().counters["finished"] == 2
            client.cancel("never-was")
        client.close()
        with pytest.raises(errors.NodeUnavailable):
            client.models()

    async with MockNode(router.node_address, "d0", text="yes"):
        await asyncio.to_thread(work)


async def test_the_sync_client_cancels_what_is_left_early(router: RouterNode) -> None:
    def work() -> None:
        with Client(router.client_address) as client:
            with client.stream("base", prompt="x") as stream:
                next(iter(stream))
            with client.stream("base", prompt="x") as stream:
                next(iter(stream))
                stream.cancel()
                with pytest.raises(errors.Cancelled):
                    stream.finish()

    async with MockNode(router.node_address, "d0", mode="stream") as node:
        await asyncio.to_thread(work)
        await until(lambda: node.count(Abort) == 2)


async def test_threads_may_share_a_sync_client(router: RouterNode) -> None:
    def work() -> None:
        texts: list[str] = []
        with Client(router.client_address) as client:
            threads = [
                threading.Thread(target=lambda: texts.append(client.generate("base", prompt="x").text))
                for _ in range(8)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert texts == ["yes"] * 8

    async with MockNode(router.node_address, "d0", text="yes"):
        await asyncio.to_thread(work)
