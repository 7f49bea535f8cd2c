"""Questions of attached servers: the answer is a plan whose receiver is the server, and what is refused is refused by name."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from mock_node import BLOCK_SIZE, LAYOUT, NUM_LAYERS, lineage, make_settings, registration

from kvkin.kv.hashing import block_hashes, root_hash
from kvkin.kv.plan import LayerGroup, PlanKind
from kvkin.kv.provenance import exact_provenance
from kvkin.router.core import RouterCore
from kvkin.router.events import (
    ClientAsked,
    Instruction,
    NodeSaid,
    PreparePrompt,
    PromptFailed,
    PromptReady,
    StopAsked,
    TellNode,
    TimePassed,
)
from kvkin.router.events import Reply as ToClient
from kvkin.router.policy_types import GroupChoice, PolicySettings
from kvkin.router.prompts import Prompt
from kvkin.router.settings import RouterSettings
from kvkin.transport.messages import Error, Generate, NodeLoad, Reuse
from kvkin.transport.node_messages import (
    AskPlan,
    Execute,
    Heartbeat,
    Holding,
    Holdings,
    Leave,
    PlanDone,
    Planned,
    PlanRefused,
    PrefillOrder,
    Refused,
)

ROOT = root_hash(b"tiny", BLOCK_SIZE, "default")
TOKENS = tuple(range(3, 44))
T = TypeVar("T")


class World:
    """A router's core with nodes that hold what the tests say."""

    def __init__(self, settings: RouterSettings) -> None:
        ids = (f"r{number}" for number in itertools.count(1))
        self.now = 100.0
        self.core = RouterCore(settings, "router-inc", lambda: next(ids), started_at=self.now)
        self.said: list[Instruction] = []

    def feed(self, event: Any) -> None:
        self.said += self.core.handle(event, self.now)

    def join(self, node: str, *, holds: int = 0, model: str = "base", **details: Any) -> bytes:
        """Register ``node``; it holds the first ``holds`` blocks of TOKENS exactly."""
        peer = node.encode()
        self.feed(NodeSaid(peer, registration(node, models=(model,), **details)))
        hashes = block_hashes(TOKENS, ROOT, BLOCK_SIZE)[:holds]
        parents = [ROOT, *hashes]
        held = tuple(Holding(one, parents[at], 0, at * BLOCK_SIZE, NUM_LAYERS) for at, one in enumerate(hashes))
        self.feed(NodeSaid(peer, Holdings("one", 0, (exact_provenance(lineage(model).id),), held, epoch=1)))
        return peer

    def ask(self, peer: bytes, **changes: Any) -> None:
        self.feed(NodeSaid(peer, AskPlan(**{"question_id": "q1", "model": "base", "token_ids": TOKENS, **changes})))

    def prepared(self) -> None:
        wanted = self.all(PreparePrompt)[-1]
        ids = wanted.request.token_ids
        assert ids is not None
        self.feed(PromptReady(wanted.request_id, Prompt(ids, ROOT, tuple(block_hashes(ids, ROOT, BLOCK_SIZE)))))

    def all(self, kind: type[T]) -> list[T]:
        return [one for one in self.said if isinstance(one, kind)]

    def told(self, kind: type[T]) -> list[tuple[bytes, T]]:
        return [(one.peer, one.message) for one in self.all(TellNode) if isinstance(one.message, kind)]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(make_settings(tmp_path, policy=PolicySettings(min_pull_tokens=BLOCK_SIZE)))


def test_what_a_node_holds_is_planned_for_the_server_that_asks(world: World) -> None:
    world.join("p0", holds=8, role="prefill")
    world.join("d0")
    server = world.join("s0", role="attached")
    world.ask(server)
    world.prepared()
    ((peer, answer),) = world.told(Planned)
    assert (peer, answer.question_id, answer.root) == (server, "q1", ROOT)
    assert answer.plan.kind is PlanKind.EXACT
    assert [(one.start, one.stop, one.nodes) for one in answer.plan.segments] == [(0, 32, ("p0",)), (32, 41, ())]
    assert answer.source_addresses == {"p0": "tcp://127.0.0.1:1/p0"}
    assert world.told(Execute) == []
    assert len(world.core.questions) == 0


def test_other_nodes_are_never_the_receiver_and_nothing_held_is_a_private_plan(world: World) -> None:
    """Blocks of d0 would be d0's own for a client's request: the server has to pull them."""
    world.join("d0", holds=4)
    server = world.join("s0", role="attached")
    world.ask(server, reuse=Reuse.OFF)
    world.prepared()
    assert world.told(Planned)[-1][1].plan.kind is PlanKind.PRIVATE
    world.ask(server, question_id="q2")
    world.prepared()
    assert world.told(Planned)[-1][1].plan.segments[0].nodes == ("d0",)


def test_clients_of_the_router_are_never_sent_to_an_attached_server(world: World) -> None:
    world.join("s0", holds=8, role="attached")
    world.feed(ClientAsked(b"client", Generate("1", "base", token_ids=TOKENS)))
    world.prepared()
    world.now += 60.0
    world.feed(NodeSaid(b"s0", Heartbeat("one", NodeLoad())))
    world.feed(TimePassed())
    (end,) = [one.message for one in world.all(ToClient) if isinstance(one.message, Error)]
    assert end.code == "node_unavailable"
    assert world.told(Execute) == []
    assert world.core.membership.serving("base") == ()


