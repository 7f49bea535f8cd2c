"""The router's core and drift: who is asked to check, what samples do, what is said, counted and remembered of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from mock_node import BLOCK_SIZE, NUM_LAYERS, lineage, make_settings, registration

from kvkin.kv.cost import Estimate
from kvkin.kv.hashing import block_hashes, root_hash
from kvkin.kv.plan import Holder, LayerGroup, LayerSource, PlanKind, ReusePlan, Segment, private_plan
from kvkin.kv.provenance import Quality, exact_provenance
from kvkin.router.core import RouterCore
from kvkin.router.drift import SwitchedOff
from kvkin.router.drift_types import DriftBound, DriftSettings
from kvkin.router.events import (
    ClientAsked,
    Event,
    Instruction,
    NodeSaid,
    Note,
    PromptReady,
    RememberDrift,
    Reply,
    TellNode,
)
from kvkin.router.index import Match
from kvkin.router.policy_types import ClusterView, Decision, GroupChoice, PolicyRequest, PolicySettings
from kvkin.router.prompts import Prompt
from kvkin.router.settings import FamilySettings, RouterSettings
from kvkin.transport.messages import AskStatus, DriftStatus, Generate, Reuse, StatusReply
from kvkin.transport.node_messages import (
    DriftSample,
    DriftSource,
    Execute,
    Failed,
    Holding,
    Holdings,
    SnapshotWanted,
)

ROOT = root_hash(b"tiny", BLOCK_SIZE, "default")
IDS = tuple(range(10))
BASE, TUNED = lineage("base").id, lineage("tuned").id
T = TypeVar("T")


def partial_choice(
    request: PolicyRequest, matches: Sequence[Match], view: ClusterView, settings: PolicySettings
) -> Decision:
    """Two blocks of the base under a group where the family's view allows it, else privately; the first node of the model."""
    node = min(name for name, one in view.nodes.items() if request.model in one.models and one.usable)
    estimate = Estimate(0, 0, 0, 0, 0, 0)
    groups = view.families["tiny"].groups.get(("base", request.model), ())
    if not groups or not matches:
        return Decision(node, private_plan(request.num_tokens, "no group"), estimate, Quality.EXACT, 0.0, "no group")
    source = LayerSource(LayerGroup(2, NUM_LAYERS), Holder("base-0", exact_provenance(BASE)))
    segment = Segment(0, 8, (source,), 0, recompute=LayerGroup(0, 2), kind=PlanKind.PARTIAL, loss=0.1)
    plan = ReusePlan((segment, Segment(8, request.num_tokens)), "partial")
    return Decision(node, plan, estimate, Quality.BOUNDED, 0.1, "partial")


class Router:
    """A core with a family of two, whose base may be reused under one group, and nodes for both."""

    def __init__(self, folder: Path, switched_off: Sequence[SwitchedOff] = (), **drift: object) -> None:
        settings = make_settings(
            folder, drift=DriftSettings(**{"share": 1.0, "min_samples": 3, "false_alarms": 0.5, **drift})
        )  # type: ignore[arg-type]
        group = {("base", "tuned"): (GroupChoice(LayerGroup(0, 2), 0.1),)}
        family: FamilySettings = msgspec.structs.replace(settings.families["tiny"], groups=group)
        self.settings: RouterSettings = msgspec.structs.replace(settings, families={"tiny": family})
        ids = (f"r{number}" for number in itertools.count(1))
        self.now = 100.0
        self.core = RouterCore(
            self.settings,
            "inc",
            lambda: next(ids),
            started_at=self.now,
            choose=partial_choice,
            stopwatch=lambda: self.now,
            switched_off=switched_off,
        )
        self.said: list[Instruction] = []
        for node, model in (("base-0", "base"), ("tuned-0", "tuned"), ("tuned-1", "tuned")):
            self.feed(NodeSaid(node.encode(), registration(node, models=(model,))))
        hashes = block_hashes(IDS, ROOT, BLOCK_SIZE)
        held = tuple(
            Holding(block, parent, 0, BLOCK_SIZE * number, NUM_LAYERS)
            for number, (parent, block) in enumerate(itertools.pairwise((ROOT, *hashes)))
        )
        self.feed(NodeSaid(b"base-0", Holdings("one", 0, (exact_provenance(BASE),), held, epoch=1)))

    def feed(self, event: Event) -> list[Instruction]:
        new = self.core.handle(event, self.now)
        self.said += new
        return new

    def ask(self, name: str, reuse: Reuse = Reuse.BOUNDED) -> Execute:
        self.feed(ClientAsked(b"client", Generate(name, "tuned", token_ids=IDS, reuse=reuse, max_loss=0.5)))
        request_id = next(iter(reversed(self.core.serving.requests)))
        self.feed(PromptReady(request_id, Prompt(IDS, ROOT, tuple(block_hashes(IDS, ROOT, BLOCK_SIZE)), 0.1)))
        return self.told(Execute)[-1]

    def sample(self, agreement: float, /, peer: bytes = b"tuned-0", **changes: object) -> list[Instruction]:
        source = DriftSource(BASE, "base", PlanKind.PARTIAL, (0, 2))
        sample = DriftSample("r1", TUNED, (source,), agreement > 0.5, agreement, 1 - agreement, 8)
        return self.feed(NodeSaid(peer, msgspec.structs.replace(sample, **changes)))

    def told(self, kind: type[T]) -> list[T]:
        return [one.message for one in self.said if isinstance(one, TellNode) and isinstance(one.message, kind)]

    def notes(self, level: str) -> list[Note]:
        return [one for one in self.said if isinstance(one, Note) and one.level == level]

    def drift(self) -> tuple[DriftStatus, ...]:
        (reply,) = self.feed(ClientAsked(b"client", AskStatus("s")))
        assert isinstance(reply, Reply)
        assert isinstance(reply.message, StatusReply)
        return reply.message.drift


