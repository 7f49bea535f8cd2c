"""Loads as plain data: token ids, arrivals, models, and sessions of agents; what must be equal between arms, and what must not."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tiny_cluster import BASE, make_family

from kvkin.configs.families import resolve_family
from kvkin.configs.loader import parse_cluster
from kvkin.kv.errors import ConfigError
from kvkin.kv.hashing import block_hashes, root_hash
from kvkin.tools.load_agents import AgentShape, agent_load
from kvkin.tools.load_arrivals import Arrivals, arrivals
from kvkin.tools.load_requests import (
    EarlierAnswer,
    Load,
    LoadRequest,
    Span,
    model_for,
    parse_span,
    with_answers,
)
from kvkin.tools.load_tokens import TokenSource, family_vocabulary, range_vocabulary

IDS = range(100, 1000)
MODELS = ("a", "b", "c")
ROOT = root_hash(b"tokenizer", 16, "scope")


def source(salt: str = "", seed: int = 0) -> TokenSource:
    return TokenSource(IDS, seed, salt)


# --- token ids -----------------------------------------------------------------------------------------------------------


@given(st.text(max_size=8), st.text(max_size=8), st.integers(0, 9), st.integers(0, 64), st.integers(0, 64))
def test_a_name_has_one_sequence_of_ids(salt: str, kind: str, number: int, shorter: int, more: int) -> None:
    long = source(salt).draw(shorter + more, kind, number)
    assert source(salt).draw(shorter, kind, number) == long[:shorter]
    assert set(long) <= set(IDS)
    assert all(type(token) is int for token in long)


@given(
    st.lists(
        st.tuples(st.text(max_size=4), st.text(max_size=4), st.integers(0, 300)), min_size=2, max_size=6, unique=True
    )
)
def test_other_names_have_other_ids(names: list[tuple[str, str, int]]) -> None:
    drawn = [source(salt).draw(16, kind, number) for salt, kind, number in names]
    assert len(set(drawn)) == len(names)


def test_names_are_framed() -> None:
    assert source("ab").draw(16, "c") != source("a").draw(16, "bc")
    assert source().draw(16, "k", 1, 23) != source().draw(16, "k", 12, 3)
    assert source(seed=1).draw(16, "k") != source(seed=2).draw(16, "k")


def test_ids_do_not_change_between_versions() -> None:
    """They come out of SHAKE-128, not out of a generator that a library may change."""
    assert source("s", 7).draw(4, "hash", 3) == (522, 380, 416, 793)


def test_vocabulary_of_a_range() -> None:
    assert list(range_vocabulary((3, 25))) == list(range(3, 25))
    for bad in ((3, 10), (30, 3), (-1, 100)):
        with pytest.raises(ConfigError, match="--vocab"):
            range_vocabulary(bad)


def test_vocabulary_of_a_family_has_no_special_ids(tmp_path: Path) -> None:
    data: dict[str, Any] = {
        "families": make_family(tmp_path),
        "nodes": {
            "r": {"role": "router"},
            "p": {"role": "prefill", "port": 0, "models": [BASE]},
            "d": {"role": "decode", "port": 0, "models": [BASE]},
        },
    }
    config = parse_cluster(yaml.safe_dump(data), "test")
    ids = family_vocabulary(config, "tiny")
    resolved = resolve_family(config, "tiny", models=(BASE,))
    special = {token for token, _ in resolved.tokenizer.added} | set(resolved.base.eos_ids)
    assert special
    assert set(ids.tolist()) == set(range(resolved.tokenizer.num_ids)) - special
    assert max(ids) < resolved.vocab_size

    (tmp_path / "base" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="has no tokenizer"):
        family_vocabulary(config, "tiny")


# --- arrivals ------------------------------------------------------------------------------------------------------------

rates = st.floats(0.01, 100)


@given(rates, st.integers(1, 50))
def test_fixed_arrivals_are_even(rate: float, limit: int) -> None:
    found = arrivals("fixed", rate, None, limit, "s")
    assert found.times_s == tuple(number / rate for number in range(limit))
    assert found.horizon_s == limit / rate


@given(
    rates,
    st.floats(0.1, 50),
    st.none() | st.integers(1, 40),
    st.sampled_from(["fixed", "poisson"]),
    st.text(max_size=4),
)
def test_arrivals_end_in_time(rate: float, duration_s: float, limit: int | None, kind: Any, seed: str) -> None:
    duration_s /= rate
    found = arrivals(kind, rate, duration_s, limit, seed)
    assert list(found.times_s) == sorted(found.times_s)
    assert all(0 <= at_s < found.horizon_s <= duration_s for at_s in found.times_s)
    assert limit is None or len(found.times_s) <= limit
    # it ends early only because enough came
    assert found.horizon_s == duration_s or len(found.times_s) == limit


@given(rates, rates, st.text(max_size=4))
def test_a_rate_only_stretches_the_process(slow: float, fast: float, seed: str) -> None:
    one, other = (arrivals("poisson", rate, None, 30, seed) for rate in (slow, fast))
    assert one.times_s == pytest.approx([at_s * fast / slow for at_s in other.times_s])
    assert one.horizon_s == pytest.approx(other.horizon_s * fast / slow)


def test_poisson_gaps_are_exponential() -> None:
    """Mean and spread of an exponential distribution are alike: a fixed process would have no spread at all."""
    times = arrivals("poisson", 4.0, None, 4000, "s").times_s
    gaps = np.diff([0.0, *times])
    assert gaps.mean() == pytest.approx(0.25, rel=0.06)
    assert gaps.std() == pytest.approx(0.25, rel=0.1)
    assert arrivals("poisson", 4.0, None, 9, "s") != arrivals("poisson", 4.0, None, 9, "t")


@given(rates, st.integers(1, 40), st.text(max_size=4))
def test_a_counted_poisson_process_keeps_its_rate(rate: float, limit: int, seed: str) -> None:
    """Few arrivals of a free process would make a point of another rate than the one it is named after."""
    found = arrivals("poisson", rate, None, limit, seed)
    assert len(found.times_s) == limit
    assert found.horizon_s == limit / rate
    assert found.times_s[0] > 0
    assert found.times_s[-1] < found.horizon_s


# --- models and spans ----------------------------------------------------------------------------------------------------


def test_round_robin_changes_the_model_with_every_turn() -> None:
    names = [[model_for(MODELS, "round-robin", session, turn, "s") for turn in range(4)] for session in range(3)]
    assert names == [["a", "b", "c", "a"], ["b", "c", "a", "b"], ["c", "a", "b", "c"]]


def test_one_model_a_session_or_any() -> None:
    assert {model_for(MODELS, "per-session", 4, turn, "s") for turn in range(5)} == {"b"}
    drawn = [model_for(MODELS, "random", 0, turn, "s") for turn in range(60)]
    assert set(drawn) == set(MODELS)
    assert drawn == [model_for(MODELS, "random", 0, turn, "s") for turn in range(60)]
    assert drawn != [model_for(MODELS, "random", 0, turn, "t") for turn in range(60)]


@given(st.integers(1, 99), st.integers(0, 99), st.integers())
def test_spans(low: int, more: int, seed: int) -> None:
    span = parse_span(f"{low}-{low + more}", "--x")
    assert span == Span(low, low + more)
    assert low <= span.draw(random.Random(seed)) <= low + more
    assert parse_span(str(low), "--x") == Span(low, low)


@pytest.mark.parametrize("text", ["", "-", "4-", "-4", "6-4", "0", "0-3", "four", "1.5", "1-2-3", "²"])
def test_bad_spans_name_their_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--context-tokens: .* such as 4-6"):
        parse_span(text, "--context-tokens")


# --- sessions of agents --------------------------------------------------------------------------------------------------

spans = st.tuples(st.integers(1, 20), st.integers(0, 20)).map(lambda pair: Span(pair[0], sum(pair)))
shapes = st.builds(
    AgentShape,
    turns=st.tuples(st.integers(1, 4), st.integers(0, 3)).map(lambda pair: Span(pair[0], sum(pair))),
    system_tokens=st.integers(0, 40),
    context_tokens=spans,
    documents=st.integers(0, 3),
    new_tokens=spans,
    output_tokens=spans,
)
starts = st.lists(st.floats(0, 100), min_size=1, max_size=5).map(lambda times: Arrivals(tuple(sorted(times)), 101.0))


def load_of(shape: AgentShape, when: Arrivals, salt: str = "", turns: Any = "after-answer", seed: str = "0") -> Load:
    return agent_load(shape, when, source(salt), seed, MODELS, "round-robin", turns, 2.5)


def by_session(load: Load) -> list[list[LoadRequest]]:
    return [list(group) for _, group in itertools.groupby(load.requests, key=lambda one: one.session)]


@given(shapes, starts)
def test_a_session_is_one_growing_context(shape: AgentShape, when: Arrivals) -> None:
    load = load_of(shape, when)
    assert [one.number for one in load.requests] == list(range(len(load.requests)))
    sessions = by_session(load)
    assert len(sessions) == len(when.times_s)
    for at_s, session in zip(when.times_s, sessions, strict=True):
        assert shape.turns.low <= len(session) <= shape.turns.high
        first = session[0]
        assert (first.after, first.answers, first.at_s) == (None, (), at_s)
        for earlier, later in itertools.pairwise(session):
            length = len(earlier.token_ids)
            assert later.token_ids[:length] == earlier.token_ids
            new = len(later.token_ids) - length - earlier.output_tokens
            assert shape.new_tokens.low <= new <= shape.new_tokens.high
            assert later.after == earlier.number
            assert later.answers == (*earlier.answers, EarlierAnswer(earlier.number, length, earlier.output_tokens))
            assert later.model != earlier.model
    # the system prompt is everybody's
    assert len({one.token_ids[: shape.system_tokens] for one in load.requests}) == 1


@given(shapes, starts, st.text(min_size=1, max_size=3))
def test_arms_differ_in_nothing_but_token_ids(shape: AgentShape, when: Arrivals, salt: str) -> None:
    mine, other = load_of(shape, when), load_of(shape, when, salt)
    assert load_of(shape, when) == mine
    for one, two in zip(mine.requests, other.requests, strict=True):
        assert (one.model, one.at_s, one.after, one.answers, one.output_tokens) == (
            two.model,
            two.at_s,
            two.after,
            two.answers,
            two.output_tokens,
        )
        assert len(one.token_ids) == len(two.token_ids)
    blocks = [
        {hashed for one in load.requests for hashed in block_hashes(one.token_ids, ROOT, 16)} for load in (mine, other)
    ]
    assert not blocks[0] & blocks[1]


@given(shapes, starts)
def test_turns_on_time_do_not_wait(shape: AgentShape, when: Arrivals) -> None:
    for at_s, session in zip(when.times_s, by_session(load_of(shape, when, turns="on-time")), strict=True):
        assert [one.at_s for one in session] == pytest.approx([at_s + 2.5 * turn for turn in range(len(session))])
        assert all(one.after is None and not one.answers for one in session)


@given(starts, st.text(min_size=1, max_size=3))
def test_a_seed_changes_lengths(when: Arrivals, seed: str) -> None:
    shape = AgentShape(context_tokens=Span(1, 10_000))
    lengths = [[len(one.token_ids) for one in load_of(shape, when, seed=each).requests] for each in ("", seed)]
    assert lengths[0] != lengths[1]


def test_documents_are_shared_or_not() -> None:
    when = Arrivals(tuple(map(float, range(12))), 12.0)
    shape = AgentShape(system_tokens=8, context_tokens=Span(20, 30), documents=2)

    def readers(shape: AgentShape) -> list[tuple[int, ...]]:
        return [session[0].token_ids[: 8 + 20] for session in by_session(load_of(shape, when))]

    assert len(set(readers(shape))) == 2
    assert len(set(readers(AgentShape(system_tokens=8, context_tokens=Span(20, 30))))) == 12


@given(shapes, starts, st.randoms(use_true_random=False))
def test_answers_take_their_places(shape: AgentShape, when: Arrivals, generator: random.Random) -> None:
    load = load_of(shape, when)
    answers = {one.number: tuple(generator.choices(range(50), k=one.output_tokens)) for one in load.requests}
    for one in load.requests:
        ids = with_answers(one, answers)
        assert len(ids) == len(one.token_ids)
        places = [place for place in one.answers for place in range(place.start, place.start + place.length)]
        assert all(ids[at] == one.token_ids[at] for at in range(len(ids)) if at not in places)
        for place in one.answers:
            assert ids[place.start : place.start + place.length] == answers[place.number]
        # a prompt goes on exactly where the one before ended
        if one.after is not None:
            earlier = with_answers(load.requests[one.after], answers)
            assert ids[: len(earlier) + len(answers[one.after])] == earlier + answers[one.after]


def test_an_answer_of_another_length_is_not_put_in() -> None:
    request = LoadRequest(1, 0, 1, "a", 0.0, (1, 2, 3, 4), 1, 0, (EarlierAnswer(0, 1, 2),))
    assert with_answers(request, {0: (8, 9)}) == (1, 8, 9, 4)
    assert with_answers(request, {0: (8,)}) == (1, 2, 3, 4)
    assert with_answers(request, {}) == (1, 2, 3, 4)


def test_longest_counts_the_answer() -> None:
    request = LoadRequest(0, 0, 0, "a", 0.0, (1, 2, 3), 5)
    assert Load((request,), 1.0).longest == 8
    assert Load((), 1.0).longest == 0
