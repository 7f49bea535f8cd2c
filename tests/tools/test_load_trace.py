"""Traces in the Mooncake format: read, found to be sessions, and turned into prompts that share what the trace's prompts shared."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkin.kv.errors import ConfigError
from kvkin.kv.hashing import block_hashes, root_hash
from kvkin.tools.load_requests import Load
from kvkin.tools.load_tokens import TokenSource
from kvkin.tools.load_trace import (
    COMMON_REQUESTS,
    Link,
    TraceLine,
    TraceScale,
    arrival_times,
    find_sessions,
    native_rate,
    read_trace,
    trace_horizon_s,
    trace_load,
)

ROOT = root_hash(b"tokenizer", 16, "scope")
SCALE = TraceScale(tokens_per_hash=32, max_output_tokens=40, max_prompt_tokens=1 << 20)
MODELS = ("a", "b", "c")
PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "mooncake_conversation_trace.jsonl"


def line(*hash_ids: int, at_ms: float = 0, rest: int = 512, output: int = 160) -> TraceLine:
    """A request whose last block holds ``rest`` tokens."""
    return TraceLine(at_ms, 512 * (len(hash_ids) - 1) + rest, output, hash_ids)


def load_of(lines: list[TraceLine], salt: str = "", scale: TraceScale = SCALE, **how: Any) -> Load:
    settings: dict[str, Any] = {"speed_up": 1.0, "duration_s": None, "turns": "after-answer", **how}
    return trace_load(
        lines,
        find_sessions(lines),
        arrival_times(lines, spread=False),
        scale=scale,
        source=TokenSource(range(1000), 0, salt),
        seed="0",
        models=MODELS,
        assign="round-robin",
        **settings,
    )


# a random forest of prefixes: each line goes on with a prefix of an earlier one
@st.composite
def traces(draw: st.DrawFn) -> list[TraceLine]:
    lines: list[TraceLine] = []
    fresh = itertools.count()
    at_ms = 0
    for _ in range(draw(st.integers(1, 12))):
        prefix: tuple[int, ...] = ()
        if lines and draw(st.booleans()):
            earlier = draw(st.sampled_from(lines)).hash_ids
            prefix = earlier[: draw(st.integers(0, len(earlier)))]
        new = tuple(next(fresh) for _ in range(draw(st.integers(0 if prefix else 1, 4))))
        at_ms += draw(st.sampled_from([0, 0, 1000, 3000]))
        # what is a full block of others is one here, too
        rest = draw(st.integers(1, 512)) if new else 512
        lines.append(line(*prefix, *new, at_ms=at_ms, rest=rest, output=draw(st.integers(0, 3000))))
    return lines


@given(traces())
def test_shared_hash_ids_are_shared_prefixes(lines: list[TraceLine]) -> None:
    """Prompts have the tokens of a hash id in common exactly where the trace has the id in common; so have their block hashes."""
    requests = load_of(lines).requests
    for (one, mine), (two, other) in itertools.combinations(zip(lines, requests, strict=True), 2):
        ids = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one.hash_ids, two.hash_ids, strict=False))
        shared = min(32 * len(list(ids)), len(mine.token_ids), len(other.token_ids))
        assert mine.token_ids[:shared] == other.token_ids[:shared]
        hashes = [block_hashes(request.token_ids, ROOT, 16) for request in (mine, other)]
        equal = sum(x == y for x, y in zip(*hashes, strict=False))
        assert equal == shared // 16 == len(set(hashes[0]) & set(hashes[1]))


@given(traces(), st.text(min_size=1, max_size=3))
def test_other_salts_share_nothing(lines: list[TraceLine], salt: str) -> None:
    blocks = [
        {hashed for request in load_of(lines, each).requests for hashed in block_hashes(request.token_ids, ROOT, 16)}
        for each in ("", salt)
    ]
    assert not blocks[0] & blocks[1]
    one, other = load_of(lines), load_of(lines, salt)
    assert [len(request.token_ids) for request in one.requests] == [
        len(request.token_ids) for request in other.requests
    ]


@given(traces())
def test_links_lead_back_to_a_first_turn(lines: list[TraceLine]) -> None:
    links = find_sessions(lines)
    assert len(links) == len(lines)
    for index, link in enumerate(links):
        if link.previous is None:
            assert link.turn == 0
            continue
        earlier = links[link.previous]
        assert link.previous < index
        assert (earlier.session, earlier.turn + 1) == (link.session, link.turn)
        full = lines[link.previous].hash_ids[:-1]
        assert full
        assert lines[index].hash_ids[: len(full)] == full
    # sessions are numbered as they come, without gaps
    first = list(dict.fromkeys(link.session for link in links))
    assert first == list(range(len(first)))


def test_a_chain_is_a_session_and_its_model_changes() -> None:
    lines = [
        line(1, 2, 3, rest=100),
        line(7, 8, 9),
        line(1, 2, 4, 5, rest=10),
        line(1, 2, 4, 6, 7),
        line(7, 1, 2, 3),
        line(1, 2, 4, 6, 8),
    ]
    links = find_sessions(lines)
    assert links == [
        Link(0, 0, None),
        Link(1, 0, None),
        Link(0, 1, 0),
        Link(0, 2, 2),
        Link(2, 0, None),  # the same ids after another one are other blocks
        Link(0, 3, 3),  # asked again with another end: it goes on with the longest there is
    ]
    assert [request.model for request in load_of(lines).requests] == ["a", "b", "b", "c", "c", "a"]
    assert [request.after for request in load_of(lines).requests] == [None, None, 0, 2, None, 3]
    assert [request.after for request in load_of(lines, turns="on-time").requests] == [None] * 6


def test_a_system_prompt_makes_no_session() -> None:
    common = [line(0, number) for number in range(1, COMMON_REQUESTS + 2)]
    chat = [line(0, 500, 501), line(0, 500, 502, 503)]
    links = find_sessions([*common, *chat])
    assert len({link.session for link in links[: len(common)]}) == len(common)
    assert links[-1] == Link(links[-2].session, 1, len(links) - 2)


def test_lengths_shrink_alike() -> None:
    assert SCALE.prompt_tokens(line(1, 2, 3, rest=512)) == 96
    assert SCALE.prompt_tokens(line(1, 2, 3, rest=102)) == 64 + 6
    assert SCALE.prompt_tokens(line(1, rest=1)) == 1
    assert SCALE.output_tokens(line(1, output=160)) == 10
    assert SCALE.output_tokens(line(1, output=0)) == 1
    assert SCALE.output_tokens(line(1, output=2000)) == 40


@given(traces(), st.integers(1, 200))
def test_prompts_are_cut_where_there_is_no_room(lines: list[TraceLine], room: int) -> None:
    whole = load_of(lines).requests
    cut = load_of(lines, scale=TraceScale(32, 40, room)).requests
    for one, other in zip(whole, cut, strict=True):
        assert other.token_ids == one.token_ids[:room]
        assert other.truncated == len(one.token_ids) - len(other.token_ids)


@given(traces(), st.floats(0.1, 50), st.none() | st.floats(0.5, 20))
def test_times_are_scaled_and_bounded(lines: list[TraceLine], speed_up: float, duration_s: float | None) -> None:
    load = load_of(lines, speed_up=speed_up, duration_s=duration_s)
    times = [(one.timestamp - lines[0].timestamp) / 1000 / speed_up for one in lines]
    expected = [at_s for at_s in times if duration_s is None or at_s < duration_s]
    assert [request.at_s for request in load.requests] == pytest.approx(expected)
    assert duration_s is None or load.horizon_s <= duration_s
    assert load.horizon_s >= max(request.at_s for request in load.requests)


@given(traces())
def test_spread_times_stay_between_timestamps(lines: list[TraceLine]) -> None:
    coarse, fine = arrival_times(lines, spread=False), arrival_times(lines, spread=True)
    assert fine == sorted(fine)
    assert coarse == [(one.timestamp - lines[0].timestamp) / 1000 for one in lines]
    for index, (before, after) in enumerate(zip(coarse, fine, strict=True)):
        assert after >= before
        following = next((stamp for stamp in coarse if stamp > before), None)
        assert following is None or after < following
        # who has a timestamp alone, or comes first under one, keeps it
        if index == 0 or coarse[index - 1] != before:
            assert after == before


def test_rate_and_horizon() -> None:
    times = [0.0, 1.0, 2.0, 6.0]
    assert native_rate(times) == 0.5
    assert trace_horizon_s(times, 2.0, None) == 4.0
    assert trace_horizon_s(times, 2.0, 3.0) == 3.0
    assert native_rate([0.0, 0.0]) == 0.0
    assert trace_horizon_s([0.0], 2.0, None) == 0.0
    assert trace_horizon_s([0.0], 2.0, 5.0) == 5.0
    assert arrival_times([line(1), line(2)], spread=True) == [0.0, 0.0]


# --- files ---------------------------------------------------------------------------------------------------------------

GOOD = {"timestamp": 27, "input_length": 600, "output_length": 5, "hash_ids": [0, 1], "more": "ignored"}


def test_reading_sorts_and_skips_empty_lines(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(GOOD) + "\n\n" + json.dumps(GOOD | {"timestamp": 3.5}))
    assert read_trace(file) == [TraceLine(3.5, 600, 5, (0, 1)), TraceLine(27, 600, 5, (0, 1))]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 2: not a request"),
        ("[]", "line 2: not a request"),
        ('{"timestamp": 1}', "line 2: not a request"),
        (json.dumps(GOOD | {"hash_ids": [0]}), "line 2: 1 hash_ids for input_length 600 .*here 2"),
        (json.dumps(GOOD | {"hash_ids": ["0", "1"]}), "line 2: not a request"),
        (json.dumps(GOOD | {"input_length": 0, "hash_ids": []}), "line 2: a length or the timestamp"),
        (json.dumps(GOOD | {"output_length": -1}), "line 2: a length or the timestamp"),
        (json.dumps(GOOD | {"timestamp": -1}), "line 2: a length or the timestamp"),
    ],
)
def test_bad_lines_are_named(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(GOOD) + "\n" + text + "\n")
    with pytest.raises(ConfigError, match=said):
        read_trace(file)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, said in (
        ("empty", "has no requests"),
        ("missing", "no such file"),
        (".", "cannot be read"),
        ("binary", "line 1"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_trace(tmp_path / name)


@pytest.mark.skipif(not PUBLISHED.exists(), reason=f"the published trace is not there: {PUBLISHED}")
def test_the_published_trace() -> None:
    """Mooncake's conversation trace: half of its requests continue another one, in chains of up to 43 turns."""
    lines = read_trace(PUBLISHED)
    links = find_sessions(lines)
    assert len(lines) == 12_031
    sizes = Counter(Counter(link.session for link in links).values())
    assert sum(link.previous is not None for link in links) == 3974
    assert (sizes[1], sizes[2], max(sizes)) == (6045, 1225, 43)
    times = arrival_times(lines, spread=True)
    assert len(set(times)) == len(lines)
    assert native_rate(times) == pytest.approx(3.4, abs=0.01)
    part = lines[:300]
    load = trace_load(
        part,
        links[:300],
        times[:300],
        1.0,
        None,
        SCALE,
        TokenSource(range(49_152), 0, ""),
        "0",
        MODELS,
        "round-robin",
        "on-time",
    )
    # everybody has the system prompt of one block, and whoever continues somebody has all of his full blocks
    assert len({request.token_ids[:32] for request in load.requests}) == 1
    for request, link in zip(load.requests, links, strict=False):
        if link.previous is not None:
            full = 32 * (len(lines[link.previous].hash_ids) - 1)
            assert request.token_ids[:full] == load.requests[link.previous].token_ids[:full]
