"""The router's core against a simulated clock: every way that a request can end, and that it ends exactly once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from mock_node import (
    BLOCK_SIZE,
    NUM_LAYERS,
    choose_privately,
    lineage,
    make_settings,
    registration,
    report,
)

from kvkin.kv.cost import Estimate
from kvkin.kv.errors import NodeUnavailable
from kvkin.kv.hashing import block_hashes, root_hash
from kvkin.kv.plan import Holder, LayerGroup, LayerSource, PlanKind, ReusePlan, Segment
from kvkin.kv.provenance import Quality, exact_provenance
from kvkin.router.core import RouterCore
from kvkin.router.events import (
    ClientAsked,
    ClientLost,
    ClientSentGarbage,
    Event,
    Instruction,
    NodeSaid,
    NodeSentGarbage,
    Note,
    PeerLost,
    PreparePrompt,
    PromptFailed,
    PromptReady,
    RememberAnswer,
    Reply,
    Stop,
    StopAsked,
    TellNode,
    TimePassed,
)
from kvkin.router.index import Match
from kvkin.router.planning import Choose
from kvkin.router.policy_types import ClusterView, Considered, Decision, OrderRequest, PolicyRequest, PolicySettings
from kvkin.router.prompts import Prompt, Tail
from kvkin.router.settings import Limits, RouterSettings, Timeouts
from kvkin.transport.messages import (
    Accepted,
    Alternative,
    AskStatus,
    Cancel,
    DecisionInputs,
    Error,
    Finished,
    Generate,
    ListModels,
    Models,
    NodeLoad,
    Ping,
    Pong,
    Reuse,
    Sampling,
    StatusReply,
    Timings,
    Tokens,
)
from kvkin.transport.node_messages import (
    Abort,
    Done,
    Execute,
    Failed,
    Generated,
    Heartbeat,
    Holding,
    Holdings,
    Leave,
    OrderDone,
    PrefillOrder,
    Refused,
    Registered,
    SnapshotWanted,
)

CLIENT = b"client-1"
ROOT = root_hash(b"tiny", BLOCK_SIZE, "default")
T = TypeVar("T")


def prompt(num_tokens: int = 10, tail: Tail | None = None) -> Prompt:
    ids = tuple(range(num_tokens))
    return Prompt(ids, ROOT, tuple(block_hashes(ids, ROOT, BLOCK_SIZE)), hash_ms=1.5, tail=tail)


class Sim:
    """A core with a clock that tests turn, and everything it ever said."""

    def __init__(self, settings: RouterSettings, choose: Choose = choose_privately) -> None:
        ids = (f"r{number}" for number in itertools.count(1))
        self.now = 100.0
        self.core = RouterCore(
            settings, "router-inc", lambda: next(ids), started_at=self.now, choose=choose, stopwatch=lambda: self.now
        )
        self.said: list[Instruction] = []

    def feed(self, event: Event) -> list[Instruction]:
        new = self.core.handle(event, self.now)
        self.said += new
        return new

    def wait(self, seconds: float, step_s: float = 0.25, *, beating: Sequence[str] = ()) -> None:
        """Let time pass in ticks; ``beating`` nodes send heartbeats meanwhile."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step_s)
            for node in beating:
                self.feed(NodeSaid(node.encode(), Heartbeat("one", NodeLoad())))
            self.feed(TimePassed())

    def join(self, node: str, incarnation: str = "one", peer: bytes = b"", **details: object) -> bytes:
        peer = peer or node.encode()
        self.feed(NodeSaid(peer, registration(node, incarnation=incarnation, **details)))
        self.feed(NodeSaid(peer, Holdings(incarnation, 0, epoch=1)))
        return peer

    def ask(self, message: Generate | None = None, client: bytes = CLIENT) -> Generate:
        message = message or Generate("1", "base", prompt="hi")
        self.feed(ClientAsked(client, message))
        return message

    def prepared(self, given: Prompt | None = None) -> None:
        """Answer the newest PreparePrompt."""
        self.feed(PromptReady(self.all(PreparePrompt)[-1].request_id, given or prompt()))

    def run(self, message: Generate | None = None, given: Prompt | None = None) -> Execute:
        """Bring a request to its node."""
        self.ask(message)
        self.prepared(given)
        return self.told(Execute)[-1][1]

    def all(self, kind: type[T]) -> list[T]:
        return [one for one in self.said if isinstance(one, kind)]

    def replies(self, kind: type[T], client: bytes = CLIENT) -> list[T]:
        return [one.message for one in self.all(Reply) if one.client == client and isinstance(one.message, kind)]

    def told(self, kind: type[T]) -> list[tuple[bytes, T]]:
        return [(one.peer, one.message) for one in self.all(TellNode) if isinstance(one.message, kind)]

    def ends(self, request_id: str = "1", client: bytes = CLIENT) -> list[Finished | Error]:
        return [one for one in self.replies((Finished, Error), client) if one.id == request_id]  # type: ignore[arg-type]

    def nothing_left(self) -> None:
        assert self.core.num_requests == 0
        assert not (self.core.serving.by_key)
        assert not (self.core.serving.by_attempt)
        assert not (self.core.serving.by_client)


