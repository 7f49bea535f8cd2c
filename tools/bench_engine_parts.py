"""The parts of ``kvkin bench engine`` that time one engine at a time, ``overhead`` and ``stall``, and what all parts share."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvkin.configs.schema import ClusterConfig
from kvkin.kv.errors import ConfigError, KvkinError
from kvkin.tools.bench_engine_children import Child, running
from kvkin.tools.bench_engine_messages import ArmName, Decode, Event, Prefill, Setup, Stall, Stalled, Timed
from kvkin.tools.bench_engine_options import ModelOptions, Sizes
from kvkin.tools.bench_engine_result import overhead_result, stall_result
from kvkin.tools.bench_engine_setup import START_S, Bench, Shape, arrange, chosen_group, differing, family_name
from kvkin.tools.eta import Eta

Say = Callable[[str], None]

FIRST_TOKEN_ID = 100  # below are special tokens
ANSWER_S = 900.0  # of one run; a process that dies is noticed at once
DECODE_PROMPT = 32
"""Prompt tokens of requests that decode side by side."""
DECODE_ROOM = 480
"""Tokens that requests may generate while an event goes on: more than it takes steps."""
SAME = ("compiled", "prefix_caching", "block_size", "max_num_batched_tokens", "max_num_seqs", "kv_blocks", "dtype")
"""What two vLLM engines must have alike to be compared."""


@dataclass(frozen=True)
class Measured:
    """What a part found: results, what each engine was resolved to, and more settings for the report."""

    results: dict[str, Any]
    engines: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)


class TokenIds:
    """Random prompts, no two alike: no prefix cache has any of them."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._random, self._range = random.Random(seed), range(min(FIRST_TOKEN_ID, vocab_size - 1), vocab_size)

    def take(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.choices(self._range, k=count))


def arms_of(bench: Bench, arms: Sequence[ArmName], node: str, threads: int) -> dict[str, Child]:
    """A child for each arm, all of them the node ``node``."""
    return {arm: Child(arm, Setup(arm, str(bench.file), node), threads, bench.logs / f"{arm}.log") for arm in arms}


def made_on(bench: Bench) -> dict[str, Any]:
    return {"device": bench.family.device, "dtype": bench.family.compute_dtype}


def check_alike(engines: Mapping[str, Mapping[str, Any]]) -> None:
    """KvkinError if the vLLM engines were not resolved to the same."""
    found = differing({name: each for name, each in engines.items() if "max_num_seqs" in each}, SAME)
    if found:
        told = "; ".join(f"{name}: {each.get(key)}" for key in found for name, each in engines.items())
        raise KvkinError(f"the arms differ in {', '.join(found)} ({told}): they cannot be compared")


# --- overhead ----------------------------------------------------------------------------------------------------------------


async def overhead(config: ClusterConfig, models: ModelOptions, sizes: Sizes, seed: int, say: Say) -> Measured:
    """Prefill and decode of each engine by itself, in rounds."""
    family = family_name(config, models.model)
    model = models.model or config.families[family].base
    (context,) = sizes.context
    longest = max(context + 1, DECODE_PROMPT + sizes.new_tokens)
    together = max(longest, sizes.requests * (DECODE_PROMPT + sizes.new_tokens))
    bench = arrange(config, family, (model,), Shape(longest, together, sizes.requests, sizes.threads, sizes.compiled))
    names: tuple[ArmName, ...] = ("plain", "kvkin", "transformers")
    children = arms_of(bench, names, bench.decode_node(model), sizes.threads)
    ids = TokenIds(bench.family.vocab_size, seed)
    say(f"loading {model} in {len(names)} processes{', compiling' if sizes.compiled else ''}; logs in {bench.logs}")
    async with running(list(children.values()), START_S):
        engines = {name: child.settings for name, child in children.items()}
        check_alike(engines)
        for child in children.values():
            await _work(child, ids.take(context), [ids.take(DECODE_PROMPT) for _ in range(sizes.requests)], 4)
        eta, rounds = Eta("rounds", sizes.repeats, 0, say), []
        for number in range(sizes.repeats):
            prompt = ids.take(context)
            prompts = [ids.take(DECODE_PROMPT) for _ in range(sizes.requests)]
            measured: dict[tuple[str, str], Timed] = {}
            # the order alternates, so that drift hits no arm more than another
            for name in reversed(names) if number % 2 else names:
                for work, timed in (await _work(children[name], prompt, prompts, sizes.new_tokens)).items():
                    measured[name, work] = timed
            rounds.append(measured)
            eta.step()
    settings = {"model": model, "decode_prompt_tokens": DECODE_PROMPT}
    return Measured(overhead_result(rounds, names, seed), engines, settings, made_on(bench))


