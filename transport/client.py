"""The client: ``AsyncClient`` for asyncio, ``Client`` for everybody else (docs/protocol.md is what they speak).

One DEALER socket to the router. While requests run the client pings: a router that was restarted says that it does not know
them, one that is gone does not answer; either way the caller gets NodeUnavailable, which is retryable. Errors of the cluster
are raised as the class of ``kv.errors`` that has their code. Used by the CLI, the demo, the benchmarks and by users' programs.

::

    with Client("tcp://127.0.0.1:5570") as client:
        answer = client.generate("smollm2-135m-qa", prompt="...")
        with client.stream("smollm2-135m-qa", messages=[("user", "...")]) as stream:
            for tokens in stream:
                print(tokens.text, end="")
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import itertools
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import zmq
import zmq.asyncio

from kvkin.kv import errors
from kvkin.kv.errors import ConfigError, InvalidRequest, KvkinError, NodeUnavailable, ProtocolError
from kvkin.transport.attention import Standstill
from kvkin.transport.codec import client_replies, encode
from kvkin.transport.messages import (
    Accepted,
    AskStatus,
    Cancel,
    ChatMessage,
    ClientReply,
    ClientRequest,
    Error,
    Finished,
    Generate,
    ListModels,
    ModelEntry,
    Models,
    Ping,
    Reuse,
    Sampling,
    StatusReply,
    Tokens,
)

# A pending request is asked after this often, and given up once the router was silent for so long (seconds).
PING_S = 2.0
SILENCE_S = 10.0
# ``models`` and ``status`` are answered at once or not at all.
ASK_TIMEOUT_S = 10.0
LINGER_MS = 500

# A message as the caller may write it.
MessageLike = ChatMessage | Mapping[str, str] | tuple[str, str]
T = TypeVar("T")


class AsyncClient:
    """Talks to one router from one event loop. Any number of requests may run at once."""

    def __init__(self, address: str, *, ping_s: float = PING_S, silence_s: float = SILENCE_S) -> None:
        """``address`` is the router's client endpoint, such as tcp://127.0.0.1:5570. Connects on first use."""
        self.address = address
        self._ping_s, self._silence_s = ping_s, silence_s
        self._codec = client_replies()
        self._ids = (f"{secrets.token_hex(6)}-{number}" for number in itertools.count(1))
        self._waiting: dict[str, asyncio.Queue[ClientReply | KvkinError]] = {}
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._heard_at = 0.0
        self._closed = False

    # --- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, model: str, *, timeout_s: float | None = None, **request: Any) -> Finished:
        """Ask and wait for the whole answer. Takes what :meth:`stream` takes.

        Raises the error of the cluster, or NodeUnavailable after ``timeout_s``; the request is then cancelled.
        """
        async with self.stream(model, stream=False, timeout_s=timeout_s, **request) as stream:
            return await stream.finish()

    def stream(
        self,
        model: str,
        *,
        prompt: str | None = None,
        token_ids: Sequence[int] | None = None,
        messages: Sequence[MessageLike] | None = None,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        reuse: Reuse | str = Reuse.BOUNDED,
        max_loss: float = 0.05,
        publish: bool = True,
        share_hint: float = -1.0,
        deadline_s: float | None = None,
        ttft_slo_s: float | None = None,
        timeout_s: float | None = None,
        stream: bool = True,
    ) -> AnswerStream:
        """An answer as it is made: iterate over it inside ``async with``. Leaving early cancels the request.

        ``max_tokens`` is short for ``sampling=Sampling(max_tokens=...)``. ``deadline_s`` is enforced by the router,
        ``timeout_s`` by this client, from the moment that the request is sent. ``ttft_slo_s`` is no deadline: it chooses the
        plan, see docs/protocol.md.
        """
        chosen = sampling or Sampling()
        if max_tokens is not None:
            chosen = msgspec.structs.replace(chosen, max_tokens=max_tokens)
        message = Generate(
            id=next(self._ids),
            model=model,
            prompt=prompt,
            token_ids=None if token_ids is None else tuple(token_ids),
            messages=None if messages is None else tuple(map(_chat_message, messages)),
            sampling=chosen,
            stream=stream,
            reuse=Reuse(reuse),
            max_loss=max_loss,
            publish=publish,
            share_hint=share_hint,
            deadline_s=deadline_s,
            ttft_slo_s=ttft_slo_s,
        )
        return AnswerStream(self, message, timeout_s)

    async def cancel(self, request_id: str) -> None:
        """End a running request by the ``id`` of its stream; its reader gets Cancelled. Unknown ids are ignored."""
        self._send_now(Cancel(request_id))

    async def models(self, timeout_s: float = ASK_TIMEOUT_S) -> tuple[ModelEntry, ...]:
        """The models of the cluster and the nodes that serve them now."""
        reply = await self._ask(ListModels(next(self._ids)), timeout_s)
        if not isinstance(reply, Models):
            raise ProtocolError(f"the router answered models with {type(reply).__name__}")
        return reply.models

    async def status(self, timeout_s: float = ASK_TIMEOUT_S) -> StatusReply:
        """Nodes, loads and counters."""
        reply = await self._ask(AskStatus(next(self._ids)), timeout_s)
        if not isinstance(reply, StatusReply):
            raise ProtocolError(f"the router answered status with {type(reply).__name__}")
        return reply

    async def close(self) -> None:
        """Cancel what runs and close the socket. Idempotent."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        for queue in self._waiting.values():
            queue.put_nowait(NodeUnavailable("the client was closed"))
        # what still runs is told to stop before the socket goes
        if self._socket is not None and self._context is not None:
            for request_id in list(self._waiting):
                self._send_now(Cancel(request_id))
            self._socket.close(LINGER_MS)
            await asyncio.to_thread(self._context.term)
            self._socket = self._context = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # --- inside ------------------------------------------------------------------------------------------------------

    async def open(self, message: ClientRequest) -> asyncio.Queue[ClientReply | KvkinError]:
        """Send a request; its replies come out of the queue, until ``forget``."""
        queue: asyncio.Queue[ClientReply | KvkinError] = asyncio.Queue()
        self._waiting[message.id] = queue
        if len(self._waiting) == 1:
            self._heard_at = asyncio.get_running_loop().time()  # silence counts while somebody waits
        try:
            await self._send(message)
        except OverflowError as error:
            del self._waiting[message.id]
            raise InvalidRequest(f"a number of the request, such as one of token_ids, is too large: {error}") from None
        except BaseException:
            del self._waiting[message.id]
            raise
        return queue

    def forget(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)

    async def _ask(self, message: ClientRequest, timeout_s: float) -> ClientReply:
        queue = await self.open(message)
        try:
            reply = await asyncio.wait_for(queue.get(), timeout_s)
        except TimeoutError:
            raise NodeUnavailable(f"the router at {self.address} does not answer (waited {timeout_s:g} s)") from None
        finally:
            self.forget(message.id)
        if isinstance(reply, KvkinError):
            raise reply
        if isinstance(reply, Error):
            raise error_of(reply)
        return reply

    async def _send(self, message: ClientRequest) -> None:
        await self._connected().send(encode(message))

    def _send_now(self, message: ClientRequest) -> None:
        """Send without waiting. A full queue means a router that is gone; then there is nobody to tell."""
        if self._socket is not None:
            sent = asyncio.ensure_future(self._socket.send(encode(message), zmq.NOBLOCK))
            sent.add_done_callback(lambda future: future.cancelled() or future.exception())

    def _connected(self) -> zmq.asyncio.Socket:
        if self._closed:
            raise NodeUnavailable("the client is closed")
        if self._socket is None:
            self._context = zmq.asyncio.Context()
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.ipv6 = "[" in self.address
            self._socket.linger = LINGER_MS
            self._socket.reconnect_ivl_max = 1000
            try:
                self._socket.connect(self.address)
            except zmq.ZMQError as error:
                self._socket.close(0)
                self._socket = None
                raise ConfigError(
                    "address", f"{self.address!r}: {error.strerror}", "such as tcp://127.0.0.1:5570"
                ) from None
            self._heard_at = asyncio.get_running_loop().time()
            self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._keep_alive())]
        return self._socket

    async def _read(self) -> None:
        loop, socket = asyncio.get_running_loop(), self._connected()
        while True:
            frame = await socket.recv()
            self._heard_at = loop.time()
            try:
                reply = self._codec.decode(frame)
            except ProtocolError:
                continue  # a newer router's message, or garbage: nobody waits for it
            queue = self._waiting.get(reply.id)
            if queue is not None:
                queue.put_nowait(reply)

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        standstill = Standstill(self._ping_s, loop.time())
        while True:
            await asyncio.sleep(self._ping_s)
            self._heard_at = min(loop.time(), self._heard_at + standstill.look(loop.time()))
            if not self._waiting:
                self._heard_at = loop.time()
                continue
            silent_s = loop.time() - self._heard_at
            if silent_s > self._silence_s:
                for queue in self._waiting.values():
                    queue.put_nowait(NodeUnavailable(f"the router at {self.address} was silent for {silent_s:.1f} s"))
            await self._send(Ping(next(self._ids), tuple(self._waiting)))


class AnswerStream:
    """One answer on its way. ``accepted`` and ``finished`` are set as the messages come; iterating yields Tokens."""

    def __init__(self, client: AsyncClient, message: Generate, timeout_s: float | None) -> None:
        self.id = message.id
        self.accepted: Accepted | None = None
        self.finished: Finished | None = None
        self._client, self._message, self._timeout_s = client, message, timeout_s
        self._queue: asyncio.Queue[ClientReply | KvkinError] | None = None
        self._deadline_at: float | None = None
        self._ended = False

    async def finish(self) -> Finished:
        """Read to the end, tokens passed over, and return the result. Raises the error that ended the request."""
        async for _ in self:
            pass
        assert self.finished is not None, "a stream without an error ends with finished"
        return self.finished

    async def cancel(self) -> None:
        """Ask the router to end the request; reading on raises Cancelled, or finds that it was done already."""
        if self._queue is not None and not self._ended:
            await self._client.cancel(self.id)

    async def __aenter__(self) -> Self:
        self._queue = await self._client.open(self._message)
        if self._timeout_s is not None:
            self._deadline_at = asyncio.get_running_loop().time() + self._timeout_s
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.cancel()
        self._ended = True
        self._client.forget(self.id)

    def __aiter__(self) -> AsyncIterator[Tokens]:
        return self

    async def __anext__(self) -> Tokens:
        if self._queue is None:
            raise RuntimeError("an answer is read inside `async with`")
        while not self._ended:
            reply = await self._next_reply(self._queue)
            match reply:
                case Tokens():
                    return reply
                case Accepted():
                    self.accepted = reply
                case Finished():
                    self.finished, self._ended = reply, True
                case Error():
                    self._ended = True
                    raise error_of(reply)
                case KvkinError():
                    # given up here, but the router may still get the request, or be working on it
                    await self.cancel()
                    self._ended = True
                    raise reply
        raise StopAsyncIteration

    async def _next_reply(self, queue: asyncio.Queue[ClientReply | KvkinError]) -> ClientReply | KvkinError:
        if self._deadline_at is None:
            return await queue.get()
        try:
            async with asyncio.timeout_at(self._deadline_at):
                return await queue.get()
        except TimeoutError:
            await self.cancel()
            self._ended = True
            raise NodeUnavailable(f"no answer within timeout_s = {self._timeout_s:g} s") from None


class Client:
    """The same for programs without an event loop: one runs in a thread of this client. Thread-safe."""

    def __init__(self, address: str, *, ping_s: float = PING_S, silence_s: float = SILENCE_S) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvkin-client", daemon=True)
        self._thread.start()
        self._client = AsyncClient(address, ping_s=ping_s, silence_s=silence_s)
        self._closed = False

    @property
    def address(self) -> str:
        return self._client.address

    def generate(self, model: str, **request: Any) -> Finished:
        """Ask and wait for the whole answer. Takes what :meth:`AsyncClient.generate` takes."""
        return self.run(self._client.generate(model, **request))

    def stream(self, model: str, **request: Any) -> SyncStream:
        """An answer as it is made: iterate over it inside ``with``. Leaving early cancels the request."""
        return SyncStream(self, self._client.stream(model, **request))

    def cancel(self, request_id: str) -> None:
        """End a running request by the ``id`` of its stream."""
        self.run(self._client.cancel(request_id))

    def models(self, timeout_s: float = ASK_TIMEOUT_S) -> tuple[ModelEntry, ...]:
        """The models of the cluster and the nodes that serve them now."""
        return self.run(self._client.models(timeout_s))

    def status(self, timeout_s: float = ASK_TIMEOUT_S) -> StatusReply:
        """Nodes, loads and counters."""
        return self.run(self._client.status(timeout_s))

    def close(self) -> None:
        """Cancel what runs and end the thread. Idempotent."""
        if self._closed:
            return
        self.run(self._client.close())
        self.run(self._loop.shutdown_default_executor())
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the client's loop. An interrupted wait (Ctrl-C) cancels it."""
        if self._closed:
            work.close()
            raise NodeUnavailable("the client is closed")
        future: concurrent.futures.Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class SyncStream:
    """``AnswerStream`` for programs without an event loop."""

    def __init__(self, client: Client, stream: AnswerStream) -> None:
        self._client, self._stream = client, stream

    @property
    def id(self) -> str:
        return self._stream.id

    @property
    def accepted(self) -> Accepted | None:
        return self._stream.accepted

    @property
    def finished(self) -> Finished | None:
        return self._stream.finished

    def finish(self) -> Finished:
        """Read to the end and return the result. Raises the error that ended the request."""
        return self._client.run(self._stream.finish())

    def cancel(self) -> None:
        """Ask the router to end the request."""
        self._client.run(self._stream.cancel())

    def __enter__(self) -> Self:
        self._client.run(self._stream.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.run(self._stream.__aexit__(kind, error, traceback))

    def __iter__(self) -> Iterator[Tokens]:
        while True:
            tokens = self._client.run(self._next())
            if tokens is None:
                return
            yield tokens

    async def _next(self) -> Tokens | None:
        # StopAsyncIteration cannot leave a coroutine that a future runs
        try:
            return await self._stream.__anext__()
        except StopAsyncIteration:
            return None


# Code -> class. Of classes with one code the most special counts; a configuration's error is never a request's.
_KNOWN: dict[str, type[KvkinError]] = {
    one.code: one
    for one in vars(errors).values()
    if isinstance(one, type) and issubclass(one, KvkinError) and one is not ConfigError
}


def error_of(reply: Error) -> KvkinError:
    """The exception that an error reply stands for."""
    return _error_class(reply.code, reply.retryable)(reply.message)


@functools.cache
def _error_class(code: str, retryable: bool) -> Callable[[str], KvkinError]:
    """The class of the tree that has ``code``; where the router judges its retryability otherwise, or uses a code that this
    client does not know, a subclass that says so."""
    found = _KNOWN.get(code, KvkinError)
    if found.code == code and found.retryable == retryable:
        return found
    return type(found.__name__, (found,), {"code": code, "retryable": retryable, "__module__": found.__module__})


def _chat_message(message: MessageLike) -> ChatMessage:
    if isinstance(message, ChatMessage):
        return message
    if isinstance(message, Mapping):
        return ChatMessage(message["role"], message["content"])
    role, content = message
    return ChatMessage(role, content)
