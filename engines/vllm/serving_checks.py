"""What a ``vllm serve`` must be like to share KV: its resolved configuration against the family's. No vllm: attributes of what is given.

Nodes get their engine arguments from the cluster file, where ``configs/vllm_rules.py`` refuses the same things.
"""

from __future__ import annotations

from typing import Any

from kvkin.configs.convert import child_key
from kvkin.configs.vllm_rules import LIMITED, REFUSED
from kvkin.engines.vllm.serving import ServingOptions, check_weights, clear_refusal, serving_options
from kvkin.kv.errors import ConfigError

_ONE = (
    "pipeline_parallel_size",
    "data_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "nnodes",
)


def check_before_loading(vllm_config: Any, rank: int) -> None:
    """In a process that is about to build the model: whatever can be refused is refused before weights are read, by the first rank.

    Raises ConfigError, with one line of its own in the log.
    """
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    if rank or "taps" in extra:  # a node's own engine was checked by the node
        return
    with clear_refusal():
        options = serving_options(extra)
        check_serving(vllm_config, options)
        check_weights(options, str(vllm_config.model_config.model), dtype_of(vllm_config))


def check_serving(vllm_config: Any, options: ServingOptions) -> None:
    """Raise ConfigError, with the argument of the command line, for the first thing that cannot work."""
    parallel, model, scheduler = vllm_config.parallel_config, vllm_config.model_config, vllm_config.scheduler_config
    for name in _ONE:
        value = getattr(parallel, name, 1)
        if value != 1:
            raise ConfigError(_flag(name), f"cannot be {value}: {LIMITED[name][1]}", "1")
    backend = parallel.distributed_executor_backend
    if isinstance(backend, str) and backend not in ("mp", "uni"):
        why = LIMITED["distributed_executor_backend"][1]
        raise ConfigError("--distributed-executor-backend", f"cannot be {backend!r}: {why}", "mp or uni")
    if scheduler.async_scheduling:
        raise ConfigError("--async-scheduling", f"cannot be on: {REFUSED['async_scheduling']}", "--no-async-scheduling")
    if vllm_config.speculative_config is not None:
        raise ConfigError("--speculative-config", REFUSED["speculative_config"], "no such argument")
    if model.hf_overrides:
        raise ConfigError("--hf-overrides", REFUSED["hf_overrides"], "no such argument")
    if model.quantization is not None:
        problem = f"weights quantised by {model.quantization} are other weights than the family's"
        raise ConfigError("--quantization", problem, "no such argument, and a checkpoint that is not quantised")
    if vllm_config.load_config.load_format == "dummy":
        raise ConfigError("--load-format", "dummy weights are no weights of the model", "any other")
    cache = str(vllm_config.cache_config.cache_dtype)
    if cache not in ("auto", dtype_of(vllm_config)):
        raise ConfigError("--kv-cache-dtype", f"cannot be {cache}: {LIMITED['kv_cache_dtype'][1]}", "auto")
    batch, chunk = scheduler.max_num_batched_tokens, options.family.chunk_tokens
    if batch < chunk:
        where = child_key(child_key("families", options.family_name), "chunk_tokens")
        problem = f"{batch} is less than {where}, {chunk}"
        raise ConfigError("--max-num-batched-tokens", problem, f"at least {chunk}, or a smaller chunk_tokens")
    _check_adapters(vllm_config, options)


def _check_adapters(vllm_config: Any, options: ServingOptions) -> None:
    adapters = [name for name in options.node.models if options.family.models[name].adapter is not None]
    where = f"{child_key('nodes', options.name)}.models"
    lora = vllm_config.lora_config
    if lora is None:
        if adapters:
            problem = f"is missing, and {', '.join(adapters)} of {where} are LoRA adapters"
            raise ConfigError("--enable-lora", problem, "--enable-lora --lora-modules NAME=PATH ...")
        return
    if lora.target_modules is not None:
        problem = "an adapter of which vLLM leaves out modules is another model"
        raise ConfigError("--lora-target-modules", problem, "no such argument")
    lora_dtype = str(lora.lora_dtype).removeprefix("torch.")
    if lora_dtype != dtype_of(vllm_config):
        problem = f"cannot be {lora_dtype}: the model is {dtype_of(vllm_config)}"
        raise ConfigError("--lora-dtype", problem, "auto")
    if lora.enable_mixed_moe_lora_format:
        problem = "adapters of experts in two formats have not been tried"
        raise ConfigError("--enable-mixed-moe-lora-format", problem, "no such argument")
    if vllm_config.device_config.device_type == "cpu" and lora.max_loras <= len(adapters):
        problem = (
            f"{lora.max_loras} is too few: on CPUs vLLM mixes the adapter of the last slot into requests without one"
        )
        allowed = f"at least {len(adapters) + 1}, one more than the adapters of {where}"
        raise ConfigError("--max-loras", problem, allowed)


def dtype_of(vllm_config: Any) -> str:
    """Type of the model's activations and KV, as cluster files name it."""
    return str(vllm_config.model_config.dtype).removeprefix("torch.")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
