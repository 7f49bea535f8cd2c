"""Checks for drift on a node, the pure part: when one runs, what it gives way to, what is dropped, how runs are compared."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvkin.decode_nodes.drift import (
    MAX_DIVERGENCE,
    MAX_TRIES,
    Check,
    Chosen,
    DriftCore,
    Dropped,
    Instruction,
    Report,
    RunEnded,
    RunFailed,
    StartRun,
    StopRun,
    Tick,
    WorkArrived,
    compare,
    divergence,
)
from kvkin.kv.plan import PlanKind
from kvkin.transport.node_messages import DriftCheck, DriftSource

IDLE_S = 0.5
SOURCE = DriftSource(b"s" * 16, "base", PlanKind.PARTIAL, (2, 5))


def logs(*probabilities: float) -> NDArray[np.float32]:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities)).astype(np.float32)


EVEN = logs(0.25, 0.25, 0.25, 0.25)


def check(name: str, tokens: tuple[int, ...] = (7, 8, 9), first: NDArray[np.float32] = EVEN, asked: int = 8) -> Check:
    return Check(name, "tuned", b"r" * 16, (1, 2, 3), 2, DriftCheck(asked, (SOURCE,)), tokens, first, True)


class Node:
    """A core, a clock, and what it has said."""

    def __init__(self, max_pending: int = 4) -> None:
        self.core, self.now = DriftCore(IDLE_S, max_pending), 10.0
        self.said: list[Instruction] = []

    def chosen(self, *names: str) -> None:
        for name in names:
            self.said += self.core.handle(Chosen(check(name), self.now))

    def idle(self, seconds: float, busy: bool = False) -> list[Instruction]:
        """Ticks every tenth of a second."""
        new: list[Instruction] = []
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += 0.1
            new += self.core.handle(Tick(self.now, busy))
        self.said += new
        return new

    def work(self) -> list[Instruction]:
        new = self.core.handle(WorkArrived(self.now))
        self.said += new
        return new

    def dropped(self) -> list[str]:
        return [one.request_id for one in self.said if isinstance(one, Dropped)]


def started(instructions: list[Instruction]) -> StartRun:
    (one,) = instructions
    assert isinstance(one, StartRun)
    return one


def test_a_check_runs_once_the_node_was_idle_for_long_enough() -> None:
    node = Node()
    assert node.idle(5) == []  # nothing to check
    node.chosen("a")
    assert node.idle(0.4) == []
    run = started(node.idle(0.2))
    assert run.check.request_id == "a"
    assert (node.core.waiting, node.core.running) == (0, 1)
    assert node.idle(5) == []  # one at a time, and it is running


def test_work_puts_it_off_from_when_it_ends() -> None:
    node = Node()
    node.chosen("a")
    node.idle(3, busy=True)
    assert node.idle(0.4) == []
    node.work()
    assert node.idle(0.4) == []
    started(node.idle(0.2))


def test_checks_run_in_order_and_one_at_a_time() -> None:
    node = Node()
    node.chosen("a", "b")
    first = started(node.idle(1))
    (report,) = node.core.handle(RunEnded(first.run_id, (7, 8, 9), EVEN))
    assert isinstance(report, Report)
    assert report.check.request_id == "a"
    assert started(node.idle(0.1)).check.request_id == "b"
    assert (node.core.done, node.core.dropped) == (1, 0)


def test_a_run_gives_way_and_begins_anew_as_another_run() -> None:
    node = Node()
    node.chosen("a", "b")
    first = started(node.idle(1))
    assert node.work() == [StopRun(first.run_id)]
    assert (node.core.waiting, node.core.running) == (2, 0)
    # what the stopped run still says is nobody's
    assert node.core.handle(RunEnded(first.run_id, (7,), EVEN)) == []
    assert node.core.handle(RunFailed(first.run_id, "cancelled")) == []
    again = started(node.idle(1))
    assert again.check is first.check
    assert again.run_id != first.run_id
    assert node.core.done == 0


@pytest.mark.parametrize("how", ["request", "busy"])
def test_one_that_never_gets_through_is_given_up(how: str) -> None:
    """ "busy" is everything that is no request: a pull from this node, a stop."""
    node = Node()
    node.chosen("a")
    for attempt in range(1, MAX_TRIES + 1):
        run = started(node.idle(1))
        said = node.work() if how == "request" else node.idle(0.1, busy=True)
        assert said[0] == StopRun(run.run_id)
        assert len(said) == 1 + (attempt == MAX_TRIES)
    assert node.dropped() == ["a"]
    assert node.idle(5) == []
    assert (node.core.waiting, node.core.running, node.core.dropped) == (0, 0, 1)


def test_the_oldest_goes_when_too_many_wait() -> None:
    node = Node(max_pending=2)
    node.chosen("a", "b", "c")
    assert node.dropped() == ["a"]
    run = started(node.idle(1))
    node.chosen("d")
    assert node.dropped() == ["a"]  # the one that runs does not wait
    node.work()
    assert node.dropped() == ["a", "b"]  # it is put back, as the oldest of all
    assert run.check.request_id == "b"
    assert started(node.idle(1)).check.request_id == "c"


def test_a_failed_run_is_dropped() -> None:
    node = Node()
    node.chosen("a", "b")
    run = started(node.idle(1))
    assert node.core.handle(RunFailed(run.run_id, "out of memory")) == [Dropped("a", "out of memory")]
    assert started(node.idle(1)).check.request_id == "b"
    assert node.core.handle(RunFailed("drift/unknown/1", "late")) == []


EVENTS = st.lists(st.sampled_from(["chosen", "work", "idle", "busy", "end", "fail", "late"]), max_size=60)


@given(EVENTS, st.integers(1, 3))
def test_nothing_is_lost_and_nothing_runs_beside_work(events: list[str], max_pending: int) -> None:
    """Whatever happens: every check ends at most once, bounds hold, a run begins in idle time only, and work stops it."""
    node = Node(max_pending)
    count, now_running, done = 0, "", 0
    for event in events:
        node.now += 0.3
        match event:
            case "chosen":
                count += 1
                new = node.core.handle(Chosen(check(f"c{count}"), node.now))
                assert not [one for one in new if not isinstance(one, Dropped)]
            case "work" | "busy":
                new = node.core.handle(WorkArrived(node.now) if event == "work" else Tick(node.now, True))
                assert [one for one in new if isinstance(one, StopRun)] == (
                    [StopRun(now_running)] if now_running else []
                )
                now_running = ""
            case "idle":
                new = node.core.handle(Tick(node.now, False))
                if new:
                    assert not now_running
                    now_running = started(new).run_id
            case "end":
                new = node.core.handle(RunEnded(now_running, (1,), EVEN))
                assert len(new) == bool(now_running)
                done += len(new)
                now_running = ""
            case "fail":
                new = node.core.handle(RunFailed(now_running, "x"))
                assert len(new) == bool(now_running)
                now_running = ""
            case _:
                assert node.core.handle(RunEnded("drift/c0/1", (1,), EVEN)) == []
                new = []
        node.said += new
        assert node.core.running == bool(now_running)
        assert node.core.waiting <= max_pending
        assert count == node.core.waiting + node.core.running + node.core.done + node.core.dropped
    assert node.core.done == done
    assert node.core.dropped == len(node.dropped()) == len(set(node.dropped()))


# --- comparing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reused", "private", "agreement"),
    [
        ((1, 2, 3, 4), (1, 2, 3, 4), 1.0),
        ((1, 2, 3, 4), (1, 2, 9, 4), 0.5),  # behind the difference nothing counts
        ((1, 2, 3, 4), (9, 2, 3, 4), 0.0),
        ((1,), (1,), 1.0),
    ],
)
def test_agreement_counts_up_to_the_first_difference(
    reused: tuple[int, ...], private: tuple[int, ...], agreement: float
) -> None:
    sample = compare(check("a", reused), private, EVEN)
    assert (sample.agreement, sample.tokens) == (agreement, len(reused))
    assert (sample.request_id, sample.receiver, sample.sources) == ("a", b"r" * 16, (SOURCE,))


def test_no_more_tokens_are_generated_than_there_are_to_compare() -> None:
    assert check("a", (1, 2, 3), asked=8).num_tokens == 3
    assert check("a", (1, 2, 3), asked=2).num_tokens == 2
    assert check("a", (), asked=8).num_tokens == 1


def test_of_a_sampled_request_the_most_likely_first_tokens_are_compared() -> None:
    ours, same, other = logs(0.2, 0.5, 0.3), logs(0.1, 0.8, 0.1), logs(0.6, 0.3, 0.1)
    for private, agrees in ((same, True), (other, False)):
        sample = compare(check("a", (), ours), (1,), private)
        assert (sample.first_token, sample.agreement, sample.tokens) == (agrees, float(agrees), 1)


def test_divergence_is_kl_of_private_from_reused() -> None:
    private, reused = logs(0.5, 0.25, 0.25), logs(0.25, 0.25, 0.5)
    wanted = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert divergence(private, reused) == pytest.approx(wanted, rel=1e-6)
    assert divergence(private, private) == 0.0
    # the other way round it is another figure
    skewed = logs(0.7, 0.2, 0.1)
    assert divergence(private, skewed) != pytest.approx(divergence(skewed, private), rel=1e-3)


@pytest.mark.parametrize(
    ("private", "reused", "wanted"),
    [
        (logs(1.0, 0.0), logs(1.0, 0.0), 0.0),  # what is impossible in both weighs nothing
        (logs(0.0, 1.0), logs(0.5, 0.5), math.log(2)),
        (logs(0.5, 0.5), logs(1.0, 0.0), MAX_DIVERGENCE),
        (logs(0.5, 0.5), np.full(2, np.nan, np.float32), MAX_DIVERGENCE),
        (np.full(2, np.nan, np.float32), logs(0.5, 0.5), MAX_DIVERGENCE),
    ],
)
def test_divergence_is_finite(private: NDArray[np.float32], reused: NDArray[np.float32], wanted: float) -> None:
    assert divergence(private, reused) == pytest.approx(wanted, abs=1e-6)


def test_nan_never_agrees() -> None:
    broken = np.full(4, np.nan, np.float32)
    sample = compare(check("a", (), broken), (1,), broken)
    assert (sample.first_token, sample.agreement, sample.divergence) == (False, 0.0, MAX_DIVERGENCE)


@given(st.lists(st.floats(0.001, 1), min_size=2, max_size=30), st.lists(st.floats(0.001, 1), min_size=30, max_size=30))
def test_divergence_is_never_negative_and_zero_for_equals(ours: list[float], theirs: list[float]) -> None:
    one, other = np.array(ours), np.array(theirs[: len(ours)])
    private, reused = logs(*(one / one.sum())), logs(*(other / other.sum()))
    assert 0 <= divergence(private, reused) <= MAX_DIVERGENCE
    assert divergence(private, private) == 0
