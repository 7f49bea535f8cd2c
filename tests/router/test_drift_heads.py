"""Drift between models with the same layers and different heads: judged apart, remembered apart, their blocks alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from policy_world import BLOCK, FAMILY, LAYERS, LINEAGES, exact, node, request, run, view

from kvkin.decode_nodes.drift import Check, compare
from kvkin.kv.plan import Holder, LayerGroup, LayerSource, PlanKind, ReusePlan, Segment, provenances
from kvkin.router import policy
from kvkin.router.drift import DriftWatch
from kvkin.router.drift_memory import read_memory, write_memory
from kvkin.router.drift_types import DriftBound, DriftSettings, SwitchedOff
from kvkin.router.index import Match
from kvkin.router.policy_types import FamilyView
from kvkin.transport.messages import DriftStatus, Reuse
from kvkin.transport.node_messages import DriftCheck, DriftSample, DriftSource

BASE, FULL = LINEAGES["base"].id, LINEAGES["full"].id
SETTINGS = DriftSettings(share=1.0, min_samples=4, half_life_samples=8.0, bound=DriftBound(min_agreement=0.7))
TWINS = {"full": b"one head", "twin": b"another"}


def with_twin() -> FamilyView:
    """The family with ``twin``, whose KV is that of ``full``."""
    return msgspec.structs.replace(
        FAMILY,
        models_of=FAMILY.models_of | {FULL: ("full", "twin")},
        groups=FAMILY.groups | {("base", "twin"): FAMILY.groups["base", "full"]},
    )


def watch(logits: Mapping[str, bytes] = TWINS, remembered: Sequence[SwitchedOff] = (), **more: object) -> DriftWatch:
    settings = msgspec.structs.replace(SETTINGS, **more)  # type: ignore[arg-type]
    return DriftWatch(settings, {"f": with_twin()}, remembered, logits=logits)


def sample(model: str, agreement: float = 0.0) -> DriftSample:
    source = DriftSource(BASE, "base", PlanKind.PARTIAL, (2, 6))
    return DriftSample("r", FULL, (source,), agreement > 0.5, agreement, 0.0, 8, model=model)


def drift(watching: DriftWatch, model: str, agreement: float = 0.0, count: int = 40) -> list[DriftStatus]:
    return [one for _ in range(count) for one in watching.sampled(sample(model, agreement), 1.0)]


def states(watching: DriftWatch) -> dict[str, str]:
    return {one.receiver: one.state for one in watching.status(2.0)}


def groups(watching: DriftWatch) -> set[str]:
    """Receivers that may still reuse KV of the base under a group."""
    return {receiver for sender, receiver in watching.families["f"].groups if sender == "base"} & set(TWINS)


def test_only_the_one_that_drifted_is_switched_off() -> None:
    watching = watch()
    drift(watching, "full", agreement=1.0)
    (switched,) = drift(watching, "twin")
    assert (switched.sender, switched.receiver) == ("base, copy", "twin")
    assert states(watching) == {"full": "ok", "twin": "off"}
    assert groups(watching) == {"full"}


def test_models_with_the_same_head_share_a_verdict() -> None:
    watching = watch({"full": b"one head", "twin": b"one head"})
    (switched,) = drift(watching, "twin")
    assert switched.receiver == "full, twin"
    assert groups(watching) == set()


def test_a_node_that_names_no_model_means_both() -> None:
    watching = watch()
    assert {one.receiver for one in drift(watching, "")} == {"full", "twin"}
    assert groups(watching) == set()


def test_a_node_names_the_model_of_what_it_checked() -> None:
    asked = DriftCheck(8, sample("").sources)
    logprobs = np.log(np.full(4, 0.25, np.float32))
    check = Check("r", "twin", FULL, (1, 2), 0, asked, (1, 2), logprobs, recordable=False)
    found = compare(check, (1, 2), logprobs)
    assert (found.receiver, found.model) == (FULL, "twin")
    assert watch().problem(found) == ""


@pytest.mark.parametrize("model", ["base", "nobody"])
def test_a_model_with_other_layers_is_no_such_receiver(model: str) -> None:
    watching = watch()
    assert watching.problem(sample(model)) == f"{model} is no such receiver"
    assert watching.problem(sample("twin")) == watching.problem(sample("")) == ""


def test_the_bound_is_that_of_the_profile_of_each() -> None:
    bounds = {("base", "full"): DriftBound(min_agreement=0.2), ("base", "twin"): DriftBound(min_agreement=0.9)}
    watching = watch(bounds=bounds)
    for model in TWINS:
        drift(watching, model, agreement=0.6)
    assert states(watching) == {"full": "ok", "twin": "off"}
    assert {one.receiver: one.min_agreement for one in watching.status(2.0)} == {"full": 0.2, "twin": 0.9}


def test_the_reason_is_told_to_who_asks_for_the_one_that_is_off() -> None:
    watching = watch()
    drift(watching, "twin")
    matches = [Match("n", (run(exact("base"), 0, 100),))]
    nodes = (node("d", "full", "twin"), node("n", "base"))
    for model, told in (("full", False), ("twin", True)):
        asked = msgspec.structs.replace(request("full", reuse=Reuse.ANY), model=model)
        cluster = view(*nodes, family=watching.families["f"])
        decision = watching.explained(policy.choose(asked, matches, cluster), asked, matches)
        assert ("switched off as its sender" in decision.reason) is told
        assert (decision.plan.kind is PlanKind.PARTIAL) is not told


def test_blocks_that_came_of_such_a_pair_are_used_by_none_of_its_layers() -> None:
    """A block is the same under either head; what it is worth under the one that is off nobody knows under the other."""
    watching = watch()
    holder = Holder("n", exact("base"))
    sources = (LayerSource(LayerGroup(0, 2), holder), LayerSource(LayerGroup(6, LAYERS), holder))
    reused = Segment(0, 4 * BLOCK, sources, 0, 2, holder, LayerGroup(2, 6), PlanKind.PARTIAL, 0.02)
    made = ReusePlan((reused, Segment(4 * BLOCK, 4 * BLOCK + 8)))
    watching.dispatched(made, FULL)
    match = Match("d", (run(provenances(made, FULL)[0], 0, 4),))
    assert watching.usable([match]) == [match]
    drift(watching, "twin")
    assert watching.usable([match]) == []


# --- over a restart -------------------------------------------------------------------------------------------------------


def restarted(watching: DriftWatch, path: Path, logits: Mapping[str, bytes] = TWINS) -> DriftWatch:
    write_memory(path, watching.records(2.0), clock=lambda: 100.0)
    return watch(logits, read_memory(path, clock=lambda: 100.0))


def test_the_memory_tells_them_apart(tmp_path: Path) -> None:
    watching = watch()
    drift(watching, "twin")
    again = restarted(watching, tmp_path / "m.json")
    assert states(again) == {"twin": "off"}
    assert groups(again) == {"full"}


def test_another_head_is_another_model_and_the_old_one_is_remembered(tmp_path: Path) -> None:
    watching = watch()
    drift(watching, "twin")
    tuned = restarted(watching, tmp_path / "m.json", TWINS | {"twin": b"tuned again"})
    assert states(tuned) == {}
    assert groups(tuned) == {"full", "twin"}
    back = restarted(tuned, tmp_path / "m.json")
    assert states(back) == {"twin": "off"}


def test_a_memory_from_before_heads_were_told_apart_counts_for_all() -> None:
    watching = watch()
    drift(watching, "twin")
    old = [msgspec.structs.replace(record, logits=b"") for record in watching.records(2.0)]
    assert states(watch(remembered=old)) == {"full": "off", "twin": "off"}
