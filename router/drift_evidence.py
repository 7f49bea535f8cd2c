"""Evidence that a mean lies beyond its bound: a sequential test that may be looked at after every sample, for ever.

Each sample is a bet against the claim that the bound is kept: a stake wins ``gain`` times what it was where the sample lies beyond the
bound, and loses where it lies within. As long as the claim is true, the expected gain is at most 0 whatever came before, so capital
is a supermartingale, and the probability that it *ever* reaches k times its beginning is at most 1/k (Ville's inequality). Nothing
is assumed but that: no distribution, no independence, and each sample may have a bound of its own that is known before it.

- Betting on bounded means: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", Journal of the Royal
  Statistical Society B 86 (2024). What the best stake is depends on how far the mean is beyond its bound; a few are played at once.
- A pair may drift late, after thousands of samples that were fine and cost all capital. So some is held back: a share of
  1 / (n (n + 1)), 1 in sum, enters with sample n. A mixture over when the change came, as in Shin, Ramdas and Rinaldo,
  "E-detectors: a nonparametric framework for sequential change detection" (2024), with weights that add up to 1: theirs bound how often
  there is a false alarm, these whether there ever is one. A late drift costs 2 ln(n) more nats of evidence, no more.

Pure arithmetic (router/drift_estimate.py).
"""

from __future__ import annotations

import msgspec

STAKES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 0.95)
"""Shares of the capital that are risked, each by a player of its own."""

_LEAST_ROOM = 0.01  # a bound of 1 is left with the first sample below it; that is no infinite evidence
_MOST = 1e300


class Evidence(msgspec.Struct, frozen=True):
    """Capital of each player after so many ``rounds``, as a multiple of what all of it was in the beginning."""

    rounds: int = 0
    capital: tuple[float, ...] = (0.0,) * len(STAKES)

    def after(self, gain: float) -> Evidence:
        """``gain`` is at least -1, and at most 0 on average where the bound is kept."""
        rounds = self.rounds + 1
        entering = 1.0 / (rounds * (rounds + 1))
        return Evidence(
            rounds,
            tuple(
                min(_MOST, (capital + entering) * (1.0 + stake * gain))
                for capital, stake in zip(self.capital, STAKES, strict=True)
            ),
        )

    @property
    def value(self) -> float:
        """At most k at all times with a probability of at least 1 - 1/k, where the bound is kept."""
        return sum(self.capital) / len(STAKES)


def below(share: float, least: float) -> float:
    """Gain of a bet that shares (0 to 1) are below ``least`` (above 0) on average."""
    return (least - share) / max(1.0 - least, _LEAST_ROOM)


def above(value: float, most: float) -> float:
    """Gain of a bet that values (0 or more) are above ``most`` (above 0) on average."""
    return (value - most) / most
