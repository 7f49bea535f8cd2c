"""Standstill: a timer that comes late says for how long, one that is a little late does not."""

from __future__ import annotations

import pytest

from kvkin.transport.attention import Standstill


def test_only_a_look_that_is_more_than_a_period_late_counts() -> None:
    standstill = Standstill(0.1, 50.0)
    assert standstill.look(50.1) == 0.0
    assert standstill.look(50.29) == 0.0
    assert standstill.look(58.39) == pytest.approx(8.0)
    assert standstill.look(58.49) == 0.0
