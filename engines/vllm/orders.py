"""What the scheduler side orders the worker side to do in one step, as plain data. Pure: no vllm, no torch.

Under tensor parallelism every rank must run the same units in the same order, because the layers of a unit reduce over the ranks.
So everything that depends on time or arrival is decided on the scheduler side and sent as a list of orders, which each rank
carries out from the first to the last.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvkin.kv.execution import Unit


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
    """Data of (chunk, layer) has arrived: KV goes into the blocks, E (layer -1) is kept for the chunk's first unit."""

    key: str
    chunk: int
    layer: int


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
    """Everything is there (or the request was aborted): report the load of vLLM's ``request_id`` as received, once."""

    key: str
    request_id: str


@dataclass(frozen=True)
class ReleaseBlocks:
    """Nobody reads the blocks of this finished request any more: report them as sent, once."""

    request_id: str


@dataclass(frozen=True)
class Forget:
    """The request is over: drop what is kept of its load."""

    key: str


Order = BeginLoad | WriteData | RunUnit | SwapOut | SwapIn | EndLoad | ReleaseBlocks | Forget


@dataclass(frozen=True)
class Progress:
    """vLLM computes tokens [start, stop) of a request in this step; ``first_slot`` is where the first of them is written (if the
    request is tapped: by it, its rows are found in the batch)."""

    key: str
    start: int
    stop: int
    first_slot: int
