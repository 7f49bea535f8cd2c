"""The router process on real loopback sockets with mock nodes: good requests, bad ones, and everything that dies."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from array import array
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from mock_node import (
    EOS_ID,
    MAX_CONTEXT_TOKENS,
    NODE_TIMEOUT_S,
    VOCAB_SIZE,
    MockNode,
    choose_privately,
    make_settings,
    no_leaks,
    registration,
    until,
)

from kvkin.kv.errors import ConfigError
from kvkin.router.events import RememberAnswer
from kvkin.router.front import PromptWorkers
from kvkin.router.node import RouterNode
from kvkin.router.prompts import Tail
from kvkin.router.settings import RouterSettings, Timeouts
from kvkin.transport.client import AsyncClient
from kvkin.transport.codec import client_replies, encode
from kvkin.transport.messages import (
    Accepted,
    AskStatus,
    Cancel,
    ChatMessage,
    Error,
    Finished,
    Generate,
    Ping,
    Pong,
    Sampling,
    StatusReply,
    Tokens,
)
from kvkin.transport.node_messages import Abort, Execute, Holdings, Refused, Registered, SnapshotWanted


class Wire:
    """A client's bare socket: sends anything, reads replies."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(address)
        self._codec = client_replies()

    def send(self, message: msgspec.Struct) -> None:
        self.socket.send(encode(message))

    async def read(self) -> Any:
        async with asyncio.timeout(NODE_TIMEOUT_S):
            return self._codec.decode(await self.socket.recv())

    async def read_to(self, kind: type, request_id: str | None = None) -> Any:
        """The next reply of ``kind``; others are passed over."""
        while True:
            reply = await self.read()
            if isinstance(reply, kind) and request_id in (None, reply.id):
                return reply

    def close(self) -> None:
        if not self.socket.closed:
            self.socket.close()
            self._context.term()


@pytest.fixture
def settings(tmp_path: Path) -> RouterSettings:
    return make_settings(tmp_path)


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    with no_leaks():
        yield


@pytest.fixture
async def router(nothing_leaks: None, settings: RouterSettings) -> AsyncIterator[RouterNode]:
    async with RouterNode(settings, choose=choose_privately) as node:
        yield node
        assert not node.core.serving.by_attempt, "a test left requests on their nodes"


@pytest.fixture
async def wire(router: RouterNode) -> AsyncIterator[Wire]:
    wire = Wire(router.client_address)
    yield wire
    wire.close()


async def test_an_answer_streams_through(router: RouterNode, wire: Wire) -> None:
    async with MockNode(router.node_address, "d0", text="ab c") as node:
        wire.send(Generate("1", "base", messages=(ChatMessage("user", "hello"),)))
        accepted = await wire.read()
        assert isinstance(accepted, Accepted)
        first, second, end = [await wire.read() for _ in range(3)]
        assert isinstance(first, Tokens)
        assert isinstance(second, Tokens)
        assert isinstance(end, Finished)
        assert first.text + second.text == end.text == "ab c"
        assert first.token_ids + second.token_ids == end.token_ids
        assert end.usage.prompt_tokens == accepted.prompt_tokens == len((await node.expect(Execute)).token_ids)
        assert end.timings.ttft_ms > 0
        assert end.timings.hash_ms > 0


def bad(**fields: Any) -> Generate:
    return Generate(**{"id": "1", "model": "base", "prompt": "hi", **fields})


