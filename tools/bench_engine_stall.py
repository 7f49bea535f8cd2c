"""Do requests that decode stall while another one's context is recomputed? One event of ``kvkin bench engine stall``, in a child process.

A batch decodes on vLLM under kvkin. Then a request comes: as a private prefill, which vLLM cuts into chunks of its token budget, or as a
partial plan whose data is all in memory, which kvkin recomputes in slices of as many tokens between vLLM's steps. What counts is the
time between the tokens of those that decode.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvkin.engines.api import Arrival
from kvkin.kv.errors import DeadlineExceeded, KvkinError, NodeUnavailable
from kvkin.kv.execution import PlanExecution
from kvkin.kv.layout import KVLayout
from kvkin.kv.plan import Holder, LayerGroup, ReusePlan
from kvkin.kv.provenance import exact_provenance
from kvkin.kv.pulls import E_LAYER
from kvkin.tools.bench_engine_arms import DEADLINE_S, KvkinArm, Listening
from kvkin.tools.bench_engine_messages import Stall, Stalled

# Tokens of every decoding request before the event: then nothing of their own prefill is left.
SETTLED_TOKENS = 4


def stall(arm: KvkinArm, command: Stall) -> Stalled:
    """Carry out ``command``.

    Raises NodeUnavailable if they end before the event does, and what the event's request fails with.
    """
    beats = Beats(len(command.decoding))
    requests = [arm.request(ids, command.most_tokens) for ids in command.decoding]
    listening = _Decoding(len(requests), beats.beat)
    for request in requests:
        arm.engine.submit(request, listening)
    try:
        beats.wait(SETTLED_TOKENS, listening.over)
        started = time.perf_counter()
        if command.event == "alone":
            beats.wait(SETTLED_TOKENS + command.alone_tokens, listening.over)
        else:
            _event(arm, command)
        ended = time.perf_counter()
        # the step in which the event ended brings their tokens, too
        beats.wait_after(ended, listening.over)
    finally:
        for request in requests:
            arm.engine.cancel(request.request_id, "the measurement is over")
        listening.wait_for_all()
    return Stalled(tuple(beats.gaps(started, ended)), ended - started)


class Beats:
    """When each decoding request's tokens came. ``beat`` is called by the engine's thread, the rest by another."""

    def __init__(self, requests: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._requests, self._clock = requests, clock
        self._times: dict[str, list[float]] = {}
        self._changed = threading.Condition()

    def beat(self, key: str, count: int) -> None:
        now = self._clock()
        with self._changed:
            self._times.setdefault(key, []).extend([now] * count)
            self._changed.notify_all()

    def wait(self, tokens: int, over: Callable[[], bool]) -> None:
        """Until every request has so many tokens. Raises NodeUnavailable once they are ``over``, DeadlineExceeded."""
        self._until(lambda: self._all(lambda times: len(times) >= tokens), over)

    def wait_after(self, moment: float, over: Callable[[], bool]) -> None:
        """Until every request has had a token after ``moment``."""
        self._until(lambda: self._all(lambda times: times[-1] > moment), over)

    def gaps(self, started: float, ended: float) -> list[float]:
        """Seconds between neighbouring tokens of one request, where any of that time lies in [started, ended]."""
        with self._changed:
            return [
                after - before
                for times in self._times.values()
                for before, after in itertools.pairwise(times)
                if after > started and before < ended
            ]

    def _all(self, enough: Callable[[list[float]], bool]) -> bool:
        return len(self._times) == self._requests and all(map(enough, self._times.values()))

    def _until(self, condition: Callable[[], bool], over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        with self._changed:
            while not condition():
                if over():
                    raise NodeUnavailable("a decoding request ended before the event did")
                if not self._changed.wait(min(1.0, deadline - time.monotonic())) and time.monotonic() > deadline:
                    raise DeadlineExceeded(f"a run took longer than {DEADLINE_S:.0f} s")


class _Decoding(Listening):
    """The requests that decode: none of them may end by itself."""

    def over(self) -> bool:
        return bool(self.counters) or self.failure is not None

    def wait_for_all(self) -> None:
        """Until all have ended, well or not."""
        if not self._done.wait(DEADLINE_S):
            raise DeadlineExceeded(f"requests did not end within {DEADLINE_S:.0f} s")


def _event(arm: KvkinArm, command: Stall) -> None:
    """The event's request, until its first token."""
    listening = Listening(1, lambda key, count: None)
    if command.event == "prefill":
        arm.engine.submit(arm.request(command.token_ids, 1), listening)
    else:
        layout = arm.engine.layout(arm.model)
        plan = partial_plan(command.context_tokens, len(command.token_ids), layout.num_layers, command.group)
        arrivals = arrivals_in_memory(arm.engine.plan_execution(arm.model, plan), layout, command.seed)
        request = arm.request(command.token_ids, 1, plan)
        arm.engine.submit(request, listening)
        for arrival in arrivals:
            arm.engine.arrived(request.request_id, arrival)
    listening.wait()
    (counters,) = listening.counters.values()
    if counters.cached_tokens:
        raise KvkinError(f"vLLM's prefix cache had {counters.cached_tokens} tokens of a prompt that is new")


def partial_plan(context_tokens: int, num_tokens: int, num_layers: int, group: LayerGroup) -> ReusePlan:
    """A partial plan whose context is held by a node that nobody asks: its data comes from memory."""
    from kvkin.tools.bench_pipeline_arms import reuse_plan

    holder = Holder("memory", exact_provenance(b"another model"))
    return reuse_plan(holder, context_tokens, num_tokens, num_layers, group)


def arrivals_in_memory(execution: PlanExecution, layout: KVLayout, seed: int) -> list[Arrival]:
    """Everything that the first segment pulls, with random values: E first, as it is pulled, then KV by layer.

    All layers of a chunk are the same bytes: what they are does not change how long anything takes.
    """
    pairs = execution.pull_pairs(0)
    chunks = {index: execution.chunks[index] for index, _ in pairs}
    kv: dict[int, Any] = {}
    states: dict[int, Any] = {}
    for index, chunk in chunks.items():
        tokens = chunk.stop - chunk.start
        assert tokens % layout.block_size == 0, chunk
        blocks = tokens // layout.block_size
        kv[index] = _random_bytes(blocks * layout.kv_block_bytes, layout, seed + index)
        states[index] = _random_bytes(blocks * layout.e_block_bytes, layout, seed - index - 1)
    ordered: Sequence[tuple[int, int]] = sorted(pairs, key=lambda pair: (pair[1] != E_LAYER, pair[1], pair[0]))
    return [
        Arrival(index, layer, ((chunks[index].start, (states if layer == E_LAYER else kv)[index]),))
        for index, layer in ordered
    ]


def _random_bytes(count: int, layout: KVLayout, seed: int) -> Any:
    """``count`` bytes of normally distributed values of the layout's dtype, an array of uint8."""
    import torch

    generator = torch.Generator().manual_seed(seed % (1 << 63))
    values = torch.randn(count // layout.dtype_bytes, generator=generator)
    return values.to(getattr(torch, layout.dtype)).view(torch.uint8).numpy()
