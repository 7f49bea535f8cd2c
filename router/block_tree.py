"""The tree behind the prefix index: blocks linked by their hash chains, their states, and which leaf is forgotten next.

Every entry knows which chains reach it without a gap (router/chains.py); a change is passed on to the blocks below it only as
far as it makes a difference. Used by router/index.py alone.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator

from kvkin.kv.hashing import BlockHash
from kvkin.router.chains import Chain, Held, State, StateTable
from kvkin.transport.node_messages import Holding


class Entry:
    """A block of the tree. ``position`` is its first token's, -1 while only its children are known (then nobody holds it)."""

    __slots__ = (
        "depth",
        "first_child",
        "hash",
        "held",
        "last_used",
        "next_sibling",
        "parent",
        "parent_hash",
        "position",
        "previous_sibling",
        "queued",
        "state",
    )

    def __init__(self, block: BlockHash, held: Held, state: State) -> None:
        self.hash, self.held, self.state = block, held, state
        self.parent_hash = b""
        self.position, self.depth, self.last_used, self.queued = -1, -1, 0, False
        self.parent: Entry | None = None
        self.first_child: Entry | None = None
        self.next_sibling: Entry | None = None
        self.previous_sibling: Entry | None = None


def _children(entry: Entry) -> Iterator[Entry]:
    child = entry.first_child
    while child is not None:
        yield child
        child = child.next_sibling


