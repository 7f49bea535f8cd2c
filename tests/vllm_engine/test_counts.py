"""What is counted of a request on vLLM: each token of the prompt once, however often vLLM computes it. No engine is built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from engine_harness import Recorder, computed, exact, greedy, plan_of, prompt, request
from hypothesis import given
from hypothesis import strategies as st

from kvkin.configs.vllm_install import installed_vllm
from kvkin.kv.plan import ReusePlan

pytestmark = pytest.mark.vllm

if installed_vllm() is None:
    pytest.skip("vLLM is not installed here (make install ENGINE=vllm)", allow_module_level=True)

from kvkin.engines.vllm.entries import Entry
from kvkin.engines.vllm.loads import Load
from kvkin.engines.vllm.running import RunningRequest

LAYERS, CHUNK, TOTAL = 5, 8, 101


def begun(plan: ReusePlan) -> tuple[RunningRequest, Load]:
    """A request that was handed to vLLM."""
    space: Any = SimpleNamespace(num_tokens=0, covered=SimpleNamespace(forget=lambda: None))
    asked = request("r", prompt(TOTAL), plan, sampling=greedy(4))
    running = RunningRequest(asked, Recorder(), space, None, frozenset(), LAYERS)
    load = Load("key", plan, asked.token_ids, 0, LAYERS, CHUNK)
    running.begun(Entry(load, TOTAL, 4, lambda gone: None), plan)
    return running, load


def counted(running: RunningRequest) -> tuple[int, int, int]:
    counters = running.counters
    return counters.cached_tokens, counters.loaded_tokens, counters.computed_tokens


def test_work_that_a_preemption_repeats_is_counted_as_work_only() -> None:
    running, _ = begun(plan_of(computed(0, TOTAL)))
    running.progressed(0, 60, 0.1)
    running.progressed(0, 70, 0.1)  # its blocks were taken
    running.progressed(70, TOTAL, 0.1)
    running.progressed(TOTAL, TOTAL + 1, 0.1)
    assert counted(running) == (0, 0, TOTAL)
    assert running.counters.computed_layer_tokens == (60 + TOTAL) * LAYERS


def test_what_another_request_has_computed_meanwhile_comes_from_the_cache() -> None:
    running, _ = begun(plan_of(computed(0, TOTAL)))
    running.progressed(32, 50, 0.1)
    running.progressed(96, TOTAL, 0.1)
    assert counted(running) == (32 + 96 - 50, 0, 50 - 32 + TOTAL - 96)


def test_tokens_of_a_load_count_where_they_are_written() -> None:
    plan = plan_of(exact(0, 64, "twin"), computed(64, TOTAL))
    running, load = begun(plan)
    for chunk in load.own_chunks:
        for layer in chunk.pulled:
            assert load.arrived(chunk.index, layer)
    load.allocated(range(4), 32)
    assert len(list(load.writes(10**6))) == 8 * LAYERS
    running.progressed(64, TOTAL, 0.1)
    assert counted(running) == (32, 32, TOTAL - 64)


@given(st.lists(st.tuples(st.integers(0, TOTAL - 1), st.integers(1, 60)), max_size=12))
def test_however_vllm_goes_about_it_the_counts_are_the_prompt(steps: list[tuple[int, int]]) -> None:
    """Steps go on where the last one ended, or begin again anywhere (a preemption, and whatever the cache has then)."""
    running, _ = begun(plan_of(computed(0, TOTAL)))
    stop = 0
    for number, (start, size) in enumerate(steps):
        start = start if number % 3 == 0 else min(stop, TOTAL - 1)
        stop = min(start + size, TOTAL)
        running.progressed(start, stop, 0.0)
    running.progressed(min(stop, TOTAL - 1), TOTAL, 0.0)
    running.progressed(TOTAL, TOTAL + 1, 0.0)
    cached, loaded, computed_tokens = counted(running)
    assert (cached + loaded + computed_tokens, loaded) == (TOTAL, 0)
    assert min(cached, computed_tokens) >= 0