@pytest.fixture
def settings(tmp_path: Path) -> RouterSettings:
    return make_settings(tmp_path, timeouts=Timeouts(node_wait_s=2.0, sign_of_life_s=2.0))


@pytest.fixture
def sim(settings: RouterSettings) -> Sim:
    return Sim(settings)


def generated(execute: Execute, index: int, *ids: int, text: str = "x") -> Generated:
    return Generated(execute.request_id, index, ids, text)


def done(execute: Execute, *ids: int, text: str = "xx", tokens_reused: int = 0) -> Done:
    return Done(execute.request_id, text, ids, "stop", Timings(queue_ms=3.0), report(tokens_reused))


# --- the good way -------------------------------------------------------------------------------------------------------


def test_a_request_is_accepted_streamed_and_finished_with_true_counts_and_measured_times(sim: Sim) -> None:
    peer = sim.join("d0")
    execute = sim.run()
    assert (execute.model, execute.token_ids, execute.root, execute.publish) == ("base", tuple(range(10)), ROOT, True)
    assert execute.deadline_s == 600.0
    assert execute.hash_ms == 1.5
    sim.now += 0.2
    sim.feed(NodeSaid(peer, generated(execute, 0, 7)))
    sim.now += 0.3
    sim.feed(NodeSaid(peer, generated(execute, 1, 8)))
    sim.feed(NodeSaid(peer, done(execute, 7, 8, tokens_reused=6)))
    assert sim.replies(Accepted) == [Accepted("1", "r1", 10)]
    assert [(one.index, one.token_ids) for one in sim.replies(Tokens)] == [(0, (7,)), (1, (8,))]
    (end,) = sim.replies(Finished)
    assert (end.usage.prompt_tokens, end.usage.completion_tokens, end.usage.cached_tokens) == (10, 2, 6)
    assert end.timings.ttft_ms == pytest.approx(200)
    assert end.timings.total_ms == pytest.approx(500)
    assert (end.timings.hash_ms, end.timings.queue_ms, end.node) == (1.5, 3.0, "d0")
    sim.nothing_left()


def test_cached_tokens_come_from_the_node_and_never_from_the_plan(settings: RouterSettings) -> None:
    def choose(request: PolicyRequest, *rest: object) -> Decision:
        held = Holder("d0", exact_provenance(lineage("base").id))
        source = (LayerSource(LayerGroup(0, NUM_LAYERS), held),)
        plan = ReusePlan((Segment(0, 8, source, 0, kind=PlanKind.EXACT), Segment(8, request.num_tokens)))
        return Decision("d0", plan, Estimate(0, 0, 0, 0, 0, 0), Quality.EXACT, 0.0, "planned")

    sim = Sim(settings, choose)
    peer = sim.join("d0")
    execute = sim.run()
    assert execute.source_addresses == {"d0": "tcp://127.0.0.1:1/d0"}
    sim.feed(NodeSaid(peer, done(execute, 7, tokens_reused=0)))
    assert sim.replies(Finished)[0].usage.cached_tokens == 0


def test_what_the_engines_own_cache_had_was_reused_as_well(sim: Sim) -> None:
    peer = sim.join("d0")
    message = done(sim.run(), 7)
    counted = msgspec.structs.replace(message.report, tokens_cached=6, tokens_loaded=1, tokens_computed=3)
    sim.feed(NodeSaid(peer, msgspec.structs.replace(message, report=counted)))
    assert sim.replies(Finished)[0].usage.cached_tokens == 7


@pytest.mark.parametrize("reuse", list(Reuse))
def test_the_engines_own_cache_may_serve_all_but_those_who_want_no_reuse(sim: Sim, reuse: Reuse) -> None:
    sim.join("d0")
    assert sim.run(Generate("1", "base", prompt="hi", reuse=reuse)).engine_cache is (reuse is not Reuse.OFF)


def test_without_streaming_only_the_result_is_sent_and_time_to_first_token_is_still_measured(sim: Sim) -> None:
    peer = sim.join("d0")
    execute = sim.run(Generate("1", "base", prompt="hi", stream=False))
    sim.now += 0.25
    sim.feed(NodeSaid(peer, generated(execute, 0, 7)))
    sim.now += 1.0
    sim.feed(NodeSaid(peer, done(execute, 7)))
    assert sim.replies(Tokens) == []
    assert sim.replies(Finished)[0].timings.ttft_ms == pytest.approx(250)


def test_what_the_stream_did_not_bring_is_sent_before_the_end(sim: Sim) -> None:
    peer = sim.join("d0")
    execute = sim.run()
    sim.feed(NodeSaid(peer, generated(execute, 0, 7, text="ab")))
    sim.feed(NodeSaid(peer, done(execute, 7, 8, 9, text="abcd")))
    assert [(one.index, one.token_ids, one.text) for one in sim.replies(Tokens)] == [(0, (7,), "ab"), (1, (8, 9), "cd")]


