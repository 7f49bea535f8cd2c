"""What the engine contract suite (``check_engine.py``) is made of: families, plans, arrivals, and one engine under test.

``Bench`` is what an engine offers beside its public interface, so that a test can step it and look at its KV; the suite takes a
``MakeEngine`` that builds one. Arrivals are made of the *oracle's* KV, packed here by the words of ``kv/layout.py``.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import oracle
import torch
from numpy.typing import NDArray
from oracle import State
from tiny_models import VOCAB_SIZE, WEIGHT_STD, randomize, tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvkin.engines.api import Arrival, Counters, Engine, EngineRequest, Result
from kvkin.kv.execution import PlanExecution, Unit
from kvkin.kv.generation import Sampling, TokenLogprob
from kvkin.kv.layout import KVLayout
from kvkin.kv.plan import Holder, LayerGroup, LayerSource, PlanKind, ReusePlan, Segment, TokenRows
from kvkin.kv.provenance import exact_provenance
from kvkin.kv.pulls import E_LAYER

NUM_LAYERS = 5
SHARED_DEPTH = 2  # layers [0, 2) of "upper" are those of "sender"
TAPS = (1, 2, 4)
# Models whose layers have different windows, or that have a window only where the config says so.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 2}),
    "mixtral-window": ("mixtral", {"sliding_window": 10}),
}
# More of the same by other engines' benches: variants, and families that are not made of full fine-tunes.
MORE_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {}
FAMILIES: dict[str, dict[str, Any]] = {}


class Bench(Protocol):
    """One engine under test."""

    engine: Engine

    def step(self) -> bool:
        """Let the engine do its next step; False if it has nothing to do until something arrives."""

    def kv(self, space: Any, layer: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first tokens of a workspace, each (tokens, kv_heads, head_dim)."""

    def e(self, space: Any, layer: int, start: int, stop: int) -> Tensor | None:
        """E taps of tokens [start, stop) at ``layer``, (tokens, hidden), or None where the engine has not got them all."""


class MakeEngine(Protocol):
    def __call__(
        self, models: Mapping[str, Any], *, block_size: int, chunk_tokens: int, eos: frozenset[int] = frozenset()
    ) -> Bench: ...


# --- families ------------------------------------------------------------------------------------------------------------


@functools.cache
def family(arch: str) -> dict[str, Any]:
    """Models of one tiny family by name. ``twin`` has the receiver's weights; ``upper`` the sender's in its lower layers."""
    if arch in FAMILIES:
        return FAMILIES[arch]
    torch.set_num_threads(1)  # on a busy machine a second thread makes such small matrices ten times slower
    receiver = _tiny(arch)
    randomize(receiver, seed=1)
    sender, other = (_tuned(receiver, seed, range(NUM_LAYERS)) for seed in (2, 3))
    upper = _tuned(sender, 4, range(SHARED_DEPTH, NUM_LAYERS))
    return {"receiver": receiver, "twin": receiver, "sender": sender, "other": other, "upper": upper}


def _tiny(arch: str) -> Any:
    base, overrides = {**VARIANTS, **MORE_VARIANTS}.get(arch, (arch, {}))
    config = tiny_config(base, NUM_LAYERS, **overrides)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def _tuned(base: Any, seed: int, layers: range) -> Any:
    """A copy of ``base`` whose ``layers`` were changed, as a fine-tune would."""
    model = copy.deepcopy(base)
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        for parameter in model.model.layers[layer].parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * WEIGHT_STD / 2
    return model


@functools.cache
def contexts(arch: str, num_tokens: int, seed: int = 0) -> dict[str, State]:
    """What every member of a tiny family has of ``prompt(num_tokens, seed)`` after a private prefill."""
    return oracle.contexts(family(arch), prompt(num_tokens, seed))


def prompt(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.randrange(3, VOCAB_SIZE) for _ in range(num_tokens))


# --- plans ---------------------------------------------------------------------------------------------------------------


