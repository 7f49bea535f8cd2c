"""The synthetic agent workload: sessions in which models take turns over one growing context. Pure.

A session's first prompt is [system prompt, shared by all sessions][document][new text]; every further turn adds the answer and new
text, and goes to the next model. Without sharing each model computes the whole context for itself; this is the case that
DroidSpeak (its MetaGPT workload) and PrefillShare measure.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from kvkin.tools.load_arrivals import Arrivals
from kvkin.tools.load_requests import Assignment, EarlierAnswer, Load, LoadRequest, Span, Turns, model_for
from kvkin.tools.load_tokens import TokenSource


class AgentShape(msgspec.Struct, frozen=True):
    """What sessions look like, in tokens.

    ``documents``: how many different documents there are for sessions to read; 0: each session reads its own.
    """

    turns: Span = Span(4, 4)
    system_tokens: int = 32
    context_tokens: Span = Span(512, 512)
    documents: int = 0
    new_tokens: Span = Span(32, 32)
    output_tokens: Span = Span(16, 16)


def agent_load(
    shape: AgentShape,
    starts: Arrivals,
    source: TokenSource,
    seed: str,
    models: Sequence[str],
    assign: Assignment,
    turns: Turns,
    think_s: float,
) -> Load:
    """Sessions that begin at ``starts``. ``seed`` decides on lengths and models, ``source`` on token ids.

    Under ``on-time`` a session's turns arrive ``think_s`` apart whatever became of the earlier ones, and stand-ins take the places
    of answers; under ``after-answer`` each waits for the answer before it, which then is part of its prompt.
    """
    requests: list[LoadRequest] = []
    for session, start_s in enumerate(starts.times_s):
        requests += _session(shape, session, start_s, len(requests), source, seed, models, assign, turns, think_s)
    return Load(tuple(requests), starts.horizon_s)


def _session(
    shape: AgentShape,
    session: int,
    start_s: float,
    first: int,
    source: TokenSource,
    seed: str,
    models: Sequence[str],
    assign: Assignment,
    turns: Turns,
    think_s: float,
) -> list[LoadRequest]:
    generator = random.Random(f"session {seed} {session}")
    waits = turns == "after-answer"
    requests: list[LoadRequest] = []
    answers: list[EarlierAnswer] = []
    num_turns = shape.turns.draw(generator)
    document = generator.randrange(shape.documents) if shape.documents else session
    prompt = source.draw(shape.system_tokens, "system") + _document(shape, document, source, seed)
    for turn in range(num_turns):
        number = first + turn
        prompt += source.draw(shape.new_tokens.draw(generator), "new", session, turn)
        request = LoadRequest(
            number=number,
            session=session,
            turn=turn,
            model=model_for(models, assign, session, turn, seed),
            at_s=start_s if waits else start_s + turn * think_s,
            token_ids=prompt,
            output_tokens=shape.output_tokens.draw(generator),
            after=number - 1 if waits and turn else None,
            answers=tuple(answers) if waits else (),
        )
        requests.append(request)
        answers.append(EarlierAnswer(number, len(prompt), request.output_tokens))
        prompt += source.draw(request.output_tokens, "answer", session, turn)
    return requests


def _document(shape: AgentShape, document: int, source: TokenSource, seed: str) -> tuple[int, ...]:
    """A document is as long for everyone who reads it."""
    length = shape.context_tokens.draw(random.Random(f"document {seed} {document}"))
    return source.draw(length, "document", document)
