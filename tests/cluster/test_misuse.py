"""What clients and strangers do to a running cluster: cancel, vanish, send garbage. Nobody else notices, nothing is left behind."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator

import msgpack
import psutil
import pytest
import zmq
from cluster_harness import (
    BASE,
    BLOCK,
    FULL,
    ON_BASE,
    ON_FULL,
    PREFILL,
    SPARE,
    UPPER,
    LiveCluster,
    bystander,
    greedy,
    prompt,
)

from kvkin.kv.errors import Cancelled, DeadlineExceeded, InvalidRequest, PromptTooLong, UnknownModel
from kvkin.transport.client import SyncStream

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("unharmed")]


def first_token(stream: SyncStream) -> int:
    return next(iter(stream)).token_ids[0]


def dealer(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    made = context.socket(zmq.DEALER)
    made.linger = 0
    made.connect(address)
    return made


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


# --- cancelled in each phase -----------------------------------------------------------------------------------------------


def test_cancelled_while_decoding_and_while_queued(cluster: LiveCluster) -> None:
    """Two answers fill the node, a third waits in its queue; all are cancelled, from the outside in."""
    ids = [prompt(seed, 40) for seed in (10, 11, 12)]
    failed = cluster.load(ON_BASE).failed
    with bystander(cluster, FULL, prompt(13, 60)), contextlib.ExitStack() as stack:
        how = {"reuse": "off", "publish": False, "sampling": greedy(1900)}
        running = [stack.enter_context(cluster.client.stream(BASE, token_ids=one, **how)) for one in ids[:2]]
        for stream in running:
            first_token(stream)
        queued = stack.enter_context(cluster.client.stream(BASE, token_ids=ids[2], **how))
        cluster.until(lambda status: cluster.load(ON_BASE, status).waiting == 1, "queued request")
        for stream in (queued, *running):
            stream.cancel()
            stream.cancel()  # twice is no error
            with pytest.raises(Cancelled):
                stream.finish()
        cluster.client.cancel("never-was")
    status = cluster.settled()
    assert cluster.load(ON_BASE, status).failed == failed + 3


def test_cancelled_while_prefilling(cluster: LiveCluster) -> None:
    ids = prompt(20)
    with (
        bystander(cluster, BASE, prompt(21, 60)),
        cluster.client.stream(UPPER, token_ids=ids, reuse="off", sampling=greedy(4)) as stream,
    ):
        cluster.until(lambda status: cluster.load(SPARE, status).running == 1, "running request")
        stream.cancel()
        with pytest.raises(Cancelled):
            stream.finish()
    cluster.settled()
    assert cluster.client.generate(UPPER, token_ids=ids[:40], sampling=greedy(2)).usage.completion_tokens == 2


def test_cancelled_while_pulling_from_a_live_order_that_froze(cluster: LiveCluster) -> None:
    """One consumer is cancelled by its client, the other gives up on the frozen node; the order then goes on."""
    with bystander(cluster, BASE, prompt(21, 60)):
        with cluster.halfway(22, consumers=2) as (ids, (cancelled, patient)):
            cancelled.cancel()
            with pytest.raises(Cancelled):
                cancelled.finish()
            answer = patient.finish()
        assert answer.report.fallback
        assert (answer.report.planned, answer.report.kind) == ("shared-prefix", "private")
        cluster.thaw()
        cluster.until(cluster.all_alive, "thawed node")
    assert answer.token_ids == cluster.expected(UPPER, ids)
    cluster.settled()
    # what it had begun it ended, or makes anew: the next one pulls all of it
    cluster.order(prompt(23, 320))
    cluster.settled()
    again = cluster.ask(UPPER, prompt(23, 320), reuse="exact")
    assert (again.report.fallback, again.report.sources) == ("", (PREFILL,))


def test_cancel_of_one_who_pulls_a_live_order_ends_nobody_elses(cluster: LiveCluster) -> None:
    with cluster.halfway(24, consumers=2) as (ids, (leaving, staying)):
        leaving.cancel()
        with pytest.raises(Cancelled):
            leaving.finish()
        cluster.thaw()
        answer = staying.finish()
    assert not answer.report.fallback
    assert answer.token_ids == cluster.expected(UPPER, ids)
    assert answer.report.bytes_pulled > 0


# --- clients that vanish -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_vanishes_stops_its_generation(
    cluster: LiveCluster, context: zmq.Context[zmq.Socket[bytes]], stream: bool
) -> None:
    ended = cluster.load(ON_BASE)
    client = dealer(context, cluster.client_address)
    sampling = {"max_tokens": 1900, "ignore_eos": True}
    request = {"type": "generate", "id": "1", "model": BASE, "token_ids": prompt(30, 50), "sampling": sampling}
    client.send(msgpack.packb(request | {"stream": stream}))
    if stream:
        while msgpack.unpackb(client.recv())["type"] != "tokens":
            pass
    else:
        cluster.until(lambda status: cluster.load(ON_BASE, status).running == 1, "running request")
    client.close(linger=0)
    load = cluster.load(ON_BASE, cluster.settled())
    assert (load.finished, load.failed) == (ended.finished, ended.failed + 1)


def test_deadline_ends_the_generation(cluster: LiveCluster) -> None:
    failed = cluster.load(ON_BASE).failed
    how = {"sampling": greedy(1900), "deadline_s": 0.6, "reuse": "off", "publish": False}
    with bystander(cluster, FULL, prompt(13, 60)), pytest.raises(DeadlineExceeded) as caught:
        cluster.client.generate(BASE, token_ids=prompt(31, 50), **how)
    assert caught.value.retryable
    assert cluster.load(ON_BASE, cluster.settled()).failed == failed + 1


# --- requests that cannot be served --------------------------------------------------------------------------------------------


def test_refused_at_the_front_and_nothing_is_started(
    cluster: LiveCluster, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    before = {node.name: (node.load.finished, node.load.failed) for node in cluster.client.status().nodes}
    client = cluster.client
    with bystander(cluster, FULL, prompt(13, 60)):
        counters = client.status().counters
        with pytest.raises(PromptTooLong, match="2048"):
            client.generate(BASE, token_ids=prompt(32, 2040), sampling=greedy(10))
        with pytest.raises(PromptTooLong):
            client.generate(BASE, prompt="word " * 4000)
        with pytest.raises(UnknownModel, match=BASE):
            client.generate("tiny-nobody", token_ids=prompt(32, 40))
        for ids in ((5, 320), (5, -1), (2**40,), (2**70,)):
            with pytest.raises(InvalidRequest, match="token_ids"):
                client.generate(BASE, token_ids=ids)
        after = client.status().counters
        assert after.get("orders") == counters.get("orders")
    for node in cluster.settled().nodes:
        if node.name not in (ON_FULL, SPARE):  # the bystander's
            assert (node.load.finished, node.load.failed) == before[node.name]


def test_id_of_a_running_request_is_refused_and_the_request_goes_on(
    cluster: LiveCluster, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    ids = prompt(33, 50)
    expected = list(cluster.expected(BASE, ids, 60))
    sampling = {"max_tokens": 60, "ignore_eos": True}
    request = {"type": "generate", "id": "same", "model": BASE, "token_ids": ids, "sampling": sampling, "reuse": "off"}
    one, other = (dealer(context, cluster.client_address) for _ in range(2))
    for each in (one, one, other):  # another client's ids are its own
        each.send(msgpack.packb(request | {"stream": False}))
    replies = [terminal(one), terminal(one), terminal(other)]
    assert [reply["code"] for reply in replies if reply["type"] == "error"] == ["duplicate_request"]
    assert [reply["token_ids"] for reply in replies if reply["type"] == "finished"] == [expected] * 2


def terminal(client: zmq.Socket[bytes]) -> dict[str, object]:
    while True:
        assert client.poll(60_000)
        reply: dict[str, object] = msgpack.unpackb(client.recv())
        if reply["type"] in ("finished", "error"):
            return reply


# --- garbage -------------------------------------------------------------------------------------------------------------------


def garbage() -> list[list[bytes]]:
    """Messages that no peer of ours sends."""
    rng = random.Random(5)
    open_stream = {
        "type": "open_stream",
        "version": 1,
        "stream_id": "x",
        "consumer": "nobody",
        "rank": 0,
        "layout_digest": b"",
        "provenance": b"",
        "blocks": [b"x"] * 50,
        "first_position": -1,
        "kv_layers": [10**9],
        "e_layer": -7,
        "chunk_blocks": -1,
        "order_id": "never",
        "wait_s": float("nan"),
    }
    known = [
        {"type": "generate", "id": "1", "model": 7},
        {"type": "generate", "id": "1", "model": BASE, "token_ids": ["a"]},
        {"type": "heartbeat", "incarnation": "nobody", "load": {}},
        {"type": "holdings", "incarnation": "nobody", "sequence": 3},
        {"type": "done", "request_id": "nobody"},
        {"type": "leave", "incarnation": "nobody"},
        {"type": "renew_lease", "stream_id": "nobody"},
        {"type": "close_stream", "stream_id": "nobody", "generation": -5},
        open_stream,
        open_stream | {"blocks": []},
        open_stream | {"version": 10**6},
        {"type": "execute", "request_id": "nobody"},
        {"type": {"type": "type"}},
        {},
        [],
        "text",
        None,
    ]
    bodies = [msgpack.packb(one) for one in known] + [rng.randbytes(size) for size in (0, 1, 7, 300, 70_000)]
    bodies += [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 5000]  # huge lengths, deep nesting
    return [[body] for body in bodies] + [[b"", b""], [b"a", b"b", b"c"], [rng.randbytes(9 << 20)]]


def junk_bytes(port: int) -> None:
    """Bytes that are not even ZeroMQ, and connections that say nothing."""
    for junk in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" + b"\0" * 8 + b"\x7f",
        b"\x16\x03\x01" * 400,
        b"kvkinTCP\0\1" * 9,
        b"",
    ):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
            sock.sendall(junk)
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(0.2)
            sock.recv(100)


def listening(pid: int) -> set[int]:
    """Every port that a process listens on: the stream socket and whatever its data plane has."""
    return {one.laddr.port for one in psutil.Process(pid).net_connections("tcp") if one.status == psutil.CONN_LISTEN}


def test_garbage_on_every_socket_harms_nobody(cluster: LiveCluster, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    ids, context_ids = prompt(40, 400), prompt(40, 400)[: 400 // BLOCK * BLOCK]
    cluster.order(context_ids)
    cluster.settled()
    expected = cluster.ask(UPPER, ids, 40, reuse="exact", publish=False)
    assert expected.report.sources == (PREFILL,)
    nodes = {name: cluster.pid(name) for name in cluster.processes.nodes}
    addresses = [cluster.client_address, cluster.node_address]
    addresses += [node.address for node in cluster.processes.nodes.values() if node.role != "router"]
    with bystander(cluster, BASE, prompt(41, 60)), bystander(cluster, FULL, prompt(42, 60)):
        good = cluster.client.stream(UPPER, token_ids=ids, reuse="exact", publish=False, sampling=greedy(40))
        with good:
            for address in addresses:
                stranger = dealer(context, address)
                for frames in garbage():
                    stranger.send_multipart(frames)
                stranger.close(linger=1000)
            ports = {int(address.rsplit(":", 1)[1]) for address in addresses} | listening(nodes[PREFILL])
            for port in ports:
                junk_bytes(port)
            answer = good.finish()
        again = cluster.ask(UPPER, ids, 40, reuse="exact", publish=False)
    for one in (answer, again):
        assert one.token_ids == expected.token_ids
        assert (one.report.fallback, one.report.sources) == ("", (PREFILL,))
    assert {
        name: cluster.pid(name) for name in cluster.processes.nodes if cluster.processes.nodes[name].running
    } == nodes
    assert cluster.client.status().counters["bad_messages"] > 0