def holder(node: str) -> Holder:
    return Holder(node, exact_provenance(node.encode()))


def source(start: int, stop: int, node: str) -> LayerSource:
    return LayerSource(LayerGroup(start, stop), holder(node))


def computed(start: int, stop: int) -> Segment:
    return Segment(start, stop)


def exact(start: int, stop: int, *nodes: str, num_layers: int = NUM_LAYERS) -> Segment:
    """All layers pulled, split evenly over ``nodes``."""
    edges = [num_layers * index // len(nodes) for index in range(len(nodes) + 1)]
    sources = tuple(source(*edges[index : index + 2], node) for index, node in enumerate(nodes))
    return Segment(start, stop, sources, start, kind=PlanKind.EXACT)


def partial(
    start: int,
    stop: int,
    group: tuple[int, int],
    node: str,
    e_node: str = "",
    kind: PlanKind = PlanKind.PARTIAL,
    num_layers: int = NUM_LAYERS,
) -> Segment:
    """KV outside of ``group`` from ``node``, hidden states entering it from ``e_node`` (or ``node``)."""
    first, last = group
    sources = [source(low, high, node) for low, high in ((0, first), (last, num_layers)) if low < high]
    e = {"e_layer": first, "e_holder": holder(e_node or node)} if first else {}
    return Segment(start, stop, tuple(sources), start, recompute=LayerGroup(first, last), kind=kind, **e)


def token_wise(start: int, stop: int, rows: Sequence[int], node: str, num_layers: int = NUM_LAYERS) -> Segment:
    sources = (source(0, num_layers, node),)
    return Segment(start, stop, sources, start, recompute=TokenRows(tuple(rows)), kind=PlanKind.TOKEN_WISE)


def plan_of(*segments: Segment) -> ReusePlan:
    return ReusePlan(segments)


# --- bytes ---------------------------------------------------------------------------------------------------------------


def kv_bytes(state: State, layer: int, start: int, stop: int, layout: KVLayout) -> NDArray[np.uint8]:
    """Blocks of ``layer`` for tokens [start, stop): block after block, in each the keys, then the values."""
    assert (stop - start) % layout.block_size == 0
    parts = [
        plane[layer][first : first + layout.block_size]
        for first in range(start, stop, layout.block_size)
        for plane in (state.keys, state.values)
    ]
    return _bytes(parts, layout)


def e_bytes(state: State, layer: int, start: int, stop: int, layout: KVLayout) -> NDArray[np.uint8]:
    assert (stop - start) % layout.block_size == 0
    return _bytes([state.hidden[layer][start:stop]], layout)


def _bytes(parts: list[Tensor], layout: KVLayout) -> NDArray[np.uint8]:
    flat = torch.cat([part.reshape(-1) for part in parts]).to(getattr(torch, layout.dtype))
    return flat.view(torch.uint8).numpy().copy()


def arrivals(
    plan: ReusePlan, execution: PlanExecution, held: Mapping[str, State], layout: KVLayout, shuffle: random.Random
) -> list[Arrival]:
    """Everything that the plan pulls, most urgent first; each arrival cut into parts at block boundaries by ``shuffle``."""
    made = []
    for number, segment in enumerate(plan.segments):
        nodes = {
            layer: entry.holder.node
            for entry in segment.sources
            for layer in range(entry.layers.start, entry.layers.stop)
        }
        for index, layer in execution.pull_pairs(number):
            chunk = execution.chunks[index]
            edges = {chunk.start, chunk.stop}
            edges |= {edge for edge in range(chunk.start, chunk.stop, layout.block_size) if shuffle.random() < 0.5}
            cuts = sorted(edges)
            if layer == E_LAYER:
                assert segment.e_holder is not None
                assert segment.e_layer is not None
                pack = functools.partial(e_bytes, held[segment.e_holder.node], segment.e_layer)
            else:
                pack = functools.partial(kv_bytes, held[nodes[layer]], layer)
            parts = [(low, pack(low, high, layout)) for low, high in itertools.pairwise(cuts)]
            shuffle.shuffle(parts)
            if len(parts) > 1 and parts[0][0] == chunk.start:
                parts.reverse()
            made.append(Arrival(index, layer, tuple(parts)))
    return sorted(made, key=lambda arrival: (arrival.layer, arrival.chunk))


# --- listening -----------------------------------------------------------------------------------------------------------


@dataclass
class Heard:
    """Everything that a sink was told of one request."""

    units: list[Unit] = field(default_factory=list)
    written: list[tuple[Unit, Tensor, Tensor]] = field(default_factory=list)
    prefilled: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    result: Result | None = None
    space: Any = None
    counters: Counters | None = None
    error: Exception | None = None
    ends: int = 0


class Recorder:
    """An ``EngineSink`` that keeps what it hears, per request and as one sequence of (request id, what)."""

    def __init__(self, bench: Bench | None = None) -> None:
        self.bench = bench
        self.heard: dict[str, Heard] = {}
        self.sequence: list[tuple[str, str]] = []

    def of(self, request_id: str) -> Heard:
        return self.heard.setdefault(request_id, Heard())

    def unit_done(self, request_id: str, unit: Unit, space: Any) -> None:
        heard = self._note(request_id, "unit")
        heard.units.append(unit)
        if self.bench is not None:
            keys, values = self.bench.kv(space, unit.layer, unit.stop)
            rows = slice(unit.start, unit.stop) if unit.rows is None else list(unit.rows)
            heard.written.append((unit, keys[rows].clone(), values[rows].clone()))

    def prefilled(self, request_id: str) -> None:
        self._note(request_id, "prefilled").prefilled += 1

    def tokens(self, request_id: str, index: int, token_id: int, text: str, logprob: TokenLogprob | None) -> None:
        heard = self._note(request_id, "token")
        assert index == len(heard.tokens), "tokens come in order"
        heard.tokens.append(token_id)
        heard.logprobs.append(logprob)
        heard.text += text

    def finished(self, result: Result, space: Any, counters: Counters) -> None:
        heard = self._note(result.request_id, "end")
        heard.result, heard.space, heard.counters = result, space, counters
        heard.ends += 1

    def failed(self, request_id: str, error: Exception) -> None:
        heard = self._note(request_id, "end")
        heard.error = error
        heard.ends += 1

    def _note(self, request_id: str, what: str) -> Heard:
        heard = self.of(request_id)
        assert not heard.ends, f"{request_id} heard {what} after its end"
        self.sequence.append((request_id, what))
        return heard


def greedy(max_tokens: int = 4, **options: Any) -> Sampling:
    """Greedy decoding that ignores EOS and reports the log probability of every token of the vocabulary."""
    return Sampling(**{"max_tokens": max_tokens, "ignore_eos": True, "logprobs": VOCAB_SIZE, **options})


def request(
    request_id: str, token_ids: Sequence[int], plan: ReusePlan, model: str = "receiver", **options: Any
) -> EngineRequest:
    sampling = options.get("sampling", greedy())
    taps, first = options.get("taps", TAPS), options.get("first_distribution", False)
    cache, root = options.get("engine_cache", True), options.get("root", b"")
    return EngineRequest(request_id, model, tuple(token_ids), plan, sampling, taps, first, cache, root)


def run_until_idle(bench: Bench, limit: int = 100_000) -> None:
    for _ in range(limit):
        if not bench.step():
            return
    raise AssertionError("the engine never comes to rest")


def step_until(bench: Bench, condition: Callable[[], bool], limit: int = 100_000) -> None:
    """Step until ``condition`` holds; an engine that comes to rest before that fails."""
    for _ in range(limit):
        if condition():
            return
        assert bench.step(), "the engine came to rest before the condition held"
    raise AssertionError("the condition never held")