def test_an_answer_is_remembered_before_the_client_can_ask_on(sim: Sim) -> None:
    peer = sim.join("d0")
    tail = Tail(b"before", "piece", prompt().token_ids)  # type: ignore[arg-type]
    execute = sim.run(given=prompt(tail=tail))
    sim.feed(NodeSaid(peer, done(execute, 7, 8, text="yes")))
    kinds = [type(one) for one in sim.said if isinstance(one, RememberAnswer | Reply)]
    assert kinds[-2:] == [RememberAnswer, Reply]
    assert sim.all(RememberAnswer) == [RememberAnswer("base", tail, "yes", (7, 8))]


def test_an_answer_that_is_not_published_is_not_remembered(sim: Sim) -> None:
    peer = sim.join("d0")
    tail = Tail(b"before", "piece", prompt().token_ids)  # type: ignore[arg-type]
    execute = sim.run(Generate("1", "base", prompt="hi", publish=False), prompt(tail=tail))
    sim.feed(NodeSaid(peer, done(execute, 7)))
    assert sim.all(RememberAnswer) == []


def test_a_request_without_messages_has_nothing_to_remember(sim: Sim) -> None:
    peer = sim.join("d0")
    sim.feed(NodeSaid(peer, done(sim.run(), 7)))
    assert sim.all(RememberAnswer) == []


# --- cancelling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["preparing", "waiting", "running", "streaming"])
def test_cancel_in_every_phase_ends_the_request_once(sim: Sim, phase: str) -> None:
    if phase != "waiting":
        sim.join("d0")
    sim.ask()
    if phase != "preparing":
        sim.prepared()
    execute = sim.told(Execute)[-1][1] if phase in ("running", "streaming") else None
    if phase == "streaming":
        assert execute is not None
        sim.feed(NodeSaid(b"d0", generated(execute, 0, 7)))
    sim.feed(ClientAsked(CLIENT, Cancel("1")))
    sim.feed(ClientAsked(CLIENT, Cancel("1")))
    assert [end.code for end in sim.ends() if isinstance(end, Error)] == ["cancelled"]
    assert len(sim.told(Abort)) == (phase in ("running", "streaming"))
    # whatever still comes of it is nobody's
    sim.feed(PromptReady("r1", prompt()))
    if execute is not None:
        sim.feed(NodeSaid(b"d0", generated(execute, 1, 8)))
        sim.feed(NodeSaid(b"d0", done(execute, 7, 8)))
        sim.feed(NodeSaid(b"d0", Failed(execute.request_id, "cancelled", "late", False)))
    assert len(sim.ends()) == 1
    sim.nothing_left()


def test_cancelling_what_never_was_is_no_error(sim: Sim) -> None:
    assert sim.feed(ClientAsked(CLIENT, Cancel("nothing"))) == []


def test_a_client_cannot_cancel_what_is_another_ones(sim: Sim) -> None:
    sim.join("d0")
    sim.run()
    sim.feed(ClientAsked(b"other", Cancel("1")))
    assert sim.core.num_requests == 1
    assert sim.told(Abort) == []


def test_a_client_that_is_gone_is_cancelled_on_its_node_and_hears_nothing(sim: Sim) -> None:
    peer = sim.join("d0")
    execute = sim.run()
    sim.feed(NodeSaid(peer, generated(execute, 0, 7)))
    sim.feed(ClientLost(CLIENT, "gone"))
    sim.feed(ClientLost(CLIENT, "gone"))
    assert sim.told(Abort) == [(peer, Abort("r1", "gone"))]
    assert sim.ends() == []
    sim.nothing_left()


def test_an_id_may_be_used_again_once_its_request_has_ended(sim: Sim) -> None:
    peer = sim.join("d0")
    sim.ask()
    sim.feed(ClientAsked(CLIENT, Cancel("1")))
    execute = sim.run()
    sim.feed(PromptReady("r1", prompt(4)))  # of the cancelled one
    sim.feed(NodeSaid(peer, done(execute, 7)))
    assert [type(end) for end in sim.ends()] == [Error, Finished]
    assert sim.replies(Finished)[0].usage.prompt_tokens == 10


def test_an_active_duplicate_is_refused_and_the_first_goes_on(sim: Sim) -> None:
    peer = sim.join("d0")
    execute = sim.run()
    sim.ask()
    assert sim.replies(Error)[0].code == "duplicate_request"
    sim.feed(NodeSaid(peer, done(execute, 7)))
    assert len(sim.replies(Finished)) == 1
    # another client may have the same id
    sim.ask(client=b"other")
    assert sim.replies(Error, b"other") == []


def test_a_deadline_ends_a_request_that_hangs(sim: Sim) -> None:
    sim.join("d0")
    sim.run(Generate("1", "base", prompt="hi", deadline_s=1.5))
    sim.wait(1.25, beating=["d0"])
    assert sim.ends() == []
    sim.wait(0.5, beating=["d0"])
    (end,) = sim.ends()
    assert isinstance(end, Error)
    assert end.code == "deadline"
    assert "deadline of 1.5 s" in end.message
    assert len(sim.told(Abort)) == 1


def test_a_prompt_that_cannot_be_prepared_is_the_clients_error_and_starts_nothing(sim: Sim) -> None:
    sim.join("d0")
    sim.ask()
    sim.feed(PromptFailed("r1", "prompt_too_long", "600 tokens"))
    assert sim.ends() == [Error("1", "prompt_too_long", "600 tokens")]
    assert sim.told(Execute) == []
    assert sim.replies(Accepted) == []
    sim.nothing_left()