BAD_REQUESTS: list[tuple[Generate, str, str]] = [
    (bad(prompt=None), "invalid_request", "exactly one of"),
    (bad(token_ids=(1,)), "invalid_request", "exactly one of"),
    (bad(prompt=""), "invalid_request", "prompt is empty"),
    (bad(prompt=None, token_ids=()), "invalid_request", "token_ids is empty"),
    (bad(prompt=None, token_ids=(1, VOCAB_SIZE)), "invalid_request", f"token_ids[1]: {VOCAB_SIZE}"),
    (bad(prompt=None, token_ids=(-1,)), "invalid_request", "token_ids[0]: -1"),
    (bad(prompt=None, token_ids=(2**64 - 1,)), "invalid_request", "token_ids[0]"),
    (bad(prompt=None, messages=()), "invalid_request", "messages: 0"),
    (bad(prompt=None, messages=(ChatMessage("", "x"),)), "invalid_request", "messages[0].role"),
    (bad(model="nobody"), "unknown_model", "allowed: base, tuned"),
    (bad(id=""), "invalid_request", "id: ''"),
    (bad(max_loss=float("nan")), "invalid_request", "max_loss: nan"),
    (bad(max_loss=-0.1), "invalid_request", "max_loss"),
    (bad(share_hint=float("inf")), "invalid_request", "share_hint"),
    (bad(deadline_s=0.0), "invalid_request", "deadline_s"),
    (bad(ttft_slo_s=0.0), "invalid_request", "ttft_slo_s: 0.0"),
    (bad(ttft_slo_s=float("nan")), "invalid_request", "ttft_slo_s: nan"),
    (bad(sampling=Sampling(temperature=-1.0)), "invalid_request", "sampling.temperature: -1.0"),
    (bad(sampling=Sampling(temperature=float("nan"))), "invalid_request", "sampling.temperature"),
    (bad(sampling=Sampling(top_p=0.0)), "invalid_request", "sampling.top_p"),
    (bad(sampling=Sampling(top_k=-1)), "invalid_request", "sampling.top_k"),
    (bad(sampling=Sampling(seed=-1)), "invalid_request", "sampling.seed"),
    (bad(sampling=Sampling(max_tokens=0)), "invalid_request", "sampling.max_tokens: 0"),
    (bad(sampling=Sampling(max_tokens=257)), "invalid_request", "sampling.max_tokens: 257 (allowed: 1 to 256)"),
    (bad(sampling=Sampling(logprobs=21)), "invalid_request", "sampling.logprobs"),
    (bad(sampling=Sampling(stop=("",))), "invalid_request", "sampling.stop[0]"),
    (bad(sampling=Sampling(stop=("x",) * 17)), "invalid_request", "sampling.stop: 17"),
    (bad(prompt="a" * 500), "prompt_too_long", f"{MAX_CONTEXT_TOKENS} in all"),
    (bad(prompt="x" * 30_000), "prompt_too_long", "at least"),
    (bad(prompt=None, token_ids=(5,) * 500), "prompt_too_long", "500 prompt tokens"),
]


async def test_a_bad_request_gets_its_error_and_starts_nothing(router: RouterNode, wire: Wire) -> None:
    async with MockNode(router.node_address, "d0") as node:
        for request, code, words in BAD_REQUESTS:
            wire.send(request)
            reply = await wire.read()
            assert isinstance(reply, Error), request
            assert (reply.id, reply.code, reply.retryable) == (request.id, code, False), reply
            assert words in reply.message
            assert len(reply.message) < 1000
        assert node.count(Execute) == 0
        wire.send(bad())
        assert isinstance(await wire.read_to(Finished), Finished)


GARBAGE: list[tuple[bytes, str]] = [
    (b"", ""),
    (b"\xc1", ""),
    (b"hello", ""),
    (msgspec.msgpack.encode([1, 2]), ""),
    (msgspec.msgpack.encode({"type": "generate", "id": "7"}), "7"),
    (msgspec.msgpack.encode({"type": "nonsense", "id": "7"}), "7"),
    (msgspec.msgpack.encode({"type": "generate", "id": "7", "model": 3, "prompt": "x"}), "7"),
    (msgspec.msgpack.encode({"type": "generate", "id": 7, "model": "base", "prompt": "x"}), ""),
    (msgspec.msgpack.encode({"type": "generate", "id": "7", "model": "base", "prompt": "x", "reuse": "often"}), "7"),
    (msgspec.msgpack.encode({"type": "generate", "id": "7", "model": "base", "token_ids": ["a"]}), "7"),
    (msgspec.msgpack.encode({"type": "cancel"}), ""),
    (b"\x91" * 5000, ""),
    (b"\xdd\xff\xff\xff\xff", ""),
    (encode(Generate("7", "base", prompt="x" * (1 << 16))), ""),
]


