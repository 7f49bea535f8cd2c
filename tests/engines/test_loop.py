"""EngineLoop: what was posted runs in its order, and in the middle of a step only what is picked."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvkin.engines.loop import EngineLoop


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
