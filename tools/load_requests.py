"""The requests of a load as plain data: what is sent when to which model, decided before anything is sent.

A workload (``load_agents.py``, ``load_trace.py``) makes a list of :class:`LoadRequest`, ``load_runner.py`` sends it. Lengths, models and
times do not depend on the arm that is measured, token ids do (``load_tokens.py``): arms are compared on the same load, and none of
them warms another.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from kvkin.kv.errors import ConfigError

Assignment = Literal["round-robin", "random", "per-session"]
Turns = Literal["after-answer", "on-time"]


class EarlierAnswer(msgspec.Struct, frozen=True):
    """Tokens [start, start + length) of a prompt are the answer to request ``number``."""

    number: int
    start: int
    length: int


class LoadRequest(msgspec.Struct, frozen=True):
    """One request. ``at_s`` is its arrival from the start of the point; with ``after`` it is the earliest one, and the request is
    due once the answer to request ``after`` has come and the think time has passed.

    ``token_ids`` is the whole prompt; at the places of ``answers`` it holds tokens that stand in for answers not known beforehand.
    ``truncated`` counts prompt tokens that were left out because the models' context has no room for them.
    """

    number: int
    session: int
    turn: int
    model: str
    at_s: float
    token_ids: tuple[int, ...]
    output_tokens: int
    after: int | None = None
    answers: tuple[EarlierAnswer, ...] = ()
    truncated: int = 0


class Load(msgspec.Struct, frozen=True):
    """A point's requests, ``requests[i].number == i``; new ones arrive until ``horizon_s``."""

    requests: tuple[LoadRequest, ...]
    horizon_s: float

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its answer."""
        return max((len(one.token_ids) + one.output_tokens for one in self.requests), default=0)


def with_answers(request: LoadRequest, answers: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """The prompt with the answers that came in their places. One of another length than asked for is left out: the stand-in stays."""
    ids = list(request.token_ids)
    for place in request.answers:
        answer = answers.get(place.number, ())
        if len(answer) == place.length:
            ids[place.start : place.start + place.length] = answer
    return tuple(ids)


def model_for(models: Sequence[str], how: Assignment, session: int, turn: int, seed: str) -> str:
    """Who answers a turn: the next model with every turn (each session begins with another one), any, or one a session."""
    match how:
        case "round-robin":
            return models[(session + turn) % len(models)]
        case "per-session":
            return models[session % len(models)]
        case "random":
            return random.Random(f"model {seed} {session} {turn}").choice(list(models))


class Span(msgspec.Struct, frozen=True):
    """A number of tokens or turns, drawn evenly from [low, high] for each session or turn."""

    low: int
    high: int

    def draw(self, generator: random.Random) -> int:
        return generator.randint(self.low, self.high)


def parse_span(text: str, key: str, least: int = 1, most: int = 1 << 30) -> Span:
    """``8`` or ``300-700``. Raises ConfigError under ``key``."""
    low, dash, high = text.partition("-")
    allowed = f"a number such as 8 or a range such as 4-6, from {least} to {most}"
    # Python refuses to read numbers of thousands of digits, with an error of its own
    if len(text) > 64 or not low.isdecimal() or (dash and not high.isdecimal()):
        raise ConfigError(key, f"{text!r} is neither a number nor a range", allowed)
    span = Span(int(low), int(high or low))
    if not least <= span.low <= span.high <= most:
        raise ConfigError(key, f"{text!r} is no range of usable numbers", allowed)
    return span
