"""What is switched off for drift stays off over restarts, until the pair is profiled again; and what a spoilt file costs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from mock_node import make_settings
from policy_world import FAMILY, GROUPS, LINEAGES

from kvkin.kv.plan import PlanKind
from kvkin.router.drift import DriftWatch
from kvkin.router.drift_memory import MAX_BYTES, read_memory, write_memory
from kvkin.router.drift_types import DriftBound, DriftSettings, SwitchedOff
from kvkin.router.node import RouterNode
from kvkin.router.policy_types import FamilyView
from kvkin.transport.codec import encode
from kvkin.transport.messages import DriftStatus
from kvkin.transport.node_messages import DriftSample, DriftSource

IDS = {name: lineage.id for name, lineage in LINEAGES.items()}
PAIR = ("base", "full")
MEASURED = DriftBound(by_group=(((2, 6), 0.8),), profile="first")


def watch(
    own: DriftBound = MEASURED,
    remembered: tuple[SwitchedOff, ...] = (),
    *,
    now: float = 0.0,
    seen: FamilyView = FAMILY,
    **settings: object,
) -> DriftWatch:
    """A router's process in which ``own`` is the bound of base -> full."""
    made = DriftSettings(**{"share": 1.0, "min_samples": 4, "bounds": {PAIR: own}, **settings})  # type: ignore[arg-type]
    return DriftWatch(made, {"f": seen}, remembered, now)


def switch_off(watching: DriftWatch, sender: str = "base", receiver: str = "full", now: float = 1.0) -> DriftWatch:
    bad = DriftSample(
        "r", IDS[receiver], (DriftSource(IDS[sender], sender, PlanKind.PARTIAL, (2, 6)),), False, 0.0, 9.0, 8
    )
    for _ in range(100):
        if watching.sampled(bad, now):
            return watching
    raise AssertionError("a hundred bad samples and the pair is still on")


def state(watching: DriftWatch, now: float = 1.0) -> DriftStatus | None:
    return next((one for one in watching.status(now) if one.sender.startswith("base")), None)


RECORDS = switch_off(watch()).records(1.0)


def restarted(file: Path, watching: DriftWatch) -> tuple[SwitchedOff, ...]:
    """What the next process of the router reads."""
    write_memory(file, watching.records(1.0))
    return read_memory(file)


# --- until it is profiled again --------------------------------------------------------------------------------------------


def test_a_pair_that_is_off_is_off_after_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "drift" / "router-0.json"
    assert read_memory(file) == ()
    watching = switch_off(watch(), now=1.0)
    before = state(watching, 11.0)
    assert before is not None
    write_memory(file, watching.records(11.0), clock=lambda: 1000.0)
    again = watch(remembered=read_memory(file, clock=lambda: 1500.0), now=50.0)
    found = state(again, 60.0)
    assert found is not None
    assert found == msgspec.structs.replace(before, since_s=found.since_s)
    assert found.since_s == pytest.approx(10 + 500 + 10)
    assert PAIR not in again.families["f"].groups


