"""Arenas and the copies between them, against a model that moves one block at a time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvkin.kv.layout import KVLayout, Plane
from kvkin.transport.arena import Arena, e_copies, kv_copies
from kvkin.transport.data_plane import Copy

LAYOUT = KVLayout(
    num_layers=3,
    planes=(Plane("k", kv_heads=2, head_dim=4), Plane("v", kv_heads=1, head_dim=2)),
    hidden_size=6,
    dtype="float16",
    block_size=2,
)


def filled(num_slots: int, num_e_slots: int, seed: int) -> Arena:
    arena = Arena(LAYOUT, num_slots, num_e_slots)
    arena.buffer[: arena.num_bytes] = np.random.default_rng(seed).integers(0, 256, arena.num_bytes, dtype=np.uint8)
    return arena


def apply(copies: list[Copy], remote: NDArray[np.uint8], local: NDArray[np.uint8]) -> None:
    for copy in copies:
        source = remote[copy.remote_offset : copy.remote_offset + copy.num_bytes]
        local[copy.local_offset : copy.local_offset + copy.num_bytes] = source


@st.composite
def slot_lists(draw: st.DrawFn) -> tuple[int, int, list[int], list[int]]:
    """Two arena sizes and equally long slot lists, often with runs; local slots are distinct."""
    remote_slots, local_slots = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    count = draw(st.integers(0, min(remote_slots, local_slots)))
    start = draw(st.integers(0, remote_slots - count))
    run = list(range(start, start + count))
    remote = draw(st.one_of(st.just(run), st.lists(st.integers(0, remote_slots - 1), min_size=count, max_size=count)))
    local = draw(st.one_of(st.just(list(range(count))), st.permutations(range(local_slots)).map(lambda x: x[:count])))
    return remote_slots, local_slots, remote, local


@given(slots=slot_lists(), layer=st.integers(0, LAYOUT.num_layers - 1))
def test_kv_copies_move_the_same_bytes_as_the_model(slots: tuple[int, int, list[int], list[int]], layer: int) -> None:
    remote_slots, local_slots, remote, local = slots
    source, target = filled(remote_slots, 1, 1), filled(local_slots, 2, 2)
    expected = target.buffer.copy()
    model = Arena(LAYOUT, local_slots, 2)
    model.buffer[:] = expected
    for theirs, ours in zip(remote, local, strict=True):
        model.kv_block(layer, ours)[:] = source.kv_block(layer, theirs)
    copies = kv_copies(LAYOUT, layer, remote, remote_slots, local, local_slots)
    apply(copies, source.buffer, target.buffer)
    assert np.array_equal(target.buffer, model.buffer)
    assert sum(copy.num_bytes for copy in copies) == len(remote) * LAYOUT.kv_block_bytes
    check_coalesced(copies)


@given(slots=slot_lists())
def test_e_copies_move_the_same_bytes_as_the_model(slots: tuple[int, int, list[int], list[int]]) -> None:
    remote_slots, local_slots, remote, local = slots
    source, target = filled(5, remote_slots, 3), filled(2, local_slots, 4)
    model = Arena(LAYOUT, 2, local_slots)
    model.buffer[:] = target.buffer
    for theirs, ours in zip(remote, local, strict=True):
        model.e_block(ours)[:] = source.e_block(theirs)
    copies = e_copies(LAYOUT, remote, source.kv_bytes, local, target.kv_bytes)
    apply(copies, source.buffer, target.buffer)
    assert np.array_equal(target.buffer, model.buffer)
    check_coalesced(copies)


def check_coalesced(copies: list[Copy]) -> None:
    """No copy goes on where the one before ended on both sides."""
    for before, after in itertools.pairwise(copies):
        assert (before.remote_offset + before.num_bytes, before.local_offset + before.num_bytes) != (
            after.remote_offset,
            after.local_offset,
        )


def test_one_run_is_one_copy() -> None:
    assert len(kv_copies(LAYOUT, 1, [3, 4, 5], 8, [0, 1, 2], 8)) == 1
    assert len(kv_copies(LAYOUT, 1, [3, 4, 5], 8, [0, 2, 3], 8)) == 2


def test_lists_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="2 remote blocks for 1 local"):
        kv_copies(LAYOUT, 0, [1, 2], 4, [0], 4)


def test_slots_do_not_overlap_and_fill_the_arena() -> None:
    arena = Arena(LAYOUT, 4, 3)
    touched = np.zeros(arena.num_bytes, dtype=np.int64)
    base = arena.buffer.ctypes.data
    blocks = [arena.kv_block(layer, slot) for layer in range(LAYOUT.num_layers) for slot in range(4)]
    blocks += [arena.e_block(slot) for slot in range(3)]
    for block in blocks:
        start = block.ctypes.data - base
        touched[start : start + block.size] += 1
    assert (touched == 1).all()


def test_close_is_idempotent_and_views_outlive_it() -> None:
    arena = Arena(LAYOUT, 2, 1)
    view = arena.kv_block(0, 1)
    view[:] = 7
    arena.close()
    arena.close()
    assert (view == 7).all()
    assert arena.buffer.size == 0
