"""vLLM's model classes with kvkin's taps, under their own names in vLLM's registry (``plugin.py``).

A server without kvkin's connector gets exactly the class that it would have had. The connector is handed no model by vLLM, so
each one built here is remembered (weakly) until its connector asks.
"""

from __future__ import annotations

import weakref
from typing import Any

from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.mixtral import MixtralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from kvkin.engines.vllm.plugin import CONNECTOR
from kvkin.engines.vllm.serving import taps_of
from kvkin.engines.vllm.serving_checks import check_before_loading
from kvkin.engines.vllm.taps import install_taps
from kvkin.kv.errors import ConfigError

_built: weakref.ref[Any] | None = None


class _Tapped:
    """First base of the classes below: builds the model, then taps it if kvkin's connector is configured."""

    def __init__(self, *, vllm_config: Any, prefix: str = "", **options: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        ours = transfer is not None and transfer.kv_connector == CONNECTOR
        if ours:
            check_before_loading(vllm_config, get_tensor_model_parallel_rank())
        super().__init__(vllm_config=vllm_config, prefix=prefix, **options)  # type: ignore[call-arg]
        if ours:
            _adopt(self, vllm_config)


class KvkinLlamaForCausalLM(_Tapped, LlamaForCausalLM):
    pass


class KvkinMistralForCausalLM(_Tapped, MistralForCausalLM):
    pass


class KvkinMixtralForCausalLM(_Tapped, MixtralForCausalLM):
    pass


class KvkinQwen2ForCausalLM(_Tapped, Qwen2ForCausalLM):
    pass


class KvkinQwen3ForCausalLM(_Tapped, Qwen3ForCausalLM):
    pass


def _adopt(model: Any, vllm_config: Any) -> None:
    global _built
    layers = taps_of(vllm_config.kv_transfer_config.kv_connector_extra_config)
    if isinstance(vllm_config.additional_config, dict):
        # part of the key of the compile cache, which knows of no taps
        vllm_config.additional_config["kvkin"] = {"taps": list(layers)}
    compilation = vllm_config.compilation_config
    largest = max([vllm_config.scheduler_config.max_num_batched_tokens, *(compilation.cudagraph_capture_sizes or ())])
    install_taps(model, layers, largest)
    _built = weakref.ref(model)


def built_model() -> Any:
    """The model that this process built last. Raises ConfigError if it is not one of the classes above."""
    model = None if _built is None else _built()
    if model is None:
        raise ConfigError(
            "vllm", "the model was not built by kvkin's plugin: its entry point in vllm.general_plugins was not loaded"
        )
    return model
