"""BlockStore: refcounts, leaf-first LRU, two budgets, and a change stream that replays to the snapshot."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvkin.kv.errors import CapacityError
from kvkin.kv.hashing import block_hashes, root_hash
from kvkin.kv.provenance import Provenance, approximate, exact_provenance
from kvkin.kv.store import Block, BlockStore, Change, SlotPool

NUM_LAYERS = 2
ROOT = root_hash(b"tokenizer", 1, "")
EXACT = exact_provenance(b"lineage")
TAINTED = approximate(EXACT, 1, b"shape", b"lineage", 0.5)  # from token 1 on
Entry = tuple[bytes, bytes, Provenance, int]


def chain(tokens: list[int], taint_from: int | None = None) -> list[Entry]:
    """Entries of all blocks (one token each) of a prompt; those from ``taint_from`` on are tainted."""
    hashes = block_hashes(tokens, ROOT, 1)
    made = []
    for index, block in enumerate(hashes):
        tainted = taint_from is not None and index >= taint_from
        made.append((block, [ROOT, *hashes][index], TAINTED if tainted else EXACT, index))
    return made


def fill(store: BlockStore, entries: list[Entry], now: float, e_layers: tuple[int, ...] = ()) -> list[Block]:
    """Reserve, complete, publish and release blocks."""
    blocks = store.reserve(entries, e_layers, now)
    for block in blocks:
        store.advance(block, NUM_LAYERS)
        for layer in block.e_slots:
            store.e_visible(block, layer)
        store.publish(block)
    for block in blocks:
        store.release(block, now)
    return blocks


def held(store: BlockStore, entries: list[Entry]) -> list[bool]:
    return [store.get(block, provenance.key) is not None for block, _, provenance, _ in entries]


class StoreMachine(RuleBasedStateMachine):
    """Random requests against a small arena. The model keeps references and what the router believes."""

    @initialize(kv=st.integers(1, 9), e=st.integers(0, 6))
    def start(self, kv: int, e: int) -> None:
        self.store = BlockStore(kv, e, NUM_LAYERS)
        self.now = 0.0
        self.running: list[list[Block]] = []  # blocks referenced by each request
        self.scratch: list[tuple[list[int], list[int]]] = []
        self.believed: dict[Any, Change] = {}

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def references(self, block: Block) -> int:
        return sum(each is block for blocks in self.running for each in blocks)

    def victims(self, before: list[Block]) -> list[Block]:
        return [block for block in before if self.store.get(*block.key) is not block]

    def check_victims(self, before: list[Block]) -> None:
        """Evicted blocks were unused, and none leaves a child of its own behind."""
        gone = self.victims(before)
        for block in gone:
            assert self.references(block) == 0
        for block in self.store.blocks():
            assert block.above is None or block.above not in gone, "a parent went before its child"

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4), taint=st.sampled_from([None, 1]), e=st.booleans())
    def reserve(self, tokens: list[int], taint: int | None, e: bool) -> None:
        entries, before = chain(tokens, taint), self.store.blocks()
        was_held = held(self.store, entries)
        idle = [block for block in before if self.references(block) == 0]
        try:
            blocks = self.store.reserve(entries, (1,) if e else (), self.tick())
        except CapacityError:
            assert not self.victims(before), "what cannot be done must not cost anything"
            wanted = {(entry[0], entry[2].key) for entry in entries}
            evictable = [block for block in idle if block.key not in wanted]
            assert self.store.kv_pool.free + len(evictable) < was_held.count(False)
            return
        self.check_victims(before)
        assert [block.key for block in blocks] == [(entry[0], entry[2].key) for entry in entries]
        self.running.append(blocks)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def progress(self, data: st.DataObject) -> None:
        """A layer of some blocks is computed, announced, perhaps published."""
        blocks = self.running[data.draw(st.integers(0, len(self.running) - 1))]
        layers = data.draw(st.integers(0, NUM_LAYERS))
        for block in blocks:
            self.store.advance(block, layers)
            self.store.e_visible(block, data.draw(st.integers(0, 1)))
            if data.draw(st.booleans()):
                self.store.publish(block)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        now = self.tick()
        for block in reversed(blocks):
            incomplete = block.kv_layers < NUM_LAYERS
            self.store.release(block, now)
            if incomplete and self.references(block) == 0:
                assert self.store.get(*block.key) is not block, "half a block that nobody fills is no use"

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        blocks = self.running[data.draw(st.integers(0, len(self.running) - 1))]
        now = self.tick()
        for block in blocks:
            self.store.acquire(block, now)
        self.running.append(list(blocks))

    @rule(kv=st.integers(0, 3), e=st.integers(0, 3))
    def take_scratch(self, kv: int, e: int) -> None:
        before = self.store.blocks()
        try:
            self.scratch.append(self.store.take_scratch(kv, e))
        except CapacityError:
            assert not self.victims(before), "what cannot be done must not cost anything"
        self.check_victims(before)

    @precondition(lambda self: self.scratch)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4), data=st.data())
    def adopt_and_give_back(self, tokens: list[int], data: st.DataObject) -> None:
        kv, e = self.scratch.pop(data.draw(st.integers(0, len(self.scratch) - 1)))
        entries = chain(tokens)
        if kv and all(held(self.store, entries[:-1])):
            e_slots = {1: e[0]} if e else {}
            if self.store.adopt(entries[-1], kv[0], e_slots, self.tick()):
                kv, e = kv[1:], e[len(e_slots) :]
        self.store.give_scratch(kv, e)

    @rule()
    def drop_all(self) -> None:
        self.store.drop_all()
        assert all(block.refs or block.children for block in self.store.blocks())

    @rule()
    def router_listens(self) -> None:
        """The stream of changes, replayed, is the snapshot."""
        for change in self.store.take_changes():
            if change.kv_layers == 0 and not change.e_layers:
                self.believed.pop(change.key, None)
            else:
                self.believed[change.key] = change
        snapshot = self.store.snapshot()
        assert {change.key: change for change in snapshot if change.kv_layers or change.e_layers} == self.believed
        positions = [change.position for change in snapshot]
        assert positions == sorted(positions)
        assert self.store.take_changes() == []

    @invariant()
    def no_slot_is_lost_or_used_twice(self) -> None:
        if not hasattr(self, "store"):
            return
        store, blocks = self.store, self.store.blocks()
        kv = [block.slot for block in blocks] + [slot for taken, _ in self.scratch for slot in taken]
        e = [slot for block in blocks for slot in block.e_slots.values()]
        e += [slot for _, taken in self.scratch for slot in taken]
        for pool, used in ((store.kv_pool, kv), (store.e_pool, e)):
            assert len(used) == len(set(used)) == pool.used
            free = pool.take(pool.free)
            assert sorted([*used, *free]) == list(range(pool.num_slots))
            pool.give(free)

    @invariant()
    def references_and_advertisements_are_true(self) -> None:
        if not hasattr(self, "store"):
            return
        for block in self.store.blocks():
            assert block.refs == self.references(block)
            assert block.children == sum(other.above is block for other in self.store.blocks())
            assert block.e_ready <= set(block.e_slots)
            assert block.refs or block.kv_layers == NUM_LAYERS
        generations = [block.generation for block in self.store.blocks()]
        assert len(generations) == len(set(generations))


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=30)


# --- single facts --------------------------------------------------------------------------------------------------------


def test_least_recently_used_leaf_goes_first() -> None:
    store = BlockStore(4, 0, NUM_LAYERS)
    old, young = chain([1, 2]), chain([3, 4])
    fill(store, old, now=1.0)
    fill(store, young, now=2.0)
    fill(store, chain([5]), now=3.0)
    assert (held(store, old), held(store, young)) == ([True, False], [True, True])
    fill(store, chain([6]), now=4.0)
    assert (held(store, old), held(store, young)) == ([False, False], [True, True])
    fill(store, chain([7]), now=5.0)
    assert held(store, young) == [True, False]


def test_use_makes_young() -> None:
    store = BlockStore(2, 0, NUM_LAYERS)
    fill(store, chain([1]), now=1.0)
    fill(store, chain([2]), now=2.0)
    block = store.get(*_key(chain([1])[0]))
    assert block is not None
    store.acquire(block, 3.0)
    store.release(block, 3.0)
    fill(store, chain([3]), now=4.0)
    assert (held(store, chain([1])), held(store, chain([2]))) == ([True], [False])


def test_a_tainted_child_keeps_the_exact_block_that_it_stands_on() -> None:
    store = BlockStore(2, 0, NUM_LAYERS)
    entries = chain([1, 2], taint_from=1)
    fill(store, entries, now=1.0)
    fill(store, chain([9]), now=2.0)
    assert held(store, entries) == [True, False]


def test_same_tokens_under_two_provenances_are_two_blocks() -> None:
    store = BlockStore(4, 0, NUM_LAYERS)
    fill(store, chain([1, 2]), now=1.0)
    fill(store, chain([1, 2], taint_from=1), now=2.0)
    assert len(store) == 3


def test_what_does_not_fit_costs_nothing() -> None:
    """A request larger than the arena must not wipe everybody's blocks before it is refused."""
    store = BlockStore(3, 0, NUM_LAYERS)
    fill(store, chain([1, 2]), now=1.0)
    with pytest.raises(CapacityError, match=r"4 KV blocks do not fit.*raise kv_bytes"):
        store.reserve(chain([5, 6, 7, 8]), (), 2.0)
    with pytest.raises(CapacityError):
        store.take_scratch(4, 0)
    with pytest.raises(CapacityError):
        store.take_scratch(0, 1)
    assert held(store, chain([1, 2])) == [True, True]
    assert store.kv_pool.used == 2


