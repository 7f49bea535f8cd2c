"""Layouts of vLLM's paged caches, without vLLM: what each backend writes by its own words is read back by slots.

FlashAttention, Triton and FlashInfer cannot run here: their caches are tensors with the strides that vLLM gives them, written here
the way their kernels are documented to write. ``test_layers.py`` does the same on CPU attention's own kernel.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvkin.engines.vllm.paged_kv import (
    CpuVectorLayout,
    SplitLayout,
    check_round_trip,
    layout_for,
    slots_of,
    write,
)
from kvkin.kv.errors import ConfigError

BLOCKS, HEADS, SIZE, DIM = 7, 3, 32, 16

# logical (B, H, N, C) as a view of memory in another order: vllm/v1/kv_cache_layout.py
ORDERS = {
    "HND": ((0, 1, 2, 3), False),
    "NHD": ((0, 2, 1, 3), False),
    "HND, a layer of interleaved ones": ((0, 1, 2, 3), True),
    "NHD, a layer of interleaved ones": ((0, 2, 1, 3), True),
    "heads outermost": ((1, 0, 2, 3), False),
}


def strided(order: tuple[int, ...], interleaved: bool) -> Tensor:
    """A cache of logical shape (blocks, heads, size, 2 * dim) whose memory has its axes in ``order``; NaN all over."""
    logical = (BLOCKS, HEADS, SIZE, 2 * DIM)
    physical = [logical[axis] for axis in order]
    if interleaved:  # block by block, four layers in each: this one is the third
        memory = torch.full((physical[0], 4, *physical[1:]), float("nan"))[:, 2]
    else:
        memory = torch.full(tuple(physical), float("nan"))
    inverse = [order.index(axis) for axis in range(4)]
    return memory.permute(*inverse)


def split_write(cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """reshape_and_cache_flash: row by row, keys in the first half of the last axis."""
    for row, slot in enumerate(slots.tolist()):
        for head in range(HEADS):
            cache[slot // SIZE, head, slot % SIZE, :DIM] = keys[row, head]
            cache[slot // SIZE, head, slot % SIZE, DIM:] = values[row, head]


def vector_write(cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """cpu_attn_reshape_and_cache (vec): of each block and head, keys column by column, then values row by row."""
    flat = cache.view(BLOCKS, HEADS, 2 * SIZE * DIM)
    for row, slot in enumerate(slots.tolist()):
        block, offset = slot // SIZE, slot % SIZE
        for head in range(HEADS):
            for element in range(DIM):
                flat[block, head, element * SIZE + offset] = keys[row, head, element]
                flat[block, head, SIZE * DIM + offset * DIM + element] = values[row, head, element]


def rows(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn((count, HEADS, DIM), generator=generator) for _ in range(2))
    return keys, values


TOKENS = [(0, 1), (0, 32), (31, 33), (5, 70), (63, 96), (0, 96)]


@pytest.mark.parametrize(("start", "stop"), TOKENS)
@pytest.mark.parametrize("order", ORDERS)
def test_split_layout(order: str, start: int, stop: int) -> None:
    cache = strided(*ORDERS[order])
    slots = slots_of([4, 1, 6], SIZE, start, stop)
    keys, values = rows(stop - start, 1)
    split_write(cache, keys, values, slots)
    read = SplitLayout().read(cache, slots)
    assert torch.equal(read[0], keys)
    assert torch.equal(read[1], values)
    cache.zero_()
    assert torch.equal(read[0], keys), "it is a copy"


@pytest.mark.parametrize(("start", "stop"), TOKENS)
def test_cpu_vector_layout(start: int, stop: int) -> None:
    cache = torch.full((BLOCKS, HEADS, SIZE, 2 * DIM), float("nan"))
    slots = slots_of([4, 1, 6], SIZE, start, stop)
    keys, values = rows(stop - start, 2)
    vector_write(cache, keys, values, slots)
    read = CpuVectorLayout().read(cache, slots)
    assert torch.equal(read[0], keys)
    assert torch.equal(read[1], values)
    cache.zero_()
    assert torch.equal(read[0], keys), "it is a copy"


@pytest.mark.parametrize("layout", [SplitLayout(), CpuVectorLayout()])
def test_slots_in_any_order_and_again(layout: Any) -> None:
    writes = vector_write if isinstance(layout, CpuVectorLayout) else split_write
    cache = torch.zeros((BLOCKS, HEADS, SIZE, 2 * DIM))
    slots = torch.tensor([200, 3, 65, 64, 0])
    keys, values = rows(5, 3)
    writes(cache, keys, values, slots)
    again = [4, 0, 2, 2, 1]
    read = layout.read(cache, slots[again])
    assert torch.equal(read[0], keys[again])
    assert torch.equal(read[1], values[again])


def test_slots() -> None:
    assert slots_of([4, 1], 4, 2, 7).tolist() == [18, 19, 4, 5, 6]
    assert slots_of([4, 1], 4, 4, 4).tolist() == []
    assert slots_of([9], 1, 0, 1).tolist() == [9]
    with pytest.raises(ValueError, match="need 3 blocks of 4, there are 2"):
        slots_of([4, 1], 4, 0, 9)


def attention_of(writes: Any, cache: Tensor) -> Any:
    def update(layer: Any, keys: Tensor, values: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        assert layer.kv_cache is kv_cache
        assert keys.is_contiguous()
        assert values.is_contiguous()
        writes(kv_cache, keys, values, slots)

    return SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=update), kv_cache=cache)


def test_the_round_trip_at_the_start_finds_another_layout() -> None:
    """An engine whose cache is not what its backend's name says does not start."""
    cache = torch.zeros((BLOCKS, HEADS, SIZE, 2 * DIM))
    check_round_trip(SplitLayout(), attention_of(split_write, cache), cache, SIZE)
    check_round_trip(CpuVectorLayout(), attention_of(vector_write, cache), cache, SIZE)
    assert not cache.any(), "nothing is left behind"
    with pytest.raises(ConfigError, match="not laid out"):
        check_round_trip(SplitLayout(), attention_of(vector_write, cache), cache, SIZE)
    with pytest.raises(ConfigError, match="not laid out"):
        check_round_trip(CpuVectorLayout(), attention_of(split_write, cache), cache, SIZE)


