"""BlockStore: which block lies in which slot of a node's arena. Pure bookkeeping: no bytes, clock passed in.

Keys are (block hash, provenance key). A block has one KV slot and, per transition layer, an E slot; both kinds have their own
budget. Blocks in use (refcount: a running request, a lease) are never evicted; the rest goes leaf first, least recently used
first. A shortage of E slots takes E only, the KV of the same blocks stays. What cannot be made to fit evicts nothing. Changes are collected for the router as holdings deltas. Prefill and decode nodes use it alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import msgspec

from kvkin.kv.errors import CapacityError
from kvkin.kv.provenance import Provenance

Key = tuple[bytes, bytes]


class Block(msgspec.Struct):
    """One stored block. ``kv_layers`` counts the leading layers that are visible; ``generation`` changes when a slot is reused."""

    key: Key
    parent: bytes
    provenance: Provenance
    position: int
    slot: int
    generation: int
    kv_layers: int = 0
    e_slots: dict[int, int] = {}
    e_ready: frozenset[int] = frozenset()
    refs: int = 0
    children: int = 0
    above: Block | None = None
    last_used: float = 0.0
    advertised: tuple[int, tuple[int, ...]] | None = None


class Change(msgspec.Struct, frozen=True):
    """What the router should know: a block's new state, or that it is gone (``kv_layers`` 0 and no E)."""

    key: Key
    parent: bytes
    provenance: Provenance
    position: int
    kv_layers: int
    e_layers: tuple[int, ...]


