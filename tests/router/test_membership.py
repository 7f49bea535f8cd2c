"""Membership: who is in, who is out, and holdings that end up right whatever the wire does to them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mock_node import LAYOUT, NUM_LAYERS, TOKENIZER_DIGEST, lineage, make_settings, registration

from kvkin.kv.provenance import exact_provenance
from kvkin.router.holdings_order import MAX_BUFFERED_DELTAS, HoldingsOrder
from kvkin.router.membership import (
    HoldingsInOrder,
    Membership,
    NodeJoined,
    NodeLost,
    Tell,
)
from kvkin.router.settings import NodeSettings, RouterSettings
from kvkin.transport.messages import NodeLoad
from kvkin.transport.node_messages import (
    Heartbeat,
    Holding,
    Holdings,
    Leave,
    Refused,
    Register,
    Registered,
    ServedModel,
    SnapshotWanted,
)

PEER = b"peer"
PROVENANCE = exact_provenance(lineage("base").id)


@pytest.fixture(scope="module")
def router_settings(tmp_path_factory: pytest.TempPathFactory) -> RouterSettings:
    return make_settings(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def members(router_settings: RouterSettings) -> Membership:
    return Membership(router_settings, "router-inc")


def no_blocks(node: str) -> int:
    return 0


def join(members: Membership, now: float = 0.0, peer: bytes = PEER, node: str = "d0", incarnation: str = "one") -> None:
    facts = members.register(peer, registration(node, incarnation=incarnation), now)
    assert [type(fact) for fact in facts][-1] is NodeJoined


def holding(block: int, provenance: int = 0) -> Holding:
    return Holding(bytes([block]) * 16, b"parent", provenance, 0, NUM_LAYERS)


def delta(sequence: int, added: tuple[int, ...] = (), removed: tuple[int, ...] = (), epoch: int = 1) -> Holdings:
    gone = tuple((bytes([block]) * 16, 0) for block in removed)
    return Holdings("one", sequence, (PROVENANCE,), tuple(map(holding, added)), gone, epoch=epoch)


# --- registration -------------------------------------------------------------------------------------------------------


def test_a_node_that_fits_is_registered(members: Membership) -> None:
    facts = members.register(PEER, registration("d0"), 0.0)
    assert facts == [Tell(PEER, Registered("router-0", "router-inc", 1.0)), NodeJoined("d0")]
    assert members.serving("base") == ("d0",)
    assert members.serving("tuned") == ()


def served(name: str = "base", **changes: object) -> tuple[ServedModel, ...]:
    return (msgspec.structs.replace(ServedModel(name, "tiny", lineage(name), TOKENIZER_DIGEST), **changes),)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"version": 2}, "version"),
        ({"version": 2, "role": "nonsense", "models": ()}, "version"),  # nothing else is looked at before
        ({"role": "router"}, "role"),
        ({"models": ()}, "unknown_model"),
        ({"models": served(name="nobody")}, "unknown_model"),
        ({"models": served(family="other")}, "unknown_model"),
        ({"models": served(lineage=lineage("tuned"))}, "lineage"),
        ({"models": served() + served("tuned", lineage=lineage("base"))}, "lineage"),
        ({"models": served(tokenizer_digest=b"other")}, "tokenizer"),
        ({"layout": msgspec.structs.replace(LAYOUT, block_size=8)}, "layout"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_and_told_why(
    members: Membership, changes: dict[str, object], code: str
) -> None:
    (fact,) = members.register(PEER, registration("d0", **changes), 0.0)
    assert isinstance(fact, Tell)
    assert isinstance(fact.message, Refused)
    assert fact.message.code == code
    assert fact.message.message
    assert members.status(0.0, no_blocks) == ()


def test_only_configured_nodes_may_register(router_settings: RouterSettings) -> None:
    configured = msgspec.structs.replace(router_settings, nodes={"d0": NodeSettings("d0", "decode", ("base",))})
    members = Membership(configured, "router-inc")
    for wrong in (registration("d1"), registration("d0", role="prefill")):
        (fact,) = members.register(PEER, wrong, 0.0)
        assert isinstance(fact, Tell)
        assert isinstance(fact.message, Refused)
        assert fact.message.code == "unknown_node"
    assert len(members.register(PEER, registration("d0"), 0.0)) == 2


def test_a_repeated_registration_is_answered_once(members: Membership) -> None:
    join(members)
    assert members.register(PEER, registration("d0"), 0.1) == []
    # after its snapshot the same words mean that the node begins anew
    members.holdings(PEER, delta(0), 0.2)
    kinds = [type(fact) for fact in members.register(PEER, registration("d0"), 0.3)]
    assert kinds == [Tell, NodeLost, NodeJoined]


def test_a_restart_replaces_the_predecessor_and_its_words_count_no_more(members: Membership) -> None:
    join(members)
    facts = members.register(b"new", registration("d0", incarnation="two"), 1.0)
    assert NodeLost("d0", "one", "replaced") in facts
    assert members.member_of(PEER) is None
    for late in (members.heartbeat(PEER, Heartbeat("one", NodeLoad()), 1.1), members.holdings(PEER, delta(0), 1.1)):
        (fact,) = late
        assert isinstance(fact, Tell)
        assert isinstance(fact.message, Refused)
        assert fact.message.code == "superseded"
    # two processes under one name do not take turns: the older one stays out
    (fact,) = members.register(PEER, registration("d0"), 1.2)
    assert isinstance(fact, Tell)
    assert isinstance(fact.message, Refused)
    assert members.leave(PEER, Leave("one")) == []
    assert members.serving("base") == ("d0",)


def test_a_stranger_is_asked_to_register_but_not_at_every_word(members: Membership) -> None:
    wanted = [Tell(PEER, SnapshotWanted(register=True))]
    assert members.heartbeat(PEER, Heartbeat("one", NodeLoad()), 0.0) == wanted
    assert members.holdings(PEER, delta(4), 0.1) == []
    assert members.stranger(PEER, None, 0.2) == []
    assert members.heartbeat(PEER, Heartbeat("one", NodeLoad()), 1.5) == wanted


# --- life and load ------------------------------------------------------------------------------------------------------


def test_silence_and_goodbyes_end_a_node_once(members: Membership) -> None:
    join(members)
    join(members, peer=b"other", node="d1")
    members.heartbeat(PEER, Heartbeat("one", NodeLoad()), 4.0)
    lost = [fact for fact in members.tick(6.0) if isinstance(fact, NodeLost)]
    assert [(fact.node, fact.reason) for fact in lost] == [("d1", "silent for 6.0 s")]
    assert members.leave(PEER, Leave("one")) == [NodeLost("d0", "one", "left")]
    assert members.leave(PEER, Leave("one")) == []
    assert members.peer_lost(PEER) == []
    assert members.tick(100.0) == []
    assert {node.state for node in members.status(100.0, no_blocks)} == {"dead"}


def test_any_work_message_is_a_sign_of_life(members: Membership) -> None:
    join(members)
    assert members.alive(PEER, 4.0)
    assert members.tick(6.0) == []
    assert not members.alive(b"stranger", 4.0)


def test_draining_comes_and_goes_with_the_heartbeats(members: Membership) -> None:
    join(members)
    members.heartbeat(PEER, Heartbeat("one", NodeLoad(), draining=True), 0.5)
    assert not members.views(0.5)["d0"].usable
    assert members.views(0.5)["d0"].alive
    members.heartbeat(PEER, Heartbeat("one", NodeLoad()), 0.6)
    assert members.views(0.6)["d0"].usable


def test_excluded_incarnations_are_as_good_as_dead(members: Membership) -> None:
    join(members)
    assert not members.views(0.0, {("d0", "one")})["d0"].usable
    assert members.views(0.0, {("d0", "two"), ("d1", "one")})["d0"].usable


def test_a_node_that_was_never_measured_is_as_fast_as_its_family(members: Membership) -> None:
    join(members)
    join(members, peer=b"other", node="d1")
    assert [view.rates.prefill_layer_tokens_per_s for view in members.views(0.0).values()] == [0.0, 0.0]
    members.heartbeat(b"other", Heartbeat("one", NodeLoad(prefill_layer_tokens_per_s=5e4)), 1.0)
    assert [view.rates.prefill_layer_tokens_per_s for view in members.views(1.0).values()] == [5e4, 5e4]
    members.heartbeat(PEER, Heartbeat("one", NodeLoad(prefill_layer_tokens_per_s=100.0)), 1.0)
    assert [view.rates.prefill_layer_tokens_per_s for view in members.views(1.0).values()] == [100.0, 5e4]
    # a dead one says nothing about the living
    assert members.views(1.0, {("d1", "one")})["d0"].rates.prefill_layer_tokens_per_s == 100.0
    members.heartbeat(PEER, Heartbeat("one", NodeLoad()), 1.0)
    assert members.views(1.0, {("d1", "one")})["d0"].rates.prefill_layer_tokens_per_s == 0.0


def test_load_decays_and_counts_what_was_just_sent(members: Membership) -> None:
    join(members)
    load = NodeLoad(queued_tokens=1000, leases=4, prefill_layer_tokens_per_s=7.0, pull_bytes_per_s=9.0)
    members.heartbeat(PEER, Heartbeat("one", load), 10.0)
    member = members.member("d0")
    assert member is not None
    assert members.views(10.0)["d0"].rates.queued_tokens == pytest.approx(1000)
    rates = members.views(15.0)["d0"].rates  # one half-life later
    assert (rates.queued_tokens, rates.leases) == (pytest.approx(500), pytest.approx(2))
    assert (rates.prefill_layer_tokens_per_s, rates.pull_bytes_per_s) == (7.0, 9.0)
    member.dispatched(300, 15.0)
    assert members.views(15.0)["d0"].rates.queued_tokens == pytest.approx(800)
    # the next heartbeat's figures hold what was sent a while before it, not what was sent a moment before
    member.dispatched(40, 15.9)
    members.heartbeat(PEER, Heartbeat("one", NodeLoad(queued_tokens=900)), 16.0)
    assert members.views(16.0)["d0"].rates.queued_tokens == pytest.approx(940, abs=1)


# --- holdings -----------------------------------------------------------------------------------------------------------


def in_order(facts: list[object]) -> list[tuple[bool, int]]:
    return [(fact.snapshot, fact.holdings.sequence) for fact in facts if isinstance(fact, HoldingsInOrder)]


def test_deltas_before_the_end_of_the_snapshot_wait_and_count_in_order(members: Membership) -> None:
    join(members)
    parts = [Holdings("one", 0, epoch=1, part=part, last=part == 2) for part in range(3)]
    assert in_order(members.holdings(PEER, parts[0], 0.0)) == []
    assert members.holdings(PEER, delta(1), 0.0) == []
    assert members.holdings(PEER, parts[1], 0.0) == []
    assert members.holdings(PEER, delta(2), 0.0) == []
    facts = members.holdings(PEER, parts[2], 0.0)
    assert in_order(facts) == [(True, 0), (False, 0), (False, 0), (False, 1), (False, 2)]


def test_a_gap_asks_once_and_the_new_snapshot_mends_it(members: Membership) -> None:
    join(members)
    members.holdings(PEER, delta(0), 0.0)
    assert in_order(members.holdings(PEER, delta(1), 0.0)) == [(False, 1)]
    assert members.holdings(PEER, delta(3), 0.0) == [Tell(PEER, SnapshotWanted())]
    assert members.holdings(PEER, delta(4), 0.0) == []
    facts = members.holdings(PEER, delta(0, epoch=2), 0.1)
    assert in_order(facts) == [(True, 0)]
    # what was on its way under the old numbers is over
    assert members.holdings(PEER, delta(5), 0.1) == []
    assert in_order(members.holdings(PEER, delta(1, epoch=2), 0.1)) == [(False, 1)]


def test_a_lost_part_of_a_snapshot_asks_for_another(members: Membership) -> None:
    join(members)
    members.holdings(PEER, Holdings("one", 0, epoch=1, part=0, last=False), 0.0)
    facts = members.holdings(PEER, Holdings("one", 0, epoch=1, part=2, last=True), 11.0)
    assert facts == [Tell(PEER, SnapshotWanted())]


def test_a_snapshot_that_never_comes_is_asked_for_again(members: Membership) -> None:
    join(members)
    for second in range(1, 10):
        members.heartbeat(PEER, Heartbeat("one", NodeLoad()), float(second))
        assert members.tick(float(second)) == []
    members.heartbeat(PEER, Heartbeat("one", NodeLoad()), 10.5)
    assert members.tick(10.5) == [Tell(PEER, SnapshotWanted())]
    assert members.tick(10.6) == []


@pytest.mark.parametrize(
    "message",
    [
        Holdings("one", 1, (), (holding(1),), epoch=1),
        Holdings("one", 1, (PROVENANCE,), (holding(1, 1),), epoch=1),
        Holdings("one", 1, (PROVENANCE,), (holding(1, -1),), epoch=1),
        Holdings("one", 1, (PROVENANCE,), (), ((b"x", 3),), epoch=1),
        Holdings("one", -1, epoch=1),
        Holdings("one", 0, epoch=2, part=-1),
    ],
)
def test_holdings_that_contradict_themselves_are_not_used(members: Membership, message: Holdings) -> None:
    join(members)
    members.holdings(PEER, delta(0), 0.0)
    assert members.holdings(PEER, message, 0.0) == [Tell(PEER, SnapshotWanted())]


def test_the_buffer_is_bounded() -> None:
    order = HoldingsOrder(0.0)
    for sequence in range(1, MAX_BUFFERED_DELTAS + 2):
        ready, missing = order.accept(Holdings("one", sequence, epoch=1))
        assert ready == []
        assert missing == (sequence > MAX_BUFFERED_DELTAS)


class Wire:
    """A node's true store, every message it sent, and what a router makes of the ones that arrive."""

    def __init__(self) -> None:
        self.truth: set[int] = set()
        self.sent: list[Holdings] = []
        self.epoch = self.sequence = 0
        self.order = HoldingsOrder(0.0)
        self.known: set[int] = set()
        self.log: list[set[int]] = [set()]

    def snapshot(self, num_parts: int) -> None:
        self.epoch, self.sequence = self.epoch + 1, 0
        blocks = sorted(self.truth)
        for part in range(num_parts):
            added = tuple(map(holding, blocks[part::num_parts]))
            last = part == num_parts - 1
            self.sent.append(Holdings("one", 0, (PROVENANCE,), added, epoch=self.epoch, part=part, last=last))

    def change(self, added: set[int], removed: set[int]) -> None:
        self.sequence += 1
        self.truth = (self.truth - removed) | added
        self.sent.append(delta(self.sequence, tuple(added), tuple(removed - added), epoch=self.epoch))

    def arrive(self, message: Holdings) -> bool:
        ready, missing = self.order.accept(message)
        for snapshot, holdings in ready:
            if snapshot:
                self.known = set()
            self.known -= {block[0] for block, _ in holdings.removed}
            self.known |= {one.block[0] for one in holdings.added}
        return missing