# --- nodes that fail ----------------------------------------------------------------------------------------------------


def test_a_request_is_retried_on_another_node_when_its_node_dies_unseen(sim: Sim) -> None:
    first, second = sim.join("d0"), sim.join("d1")
    sim.run()
    sim.feed(PeerLost(first))
    assert [(peer, one.request_id) for peer, one in sim.told(Execute)] == [(first, "r1"), (second, "r1.2")]
    sim.feed(NodeSaid(second, Done("r1.2", "x", (7,), "stop", Timings(), report())))
    assert [type(end) for end in sim.ends()] == [Finished]
    assert sim.replies(Finished)[0].node == "d1"


def test_late_words_of_a_lost_attempt_are_nobodys(sim: Sim) -> None:
    first, second = sim.join("d0"), sim.join("d1")
    execute = sim.run()
    sim.feed(NodeSaid(first, Failed(execute.request_id, "capacity", "full", True)))
    sim.feed(NodeSaid(first, generated(execute, 0, 7)))
    sim.feed(NodeSaid(first, done(execute, 7)))
    assert sim.ends() == []
    assert sim.replies(Tokens) == []
    assert (first, Abort("r1", "unknown to the router")) in sim.told(Abort)
    sim.feed(NodeSaid(second, Done("r1.2", "x", (7,), "stop", Timings(), report())))
    assert len(sim.ends()) == 1


def test_after_the_first_token_a_lost_node_is_a_retryable_error(sim: Sim) -> None:
    first = sim.join("d0")
    sim.join("d1")
    execute = sim.run()
    sim.feed(NodeSaid(first, generated(execute, 0, 7)))
    sim.feed(NodeSaid(first, Leave("one")))
    (end,) = sim.ends()
    assert isinstance(end, Error)
    assert (end.code, end.retryable) == ("node_unavailable", True)
    assert len(sim.told(Execute)) == 1
    sim.nothing_left()


def test_without_streaming_a_request_is_retried_even_after_its_first_token(sim: Sim) -> None:
    first = sim.join("d0")
    sim.join("d1")
    execute = sim.run(Generate("1", "base", prompt="hi", stream=False))
    sim.feed(NodeSaid(first, generated(execute, 0, 7)))
    sim.feed(PeerLost(first))
    assert len(sim.told(Execute)) == 2


def test_silence_kills_a_node(sim: Sim) -> None:
    sim.join("d0")
    sim.run()
    sim.wait(5.5)
    assert sim.core.counters["nodes_lost"] == 1
    sim.wait(2.5)
    (end,) = sim.ends()
    assert isinstance(end, Error)
    assert end.code == "node_unavailable"
    # it was only frozen: it is asked to register again, and its requests are over
    sim.feed(NodeSaid(b"d0", Heartbeat("one", NodeLoad())))
    assert sim.told(SnapshotWanted)[-1] == (b"d0", SnapshotWanted(register=True))


def test_a_restarted_node_takes_over_what_its_predecessor_lost(sim: Sim) -> None:
    sim.join("d0")
    sim.run()
    sim.join("d0", incarnation="two", peer=b"d0-again")
    (before, _first), (after, second) = sim.told(Execute)
    assert (before, after, second.request_id) == (b"d0", b"d0-again", "r1.2")
    answers = [one.message for one in sim.all(TellNode) if one.peer == b"d0-again"]
    assert isinstance(answers[0], Registered), "a node hears that it is registered before it gets work"


def test_a_request_waits_for_a_node_and_gives_up_in_time(sim: Sim) -> None:
    sim.ask()
    sim.prepared()
    sim.wait(1.0)
    assert sim.ends() == []
    sim.join("d0")
    assert len(sim.told(Execute)) == 1
    sim.feed(ClientAsked(CLIENT, Generate("2", "tuned", prompt="hi")))
    sim.prepared()
    sim.wait(2.5, beating=["d0"])
    (end,) = sim.ends("2")
    assert isinstance(end, Error)
    assert (end.code, end.retryable) == ("node_unavailable", True)


def test_attempts_are_bounded_and_the_node_own_words_reach_the_client(sim: Sim) -> None:
    for name in ("d0", "d1", "d2", "d3"):
        sim.join(name)
    sim.run()
    for _ in range(3):
        peer, execute = sim.told(Execute)[-1]
        sim.feed(NodeSaid(peer, Failed(execute.request_id, "capacity", "no blocks", True)))
    assert sim.ends() == [Error("1", "capacity", "no blocks", True)]
    assert len({peer for peer, _ in sim.told(Execute)}) == 3


def test_a_live_nodes_refusal_is_final_where_there_is_no_other(sim: Sim) -> None:
    peer = sim.join("d0")
    execute = sim.run()
    sim.feed(NodeSaid(peer, Failed(execute.request_id, "capacity", "no blocks", True)))
    assert sim.ends() == [Error("1", "capacity", "no blocks", True)]


