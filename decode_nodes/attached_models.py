"""What an attached server really runs: the weights that vLLM loaded, against those that the cluster file names.

A server's command line and the cluster file are two files that somebody keeps alike by hand. What is compared is what the weights are,
never what they are called: KV of other weights must not enter the family under a member's name.
"""

from __future__ import annotations

import threading
from pathlib import Path

import structlog

from kvkin.configs.checkpoints import ModelIdentity, read_model
from kvkin.configs.convert import child_key
from kvkin.configs.families import resolve_family
from kvkin.configs.schema import local_path
from kvkin.engines.vllm.serving import ServingOptions
from kvkin.kv.errors import ConfigError

log = structlog.get_logger()


class AttachedModels:
    """``served``: names of the node's models. Raises ConfigError if ``checkpoint`` or ``dtype`` is not the node's."""

    def __init__(self, options: ServingOptions, checkpoint: str, dtype: str) -> None:
        self._options, self._checkpoint = options, checkpoint
        config, node = options.config, options.node
        self.served = node.models
        self.family = resolve_family(config, options.family_name, models=node.models)
        key = f"{child_key('nodes', options.name)}.models"
        if dtype != self.family.compute_dtype:
            problem = f"vllm serve computes in {dtype}, and the family's KV is {self.family.compute_dtype}"
            where = f"{child_key('families', options.family_name)}.compute_dtype"
            raise ConfigError(where, problem, f"--dtype {self.family.compute_dtype}, or compute_dtype: {dtype}")
        members = self.family.config.models
        self._plain = next((name for name in node.models if members[name].adapter is None), None)
        # they are of one checkpoint: if one is what vLLM makes of its own, so are the others
        first = self._plain or node.models[0]
        adapter_path = self.family.models[first].adapter_path
        if self._read(None if adapter_path is None else str(adapter_path)).lineage != self.family.models[first].lineage:
            problem = f"{first} has other weights than {checkpoint}, which vllm serve runs"
            allowed = f"--model {members[first].checkpoint}, or the names of models with these weights"
            raise ConfigError(f"{key}[{node.models.index(first)}]", problem, allowed)
        self._lock = threading.Lock()
        self._adapters: dict[tuple[str, str], str | None] = {}
        for name in node.models:
            adapter = self.family.models[name].adapter_path
            if adapter is not None:
                self._adapters[name, str(adapter.resolve())] = name

    def model_of(self, lora: tuple[str, str] | None) -> str | None:
        """The model of requests with the adapter (name, path), or without one; None: none of this node's, or not known yet.

        An adapter from another folder than the cluster file's is read in the background.
        """
        if lora is None:
            return self._plain
        name, path = lora
        if name not in self.served:
            return None
        known = (name, str(local_path(path).resolve()))
        with self._lock:
            if known not in self._adapters:
                self._adapters[known] = None
                threading.Thread(target=self._compare, args=known, name="kvkin-adapter", daemon=True).start()
            return self._adapters[known]

    def _compare(self, name: str, path: str) -> None:
        expected = self.family.models[name].lineage
        try:
            same = self._read(path).lineage == expected
            why = "its weights are not the ones in the cluster file"
        except ConfigError as error:
            same, why = False, str(error)
        if same:
            with self._lock:
                self._adapters[name, path] = name
        else:
            log.error("requests of this adapter share nothing", model=name, adapter=path, why=why)

    def _read(self, adapter: str | None) -> ModelIdentity:
        return read_model(
            "vllm serve",
            self._checkpoint,
            adapter,
            compute_dtype=self.family.compute_dtype,
            cache_dir=Path(self._options.config.state_path) / "digests",
            family_vocab=self.family.vocab_size,
        )


def check_weights(options: ServingOptions, checkpoint: str, dtype: str) -> None:
    """Raise ConfigError if ``checkpoint`` or ``dtype`` is not the node's: in the process that runs the model, before it reads the weights."""
    AttachedModels(options, checkpoint, dtype)
