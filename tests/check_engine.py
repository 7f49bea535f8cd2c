"""The engine contract, part one: every plan shape computes what the oracle says (docs/design.md section 7).

``check_engine(make_engine, arch)`` runs it for any engine. KV and logits are compared first (largest difference at most 1e-4 of the
scale, float32), then greedy tokens: one may differ only where the oracle's two best logits are closer than 1e-3, and at most one
in a hundred. Part two, how an engine behaves step by step, is ``check_engine_steps.py``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import oracle
import torch
from engine_harness import (
    NUM_LAYERS,
    SHARED_DEPTH,
    TAPS,
    Bench,
    Heard,
    MakeEngine,
    Recorder,
    arrivals,
    computed,
    contexts,
    exact,
    family,
    greedy,
    partial,
    plan_of,
    prompt,
    request,
    run_until_idle,
    token_wise,
)
from oracle import State
from torch import Tensor

from kvkin.kv.generation import Sampling
from kvkin.kv.plan import PlanKind, ReusePlan, TokenRows

TOLERANCE = 1e-4
NEAR_TIE = 1e-3
MAX_NEAR_TIES = 0.01


@dataclass
class Tally:
    """Greedy tokens compared, and those that differed at a near tie."""

    positions: int = 0
    near_ties: int = 0

    def close(self) -> None:
        assert self.near_ties <= MAX_NEAR_TIES * self.positions, f"{self.near_ties} of {self.positions} tokens differ"


@dataclass(frozen=True)
class Geometry:
    """Block size, chunk size, tokens of the context and of the whole prompt."""

    block_size: int
    chunk_tokens: int
    context: int
    total: int


GEOMETRIES = (
    Geometry(8, 16, 40, 41),  # a suffix of one token; the last chunk of the context is short
    Geometry(8, 8, 48, 61),  # one block a chunk; the suffix of two chunks starts with the unaligned tail
    Geometry(16, 512, 64, 71),  # one chunk
    Geometry(16, 16, 16, 35),  # a context of exactly one block, a suffix longer than it
    Geometry(1, 4, 1, 6),  # a context of one token
)

# Each shape: geometry -> (receiver, plan, whether the result must equal a private prefill).
Shape = tuple[str, ReusePlan, bool]
SHAPES: dict[str, Callable[[Geometry], Shape]] = {}


def shape(function: Callable[[Geometry], Shape]) -> Callable[[Geometry], Shape]:
    SHAPES[function.__name__] = function
    return function


def _over(geometry: Geometry, *context: Any) -> ReusePlan:
    return plan_of(*context, computed(geometry.context, geometry.total))


@shape
def private(g: Geometry) -> Shape:
    return "receiver", plan_of(computed(0, g.total)), True


@shape
def private_in_two_segments(g: Geometry) -> Shape:
    return "receiver", _over(g, computed(0, g.context)), True


@shape
def exact_reuse(g: Geometry) -> Shape:
    return "receiver", _over(g, exact(0, g.context, "twin")), True


@shape
def exact_from_two_nodes(g: Geometry) -> Shape:
    return "receiver", _over(g, exact(0, g.context, "twin", "receiver")), True


@shape
def shared_prefix(g: Geometry) -> Shape:
    group = (SHARED_DEPTH, NUM_LAYERS)
    return "upper", _over(g, partial(0, g.context, group, "sender", kind=PlanKind.SHARED_PREFIX)), True


@shape
def shared_prefix_below_the_split(g: Geometry) -> Shape:
    group = (SHARED_DEPTH - 1, NUM_LAYERS)
    return "upper", _over(g, partial(0, g.context, group, "sender", kind=PlanKind.SHARED_PREFIX)), True


@shape
def partial_middle(g: Geometry) -> Shape:
    return "receiver", _over(g, partial(0, g.context, (1, 3), "sender")), False


@shape
def partial_lowest(g: Geometry) -> Shape:
    return "receiver", _over(g, partial(0, g.context, (0, 2), "sender")), False


@shape
def partial_highest(g: Geometry) -> Shape:
    return "receiver", _over(g, partial(0, g.context, (3, NUM_LAYERS), "sender")), False


@shape
def partial_one_layer(g: Geometry) -> Shape:
    return "receiver", _over(g, partial(0, g.context, (3, 4), "sender")), False


@shape
def partial_with_e_of_another_node(g: Geometry) -> Shape:
    return "receiver", _over(g, partial(0, g.context, (2, 4), "sender", "other")), False


@shape
def everything_reused_inexactly(g: Geometry) -> Shape:
    return "receiver", _over(g, exact(0, g.context, "sender")), False


@shape
def token_wise_some(g: Geometry) -> Shape:
    rows = sorted({0, g.context - 1, *range(3, g.context // 2, 3)} & set(range(g.context)))
    return "receiver", _over(g, token_wise(0, g.context, rows, "sender")), False


@shape
def token_wise_late(g: Geometry) -> Shape:
    """Chunks without a row come before the one that has some."""
    return "receiver", _over(g, token_wise(0, g.context, range(max(0, g.context - 3), g.context), "sender")), False


@shape
def token_wise_all(g: Geometry) -> Shape:
    return "receiver", _over(g, token_wise(0, g.context, range(g.context), "sender")), True


@shape
def agent_turn(g: Geometry) -> Shape:
    """Own KV, another agent's reply under one group, new text, a third one's reply under another, token rows, the suffix."""
    b = g.block_size
    if g.context < 5 * b:
        return partial_middle(g)
    segments = (
        exact(0, b, "twin"),
        partial(b, 2 * b, (1, 3), "sender"),
        computed(2 * b, 3 * b),
        partial(3 * b, 4 * b, (2, NUM_LAYERS), "other"),
        token_wise(4 * b, g.context, [4 * b, 4 * b + 2, g.context - 1], "sender"),
    )
    return "receiver", _over(g, *segments), False


# --- comparing -----------------------------------------------------------------------------------------------------------


def assert_close(found: Tensor, wanted: Tensor, what: str) -> None:
    assert found.shape == wanted.shape, f"{what}: {tuple(found.shape)} instead of {tuple(wanted.shape)}"
    if not wanted.numel():
        return
    bound = TOLERANCE * max(1.0, float(wanted.abs().max()))
    difference = float((found.float() - wanted.float()).abs().max())
    # written so that a NaN fails
    assert difference <= bound, f"{what} differ by {difference:.2e}, allowed {bound:.2e}"


def assert_kv(bench: Bench, space: Any, wanted: State) -> None:
    """KV of every token that has some: prompt + generated - 1."""
    for layer in range(wanted.num_layers):
        keys, values = bench.kv(space, layer, wanted.num_tokens)
        assert_close(keys, wanted.keys[layer], f"keys of layer {layer}")
        assert_close(values, wanted.values[layer], f"values of layer {layer}")


def assert_taps(bench: Bench, space: Any, wanted: State, plan: ReusePlan, taps: Sequence[int]) -> None:
    """E taps are the oracle's hidden states; computed segments and generated tokens have them all, and nothing is claimed
    that was never computed."""
    spans = [(segment.start, segment.stop) for segment in plan.segments]
    spans.append((plan.num_tokens, wanted.num_tokens))
    for layer in taps:
        for index, (start, stop) in enumerate(spans):
            states = wanted.hidden[layer][start:stop]
            tapped = bench.e(space, layer, start, stop) if start < stop else None
            if tapped is not None:
                assert_close(tapped, states, f"E of layer {layer} in [{start}, {stop})")
            elif start < stop:
                known = not states.isnan().any()
                rows = index < len(plan.segments) and isinstance(plan.segments[index].recompute, TokenRows)
                assert rows or not known, f"E of layer {layer} in [{start}, {stop}) was computed and is not offered"


def assert_tokens(heard: Heard, choices: Sequence[int], logits: Tensor, tally: Tally) -> None:
    """Log probabilities first, then the choices; the oracle was led along the engine's own tokens."""
    assert len(heard.tokens) == len(choices)
    for index, logprob in enumerate(heard.logprobs):
        wanted = torch.log_softmax(logits[index], dim=-1)
        assert logprob is not None
        found = torch.full_like(wanted, float("nan"))
        tokens, values = zip(*logprob.top, strict=True)
        found[torch.tensor(tokens)] = torch.tensor(values)
        assert_close(found, wanted, f"log probabilities of token {index}")
        tally.positions += 1
        if heard.tokens[index] != choices[index]:
            best = torch.topk(logits[index], 2).values
            assert best[0] - best[1] < NEAR_TIE, f"token {index} is {heard.tokens[index]}, oracle: {choices[index]}"
            tally.near_ties += 1