def test_an_error_that_is_not_retryable_is_not_retried(sim: Sim) -> None:
    peer = sim.join("d0")
    sim.join("d1")
    execute = sim.run()
    sim.feed(NodeSaid(peer, Failed(execute.request_id, "internal", "bug", False)))
    assert sim.ends() == [Error("1", "internal", "bug", False)]


def test_duplicate_tokens_are_dropped_and_lost_ones_are_noticed(sim: Sim) -> None:
    peer = sim.join("d0")
    execute = sim.run()
    sim.feed(NodeSaid(peer, generated(execute, 0, 7)))
    sim.feed(NodeSaid(peer, generated(execute, 0, 7)))
    assert len(sim.replies(Tokens)) == 1
    sim.feed(NodeSaid(peer, generated(execute, 3, 9)))
    (end,) = sim.ends()
    assert isinstance(end, Error)
    assert end.retryable
    assert "tokens 1 to 3 were lost" in end.message
    assert len(sim.told(Abort)) == 1


def test_only_the_node_that_runs_a_request_speaks_for_it(sim: Sim) -> None:
    first, second = sim.join("d0"), sim.join("d1")
    execute = sim.run()
    sim.feed(NodeSaid(second, done(execute, 7)))
    sim.feed(NodeSaid(second, Failed(execute.request_id, "internal", "not mine", False)))
    assert sim.ends() == []
    sim.feed(NodeSaid(first, done(execute, 7)))
    assert len(sim.replies(Finished)) == 1


def test_a_draining_node_gets_nothing_new_and_finishes_what_it_has(sim: Sim) -> None:
    peer = sim.join("d0")
    execute = sim.run()
    sim.feed(NodeSaid(peer, Heartbeat("one", NodeLoad(), draining=True)))
    sim.ask(Generate("2", "base", prompt="hi"))
    sim.prepared()
    assert len(sim.told(Execute)) == 1
    sim.feed(NodeSaid(peer, done(execute, 7)))
    assert len(sim.replies(Finished)) == 1


def test_a_fault_of_the_policy_costs_one_request(settings: RouterSettings) -> None:
    broken = [True]

    def choose(
        request: PolicyRequest, matches: Sequence[Match], view: ClusterView, weights: PolicySettings
    ) -> Decision:
        if broken:
            raise ZeroDivisionError(broken.pop())
        return choose_privately(request, matches, view, weights)

    sim = Sim(settings, choose)
    sim.join("d0")
    sim.ask()
    sim.prepared()
    assert [end.code for end in sim.ends() if isinstance(end, Error)] == ["internal"]
    assert sim.run(Generate("2", "base", prompt="hi")).model == "base"


# --- strangers and garbage ----------------------------------------------------------------------------------------------


def test_work_of_an_unknown_peer_asks_it_to_register_and_is_ignored(sim: Sim) -> None:
    stray = Generated("r77", 0, (1,), "x")
    for _ in range(3):
        sim.feed(NodeSaid(b"stray", stray))
    assert sim.told(SnapshotWanted) == [(b"stray", SnapshotWanted(register=True))]
    assert sim.all(Reply) == []


def test_a_nodes_tokens_for_an_unknown_request_are_stopped(sim: Sim) -> None:
    peer = sim.join("d0")
    sim.feed(NodeSaid(peer, Generated("of-before-the-restart", 5, (1,), "x")))
    sim.feed(NodeSaid(peer, Done("of-before-the-restart", "x", (1,), "stop", Timings(), report())))
    assert sim.told(Abort) == [(peer, Abort("of-before-the-restart", "unknown to the router"))]
    assert sim.all(Reply) == []


def test_garbage_is_answered_and_harms_nobody(sim: Sim) -> None:
    peer = sim.join("d0")
    execute = sim.run()
    sim.feed(ClientSentGarbage(b"vandal", "9", "protocol", "unreadable"))
    assert sim.replies(Error, b"vandal") == [Error("9", "protocol", "unreadable")]
    sim.feed(NodeSentGarbage(b"stray", "unreadable"))
    assert sim.told(Refused) == [(b"stray", Refused("protocol", "unreadable"))]
    sim.feed(NodeSentGarbage(peer, "unreadable"))
    assert len(sim.told(Refused)) == 1, "one bad message does not stop a node that has registered"
    sim.feed(NodeSaid(peer, done(execute, 7)))
    assert len(sim.replies(Finished)) == 1


# --- keepalive ----------------------------------------------------------------------------------------------------------


def test_a_ping_tells_of_requests_that_the_router_does_not_know(sim: Sim) -> None:
    sim.join("d0")
    sim.run()
    sim.feed(ClientAsked(CLIENT, Ping("p", ("1", "of-before-the-restart"))))
    (lost,) = sim.replies(Error)
    assert (lost.id, lost.code, lost.retryable) == ("of-before-the-restart", "node_unavailable", True)
    assert sim.replies(Pong) == [Pong("p", "router-0", "router-inc")]


def test_a_client_that_pinged_and_fell_silent_is_gone(sim: Sim) -> None:
    sim.join("d0")
    sim.run()
    sim.feed(ClientAsked(CLIENT, Ping("p", ("1",))))
    sim.wait(29.0, beating=["d0"])
    assert sim.core.num_requests == 1
    sim.wait(2.0, beating=["d0"])
    assert sim.core.num_requests == 0
    assert len(sim.told(Abort)) == 1


