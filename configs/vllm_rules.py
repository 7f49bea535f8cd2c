"""What a cluster file may say about vLLM: which nodes run on it, which engine arguments they get, and what is refused.

Arguments under ``vllm:`` are passed on to vLLM's engine as they are. Three kinds are not: those that kvkin sets itself, those that
would change KV behind its lineage's back, and those that kvkin's connector cannot serve. Pure, and without vLLM: every process that
reads the file calls this (``configs.checks``). What only a checkpoint can tell is checked in ``configs.vllm_node``, what only the
installed version can tell in ``configs.vllm_install``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from kvkin.configs.convert import child_key, parse_size
from kvkin.configs.schema import ClusterConfig, DecodeNode, EngineName, FamilyConfig, PrefillNode, WorkerNode
from kvkin.kv.errors import ConfigError

_OTHER_KEY = "no such key here"
_SERVED = "the node's models say what it serves"
_TEXT = "kvkin tokenizes in the router, nodes see token ids"
_CONNECTOR = "kvkin's connector takes this place"
_LORA = "kvkin derives it from the node's models and their adapters"
_CHANGES_MODEL = "it changes what the model computes, and KV would pass for that of another model"
_SPECULATIVE = "speculative decoding writes KV of tokens that are then rejected; kvkin's connector does not know which"
_DATA_PARALLEL = "a node is one engine: give each replica a node of its own, the router spreads requests"

# Argument -> why it is refused, whatever its value.
REFUSED: dict[str, str] = {
    "model": _SERVED,
    "model_weights": _SERVED,
    "revision": f"{_SERVED} (checkpoint: org/name@revision)",
    "code_revision": _SERVED,
    "hf_config_path": _SERVED,
    "served_model_name": _SERVED,
    "tokenizer": _TEXT,
    "tokenizer_mode": _TEXT,
    "tokenizer_revision": _TEXT,
    "skip_tokenizer_init": _TEXT,
    "dtype": "compute_dtype of the family says it: KV is exchanged in this type",
    "runner": "kvkin generates text",
    "convert": "kvkin generates text",
    "kv_transfer_config": _CONNECTOR,
    "ec_transfer_config": _CONNECTOR,
    "kv_offloading_size": f"{_CONNECTOR}; kv_bytes of the node is the memory that keeps KV",
    "kv_offloading_backend": _CONNECTOR,
    "additional_config": "kvkin names its transition layers there, so that vLLM's compile cache knows them",
    "enable_lora": _LORA,
    "max_loras": _LORA,
    "max_cpu_loras": _LORA,
    "max_lora_rank": _LORA,
    "default_mm_loras": _LORA,
    "logits_processors": "kvkin reads the first token's distribution with a processor of its own",
    "max_logprobs": "limits of the cluster say how much a request may ask",
    "logprobs_mode": "log probabilities are those of the model, before temperature and filters, on every engine",
    "async_scheduling": "a step is planned when the last one's tokens and KV are known, as kvkin counts what really ran",
    "disable_log_stats": "kvkin's status has the figures",
    "hf_overrides": _CHANGES_MODEL,
    "model_class_overrides": _CHANGES_MODEL,
    "quantization_config": f"{_CHANGES_MODEL}; quantization alone names a method",
    "disable_sliding_window": _CHANGES_MODEL,
    "kv_sharing_fast_prefill": "it leaves out KV of layers that others pull",
    "speculative_config": _SPECULATIVE,
    "spec_method": _SPECULATIVE,
    "spec_model": _SPECULATIVE,
    "spec_tokens": _SPECULATIVE,
}

# Argument -> (the values that work, why the others do not).
LIMITED: dict[str, tuple[tuple[object, ...], str]] = {
    "pipeline_parallel_size": ((1,), "layers on several devices are not supported"),
    "data_parallel_size": ((1,), _DATA_PARALLEL),
    "prefill_context_parallel_size": ((1,), "tokens of one context on several ranks are not supported"),
    "decode_context_parallel_size": ((1,), "tokens of one context on several ranks are not supported"),
    "nnodes": ((1,), "all ranks of a node read its memory, so they run on its host"),
    "distributed_executor_backend": (("mp", "uni"), "all ranks of a node read its memory, so they run on its host"),
    "kv_cache_dtype": (("auto",), "KV is exchanged in compute_dtype; a cache in another type would be read as that"),
    "model_impl": (("auto", "vllm"), "kvkin recomputes layers of vLLM's own models"),
}

# Arguments that kvkin itself computes with: least value. Checked also where no vLLM is installed.
_COUNTS = {
    "tensor_parallel_size": 1,
    "max_model_len": 1,
    "max_num_batched_tokens": 1,
    "max_num_seqs": 1,
    "block_size": 1,
    "kv_cache_memory_bytes": 1,
    "num_gpu_blocks_override": 1,
}


def node_engine(config: ClusterConfig, name: str) -> EngineName:
    """What runs the models of the worker ``name``: its own ``engine``, or its family's."""
    return worker_node(config, name).engine or config.families[family_name(config, name)].engine


