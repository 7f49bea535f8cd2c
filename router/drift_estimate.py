"""Running estimates of one pair's drift, and when they leave a bound for certain. Pure arithmetic (router/drift.py)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kvkin.router.drift_types import DriftBound
    from kvkin.transport.node_messages import DriftSample

# One-sided 95 %: a mean of few and scattered samples that lies beyond a bound may do so by chance.
CERTAIN = 1.645


class Decayed(msgspec.Struct, frozen=True):
    """A mean over samples of which each counts ``keep`` times as much as the one after it.

    ``weight`` and ``squares`` are the sums of the samples' weights and of their squares, ``moment`` is the mean of squared values.
    """

    weight: float = 0.0
    squares: float = 0.0
    mean: float = 0.0
    moment: float = 0.0

    def with_value(self, value: float, keep: float) -> Decayed:
        weight = keep * self.weight + 1.0
        step = 1.0 / weight
        return Decayed(
            weight,
            keep * keep * self.squares + 1.0,
            self.mean + step * (value - self.mean),
            self.moment + step * (value * value - self.moment),
        )

    @property
    def error(self) -> float:
        """Standard error of the mean, infinite for less than two samples' worth."""
        if not self.squares:
            return math.inf
        samples = self.weight * self.weight / self.squares
        if samples < 1.5:
            return math.inf
        return math.sqrt(max(0.0, self.moment - self.mean * self.mean) / (samples - 1.0))


class PairEstimate(msgspec.Struct, frozen=True):
    """What ``samples`` checks of a pair showed; ``inherited`` of them built on blocks that were tainted before.

    A pair is used under several groups, and each promises something else: over the ``judged`` samples whose group has a bound on
    the first token, ``promised`` is that bound and ``spare`` by how much it was kept.
    """

    samples: int = 0
    inherited: int = 0
    judged: int = 0
    first_token: Decayed = Decayed()
    promised: Decayed = Decayed()
    spare: Decayed = Decayed()
    agreement: Decayed = Decayed()
    divergence: Decayed = Decayed()

    def with_sample(self, sample: DriftSample, least: float | None, half_life_samples: float) -> PairEstimate:
        """``least`` is the bound on the first token that this sample's plan should have kept (None: none)."""
        keep = 0.5 ** (1.0 / half_life_samples)
        first = float(sample.first_token)
        return PairEstimate(
            samples=self.samples + 1,
            inherited=self.inherited + sample.inherited,
            judged=self.judged + (least is not None),
            first_token=self.first_token.with_value(first, keep),
            promised=self.promised if least is None else self.promised.with_value(least, keep),
            spare=self.spare if least is None else self.spare.with_value(first - least, keep),
            agreement=self.agreement.with_value(sample.agreement, keep),
            divergence=self.divergence.with_value(sample.divergence, keep),
        )


def left(estimate: PairEstimate, bound: DriftBound, min_samples: int) -> str:
    """Which bound the estimate has left, by more than its error, in words; empty if none, or with fewer than ``min_samples``."""
    if estimate.judged >= min_samples and estimate.spare.mean + CERTAIN * estimate.spare.error < 0:
        promised = estimate.promised.mean
        return f"first token {promised + estimate.spare.mean:.2f}, bound {promised:.2f}, {estimate.judged} checks"
    if estimate.samples < min_samples:
        return ""
    seen, least = estimate.agreement, bound.min_agreement
    if least is not None and seen.mean + CERTAIN * seen.error < least:
        return f"agreement {seen.mean:.2f}, bound {least:.2f}, {estimate.samples} checks"
    seen, most = estimate.divergence, bound.max_divergence
    if most is not None and seen.mean - CERTAIN * seen.error > most:
        return f"divergence {seen.mean:.3g} nats, bound {most:.3g}, {estimate.samples} checks"
    return ""