def test_a_router_that_stood_still_blames_nobody_for_it(sim: Sim) -> None:
    """What the others said meanwhile is still unread when its clock goes on; who stays silent is lost as ever."""
    sim.join("d0")
    sim.run()
    sim.feed(ClientAsked(CLIENT, Ping("p", ("1",))))
    sim.now += 40.0
    sim.feed(TimePassed(stood_still_s=39.9))
    assert sim.core.num_requests == 1
    sim.wait(4.5)
    assert sim.core.membership.serving("base") == ("d0",)
    sim.wait(1.0)
    assert sim.core.membership.serving("base") == ()
    sim.wait(28.0)
    assert sim.core.num_requests == 0


def test_a_client_that_never_pings_is_left_alone(sim: Sim) -> None:
    sim.join("d0")
    sim.run()
    sim.wait(60.0, 1.0, beating=["d0"])
    assert sim.core.num_requests == 1


def test_a_waiting_request_gives_signs_of_life(sim: Sim) -> None:
    sim.join("d0")
    sim.run()
    sim.wait(9.0, beating=["d0"])
    accepted = sim.replies(Accepted)
    assert len(accepted) == 5
    assert set(accepted) == {accepted[0]}


# --- what a decision went by ---------------------------------------------------------------------------------------------


def deciding(asked: list[PolicyRequest]) -> Choose:
    """A policy that keeps what it was asked, and decides privately with figures of its own."""

    def choose(
        request: PolicyRequest, matches: Sequence[Match], view: ClusterView, weights: PolicySettings
    ) -> Decision:
        asked.append(request)
        decision = choose_privately(request, matches, view, weights)
        partial = Considered(
            decision.node, PlanKind.PARTIAL, ("p0", "p0"), Quality.BOUNDED, 0.02, 1, 0.5, 0.6, False, LayerGroup(1, 2)
        )
        private = Considered(decision.node, PlanKind.PRIVATE, (), Quality.EXACT, 0.0, 0, 0.7, 0.8, True)
        unprofiled = msgspec.structs.replace(partial, loss=float("inf"), group=None)
        return msgspec.structs.replace(
            decision,
            estimate=Estimate(0.25, 0.0, 0.0, 0.0, 0.75, 0.0),
            considered=(private, partial, unprofiled),
            pull_bytes_per_s=2e6,
            layer_tokens_per_s=1e4 * len(asked),
        )

    return choose


def test_the_report_tells_what_the_decision_went_by(settings: RouterSettings) -> None:
    sim = Sim(settings, deciding([]))
    peer = sim.join("d0")
    execute = sim.run(Generate("1", "base", prompt="hi", max_loss=0.03, ttft_slo_s=2.0))
    sim.feed(NodeSaid(peer, done(execute, 7)))
    (end,) = sim.replies(Finished)
    assert end.report.inputs == DecisionInputs(
        max_loss=0.03,
        slo_s=2.0,
        ttft_s=0.75,
        queue_s=0.25,
        pull_bytes_per_s=2e6,
        prefill_layer_tokens_per_s=1e4,
        considered=(
            Alternative("d0", PlanKind.PRIVATE, None, 0.0, 0.7, (), True),
            Alternative("d0", PlanKind.PARTIAL, (1, 2), 0.02, 0.5, ("p0",)),
            Alternative("d0", PlanKind.PARTIAL, None, None, 0.5, ("p0",)),
        ),
    )
    # the rest of the report is the node's
    assert msgspec.structs.replace(end.report, inputs=None) == report(0)


def test_after_a_retry_the_report_tells_of_the_last_decision(settings: RouterSettings) -> None:
    sim = Sim(settings, deciding([]))
    sim.join("d0")
    peer = sim.join("d1")
    sim.run()
    sim.feed(PeerLost(b"d0"))
    execute = sim.told(Execute)[-1][1]
    sim.feed(NodeSaid(peer, done(execute, 7)))
    inputs = sim.replies(Finished)[0].report.inputs
    assert inputs is not None
    assert inputs.prefill_layer_tokens_per_s == 2e4


@pytest.mark.parametrize(("of_cluster", "of_client", "left"), [(None, None, None), (3.0, None, 2.5), (3.0, 1.0, 0.5)])
def test_a_target_counts_from_the_requests_arrival(
    settings: RouterSettings, of_cluster: float | None, of_client: float | None, left: float | None
) -> None:
    asked: list[PolicyRequest] = []
    weights = msgspec.structs.replace(settings.policy, ttft_slo_s=of_cluster)
    sim = Sim(msgspec.structs.replace(settings, policy=weights), deciding(asked))
    peer = sim.join("d0")
    sim.ask(Generate("1", "base", prompt="hi", ttft_slo_s=of_client))
    sim.now += 0.5  # what tokenizing takes
    sim.prepared()
    assert asked[0].slo_s == (None if left is None else pytest.approx(left))
    sim.feed(NodeSaid(peer, done(sim.told(Execute)[-1][1], 7)))
    inputs = sim.replies(Finished)[0].report.inputs
    assert inputs is not None
    assert inputs.slo_s == (of_cluster if of_client is None else of_client)