async def _work(
    child: Child, prompt: tuple[int, ...], prompts: Sequence[tuple[int, ...]], new_tokens: int
) -> dict[str, Timed]:
    """Both kinds of work on one engine. KvkinError if its prefix cache helped."""
    done = {
        "prefill": await child.ask(Prefill(prompt), Timed, ANSWER_S),
        "decode": await child.ask(Decode(tuple(prompts), new_tokens), Timed, ANSWER_S),
    }
    for work, timed in done.items():
        if timed.cached_tokens:
            raise KvkinError(f"{child.name}: {timed.cached_tokens} tokens of new prompts came from a cache ({work})")
    return done


# --- stall -------------------------------------------------------------------------------------------------------------------


async def stall(config: ClusterConfig, models: ModelOptions, sizes: Sizes, seed: int, say: Say) -> Measured:
    """The time between tokens of a decoding batch under each event, in rounds, on one engine."""
    family = family_name(config, models.model)
    model = models.model or config.families[family].base
    (context,) = sizes.context
    size = config.families[family].block_size
    if context % size:
        raise ConfigError("--context", f"{context} is not a multiple of the block size", f"k x {size}, k >= 1")
    if sizes.budget % size or sizes.budget <= sizes.requests:
        problem = f"{sizes.budget} tokens a step, for {sizes.requests} decoding requests"
        raise ConfigError("--budget", problem, f"a multiple of {size}, more than the requests")
    longest = max(sizes.longest + 1, DECODE_PROMPT + DECODE_ROOM)
    shape = Shape(
        longest=longest,
        kv_tokens=longest + sizes.requests * (DECODE_PROMPT + DECODE_ROOM),
        side_by_side=sizes.requests + 1,
        threads=sizes.threads,
        compiled=sizes.compiled,
        chunk_tokens=sizes.budget,
        step_tokens=sizes.budget,
    )
    bench = arrange(config, family, (model,), shape)
    group = chosen_group(bench.family, bench.family.config.base, model, models.group)
    (child,) = arms_of(bench, ("kvkin",), bench.decode_node(model), sizes.threads).values()
    ids = TokenIds(bench.family.vocab_size, seed)
    events: tuple[Event, ...] = ("alone", "prefill", "partial")

    async def happen(event: Event, number: int) -> Stalled:
        decoding = tuple(ids.take(DECODE_PROMPT) for _ in range(sizes.requests))
        prompt = ids.take(sizes.longest)
        command = Stall(decoding, DECODE_ROOM, event, prompt, context, group, sizes.new_tokens, number)
        return await child.ask(command, Stalled, ANSWER_S)

    say(f"loading {model}{', compiling' if sizes.compiled else ''}; logs in {bench.logs}")
    async with running([child], START_S):
        for event in events:
            await happen(event, 0)
        eta, rounds = Eta("rounds", sizes.repeats, 0, say), []
        for number in range(sizes.repeats):
            order = tuple(reversed(events)) if number % 2 else events
            rounds.append({event: await happen(event, number) for event in order})
            eta.step()
        engines = {child.name: child.settings}
    settings = {"model": model, "group": [group.start, group.stop], "decode_prompt_tokens": DECODE_PROMPT}
    return Measured(stall_result(rounds, seed), engines, settings, made_on(bench))