def test_what_the_server_holds_is_pulled_by_others(world: World) -> None:
    world.join("s0", holds=8, role="attached")
    world.join("d0")
    world.feed(ClientAsked(b"client", Generate("1", "base", token_ids=TOKENS)))
    world.prepared()
    ((peer, execute),) = world.told(Execute)
    assert peer == b"d0"
    assert execute.plan.segments[0].nodes == ("s0",)


def test_an_order_that_pays_is_placed_once(tmp_path: Path) -> None:
    policy = PolicySettings(min_pull_tokens=BLOCK_SIZE, min_order_tokens=BLOCK_SIZE, min_fan_out=1.0)
    settings = make_settings(tmp_path, ("base", "tuned", "third"), policy=policy)
    groups = {("base", receiver): (GroupChoice(LayerGroup(0, 1)),) for receiver in ("tuned", "third")}
    family = msgspec.structs.replace(settings.families["tiny"], groups=groups)
    world = World(msgspec.structs.replace(settings, families={"tiny": family}))
    world.join("p0", role="prefill")
    server = world.join("s0", role="attached", model="tuned")
    world.ask(server, model="tuned", share_hint=50.0, reuse=Reuse.ANY)
    world.prepared()
    assert len(world.told(Planned)) == 1
    ((peer, order),) = world.told(PrefillOrder)
    assert (peer, order.model, order.token_ids) == (b"p0", "base", TOKENS[:40])
    # another server's question about the same context finds the order, and places none
    world.ask(
        world.join("s1", role="attached", model="tuned"),
        model="tuned",
        question_id="q2",
        share_hint=50.0,
        reuse=Reuse.ANY,
    )
    world.prepared()
    assert len(world.told(PrefillOrder)) == 1


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"model": "nobody"}, "unknown_model", "allowed: base, tuned"),
        ({"model": "tuned"}, "invalid_request", "is not on s0"),
        ({"token_ids": ()}, "invalid_request", "at least one token"),
        ({"token_ids": (1, 10**6)}, "invalid_request", "token_ids[1]"),
        ({"token_ids": (-1,)}, "invalid_request", "token_ids[0]"),
        ({"max_loss": float("nan")}, "invalid_request", "max_loss"),
        ({"deadline_s": 0.0}, "invalid_request", "deadline_s"),
        ({"question_id": ""}, "invalid_request", "id"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused_by_name(
    world: World, changes: dict[str, Any], code: str, words: str
) -> None:
    server = world.join("s0", role="attached")
    world.ask(server, **changes)
    ((peer, refused),) = world.told(PlanRefused)
    assert (peer, refused.code) == (server, code)
    assert words in refused.message
    assert world.all(PreparePrompt) == []


def test_a_prompt_that_cannot_be_prepared_is_refused(world: World) -> None:
    server = world.join("s0", role="attached")
    world.ask(server)
    world.feed(PromptFailed(world.all(PreparePrompt)[0].request_id, "prompt_too_long", "512 tokens at most"))
    assert world.told(PlanRefused) == [(server, PlanRefused("q1", "prompt_too_long", "512 tokens at most"))]
    assert len(world.core.questions) == 0


def test_only_attached_servers_ask(world: World) -> None:
    decode = world.join("d0")
    world.ask(decode)
    assert world.all(PreparePrompt) == []
    assert world.core.counters["bad_messages"] == 1
    world.ask(b"stranger")
    assert world.all(PreparePrompt) == []


def test_questions_of_a_server_that_left_or_that_are_too_old_are_forgotten(world: World) -> None:
    server = world.join("s0", role="attached")
    world.ask(server, deadline_s=1.0)
    world.now += 2.0
    world.feed(NodeSaid(server, Heartbeat("one", NodeLoad())))
    world.feed(TimePassed())
    assert len(world.core.questions) == 0
    world.ask(server, question_id="q2")
    world.feed(NodeSaid(server, Leave("one")))
    assert len(world.core.questions) == 0
    world.prepared()  # comes too late
    assert world.told(Planned) == []


def test_a_stopping_router_plans_nothing(world: World) -> None:
    server = world.join("s0", role="attached")
    world.feed(StopAsked())
    world.ask(server)
    assert world.told(PlanRefused)[0][1].code == "node_unavailable"


def test_what_became_of_plans_is_counted(world: World) -> None:
    server = world.join("s0", role="attached")
    world.feed(NodeSaid(server, PlanDone("q1", 41, 32)))
    world.feed(NodeSaid(server, PlanDone("q2", 41, 0, "the source is gone")))
    counters = world.core.counters
    assert (counters["attached_requests"], counters["prompt_tokens"], counters["cached_tokens"]) == (2, 82, 32)
    assert counters["fallbacks"] == 1


def test_a_role_that_is_none_is_refused_with_those_that_are(world: World) -> None:
    world.feed(NodeSaid(b"x", registration("x", role="helper", layout=LAYOUT)))
    ((_, refused),) = world.told(Refused)
    assert refused.code == "role"
    assert "prefill, decode, attached" in refused.message