class SlotPool:
    """Free slots of one kind; hands out runs that are as contiguous as possible, so that transfers coalesce."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        self._quarantined: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.num_slots - len(self._free)

    def take(self, count: int) -> list[int]:
        """``count`` slots, ascending, from the first contiguous run that is long enough, else the lowest ones."""
        assert count <= len(self._free)
        start = self._run_of(count)
        taken = self._free[start : start + count]
        del self._free[start : start + count]
        return taken

    def give(self, slots: Sequence[int]) -> None:
        self._free = list(heapq.merge(self._free, sorted(slots)))

    def _run_of(self, count: int) -> int:
        run = 0
        for index, slot in enumerate(self._free):
            run = run + 1 if index and slot == self._free[index - 1] + 1 else 1
            if run >= count:
                return index - count + 1
        return 0


class BlockStore:
    """The slots of one node and what they hold. Not thread-safe: the node's event loop owns it."""

    def __init__(self, num_slots: int, num_e_slots: int, num_layers: int) -> None:
        self.num_layers = num_layers
        self.kv_pool, self.e_pool = SlotPool(num_slots), SlotPool(num_e_slots)
        self._blocks: dict[Key, Block] = {}
        self._leaves: list[tuple[float, int, Key]] = []  # (last used, ticket, key), stale entries among them
        self._idle_e: list[tuple[float, int, Key]] = []  # (last used, -position, key) of unused blocks with E
        self._ticket = 0
        self._generation = 0
        self._changed: dict[Key, Change] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, block: bytes, provenance_key: bytes) -> Block | None:
        return self._blocks.get((block, provenance_key))

    def blocks(self) -> list[Block]:
        return list(self._blocks.values())

    # --- writing ---------------------------------------------------------------------------------------------------

    def reserve(
        self,
        chain: Sequence[tuple[bytes, bytes, Provenance, int]],
        e_layers: Sequence[int],
        now: float,
    ) -> list[Block]:
        """Blocks for (hash, parent hash, provenance, position) entries, each with a reference for the caller.

        Existing ones are shared (the caller sees by ``kv_layers`` whether they are complete), new ones get slots, evicting
        if need be. E slots that do not fit the E budget are left out. Raises CapacityError, leaving nothing behind, when
        blocks in use fill the arena.
        """
        found = [self._blocks.get((block, provenance.key)) for block, _, provenance, _ in chain]
        for existing in found:
            if existing is not None:
                self.acquire(existing, now)
        missing = [index for index, existing in enumerate(found) if existing is None]
        victims = self._victims(len(missing))
        if victims is None:
            for existing in found:
                if existing is not None:
                    self.release(existing, now)
            raise CapacityError(
                f"{len(missing)} KV blocks do not fit: {self.kv_pool.free} of {self.kv_pool.num_slots} slots are free and "
                "the rest is in use; raise kv_bytes of this node or lower the load"
            )
        self._evict(victims)
        slots = self.kv_pool.take(len(missing))
        for index, slot in zip(missing, slots, strict=True):
            found[index] = self._create(chain[index], slot, now)
        blocks = [block for block in found if block is not None]
        self._reserve_e([blocks[index] for index in missing], e_layers)
        return blocks

    def take_scratch(self, num_kv: int, num_e: int) -> tuple[list[int], list[int]]:
        """Unnamed KV and E slots for pulls to land in. They are adopted as blocks later or given back.

        Raises CapacityError, leaving nothing behind, when blocks in use fill the arena.
        """
        victims = self._victims(num_kv)
        if victims is None or not self._make_e_room(num_e, victims):
            self._spare(victims or [])
            raise CapacityError(
                f"{num_kv} KV and {num_e} E slots are needed, {self.kv_pool.free} and {self.e_pool.free} are free and the "
                "rest is in use; raise kv_bytes or e_bytes of this node or lower the load"
            )
        self._evict(victims)
        return self.kv_pool.take(num_kv), self.e_pool.take(num_e)

    def give_scratch(self, kv_slots: Sequence[int], e_slots: Sequence[int] = ()) -> None:
        self.kv_pool.give(kv_slots)
        self.e_pool.give(e_slots)

    def adopt(
        self,
        entry: tuple[bytes, bytes, Provenance, int],
        slot: int,
        e_slots: dict[int, int],
        now: float,
    ) -> bool:
        """Turn scratch slots with complete KV (and E per layer) into a published block that nobody uses yet.

        False, and the slots stay the caller's, if the block is already here.
        """
        if (entry[0], entry[2].key) in self._blocks:
            return False
        block = self._create(entry, slot, now)
        block.kv_layers, block.e_slots, block.e_ready = self.num_layers, dict(e_slots), frozenset(e_slots)
        self.publish(block)
        self.release(block, now)
        return True

    def advance(self, block: Block, kv_layers: int) -> None:
        """Leading ``kv_layers`` layers of the block's KV are visible now."""
        block.kv_layers = max(block.kv_layers, kv_layers)

    def e_visible(self, block: Block, layer: int) -> None:
        if layer in block.e_slots:
            block.e_ready |= {layer}

    def publish(self, block: Block) -> None:
        """Tell the router what the block holds by now (nothing if it was removed meanwhile)."""
        if block.generation < 0:
            return
        state = (block.kv_layers, tuple(sorted(block.e_ready)))
        if block.advertised != state:
            block.advertised = state
            self._changed[block.key] = Change(
                block.key, block.parent, block.provenance, block.position, block.kv_layers, state[1]
            )

    def forget(self, block: Block) -> None:
        """Remove a block that never became complete or must not be used; its last reference must be the caller's."""
        assert block.refs <= 1, f"{block} is in use elsewhere"
        block.refs = 0
        self._remove(block)

    # --- references --------------------------------------------------------------------------------------------------

    def acquire(self, block: Block, now: float) -> None:
        block.refs += 1
        block.last_used = now

    def release(self, block: Block, now: float) -> None:
        """Drop a reference. A block without complete KV that nobody uses any more is removed at once."""
        assert block.refs > 0, f"{block} released once too often"
        block.refs -= 1
        block.last_used = now
        if block.refs == 0:
            if block.kv_layers < self.num_layers:
                self._remove(block)
            else:
                self._maybe_leaf(block)
                self._maybe_idle_e(block)

    def drop_all(self) -> None:
        """Evict every block that is not in use."""
        while (victim := self._pop_leaf()) is not None:
            self._remove(victim)

    # --- holdings ----------------------------------------------------------------------------------------------------

    def take_changes(self) -> list[Change]:
        changes = list(self._changed.values())
        self._changed.clear()
        return changes

    def snapshot(self) -> list[Change]:
        """All advertised blocks, parents before children where both are held."""
        return [
            Change(block.key, block.parent, block.provenance, block.position, *block.advertised)
            for block in sorted(self._blocks.values(), key=lambda block: block.position)
            if block.advertised is not None
        ]

    # --- inside --------------------------------------------------------------------------------------------------------

    def _create(self, entry: tuple[bytes, bytes, Provenance, int], slot: int, now: float) -> Block:
        block_hash, parent, provenance, position = entry
        self._generation += 1
        block = Block(
            (block_hash, provenance.key), parent, provenance, position, slot, self._generation, refs=1, last_used=now
        )
        self._blocks[block.key] = block
        block.above = self._above(block)
        if block.above is not None:
            block.above.children += 1
        return block

    def _above(self, block: Block) -> Block | None:
        """The block before this one in its own chain, under its provenance or the one that it follows."""
        same = self._blocks.get((block.parent, block.provenance.key))
        return same or self._blocks.get((block.parent, block.provenance.parent))

    def _reserve_e(self, blocks: list[Block], e_layers: Sequence[int]) -> None:
        for layer in e_layers:
            if not blocks or not self._make_e_room(len(blocks)):
                return
            for block, slot in zip(blocks, self.e_pool.take(len(blocks)), strict=True):
                block.e_slots[layer] = slot

    def _maybe_leaf(self, block: Block) -> None:
        if block.refs == 0 and block.children == 0:
            self._ticket += 1
            heapq.heappush(self._leaves, (block.last_used, self._ticket, block.key))

    def _maybe_idle_e(self, block: Block) -> None:
        if block.refs == 0 and block.e_slots:
            heapq.heappush(self._idle_e, (block.last_used, -block.position, block.key))

    def _victims(self, count: int) -> list[tuple[Block, Block | None]] | None:
        """Blocks (with the one above each) to evict so that ``count`` KV slots are free; None, and nothing changed, if
        that many cannot be had. They are taken off their parents: ``_evict`` or ``_spare`` them."""
        victims: list[tuple[Block, Block | None]] = []
        while self.kv_pool.free + len(victims) < count:
            victim = self._pop_leaf()
            if victim is None:
                self._spare(victims)
                return None
            victims.append((victim, victim.above))
            self._detach(victim)
        return victims

    def _evict(self, victims: list[tuple[Block, Block | None]]) -> None:
        for victim, _ in victims:
            self._remove(victim)

    def _spare(self, victims: list[tuple[Block, Block | None]]) -> None:
        for victim, above in reversed(victims):
            victim.above = above
            if above is not None:
                above.children += 1
            self._maybe_leaf(victim)
            self._maybe_idle_e(victim)

    def _make_e_room(self, count: int, victims: Sequence[tuple[Block, Block | None]] = ()) -> bool:
        """Free ``count`` E slots: blocks that nobody uses lose their E, least recently used and deepest first.

        What ``victims`` will free counts, too."""
        chosen: dict[Key, Block] = {}
        going = {victim.key for victim, _ in victims}
        gained = sum(len(victim.e_slots) for victim, _ in victims)
        while self.e_pool.free + gained < count and self._idle_e:
            last_used, _, key = heapq.heappop(self._idle_e)
            block = self._blocks.get(key)
            if block is None or key in going or key in chosen:
                continue
            if block.refs == 0 and block.last_used == last_used:
                chosen[key] = block
                gained += len(block.e_slots)
        if self.e_pool.free + gained < count:
            for block in chosen.values():
                self._maybe_idle_e(block)
            return False
        for block in chosen.values():
            self.e_pool.give(list(block.e_slots.values()))
            block.e_slots, block.e_ready = {}, frozenset()
            if block.advertised is not None:
                self.publish(block)
        return True

    def _pop_leaf(self) -> Block | None:
        while self._leaves:
            last_used, _, key = heapq.heappop(self._leaves)
            block = self._blocks.get(key)
            if block is not None and block.refs == 0 and block.children == 0 and block.last_used == last_used:
                return block
        return None

    def _remove(self, block: Block) -> None:
        del self._blocks[block.key]
        self.kv_pool.give([block.slot])
        self.e_pool.give(list(block.e_slots.values()))
        block.generation = -1
        # of a block never advertised nothing is pending, unless one of the same name went before it: that must be told
        if block.advertised is not None:
            self._changed[block.key] = Change(block.key, block.parent, block.provenance, block.position, 0, ())
        self._detach(block)

    def _detach(self, block: Block) -> None:
        """Take a block off the one above it, which may be a leaf now."""
        if block.above is not None and block.above.generation >= 0:
            block.above.children -= 1
            self._maybe_leaf(block.above)
        block.above = None