CHANGED: Mapping[str, Mapping[str, object]] = {
    "margin": {"own": DriftBound(by_group=(((2, 6), 0.1),), profile="first")},
    "groups that may run": {"own": DriftBound(by_group=(((4, 6), 0.8),), profile="first")},
    "min_first_token": {"own": DriftBound(min_first_token=0.01, profile="first")},
    "one more bound": {"own": msgspec.structs.replace(MEASURED, max_divergence=20.0)},
    "no bound at all": {"own": DriftBound(profile="first")},
    "the profile is gone": {"own": DriftBound()},
    "min_samples": {"min_samples": 4000},
    "false_alarms": {"false_alarms": 1e-9},
    "no checks": {"share": 0.0},
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_no_setting_brings_a_pair_back(tmp_path: Path, change: Mapping[str, object]) -> None:
    """Nor a profile that cannot be read today. When all is as before, the pair is off as before; a new profile brings it back."""
    file = tmp_path / "r.json"
    changed = watch(remembered=restarted(file, switch_off(watch())), **change)  # type: ignore[arg-type]
    found = state(changed)
    assert found is not None
    assert found.state == "off"
    assert PAIR not in changed.families["f"].groups
    back = state(watch(remembered=restarted(file, changed)))
    assert back is not None
    assert back.state == "off"
    fresh = watch(msgspec.structs.replace(MEASURED, profile="second"), restarted(file, changed))
    assert state(fresh) is None
    assert fresh.families["f"] is FAMILY
    assert fresh.records(1.0) == ()


def test_a_pair_that_never_had_a_profile_is_on_again_with_its_first(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    remembered = restarted(file, switch_off(watch(DriftBound(min_agreement=0.7))))
    for bound in (DriftBound(min_agreement=0.7), DriftBound(min_agreement=0.1), DriftBound()):
        assert state(watch(bound, remembered)) is not None
    assert state(watch(MEASURED, remembered)) is None


def test_other_weights_are_another_pair(tmp_path: Path) -> None:
    (record,) = RECORDS
    older = msgspec.structs.replace(record, sender=b"older weights")
    assert watch(remembered=(older,)).status(1.0) == ()


def test_a_pair_of_models_that_are_not_here_now_is_not_forgotten(tmp_path: Path) -> None:
    """A model that is taken out of the file for a while, and another pair that is switched off meanwhile."""
    file = tmp_path / "r.json"
    write_memory(file, switch_off(watch(), now=1.0).records(11.0), clock=lambda: 1000.0)
    without = {key: names for key, names in FAMILY.models_of.items() if key != IDS["base"]}
    fewer = msgspec.structs.replace(FAMILY, models_of=without, groups={("full", "other"): GROUPS["full", "other"]})
    bound = DriftBound(min_agreement=0.7)
    smaller = watch(remembered=read_memory(file, clock=lambda: 1100.0), seen=fewer, now=50.0, bound=bound)
    assert smaller.status(50.0) == ()
    switch_off(smaller, "full", "other", 60.0)
    write_memory(file, smaller.records(70.0), clock=lambda: 1120.0)
    found = state(watch(remembered=read_memory(file, clock=lambda: 1200.0)), 0.0)
    assert found is not None
    assert (found.state, found.since_s) == ("off", pytest.approx(10 + 200))


# --- spoilt files ----------------------------------------------------------------------------------------------------------


def edited(**changes: object) -> bytes:
    """A memory of one entry in which keys (``pair__why``) have other values, as JSON text where these are bytes."""
    entry = {"since": 1000.0, "pair": json.loads(msgspec.json.encode(RECORDS[0]))}
    for key, value in changes.items():
        where = entry
        *path, last = key.split("__")
        for name in path:
            where = where[name]  # type: ignore[assignment]
        where[last] = value  # type: ignore[assignment]
    return json.dumps([entry]).encode()


HOSTILE: Mapping[str, bytes] = {
    "nested": b"[" * 200_000,
    "nested in an entry": b"[1, " + b'{"a": ' * 200_000,
    "no UTF-8": edited(pair__why="##").replace(b"##", b"\xff\xfe"),
    "half a surrogate": edited(pair__why="##").replace(b"##", b"\\ud800"),
    "huge count": edited(pair__estimate__samples=10**40),
    "negative count": edited(pair__estimate__samples=-5),
    "huge mean": edited(pair__estimate__agreement={"weight": 1e308, "mean": -1e308}),
    "huge time": edited(since=-1e308),
    "no number": edited(since=1).replace(b'"since": 1', b'"since": 1e999'),
    "evidence of another version": edited(pair__estimate__against_agreement={"rounds": 3, "capital": [1.0]}),
    "long reason": edited(pair__why="x" * 1_000_000),
    "unknown models": edited(pair__sender="AAAA", pair__receiver=""),
    "one model": edited(pair__sender=json.loads(msgspec.json.encode(IDS["full"]))),
    "twice": edited()[:-1] + b"," + edited()[1:],
    "zeros": bytes(1000),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_whatever_a_file_holds_a_router_starts_and_works(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "router.json"
    file.write_bytes(content)
    watching = watch(remembered=read_memory(file), now=5.0, bound=DriftBound(min_agreement=0.7))
    bad = DriftSample("r", IDS["full"], (DriftSource(IDS["base"], "base", PlanKind.PARTIAL),), False, 0.0, 9.0, 8)
    watching.sampled(bad, 6.0)
    switch_off(watching, "other")
    for one in watching.status(7.0):
        encode(one)
    write_memory(file, watching.records(8.0))
    kept = read_memory(file)
    assert len(kept) == len(watching.records(8.0)) >= 1


@pytest.mark.parametrize("shape", ["pipe", "folder", "huge", "link to itself"])
async def test_a_router_process_starts_whatever_lies_there(tmp_path: Path, shape: str) -> None:
    file = tmp_path / "router.json"
    if shape == "pipe":
        os.mkfifo(file)
    elif shape == "folder":
        file.mkdir()
    elif shape == "huge":
        with file.open("wb") as huge:
            huge.truncate(MAX_BYTES + 1)
    else:
        file.symlink_to(file)
    async with RouterNode(make_settings(tmp_path, drift=DriftSettings(memory=file))) as node:
        assert node.core.drift.status(1.0) == ()
    write_memory(file, RECORDS)
    assert len(read_memory(file)) == (0 if shape == "folder" else 1)


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": 1}', b'[{"since": "x"}]', b"\xff"])
def test_a_spoilt_file_costs_the_memory_only(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "router.json"
    file.write_bytes(content)
    assert read_memory(file) == ()
    assert file.read_bytes() == content
    write_memory(file, RECORDS)
    assert len(read_memory(file)) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["router.json", "router.json.unreadable"]
    assert file.with_name("router.json.unreadable").read_bytes() == content


def test_a_file_that_cannot_be_written_costs_the_memory_only(tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("a file, no folder")
    write_memory(tmp_path / "blocked" / "router.json", RECORDS)


def test_one_damaged_entry_costs_no_other_and_is_kept_aside(tmp_path: Path) -> None:
    file = tmp_path / "router.json"
    write_memory(file, RECORDS)
    entries = json.loads(file.read_text())
    file.write_text(json.dumps([{"since": None}, *entries, 7]))
    assert len(read_memory(file)) == 1
    aside = file.with_name("router.json.unreadable")
    assert json.loads(aside.read_text())[-1] == 7
    file.write_text("{")
    assert read_memory(file) == ()
    assert aside.read_text() == "{"