def assert_result(
    bench: Bench,
    heard: Heard,
    model: Any,
    token_ids: Sequence[int],
    plan: ReusePlan,
    held: Mapping[str, State],
    tally: Tally,
) -> State:
    """A finished request equals the oracle's execution of its plan: KV, logits, taps, tokens. Returns the oracle's state."""
    assert heard.error is None, heard.error
    assert heard.result is not None
    assert (heard.ends, heard.prefilled) == (1, 1)
    prefilled = oracle.execute(model, token_ids, plan, held)
    state, choices, logits = oracle.generate(model, prefilled, len(heard.tokens), heard.tokens)
    assert_kv(bench, heard.space, state)
    assert_tokens(heard, choices, logits, tally)
    assert_taps(bench, heard.space, state, plan, TAPS)
    assert heard.result.token_ids == tuple(heard.tokens)
    assert_each_token_counted_once(heard, plan)
    for unit, keys, values in heard.written:  # what was announced was final
        rows = slice(unit.start, unit.stop) if unit.rows is None else list(unit.rows)
        final = bench.kv(heard.space, unit.layer, unit.stop)
        assert torch.equal(keys, final[0][rows]), unit
        assert torch.equal(values, final[1][rows]), unit
    return state


def run_case(
    make_engine: MakeEngine,
    models: Mapping[str, Any],
    token_ids: Sequence[int],
    held: Mapping[str, State],
    case: Shape,
    geometry: Geometry,
    tally: Tally,
    *,
    sampling: Sampling | None = None,
    seed: int = 0,
) -> None:
    """Run one plan alone, its data arriving most urgent first, and compare. ``held`` are contexts of ``token_ids``."""
    receiver, plan, must_be_private = case
    bench = make_engine(models, block_size=geometry.block_size, chunk_tokens=geometry.chunk_tokens)
    recorder = Recorder(bench)
    wanted = request("r", token_ids, plan, receiver, sampling=sampling or greedy())
    execution = bench.engine.submit(wanted, recorder)
    layout = bench.engine.layout(receiver)
    for arrival in arrivals(plan, execution, held, layout, random.Random(seed)):
        bench.engine.arrived("r", arrival)
    run_until_idle(bench)
    state = assert_result(bench, recorder.of("r"), models[receiver], token_ids, plan, held, tally)
    if must_be_private:
        alone = held[receiver]
        for layer in range(alone.num_layers):
            assert_close(state.keys[layer][: geometry.total], alone.keys[layer], f"private keys of layer {layer}")
            assert_close(state.values[layer][: geometry.total], alone.values[layer], f"private values of layer {layer}")
    assert_counters(recorder.of("r"), plan, execution.chunks)
    bench.engine.close()


