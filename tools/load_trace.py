"""Traces in the Mooncake format as a load. Pure but for ``read_trace``.

One JSON object a line: ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens), ``hash_ids``: one id for each 512 tokens of the
prompt, the last of them for what is left. Equal ids mean an equal prefix. Each id becomes a block of ``tokens_per_hash`` tokens,
always the same, so that prompts share prefixes as those of the trace did; output lengths shrink alike.

Format and traces: Mooncake (FAST'25), github.com/kvcache-ai/Mooncake.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvkin.kv.errors import ConfigError
from kvkin.tools.load_requests import Assignment, Load, LoadRequest, Turns, model_for
from kvkin.tools.load_tokens import TokenSource

# Tokens that one hash id stands for in a trace.
TRACE_BLOCK = 512
# A block that more requests than this begin with belongs to a prompt that many conversations share.
COMMON_REQUESTS = 64


class TraceLine(msgspec.Struct, frozen=True):
    """One request of a trace; other fields of the line are ignored."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class Link(msgspec.Struct, frozen=True):
    """A request's place among sessions. ``previous`` is the index of the request that it continues."""

    session: int
    turn: int
    previous: int | None


class TraceScale(msgspec.Struct, frozen=True):
    """How a trace becomes a load. ``max_prompt_tokens`` is what the models have room for besides the answer."""

    tokens_per_hash: int
    max_output_tokens: int
    max_prompt_tokens: int

    def prompt_tokens(self, line: TraceLine) -> int:
        """All full blocks, and of the last one as large a part as was filled, at least one token."""
        rest = line.input_length - (len(line.hash_ids) - 1) * TRACE_BLOCK
        return (len(line.hash_ids) - 1) * self.tokens_per_hash + max(1, rest * self.tokens_per_hash // TRACE_BLOCK)

    def output_tokens(self, line: TraceLine) -> int:
        return min(max(1, line.output_length * self.tokens_per_hash // TRACE_BLOCK), self.max_output_tokens)


def read_trace(file: Path) -> list[TraceLine]:
    """All requests by time. Raises ConfigError with the line that cannot be used."""
    lines: list[TraceLine] = []
    decoder = msgspec.json.Decoder(TraceLine)
    try:
        with file.open("rb") as raw:
            for number, text in enumerate(raw, 1):
                if text.strip():
                    lines.append(_read_line(decoder, text, f"{file}, line {number}"))
    except FileNotFoundError:
        raise ConfigError("--trace", f"{file}: no such file", "a file of JSON lines in the Mooncake format") from None
    except OSError as error:
        raise ConfigError("--trace", f"{file} cannot be read: {error.strerror}", "a readable file") from None
    if not lines:
        raise ConfigError("--trace", f"{file} has no requests", "at least one line")
    return sorted(lines, key=lambda line: line.timestamp)


def _read_line(decoder: msgspec.json.Decoder[TraceLine], text: bytes, where: str) -> TraceLine:
    allowed = '{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}'
    try:
        line = decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(where, f"not a request: {error}", allowed) from None
    if line.input_length < 1 or line.output_length < 0 or line.timestamp < 0:
        raise ConfigError(where, "a length or the timestamp is too small", allowed)
    blocks = -(-line.input_length // TRACE_BLOCK)
    if len(line.hash_ids) != blocks:
        problem = f"{len(line.hash_ids)} hash_ids for input_length {line.input_length}"
        raise ConfigError(where, problem, f"one for each {TRACE_BLOCK} tokens, here {blocks}")
    return line


def find_sessions(lines: Sequence[TraceLine]) -> list[Link]:
    """Which request continues which: the latest earlier one all of whose full blocks this one begins with.

    The last id of a request mostly stands for a block that was not full, and that the next turn fills up: it has another id then.
    Blocks that very many requests begin with are a system prompt and make no session. Find sessions in a whole trace, not in a part.
    """
    trie: dict[tuple[int, int], int] = {}
    paths: list[list[int]] = []
    passes: Counter[int] = Counter()
    for line in lines:
        node, path = 0, list[int]()
        for hash_id in line.hash_ids:
            node = trie.setdefault((node, hash_id), len(trie) + 1)
            path.append(node)
        paths.append(path)
        passes.update(path)
    ends: dict[int, int] = {}  # a request's last full block, as a node of the trie -> the request
    links: list[Link] = []
    sessions = itertools.count()
    for index, path in enumerate(paths):
        previous = next((ends[node] for node in reversed(path) if node in ends), None)
        if previous is None:
            links.append(Link(next(sessions), 0, None))
        else:
            links.append(Link(links[previous].session, links[previous].turn + 1, previous))
        if len(path) > 1 and passes[path[-2]] <= COMMON_REQUESTS:
            ends[path[-2]] = index
    return links


def arrival_times(lines: Sequence[TraceLine], *, spread: bool) -> list[float]:
    """Seconds from the first request on, at the trace's own pace.

    ``spread``: requests with one timestamp are laid out evenly up to the next one. Published traces have coarse clocks (3 s);
    slowed down, one tick becomes a burst that never was.
    """
    begin = lines[0].timestamp
    stamps = [(line.timestamp - begin) / 1000 for line in lines]
    if not spread:
        return stamps
    times: list[float] = []
    groups = [(stamp, len(list(same))) for stamp, same in itertools.groupby(stamps)]
    for place, (stamp, count) in enumerate(groups):
        # after the last tick nothing tells its length: it is taken to be as long as the one before
        if place + 1 < len(groups):
            length_s = groups[place + 1][0] - stamp
        else:
            length_s = stamp - groups[place - 1][0] if place else 0.0
        times += [stamp + length_s * each / count for each in range(count)]
    return times


def native_rate(times_s: Sequence[float]) -> float:
    """Requests per second of a trace as it is; 0 if all of them came at once."""
    return (len(times_s) - 1) / times_s[-1] if times_s[-1] > 0 else 0.0


def trace_load(
    lines: Sequence[TraceLine],
    links: Sequence[Link],
    times_s: Sequence[float],
    speed_up: float,
    duration_s: float | None,
    scale: TraceScale,
    source: TokenSource,
    seed: str,
    models: Sequence[str],
    assign: Assignment,
    turns: Turns,
) -> Load:
    """The requests that arrive before ``duration_s`` once the trace runs ``speed_up`` times as fast."""
    requests: list[LoadRequest] = []
    horizon_s = trace_horizon_s(times_s, speed_up, duration_s)
    blocks: dict[int, tuple[int, ...]] = {}
    for number, (line, link) in enumerate(zip(lines, links, strict=True)):
        at_s = times_s[number] / speed_up
        if duration_s is not None and at_s >= duration_s:
            break
        for hash_id in line.hash_ids:
            if hash_id not in blocks:
                blocks[hash_id] = source.draw(scale.tokens_per_hash, "hash", hash_id)
        wanted = scale.prompt_tokens(line)
        ids = tuple(itertools.chain.from_iterable(blocks[hash_id] for hash_id in line.hash_ids))
        length = min(wanted, scale.max_prompt_tokens)
        request = LoadRequest(
            number=number,
            session=link.session,
            turn=link.turn,
            model=model_for(models, assign, link.session, link.turn, seed),
            at_s=at_s,
            token_ids=ids[:length],
            output_tokens=scale.output_tokens(line),
            after=link.previous if turns == "after-answer" else None,
            truncated=wanted - length,
        )
        requests.append(request)
    return Load(tuple(requests), horizon_s)


def trace_horizon_s(times_s: Sequence[float], speed_up: float, duration_s: float | None) -> float:
    """Until when requests arrive: a trace ends one mean gap after its last request."""
    rate = native_rate(times_s)
    end_s = (times_s[-1] + 1 / rate) / speed_up if rate else 0.0
    return end_s if duration_s is None else min(end_s, duration_s) if rate else duration_s
