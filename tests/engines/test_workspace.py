"""A workspace's bytes: into blocks of an arena and back, in every dtype, and what of E it says it has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import NUM_LAYERS, contexts, e_bytes, family, kv_bytes
from hypothesis import given
from hypothesis import strategies as st
from oracle import State

from kvkin.engines.layer_ops import ReferenceOps, layout_of
from kvkin.engines.workspace import Workspace
from kvkin.kv.layout import KVLayout

TOKENS = 48


class Shaped(ReferenceOps):
    """The shapes of a tiny model, in any dtype, without running anything."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(family("qwen3")["receiver"])
        self.dtype = dtype


def filled(dtype: torch.dtype) -> tuple[Workspace, KVLayout, State]:
    """A workspace full of a real context, its layout for blocks of 16, and the same as the oracle keeps it."""
    ops = Shaped(dtype)
    whole = contexts("qwen3", TOKENS)["receiver"]
    parts = ([tensor.to(dtype) for tensor in part] for part in (whole.keys, whole.values, whole.hidden))
    state = State(*parts)
    space = Workspace(ops, TOKENS, taps=(1, 3))
    for layer in range(NUM_LAYERS):
        space.keys[layer][:], space.values[layer][:] = state.keys[layer], state.values[layer]
        space.tap(layer, 0, state.hidden[layer])
    return space, layout_of(ops, 16), state


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@DTYPES
def test_blocks_are_laid_out_as_the_layout_says(dtype: torch.dtype) -> None:
    """Block after block, in each the keys, then the values: packed here by other code than the workspace's."""
    space, layout, state = filled(dtype)
    assert layout.dtype == str(dtype).removeprefix("torch.")
    blocks = np.zeros(3 * layout.kv_block_bytes, dtype=np.uint8)
    space.store_kv(2, 0, blocks, layout)
    assert (blocks == kv_bytes(state, 2, 0, 48, layout)).all()
    space.store_kv(2, 16, blocks[: layout.kv_block_bytes], layout)
    assert (blocks[: layout.kv_block_bytes] == kv_bytes(state, 2, 16, 32, layout)).all()
    states = np.zeros(2 * layout.e_block_bytes, dtype=np.uint8)
    space.store_e(3, 16, states, layout)
    assert (states == e_bytes(state, 3, 16, 48, layout)).all()


@DTYPES
def test_round_trip_through_an_arena(dtype: torch.dtype) -> None:
    """Out into scattered slots of a shared arena and into another workspace: equal to the bit, nothing else touched."""
    space, layout, state = filled(dtype)
    num_slots = 9
    arena = np.full(num_slots * layout.kv_slot_bytes, 7, dtype=np.uint8)
    slots = [7, 2, 3]

    def block(layer: int, slot: int, count: int = 1) -> Any:
        start = layout.kv_offset(layer, slot, num_slots)
        return arena[start : start + count * layout.kv_block_bytes]

    for layer in range(NUM_LAYERS):
        for index, slot in enumerate(slots):
            space.store_kv(layer, index * 16, block(layer, slot), layout)
    untouched = {(layer, slot) for layer in range(NUM_LAYERS) for slot in range(num_slots) if slot not in slots}
    assert all((block(layer, slot) == 7).all() for layer, slot in untouched)
    other = Workspace(Shaped(dtype), TOKENS + 5)
    for keys, values in zip(other.keys, other.values, strict=True):
        keys.fill_(3)
        values.fill_(3)
    for layer in range(NUM_LAYERS):
        other.load_kv(layer, 0, block(layer, 7), layout)
        other.load_kv(layer, 16, block(layer, 2, 2), layout)  # neighbours in the arena are one piece
        assert torch.equal(other.keys[layer][:TOKENS], state.keys[layer])
        assert torch.equal(other.values[layer][:TOKENS], state.values[layer])
        assert (other.keys[layer][TOKENS:] == 3).all()


@DTYPES
def test_loaded_states_are_a_copy(dtype: torch.dtype) -> None:
    """The arena's bytes may be reused once an arrival is consumed."""
    space, layout, state = filled(dtype)
    data = e_bytes(state, 3, 0, 32, layout)
    loaded = space.load_e(0, data, layout)
    data[:] = 0
    assert torch.equal(loaded, state.hidden[3][:32])


def test_the_ends_of_a_workspace_are_not_overrun() -> None:
    space, layout, state = filled(torch.float32)
    with pytest.raises(RuntimeError):
        space.load_kv(0, TOKENS - 8, kv_bytes(state, 0, 0, 16, layout), layout)


@given(st.lists(st.tuples(st.integers(0, 39), st.integers(1, 12)), max_size=8), st.integers(0, 40), st.integers(1, 20))
def test_it_has_the_states_that_were_tapped(spans: list[tuple[int, int]], start: int, length: int) -> None:
    space = Workspace(Shaped(torch.float32), 60, taps=(1,))
    covered = set()
    for first, count in spans:
        space.tap(1, first, torch.zeros(count, 64))
        space.tap(2, first, torch.zeros(count, 64))  # not a tap of this request
        covered |= set(range(first, first + count))
    assert space.has_e(1, start, start + length) == (set(range(start, start + length)) <= covered)
    assert not space.has_e(2, start, start + length)
    space.forget_taps()
    assert not space.has_e(1, start, start + length)
