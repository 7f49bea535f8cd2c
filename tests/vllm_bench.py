"""The vLLM engine as the contract suite wants it: stepped by hand, its cache open to view, one vLLM shared by a test module.

Importing this skips the importing module where vLLM is not installed. Checkpoints are tiny models with heads of 32 (vLLM's CPU
attention takes no smaller ones). Fine-tunes of Llama and Qwen2 are LoRA adapters of one base, so that one engine serves the whole
family; the oracle has the merged models. Of Mixtral an engine serves one model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine_harness
import psutil
import pytest
import torch
from engine_harness import NUM_LAYERS, SHARED_DEPTH, TAPS
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny, make_tiny_lora
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvkin.engines.vllm.compat import installed_version

if installed_version() is None:
    pytest.skip("vLLM is not installed here (make install ENGINE=vllm)", allow_module_level=True)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import cloudpickle

from kvkin.engines.vllm.engine import VllmEngine, VllmModel
from kvkin.engines.vllm.launch import Runtime, build_runtime

WIDE = {"hidden_size": 128, "head_dim": 32}
OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "enable_prefix_caching": False,  # what it serves is neither computed nor tapped: it has tests of its own
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 1 << 27,
}
ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass
class Family:
    """A family on disk. ``members``: name -> adapter (None: the base). ``models`` are all of the harness's, for the oracle."""

    name: str
    checkpoint: Path
    members: dict[str, Path | None]
    models: dict[str, Any]


def lora_family(arch: str, root: Path) -> Family:
    """``receiver`` and ``twin`` are the base; ``upper`` has the adapter of ``sender`` in the shared layers, its own above."""
    checkpoint = make_tiny(arch, root / "base", num_layers=NUM_LAYERS, seed=1, **WIDE)
    layers = range(NUM_LAYERS)
    adapters = {
        name: make_tiny_lora(checkpoint, root / name, layers, seed, targets=ATTENTION_TARGETS)
        for name, seed in (("sender", 2), ("other", 3), ("upper", 4))
    }
    for path in adapters.values():
        _weaken(path)
    _share_lower_layers(adapters["upper"], adapters["sender"])
    base = _load(checkpoint)
    models = {"receiver": base, "twin": base} | {name: _merged(checkpoint, path) for name, path in adapters.items()}
    return _known(Family(f"vllm-{arch}", checkpoint, {"receiver": None, "twin": None, **adapters}, models))


def plain_family(arch: str, root: Path, served: Sequence[str] = ("receiver", "twin")) -> Family:
    """A family of full fine-tunes, of which an engine can serve one."""
    name = f"vllm-{arch}-{served[0]}"
    VARIANTS_HERE[name] = (arch, WIDE)
    models = engine_harness.family(name)
    checkpoint = root / served[0]
    models[served[0]].save_pretrained(str(checkpoint))
    return Family(name, checkpoint, dict.fromkeys(served), models)


VARIANTS_HERE = engine_harness.MORE_VARIANTS


def _known(family: Family) -> Family:
    engine_harness.FAMILIES[family.name] = family.models
    return family


def _load(checkpoint: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def _merged(checkpoint: Path, adapter: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(_load(checkpoint), str(adapter)).merge_and_unload().eval().requires_grad_(False)


def _weaken(adapter: Path, factor: float = 0.3) -> None:
    """As they come, the adapters make models in which float32 alone is off by half of what is allowed."""
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({n: t * factor if "lora_B" in n else t for n, t in tensors.items()}, file, metadata={"format": "pt"})


def _share_lower_layers(into: Path, of: Path) -> None:
    own, lower = (load_file(path / "adapter_model.safetensors") for path in (into, of))
    shared = [name for name in own if int(name.split(".layers.")[1].split(".")[0]) < SHARED_DEPTH]
    assert shared
    save_file(
        own | {name: lower[name] for name in shared}, into / "adapter_model.safetensors", metadata={"format": "pt"}
    )


class VllmBench:
    """A ``Bench`` over a ``VllmEngine`` without a thread of its own."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine

    def step(self) -> bool:
        return self.engine.step()

    def kv(self, space: Any, layer: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        keys, values = space.read(layer, 0, num_tokens)
        return keys, values

    def e(self, space: Any, layer: int, start: int, stop: int) -> Tensor | None:
        return space.states(layer, start, stop) if space.has_e(layer, start, stop) else None


def _served(_: Any) -> list[str]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    return list(connector.worker_side.served)


def worker_processes(runtime: Runtime) -> list[psutil.Process]:
    """The ranks of an engine that has several, in their order."""
    return [psutil.Process(worker.proc.pid) for worker in runtime.llm.model_executor.workers]


def still_running(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended soon."""
    return psutil.wait_procs(processes, timeout=30)[1]


# the ranks cannot import this module
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class SharedEngine:
    """One built vLLM; ``make`` gives each test an engine of its own over it, with models that no other test has in the cache."""

    def __init__(self, family: Family, **options: Any) -> None:
        self.family = family
        self.options = OPTIONS | options
        chunk = self.options["max_num_batched_tokens"]
        self.runtime: Runtime = build_runtime(
            self._models(frozenset(), None), chunk_tokens=chunk, transition_layers=TAPS, options=self.options
        )
        self._engines: list[VllmEngine] = []

    def _models(
        self, eos: frozenset[int], tokenizer: Any, lineages: Mapping[str, bytes] | None = None
    ) -> dict[str, VllmModel]:
        known = lineages or {}
        return {
            name: VllmModel(self.family.checkpoint, adapter, tokenizer, eos, known.get(name, b""))
            for name, adapter in self.family.members.items()
        }

    def make(
        self,
        models: Mapping[str, Any] | None = None,
        *,
        block_size: int,
        chunk_tokens: int,
        eos: frozenset[int] = frozenset(),
        tokenizer: Any = None,
        lineages: Mapping[str, bytes] | None = None,
        **limits: Any,
    ) -> VllmBench:
        """``models`` are the oracle's; those that this engine's family does not serve are left out."""
        self.settle()
        engine = VllmEngine(
            self._models(eos, tokenizer, lineages),
            block_size=block_size,
            chunk_tokens=chunk_tokens,
            transition_layers=TAPS,
            options=self.options,
            runtime=self.runtime,
            start=False,
            **limits,
        )
        self._engines.append(engine)
        return VllmBench(engine)

    def settle(self) -> None:
        """End the engines made so far; nothing of them stays in vLLM."""
        while self._engines:
            self._engines.pop().close()

    def served(self) -> list[str]:
        """Requests of which the workers still know, whichever processes they are."""
        worker = self.runtime.worker
        if worker is not None:
            return list(worker.served)
        return sorted({name for names in self.runtime.llm.collective_rpc(_served) for name in names})

    def free_blocks(self) -> int:
        return self.runtime.scheduler.free_blocks()

    def close(self) -> None:
        self.settle()
        self.runtime.shut_down()
