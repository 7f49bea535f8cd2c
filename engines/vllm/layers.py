"""Units of a plan on vLLM's own layer modules, outside of vLLM's forward: between two steps, on the engine's thread.

A FULL unit is the decoder layer's own forward with attention metadata made by hand, so that every backend, its kernels and its
quantized or LoRA-wrapped projections serve as they are. Token-wise rows are one "sequence" for each run of neighbours, all over
the same blocks: causal kernels align queries to the end of the keys. A KV_ONLY unit stops after keys and values. Eager modules
run here even where vLLM compiled the model: right, at an eager step's cost. On a device everything goes to the current stream
(``lanes.py``), and nothing here waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvkin.engines.vllm.adapters import Adapters
from kvkin.engines.vllm.lanes import Lane
from kvkin.engines.vllm.paged_kv import PagedLayout, check_round_trip, layout_for, write
from kvkin.engines.vllm.taps import untapped
from kvkin.kv.execution import UnitMode


@dataclass(frozen=True)
class Rows:
    """Rows of one request that go through layers together: positions and slots (n,) int64, and what attention needs, as its backend
    has it (``metadata``) and as it was built from (``common``)."""

    positions: Tensor
    slots: Tensor
    metadata: Any
    common: Any


class LayerRunner:
    """The layers of one built model over its paged cache. ``caches``: layer name -> cache as vLLM registered it, in layer order;
    ``make_lane`` is given the name of their attention backend."""

    def __init__(
        self,
        model: Any,
        vllm_config: Any,
        kv_cache_config: Any,
        caches: dict[str, Tensor],
        make_lane: Callable[[str], Lane],
    ) -> None:
        self._model, self._layers, self._config = model, model.model.layers, vllm_config
        self._caches, self._names = list(caches.values()), list(caches)
        attentions = vllm_config.compilation_config.static_forward_context
        self._attentions = [attentions[name] for name in self._names]
        self.num_layers = len(self._layers)
        assert self.num_layers == len(self._names), f"{self.num_layers} layers, {len(self._names)} caches"
        self.block_size: int = vllm_config.cache_config.block_size
        self.device: torch.device = self._caches[0].device
        self.dtype: torch.dtype = self._caches[0].dtype
        self.kv_heads, self.head_dim = self._caches[0].shape[1], self._caches[0].shape[3] // 2
        self.hidden_size: int = vllm_config.model_config.get_hidden_size()
        self.adapters = Adapters(model, vllm_config, self.device)
        (group,) = kv_cache_config.kv_cache_groups
        backend = self._attentions[0].get_attn_backend()
        self._builder = backend.get_builder_cls()(group.kv_cache_spec, self._names, vllm_config, self.device)
        self.lane = make_lane(backend.get_name())
        # its builder plans into the one wrapper that it has: metadata that was built before is void
        self._replans = backend.get_name() == "FLASHINFER"
        self._planned: Any = None
        self._layout: PagedLayout = layout_for(backend.get_name(), getattr(self._attentions[0], "isa", None))
        for attention, cache in zip(self._attentions, self._caches, strict=True):
            check_round_trip(self._layout, attention, cache, self.block_size)

    # --- the cache -------------------------------------------------------------------------------------------------------

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (n, kv_heads, head_dim) of ``slots`` (n,): copies."""
        return self._layout.read(self._caches[layer], self.lane.to_device(slots))

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Keys and values (n, kv_heads, head_dim) on the model's device into ``slots`` (n,), in host memory."""
        write(self._attentions[layer], keys, values, self.lane.to_device(slots))

    # --- units -------------------------------------------------------------------------------------------------------------

    def rows(self, positions: Sequence[int], block_ids: Sequence[int]) -> Rows:
        """What a chunk's rows (ascending positions) need in every layer; ``block_ids`` are all blocks of their request."""
        where = torch.tensor(positions, dtype=torch.int64)
        blocks = torch.tensor(block_ids, dtype=torch.int32)
        slots = blocks[where // self.block_size].to(torch.int64) * self.block_size + where % self.block_size
        # one sequence for each run of neighbours: it ends where its last row is
        breaks = [index for index in range(1, len(positions)) if positions[index] != positions[index - 1] + 1]
        starts, stops = [0, *breaks], [*breaks, len(positions)]
        ends = [positions[stop - 1] + 1 for stop in stops]
        query_start = torch.tensor([*starts, len(positions)], dtype=torch.int32)
        lengths = torch.tensor(ends, dtype=torch.int32)
        to_device = self.lane.to_device
        slots = to_device(slots)
        common = CommonAttentionMetadata(
            query_start_loc=to_device(query_start),
            query_start_loc_cpu=query_start,
            seq_lens=to_device(lengths),
            num_reqs=len(starts),
            num_actual_tokens=len(positions),
            max_query_len=max(stop - start for start, stop in zip(starts, stops, strict=True)),
            max_seq_len=max(ends),
            block_table_tensor=to_device(blocks[None].expand(len(starts), -1).contiguous()),
            slot_mapping=slots,
            # without it a backend that needs them at the host waits for the device
            seq_lens_cpu_upper_bound=lengths,
        )
        return Rows(to_device(where), slots, self._plan(common), common)

    def _plan(self, common: CommonAttentionMetadata) -> Any:
        self._planned = common
        return self._builder.build(0, common)

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """Hidden states entering layer 0 (n, hidden)."""
        with self._context(None, {}):
            embedded: Tensor = self._model.embed_input_ids(self.lane.to_device(torch.tensor(token_ids)))
        return embedded

    def run(self, layer: int, mode: UnitMode, hidden: Tensor, rows: Rows) -> Tensor | None:
        """Rows' hidden states (n, hidden) through ``layer``: writes their keys and values; what enters the next layer, or None.

        In KV_ONLY mode nobody needs the output: it is not computed.
        """
        if mode is UnitMode.KV_ONLY:
            with self._context(None, {}):
                keys, values = self._project(layer, hidden, rows.positions)
            write(self._attentions[layer], keys, values, rows.slots)
            return None
        assert mode is UnitMode.FULL, f"vLLM itself computes the row that is sampled from, not a {mode} unit"
        name = self._names[layer]
        metadata = self._plan(rows.common) if self._replans and self._planned is not rows.common else rows.metadata
        with self._context({name: metadata}, {name: rows.slots}):
            # the layer adds into what it is given
            out, residual = self._layers[layer](rows.positions, hidden.clone(), None)
        entering: Tensor = out + residual
        return entering

    def _project(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys after RoPE and values (n, kv_heads, head_dim), as the attention modules of the supported models make them."""
        block = self._layers[layer]
        attention = block.self_attn
        qkv, _ = attention.qkv_proj(block.input_layernorm(hidden))
        q, k, v = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
        shape = (len(hidden), self.kv_heads, self.head_dim)
        if hasattr(attention, "k_norm"):
            k = attention.k_norm(k.reshape(shape)).view(k.shape)
        # it may turn in place
        _, k = attention.rotary_emb(positions, q.contiguous(), k.contiguous())
        return k.view(shape), v.reshape(shape)

    @contextmanager
    def _context(self, metadata: dict[str, Any] | None, slots: dict[str, Tensor]) -> Iterator[None]:
        with set_forward_context(metadata, self._config, slot_mapping=slots), untapped():
            # experts are found by the name of their layer: by the order of calls, layer 5 alone would get those of layer 0
            get_forward_context().all_moe_layers = None
            yield