def test_keys_and_values_are_not_swapped() -> None:
    cache = torch.zeros((BLOCKS, HEADS, SIZE, 2 * DIM))

    def swapped(kv_cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        split_write(kv_cache, values, keys, slots)

    with pytest.raises(ConfigError, match="not laid out"):
        check_round_trip(SplitLayout(), attention_of(swapped, cache), cache, SIZE)


def test_writing_takes_strided_rows() -> None:
    cache = torch.zeros((BLOCKS, HEADS, SIZE, 2 * DIM))
    keys, values = rows(6, 4)
    slots = slots_of([2], SIZE, 0, 3)
    write(attention_of(split_write, cache), keys[::2], values[::2], slots)
    assert torch.equal(SplitLayout().read(cache, slots)[0], keys[::2])


@pytest.mark.parametrize(
    ("backend", "isa", "wanted"),
    [
        ("CPU_ATTN", "vec", CpuVectorLayout),
        ("CPU_ATTN", "vec16", CpuVectorLayout),
        ("FLASH_ATTN", None, SplitLayout),
        ("TRITON_ATTN", None, SplitLayout),
        ("FLASHINFER", None, SplitLayout),
    ],
)
def test_layouts_by_backend(backend: str, isa: str | None, wanted: type) -> None:
    assert type(layout_for(backend, isa)) is wanted


@pytest.mark.parametrize(("backend", "isa", "word"), [("CPU_ATTN", "amx", "float32"), ("MLA", None, "FLASH_ATTN")])
def test_other_backends_are_refused(backend: str, isa: str | None, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        layout_for(backend, isa)