def test_blocks_in_use_are_never_evicted() -> None:
    store = BlockStore(2, 0, NUM_LAYERS)
    blocks = store.reserve(chain([1, 2]), (), 1.0)
    with pytest.raises(CapacityError):
        store.reserve(chain([3]), (), 2.0)
    for block in blocks:
        store.advance(block, NUM_LAYERS)
        store.release(block, 3.0)
    assert len(store.reserve(chain([3]), (), 4.0)) == 1


def test_e_has_its_own_budget() -> None:
    """A shortage of E slots takes the oldest E, never KV; and is told to the router."""
    store = BlockStore(6, 2, NUM_LAYERS)
    old, young = chain([1, 2]), chain([3])
    fill(store, old, now=1.0, e_layers=(1,))
    store.take_changes()
    fill(store, young, now=2.0, e_layers=(1,))
    assert held(store, old) == [True, True]
    blocks = [store.get(*_key(entry)) for entry in (*old, *young)]
    assert [sorted(block.e_slots) for block in blocks if block] == [[1], [], [1]], (
        "the deepest of the oldest goes first"
    )
    changed = {change.key: change for change in store.take_changes()}
    assert changed[_key(old[1])].e_layers == ()
    assert changed[_key(old[1])].kv_layers == NUM_LAYERS