def worker_node(config: ClusterConfig, name: str) -> WorkerNode:
    """The node ``name``, which is no router."""
    node = config.nodes[name]
    assert isinstance(node, PrefillNode | DecodeNode), f"{name} is a router"
    return node


def family_name(config: ClusterConfig, name: str) -> str:
    """Name of the family of the worker ``name``."""
    family = config.family_of(worker_node(config, name).models[0])
    assert family is not None, "the loader checks that node models exist"
    return family


def vllm_nodes(config: ClusterConfig, family: str | None = None) -> list[str]:
    """Names of the nodes that run on vLLM, of one family or of all."""
    workers: dict[str, WorkerNode] = {**config.prefill_nodes, **config.decode_nodes}
    return [
        name
        for name, node in workers.items()
        if node_engine(config, name) == "vllm" and family in (None, family_name(config, name))
    ]


def node_arguments(config: ClusterConfig, name: str) -> dict[str, Any]:
    """Engine arguments of the node ``name``: the family's, with the node's own in their place; null takes one out. Sizes are bytes."""
    node = worker_node(config, name)
    merged = {**config.families[family_name(config, name)].vllm, **node.vllm}
    return {argument: _bytes(argument, value) for argument, value in merged.items() if value is not None}


def argument_key(config: ClusterConfig, name: str, argument: str) -> str:
    """Path of the key that gives ``argument`` to the node ``name``."""
    node = worker_node(config, name)
    owner = child_key("nodes", name) if argument in node.vllm else child_key("families", family_name(config, name))
    return child_key(f"{owner}.vllm", argument)


def engine_key(config: ClusterConfig, name: str) -> str:
    """Path of the key that says what the node ``name`` runs on."""
    node = worker_node(config, name)
    owner = child_key("families", family_name(config, name)) if node.engine is None else child_key("nodes", name)
    return f"{owner}.engine"


def check_vllm(config: ClusterConfig) -> None:
    """Raise ConfigError for the first thing about vLLM that cannot work, with the key where it stands."""
    for name, family in config.families.items():
        _check_arguments(f"{child_key('families', name)}.vllm", family.vllm)
    for name, node in config.nodes.items():
        if not isinstance(node, PrefillNode | DecodeNode):
            continue
        key = child_key("nodes", name)
        _check_arguments(f"{key}.vllm", node.vllm)
        if node_engine(config, name) == "vllm":
            _check_node(config, name)
        elif node.vllm:
            raise ConfigError(f"{key}.vllm", "this node runs on the reference engine", "engine: vllm, or no such key")
    for name, family in config.families.items():
        if quantization(family.vllm) is not None:
            _check_quantized(config, name)


def quantization(arguments: Mapping[str, Any]) -> str | None:
    """The method by which vLLM quantises weights; None for weights as they are."""
    method = arguments.get("quantization")
    return None if method is None else str(method)


def on_reference(config: ClusterConfig) -> ClusterConfig:
    """The same cluster with every node on the reference engine. Raises ConfigError for a family whose weights vLLM quantises."""
    families, nodes = {}, dict(config.nodes)
    for name, family in config.families.items():
        method = quantization(family.vllm)
        if method is not None:
            key = f"{child_key('families', name)}.vllm.quantization"
            raise ConfigError(key, f"only vLLM can run weights quantised by {method}", "a cluster of vLLM nodes")
        families[name] = msgspec.structs.replace(family, engine="reference", vllm={})
    for name, node in config.nodes.items():
        if isinstance(node, PrefillNode | DecodeNode):
            nodes[name] = msgspec.structs.replace(node, engine=None, vllm={})
    return msgspec.structs.replace(config, families=families, nodes=nodes)


def check_limited(key: str, argument: str, value: object) -> None:
    """Raise ConfigError for a value of an engine argument that kvkin cannot serve with."""
    if argument in LIMITED and value not in LIMITED[argument][0]:
        values, why = LIMITED[argument]
        raise ConfigError(key, f"cannot be {value!r}: {why}", " or ".join(map(str, values)))


def check_ranks(key: str, ranks: int, num_heads: int, kv_heads: int) -> None:
    """Raise ConfigError unless vLLM can divide a model's heads among ``ranks`` processes.

    KV heads are split evenly; with more ranks than KV heads each is on several ranks, as many for each.
    """

    def divides(count: int) -> bool:
        return num_heads % count == 0 and (kv_heads % count == 0 or count % kv_heads == 0)

    if not divides(ranks):
        allowed = ", ".join(str(count) for count in range(1, num_heads + 1) if divides(count))
        problem = f"{num_heads} heads with {kv_heads} heads of keys and values cannot be divided among {ranks} ranks"
        raise ConfigError(key, problem, allowed)


