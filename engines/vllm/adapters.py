"""LoRA adapters for units. vLLM has an adapter in one of its slots while requests of it are in a batch; a plan's units run before that.

On a node all adapters are pinned and nothing here changes a slot. On a server (``serving_side.py``) an adapter may have been displaced, from
its slot or from memory, and on one rank another than on the next: ranks see the requests of a batch in any order. So a load with units
first has its adapter held (``HoldAdapter``), on every rank, and units begin once all ranks have it. What units displace is put back after
them: vLLM counts on the running batch's adapters.

What is used of vLLM's manager (lora/model_manager.py): its tables of registered adapters and of slots, least recently used first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.platforms import current_platform

from kvkin.engines.vllm.orders import HoldAdapter


class Adapters:
    """The adapters of one rank's model; without LoRA in it there is only the base model."""

    def __init__(self, model: Any, vllm_config: Any, device: torch.device) -> None:
        self._model, self._config, self._device = model, vllm_config, device
        self._manager = getattr(model, "lora_manager", None)
        self._cpu: bool = current_platform.is_cpu()
        self._held: dict[str, Any] = {}
        self._mixes = False

    @property
    def mixes(self) -> bool:
        """Whether other requests of a batch with an adapter may have got one that is not theirs, now or earlier.

        vLLM's CPU kernels give rows without an adapter those of the last slot (lora/ops/torch_ops/lora_ops.py), and what was in it
        stays there. So the last slot must never be used (docs/vllm.md, ``--max-loras``).
        """
        if self._cpu and self._manager is not None and self._manager.lora_index_to_id[-1] is not None:
            self._mixes = True
        return self._mixes

    def hold(self, order: HoldAdapter) -> None:
        """Have the adapter in memory until ``release(order.key)``, and see that it fits into a slot. Raises whatever vLLM raises.

        Call it inside ``restored``.
        """
        if self._manager is None:
            raise RuntimeError("this model has no LoRA adapters")
        # a second hand on the same manager: it keeps nothing itself
        loader = LRUCacheWorkerLoRAManager(self._config, self._device, self._model.embedding_modules)
        loader._adapter_manager = self._manager
        loader.add_adapter(LoRARequest(order.name, order.lora_id, order.path))
        self._held[order.key] = self._manager.get_adapter(order.lora_id)

    def release(self, key: str) -> None:
        """The load is over. Idempotent."""
        self._held.pop(key, None)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Around units: the running batch's adapters are in place again afterwards (it may still be sampled from)."""
        manager = self._manager
        if manager is None:
            yield
            return
        mapping, slots = manager._last_mapping, list(manager.lora_index_to_id)
        known = manager.list_adapters()
        try:
            yield
        finally:
            if not (
                known.keys() <= manager.list_adapters().keys() and set(slots) - {None} <= set(manager.lora_index_to_id)
            ):
                # what came goes first: else one that is put back might displace another
                for lora_id in manager.list_adapters().keys() - known.keys():
                    manager.remove_adapter(lora_id)
                for lora_id in set(manager.lora_index_to_id) - set(slots) - {None}:
                    manager.deactivate_adapter(lora_id)
                for lora_id in known:
                    self._register(lora_id, known[lora_id])
                for lora_id in slots:
                    if lora_id is not None and lora_id not in manager.lora_index_to_id:
                        manager.activate_adapter(lora_id)
            # one of which an adapter was unloaded since is of an earlier batch, and nobody samples from that
            if mapping is not None and set(mapping.prompt_mapping) | set(mapping.index_mapping) <= {0, *slots}:
                manager.set_adapter_mapping(mapping)

    def use(self, lora_id: int, num_rows: int) -> None:
        """The next ``num_rows`` rows are of this adapter (0: the base model)."""
        manager = self._manager
        if manager is None:
            return
        if lora_id and lora_id not in manager.lora_index_to_id:
            found = manager.get_adapter(lora_id) or next(
                (one for one in self._held.values() if one.id == lora_id), None
            )
            if found is None:
                raise RuntimeError(f"adapter {lora_id} is neither in a slot nor held")
            self._register(lora_id, found)
            manager.activate_adapter(lora_id)  # the slot that was used least recently, if none is free
        manager.set_adapter_mapping(LoRAMapping((lora_id,) * num_rows, (lora_id,), is_prefill=True))

    def _register(self, lora_id: int, adapter: Any) -> None:
        assert self._manager is not None
        if lora_id not in self._manager.list_adapters():
            # not by ``add_adapter``: it prepares an adapter's weights, which was done when this one was loaded
            self._manager._registered_adapters[lora_id] = adapter
