"""What the router's watch for drift is set up with and what it remembers: frozen structs (router/drift.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvkin.router.drift_estimate import PairEstimate

Pair = tuple[bytes, bytes]
"""Lineage ids of sender and receiver."""

Judged = tuple[bytes, bytes, bytes]
"""A pair as it is judged: lineage ids of sender and receiver, and the digest of all that the receiver's logits come of. Models with
the same KV and another head answer differently, so each has a verdict of its own."""

Group = tuple[int, int] | None
"""Recomputed layers [start, stop); None: full reuse."""


class DriftBound(msgspec.Struct, frozen=True):
    """What a pair must keep; None: no such bound.

    ``min_first_token`` is for every group that ``by_group`` (ascending) does not name. ``profile`` names the measurement that the bound
    comes of (empty: none).
    """

    min_first_token: float | None = None
    min_agreement: float | None = None
    max_divergence: float | None = None
    by_group: tuple[tuple[Group, float], ...] = ()
    profile: str = ""

    @property
    def num_bounds(self) -> int:
        """How many figures have something to keep."""
        first = bool(self.by_group) or self.min_first_token is not None
        return first + (self.min_agreement is not None) + (self.max_divergence is not None)

    def least_first_token(self, groups: Sequence[Group]) -> float | None:
        """Bound on the first token of a plan that reuses the pair in segments under ``groups``; None: none.

        What was measured is that of one group by itself. Of several segments each may change the token, so their shares of other
        tokens add up, as the losses do; ``min_first_token`` is for the plan as a whole.
        """
        if not self.by_group or not groups:
            return self.min_first_token if groups else None
        known = dict(self.by_group)
        found = [known.get(group, self.min_first_token) for group in groups]
        shares = [one for one in found if one is not None]
        return None if len(shares) < len(found) else max(0.0, 1.0 - sum(1.0 - one for one in shares))


class DriftSettings(msgspec.Struct, frozen=True, kw_only=True):
    """As ``configs.schema.DriftConfig``. ``bounds`` are by (sender, receiver) model, ``bound`` is that of all other pairs.

    ``memory`` is the file that keeps what is switched off over a restart (none: nothing is kept).
    """

    share: float = 0.0
    tokens: int = 8
    min_samples: int = 16
    half_life_samples: float = 32.0
    false_alarms: float = 0.01
    bound: DriftBound = DriftBound()
    bounds: Mapping[tuple[str, str], DriftBound] = {}
    memory: Path | None = None


class SwitchedOff(msgspec.Struct, frozen=True, kw_only=True):
    """A pair that left ``bound`` ``off_s`` seconds ago, with what was seen of it. Names are for people who read the file.

    ``logits`` is the receiver's digest as in ``Judged`` (empty, as in older files: of every receiver with these layers).
    """

    sender: bytes
    receiver: bytes
    sender_names: str
    receiver_names: str
    bound: DriftBound
    estimate: PairEstimate
    why: Annotated[str, Meta(max_length=1000)]
    off_s: float
    logits: bytes = b""

    def profiled_since(self, bound: DriftBound) -> bool:
        """Whether ``bound``, that of the pair now, comes of another profile. Other settings, or a profile that is not there, do not count."""
        return bound.profile not in ("", self.bound.profile)
