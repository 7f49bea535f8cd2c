"""RouterSocket: a ZeroMQ ROUTER socket on an asyncio or uvloop event loop, without a task and a future per message.

Sends say at once whether the peer took the message. ``node.py`` has two of them: one for clients, one for nodes.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from urllib.parse import urlsplit

import zmq

from kvkin.kv.errors import ConfigError

# Messages that wait for one slow peer before it counts as gone: minutes of a stream, a few megabytes.
SEND_QUEUE = 10_000
# Messages handled before other callbacks of the loop get their turn.
BATCH = 64
# ZeroMQ's own heartbeats: a peer whose host vanished or froze is disconnected after the timeout.
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 2_000, 10_000
# How long close waits for queued messages to leave.
LINGER_MS = 500


class RouterSocket:
    """``on_message(peer, frames)`` is called on the event loop for each message."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        key: str,
        address: str,
        on_message: Callable[[bytes, list[bytes]], None],
        *,
        insecure: bool,
        max_bytes: int,
    ) -> None:
        """``key`` names the configuration's entry in errors. Raises ConfigError if ``address`` cannot be bound."""
        check_address(key, address, insecure)
        self._on_message = on_message
        self._socket = context.socket(zmq.ROUTER)
        self._socket.router_mandatory = True  # a send to a peer that is gone fails instead of vanishing
        self._socket.ipv6 = "[" in address
        self._socket.linger = LINGER_MS
        self._socket.sndhwm = SEND_QUEUE
        self._socket.maxmsgsize = max_bytes
        self._socket.heartbeat_ivl, self._socket.heartbeat_timeout = HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            problem = "is in use already" if error.errno == zmq.EADDRINUSE else f"cannot be bound: {error.strerror}"
            raise ConfigError(key, f"{address} {problem}", "a free port of this host") from None
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._fd = int(self._socket.FD)
        self._loop.add_reader(self._fd, self._on_readable)
        self._schedule()

    def send(self, peer: bytes, body: bytes) -> str:
        """Queue a message. Returns why the peer does not take it (empty: it does)."""
        try:
            self._socket.send_multipart([peer, body], zmq.NOBLOCK)
        except zmq.Again:
            return "the peer does not read its messages"
        except zmq.ZMQError as error:
            return f"the peer is gone ({error.strerror})"
        finally:
            # sending may swallow the descriptor's only notice that there is something to read
            self._schedule()
        return ""

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._on_readable)

    def _on_readable(self) -> None:
        self._scheduled = False
        for _ in range(BATCH):
            if self._socket.closed:
                return
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_message(peer, frames)
        self._schedule()


def check_address(key: str, address: str, insecure: bool) -> None:
    """Refuse addresses of other hosts as long as nothing is encrypted or authenticated, unless that is asked for."""
    parts = urlsplit(address)
    if parts.scheme in ("inproc", "ipc") or insecure:
        return
    host = (parts.hostname or "").strip("[]")
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback:
        raise ConfigError(
            key,
            f"{address} is not a loopback address and nothing is encrypted yet",
            "127.0.0.1, or transport.insecure: true",
        )
