"""Prefix index: which node holds which block under which provenance (DESIGN.md sections 2 and 4).

Soft state of one router process, fed by the nodes' holdings and by its own prefill orders; pure, bounded, single-threaded.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvkin.kv.hashing import BlockHash
from kvkin.kv.provenance import Provenance
from kvkin.transport.node_messages import Holdings


class Run(msgspec.Struct, frozen=True):
    """Blocks [start_block, stop_block) of the prompt that a node holds under one provenance.

    KV of layers [0, kv_layers) and E at ``e_layers`` are there for *every* block of the run. ``order_id``: not computed yet,
    but ordered, so that it can be pulled live.
    """

    provenance: Provenance
    start_block: int
    stop_block: int
    kv_layers: int
    e_layers: tuple[int, ...]
    order_id: str = ""


class Match(msgspec.Struct, frozen=True):
    """A chain of blocks from the start of the prompt on one node; each run's provenance follows the one before.

    A node has several matches if it holds several chains, or if a shorter part of a chain has more layers of E or KV.
    """

    node: str
    runs: tuple[Run, ...]

    @property
    def num_blocks(self) -> int:
        return self.runs[-1].stop_block


class PrefixIndex:
    """Block hash -> holders. ``max_blocks`` bounds memory: leaves that were used longest ago are forgotten first."""

    def __init__(self, max_blocks: int = 200_000, fan_out_half_life_s: float = 300.0) -> None:
        raise NotImplementedError

    def __len__(self) -> int:
        """Blocks known now."""
        raise NotImplementedError

    def apply_snapshot(self, node: str, holdings: Holdings) -> None:
        """Everything that the node holds; what it held before and is not named is forgotten."""
        raise NotImplementedError

    def apply_delta(self, node: str, holdings: Holdings) -> None:
        """Changes: ``removed`` first, then ``added``. Applying one twice changes nothing; unknown blocks are ignored."""
        raise NotImplementedError

    def drop_node(self, node: str) -> None:
        """The node is gone: nothing of it is offered any more, its orders included."""
        raise NotImplementedError

    def announce(
        self,
        node: str,
        order_id: str,
        hashes: Sequence[BlockHash],
        provenance: Provenance,
        kv_layers: int,
        e_layers: tuple[int, ...],
    ) -> None:
        """An ordered prefill that is not finished; its blocks are offered as live sources. The provenance is exact."""
        raise NotImplementedError

    def withdraw(self, order_id: str) -> None:
        """The order ended (its blocks are holdings now) or failed. Unknown ids are ignored."""
        raise NotImplementedError

    def match(self, hashes: Sequence[BlockHash], root: BlockHash) -> list[Match]:
        """All maximal chains of the prompt's blocks under ``root``, longest first."""
        raise NotImplementedError

    def observe(self, family: str, model: str, hashes: Sequence[BlockHash], now: float) -> None:
        """Count a request for the fan-out statistics, once. ``now`` is a monotonic clock in seconds."""
        raise NotImplementedError

    def fan_out(
        self, family: str, model: str, hashes: Sequence[BlockHash], now: float
    ) -> tuple[tuple[int, float], ...]:
        """(blocks, decayed number of requests of *other* models of the family that started with them), by rising blocks."""
        raise NotImplementedError
