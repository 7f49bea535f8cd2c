"""The layouts of GPU backends, by vLLM's own words: what the installed version's writers put into a cache, kvkin's adapters read back.

NOT RUN ON A DEVICE: FlashAttention, FlashInfer and Triton import what is not there without a GPU, so their ``do_kv_cache_update`` is
taken from the installed source and run over the kernel's documented meaning (``key_cache[block, offset] = key``), in every memory
order that vLLM has. ``test_gpu.py`` does it with the kernels; CPU attention's own kernel runs in all other tests here.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvkin.configs.vllm_install import installed_vllm
from kvkin.engines.vllm.paged_kv import SPLIT_BACKENDS, check_round_trip, layout_for, slots_of

pytestmark = pytest.mark.vllm

VLLM = installed_vllm()
if VLLM is None:
    pytest.skip("vLLM is not installed here (make install ENGINE=vllm)", allow_module_level=True)

BLOCKS, HEADS, SIZE, DIM, LAYERS = 7, 3, 32, 16, 4
SOURCES = {"FLASH_ATTN": "flash_attn.py", "FLASHINFER": "flashinfer.py", "TRITON_ATTN": "triton_attn.py"}


def kernel(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, *_: Any) -> None:
    """reshape_and_cache_flash: rows (n, heads, dim) to their slots of caches (blocks, size, heads, dim)."""
    for cache, rows in ((key_cache, key), (value_cache, value)):
        assert cache.shape == (BLOCKS, SIZE, HEADS, DIM)
        for row, slot in enumerate(slots.tolist()):
            cache[slot // SIZE, slot % SIZE] = rows[row]


def writer(folder: Path, backend: str) -> Callable[..., None]:
    """The backend's ``do_kv_cache_update``, from its source, over ``kernel``."""
    tree = ast.parse((folder / "v1" / "attention" / "backends" / SOURCES[backend]).read_text(encoding="utf-8"))
    (found,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "do_kv_cache_update" and not node.decorator_list
    ]
    # inherits this module's postponed annotations: those of vLLM name what is not there
    code = compile(ast.Module([found], []), SOURCES[backend], "exec")
    ops = SimpleNamespace(_C_cache_ops=SimpleNamespace(reshape_and_cache_flash=kernel))
    names: dict[str, Any] = {
        "reshape_and_cache_flash": kernel,
        "triton_reshape_and_cache_flash": kernel,
        "torch": SimpleNamespace(ops=ops),
        "AttentionType": SimpleNamespace(ENCODER_ONLY="encoder_only", ENCODER="encoder"),
        "is_quantized_kv_cache": lambda dtype: dtype != "auto",
    }
    exec(code, names)  # noqa: S102 - vLLM's own code, from the package that is installed
    update: Callable[..., None] = names["do_kv_cache_update"]
    return update


def memory_orders(folder: Path) -> dict[str, tuple[int, ...]]:
    """vLLM's physical orders of (layer, block, head, token, content), by name."""
    spec = importlib.util.spec_from_file_location("kv_cache_layout_of_vllm", folder / "v1" / "kv_cache_layout.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return {layout.name: layout.stride_order for layout in module.KVCacheLayout}


def layer_of(order: tuple[int, ...], layer: int) -> Tensor:
    """The logical cache (blocks, heads, size, 2 * dim) of one layer, in memory that all layers share in ``order``; NaN all over."""
    logical = (LAYERS, BLOCKS, HEADS, SIZE, 2 * DIM)
    memory = torch.full(tuple(logical[axis] for axis in order), float("nan"))
    return memory.permute(*(order.index(axis) for axis in range(5)))[layer]


def attention(folder: Path, backend: str, cache: Tensor) -> Any:
    """As much of vLLM's attention module as the writer looks at."""
    update = writer(folder, backend)
    settings = SimpleNamespace(
        attn_type="decoder",
        head_size=DIM,
        num_kv_heads=HEADS,
        kv_cache_dtype="auto",
        cache_dtype="auto",
        kv_sharing_target_layer_name=None,
        nvfp4_fa2=False,
        is_kvcache_nvfp4=False,
        _is_per_token_head_quant=False,
    )
    impl = SimpleNamespace(do_kv_cache_update=lambda *arguments: update(settings, *arguments))
    return SimpleNamespace(impl=impl, kv_cache=cache, _k_scale=None, _v_scale=None)


def test_every_split_backend_is_here() -> None:
    assert set(SOURCES) == set(SPLIT_BACKENDS)


@pytest.mark.parametrize("order", memory_orders(VLLM.folder).items(), ids=lambda order: order[0])
@pytest.mark.parametrize("backend", SOURCES)
def test_what_the_backend_writes_is_read_back(backend: str, order: tuple[str, tuple[int, ...]]) -> None:
    assert VLLM is not None
    cache = layer_of(order[1], 2)
    module, layout = attention(VLLM.folder, backend, cache), layout_for(backend, None)
    slots = slots_of([4, 1, 6], SIZE, 5, 90)
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn((len(slots), HEADS, DIM), generator=generator) for _ in range(2))
    module.impl.do_kv_cache_update(module, keys, values, cache, slots)
    read = layout.read(cache, slots)
    assert torch.equal(read[0], keys)
    assert torch.equal(read[1], values)
    others = torch.tensor(sorted(set(range(BLOCKS * SIZE)) - set(slots.tolist())))
    assert all(plane.isnan().all() for plane in layout.read(cache, others)), "no other slot was touched"
    check_round_trip(layout, module, cache, SIZE)
