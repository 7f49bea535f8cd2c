"""Starting a node's models on vLLM: the environment that it must find, checkpoints that it can load, and the engine itself.

Called by ``tools/roles.py`` in the node's process. vLLM reads its environment when it is imported, and importing it takes half a
minute: neither happens here before the engine is built.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from kvkin.configs.vllm_node import VllmNode
from kvkin.kv.errors import ConfigError, KvkinError

if TYPE_CHECKING:
    from kvkin.configs.checkpoints import ModelIdentity
    from kvkin.configs.families import ResolvedFamily
    from kvkin.engines.api import Engine

log = structlog.get_logger()


def prepare_environment(node: VllmNode) -> None:
    """For this process and its children: what the user has set stays, but for threads, where the cluster file's word counts.

    Has an effect only before torch and vllm are imported.
    """
    from kvkin.engines.vllm import compat

    compat.prepare_environment()
    # checkpoints are folders by now: nothing is to be fetched
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if node.threads:
        # ranks are processes that share the node's threads
        os.environ["OMP_NUM_THREADS"] = str(max(1, node.threads // node.ranks))


def build_vllm(family: ResolvedFamily, models: tuple[str, ...], node: VllmNode) -> Engine:
    """Load ``models`` (one checkpoint and adapters of it) and start a vLLM engine on them. Raises ConfigError for what vLLM refuses."""
    prepare_environment(node)
    # merging holds the weights twice: before vLLM takes its share
    weights = {name: node_weights(family, family.models[name], models, node) for name in models}
    log.info("importing vLLM")
    from kvkin.engines.text import load_tokenizer
    from kvkin.engines.vllm.engine import VllmEngine, VllmModel

    loaded = {}
    for name in models:
        identity, (checkpoint, adapter) = family.models[name], weights[name]
        log.info("loading", engine="vllm", model=name, path=str(checkpoint), adapter=str(adapter or ""))
        has_tokenizer = (identity.path / "tokenizer.json").exists()
        tokenizer = load_tokenizer(identity.path) if has_tokenizer else None
        loaded[name] = VllmModel(
            checkpoint, adapter, tokenizer, frozenset(identity.eos_ids), lineage_id=identity.lineage.id
        )
    compiles = not node.options.get("enforce_eager")
    log.info("starting vLLM, which compiles the model: minutes" if compiles else "starting vLLM")
    started = time.monotonic()
    try:
        engine = VllmEngine(
            loaded,
            block_size=family.layout.block_size,
            chunk_tokens=family.config.chunk_tokens,
            transition_layers=family.transition_layers,
            options=node.options,
            e_bytes=node.e_bytes,
            swap_bytes=node.swap_bytes,
            sync_wait_s=node.sync_wait_s,
        )
    except KvkinError:
        raise
    # vLLM's own checks of its arguments against each other, the model and the machine
    except (ValueError, NotImplementedError) as error:
        raise ConfigError("vllm", f"vLLM refuses to start: {_one_line(error)}", "what this message asks for") from error
    log.info("vLLM runs", models=list(loaded), s=round(time.monotonic() - started, 1))
    return engine


def node_weights(
    family: ResolvedFamily, identity: ModelIdentity, models: tuple[str, ...], node: VllmNode
) -> tuple[Path, Path | None]:
    """(checkpoint, adapter) that vLLM loads for a model: on a CPU the adapter of a node's only model is merged beforehand."""
    if identity.adapter_path is None or node.device != "cpu" or len(models) > 1:
        return identity.path, identity.adapter_path
    from transformers.utils.logging import disable_progress_bar

    from kvkin.engines.loop import apart
    from kvkin.engines.merging import merged_checkpoint

    disable_progress_bar()  # a bar is noise in a log file

    # the digest covers everything that the model computes, so the folder of other weights has another name
    name = f"{identity.name.replace('/', '_')}-{identity.logits_digest.hex()[:16]}-{family.compute_dtype}"
    folder = node.merged_path / name
    new = not folder.exists()
    if new:
        log.info("merging the adapter into a copy of the checkpoint", model=identity.name, folder=str(folder))
    path, adapter = identity.path, identity.adapter_path
    merged = apart(lambda: merged_checkpoint(path, adapter, folder, family.compute_dtype))
    if new:
        _return_memory()
    return merged, None


def _return_memory() -> None:
    """Give what the merged model took back to the system: glibc keeps freed pages for what this process never allocates again."""
    gc.collect()
    # other C libraries have no such call
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or repr(error)
