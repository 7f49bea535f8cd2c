"""EngineLoop: what was posted runs in its order, and in the middle of a step only what is picked."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from kvkin.engines.loop import EngineLoop, apart


class Named:
    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self._said = name, said

    def __call__(self) -> None:
        self._said.append(self.name)


def wanted(*names: str) -> Callable[[Callable[[], None]], bool]:
    return lambda action: isinstance(action, Named) and action.name in names


def test_sift_runs_what_is_wanted_and_leaves_the_rest_in_its_order() -> None:
    said: list[str] = []
    loop = EngineLoop(lambda: False, lambda: None)
    for name in "abcbd":
        loop.post(Named(name, said))
    assert loop.sift(wanted("b", "d"), 0)
    assert said == ["b", "b", "d"]
    loop.take_in()
    assert said == ["b", "b", "d", "a", "c"]


def test_sift_waits_for_what_is_posted_and_no_longer() -> None:
    said: list[str] = []
    loop = EngineLoop(lambda: False, lambda: None)
    loop.post(Named("a", said))
    assert not loop.sift(wanted("b"), 0.01)
    other = threading.Thread(target=lambda: loop.post(Named("b", said)))
    other.start()
    assert loop.sift(wanted("b"), 30), "it was posted"
    other.join()
    assert said == ["b"]
    loop.take_in()
    assert said == ["b", "a"]


def test_sift_does_not_wait_once_it_is_told_to_stop() -> None:
    said: list[str] = []
    loop = EngineLoop(lambda: False, lambda: None)
    loop.post(Named("stop", said))
    seen: list[Callable[[], None]] = []

    def look(action: Callable[[], None]) -> bool:
        seen.append(action)
        return False

    assert not loop.sift(look, 1e6, lambda: bool(seen))
    assert not said


def test_what_an_action_posts_is_not_lost() -> None:
    said: list[str] = []
    loop = EngineLoop(lambda: False, lambda: None)

    def again() -> None:
        said.append("first")
        loop.post(Named("second", said))

    loop.post(again)
    assert loop.sift(lambda action: action is again, 0)
    assert loop.sift(wanted("second"), 0)
    assert said == ["first", "second"]


def test_what_runs_apart_has_a_thread_of_its_own_that_ends() -> None:
    thread = apart(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_what_runs_apart_raises_here() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(ZeroDivisionError):
        apart(lambda: 1 // 0)
    with pytest.raises(KeyboardInterrupt):
        apart(interrupted)


def test_no_openmp_threads_stay_behind() -> None:
    """Idle ones would count against those of the engine's own thread."""
    program = """
import os
import time
import torch
from kvkin.engines.loop import apart
threads = lambda: len(os.listdir("/proc/self/task"))
work = lambda: (torch.ones(1 << 20).exp_(), threads())[1]
torch.set_num_threads(3)
before = threads()
during = apart(work)
deadline = time.monotonic() + 20
while threads() > before and time.monotonic() < deadline:
    os.sched_yield()
print(before, during, threads())
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    before, during, after = map(int, ran.stdout.split())
    assert during >= before + 3  # the thread itself, and two that work for it
    assert after == before