class BlockTree:
    """Entries, their links and states, and the order in which leaves are forgotten."""

    def __init__(self, max_blocks: int) -> None:
        self.table = StateTable()
        self.entries: dict[BlockHash, Entry] = {}
        self.reached: dict[BlockHash, State] = {}  # only blocks whose state has a path: closed under "parent"
        self.max_blocks = max_blocks
        self._chain_entries: dict[Chain, set[Entry]] = {}
        self._leaves: list[tuple[int, int, Entry]] = []
        self._ticks = itertools.count(1)
        self._compact_at = 4096

    # --- holdings ----------------------------------------------------------------------------------------------------

    def put(self, chain: Chain, holding: Holding) -> bool:
        """Note that ``chain`` holds a block. False, without effect, if the holding contradicts what is known of the block."""
        entry = self.entries.get(holding.block)
        if entry is None:
            entry = self._create(holding.block)
        if entry.position < 0:
            if not self._place(entry, holding):
                self._prune(entry)
                return False
        elif entry.position != holding.position or entry.parent_hash != holding.parent:
            return False
        if chain not in entry.held.layers:
            self._chain_entries.setdefault(chain, set()).add(entry)
            self.table.count(chain, 1)
        entry.held = self.table.add(entry.held, chain, (holding.kv_layers, holding.e_layers))
        entry.last_used = next(self._ticks)
        self._queue(entry)
        self._refresh(entry)
        return True

    def take(self, chain: Chain, entry: Entry) -> None:
        """``chain`` no longer holds the entry's block."""
        self._unhold(chain, entry)
        self._refresh(entry)
        self._prune(entry)

    def entries_of(self, chain: Chain) -> Iterable[Entry]:
        # deepest first: then no removal changes what is below it
        return sorted(self._chain_entries.get(chain, ()), key=lambda entry: -entry.position)

    def _unhold(self, chain: Chain, entry: Entry) -> None:
        entry.held = self.table.remove(entry.held, chain)
        entries = self._chain_entries[chain]
        entries.discard(entry)
        if not entries:
            del self._chain_entries[chain]
        self.table.count(chain, -1)

    # --- links -------------------------------------------------------------------------------------------------------

    def _create(self, block: BlockHash) -> Entry:
        entry = self.entries[block] = Entry(block, self.table.nothing, self.table.unreached)
        return entry

    def _place(self, entry: Entry, holding: Holding) -> bool:
        """Link an entry to its parent, which may be unknown yet."""
        if holding.position < 0 or holding.parent == holding.block:
            return False
        if holding.position > 0:
            parent = self.entries.get(holding.parent)
            if parent is None:
                parent = self._create(holding.parent)
                parent.last_used = next(self._ticks)
            elif parent.position >= holding.position:
                return False
            # positions rise along every branch, so that no wrong holding can close a circle
            if any(child.position <= holding.position for child in _children(entry)):
                return False
            entry.parent = parent
            entry.next_sibling = parent.first_child
            if parent.first_child is not None:
                parent.first_child.previous_sibling = entry
            parent.first_child = entry
        entry.position, entry.parent_hash = holding.position, holding.parent
        return True

    def _prune(self, entry: Entry) -> None:
        """Remove an entry that nobody holds and nothing stands on, and then its parent for the same reason."""
        current: Entry | None = entry
        while current is not None and not current.held.layers and current.first_child is None:
            current = self._remove(current)

    def _remove(self, entry: Entry) -> Entry | None:
        """Remove a leaf; returns its parent, whose recency is at least the leaf's."""
        del self.entries[entry.hash]
        self.reached.pop(entry.hash, None)
        parent = entry.parent
        if parent is not None:
            if entry.previous_sibling is not None:
                entry.previous_sibling.next_sibling = entry.next_sibling
            else:
                parent.first_child = entry.next_sibling
            if entry.next_sibling is not None:
                entry.next_sibling.previous_sibling = entry.previous_sibling
            parent.last_used = max(parent.last_used, entry.last_used)
            self._queue(parent)
        return parent

    # --- states ------------------------------------------------------------------------------------------------------

    def _refresh(self, entry: Entry) -> None:
        """Bring the state of an entry up to date, and of those below it as far as anything changes."""
        pending = [entry]
        while pending:
            current = pending.pop()
            state = self._state_of(current)
            if state is current.state:
                continue
            current.state = state
            if state is self.table.unreached:
                self.reached.pop(current.hash, None)
            else:
                self.reached[current.hash] = state
            pending.extend(_children(current))

    def _state_of(self, entry: Entry) -> State:
        if entry.position == 0:
            entry.depth = 0
            return self.table.first(entry.held)
        parent = entry.parent
        if parent is None or parent.state is self.table.unreached:
            return self.table.unreached
        entry.depth = parent.depth + 1
        return self.table.following(parent.state, entry.held, entry.position, entry.depth)

    # --- memory ------------------------------------------------------------------------------------------------------

    def touch(self, entry: Entry) -> None:
        """Its recency protects the blocks before it as well: they are not leaves while it is there."""
        entry.last_used = next(self._ticks)

    def shrink(self) -> None:
        """Forget the leaves that were used longest ago until the bound holds; keep the tables small."""
        while len(self.entries) > self.max_blocks:
            last_used, _, entry = heapq.heappop(self._leaves)
            entry.queued = False
            if self.entries.get(entry.hash) is not entry or entry.first_child is not None:
                continue
            if entry.last_used > last_used:
                self._queue(entry)
                continue
            self._forget(entry)
        if len(self._leaves) > 2 * len(self.entries) + 1024:
            self._requeue()
        if len(self.table) > self._compact_at:
            entries = self.entries.values()
            self.table.compact((entry.held for entry in entries), (entry.state for entry in entries))
            self._compact_at = 2 * len(self.table) + 4096

    def _forget(self, entry: Entry) -> None:
        for chain in entry.held.layers:
            self._unhold(chain, entry)
        parent = self._remove(entry)
        if parent is not None:
            self._prune(parent)

    def _queue(self, entry: Entry) -> None:
        if entry.first_child is None and not entry.queued:
            entry.queued = True
            heapq.heappush(self._leaves, (entry.last_used, next(self._ticks), entry))

    def _requeue(self) -> None:
        """Drop the queue's items of entries that are gone."""
        for _, _, entry in self._leaves:
            entry.queued = False
        self._leaves = []
        for entry in self.entries.values():
            self._queue(entry)