blocks = st.sets(st.integers(0, 30), max_size=5)
steps = st.lists(
    st.tuples(st.just("change"), blocks, blocks) | st.tuples(st.just("snapshot"), st.integers(1, 3)), max_size=12
)


@settings(deadline=None, max_examples=100)
@given(steps, st.randoms(use_true_random=False), st.data())
def test_reordered_dropped_and_repeated_messages_end_in_the_truth(
    steps: list[tuple[object, ...]], rng: object, data: st.DataObject
) -> None:
    wire = Wire()
    wire.snapshot(1)
    for step in steps:
        if step[0] == "change":
            wire.change(step[1], step[2])  # type: ignore[arg-type]
        else:
            wire.snapshot(step[1])  # type: ignore[arg-type]
    # anything may happen to what was sent so far ...
    mangled = data.draw(st.permutations(wire.sent + data.draw(st.lists(st.sampled_from(wire.sent), max_size=5))))
    for message in mangled[: data.draw(st.integers(0, len(mangled)))]:
        wire.arrive(message)
    # ... and once a snapshot and what follows it come through, in any order, twice or not, all is well
    wire.snapshot(data.draw(st.integers(1, 3)))
    start = next(number for number, one in enumerate(wire.sent) if one.epoch == wire.epoch)
    for added, removed in data.draw(st.lists(st.tuples(blocks, blocks), max_size=5)):
        wire.change(added, removed)
    final = wire.sent[start:]
    for message in data.draw(st.permutations(final + data.draw(st.lists(st.sampled_from(wire.sent), max_size=5)))):
        wire.arrive(message)
    assert wire.known == wire.truth
    assert wire.order.whole


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(blocks, blocks), min_size=1, max_size=8), st.data())
def test_whatever_arrives_the_known_state_is_one_that_was_true(
    changes: list[tuple[set[int], set[int]]], data: st.DataObject
) -> None:
    """A block that was evicted never comes back by a late message: the states are those of the node's own history."""
    wire = Wire()
    wire.snapshot(1)
    history = [frozenset(wire.truth)]
    for added, removed in changes:
        wire.change(added, removed)
        history.append(frozenset(wire.truth))
    repeated = data.draw(st.lists(st.sampled_from(wire.sent), max_size=5))
    seen = [0]
    for message in data.draw(st.permutations(wire.sent + repeated)):
        wire.arrive(message)
        matching = [number for number, state in enumerate(history) if state == wire.known and number >= seen[-1]]
        assert matching, "went back in time, or to a state that never was"
        seen.append(matching[0])


