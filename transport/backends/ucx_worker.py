"""The thread that polls what is in flight on the links of one ``ucx`` transport.

NIXL has nothing to await: somebody has to poll. One thread does it for all links. It sleeps on its command queue while nothing
is in flight and polls every 50 us otherwise, which beats busy polling where cores are few (an event loop cannot: its timers
have milliseconds).
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable

from kvkin.transport.backends.base import join_threads
from kvkin.transport.backends.ucx_link import Link

POLL_S = 50e-6
QUARANTINE_POLL_S = 2e-3


def _nothing() -> None:
    pass


class UcxWorker:
    """The thread with its command queue."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._links: list[Link] = []
        self._thread = threading.Thread(target=self._run, name=f"kvkin-ucx-{next(self._numbers)}", daemon=True)
        self._thread.start()

    def add(self, link: Link) -> None:
        """From the loop: drive this link from now on."""
        self._commands.put(lambda: self._links.append(link))

    def drop(self, link: Link) -> None:
        """From the loop: the link is torn down."""
        self._commands.put(lambda: self._links.remove(link) if link in self._links else None)

    def submit(self, command: Callable[[], None]) -> None:
        """From the loop: run this on the worker thread, in order."""
        self._commands.put(command)

    def wake(self) -> None:
        """From the loop: a link has something in flight that no command announced."""
        self._commands.put(_nothing)

    async def stop(self) -> None:
        """End the thread; links must be torn down before."""
        self._commands.put(None)
        await join_threads([self._thread])

    def _run(self) -> None:
        while True:
            busy = [link for link in self._links if link.busy]
            try:
                command = self._commands.get(block=not busy)
            except queue.Empty:
                pass
            else:
                if command is None:
                    return
                command()
                continue
            moved = False
            for link in busy:
                moved = link.step() or moved
            if not moved:
                time.sleep(QUARANTINE_POLL_S if all(link.only_quarantined for link in busy) else POLL_S)
