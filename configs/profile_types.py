"""What a profile holds: the measurements of one pair of models as typed structs (``configs.profiles`` reads and writes them).

Plain data without behaviour of its own; lists of digests are hexadecimal, groups half-open, times seconds.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvkin.kv.frontier import Point, point
from kvkin.kv.lineage import Lineage
from kvkin.kv.plan import LayerGroup

# Raised when a field changes its meaning; readers refuse other formats. New fields come with a default and keep it.
FORMAT = 1

Hex = Annotated[str, Meta(pattern=r"^[0-9a-f]+\Z", max_length=128)]
Whole = Annotated[int, Meta(ge=0, le=2**53)]
Layer = Annotated[int, Meta(ge=0, le=10_000)]
Share = Annotated[float, Meta(ge=0, le=1)]
# Half-open range of recomputed layers [start, stop); null in the file: full reuse, nothing is recomputed.
Group = tuple[Layer, Layer] | None


class ProfiledModel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model as it was measured. ``lineage_id`` names the KV of all its layers, ``kv`` (L digests) and ``hidden`` (L + 1)
    tell layer by layer what changed since. ``head_digest`` is that of a receiver's head (none: not recorded, so any counts)."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    lineage_id: Hex
    kv: tuple[Hex, ...]
    hidden: tuple[Hex, ...]
    head_digest: Hex | None = None

    @property
    def num_layers(self) -> int:
        return len(self.kv)

    @property
    def lineage(self) -> Lineage:
        return Lineage(tuple(map(bytes.fromhex, self.hidden)), tuple(map(bytes.fromhex, self.kv)))


class TokenStats(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the contexts that were reused."""

    min: Whole
    p50: Whole
    mean: float
    max: Whole


class ProfileData(msgspec.Struct, frozen=True, kw_only=True):
    """What it was measured on. ``digest`` is that of the samples as they were used, ``split`` names the part of the data."""

    name: str
    digest: Hex
    split: str
    samples: Whole
    context_tokens: TokenStats


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """How it was made: settings that change the result (no paths, no command lines), versions of what computed it, and when
    (ISO 8601, UTC)."""

    date: str
    settings: dict[str, str | int | float | bool | None] = {}
    versions: dict[str, str] = {}


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Mean of the metric over ``n`` samples with its 95 % interval."""

    mean: float
    low: float
    high: float
    n: Whole


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """The receiver with a full prefill, the sender alone, and the receiver on the sender's KV with nothing recomputed."""

    full: Score
    sender: Score | None = None
    full_reuse: Score | None = None


class LayerSensitivity(msgspec.Struct, frozen=True, kw_only=True):
    """What reuse of this one layer does to the answer, over ``n`` inputs: mean and percentiles."""

    layer: Layer
    mean: float
    p10: float
    p50: float
    p90: float
    n: Whole


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """Divergence of the answer tokens' distribution from a full prefill's, over ``n`` inputs."""

    mean: float
    p10: float
    p90: float
    n: Whole


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """Generated answers of a group: their mean ``score``, and ``loss`` against full prefill on the same ``n`` samples
    (1 - score / full's score; below 0 if better) with its paired 95 % interval."""

    score: float
    loss: float
    loss_low: float
    loss_high: float
    n: Whole


class MeasuredGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One recompute group. ``quality`` is there where answers were generated, ``recompute_s`` is the measured median of
    recomputing the context, ``first_token_agreement`` the share of inputs whose first token is full prefill's.

    ``expected_loss`` is what the losses of all groups together say of this one: never below 0, and never less for a group that
    diverges more. Frontier and choice go by it: of many groups' own noisy losses the lowest is that of the luckiest."""

    group: Group
    divergence: Divergence | None = None
    quality: Quality | None = None
    recompute_s: float | None = None
    first_token_agreement: Share | None = None
    expected_loss: float | None = None

    @property
    def loss(self) -> float | None:
        """The loss to reckon with; None where no answers were generated."""
        if self.quality is None:
            return None
        return self.quality.loss if self.expected_loss is None else self.expected_loss


class ProfilePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A point of the frontier: ``group`` (null: full reuse), the layers that it recomputes, its loss."""

    group: Group
    loss: float
    layers: Layer


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A measured pair. ``groups`` are all that were measured, ``frontier`` the best of those with answers (fewest layers
    against loss), ``chosen`` the one with the fewest layers at ``max_loss`` (null: none keeps that bound).

    ``full_reuse_is_fine``: nothing needs to be recomputed to keep ``max_loss``.
    """

    format: int = FORMAT
    sender: ProfiledModel
    receiver: ProfiledModel
    metric: str
    data: ProfileData
    group_size: Annotated[int, Meta(ge=1, le=10_000)]
    max_loss: float
    scores: Scores
    full_reuse_is_fine: bool
    chosen: ProfilePoint | None
    frontier: tuple[ProfilePoint, ...]
    sensitivity: tuple[LayerSensitivity, ...]
    groups: tuple[MeasuredGroup, ...]
    made: Made

    @property
    def pair(self) -> tuple[str, str]:
        """(sender, receiver), by name."""
        return self.sender.name, self.receiver.name

    @property
    def num_layers(self) -> int:
        return self.receiver.num_layers

    def points(self) -> tuple[Point, ...]:
        """Every group for which answers were generated, with the loss to reckon with."""
        return tuple(point(layer_group(one.group), one.loss) for one in self.groups if one.loss is not None)


def layer_group(group: Group) -> LayerGroup | None:
    return None if group is None else LayerGroup(*group)


def profile_point(one: Point) -> ProfilePoint:
    """A point as it stands in a profile."""
    group = None if one.group is None else (one.group.start, one.group.stop)
    return ProfilePoint(group=group, loss=one.loss, layers=one.layers)


def profiled_model(name: str, lineage: Lineage, head_digest: bytes | None = None) -> ProfiledModel:
    """A model as a profile records it; ``head_digest`` for a receiver, whose answers were measured."""
    return ProfiledModel(
        name=name,
        lineage_id=lineage.id.hex(),
        kv=tuple(one.hex() for one in lineage.kv),
        hidden=tuple(one.hex() for one in lineage.hidden),
        head_digest=None if head_digest is None else head_digest.hex(),
    )