@pytest.mark.parametrize(("reuse", "seen"), [(Reuse.EXACT, True), (Reuse.OWN, False), (Reuse.OFF, False)])
def test_requests_that_share_nothing_are_no_sign_of_what_is_popular(
    settings: RouterSettings, reuse: Reuse, seen: bool
) -> None:
    asked: list[PolicyRequest] = []
    sim = Sim(settings, deciding(asked))
    sim.join("d0", models=("base", "tuned"))
    given = prompt(8 * BLOCK_SIZE)
    sim.run(Generate("1", "base", prompt="hi", reuse=reuse), given)
    sim.run(Generate("2", "tuned", prompt="hi", reuse=Reuse.EXACT), given)
    assert bool(asked[1].fan_out) is seen
    # and they are told of no others either
    sim.run(Generate("3", "base", prompt="hi", reuse=reuse), given)
    assert bool(asked[2].fan_out) is seen


# --- orders -------------------------------------------------------------------------------------------------------------


def ordering(live: bool, node: str = "p0") -> Choose:
    """A policy that orders the whole prompt from ``node`` and, if ``live``, pulls from the order."""

    def choose(
        request: PolicyRequest, matches: Sequence[Match], view: ClusterView, weights: PolicySettings
    ) -> Decision:
        private = choose_privately(request, matches, view, weights)
        provenance = exact_provenance(lineage("base").id)
        running = [run.order_id for match in matches for run in match.runs if run.order_id]
        blocks = request.num_blocks
        order = OrderRequest(request.order_id, node, "base", blocks, provenance, NUM_LAYERS, (), background=not live)
        if not live:
            return msgspec.structs.replace(private, background_order=order)
        order_id = running[0] if running else request.order_id
        source = LayerSource(LayerGroup(0, NUM_LAYERS), Holder(node, provenance, order_id))
        stop = blocks * BLOCK_SIZE
        plan = ReusePlan((Segment(0, stop, (source,), 0, kind=PlanKind.EXACT), Segment(stop, request.num_tokens)))
        return msgspec.structs.replace(private, plan=plan, live_order=None if running else order)

    return choose


def test_a_live_order_goes_out_before_the_plan_that_pulls_from_it(settings: RouterSettings) -> None:
    sim = Sim(settings, ordering(live=True))
    sim.join("d0")
    prefill = sim.join("p0", role="prefill")
    execute = sim.run()
    work = [one for one in sim.all(TellNode) if isinstance(one.message, PrefillOrder | Execute)]
    assert [type(one.message) for one in work] == [PrefillOrder, Execute]
    order = sim.told(PrefillOrder)[0][1]
    assert (order.token_ids, order.root, order.background) == (tuple(range(8)), ROOT, False)
    assert execute.plan.segments[0].sources[0].holder.order_id == order.order_id
    assert execute.source_addresses == {"p0": "tcp://127.0.0.1:1/p0"}
    sim.feed(NodeSaid(prefill, OrderDone(order.order_id, 8, 8, 0.1)))
    sim.feed(NodeSaid(prefill, OrderDone(order.order_id, 8, 8, 0.1)))
    assert len(sim.core.serving.orders) == 0
    assert sim.core.counters["orders_done"] == 1


def test_one_order_for_everybody_who_asks_for_the_same_context(settings: RouterSettings) -> None:
    sim = Sim(settings, ordering(live=True))
    sim.join("d0")
    sim.join("p0", role="prefill")
    plans = [sim.run(Generate(str(number), "base", prompt="hi")).plan for number in range(4)]
    assert len(sim.told(PrefillOrder)) == 1
    assert len({plan.segments[0].sources[0].holder.order_id for plan in plans}) == 1


def test_background_orders_of_one_context_are_one(settings: RouterSettings) -> None:
    sim = Sim(settings, ordering(live=False))
    sim.join("d0")
    sim.join("p0", role="prefill")
    for number in range(4):
        sim.run(Generate(str(number), "base", prompt="hi"))
    assert len(sim.told(PrefillOrder)) == 1


def test_a_background_order_goes_on_when_those_who_pull_from_it_end(settings: RouterSettings) -> None:
    policies = [ordering(live=False), ordering(live=True), ordering(live=True)]
    sim = Sim(settings, lambda *asked: policies.pop(0)(*asked))
    sim.join("d0")
    sim.join("p0", role="prefill")
    for number in range(3):
        sim.run(Generate(str(number), "base", prompt="hi"))
        sim.feed(ClientAsked(CLIENT, Cancel(str(number))))
    assert len(sim.told(PrefillOrder)) == 1
    assert len(sim.core.serving.orders) == 1


