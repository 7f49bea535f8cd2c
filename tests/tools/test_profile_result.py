"""The loss that a profile expects of a group: what all groups' answers say together."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from profile_samples import lineage, sample_profile

from kvkin.configs.profiles import Divergence, MeasuredGroup, Quality
from kvkin.tools.profile_report import verdict
from kvkin.tools.profile_result import steadied


def _group(start: int, divergence: float, loss: float | None) -> MeasuredGroup:
    quality = None if loss is None else Quality(score=1 - loss, loss=loss, loss_low=loss, loss_high=loss, n=9)
    measured = Divergence(mean=divergence, p10=divergence, p90=divergence, n=9)
    return MeasuredGroup(group=(start, start + 1), divergence=measured, quality=quality)


def test_what_rises_with_the_divergence_stays() -> None:
    groups = [_group(0, 0.3, 0.2), _group(1, 0.1, 0.01), _group(2, 0.2, 0.05)]
    assert [one.expected_loss for one in steadied(groups)] == pytest.approx([0.2, 0.01, 0.05])
    assert [one.loss for one in steadied(groups)] == pytest.approx([0.2, 0.01, 0.05])


def test_a_lucky_group_gets_its_neighbours_answers_and_none_is_better_than_a_full_prefill() -> None:
    groups = [_group(0, 0.30, -0.08), _group(1, 0.29, 0.04), _group(2, 0.31, 0.10), _group(3, 0.01, -0.02)]
    expected = [one.expected_loss for one in steadied(groups)]
    assert expected[3] == 0
    assert expected[0] == expected[1] == 0  # -0.08 and 0.04 together: below 0
    assert expected[2] == pytest.approx(0.10)


def test_groups_without_answers_expect_nothing() -> None:
    unanswered, answered = steadied([_group(0, 0.1, None), _group(1, 0.2, 0.1)])
    assert (unanswered.expected_loss, unanswered.loss) == (None, None)
    assert answered.expected_loss == pytest.approx(0.1)


def test_the_choice_keeps_its_promise_more_often_than_by_each_groups_own_loss() -> None:
    """Groups whose true loss rises with their divergence, measured with the noise of a few dozen answers."""
    rng = np.random.default_rng(3)
    truth = np.linspace(0.0, 0.12, 25)
    worse = {"own": 0.0, "expected": 0.0}
    for _ in range(200):
        measured = truth + rng.normal(0, 0.03, 25)
        groups = [_group(number, 0.1 + number, float(loss)) for number, loss in enumerate(measured)]
        expected = [one.expected_loss for one in steadied(groups)]
        # the cheapest group within the bound: here the more divergent the cheaper
        for key, losses in (("own", measured), ("expected", expected)):
            within = [number for number, loss in enumerate(losses) if loss is not None and loss <= 0.05]
            worse[key] += truth[max(within)] - 0.05
    assert worse["own"] / 200 > 0.02
    assert abs(worse["expected"] / 200) < 0.01


def test_the_verdict_says_how_sure_it_is() -> None:
    profile = sample_profile("a", lineage("a"), "b", lineage("b"))
    assert profile.chosen is not None
    assert verdict(profile).startswith("Recompute layers [2, 4) (2 of 6 layers, 33%): the loss is 2.0%, within 5%.")

    def with_upper(bound: float) -> str:
        groups = tuple(
            msgspec.structs.replace(one, quality=msgspec.structs.replace(one.quality, loss_high=bound, n=40))
            if one.quality is not None
            else one
            for one in profile.groups
        )
        return verdict(msgspec.structs.replace(profile, groups=groups))

    assert "do not rule out" not in with_upper(0.049)
    assert with_upper(0.19).endswith(
        "Its own 40 answers do not rule out 19.0%: more of them (--answer-samples) say more."
    )