def test_e_in_use_is_never_taken() -> None:
    store = BlockStore(6, 1, NUM_LAYERS)
    (block,) = store.reserve(chain([1]), (1,), 1.0)
    assert list(block.e_slots) == [1]
    (other,) = store.reserve(chain([2]), (1,), 2.0)
    assert not other.e_slots, "left out, because the budget is in use"
    with pytest.raises(CapacityError, match="1 E slots are needed"):
        store.take_scratch(0, 1)


def test_half_a_block_goes_with_its_last_user() -> None:
    store = BlockStore(2, 0, NUM_LAYERS)
    (block,) = store.reserve(chain([1]), (), 1.0)
    (same,) = store.reserve(chain([1]), (), 1.0)
    assert same is block
    store.advance(block, 1)
    store.publish(block)
    store.release(block, 2.0)
    assert len(store) == 1
    store.release(block, 2.0)
    assert len(store) == 0
    assert [(change.kv_layers, change.e_layers) for change in store.take_changes()] == [(0, ())]


def test_generations_tell_a_slots_owners_apart() -> None:
    store = BlockStore(1, 0, NUM_LAYERS)
    (first,) = fill(store, chain([1]), now=1.0)
    generation = first.generation
    (second,) = fill(store, chain([2]), now=2.0)
    assert second.slot == first.slot
    assert second.generation != generation
    assert first.generation == -1


def test_a_late_publication_of_a_removed_block_is_ignored() -> None:
    store = BlockStore(1, 0, NUM_LAYERS)
    (block,) = store.reserve(chain([1]), (), 1.0)
    store.forget(block)
    store.publish(block)
    assert store.take_changes() == []


def test_releasing_once_too_often_is_our_bug() -> None:
    store = BlockStore(1, 0, NUM_LAYERS)
    (block,) = fill(store, chain([1]), now=1.0)
    with pytest.raises(AssertionError, match="once too often"):
        store.release(block, 2.0)


def test_slots_are_taken_in_runs() -> None:
    """One descriptor a run: the first run that is long enough, the lowest slots if none is."""
    pool = SlotPool(8)
    assert pool.take(3) == [0, 1, 2]
    assert pool.take(2) == [3, 4]
    pool.give([1])
    assert pool.take(2) == [5, 6]
    assert pool.take(2) == [1, 7]
    assert pool.take(0) == []
    assert (pool.free, pool.used) == (0, 8)
    pool.give([7, 0, 3])
    assert pool.take(1) == [0]


def _key(entry: Entry) -> tuple[bytes, bytes]:
    return entry[0], entry[2].key
