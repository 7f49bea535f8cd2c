"""A rank that is killed: requests end, to be tried elsewhere; the engine says that it has failed; nothing is left."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_harness import computed, greedy, plan_of, prompt, request
from tiny_models import make_tiny
from vllm_bench import OPTIONS, WIDE, still_running, worker_processes

from kvkin.engines.vllm.engine import VllmEngine, VllmModel
from kvkin.kv.errors import NodeUnavailable

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


class Waiting:
    """A sink that says when the first token is there, and when all requests have ended."""

    def __init__(self, expected: int) -> None:
        self.decoding, self.ended = threading.Event(), threading.Event()
        self.errors: dict[str, Exception] = {}
        self.answers: dict[str, tuple[int, ...]] = {}
        self._expected = expected

    def unit_done(self, request_id: str, unit: Any, space: Any) -> None: ...

    def prefilled(self, request_id: str) -> None: ...

    def tokens(self, request_id: str, index: int, token_id: int, text: str, logprob: Any) -> None:
        self.decoding.set()

    def finished(self, result: Any, space: Any, counters: Any) -> None:
        self.answers[result.request_id] = result.token_ids
        self._count()

    def failed(self, request_id: str, error: Exception) -> None:
        self.errors[request_id] = error
        self._count()

    def _count(self) -> None:
        if len(self.errors) + len(self.answers) == self._expected:
            self.ended.set()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[VllmEngine]:
    """An engine of two ranks on a thread of its own; whatever becomes of it, nothing of it is left."""
    checkpoint = make_tiny("llama", tmp_path / "model", num_layers=5, seed=1, **WIDE)
    engine = VllmEngine(
        {"m": VllmModel(checkpoint, None, None, frozenset())},
        block_size=8,
        chunk_tokens=64,
        transition_layers=(),
        options=OPTIONS | {"tensor_parallel_size": 2},
    )
    processes = worker_processes(engine._runtime)
    yield engine
    engine.close()
    assert not still_running(processes)


def test_a_rank_that_is_killed_while_requests_run(engine: VllmEngine) -> None:
    sink = Waiting(2)
    for name in ("a", "b"):
        tokens = prompt(20)
        engine.submit(
            request(name, tokens, plan_of(computed(0, 20)), "m", sampling=greedy(450, logprobs=None), taps=()), sink
        )
    assert sink.decoding.wait(60)
    worker_processes(engine._runtime)[0].kill()
    assert sink.ended.wait(60), "a request that nobody can end"
    assert not sink.answers, "they were to run for longer than their rank"
    assert all(isinstance(error, NodeUnavailable) and error.retryable for error in sink.errors.values())
    assert isinstance(engine.failure.exception(60), NodeUnavailable)
    late = Waiting(1)
    engine.submit(request("late", prompt(20), plan_of(computed(0, 20)), "m", taps=()), late)
    assert late.ended.wait(60), "who comes later is told, too"


def test_a_rank_that_is_killed_while_nothing_runs(engine: VllmEngine) -> None:
    """Ctrl-C, which reaches all processes of a terminal, is not for the ranks; a kill is."""
    for process in worker_processes(engine._runtime):
        process.send_signal(signal.SIGINT)
    sink = Waiting(1)
    engine.submit(request("r", prompt(20), plan_of(computed(0, 20)), "m", sampling=greedy(3), taps=()), sink)
    assert sink.ended.wait(60)
    assert len(sink.answers["r"]) == 3
    worker_processes(engine._runtime)[1].kill()
    assert isinstance(engine.failure.exception(60), NodeUnavailable)
