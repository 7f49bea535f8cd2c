"""What a cluster that starts is busy with, for people who wait: which nodes are not ready, for how long, what one of them said last.

Loading weights takes seconds, compiling a model minutes. Used by ``kvkin up`` and the demo; the text is pure.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable

from kvkin.tools.cluster_processes import NodeProcess, NodeState

LINE_EVERY_S = 15.0
"""Where there is no screen to refresh, a line so often."""
MAX_WORDS = 100


def starting_text(nodes: Iterable[NodeProcess], seconds: float) -> str:
    """``waiting for decode-0, decode-1 (42 s); decode-0: starting vLLM``; empty once all serve."""
    waiting = [node for node in nodes if node.state in (NodeState.WAITING, NodeState.STARTING)]
    if not waiting:
        return ""
    text = f"waiting for {', '.join(node.name for node in waiting)} ({seconds:.0f} s)"
    for node in waiting:
        said = last_event(node.log_tail()) if node.state is NodeState.STARTING else ""
        if said:
            return f"{text}; {node.name}: {said}"
    return text


def last_event(log: str) -> str:
    """The last event of kvkin's own in the end of a log, whatever libraries have printed since; else the last line. No longer than fits."""
    lines = log.strip().splitlines()
    event = next(filter(None, map(_event, reversed(lines))), " ".join(lines[-1].split()) if lines else "")
    return event if len(event) <= MAX_WORDS else f"{event[: MAX_WORDS - 1]}…"


def _event(line: str) -> str:
    try:
        found = json.loads(line)
    except ValueError:
        return ""
    return str(found["event"]) if isinstance(found, dict) and "event" in found else ""


async def narrate(
    nodes: Iterable[NodeProcess],
    say: Callable[[str], None],
    every_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """``say`` it again and again until all serve, or the task is cancelled."""
    began, all_nodes = clock(), list(nodes)
    while True:
        await asyncio.sleep(every_s)
        text = starting_text(all_nodes, clock() - began)
        if not text:
            return
        say(text)


class SlowLines:
    """Hands on at most one text every ``every_s`` seconds: what a spinner would show, as lines of a log."""

    def __init__(
        self, say: Callable[[str], None], every_s: float = LINE_EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._every_s, self._clock = say, every_s, clock
        self._said = clock()

    def __call__(self, text: str) -> None:
        if self._clock() - self._said >= self._every_s:
            self._said = self._clock()
            self._say(text)