@settings(deadline=None)
@given(st.integers(1, 12), st.data())
def test_on_an_ordered_wire_every_loss_is_noticed(count: int, data: st.DataObject) -> None:
    wire = Wire()
    wire.snapshot(2)
    for number in range(count):
        wire.change({number}, set())
    lost = data.draw(st.integers(0, len(wire.sent) - 2))  # the last one's loss shows with the next
    missing = [wire.arrive(message) for number, message in enumerate(wire.sent) if number != lost]
    if lost == 0:  # the first part: noticed by the second
        assert missing[0]
    elif lost == 1:  # the last part: the deltas wait, and the timeout of `tick` asks
        assert not wire.order.complete
    else:
        assert any(missing)


def test_registration_is_never_confused_by_a_second_router(router_settings: RouterSettings) -> None:
    """Two routers have their own numbers for the same node: nothing is shared between memberships."""
    one, two = Membership(router_settings, "a"), Membership(router_settings, "b")
    message: Register = registration("d0")
    one.register(PEER, message, 0.0)
    two.register(PEER, message, 0.0)
    one.holdings(PEER, delta(0), 0.0)
    one.holdings(PEER, delta(1), 0.0)
    two.holdings(PEER, delta(0, epoch=7), 0.0)
    assert in_order(two.holdings(PEER, delta(1, epoch=7), 0.0)) == [(False, 1)]
