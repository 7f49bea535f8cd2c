"""From configuration and profiles to the bounds that the router holds pairs to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from profile_samples import lineage, sample_profile

from kvkin.configs.pairs import ProfiledPair
from kvkin.configs.profiles import Profile
from kvkin.configs.schema import ClusterConfig, DriftConfig
from kvkin.kv.frontier import Point, point
from kvkin.kv.plan import LayerGroup
from kvkin.router.drift_bounds import bound_of, drift_settings
from kvkin.router.drift_types import DriftBound

AGREEMENT = {None: 0.45, (2, 4): 0.9, (0, 3): 0.95, (1, 6): None}


def pair(points: tuple[Point, ...] | None = None, **changes: Any) -> ProfiledPair:
    """A profile in which each group agrees as in AGREEMENT; all of them may run here but [1, 6), which starts at no transition layer."""
    profile: Profile = sample_profile("base", lineage("base"), "qa", lineage("qa"))
    groups = tuple(msgspec.structs.replace(one, first_token_agreement=AGREEMENT[one.group]) for one in profile.groups)
    profile = msgspec.structs.replace(profile, **{"groups": groups, **changes})
    usable = (point(None, 0.2), point(LayerGroup(2, 4), 0.02), point(LayerGroup(0, 3), 0.01))
    return ProfiledPair(Path("base-qa.json"), profile, usable if points is None else points)


def test_each_group_is_bound_to_what_was_measured_of_it_less_the_margin() -> None:
    bound = bound_of(pair(), DriftConfig(margin=0.1))
    assert bound.by_group == ((None, pytest.approx(0.35)), ((0, 3), pytest.approx(0.85)), ((2, 4), pytest.approx(0.8)))
    assert (bound.min_first_token, bound.min_agreement, bound.max_divergence) == (None, None, None)
    assert bound.num_bounds == 1


def test_groups_that_cannot_run_here_bind_nobody() -> None:
    bound = bound_of(pair((point(LayerGroup(2, 4), 0.02),)), DriftConfig())
    assert [group for group, _ in bound.by_group] == [(2, 4)]


def test_a_profile_without_agreement_binds_to_nothing() -> None:
    groups = tuple(msgspec.structs.replace(one, first_token_agreement=None) for one in pair().profile.groups)
    assert bound_of(pair(groups=groups), DriftConfig()).num_bounds == 0


def test_what_the_operator_says_takes_its_place() -> None:
    bound = bound_of(pair(), DriftConfig(min_first_token=0.5, min_agreement=0.4, max_divergence=1.0))
    assert (bound.min_first_token, bound.min_agreement, bound.max_divergence) == (0.5, 0.4, 1.0)
    assert bound.by_group == ()


def test_no_bound_is_below_nothing() -> None:
    assert bound_of(pair(), DriftConfig(margin=1.0)).by_group[0] == (None, 0.0)


def test_another_measurement_has_another_name() -> None:
    """Even with equal figures: the pair was profiled again, and what was switched off before is to be judged anew."""
    first = bound_of(pair(), DriftConfig())
    assert first == bound_of(pair(), DriftConfig())
    again = bound_of(
        pair(made=msgspec.structs.replace(pair().profile.made, date="2031-01-01T00:00:00+00:00")), DriftConfig()
    )
    assert again.profile != first.profile
    assert again.by_group == first.by_group
    groups = pair().profile.groups
    other = (msgspec.structs.replace(groups[0], first_token_agreement=0.46), *groups[1:])
    assert bound_of(pair(groups=other), DriftConfig()).profile != first.profile


def test_what_is_no_measurement_does_not_rename_it() -> None:
    """Settings, groups that may run here, and whatever a later version of kvkin adds to a profile or works out of it."""
    first = bound_of(pair(), DriftConfig()).profile
    assert bound_of(pair(), DriftConfig(margin=0.5, min_agreement=0.1, min_first_token=0.2)).profile == first
    assert bound_of(pair((point(LayerGroup(2, 4), 0.02),)), DriftConfig()).profile == first
    profile = pair().profile
    groups = tuple(msgspec.structs.replace(one, expected_loss=0.5) for one in profile.groups)
    made = msgspec.structs.replace(profile.made, versions={"kvkin": "9"})
    for changes in ({"groups": groups}, {"made": made}, {"max_loss": 0.5}, {"chosen": None}, {"frontier": ()}):
        assert bound_of(pair(**changes), DriftConfig()).profile == first


def test_everything_of_the_file_arrives(tmp_path: Path) -> None:
    drift = DriftConfig(
        share=0.25,
        tokens=3,
        min_samples=5,
        half_life_samples=9.0,
        false_alarms=0.2,
        min_first_token=0.5,
        min_agreement=0.6,
        max_divergence=0.7,
    )
    config = ClusterConfig(state_dir=str(tmp_path), families={}, nodes={}, drift=drift)
    settings = drift_settings(config, [], "router-1")
    assert (settings.share, settings.tokens, settings.min_samples, settings.half_life_samples) == (0.25, 3, 5, 9.0)
    assert settings.false_alarms == 0.2
    assert settings.bound == DriftBound(0.5, 0.6, 0.7)
    # each router has a memory of its own: it judges by the samples that it got
    assert settings.memory == tmp_path / "drift" / "router-1.json"
