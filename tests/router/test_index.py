"""The prefix index against a model that is too simple to be wrong, and what the model does not cover."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvkin.kv.errors import ProtocolError
from kvkin.kv.hashing import block_hashes, root_hash
from kvkin.kv.provenance import Provenance, approximate, computed_after, exact_provenance
from kvkin.router.block_tree import BlockTree
from kvkin.router.chains import Chain
from kvkin.router.index import Match, PrefixIndex, Run
from kvkin.transport.node_messages import Holding, Holdings

BLOCK = 2
ROOTS = [root_hash(b"tokenizer", BLOCK, scope) for scope in ("one", "two")]
NODES = ("n0", "n1", "n2")
A, B = exact_provenance(b"lineage-a"), exact_provenance(b"lineage-b")
TAINTED = [approximate(A, depth * BLOCK, b"shape", A.lineage_id, 0.1) for depth in range(3)]
COMPUTED = [computed_after(TAINTED[depth], (depth + 1) * BLOCK, A.lineage_id) for depth in range(2)]
# begins at token 0, but after tainted blocks: nothing can come before the first token, so it never matches there
IMPOSSIBLE = Provenance(b"impossible", A.lineage_id, 0.1, TAINTED[0].key, 0)
PROVENANCES = (A, B, *TAINTED, *COMPUTED, IMPOSSIBLE)
# every prompt of up to four blocks in which a block is one of two
PROMPTS = [
    [token for block in blocks for token in (block, block)]
    for length in range(1, 5)
    for blocks in itertools.product((0, 1), repeat=length)
]

Facts = dict[tuple[str, bytes, bytes], tuple[Provenance, int, tuple[int, ...]]]


def chain_of(root: bytes, prompt: Sequence[int]) -> list[bytes]:
    return block_hashes(prompt, root, BLOCK)


def holding(root: bytes, prompt: Sequence[int], number: int, kv_layers: int, e_layers: tuple[int, ...]) -> Holding:
    """The last block of ``prompt``."""
    hashes = [root, *chain_of(root, prompt)]
    return Holding(hashes[-1], hashes[-2], number, len(prompt) - BLOCK, kv_layers, e_layers)


def whole_chain(
    hashes: Sequence[bytes], root: bytes, provenance: Provenance = A, kv_layers: int = 4, e_layers: tuple[int, ...] = ()
) -> Holdings:
    added = tuple(
        Holding(block, parent, 0, index * BLOCK, kv_layers, e_layers)
        for index, (parent, block) in enumerate(itertools.pairwise([root, *hashes]))
    )
    return Holdings("i", 1, (provenance,), added)


def brute_force(facts: Facts, hashes: Sequence[bytes]) -> set[Match]:
    """Every chain of holdings of every node, block by block; then those that no longer chain makes superfluous."""
    chains: list[Match] = []

    def extend(node: str, runs: tuple[Run, ...], before: Provenance | None, depth: int) -> None:
        if runs:
            chains.append(Match(node, runs))
        if depth == len(hashes):
            return
        for (holder, block, _), (provenance, kv_layers, e_layers) in facts.items():
            if holder != node or block != hashes[depth]:
                continue
            previous = before or exact_provenance(provenance.lineage_id)
            if not provenance.follows(previous, depth * BLOCK):
                continue
            if runs and runs[-1].provenance == provenance:
                last = runs[-1]
                common = tuple(layer for layer in last.e_layers if layer in e_layers)
                longer = Run(provenance, last.start_block, depth + 1, min(last.kv_layers, kv_layers), common)
                extend(node, (*runs[:-1], longer), provenance, depth + 1)
            else:
                run = Run(provenance, depth, depth + 1, kv_layers, e_layers)
                extend(node, (*runs, run), provenance, depth + 1)

    for node in NODES:
        extend(node, (), None, 0)

    def covers(longer: Match, shorter: Match) -> bool:
        if longer.node != shorter.node or longer.num_blocks <= shorter.num_blocks:
            return False
        last = len(shorter.runs) - 1
        if len(longer.runs) <= last or longer.runs[:last] != shorter.runs[:last]:
            return False
        ours, theirs = shorter.runs[last], longer.runs[last]
        return (
            theirs.stop_block >= ours.stop_block
            and (theirs.provenance, theirs.start_block) == (ours.provenance, ours.start_block)
            and (theirs.kv_layers, theirs.e_layers) == (ours.kv_layers, ours.e_layers)
        )

    def outlived(chain: Match) -> bool:
        """What one of its runs branched from goes on at least as far, with the same layers."""
        return any(
            other.node == chain.node
            and other.num_blocks >= chain.num_blocks
            and len(other.runs) == index
            and other.runs[:-1] == chain.runs[: index - 1]
            and layers_of(other.runs[-1]) == layers_of(chain.runs[index - 1])
            for index in range(1, len(chain.runs))
            for other in chains
        )

    return {chain for chain in chains if not outlived(chain) and not any(covers(other, chain) for other in chains)}


def layers_of(run: Run) -> tuple[Provenance, int, int, tuple[int, ...]]:
    return run.provenance, run.start_block, run.kv_layers, run.e_layers


def held_by(tree: BlockTree, block: bytes) -> Iterable[Chain]:
    return tree.entries[block].held.layers


NODE = st.sampled_from(NODES)
BLOCKS = st.tuples(
    st.sampled_from(ROOTS),
    st.sampled_from(PROMPTS),
    st.sampled_from(range(len(PROVENANCES))),
    st.sampled_from([2, 4, 4]),
    st.sampled_from([(), (1,), (1, 2)]),
)


class IndexMachine(RuleBasedStateMachine):
    """Random snapshots, deltas and drops; after each step every prompt must match as the model says."""

    MAX_BLOCKS = 1000

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(self.MAX_BLOCKS)
        self.facts: Facts = {}

    def _learn(self, node: str, added: Iterable[Holding]) -> None:
        for one in added:
            provenance = PROVENANCES[one.provenance]
            self.facts[node, one.block, provenance.key] = (provenance, one.kv_layers, one.e_layers)

    def _forget_evicted(self) -> None:
        self.facts = {key: fact for key, fact in self.facts.items() if key[1] in self.index}

    @initialize(node=NODE, root=st.sampled_from(ROOTS), prompt=st.sampled_from(PROMPTS))
    def whole_prompt(self, node: str, root: bytes, prompt: list[int]) -> None:
        self.chain(node, root, prompt, 0, (1,))

    @rule(
        node=NODE,
        root=st.sampled_from(ROOTS),
        prompt=st.sampled_from(PROMPTS),
        taint=st.integers(-1, 2),
        e_layers=st.sampled_from([(), (1,), (1, 2)]),
    )
    def chain(self, node: str, root: bytes, prompt: list[int], taint: int, e_layers: tuple[int, ...]) -> None:
        """A context as a node really publishes it: exact blocks, then tainted ones, then computed ones."""
        added = []
        for stop in range(BLOCK, len(prompt) + 1, BLOCK):
            depth = stop // BLOCK - 1
            number = 0
            if 0 <= taint <= depth:
                number = 2 + taint if depth == taint or taint == 2 else 5 + taint
            added.append(holding(root, prompt[:stop], number, 4, e_layers))
        self._delta(node, added, [])

    @rule(node=NODE, added=st.lists(BLOCKS, max_size=4), removed=st.lists(BLOCKS, max_size=4), twice=st.booleans())
    def blocks(self, node: str, added: list[tuple], removed: list[tuple], twice: bool) -> None:  # type: ignore[type-arg]
        gone = [holding(*one) for one in removed]
        for _ in range(1 + twice):
            self._delta(node, [holding(*one) for one in added], gone)

    @rule(node=NODE, data=st.data())
    def remove_held(self, node: str, data: st.DataObject) -> None:
        held = sorted((block, key) for holder, block, key in self.facts if holder == node)
        if held:
            self.forget(node, *data.draw(st.sampled_from(held)))

    def forget(self, node: str, block: bytes, key: bytes) -> None:
        number = next(index for index, one in enumerate(PROVENANCES) if one.key == key)
        self.index.apply_delta(node, Holdings("i", 1, PROVENANCES, removed=((block, number),)))
        del self.facts[node, block, key]
        self._forget_evicted()

    def _delta(self, node: str, added: list[Holding], removed: list[Holding]) -> None:
        pairs = tuple((one.block, one.provenance) for one in removed)
        self.index.apply_delta(node, Holdings("i", 1, PROVENANCES, tuple(added), pairs))
        for block, number in pairs:
            self.facts.pop((node, block, PROVENANCES[number].key), None)
        self._learn(node, added)
        self._forget_evicted()

    @rule(node=NODE, added=st.lists(BLOCKS, max_size=6))
    def snapshot(self, node: str, added: list[tuple]) -> None:  # type: ignore[type-arg]
        holdings = [holding(*one) for one in added]
        self.index.apply_snapshot(node, Holdings("i", 0, PROVENANCES, tuple(holdings)))
        self.facts = {key: fact for key, fact in self.facts.items() if key[0] != node}
        self._learn(node, holdings)
        self._forget_evicted()

    @rule(node=NODE)
    def drop(self, node: str) -> None:
        self.index.drop_node(node)
        self.facts = {key: fact for key, fact in self.facts.items() if key[0] != node}

    @invariant()
    def matches_are_those_of_the_model(self) -> None:
        assert len(self.index) <= self.MAX_BLOCKS
        for root in ROOTS:
            for prompt in PROMPTS[-16:]:
                hashes = chain_of(root, prompt)
                found = self.index.match(hashes, root)
                assert len(found) == len(set(found))
                assert set(found) == brute_force(self.facts, hashes)

    @invariant()
    def nothing_useless_is_kept(self) -> None:
        tree = self.index._tree
        held = [(chain.node, block, chain.provenance.key) for block in tree.entries for chain in held_by(tree, block)]
        assert sorted(held) == sorted(self.facts)
        for entry in tree.entries.values():
            assert entry.held.layers or entry.first_child is not None
        chains = {(node, key) for node, _, key in self.facts}
        assert {(node, key) for node, keys in tree.table._chains.items() for key in keys} == chains

    def teardown(self) -> None:
        for node in NODES:
            self.index.drop_node(node)
        assert len(self.index) == 0
        assert self.index.contradictions == 0


class SmallIndexMachine(IndexMachine):
    """The same with eviction under way all the time."""

    MAX_BLOCKS = 7


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestSmallIndex = SmallIndexMachine.TestCase
TestSmallIndex.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("seed", range(36))
def test_long_histories(seed: int) -> None:
    """What the machines above seldom reach: many chains of one prompt tree, with gaps and evictions."""
    choice = random.Random(seed)
    machine = (IndexMachine, SmallIndexMachine)[seed % 2]()
    layers = ((), (1,), (1, 2))

    def block() -> tuple[bytes, list[int], int, int, tuple[int, ...]]:
        number = choice.randrange(len(PROVENANCES))
        return ROOTS[0], choice.choice(PROMPTS), number, choice.choice([2, 4]), choice.choice(layers)

    for _ in range(25):
        node, kind = choice.choice(NODES), choice.random()
        if kind < 0.5:
            machine.chain(node, ROOTS[0], choice.choice(PROMPTS), choice.randrange(-1, 3), choice.choice(layers))
        elif kind < 0.75:
            added = [block() for _ in range(choice.randrange(5))]
            machine.blocks(node, added, [block() for _ in range(choice.randrange(3))], False)
        elif kind < 0.95 and machine.facts:
            machine.forget(*choice.choice(sorted(machine.facts)))
        else:
            machine.drop(node)
        machine.matches_are_those_of_the_model()
        machine.nothing_useless_is_kept()
    machine.teardown()


def prompt_of(*blocks: int) -> list[int]:
    return [token for block in blocks for token in (block, block)]


def test_another_tenant_never_matches() -> None:
    index = PrefixIndex()
    prompt = prompt_of(1, 2, 3)
    index.apply_snapshot("n0", whole_chain(chain_of(ROOTS[0], prompt), ROOTS[0]))
    assert index.match(chain_of(ROOTS[0], prompt), ROOTS[0])
    assert index.match(chain_of(ROOTS[1], prompt), ROOTS[1]) == []
    # not even with the right hashes under the wrong root
    assert index.match(chain_of(ROOTS[0], prompt), ROOTS[1]) == []


def test_tainted_branch_and_exact_chain_are_both_offered() -> None:
    index = PrefixIndex()
    hashes = chain_of(ROOTS[0], prompt_of(1, 2, 3, 4))
    index.apply_delta("n0", whole_chain(hashes[:3], ROOTS[0], e_layers=(1,)))
    tainted = TAINTED[1]
    added = tuple(Holding(hashes[at], hashes[at - 1], 0, at * BLOCK, 4, ()) for at in (1, 2, 3))
    index.apply_delta("n0", Holdings("i", 2, (tainted,), added))
    assert index.match(hashes, ROOTS[0]) == [
        Match("n0", (Run(A, 0, 1, 4, (1,)), Run(tainted, 1, 4, 4, ()))),
        Match("n0", (Run(A, 0, 3, 4, (1,)),)),
    ]


def test_a_shorter_run_with_more_e_is_a_match_of_its_own() -> None:
    index = PrefixIndex()
    hashes = chain_of(ROOTS[0], prompt_of(1, 2, 3))
    index.apply_delta("n0", whole_chain(hashes, ROOTS[0], e_layers=(1, 2)))
    index.apply_delta("n0", Holdings("i", 2, (A,), (Holding(hashes[2], hashes[1], 0, 2 * BLOCK, 4, (2,)),)))
    assert index.match(hashes, ROOTS[0]) == [
        Match("n0", (Run(A, 0, 3, 4, (2,)),)),
        Match("n0", (Run(A, 0, 2, 4, (1, 2)),)),
    ]


def test_order_is_offered_live_behind_what_is_held() -> None:
    index = PrefixIndex()
    hashes = chain_of(ROOTS[0], prompt_of(1, 2, 3, 4))
    index.apply_delta("n0", whole_chain(hashes[:1], ROOTS[0]))
    index.announce("n0", "o1", hashes[:3], A, 4, (1,))
    index.announce("n1", "o2", hashes, A, 4, (1,))
    other_end = chain_of(ROOTS[0], prompt_of(1, 2, 9))
    assert index.match(hashes, ROOTS[0]) == [
        Match("n1", (Run(A, 0, 4, 4, (1,), "o2"),)),
        Match("n0", (Run(A, 0, 1, 4, ()), Run(A, 1, 3, 4, (1,), "o1"))),
        Match("n0", (Run(A, 0, 1, 4, ()),)),
    ]
    assert [match.num_blocks for match in index.match(other_end, ROOTS[0])] == [2, 2, 1]
    index.withdraw("o1")
    index.withdraw("o1")
    index.drop_node("n1")
    assert index.match(hashes, ROOTS[0]) == [Match("n0", (Run(A, 0, 1, 4, ()),))]


def test_order_is_not_offered_where_its_blocks_are_held() -> None:
    index = PrefixIndex()
    hashes = chain_of(ROOTS[0], prompt_of(1, 2))
    index.announce("n0", "o1", hashes, A, 4, ())
    index.apply_delta("n0", whole_chain(hashes, ROOTS[0]))
    assert index.match(hashes, ROOTS[0]) == [Match("n0", (Run(A, 0, 2, 4, ()),))]


def test_order_of_tainted_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="exact"):
        PrefixIndex().announce("n0", "o", [b"x"], TAINTED[0], 4, ())


def test_eviction_takes_the_leaf_that_was_used_longest_ago() -> None:
    index = PrefixIndex(max_blocks=4)
    first, second = chain_of(ROOTS[0], prompt_of(1, 2)), chain_of(ROOTS[0], prompt_of(3, 4))
    index.apply_delta("n0", whole_chain(first, ROOTS[0]))
    index.apply_delta("n0", whole_chain(second, ROOTS[0]))
    index.match(first, ROOTS[0])
    index.apply_delta("n0", whole_chain(chain_of(ROOTS[0], prompt_of(5)), ROOTS[0]))
    assert len(index) == 4
    assert index.match(first, ROOTS[0])[0].num_blocks == 2
    assert index.match(second, ROOTS[0])[0].num_blocks == 1


def test_a_chain_longer_than_the_index_keeps_its_beginning() -> None:
    index = PrefixIndex(max_blocks=5)
    hashes = chain_of(ROOTS[0], prompt_of(*range(9)))
    index.apply_snapshot("n0", whole_chain(hashes, ROOTS[0]))
    assert index.match(hashes, ROOTS[0])[0].num_blocks == 5


def test_children_that_arrive_before_their_parents() -> None:
    index = PrefixIndex()
    hashes = chain_of(ROOTS[0], prompt_of(*range(6)))
    for one in reversed(whole_chain(hashes, ROOTS[0]).added):
        assert index.match(hashes, ROOTS[0]) == []
        index.apply_delta("n0", Holdings("i", 1, (A,), (one,)))
    assert index.match(hashes, ROOTS[0])[0].num_blocks == 6


def test_holdings_that_contradict_each_other_are_ignored() -> None:
    index = PrefixIndex()
    hashes = chain_of(ROOTS[0], prompt_of(1, 2, 3))
    index.apply_snapshot("n0", whole_chain(hashes, ROOTS[0]))
    circle = Holding(ROOTS[0], hashes[2], 0, 3 * BLOCK, 4)
    moved = Holding(hashes[1], hashes[2], 0, 3 * BLOCK, 4)
    own_parent = Holding(b"own", b"own", 0, BLOCK, 4)
    early = Holding(b"early", hashes[2], 0, BLOCK, 4)
    index.apply_delta("n1", Holdings("i", 1, (A,), (circle, moved, own_parent, early)))
    # the circle's block is nobody's parent: roots are no blocks; it is kept as what it says
    assert index.contradictions == 3
    assert index.match(hashes, ROOTS[0]) == [Match("n0", (Run(A, 0, 3, 4, ()),))]
    index.drop_node("n0")
    index.drop_node("n1")
    assert len(index) == 0


def test_circles_cannot_be_built() -> None:
    index = PrefixIndex(max_blocks=1)
    index.apply_delta("n0", Holdings("i", 1, (A,), (Holding(b"a", b"b", 0, 2, 4), Holding(b"b", b"a", 0, 4, 4))))
    assert index.contradictions == 1
    assert len(index) <= 1


def test_unknown_provenance_numbers_are_refused_whole() -> None:
    index = PrefixIndex()
    hashes = chain_of(ROOTS[0], prompt_of(1))
    good = whole_chain(hashes, ROOTS[0]).added
    with pytest.raises(ProtocolError, match="provenance 3"):
        index.apply_delta("n0", Holdings("i", 1, (A,), (*good, Holding(b"x", ROOTS[0], 3, 0, 4))))
    assert len(index) == 0


def test_memory_does_not_grow_with_what_has_come_and_gone() -> None:
    index = PrefixIndex(max_blocks=50)
    for number in range(3000):
        hashes = chain_of(ROOTS[0], prompt_of(number, number + 1))
        lineage = exact_provenance(number.to_bytes(4, "little"))
        index.apply_delta(f"n{number % 7}", whole_chain(hashes, ROOTS[0], lineage))
        if number % 3 == 0:
            index.drop_node(f"n{number % 7}")
    tree = index._tree
    assert len(index) <= 50
    assert len(tree.table) < 5000
    assert len(tree._leaves) < 2000
    assert len(tree._chain_entries) <= 50


def test_fan_out_counts_other_models_and_decays() -> None:
    index = PrefixIndex(fan_out_half_life_s=10.0)
    shared = prompt_of(*range(8))
    one = chain_of(ROOTS[0], [*shared, *prompt_of(*range(100, 108))])
    other = chain_of(ROOTS[0], [*shared, *prompt_of(*range(200, 204))])
    index.observe("f", "a", one, now=0.0)
    index.observe("f", "b", one, now=0.0)
    index.observe("f", "c", other, now=0.0)
    assert index.fan_out("f", "a", one, now=0.0) == ((4, 2.0), (8, 2.0), (12, 1.0), (16, 1.0))
    assert index.fan_out("f", "c", other, now=10.0) == ((4, 1.0), (8, 1.0))
    assert index.fan_out("g", "a", one, now=0.0) == ()
    assert index.fan_out("f", "a", one, now=1e9) == ()
    index.observe("f", "a", one, now=10.0)
    assert index.fan_out("f", "z", one, now=10.0)[0] == (4, 2.5)
