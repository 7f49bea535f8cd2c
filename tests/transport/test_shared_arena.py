"""Shared arenas: another process sees the same bytes, finds nothing where nothing is, and nothing is left behind."""

from __future__ import annotations

import base64
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkin.kv.errors import LocalTransportError
from kvkin.kv.layout import KVLayout, Plane
from kvkin.transport.arena import Arena, ArenaDescription, AttachedArenas, place_of

LAYOUT = KVLayout(3, (Plane("k", 2, 4), Plane("v", 1, 2)), hidden_size=6, dtype="float16", block_size=2)

OTHER = """
import base64, sys
import msgspec
from kvkin.kv.layout import KVLayout
from kvkin.transport.arena import Arena, ArenaDescription, AttachedArenas

def say(data):
    print(base64.b64encode(data).decode(), flush=True)

match sys.argv[1]:
    case "own":
        layout = msgspec.msgpack.decode(base64.b64decode(sys.argv[2]), type=KVLayout)
        arena = Arena(layout, 4, 2, shared=True)
        arena.kv_block(1, 2)[:] = 99
        say(msgspec.msgpack.encode(arena.description))
        sys.stdin.read()
    case "attach":
        description = msgspec.msgpack.decode(base64.b64decode(sys.argv[2]), type=ArenaDescription)
        arena = Arena.attach(description)
        found = bytes(arena.kv_block(2, 3))
        arena.e_block(1)[:] = 42
        say(found)
"""


@contextmanager
def other(what: str, argument: bytes) -> Iterator[tuple[subprocess.Popen[str], bytes]]:
    """A process that owns or attaches, and what it said first; ended at the end."""
    arguments = [sys.executable, "-c", OTHER, what, base64.b64encode(argument).decode()]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, base64.b64decode(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def test_another_process_reads_and_writes_the_same_bytes() -> None:
    arena = Arena(LAYOUT, 4, 2, shared=True)
    arena.kv_block(2, 3)[:] = np.arange(LAYOUT.kv_block_bytes, dtype=np.uint8)
    with other("attach", msgspec.msgpack.encode(arena.description)) as (process, found):
        assert process.wait(30) == 0
        assert found == bytes(range(LAYOUT.kv_block_bytes))
    assert (arena.e_block(1) == 42).all()
    assert not arena.e_block(0).any(), "and no others"
    arena.close()


def test_nothing_is_left_of_an_owner_that_was_killed() -> None:
    names = set(os.listdir("/dev/shm"))
    with other("own", msgspec.msgpack.encode(LAYOUT)) as (process, said):
        description = msgspec.msgpack.decode(said, type=ArenaDescription)
        assert set(os.listdir("/dev/shm")) == names, "it has no name that could stay"
        attached = AttachedArenas()
        assert (attached.arena(description).kv_block(1, 2) == 99).all()
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        assert (attached.arena(description).kv_block(1, 2) == 99).all(), "who has mapped it can still read"
    with pytest.raises(LocalTransportError, match=str(description.pid)):
        Arena.attach(description)
    mine = Arena(LAYOUT, 1, 1, shared=True)
    assert mine.description is not None
    attached.arena(mine.description)
    assert len(attached) == 1, "the dead owner's was given back"
    attached.close()
    mine.close()


def test_a_closed_arena_is_not_mistaken_for_another() -> None:
    """Its descriptor's number may be somebody else's by now."""
    arena = Arena(LAYOUT, 2, 1, shared=True)
    description = arena.description
    assert description is not None
    arena.close()
    with pytest.raises(LocalTransportError):
        Arena.attach(description)
    later = Arena(LAYOUT, 2, 1, shared=True)
    assert later.description is not None
    assert later.description.fd == description.fd, "the test is about a number that comes again"
    with pytest.raises(LocalTransportError, match="not there any more"):
        Arena.attach(description)
    later.close()


def test_an_arena_of_another_size_is_refused() -> None:
    arena = Arena(LAYOUT, 400, 1, shared=True)
    assert arena.description is not None
    with pytest.raises(LocalTransportError):
        Arena.attach(msgspec.structs.replace(arena.description, num_slots=800))
    arena.close()


def test_descriptors_are_given_back() -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    arena = Arena(LAYOUT, 2, 1, shared=True)
    assert arena.description is not None
    twin = Arena.attach(arena.description)
    view = twin.kv_block(0, 1)
    arena.kv_block(0, 1)[:] = 7
    arena.close()
    twin.close()
    twin.close()
    assert (view == 7).all(), "views keep the memory"
    del view, twin
    forgotten = Arena(LAYOUT, 2, 1, shared=True)
    del forgotten, arena
    assert descriptors() == before


@given(
    layer=st.integers(0, LAYOUT.num_layers - 1), slot=st.integers(0, 4), count=st.integers(1, 2), e=st.integers(0, 2)
)
def test_places_are_where_the_views_are(layer: int, slot: int, count: int, e: int) -> None:
    arena, attached = Arena(LAYOUT, 6, 3, shared=True), AttachedArenas()
    for view in (arena.kv_block(layer, slot, count), arena.e_block(e)):
        view[:] = 1
        place = place_of(view)
        assert place is not None
        assert place.num_bytes == view.nbytes
        theirs = attached.view(place)
        assert (theirs == 1).all()
        theirs[:] = 0
    assert not arena.buffer.any(), "what was set is what was cleared"
    attached.close()
    arena.close()


def test_what_lies_in_no_shared_arena_has_no_place() -> None:
    private, shared = Arena(LAYOUT, 2, 1), Arena(LAYOUT, 2, 1, shared=True)
    assert private.description is None
    assert place_of(private.kv_block(0, 0)) is None
    assert place_of(np.zeros(16, dtype=np.uint8)) is None
    view = shared.kv_block(0, 0)
    assert place_of(view) is not None
    shared.close()
    assert place_of(view) is None
    private.close()
