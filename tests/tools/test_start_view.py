"""What is said while a cluster starts, and that a node which is told to stop meanwhile stops."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from kvkin.kv.errors import ConfigError
from kvkin.tools import roles
from kvkin.tools.cluster_processes import NodeProcess, NodeState
from kvkin.tools.start_view import MAX_WORDS, SlowLines, last_event, narrate, starting_text


def node(folder: Path, name: str, state: NodeState, *events: str) -> NodeProcess:
    log = folder / f"{name}.log"
    log.write_text("".join(f"{json.dumps({'event': event, 'level': 'info'})}\n" for event in events))
    return NodeProcess(name, "decode", log, state)


def test_who_is_waited_for_and_what_one_of_them_said(tmp_path: Path) -> None:
    nodes = [
        node(tmp_path, "router-0", NodeState.SERVING, "serving"),
        node(tmp_path, "decode-0", NodeState.STARTING, "importing vLLM", "starting vLLM"),
        node(tmp_path, "decode-1", NodeState.WAITING, "of an earlier run"),
    ]
    assert starting_text(nodes, 41.6) == "waiting for decode-0, decode-1 (42 s); decode-0: starting vLLM"
    nodes[1].state = NodeState.SERVING
    assert starting_text(nodes, 50) == "waiting for decode-1 (50 s)"
    nodes[2].state = NodeState.SERVING
    assert starting_text(nodes, 50) == ""


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("", ""),
        ("  plain   words ", "plain words"),
        ("first\nlast\n\n", "last"),
        ('{"event": "one"}\n{"event": "two"}\nwarnings.warn(\n7\n', "two"),
        ('{"no": "event"}', '{"no": "event"}'),
        ("[1]", "[1]"),
        ("7", "7"),
        (json.dumps({"event": "x" * 500}), "x" * (MAX_WORDS - 1) + "…"),
    ],
)
def test_any_log_will_do(log: str, said: str) -> None:
    assert last_event(log) == said


async def test_it_is_said_until_all_serve(tmp_path: Path) -> None:
    starting = node(tmp_path, "decode-0", NodeState.STARTING, "loading")
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            starting.state = NodeState.SERVING

    seconds = iter(range(100, 200, 10))
    await narrate([starting], say, 0.0, lambda: float(next(seconds)))
    assert said == ["waiting for decode-0 (10 s); decode-0: loading", "waiting for decode-0 (20 s); decode-0: loading"]


def test_lines_of_a_log_are_few() -> None:
    said: list[str] = []
    now = 0.0
    lines = SlowLines(said.append, 15.0, lambda: now)
    for now in (1.0, 14.9, 15.0, 16.0, 29.9, 31.0):
        lines(f"at {now:g}")
    assert said == ["at 15", "at 31"]


class Ended(BaseException):
    """In place of the end of the process."""


async def test_a_node_that_is_told_to_stop_while_it_loads_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling cannot be interrupted: nobody waits for it."""

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(roles.os, "_exit", end)  # type: ignore[attr-defined]
    stop, loading, over = asyncio.Event(), threading.Event(), threading.Event()

    def build() -> Any:
        loading.set()
        over.wait(30)

    starting = asyncio.ensure_future(roles._built_or_stopped(build, stop, "decode-0"))
    await asyncio.to_thread(loading.wait, 30)
    assert not starting.done()
    stop.set()
    try:
        with pytest.raises(Ended, match="0"):
            await starting
    finally:
        over.set()


async def test_an_engine_that_cannot_be_built_says_so() -> None:
    def build() -> Any:
        raise ConfigError("vllm", "no", "yes")

    with pytest.raises(ConfigError, match="vllm"):
        await roles._built_or_stopped(build, asyncio.Event(), "decode-0")
    engine: Any = object()
    assert await roles._built_or_stopped(lambda: engine, asyncio.Event(), "decode-0") is engine
