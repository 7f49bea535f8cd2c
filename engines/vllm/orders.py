"""What the scheduler side orders the worker side to do in one step, as plain data. Pure: no vllm, no torch.

Under tensor parallelism every rank must run the same units in the same order, because the layers of a unit reduce over the ranks.
So everything that depends on time or arrival is decided on the scheduler side and sent as a list of orders, which each rank
carries out from the first to the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvkin.kv.execution import Chunk, Unit
from kvkin.kv.layout import KVLayout
from kvkin.transport.arena import ArenaDescription, Place

Bytes = NDArray[np.uint8] | Place
"""Whole blocks: as they are, or where a shared arena has them."""


@dataclass(frozen=True)
class Serve:
    """A request begins; before anything else of its name.

    Hidden states entering ``taps`` are kept for up to ``capacity`` tokens; chunks in ``later_chunks`` are reported layer by layer
    once vLLM's own forward has computed them. ``layout`` is that of blocks outside of vLLM.
    """

    key: str
    layout: KVLayout
    taps: tuple[int, ...] = ()
    capacity: int = 0
    later_chunks: Sequence[Chunk] = ()


@dataclass(frozen=True)
class BeginLoad:
    """A load got its blocks. Tokens below ``cached`` are in them already (shared, never written)."""

    key: str
    block_ids: tuple[int, ...]
    cached: int
    token_ids: tuple[int, ...]
    lora_id: int


@dataclass(frozen=True)
class WriteData:
    """Data of (chunk, layer) has arrived: KV goes into the blocks, E (layer -1) is kept for the chunk's first unit.

    ``parts``: (first token, whole blocks from there on), together the chunk.
    """

    key: str
    chunk: int
    layer: int
    parts: tuple[tuple[int, Bytes], ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class RunUnit:
    """Compute a unit; its rows below ``cached`` are skipped."""

    key: str
    unit: Unit


@dataclass(frozen=True)
class SwapOut:
    """vLLM is about to give these blocks to others: keep the first ``num_tokens`` tokens of them in host memory."""

    key: str
    block_ids: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True)
class SwapIn:
    """Write what was kept into the load's new blocks."""

    key: str


@dataclass(frozen=True)
class EndLoad:
    """Everything is there (or the request was aborted): report the load of vLLM's ``request_id`` as received, once.

    ``early``: some data is still on its way; the forward that computes the rest of the prompt waits for it, layer by layer.
    ``failed``: nothing of it is to be used. vLLM computes the prompt; a load in which something failed is reported so in any case.
    """

    key: str
    request_id: str
    early: bool = False
    failed: bool = False


@dataclass(frozen=True)
class ReleaseBlocks:
    """Nobody reads the blocks of this finished request any more: report them as sent, once."""

    request_id: str


@dataclass(frozen=True)
class StoreKV:
    """Copy KV of whole blocks, of tokens from ``start`` on, into ``slots`` of a shared arena; reported as ``Stored(ticket)``.

    ``block_ids`` are all of the request's blocks, which stay until the report (held, or the request runs).
    """

    ticket: int
    block_ids: tuple[int, ...]
    start: int
    layers: Sequence[int]
    arena: ArenaDescription
    slots: tuple[int, ...]


@dataclass(frozen=True)
class StoreE:
    """Copy the kept hidden states entering ``layer``, of tokens from ``start`` on, into E slots; reported as ``Stored(ticket)``."""

    ticket: int
    key: str
    start: int
    layer: int
    arena: ArenaDescription
    slots: tuple[int, ...]


@dataclass(frozen=True)
class HoldAdapter:
    """Have the LoRA adapter ``name`` from ``path``, vLLM's ``lora_id``, ready for the units of a load, until it is forgotten; reported as
    ``Stored(ticket)``."""

    ticket: int
    key: str
    lora_id: int
    name: str
    path: str


@dataclass(frozen=True)
class Forget:
    """The request is over and nobody reads its KV or E any more: drop everything that is kept under its name."""

    key: str


Store = StoreKV | StoreE
Order = (
    Serve
    | BeginLoad
    | WriteData
    | RunUnit
    | SwapOut
    | SwapIn
    | EndLoad
    | ReleaseBlocks
    | StoreKV
    | StoreE
    | HoldAdapter
    | Forget
)


def is_slice(orders: Sequence[Order]) -> bool:
    """Whether a step's orders are work, which takes time: then it is reported when they are done (``SliceTook``)."""
    return any(isinstance(order, WriteData | RunUnit | SwapIn | HoldAdapter) for order in orders)


@dataclass(frozen=True)
class Progress:
    """vLLM computes tokens [start, stop) of a request in this step; ``first_slot`` is where the first of them is written (if the
    request is tapped: by it, its rows are found in the batch)."""

    key: str
    start: int
    stop: int
    first_slot: int