async def test_garbage_gets_an_error_and_harms_nobody(router: RouterNode, wire: Wire) -> None:
    async with MockNode(router.node_address, "d0", mode="stream") as node:
        good = Wire(router.client_address)
        good.send(Generate("good", "base", prompt="hi"))
        execute = await node.expect(Execute)
        for frame, readable_id in GARBAGE:
            wire.socket.send(frame)
            reply = await wire.read()
            assert isinstance(reply, Error), frame
            assert (reply.id, reply.code) == (readable_id, "protocol"), frame
        wire.socket.send_multipart([b"", encode(Ping("p"))])
        assert (await wire.read()).code == "protocol"
        wire.send(Ping("p"))
        assert isinstance(await wire.read(), Pong)
        node.finish(execute)
        assert isinstance(await good.read_to(Finished), Finished)
        good.close()


async def test_a_frame_beyond_all_reason_costs_only_its_sender(router: RouterNode, wire: Wire) -> None:
    async with MockNode(router.node_address, "d0"):
        vandal = Wire(router.client_address)
        vandal.socket.send(b"x" * (1 << 20))
        wire.send(bad())
        assert isinstance(await wire.read_to(Finished), Finished)
        vandal.close()


async def test_a_client_that_vanishes_while_streaming_is_cancelled_on_its_node(router: RouterNode) -> None:
    async with MockNode(router.node_address, "d0", mode="stream") as node:
        wire = Wire(router.client_address)
        wire.send(bad())
        await wire.read_to(Tokens)
        wire.close()
        execute = await node.expect(Execute)
        index = 1
        async with asyncio.timeout(NODE_TIMEOUT_S):
            while node.count(Abort) == 0:
                node.generate(execute, index, (5,), "x")
                index += 1
                await asyncio.sleep(0.005)
        assert router.core.num_requests == 0


class TestSilentClients:
    @pytest.fixture
    def settings(self, tmp_path: Path) -> RouterSettings:
        times = Timeouts(tick_s=0.02, sign_of_life_s=0.1, client_dead_s=0.5)
        return make_settings(tmp_path, timeouts=times)

    async def test_a_client_that_vanishes_while_waiting_is_noticed_by_its_signs_of_life(
        self, router: RouterNode
    ) -> None:
        async with MockNode(router.node_address, "d0", mode="hold") as node:
            wire = Wire(router.client_address)
            wire.send(bad())
            await wire.read_to(Accepted)
            wire.close()
            await node.expect(Abort)

    async def test_a_client_that_pinged_and_froze_is_noticed(self, router: RouterNode, wire: Wire) -> None:
        async with MockNode(router.node_address, "d0", mode="hold") as node:
            wire.send(bad())
            wire.send(Ping("p", ("1",)))
            abort = await node.expect(Abort)
            assert "silent" in abort.reason


async def test_a_cancel_reaches_the_node_at_once(router: RouterNode, wire: Wire) -> None:
    async with MockNode(router.node_address, "d0", mode="stream") as node:
        wire.send(bad())
        await wire.read_to(Tokens)
        wire.send(Cancel("1"))
        assert (await wire.read_to(Error)).code == "cancelled"
        await node.expect(Abort)
        # nothing else comes
        wire.send(Ping("p"))
        assert isinstance(await wire.read(), Pong)


async def test_a_killed_node_is_noticed_by_silence_and_its_request_runs_elsewhere(
    tmp_path: Path, router: RouterNode
) -> None:
    wire = Wire(router.client_address)
    async with MockNode(router.node_address, "d0", mode="hold") as first, MockNode(router.node_address, "d1") as second:
        wire.send(bad())
        await first.expect(Execute)
        await first.kill()
        # what is sent to a closed connection comes back at once
        wire.send(Generate("2", "base", prompt="hi"))
        ends = {(await wire.read_to(Finished)).id for _ in range(2)}
        assert ends == {"1", "2"}
        assert second.count(Execute) == 2
    wire.close()


class TestFrozenNodes:
    @pytest.fixture
    def settings(self, tmp_path: Path) -> RouterSettings:
        return make_settings(tmp_path, timeouts=Timeouts(tick_s=0.02, heartbeat_s=0.1, node_dead_s=0.5))

    async def test_a_frozen_node_is_noticed_and_comes_back_as_a_stranger(self, router: RouterNode, wire: Wire) -> None:
        async with MockNode(router.node_address, "d0", mode="hold") as first, MockNode(router.node_address, "d1"):
            wire.send(bad())
            execute = await first.expect(Execute)
            first.freeze()
            assert (await wire.read_to(Finished)).node == "d1"
            first.thaw()
            await first.expect(SnapshotWanted, lambda one: one.register)
            first.generate(execute, 0, (5,), "x")
            assert (await first.expect(Abort)).request_id == execute.request_id
            await until(lambda: set(router.core.membership.serving("base")) == {"d0", "d1"})


