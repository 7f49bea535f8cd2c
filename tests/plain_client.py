"""A client written from docs/protocol.md with nothing but ZeroMQ and MessagePack, as one in another language would be.

It imports nothing of kvkin. ``transport/test_plain_client.py`` gives it a router to talk to.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import msgpack
import zmq


class PlainClient:
    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)

    def send(self, message: dict[str, Any]) -> None:
        self._socket.send(msgpack.packb(message))

    def receive(self, timeout_s: float = 20.0) -> dict[str, Any]:
        if not self._socket.poll(1000 * timeout_s):
            raise TimeoutError("the router is silent")
        return dict(msgpack.unpackb(self._socket.recv()))

    def answer(self, **request: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """(the tokens messages, the terminal reply) of one request."""
        self.send({"type": "generate", **request})
        tokens = []
        while True:
            reply = self.receive()
            if reply["id"] != request["id"]:
                continue
            if reply["type"] == "tokens":
                tokens.append(reply)
            elif reply["type"] in ("finished", "error"):
                return tokens, reply

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def ask_everything(client: PlainClient) -> None:
    """A tour of the protocol."""
    tokens, end = client.answer(id="1", model="base", messages=[{"role": "user", "content": "hello"}])
    assert end["type"] == "finished"
    assert "".join(one["text"] for one in tokens) == end["text"] == "yes"
    assert functools.reduce(operator.iadd, (one["token_ids"] for one in tokens), []) == end["token_ids"]
    assert [one["index"] for one in tokens] == [0, 1]
    assert end["finish_reason"] == "stop"
    assert set(end["usage"]) == {"prompt_tokens", "completion_tokens", "cached_tokens"}
    assert end["report"]["kind"] == "private"
    assert end["timings"]["ttft_ms"] > 0

    tokens, end = client.answer(id="2", model="base", prompt="hello", stream=False, sampling={"max_tokens": 5})
    assert (tokens, end["type"]) == ([], "finished")

    _, end = client.answer(id="3", model="base", token_ids=[5, 6, 7], reuse="off", publish=False, deadline_s=10)
    assert end["usage"]["prompt_tokens"] == 3

    _, end = client.answer(id="4", model="nobody", prompt="hello")
    assert (end["type"], end["code"], end["retryable"]) == ("error", "unknown_model", False)
    assert "base" in end["message"]

    _, end = client.answer(id="5", model="base")
    assert end["code"] == "invalid_request"

    client.send({"type": "models", "id": "6"})
    reply = client.receive()
    assert (reply["type"], reply["id"]) == ("model_list", "6")
    assert {model["name"]: model["nodes"] for model in reply["models"]} == {"base": ["d0"], "tuned": []}

    client.send({"type": "status", "id": "7"})
    reply = client.receive()
    assert (reply["type"], reply["running"], reply["nodes"][0]["state"]) == ("status_reply", 0, "alive")

    client.send({"type": "ping", "id": "8", "running": ["of-before-the-restart"]})
    lost, pong = client.receive(), client.receive()
    assert (lost["type"], lost["id"], lost["code"]) == ("error", "of-before-the-restart", "node_unavailable")
    assert (pong["type"], pong["id"], pong["router"]) == ("pong", "8", "router-0")

    client.send({"type": "cancel", "id": "never-was"})
    client.send({"type": "what", "id": "9"})
    reply = client.receive()
    assert (reply["type"], reply["id"], reply["code"]) == ("error", "9", "protocol")


def stop_half_way(client: PlainClient) -> None:
    """A request that hangs after its first token, cancelled."""
    client.send({"type": "generate", "id": "1", "model": "base", "prompt": "hello"})
    while client.receive()["type"] != "tokens":
        pass
    client.send({"type": "cancel", "id": "1"})
    while (reply := client.receive())["type"] == "accepted":
        pass
    assert (reply["type"], reply["id"], reply["code"]) == ("error", "1", "cancelled")