BOUND = DriftBound(min_agreement=0.8)


def test_a_partial_request_is_marked_and_counted(tmp_path: Path) -> None:
    router = Router(tmp_path, tokens=5)
    check = router.ask("1").check
    assert check is not None
    assert check.tokens == 5
    assert check.sources == (DriftSource(BASE, "base", PlanKind.PARTIAL, (0, 2)),)
    assert router.core.counters["drift_checks"] == 1
    assert router.ask("2", Reuse.OFF).check is None
    assert router.core.counters["drift_checks"] == 1


def test_without_a_share_nothing_is_marked(tmp_path: Path) -> None:
    router = Router(tmp_path, share=0.0)
    assert router.ask("1").plan.kind is PlanKind.PARTIAL
    assert router.told(Execute)[-1].check is None
    assert router.drift() == ()
    assert not router.core.counters["drift_checks"]


def test_a_retry_is_checked_as_well(tmp_path: Path) -> None:
    router = Router(tmp_path)
    first = router.ask("1")
    router.feed(NodeSaid(b"tuned-0", Failed(first.request_id, "node_unavailable", "stopping", True)))
    second = router.told(Execute)[-1]
    assert second.request_id != first.request_id
    assert second.check == first.check


def test_samples_show_in_the_status(tmp_path: Path) -> None:
    router = Router(tmp_path, bound=BOUND)
    router.sample(1.0)
    router.sample(0.5, inherited=True)
    router.now += 7.0
    (pair,) = router.drift()
    assert (pair.sender, pair.receiver, pair.state, pair.samples, pair.inherited) == ("base", "tuned", "watching", 2, 1)
    assert pair.agreement == 1.0, "what somebody else's blocks may have done is shown as a number of checks alone"
    assert (pair.min_agreement, pair.max_divergence, pair.since_s) == (0.8, None, 7.0)
    assert router.core.counters["drift_samples"] == 2


def test_a_pair_that_leaves_its_bound_is_switched_off_loudly(tmp_path: Path) -> None:
    router = Router(tmp_path, bound=BOUND)
    assert router.ask("1").plan.kind is PlanKind.PARTIAL
    for _ in range(2):
        router.sample(0.25)
    assert router.notes("warning") == []
    new = router.sample(0.25)
    (note,) = router.notes("warning")
    assert note.event == "pair switched off for drift"
    assert {"sender": "base", "receiver": "tuned", "samples": 3, "agreement": 0.25, "min_agreement": 0.8}.items() <= (
        note.fields.items()
    )
    assert router.core.counters["drift_switched_off"] == 1
    (remembered,) = [one for one in new if isinstance(one, RememberDrift)]
    assert [(one.sender, one.receiver) for one in remembered.pairs] == [(BASE, TUNED)]
    after = router.ask("2")
    assert (after.plan.kind, after.check) == (PlanKind.PRIVATE, None)
    assert "base is switched off as its sender (agreement 0.25, bound 0.80, 3 checks)" in after.plan.reason
    # late samples are counted; nothing is said or remembered twice
    assert router.sample(0.0) == []
    assert router.core.counters["drift_switched_off"] == 1
    assert [one.state for one in router.drift()] == ["off"]


def test_a_new_router_process_goes_on_with_what_was_switched_off(tmp_path: Path) -> None:
    router = Router(tmp_path, bound=BOUND)
    for _ in range(3):
        router.sample(0.0)
    again = Router(tmp_path, router.core.drift.records(router.now), bound=BOUND)
    assert again.ask("1").plan.kind is PlanKind.PRIVATE
    assert [one.state for one in again.drift()] == ["off"]
    profiled_again = Router(tmp_path, router.core.drift.records(router.now), bound=DriftBound(0.5, profile="new"))
    assert profiled_again.ask("1").plan.kind is PlanKind.PARTIAL


@pytest.mark.parametrize(
    "changes",
    [{"agreement": 2.0}, {"receiver": BASE}, {"receiver": b"nobody"}, {"sources": ()}, {"divergence": float("nan")}],
    ids=["agreement", "not served there", "no model", "no source", "divergence"],
)
def test_a_sample_that_cannot_be_true_harms_nobody(tmp_path: Path, changes: dict[str, object]) -> None:
    router = Router(tmp_path, bound=BOUND)
    for _ in range(5):
        router.sample(0.0, **changes)
    assert router.drift() == ()
    assert router.core.counters["bad_messages"] == 5
    assert router.ask("1").plan.kind is PlanKind.PARTIAL


def test_a_stranger_is_asked_to_register_and_not_believed(tmp_path: Path) -> None:
    router = Router(tmp_path, bound=BOUND)
    new = router.sample(0.0, peer=b"stranger")
    assert [one.message for one in new if isinstance(one, TellNode)] == [SnapshotWanted(register=True)]
    assert router.drift() == ()
