"""Which pairs of a family are profiled: reads the files that ``families.F.profiles`` names, and refuses those that do not hold.

Called by ``configs.families`` for the router and for ``kvkin config``. A profile that cannot be used is never fatal: its pair is
unprofiled then, and everybody who looks is told why.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvkin.configs.convert import child_key
from kvkin.configs.profiles import Profile, Weights, pairs_of, parse_profile, profile_data, stale_reason
from kvkin.configs.schema import FamilyConfig, local_path
from kvkin.kv.errors import ConfigError
from kvkin.kv.frontier import Point, point, snap, useful
from kvkin.kv.layout import KVLayout

if TYPE_CHECKING:
    from kvkin.configs.families import ResolvedFamily  # which loads profiles with this module

Pair = tuple[str, str]  # (sender, receiver), by name


class ProfiledPair(msgspec.Struct, frozen=True):
    """A pair with a valid profile from the file ``path``. ``points`` are the groups that can run in this cluster and are of
    use on some link, by rising number of recomputed layers."""

    path: Path
    profile: Profile
    points: tuple[Point, ...]


class RefusedProfile(msgspec.Struct, frozen=True):
    """A file that is not used. ``pair`` is empty where it cannot be read; ``malformed``: it can, and is no profile."""

    path: Path
    pair: Pair | tuple[()]
    reason: str
    malformed: bool = False


class FamilyProfiles(msgspec.Struct, frozen=True):
    """All profiles of a family. ``hints`` are what is probably not meant about those that are used."""

    pairs: dict[Pair, ProfiledPair] = {}
    refused: tuple[RefusedProfile, ...] = ()
    hints: tuple[str, ...] = ()

    def warnings(self, family: str) -> list[str]:
        """One sentence for each file that is not used, and the hints."""
        key = f"{child_key('families', family)}.profiles"
        refusals = [f"{key}: {one.path} is refused: {one.reason}" for one in self.refused]
        return refusals + [f"{key}: {hint}" for hint in self.hints]


class _Loader:
    """Collects what the files of one family say."""

    def __init__(self, family: FamilyConfig, models: Mapping[str, Weights], layout: KVLayout) -> None:
        self._family, self._models, self._layout = family, models, layout
        self.refused: list[RefusedProfile] = []
        self.hints: list[str] = []
        self._valid: list[tuple[ProfiledPair, tuple[Pair, ...]]] = []
        layers = ", ".join(map(str, (0, *family.transition_layers)))
        self._starts = f"nodes start a recompute only at layers {layers} (transition_layers)"

    def files(self) -> list[tuple[Path, bool]]:
        """(file, whether it was named itself)."""
        profiles = self._family.profiles
        if isinstance(profiles, tuple):
            return [(local_path(text), True) for text in profiles]
        folder = local_path(profiles)
        if folder.is_file():
            return [(folder, True)]
        try:
            return [(path, False) for path in sorted(folder.iterdir()) if path.suffix == ".json" and path.is_file()]
        except OSError as error:
            self.refused.append(RefusedProfile(folder, (), f"cannot be read: {error.strerror}"))
            return []

    def read(self, path: Path) -> Profile | None:
        try:
            data = profile_data(path)
        except ConfigError as error:
            self.refused.append(RefusedProfile(path, (), error.problem))
            return None
        try:
            return parse_profile(data, "")
        except ConfigError as error:
            self.refused.append(RefusedProfile(path, (), str(error).removeprefix(": "), malformed=True))
            return None

    def take(self, path: Path, profile: Profile) -> None:
        """Keep the profile for the pairs for which it holds, or say why for none."""
        pairs = tuple(pair for pair in pairs_of(profile, self._models) if pair[0] != pair[1])
        stale = stale_reason(profile, self._models)
        if not pairs:
            self.refused.append(RefusedProfile(path, profile.pair, stale or "sender and receiver are one model"))
            return
        points = self._points(profile)
        if not points:
            reason = f"none of its groups can run here: {self._starts}"
            self.refused.append(RefusedProfile(path, profile.pair, reason))
            return
        if stale:
            used = ", ".join(f"{sender} to {receiver}" for sender, receiver in pairs)
            self.hints.append(f"{path} is used for {used}, which have the weights that it was made for; {stale}")
        chosen = profile.chosen
        if chosen is not None and chosen.group is not None and chosen.group[0] not in self._starting:
            self.hints.append(f"the group {list(chosen.group)} that {path} chose is not used: {self._starts}")
        self._valid.append((ProfiledPair(path, profile, points), pairs))

    @property
    def _starting(self) -> tuple[int, ...]:
        return (0, *self._family.transition_layers)

    def _points(self, profile: Profile) -> tuple[Point, ...]:
        """What the router may choose from. A measured gain is no loss, and no credit for another segment's loss either."""
        layout = self._layout
        points = [Point(one.group, max(0.0, one.loss), one.layers) for one in profile.points()]
        fewer = [one for one in snap(points, self._family.transition_layers) if one.layers < layout.num_layers]
        e_bytes = layout.hidden_size * layout.dtype_bytes
        return useful(fewer, layout.num_layers, layout.kv_token_bytes, e_bytes)

    def result(self) -> FamilyProfiles:
        """The first profile of a pair counts; one that names the pair comes before one that only fits its weights."""
        by_name: dict[Pair, ProfiledPair] = {}
        kept: list[tuple[ProfiledPair, tuple[Pair, ...]]] = []
        for found, pairs in self._valid:
            pair = found.profile.pair
            # a name counts for those alone that hold for the models of that name: the models may have changed since
            if pair in by_name and pair in pairs:
                reason = f"{by_name[pair].path} is a profile of the same pair"
                self.refused.append(RefusedProfile(found.path, pair, reason))
                continue
            if pair in pairs:
                by_name[pair] = found
            kept.append((found, pairs))
        used = {pair: found for found, pairs in kept for pair in pairs if pair == found.profile.pair}
        for found, pairs in kept:
            for pair in pairs:
                used.setdefault(pair, found)
        return FamilyProfiles(used, tuple(self.refused), tuple(self.hints))


