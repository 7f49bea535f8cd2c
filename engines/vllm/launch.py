"""Building vLLM's engine for kvkin: the arguments that kvkin sets itself, those it passes on, those it refuses."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer

from kvkin.configs.vllm_rules import check_limited, check_ranks
from kvkin.engines.loop import apart
from kvkin.engines.vllm import compat
from kvkin.engines.vllm.plugin import ARCHITECTURES, CONNECTOR, CONNECTOR_MODULE, register_here
from kvkin.engines.vllm.scheduler_side import SchedulerSide
from kvkin.engines.vllm.worker_side import WorkerSide
from kvkin.engines.vllm.workers import Workers, direct, remote
from kvkin.kv.errors import ConfigError, KvkinError

OWN = (
    *("model", "tokenizer", "skip_tokenizer_init", "kv_transfer_config", "additional_config", "logits_processors"),
    *("max_logprobs", "logprobs_mode", "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_modules"),
    *("disable_log_stats", "async_scheduling", "speculative_config"),
)
"""Arguments that kvkin sets, or that would break what it promises."""
CPU_BLOCK_SIZE = 32


@dataclass
class Runtime:
    """A built engine, the scheduler side of its connector, and its workers. ``connector`` and ``worker`` are the worker side where
    it lives in this process; None if the ranks are other processes."""

    llm: Any
    connector: Any
    scheduler: SchedulerSide
    worker: WorkerSide | None
    workers: Workers
    adapters: dict[Path, Any]

    def shut_down(self) -> None:
        compat.shut_down(self.llm, self.connector)


@dataclass(frozen=True)
class VllmModel:
    """A model of the engine: the checkpoint that all of them share, and the LoRA adapter that makes this one of it.

    ``lineage_id`` keys vLLM's prefix cache; without one, the model's blocks are found by no other engine and by no other name.
    """

    checkpoint: Path
    adapter: Path | None
    tokenizer: Tokenizer | None
    eos: frozenset[int]
    lineage_id: bytes = b""


def build_runtime(
    models: Mapping[str, VllmModel], *, chunk_tokens: int, transition_layers: Sequence[int], options: Mapping[str, Any]
) -> Runtime:
    """The vLLM engine that ``models`` need. Raises ConfigError."""
    checkpoints = list(dict.fromkeys(model.checkpoint for model in models.values()))
    if len(checkpoints) != 1:
        problem = f"one vLLM engine runs one checkpoint, these models have {len(checkpoints)}"
        raise ConfigError("models", problem, "a checkpoint and its LoRA adapters; else one node for each")
    adapters = list(dict.fromkeys(model.adapter for model in models.values() if model.adapter is not None))
    return apart(lambda: launch(checkpoints[0], adapters, transition_layers, options, min_batch=chunk_tokens))


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument that vLLM does not have, or that kvkin cannot serve with."""
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for key, value in options.items():
        if key in OWN:
            raise ConfigError(f"vllm.{key}", "kvkin sets this itself", "leave it out")
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known - set(OWN)), 3)
            raise ConfigError(f"vllm.{key}", "this vLLM has no such engine argument", ", ".join(near))
        check_limited(f"vllm.{key}", key, value)


