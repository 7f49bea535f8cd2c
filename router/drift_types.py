"""What the router's watch for drift is set up with and what it remembers: frozen structs (router/drift.py)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from kvkin.router.drift_estimate import PairEstimate

Pair = tuple[bytes, bytes]
"""Lineage ids of sender and receiver."""

Group = tuple[int, int] | None
"""Recomputed layers [start, stop); None: full reuse."""


class DriftBound(msgspec.Struct, frozen=True):
    """What a pair must keep; None: no such bound.

    ``min_first_token`` is for every group that ``by_group`` (ascending) does not name. ``profile`` names the measurement that the bound
    comes of: another one is another bound, whatever its figures.
    """

    min_first_token: float | None = None
    min_agreement: float | None = None
    max_divergence: float | None = None
    by_group: tuple[tuple[Group, float], ...] = ()
    profile: str = ""

    @property
    def judges(self) -> bool:
        """Whether there is anything to keep."""
        bounds = (self.min_first_token, self.min_agreement, self.max_divergence)
        return bool(self.by_group) or bounds != (None, None, None)

    def least_first_token(self, groups: Iterable[Group]) -> float | None:
        """Bound on the first token of a plan that reuses the pair under ``groups``: that of the one that promises least."""
        known = dict(self.by_group)
        found = [known.get(group, self.min_first_token) for group in groups]
        return min((one for one in found if one is not None), default=None)


class DriftSettings(msgspec.Struct, frozen=True, kw_only=True):
    """As ``configs.schema.DriftConfig``. ``bounds`` are by (sender, receiver) model, ``bound`` is that of all other pairs.

    ``memory`` is the file that keeps what is switched off over a restart (none: nothing is kept).
    """

    share: float = 0.0
    tokens: int = 8
    min_samples: int = 16
    half_life_samples: float = 32.0
    bound: DriftBound = DriftBound()
    bounds: Mapping[tuple[str, str], DriftBound] = {}
    memory: Path | None = None


class SwitchedOff(msgspec.Struct, frozen=True, kw_only=True):
    """A pair that left ``bound`` ``off_s`` seconds ago, with what was seen of it. Names are for people who read the file."""

    sender: bytes
    receiver: bytes
    sender_names: str
    receiver_names: str
    bound: DriftBound
    estimate: PairEstimate
    why: str
    off_s: float
