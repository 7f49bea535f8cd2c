"""Running estimates of one pair's drift, and when it has left a bound for certain. Pure arithmetic (router/drift.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from kvkin.router.drift_evidence import Evidence, above, below

if TYPE_CHECKING:
    from kvkin.router.drift_types import DriftBound
    from kvkin.transport.node_messages import DriftSample


Count = Annotated[int, Meta(ge=0, le=2**53)]


class Decayed(msgspec.Struct, frozen=True):
    """A mean over samples of which each counts ``keep`` times as much as the one after it; ``weight`` is the sum of the weights."""

    weight: float = 0.0
    mean: float = 0.0

    def with_value(self, value: float, keep: float) -> Decayed:
        weight = keep * self.weight + 1.0
        return Decayed(weight, self.mean + (value - self.mean) / weight)


class PairEstimate(msgspec.Struct, frozen=True, omit_defaults=True):
    """What ``samples`` checks of a pair showed; ``inherited`` of them had KV of other pairs in them, too, and say nothing of this one.

    A pair is used under several groups, and each promises something else: over the ``judged`` samples with a bound on the first
    token, ``promised`` is that bound and ``spare`` by how much it was kept. ``against_*`` is the evidence that a bound was left.
    """

    samples: Count = 0
    inherited: Count = 0
    judged: Count = 0
    first_token: Decayed = Decayed()
    promised: Decayed = Decayed()
    spare: Decayed = Decayed()
    agreement: Decayed = Decayed()
    divergence: Decayed = Decayed()
    against_first_token: Evidence = Evidence()
    against_agreement: Evidence = Evidence()
    against_divergence: Evidence = Evidence()

    @property
    def own(self) -> int:
        """Samples that say something of this pair."""
        return self.samples - self.inherited

    def without_evidence(self) -> PairEstimate:
        """The figures alone: what was decided needs no evidence any more."""
        fresh = Evidence()
        return msgspec.structs.replace(
            self, against_first_token=fresh, against_agreement=fresh, against_divergence=fresh
        )

    def with_other(self) -> PairEstimate:
        """One more sample that had KV of other pairs in it."""
        return msgspec.structs.replace(self, samples=self.samples + 1, inherited=self.inherited + 1)

    def with_sample(self, sample: DriftSample, bound: DriftBound, half_life_samples: float) -> PairEstimate:
        """One more sample of this pair alone, which should have kept ``bound``."""
        keep = 0.5 ** (1.0 / half_life_samples)
        first, agreement, divergence = float(sample.first_token), sample.agreement, sample.divergence
        estimate = msgspec.structs.replace(
            self,
            samples=self.samples + 1,
            first_token=self.first_token.with_value(first, keep),
            agreement=self.agreement.with_value(agreement, keep),
            divergence=self.divergence.with_value(divergence, keep),
        )
        least = bound.least_first_token([source.group for source in sample.sources])
        if least:  # a bound of 0 is always kept: there is nothing to bet on
            estimate = msgspec.structs.replace(
                estimate,
                judged=self.judged + 1,
                promised=self.promised.with_value(least, keep),
                spare=self.spare.with_value(first - least, keep),
                against_first_token=self.against_first_token.after(below(first, least)),
            )
        if bound.min_agreement:
            against = self.against_agreement.after(below(agreement, bound.min_agreement))
            estimate = msgspec.structs.replace(estimate, against_agreement=against)
        if bound.max_divergence is not None:
            against = self.against_divergence.after(above(divergence, bound.max_divergence))
            estimate = msgspec.structs.replace(estimate, against_divergence=against)
        return estimate


def left(estimate: PairEstimate, bound: DriftBound, min_samples: int, false_alarms: float) -> str:
    """Which bound the pair has left, in words; empty if none, or with fewer than ``min_samples``.

    Of a pair that keeps its bounds the probability that this is ever said, however often it is asked, is at most ``false_alarms``:
    each of its bounds has an equal share of that.
    """
    enough = bound.num_bounds / false_alarms
    if estimate.judged >= min_samples and estimate.against_first_token.value >= enough and estimate.spare.mean < 0:
        promised = estimate.promised.mean
        return f"first token {promised + estimate.spare.mean:.2f}, bound {promised:.2f}, {estimate.judged} checks"
    if estimate.own < min_samples:
        return ""
    mean, least = estimate.agreement.mean, bound.min_agreement
    if least is not None and estimate.against_agreement.value >= enough and mean < least:
        return f"agreement {mean:.2f}, bound {least:.2f}, {estimate.own} checks"
    mean, most = estimate.divergence.mean, bound.max_divergence
    if most is not None and estimate.against_divergence.value >= enough and mean > most:
        return f"divergence {mean:.3g} nats, bound {most:.3g}, {estimate.own} checks"
    return ""
