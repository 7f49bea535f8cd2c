"""EngineLoop: an engine's own thread with an inbox, so that an engine's state is touched by that thread only.

Both engines run on one: ``step`` does one thing and says whether there was anything to do; in between, what other threads posted
is taken in. Until ``start`` the caller steps (tests).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kvkin.engines.api import EngineRequest
from kvkin.kv.errors import DuplicateRequest, NodeUnavailable

T = TypeVar("T")


class EngineLoop:
    """``step()`` -> False if there was nothing to do; ``end()`` once, at the close, on the engine's thread."""

    def __init__(self, step: Callable[[], bool], end: Callable[[], None]) -> None:
        self._step, self._end = step, end
        self._inbox: deque[Callable[[], None]] = deque()
        self._lock = threading.Condition()
        self._closed = False
        self._drained = False  # nothing looks into the inbox any more
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kvkin-engine", daemon=True)
        self._thread.start()

    # --- from any thread -----------------------------------------------------------------------------------------------

    def post(self, action: Callable[[], None]) -> bool:
        """Have ``action`` run on the engine thread; False if the engine is closed and never will."""
        with self._lock:
            if self._drained:
                return False
            self._inbox.append(action)
            self._lock.notify_all()
            return True

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run ``function`` on the engine's thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the future
                    future.set_exception(error)

        if not self.post(run):
            future.set_exception(NodeUnavailable("the engine is closed"))
        return future

    def close(self) -> None:
        """Stop after the current step. Idempotent."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join()
        else:
            self._shut_down()

    # --- on the engine's thread ----------------------------------------------------------------------------------------

    def take_in(self) -> None:
        """Run what was posted."""
        while self._inbox:
            self._inbox.popleft()()

    def sift(
        self, wanted: Callable[[Callable[[], None]], bool], timeout_s: float, stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """In the middle of a step: run what was posted and is ``wanted``, out of its turn; if there is none, wait for it.

        False if there was none within ``timeout_s``, or ``stop()`` held once all that is there was looked at. The rest keeps its turn.
        """
        chosen: list[Callable[[], None]] = []

        def found() -> bool:
            chosen[:] = [action for action in self._inbox if wanted(action)]
            return bool(chosen) or stop()

        with self._lock:
            self._lock.wait_for(found, timeout_s)
            for action in chosen:
                self._inbox.remove(action)
        for action in chosen:
            action()
        return bool(chosen)

    def _run(self) -> None:
        while True:
            busy = self._step()
            with self._lock:
                if self._closed:
                    break
                if not busy and not self._inbox:
                    self._lock.wait()
        self._shut_down()

    def _shut_down(self) -> None:
        while True:
            with self._lock:
                ended = self._drained
                self._drained = not self._inbox
                if self._drained:
                    break
                action = self._inbox.popleft()
            action()
        if not ended:
            self._end()


def apart(function: Callable[[], T]) -> T:
    """Run ``function`` on a thread that ends with it, and with it the OpenMP threads that worked for it; returns or raises what it does.

    For what loads and compiles models: libgomp counts the threads of all pools of a process, those of idle ones too. Are they more than
    the CPUs, waiting threads sleep at once, and every parallel operation of the engine's own thread takes 0.1 ms longer. With two pools
    a decoding step of a small model on vLLM took 1.3 to 1.8 times as long.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised where it was asked for
            done.set_exception(error)

    thread = threading.Thread(target=run, name="kvkin-build", daemon=True)
    thread.start()
    thread.join()
    return done.result()


class ActiveRequests:
    """Which ids are taken: from ``add`` (any thread) until the request has ended or was cancelled."""

    def __init__(self) -> None:
        self._requests: dict[str, EngineRequest] = {}
        self._lock = threading.Lock()

    def add(self, request: EngineRequest) -> None:
        """Raises DuplicateRequest."""
        with self._lock:
            if request.request_id in self._requests:
                raise DuplicateRequest(f"request {request.request_id!r} is still running")
            self._requests[request.request_id] = request

    def cancelled(self, request_id: str) -> None:
        """The id is free at once, even before the engine has ended its request."""
        with self._lock:
            self._requests.pop(request_id, None)

    def ended(self, request: EngineRequest) -> None:
        with self._lock:
            if self._requests.get(request.request_id) is request:
                del self._requests[request.request_id]