def vllm_warnings(config: ClusterConfig) -> list[str]:
    """What works but is probably not meant, one sentence each."""
    return [
        f"{child_key('families', name)}.vllm: no node of this family runs on vLLM, so nothing reads it"
        for name, family in config.families.items()
        if family.vllm and not vllm_nodes(config, name)
    ]


def check_one_checkpoint(key: str, family: FamilyConfig, models: Sequence[str], what: str, otherwise: str) -> None:
    """Raise ConfigError unless ``models`` of the node at ``key`` are one checkpoint and adapters of it; ``what`` of vLLM runs them."""
    for index, model in enumerate(models):
        if family.models[model].checkpoint != family.models[models[0]].checkpoint:
            problem = f"{model!r} is another checkpoint than {models[0]!r}, and one vLLM {what} runs one"
            raise ConfigError(f"{key}.models[{index}]", problem, f"adapters of one checkpoint, or {otherwise}")


def check_windows(key: str, windows: Iterable[int | None], allowed: str) -> None:
    """Raise ConfigError for a model with an attention window: what of its context lies before it is not there to be shared."""
    if any(window is not None for window in windows):
        raise ConfigError(key, "vLLM drops KV behind an attention window, so it could not be given to others", allowed)


def _check_arguments(key: str, arguments: Mapping[str, Any]) -> None:
    """Names and values of one ``vllm`` section, as far as they can be judged without vLLM."""
    for argument, value in arguments.items():
        where = child_key(key, argument)
        if not argument.isidentifier() or argument.startswith("_"):
            hint = argument.removeprefix("--").replace("-", "_")
            raise ConfigError(where, f"{argument!r} is no engine argument", f"names as in Python, such as {hint}")
        if argument in REFUSED:
            raise ConfigError(where, f"is not yours to set: {REFUSED[argument]}", _OTHER_KEY)
        if argument.startswith("data_parallel_") and argument not in LIMITED:
            raise ConfigError(where, f"is not supported: {_DATA_PARALLEL}", _OTHER_KEY)
        if not _is_plain(value):
            raise ConfigError(
                where, f"cannot be a {type(value).__name__}", "text, a number, true, false, null, a list or a mapping"
            )
        value = _bytes(argument, value)
        if value is None:
            continue
        if argument in _COUNTS and (type(value) is not int or value < _COUNTS[argument]):
            size = ', or a size such as "512MiB"' if argument.endswith("_bytes") else ""
            raise ConfigError(where, f"cannot be {value!r}", f"a whole number from {_COUNTS[argument]} on{size}")
        check_limited(where, argument, value)
        if argument == "load_format" and value == "dummy":
            raise ConfigError(
                where, "dummy weights are no weights of the model that their KV would pass for", "any other"
            )
        if argument == "quantization" and not (isinstance(value, str) and value.strip()):
            raise ConfigError(where, f"cannot be {value!r}", "the name of one of vLLM's methods, such as fp8")


def _check_node(config: ClusterConfig, name: str) -> None:
    node = worker_node(config, name)
    family = config.families[family_name(config, name)]
    key = child_key("nodes", name)
    check_one_checkpoint(key, family, node.models, "engine", "a node for each")
    arguments = node_arguments(config, name)
    step = arguments.get("max_num_batched_tokens")
    if step is not None and step < family.chunk_tokens:
        where = argument_key(config, name, "max_num_batched_tokens")
        problem = (
            f"{step} is less than the family's chunk_tokens, {family.chunk_tokens}: a chunk would never be one step"
        )
        raise ConfigError(where, problem, f"at least {family.chunk_tokens}, or a smaller chunk_tokens")
    if "quantization" in node.vllm:
        problem = "weights of one node's own quantisation give KV that fits no other node's"
        raise ConfigError(
            f"{key}.vllm.quantization",
            problem,
            f"{child_key('families', family_name(config, name))}.vllm.quantization, for all nodes",
        )


def _check_quantized(config: ClusterConfig, name: str) -> None:
    """Weights are quantised on all nodes of a family or on none."""
    for node_name in (*config.prefill_nodes, *config.decode_nodes):
        if family_name(config, node_name) == name and node_engine(config, node_name) != "vllm":
            key = f"{child_key('nodes', node_name)}.engine"
            problem = (
                f"{child_key('families', name)}.vllm.quantization is set, and the reference engine cannot quantise"
            )
            raise ConfigError(key, problem, "vllm on all nodes of the family")


def _bytes(argument: str, value: Any) -> Any:
    """A size such as "512MiB" as bytes where the argument counts bytes; anything else as it is."""
    if argument.endswith("_bytes") and isinstance(value, str):
        size = parse_size(value)
        return value if size is None else size
    return value


def _is_plain(value: object) -> bool:
    """Whether ``value`` is made of scalars, lists and mappings by name."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(item) for name, item in value.items())
    return value is None or isinstance(value, bool | int | float | str)