def check_checkpoint(checkpoint: Path, ranks: int = 1) -> None:
    """Raise ConfigError for a model whose KV kvkin cannot serve from vLLM's cache, or that cannot be split over ``ranks``."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    architecture = (config.get("architectures") or ["unknown"])[0]
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            "checkpoint", f"architecture {architecture} is not supported on vLLM", ", ".join(ARCHITECTURES)
        )
    windowed = config.get("sliding_window") and config.get("use_sliding_window", True)
    if windowed or "sliding_attention" in (config.get("layer_types") or ()):
        problem = "vLLM frees the KV behind a sliding window, so a context's is not there to be shared"
        raise ConfigError("checkpoint", problem, "a model without a window, or engine: reference")
    heads = int(config["num_attention_heads"])
    check_ranks("vllm.tensor_parallel_size", ranks, heads, int(config.get("num_key_value_heads") or heads))


def launch(
    checkpoint: Path, adapters: Sequence[Path], taps: Sequence[int], options: Mapping[str, Any], *, min_batch: int
) -> Runtime:
    """Build an engine on ``checkpoint`` with LoRA ``adapters`` (each loaded and pinned) and E taps at layers ``taps``.

    A step takes at least ``min_batch`` tokens. Raises ConfigError.
    """
    compat.check_version()
    compat.prepare_environment()
    check_checkpoint(checkpoint, options.get("tensor_parallel_size", 1))
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    check_options(options)
    load_general_plugins()
    register_here()
    arguments = _arguments(checkpoint, adapters, taps, options, cpu=current_platform.is_cpu())
    try:
        config = EngineArgs(**arguments).create_engine_config()
    except (ValueError, TypeError) as error:
        # pydantic's first sentence says it, what follows is of no use to who wrote the file
        why = " ".join(str(error).partition("[type=")[0].split())
        raise ConfigError("vllm", f"vLLM refuses its arguments: {why}") from error
    batch = config.scheduler_config.max_num_batched_tokens
    if batch < min_batch:
        raise ConfigError("vllm.max_num_batched_tokens", f"{batch} is less than chunk_tokens", f"at least {min_batch}")
    ranks = config.parallel_config.world_size
    with compat.building(), compat.interrupts_blocked() if ranks > 1 else nullcontext():
        try:
            llm = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
        except KvkinError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split()) or repr(error)
            raise ConfigError(
                "vllm", f"vLLM does not start: {reason}", "what this, or the log above, asks for"
            ) from error
        connector = compat.current_connector()
    scheduler = compat.scheduler_of(llm).get_kv_connector().scheduler_side
    if connector is None:
        runtime = Runtime(llm, None, scheduler, None, remote(llm), {})
    else:
        # both sides in one process: what the worker side says is heard at once, layer by layer
        connector.worker_side.report = scheduler.reported
        runtime = Runtime(llm, connector, scheduler, connector.worker_side, direct(connector.worker_side), {})
    with compat.active(connector):
        for index, adapter in enumerate(adapters, 1):
            request = LoRARequest(str(adapter), index, str(adapter))
            llm.add_lora(request)
            llm.pin_lora(index)
            runtime.adapters[adapter] = request
    return runtime


def _arguments(
    checkpoint: Path, adapters: Sequence[Path], taps: Sequence[int], options: Mapping[str, Any], *, cpu: bool
) -> dict[str, Any]:
    from vllm.config import KVTransferConfig

    from kvkin.engines.vllm.first_logits import FirstLogits

    arguments = {
        **options,
        "model": str(checkpoint),
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "async_scheduling": False,
        "max_logprobs": -1,
        "logits_processors": [FirstLogits],
        "kv_transfer_config": KVTransferConfig(
            kv_connector=CONNECTOR,
            kv_connector_module_path=CONNECTOR_MODULE,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"taps": list(taps)},
        ),
        # part of the key of vLLM's compile cache, which knows of no taps: a graph without them would be loaded
        "additional_config": {"kvkin": {"taps": list(taps)}},
    }
    arguments.setdefault("use_tqdm_on_load", False)  # a bar is noise in a log file
    if cpu:
        arguments.setdefault("block_size", CPU_BLOCK_SIZE)
        arguments.setdefault("dtype", "float32")  # two to four times faster than bfloat16 there
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            # vLLM would take nine tenths of the memory
            arguments.setdefault("kv_cache_memory_bytes", psutil.virtual_memory().available // 4)
    if adapters:
        ranks = [json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))["r"] for path in adapters]
        # vLLM's CPU kernels give a base model's rows the last slot of a batch with adapters: it stays empty
        arguments |= {
            "enable_lora": True,
            "max_loras": len(adapters) + (1 if cpu else 0),
            "max_lora_rank": _lora_rank(max(ranks)),
        }
    return arguments


def _lora_rank(rank: int) -> int:
    """The next rank that vLLM has kernels for."""
    allowed = (1, 8, 16, 32, 64, 128, 256, 320, 512)
    found = next((each for each in allowed if each >= rank), None)
    if found is None:
        raise ConfigError("adapter", f"rank {rank} is more than vLLM can serve", f"up to {allowed[-1]}")
    return found
