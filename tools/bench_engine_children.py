"""The bench's end of its child processes: started together, asked in turn, and gone afterwards, whatever happens.

A child is ``python -m kvkin.tools.bench_engine_child`` in a session of its own: Ctrl-C at the terminal reaches the bench alone, which then
ends its children. They also end by themselves once the bench is gone, as their stdin ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvkin.kv.errors import DeadlineExceeded, KvkinError, NodeUnavailable
from kvkin.tools.bench_engine_messages import Answered, Asked, Command, Failed, Ready, Reply, Setup
from kvkin.tools.cluster_processes import LOG_TAIL_LINES
from kvkin.tools.shared_cores import SHARED_CORES

R = TypeVar("R", bound=Reply)

LINE_BYTES = 64 << 20


class Child:
    """A running process; everything raises NodeUnavailable with the end of its log once it has ended."""

    def __init__(self, name: str, setup: Setup, threads: int, log: Path) -> None:
        self.name, self.setup, self.log = name, setup, log
        self.settings: dict[str, Any] = {}
        self._threads = threads
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Queue[Reply | None]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "start comes first"
        return self._process.pid

    # --- its life ------------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start it; ``ready`` waits until it has loaded."""
        environment = {**SHARED_CORES, **os.environ, "OMP_NUM_THREADS": str(self._threads)}
        self._replies[0] = asyncio.Queue()
        with self.log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "kvkin.tools.bench_engine_child",
                msgspec.json.encode(self.setup).decode(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment,
                limit=LINE_BYTES,
                start_new_session=True,
            )
        self._reading = asyncio.create_task(self._read(), name=f"bench-{self.name}")

    async def ready(self, deadline_s: float) -> None:
        """Until it has loaded. Raises NodeUnavailable if it ends instead, DeadlineExceeded."""
        self.settings = (await self._next(0, Ready, deadline_s)).settings

    async def stop(self) -> None:
        """End it now: nothing in it is worth a farewell. Idempotent."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    # --- asking it -----------------------------------------------------------------------------------------------------------

    async def ask(self, command: Command, kind: type[R], deadline_s: float) -> R:
        """Its one reply. Raises KvkinError for a command that fails."""
        async with self.asking(command) as number:
            return await self._next(number, kind, deadline_s)

    @contextlib.asynccontextmanager
    async def asking(self, command: Command) -> AsyncIterator[int]:
        """Ask, and give the number under which ``reply`` finds what comes."""
        assert self._process is not None, "start comes first"
        assert self._process.stdin is not None
        number = next(self._numbers)
        self._replies[number] = asyncio.Queue()
        try:
            try:
                self._process.stdin.write(msgspec.json.encode(Asked(number, command)) + b"\n")
                await self._process.stdin.drain()
            except ConnectionError:
                raise await self._death() from None
            yield number
        finally:
            self._replies.pop(number, None)

    async def reply(self, number: int, kind: type[R], deadline_s: float) -> R:
        """The next reply to the command of this number."""
        return await self._next(number, kind, deadline_s)

    async def _next(self, number: int, kind: type[R], deadline_s: float) -> R:
        replies = self._replies[number]
        try:
            async with asyncio.timeout(deadline_s):
                reply = await replies.get()
        except TimeoutError:
            raise DeadlineExceeded(f"{self.name} did not answer within {deadline_s:g} s; {self.log_end()}") from None
        if reply is None:
            raise await self._death()
        if isinstance(reply, Failed):
            raise KvkinError(f"{self.name}: {reply.why}; {self.log_end()}")
        assert isinstance(reply, kind), reply
        return reply

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        decoder = msgspec.json.Decoder(Answered)
        try:
            while line := await self._process.stdout.readline():
                answered = decoder.decode(line)
                replies = self._replies.get(answered.number)
                if replies is not None:
                    replies.put_nowait(answered.reply)
        finally:
            # whoever waits now, or asks later, hears that it has ended
            for replies in self._replies.values():
                replies.put_nowait(None)

    async def _death(self) -> NodeUnavailable:
        assert self._process is not None
        returncode = await self._process.wait()
        how = f"was killed by signal {-returncode}" if returncode < 0 else f"ended with exit code {returncode}"
        return NodeUnavailable(f"{self.name} {how}; {self.log_end()}")

    def log_end(self) -> str:
        """The last lines of its log."""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[-LOG_TAIL_LINES:]
            if lines:
                return f"the end of {self.log}:\n" + "\n".join(lines)
        return f"{self.log} is empty"


@contextlib.asynccontextmanager
async def running(children: Sequence[Child], ready_s: float) -> AsyncIterator[None]:
    """All ``children`` loaded, or none: they load at the same time, and are gone afterwards.

    Raises what the first of them to fail says.
    """
    try:
        for child in children:
            child.log.parent.mkdir(parents=True, exist_ok=True)
            await child.start()
        loading = [asyncio.create_task(child.ready(ready_s)) for child in children]
        try:
            await asyncio.gather(*loading)
        finally:
            for task in loading:
                task.cancel()
            await asyncio.gather(*loading, return_exceptions=True)
        yield
    finally:
        await asyncio.gather(*(child.stop() for child in children))
