"""KV layout: sizes and offsets against an independent numpy picture of an arena, and the runs of slots."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkin.kv.layout import DTYPE_BYTES, KVLayout, Plane, slot_runs

PLANES = st.lists(
    st.builds(Plane, st.sampled_from(["k", "v", "x"]), st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=3
)
LAYOUTS = st.builds(
    KVLayout,
    st.integers(1, 5),
    PLANES.map(tuple),
    st.integers(1, 40),
    st.sampled_from(sorted(DTYPE_BYTES)),
    st.integers(1, 17),
)


@given(LAYOUTS, st.integers(1, 7))
def test_an_arena_is_layers_of_slots_of_planes(layout: KVLayout, num_slots: int) -> None:
    """Every (layer, slot) has its own bytes, back to back, slots of one layer next to each other."""
    elements = sum(layout.block_size * plane.kv_heads * plane.head_dim for plane in layout.planes)
    arena = np.zeros((layout.num_layers, num_slots, elements), dtype=f"V{DTYPE_BYTES[layout.dtype]}")
    assert layout.kv_block_bytes == arena[0, 0].nbytes
    assert layout.kv_slot_bytes == arena[:, 0].nbytes
    assert layout.kv_token_bytes * layout.block_size == layout.kv_block_bytes
    for layer, slot in itertools.product(range(layout.num_layers), range(num_slots)):
        at = arena[layer, slot].__array_interface__["data"][0] - arena.__array_interface__["data"][0]
        assert layout.kv_offset(layer, slot, num_slots) == at


@given(LAYOUTS, st.integers(0, 9))
def test_e_slots_hold_a_block_of_hidden_states(layout: KVLayout, slot: int) -> None:
    assert layout.e_block_bytes == layout.block_size * layout.hidden_size * DTYPE_BYTES[layout.dtype]
    assert layout.e_offset(slot) == slot * layout.e_block_bytes


def test_smollm2() -> None:
    """SmolLM2-135M in float32: 30 layers, 3 KV heads of 64."""
    layout = KVLayout(30, (Plane("k", 3, 64), Plane("v", 3, 64)), 576, "float32", 16)
    assert layout.kv_token_bytes == 2 * 3 * 64 * 4
    assert layout.kv_slot_bytes == 30 * 16 * 1536


@pytest.mark.parametrize(
    "changed",
    [
        {"num_layers": 31},
        {"planes": (Plane("k", 3, 64), Plane("v", 3, 32))},
        {"planes": (Plane("v", 3, 64), Plane("k", 3, 64))},
        {"planes": (Plane("k", 64, 3), Plane("v", 3, 64))},
        {"hidden_size": 577},
        {"dtype": "bfloat16"},
        {"block_size": 32},
    ],
)
def test_the_digest_tells_layouts_apart(changed: dict[str, object]) -> None:
    """A producer's block of 32 and a consumer's of 16 must not pass the handshake (vllm#42895)."""
    fields: dict[str, object] = {
        "num_layers": 30,
        "planes": (Plane("k", 3, 64), Plane("v", 3, 64)),
        "hidden_size": 576,
        "dtype": "float32",
        "block_size": 16,
    }
    layout = KVLayout(**fields)  # type: ignore[arg-type]
    assert layout.digest == KVLayout(**fields).digest  # type: ignore[arg-type]
    assert layout.digest != KVLayout(**{**fields, **changed}).digest  # type: ignore[arg-type]


def test_the_digest_is_golden() -> None:
    layout = KVLayout(2, (Plane("k", 1, 4), Plane("v", 1, 4)), 8, "float32", 16)
    assert layout.digest.hex() == "3c46f05a2d75d9d223832c318b5b6de3"


@given(st.lists(st.integers(0, 30), unique=True, max_size=20))
def test_slot_runs_cover_the_list_once_in_order(slots: list[int]) -> None:
    runs = slot_runs(slots)
    assert [slot for _, first, length in runs for slot in range(first, first + length)] == slots
    assert [index for index, _, _ in runs] == list(itertools.accumulate([0, *(length for _, _, length in runs)]))[:-1]
    # as few as possible: no run continues the one before it
    assert all(one[1] + one[2] != other[1] for one, other in itertools.pairwise(runs))