async def test_a_node_of_another_version_or_other_weights_is_refused(router: RouterNode) -> None:
    node = MockNode(router.node_address, "d0")
    node._tasks = [asyncio.create_task(node._read())]
    for overrides, code in (
        ({"version": 99}, "version"),
        ({"role": "router"}, "role"),
        ({"models": ()}, "unknown_model"),
    ):
        node.say(registration("d0", **overrides))
        assert (await node.expect(Refused, lambda one, code=code: one.code == code)).message
    node.say_raw(b"garbage")
    await node.expect(Refused, lambda one: one.code == "protocol")
    assert node.count(Registered) == 0
    await node.kill()


async def test_a_gap_in_the_holdings_asks_for_a_snapshot(router: RouterNode) -> None:
    async with MockNode(router.node_address, "d0") as node:
        await until(lambda: router.core.membership.member("d0").order.whole)
        node.say(Holdings("one", 3, epoch=1))
        assert await node.expect(SnapshotWanted) == SnapshotWanted()
        await until(lambda: router.core.membership.member("d0").order.epoch == 2)


async def test_a_restarted_router_answers_for_requests_that_it_does_not_know(settings: RouterSettings) -> None:
    async with RouterNode(settings, choose=choose_privately) as first:
        fixed = msgspec.structs.replace(settings, client_address=first.client_address, node_address=first.node_address)
        node, wire = MockNode(first.node_address, "d0", mode="stream"), Wire(first.client_address)
        await node.__aenter__()
        wire.send(bad())
        execute = await node.expect(Execute)
        await wire.read_to(Tokens)
        first._clients.close()  # as a crash would: no goodbye to anybody
        first._nodes.close()
        first._closed = True
        first._ticking.cancel()
        await asyncio.to_thread(first._workers.close)
    async with RouterNode(fixed, choose=choose_privately) as second:
        # the node's next word makes the new router ask it for everything
        await node.expect(SnapshotWanted, lambda one: one.register)
        await until(lambda: second.core.membership.serving("base") == ("d0",))
        node.generate(execute, 1, (5,), "x")
        assert (await node.expect(Abort)).request_id == execute.request_id
        wire.send(Ping("p", ("1",)))
        lost = await wire.read()
        assert (lost.id, lost.code, lost.retryable) == ("1", "node_unavailable", True)
        node.mode = "answer"
        wire.send(bad())
        assert isinstance(await wire.read_to(Finished), Finished)
        wire.close()
        await node.kill()


async def test_the_next_turn_is_spliced_from_the_generated_ids(router: RouterNode, wire: Wire) -> None:
    """Three turns of two models: every full block of the earlier turns has the same hash again."""
    async with (
        MockNode(router.node_address, "d0", models=["base"]) as base,
        MockNode(router.node_address, "d1", models=["tuned"]) as tuned,
    ):
        builder = router._workers._builders["base"]
        messages: list[ChatMessage] = [ChatMessage("user", "the first question")]
        contexts: list[tuple[int, ...]] = []
        for turn, (model, node) in enumerate((("base", base), ("tuned", tuned), ("base", base))):
            # spelled letter by letter: no tokenizer would choose these ids for this text
            text = "the answer"
            node.answer = (*(builder._tokenizer.token_to_id("Ġ" if c == " " else c) for c in text), EOS_ID)
            node.text = text
            wire.send(Generate(str(turn), model, messages=tuple(messages), stream=False))
            await wire.read_to(Finished, str(turn))
            execute = [one for one in node.received if isinstance(one, Execute)][-1]
            if contexts:
                assert execute.token_ids[: len(contexts[-1])] == contexts[-1]
            contexts.append(execute.token_ids + node.answer[:-1])
            messages += [ChatMessage("assistant", text), ChatMessage("user", f"question {turn}")]


