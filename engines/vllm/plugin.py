"""Entry point ``vllm.general_plugins``: vLLM calls ``register`` in each of its processes, spawned ones included.

Importing this module imports neither vllm nor torch. What is registered changes nothing for a server without kvkin's connector.
"""

from __future__ import annotations

CONNECTOR = "KvkinConnector"
CONNECTOR_MODULE = "kvkin.engines.vllm.connector"
MODELS = "kvkin.engines.vllm.models"
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def register() -> None:
    """Put kvkin's model classes into vLLM's registry under the names of those that they extend. Idempotent."""
    from vllm import ModelRegistry

    for architecture in ARCHITECTURES:
        # by name: vLLM imports the module where it needs the class, not in every process that lists models
        ModelRegistry.register_model(architecture, f"{MODELS}:Kvkin{architecture}")


def register_here() -> None:
    """The same with the classes themselves: a process that builds the engine itself saves vLLM's look at them in a child."""
    from vllm import ModelRegistry

    from kvkin.engines.vllm import models

    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, getattr(models, f"Kvkin{architecture}"))