def load_profiles(
    family: FamilyConfig, models: Mapping[str, Weights], layout: KVLayout, strangers: Iterable[str] = ()
) -> FamilyProfiles:
    """Read the profiles of a family that has ``models``.

    ``strangers`` are models of other families: a folder may hold the profiles of all. Never raises for what a file holds.
    """
    loader, others = _Loader(family, models, layout), frozenset(strangers)
    for path, listed in loader.files():
        profile = loader.read(path)
        if profile is not None and (listed or not others.issuperset(profile.pair)):
            loader.take(path, profile)
    return loader.result()


class PairState(enum.StrEnum):
    """``unprofiled`` pairs have a configured recompute group, used under ``reuse: any`` only. A ``refused`` pair has a profile that
    does not hold, and such a group or none."""

    PROFILED = "profiled"
    REFUSED = "refused"
    UNPROFILED = "unprofiled"


class PairReuse(msgspec.Struct, frozen=True):
    """What a pair may reuse approximately, and ``why``: the file of its profile, or the reason why that is refused.

    ``points`` are the groups with their losses, infinite where they were never measured.
    """

    sender: str
    receiver: str
    state: PairState
    points: tuple[Point, ...]
    why: str = ""


def pair_reuse(families: Iterable[ResolvedFamily]) -> list[PairReuse]:
    """All pairs of models for which approximate reuse is allowed or was meant to be, by state, then in the order of the file."""
    found = [
        one
        for family in families
        for sender in family.models
        for receiver in family.models
        if (one := _reuse_of(family, sender, receiver)) is not None
    ]
    order = list(PairState)
    return sorted(found, key=lambda one: order.index(one.state))


def _reuse_of(family: ResolvedFamily, sender: str, receiver: str) -> PairReuse | None:
    if family.models[sender].lineage.id == family.models[receiver].lineage.id:
        return None  # exact, whatever a profile or a group says
    profiled = family.profiles.pairs.get((sender, receiver))
    if profiled is not None:
        return PairReuse(sender, receiver, PairState.PROFILED, profiled.points, str(profiled.path))
    group = family.group(sender, receiver)
    points = () if group is None else (point(group, math.inf),)
    for refused in family.profiles.refused:
        if refused.pair == (sender, receiver):
            return PairReuse(sender, receiver, PairState.REFUSED, points, f"{refused.path}: {refused.reason}")
    return PairReuse(sender, receiver, PairState.UNPROFILED, points) if points else None