def test_a_prompt_waits_for_the_answers_before_it(settings: RouterSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two threads the next turn could overtake the answer that it is to splice."""
    workers = PromptWorkers(settings)
    builder, order, go_on = workers._builders["base"], list[str](), threading.Event()

    def remember(*details: object) -> bool:
        go_on.wait(NODE_TIMEOUT_S)
        order.append("remembered")
        return True

    monkeypatch.setattr(builder, "remember", remember)
    done = threading.Event()
    workers.remember(RememberAnswer("base", Tail(b"", "", array("I")), "x", (1,)))
    workers.prepare("r1", bad(), lambda event: (order.append("prepared"), done.set()))  # type: ignore[func-returns-value]
    assert order == []  # both threads are busy: one remembers, the other waits for it
    go_on.set()
    assert done.wait(NODE_TIMEOUT_S)
    workers.close()
    assert order == ["remembered", "prepared"]


async def test_a_taken_port_is_a_clear_error(router: RouterNode, settings: RouterSettings) -> None:
    taken = msgspec.structs.replace(settings, client_address=router.client_address)
    with pytest.raises(ConfigError, match=r"router-0.client_port: tcp://127.0.0.1:\d+ is in use already"):
        await RouterNode(taken).start()
    taken = msgspec.structs.replace(settings, node_address=router.node_address)
    with pytest.raises(ConfigError, match="node_port"):
        await RouterNode(taken).start()


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://192.0.2.1:0", "tcp://*:0", "tcp://[::]:0"])
async def test_an_address_of_other_hosts_is_refused(settings: RouterSettings, address: str) -> None:
    with pytest.raises(ConfigError, match="not a loopback address"):
        await RouterNode(msgspec.structs.replace(settings, client_address=address)).start()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
async def test_loopback_has_two_families(settings: RouterSettings) -> None:
    there = msgspec.structs.replace(settings, client_address="tcp://[::1]:0")
    async with RouterNode(there) as router, AsyncClient(router.client_address) as client:
        assert len(await client.models()) == 2


async def test_status_tells_what_happened(router: RouterNode, wire: Wire) -> None:
    async with MockNode(router.node_address, "d0") as node:
        node.tokens_reused = 3
        wire.send(bad(prompt="the quick brown fox"))
        assert (await wire.read_to(Finished)).usage.cached_tokens == 3
        wire.send(AskStatus("s"))
        status = await wire.read_to(StatusReply)
        assert (status.counters["finished"], status.counters["cached_tokens"], status.running) == (1, 3, 0)
        assert [one.name for one in status.nodes] == ["d0"]


async def test_stopping_drains_and_a_second_time_ends_at_once(settings: RouterSettings) -> None:
    router = RouterNode(settings, choose=choose_privately)
    await router.start()
    wire = Wire(router.client_address)
    async with MockNode(router.node_address, "d0", mode="hold") as node:
        wire.send(bad())
        execute = await node.expect(Execute)
        wire.send(Generate("2", "base", prompt="hi"))
        await node.expect(Execute, lambda one: one != execute)
        router.stop()
        wire.send(Generate("3", "base", prompt="hi"))
        assert (await wire.read_to(Error)).id == "3"
        node.finish(execute)
        assert (await wire.read_to(Finished)).id == "1"
        assert not router._stopped.is_set()
        router.stop()
        assert (await wire.read_to(Error)).id == "2"
        async with asyncio.timeout(NODE_TIMEOUT_S):
            await router.wait()
        await router.close()
    wire.close()


def test_a_router_process_stops_on_sigterm(tmp_path: Path) -> None:
    """A real process: ready, SIGTERM, exit code 0, ports free again."""
    script = tmp_path / "serve.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            from pathlib import Path
            from mock_node import make_settings
            from kvkin.router.node import serve_router

            serve_router(make_settings(Path(sys.argv[1])), lambda node: print(node.client_address, flush=True))
            """
        )
    )
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join([str(tests), str(tests.parent / "src")])
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "tokenizer")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    try:
        assert process.stdout is not None
        address = next(line for line in process.stdout if line.startswith("tcp://")).strip()
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 0, output
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(address.rsplit(":", 1)[1]))) != 0
    finally:
        process.kill()
        process.communicate()