def test_an_order_is_aborted_once_nobody_waits_for_it(settings: RouterSettings) -> None:
    sim = Sim(settings, ordering(live=True))
    sim.join("d0")
    prefill = sim.join("p0", role="prefill")
    for number in range(2):
        sim.run(Generate(str(number), "base", prompt="hi"))
    order_id = sim.told(PrefillOrder)[0][1].order_id
    sim.feed(ClientAsked(CLIENT, Cancel("0")))
    assert (prefill, Abort(order_id, "nobody waits for it any more")) not in sim.told(Abort)
    sim.feed(ClientAsked(CLIENT, Cancel("1")))
    assert (prefill, Abort(order_id, "nobody waits for it any more")) in sim.told(Abort)
    assert len(sim.core.serving.orders) == 0
    assert sim.core.index.match(prompt().hashes, ROOT) == []


@pytest.mark.parametrize("how", ["failed", "node lost", "expired"])
def test_an_order_that_fails_is_offered_no_more_and_harms_no_request(settings: RouterSettings, how: str) -> None:
    sim = Sim(settings, ordering(live=True))
    decode, prefill = sim.join("d0"), sim.join("p0", role="prefill")
    execute = sim.run()
    order_id = sim.told(PrefillOrder)[0][1].order_id
    assert sim.core.index.match(prompt().hashes, ROOT) != []
    if how == "failed":
        sim.feed(NodeSaid(prefill, Failed(order_id, "capacity", "no blocks", True)))
    elif how == "node lost":
        sim.feed(PeerLost(prefill))
    else:
        sim.wait(121.0, 1.0, beating=["d0", "p0"])
    assert len(sim.core.serving.orders) == 0
    assert sim.core.index.match(prompt().hashes, ROOT) == []
    sim.feed(NodeSaid(decode, done(execute, 7)))
    assert len(sim.replies(Finished)) == 1


def test_a_node_that_is_lost_takes_its_holdings_along(sim: Sim) -> None:
    peer = sim.join("d0")
    given = prompt()
    parents = [ROOT, *given.hashes]
    added = tuple(
        Holding(block, parents[number], 0, number * BLOCK_SIZE, NUM_LAYERS) for number, block in enumerate(given.hashes)
    )
    provenance = exact_provenance(lineage("base").id)
    sim.feed(NodeSaid(peer, Holdings("one", 1, (provenance,), added, epoch=1)))
    assert [match.num_blocks for match in sim.core.index.match(given.hashes, ROOT)] == [2]
    sim.feed(ClientAsked(CLIENT, AskStatus("s")))
    assert [node.holdings for node in sim.replies(StatusReply)[0].nodes] == [2]
    sim.feed(PeerLost(peer))
    assert sim.core.index.match(given.hashes, ROOT) == []


# --- limits, questions, stopping ----------------------------------------------------------------------------------------


def test_the_queue_is_bounded(tmp_path: Path) -> None:
    sim = Sim(make_settings(tmp_path, limits=Limits(max_queue=2, max_clients=2)))
    for number in range(3):
        sim.ask(Generate(str(number), "base", prompt="hi"))
    assert [(error.id, error.code, error.retryable) for error in sim.replies(Error)] == [("2", "capacity", True)]


def test_clients_are_bounded(tmp_path: Path) -> None:
    sim = Sim(make_settings(tmp_path, limits=Limits(max_clients=1)))
    sim.ask()
    sim.ask(client=b"other")
    assert [error.code for error in sim.replies(Error, b"other")] == ["capacity"]


def test_models_and_status(sim: Sim) -> None:
    sim.join("d0")
    sim.feed(ClientAsked(CLIENT, ListModels("m")))
    sim.feed(ClientAsked(CLIENT, AskStatus("s")))
    (models,) = sim.replies(Models)
    assert [(one.name, one.nodes) for one in models.models] == [("base", ("d0",)), ("tuned", ())]
    (status,) = sim.replies(StatusReply)
    assert [(one.name, one.state) for one in status.nodes] == [("d0", "alive")]


def test_stopping_refuses_new_requests_and_waits_for_running_ones(sim: Sim) -> None:
    peer = sim.join("d0")
    execute = sim.run()
    sim.feed(StopAsked())
    sim.ask(Generate("2", "base", prompt="hi"))
    assert [(error.id, error.retryable) for error in sim.replies(Error)] == [("2", True)]
    assert sim.all(Stop) == []
    sim.feed(NodeSaid(peer, done(execute, 7)))
    sim.feed(TimePassed())
    assert len(sim.all(Stop)) == 1


def test_stopping_at_once_answers_everybody(sim: Sim) -> None:
    sim.join("d0")
    sim.run()
    sim.feed(StopAsked())
    sim.feed(StopAsked(at_once=True))
    (end,) = sim.ends()
    assert isinstance(end, Error)
    assert end.code == NodeUnavailable.code
    assert len(sim.told(Abort)) == 1
    assert len(sim.all(Stop)) == 1


def test_the_largest_answer_and_the_longest_wait_leave_nothing_behind(sim: Sim) -> None:
    peer = sim.join("d0")
    for number in range(50):
        message = Generate(str(number), "base", prompt="hi", sampling=Sampling(max_tokens=4))
        execute = sim.run(message)
        sim.feed(NodeSaid(peer, generated(execute, 0, 7)))
        sim.feed(NodeSaid(peer, done(execute, 7)))
    sim.nothing_left()
    assert sim.core.counters["finished"] == 50
    assert [note for note in sim.all(Note) if note.level == "error"] == []