def assert_counters(heard: Heard, plan: ReusePlan, chunks: Sequence[Any]) -> None:
    """Counts say what ran: the recomputed layers of every reused segment, and every row of every unit."""
    assert heard.counters is not None
    recomputed: dict[int, set[int]] = {}
    for chunk in chunks:
        if plan.segments[chunk.segment].sources and chunk.computes:
            recomputed.setdefault(chunk.segment, set()).update(range(chunk.first_layer, chunk.stop_layer))
    assert heard.counters.recomputed_layers == recomputed
    rows = sum(
        (chunk.stop - chunk.start if chunk.rows is None else len(chunk.rows)) * (chunk.stop_layer - chunk.first_layer)
        for chunk in chunks
    )
    assert heard.counters.computed_layer_tokens == rows
    positions = sum(
        sum(range(chunk.start, chunk.stop) if chunk.rows is None else chunk.rows)
        * (chunk.stop_layer - chunk.first_layer)
        for chunk in chunks
    )
    assert heard.counters.computed_positions == positions


def assert_each_token_counted_once(heard: Heard, plan: ReusePlan) -> None:
    """Every token of the prompt was cached, loaded or computed; without a cache, loaded are those of the segments that reuse."""
    counters = heard.counters
    assert counters is not None
    counted = (counters.cached_tokens, counters.loaded_tokens, counters.computed_tokens)
    assert sum(counted) == plan.num_tokens, counted
    # what a cache had may be of either kind
    assert 0 <= plan.reused_tokens - counters.loaded_tokens <= counters.cached_tokens, counted


def check_shape(make_engine: MakeEngine, arch: str, name: str, geometries: Sequence[Geometry] = GEOMETRIES) -> None:
    """One plan shape in every geometry (or some)."""
    tally = Tally()
    for seed, geometry in enumerate(geometries):
        run_tiny(make_engine, arch, name, geometry, tally, seed)
    tally.close()


def run_tiny(make_engine: MakeEngine, arch: str, name: str, geometry: Geometry, tally: Tally, seed: int) -> None:
    held, tokens = contexts(arch, geometry.total, seed), prompt(geometry.total, seed)
    run_case(make_engine, family(arch), tokens, held, SHAPES[name](geometry), geometry, tally, seed=seed)


def check_engine(make_engine: MakeEngine, arch: str) -> None:
    """Part one of the contract for one architecture, all of it."""
    for name in SHAPES:
        check_shape(make_engine, arch, name)
