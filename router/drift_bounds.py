"""From the configuration and the profiles to what the router watches for drift: called by router/configured.py."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvkin.configs.families import ResolvedFamily
from kvkin.configs.pairs import ProfiledPair
from kvkin.configs.profiles import Profile
from kvkin.configs.schema import ClusterConfig, DriftConfig
from kvkin.kv.hashing import digest
from kvkin.router.drift_types import DriftBound, DriftSettings, Group


def drift_settings(config: ClusterConfig, families: Iterable[ResolvedFamily], router: str) -> DriftSettings:
    """Settings of one router's watch. What it switched off is kept in ``state_dir/drift/``, a file for each router."""
    drift = config.drift
    return DriftSettings(
        share=drift.share,
        tokens=drift.tokens,
        min_samples=drift.min_samples,
        half_life_samples=drift.half_life_samples,
        false_alarms=drift.false_alarms,
        bound=DriftBound(drift.min_first_token, drift.min_agreement, drift.max_divergence),
        bounds={pair: bound_of(found, drift) for family in families for pair, found in family.profiles.pairs.items()},
        memory=config.state_path / "drift" / f"{router}.json",
    )


def bound_of(pair: ProfiledPair, drift: DriftConfig) -> DriftBound:
    """A profiled pair's bound: of each group that may run here, the measured agreement of the first token less ``margin``.

    ``min_first_token`` of the configuration takes its place.
    """
    usable = {None if one.group is None else (one.group.start, one.group.stop) for one in pair.points}
    measured: dict[Group, float] = {
        one.group: one.first_token_agreement
        for one in pair.profile.groups
        if one.group in usable and one.first_token_agreement is not None
    }
    by_group = [(group, max(0.0, share - drift.margin)) for group, share in measured.items()]
    by_group.sort(key=lambda one: one[0] or (-1, -1))
    return DriftBound(
        min_first_token=drift.min_first_token,
        min_agreement=drift.min_agreement,
        max_divergence=drift.max_divergence,
        by_group=tuple(by_group) if drift.min_first_token is None else (),
        profile=measurement(pair.profile),
    )


def measurement(profile: Profile) -> str:
    """Names what was measured, and when: profiling again gives another name, whatever it finds.

    Not the file's bytes, nor all of its fields: a later version of kvkin that adds to them has measured nothing again.
    """
    groups = [
        (one.group, one.first_token_agreement, None if one.quality is None else one.quality.score)
        for one in profile.groups
    ]
    made = (profile.sender.lineage_id, profile.receiver.lineage_id, profile.data.digest, profile.made.date, groups)
    return digest(b"profile", msgspec.json.encode(made)).hex()
