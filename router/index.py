"""Prefix index: which node holds which block under which provenance (docs/design.md sections 2 and 4).

Soft state of one router process, fed by the nodes' holdings and by its own prefill orders; pure, bounded, single-threaded.
Each block knows which chains reach it without a gap (router/block_tree.py, router/chains.py), so a look-up finds the depth by
bisection and then only compares neighbours by identity.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from kvkin.kv.errors import ProtocolError
from kvkin.kv.hashing import BlockHash
from kvkin.kv.provenance import Provenance
from kvkin.router.block_tree import BlockTree
from kvkin.router.chains import Chain, Match, Path, Run, State
from kvkin.router.fan_out import FanOut
from kvkin.transport.node_messages import Holding, Holdings

__all__ = ["Match", "PrefixIndex", "Run"]


class _Order:
    """A prefill that was ordered: its blocks can be pulled while they are computed."""

    __slots__ = ("e_layers", "hashes", "kv_layers", "node", "order_id", "provenance")

    def __init__(self, order_id: str, node: str, hashes: tuple[BlockHash, ...], provenance: Provenance) -> None:
        self.order_id, self.node, self.hashes, self.provenance = order_id, node, hashes, provenance
        self.kv_layers = 0
        self.e_layers: tuple[int, ...] = ()

    def common(self, hashes: Sequence[BlockHash]) -> int:
        """Number of leading blocks that a prompt shares with the order."""
        low, high = 0, min(len(hashes), len(self.hashes))
        while low < high:
            middle = (low + high + 1) // 2
            if self.hashes[middle - 1] == hashes[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low


class PrefixIndex:
    """Block hash -> holders. ``max_blocks`` bounds memory: leaves that were used longest ago are forgotten first."""

    def __init__(self, max_blocks: int = 1_000_000, fan_out_half_life_s: float = 120.0) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be at least 1, not {max_blocks}")
        self._tree = BlockTree(max_blocks)
        self._fan_out = FanOut(fan_out_half_life_s)
        self._orders: dict[str, _Order] = {}
        self._orders_by_block: dict[BlockHash, list[_Order]] = {}
        self.contradictions = 0  # holdings that were ignored because they cannot be true

    def __len__(self) -> int:
        """Blocks known now."""
        return len(self._tree.entries)

    def __contains__(self, block: BlockHash) -> bool:
        return block in self._tree.entries

    def num_held(self, node: str) -> int:
        """Blocks that are known to be on ``node``, once for each provenance."""
        return sum(chain.num_blocks for chain in self._tree.table.chains_of(node))

    # --- what nodes say ----------------------------------------------------------------------------------------------

    def apply_snapshot(self, node: str, holdings: Holdings) -> None:
        """Everything that the node holds: what is not named is forgotten.

        Order is membership's business: of a snapshot in parts, the first comes here and the others as deltas.
        """
        _check(holdings)
        keep = self._add(node, holdings)
        for chain in self._tree.table.chains_of(node):
            for entry in self._tree.entries_of(chain):
                if (entry.hash, chain.provenance.key) not in keep:
                    self._tree.take(chain, entry)
        self._tree.shrink()

    def apply_delta(self, node: str, holdings: Holdings) -> None:
        """Changes: ``removed`` first, then ``added``. Applying one twice changes nothing; unknown blocks are ignored."""
        _check(holdings)
        # a block without any layer left is as good as removed
        gone = [*holdings.removed, *((one.block, one.provenance) for one in holdings.added if not _holds(one))]
        for block, number in gone:
            key = holdings.provenances[number].key
            entry, chain = self._tree.entries.get(block), self._tree.table.known_chain(node, key)
            if entry is not None and chain is not None and chain in entry.held.layers:
                self._tree.take(chain, entry)
        self._add(node, holdings)
        self._tree.shrink()

    def drop_node(self, node: str) -> None:
        """The node is gone: nothing of it is offered any more, its orders included."""
        for order in [order for order in self._orders.values() if order.node == node]:
            self.withdraw(order.order_id)
        for chain in self._tree.table.chains_of(node):
            for entry in self._tree.entries_of(chain):
                self._tree.take(chain, entry)

    def _add(self, node: str, holdings: Holdings) -> set[tuple[BlockHash, bytes]]:
        """Take in what is added; returns its (block, provenance key) pairs."""
        chains: dict[int, Chain] = {}
        keys: set[tuple[BlockHash, bytes]] = set()
        for holding in filter(_holds, holdings.added):
            chain = chains.get(holding.provenance)
            if chain is None:
                provenance = holdings.provenances[holding.provenance]
                chain = chains[holding.provenance] = self._tree.table.chain(node, provenance)
            if self._tree.put(chain, holding):
                keys.add((holding.block, chain.provenance.key))
            else:
                self.contradictions += 1
        for chain in chains.values():
            self._tree.table.count(chain, 0)  # not kept if every holding of it was refused
        return keys

    # --- orders ------------------------------------------------------------------------------------------------------

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
        if not provenance.exact:
            raise ValueError(f"order {order_id}: a prefill computes everything itself, so its provenance is exact")
        self.withdraw(order_id)
        if hashes:
            order = _Order(order_id, node, tuple(hashes), provenance)
            order.kv_layers, order.e_layers = kv_layers, e_layers
            self._orders[order_id] = order
            self._orders_by_block.setdefault(hashes[0], []).append(order)

    def withdraw(self, order_id: str) -> None:
        """The order ended (its blocks are holdings now) or failed. Unknown ids are ignored."""
        order = self._orders.pop(order_id, None)
        if order is not None:
            same = self._orders_by_block[order.hashes[0]]
            same.remove(order)
            if not same:
                del self._orders_by_block[order.hashes[0]]

    # --- look-up -----------------------------------------------------------------------------------------------------

    def match(self, hashes: Sequence[BlockHash], root: BlockHash) -> list[Match]:
        """All maximal chains of the prompt's blocks under ``root``, longest first. Protects what it finds from being forgotten.

        A chain that is the beginning of another one is left out unless it has more layers of KV or E; so is a tainted branch
        where its node holds what it branched from at least as far.
        """
        if not hashes:
            return []
        matches: list[Match] = []
        entry = self._tree.entries.get(hashes[0])
        if entry is not None and entry.parent_hash == root:
            depth = self._depth(hashes)
            if depth:
                self._tree.touch(self._tree.entries[hashes[depth - 1]])
                matches = [path.match(stop) for path, stop in _maximal(self._tree.reached, hashes, depth)]
        matches += self._live(hashes, matches)
        matches.sort(key=lambda match: (-match.num_blocks, match.node))
        return matches

    def _depth(self, hashes: Sequence[BlockHash]) -> int:
        """Number of leading blocks that some chain reaches: by bisection, for with a block all before it are reached."""
        reached = self._tree.reached
        low, high = 0, len(hashes)
        if hashes[-1] in reached:  # a full hit is common
            return high
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in reached:
                low = middle
            else:
                high = middle - 1
        return low

    def _live(self, hashes: Sequence[BlockHash], held: Sequence[Match]) -> list[Match]:
        """For each node and provenance the order that reaches furthest, behind what the node holds already."""
        best: dict[tuple[str, bytes], tuple[int, _Order]] = {}
        for order in self._orders_by_block.get(hashes[0], ()):
            stop = order.common(hashes)
            key = (order.node, order.provenance.key)
            if key not in best or best[key][0] < stop:
                best[key] = (stop, order)
        matches = []
        for (node, provenance_key), (stop, order) in best.items():
            first_runs = [match.runs[0] for match in held if match.node == node]
            done = [run for run in first_runs if run.provenance.key == provenance_key]
            before = max(done, key=lambda run: run.stop_block, default=None)
            start = 0 if before is None else before.stop_block
            if start < stop:
                run = Run(order.provenance, start, stop, order.kv_layers, order.e_layers, order.order_id)
                matches.append(Match(node, (run,) if before is None else (before, run)))
        return matches

    # --- statistics --------------------------------------------------------------------------------------------------

    def observe(self, family: str, model: str, hashes: Sequence[BlockHash], now: float) -> None:
        """Count a request for the fan-out statistics, once. ``now`` is a monotonic clock in seconds."""
        self._fan_out.observe(family, model, hashes, now)

    def fan_out(
        self, family: str, model: str, hashes: Sequence[BlockHash], now: float
    ) -> tuple[tuple[int, float], ...]:
        """(blocks, decayed number of requests of *other* models of the family that started with them), by rising blocks."""
        return self._fan_out.of_others(family, model, hashes, now)


def _holds(holding: Holding) -> bool:
    return holding.kv_layers > 0 or bool(holding.e_layers)


def _check(holdings: Holdings) -> None:
    """Refuse a message that names provenances which it does not hold, before anything of it is applied."""
    count = len(holdings.provenances)
    numbers = itertools.chain(
        (holding.provenance for holding in holdings.added), (number for _, number in holdings.removed)
    )
    for number in numbers:
        if not 0 <= number < count:
            raise ProtocolError(f"holdings name provenance {number}, but the message has {count}")


def _maximal(reached: Mapping[BlockHash, State], hashes: Sequence[BlockHash], depth: int) -> list[tuple[Path, int]]:
    """The paths through the first ``depth`` blocks that end, or lose layers, and the block after their last one.

    Found by bisection. States are interned: if two blocks have the same one, no path of it ends in between, and all that begin
    and end in between branched from one of those; such branches are never reported, whether the bisection saw them or not.
    """
    last = reached[hashes[depth - 1]]
    ends = dict.fromkeys(last.paths, depth)
    branched: set[Path] = set()  # those that end where another one branches from them: its beginning
    pending = [(0, reached[hashes[0]], depth - 1, last)]
    while pending:
        low, before, high, after = pending.pop()
        while before is not after and high - low > 1:
            middle = (low + high) // 2
            state = reached[hashes[middle]]
            if state is before:
                low = middle
            else:
                if state is not after:
                    pending.append((middle, state, high, after))
                high, after = middle, state
        if before is not after:
            origins = {path.prev for path in after.paths if path.start == high}
            for path in set(before.paths).difference(after.paths):
                ends[path] = high
                if path in origins:
                    branched.add(path)
    return [(path, stop) for path, stop in ends.items() if path not in branched and not _outlived(path, stop, ends)]


def _outlived(path: Path, stop: int, ends: Mapping[Path, int]) -> bool:
    origin = path.prev
    while origin is not None:
        if ends.get(origin, 0) >= stop:
            return True
        origin = origin.prev
    return False
