"""The engine contract on CUDA: ``make test-gpu``. NEVER RUN YET: written without a GPU at hand; without one all of it is skipped.

Attention in float32 exists on Triton only, and multiplies in TF32 there; FlashAttention and FlashInfer take bfloat16. So two things
are asked: KV that was pulled must come back bit by bit on every backend (the layout, ``paged_kv.py``), and what is computed must be
the oracle's within the rounding of its type, which tells a wrong layer, row, position or adapter from noise.

What runs after what on the device is asked of ``cuda_lane.py`` by tests/vllm_engine/test_lanes.py and test_late_reports.py, without a GPU.
Here is what only one can show: that a long slice holds up nobody, that nothing waits for the device, that staging memory is not reused
too early, that an answer does not depend on the overlap.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import check_engine
import check_engine_drift as drift
import numpy as np
import pytest
import torch
from check_engine import GEOMETRIES, SHAPES, Geometry, Tally, run_tiny
from check_engine_steps import CONTEXT_CHUNKS, PARTIAL, Run
from engine_harness import (
    NUM_LAYERS,
    Recorder,
    arrivals,
    computed,
    contexts,
    exact,
    greedy,
    plan_of,
    prompt,
    request,
    run_until_idle,
    step_until,
)
from torch import Tensor
from vllm_bench import SharedEngine, VllmBench, lora_family, plain_family

from kvkin.engines.vllm import cuda_lane
from kvkin.engines.vllm.engine import VllmEngine
from kvkin.engines.vllm.layers import LayerRunner
from kvkin.engines.vllm.rank_memory import RankMemory
from kvkin.engines.vllm.worker_side import WorkerSide

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# attention backend, dtype, and what its rounding may cost of the scale and between two logits
BACKENDS = {
    "TRITON_ATTN": ("float32", 2e-3, 2e-2),
    "FLASH_ATTN": ("bfloat16", 6e-2, 0.5),
    "FLASHINFER": ("bfloat16", 6e-2, 0.5),
}
COMPILED = "FLASH_ATTN, compiled, with CUDA graphs"
GEOMETRY = GEOMETRIES[1]  # a suffix of two chunks that starts with an unaligned tail


class OnHost(VllmBench):
    """KV and E as the suite compares them: in host memory, float32."""

    def kv(self, space: Any, layer: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        keys, values = super().kv(space, layer, num_tokens)
        return keys.cpu().float(), values.cpu().float()

    def e(self, space: Any, layer: int, start: int, stop: int) -> Tensor | None:
        states = super().e(space, layer, start, stop)
        return None if states is None else states.cpu().float()


def on_host(shared: SharedEngine) -> Callable[..., OnHost]:
    def make(*arguments: Any, **options: Any) -> OnHost:
        engine = shared.make(*arguments, **options).engine
        assert isinstance(engine, VllmEngine)
        return OnHost(engine)

    return make


@pytest.fixture(scope="module", params=[*BACKENDS, COMPILED])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    backend = request.param.split(",")[0]
    if backend == "FLASHINFER":
        pytest.importorskip("flashinfer")
    options = {"dtype": BACKENDS[backend][0], "attention_backend": backend, "enforce_eager": request.param != COMPILED}
    engine = SharedEngine(lora_family("llama", tmp_path_factory.mktemp("family")), **options)
    yield engine
    engine.close()


@pytest.fixture
def rounding(shared: SharedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    _, tolerance, near_tie = BACKENDS[shared.options["attention_backend"]]
    monkeypatch.setattr(check_engine, "TOLERANCE", tolerance)
    monkeypatch.setattr(check_engine, "NEAR_TIE", near_tie)
    # of four greedy tokens, a quarter may be such ties
    monkeypatch.setattr(check_engine, "MAX_NEAR_TIES", 0.25)


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("shape", SHAPES)
def test_plan_shape(shared: SharedEngine, shape: str) -> None:
    tally = Tally()
    run_tiny(on_host(shared), shared.family.name, shape, GEOMETRY, tally, 0)
    tally.close()


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_pulled_kv_is_read_back_bit_by_bit(shared: SharedEngine, geometry: Geometry) -> None:
    """Into the paged cache by vLLM's own kernel, out of it by the layout of ``paged_kv.py``."""
    bench = on_host(shared)(block_size=geometry.block_size, chunk_tokens=geometry.chunk_tokens)
    layout = bench.engine.layout("receiver")
    plan = plan_of(exact(0, geometry.context, "twin"), computed(geometry.context, geometry.total))
    held = contexts(shared.family.name, geometry.total)
    recorder = Recorder()
    tokens = prompt(geometry.total)
    execution = bench.engine.submit(request("r", tokens, plan, sampling=greedy(2, logprobs=None)), recorder)
    for arrival in arrivals(plan, execution, held, layout, random.Random(0)):
        bench.engine.arrived("r", arrival)
    run_until_idle(bench)
    heard = recorder.of("r")
    assert heard.error is None, heard.error
    dtype = getattr(torch, layout.dtype)
    for layer in range(NUM_LAYERS):
        found = bench.kv(heard.space, layer, geometry.context)
        for rows, wanted in zip(found, (held["twin"].keys[layer], held["twin"].values[layer]), strict=True):
            assert torch.equal(rows, wanted[: geometry.context].to(dtype).float()), layer


@pytest.mark.usefixtures("rounding")
def test_adapters_and_plans_in_one_batch(shared: SharedEngine) -> None:
    """A partial plan on the base, private runs of the base and of two adapters, and a shared prefix, all at once."""
    make = on_host(shared)
    bench = make(block_size=GEOMETRY.block_size, chunk_tokens=GEOMETRY.chunk_tokens)
    recorder = Recorder(bench)
    cases = {
        "partial": SHAPES["partial_middle"](GEOMETRY),
        "shared prefix": SHAPES["shared_prefix"](GEOMETRY),
        "base": ("receiver", plan_of(computed(0, GEOMETRY.total)), True),
        "sender": ("sender", plan_of(computed(0, GEOMETRY.total)), True),
        "other": ("other", plan_of(computed(0, GEOMETRY.total)), True),
    }
    held, tokens = contexts(shared.family.name, GEOMETRY.total), prompt(GEOMETRY.total)
    for name, (model, plan, _) in cases.items():
        execution = bench.engine.submit(request(name, tokens, plan, model), recorder)
        for arrival in arrivals(plan, execution, held, bench.engine.layout(model), random.Random(1)):
            bench.engine.arrived(name, arrival)
    run_until_idle(bench)
    tally = Tally()
    for name, (model, plan, _) in cases.items():
        check_engine.assert_result(bench, recorder.of(name), shared.family.models[model], tokens, plan, held, tally)
    tally.close()


@pytest.mark.usefixtures("rounding")
def test_first_distribution(shared: SharedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whichever of vLLM's model runners is its default here."""
    monkeypatch.setattr(drift, "TOLERANCE", check_engine.TOLERANCE)
    drift.check_first_distribution(on_host(shared), shared.family.name, PARTIAL, greedy(3))


# --- slices beside the forwards ----------------------------------------------------------------------------------------------

BESIDE, BETWEEN = "beside the forwards", "between the forwards"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, SharedEngine]]:
    """The same model without adapters, twice: with slices beside its forwards, and between them."""
    family = plain_family("llama", tmp_path_factory.mktemp("dense"))
    engines = {}
    for name, why_not in ((BESIDE, ""), (BETWEEN, "the test wants it so")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda_lane, "why_not_beside", lambda *_, why_not=why_not: why_not)
            engines[name] = SharedEngine(family, dtype="float32", attention_backend="TRITON_ATTN")
    yield engines
    for engine in engines.values():
        engine.close()


def started(engine: SharedEngine) -> Run:
    """A request that decodes, once all kernels have run once."""
    run = Run(on_host(engine), engine.family.name)
    run.feed("first", run.data("first", run.submit("first", sampling=greedy(2, logprobs=None))))
    run_until_idle(run.bench)
    run.submit("busy", plan_of(computed(0, 9)), sampling=greedy(200, logprobs=None), taps=())
    step_until(run.bench, lambda: len(run.recorder.of("busy").tokens) >= 4)
    return run


@contextmanager
def slow_units(milliseconds: int) -> Iterator[None]:
    """Each unit keeps its stream, and next to nothing else of the device, for so long."""
    original = LayerRunner.run

    def run(self: LayerRunner, *arguments: Any) -> Any:
        torch.cuda._sleep(milliseconds * 2_000_000)  # cycles, at about two a nanosecond
        return original(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerRunner, "run", run)
        yield


def test_a_long_slice_does_not_delay_the_steps_of_others(dense: dict[str, SharedEngine]) -> None:
    run = started(dense[BESIDE])
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(10):
        run.bench.step()
    end.record()
    end.synchronize()
    usual_s = begin.elapsed_time(end) / 1e3
    with slow_units(500):
        run.feed("r", run.data("r", run.submit("r")))
        run.bench.step()
        before, began = len(run.recorder.of("busy").tokens), time.monotonic()
        for _ in range(10):
            run.bench.step()
        took_s = time.monotonic() - began
    assert len(run.recorder.of("busy").tokens) == before + 10
    assert run.units("r") == set(), "its slices take a second each"
    assert took_s < max(5 * usual_s, 0.5), (took_s, usual_s)
    run_until_idle(run.bench)
    recomputed = {(unit.chunk, unit.layer) for unit in run.recorder.of("r").units if unit.recompute}
    assert recomputed == {(chunk, layer) for chunk in CONTEXT_CHUNKS for layer in (1, 2)}


def checked(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same method, in which a wait for a stream or for the device raises."""

    def run(*arguments: Any, **named: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return method(*arguments, **named)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return run


@pytest.mark.parametrize("how", [BESIDE, BETWEEN])
def test_nothing_of_ours_waits_for_the_device(dense: dict[str, SharedEngine], how: str) -> None:
    """But for one event at a time, which torch's check does not see: those are named in ``cuda_lane.py``."""
    run = started(dense[how])
    with pytest.MonkeyPatch.context() as patch:
        for name in ("before_step", "carry_out", "layer_saved", "take_results"):
            patch.setattr(WorkerSide, name, checked(getattr(WorkerSide, name)))
        run.feed("r", run.data("r", run.submit("r")))
        run.submit("order", plan_of(computed(0, 53)), seed=3, sampling=None)
        run_until_idle(run.bench)
    for name in ("r", "order"):
        assert run.recorder.of(name).error is None, run.recorder.of(name).error


@pytest.mark.parametrize("how", [BESIDE, BETWEEN])
def test_bytes_that_change_after_they_were_taken_change_nothing(dense: dict[str, SharedEngine], how: str) -> None:
    run = started(dense[how])
    original = RankMemory.write_kv

    def write_kv(self: RankMemory, layer: int, blocks: Any, cached: int, start: int, data: Any, layout: Any) -> None:
        torch.cuda._sleep(20_000_000)
        original(self, layer, blocks, cached, start, data, layout)
        np.asarray(data)[:] = 255

    plan = plan_of(exact(0, 40, "twin"), computed(40, 53))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankMemory, "write_kv", write_kv)
        run.feed("r", run.data("r", run.submit("r", plan)))
        run_until_idle(run.bench)
    held = contexts(run.arch, 53)["twin"]
    for layer in range(NUM_LAYERS):
        found = run.bench.kv(run.recorder.of("r").space, layer, 40)
        for rows, wanted in zip(found, (held.keys[layer], held.values[layer]), strict=True):
            assert torch.equal(rows, wanted[:40]), layer


def test_an_answer_does_not_depend_on_the_overlap(dense: dict[str, SharedEngine]) -> None:
    results = []
    for engine in dense.values():
        run = started(engine)
        run.feed("r", run.data("r", run.submit("r", sampling=greedy(8))))
        run_until_idle(run.bench)
        heard = run.recorder.of("r")
        kv = [run.bench.kv(heard.space, layer, 53) for layer in range(NUM_LAYERS)]
        e = [run.bench.e(heard.space, layer, 0, 53) for layer in (4,)]
        results.append((heard.tokens, kv, e))
    (tokens, kv, e), (other_tokens, other_kv, other_e) = results
    assert tokens == other_tokens
    for mine, others in zip(kv, other_kv, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, others, strict=True))
    for states, other_states in zip(e, other_e, strict=True):
        assert (states is None) == (other_states is None)
        if states is not None and other_states is not None:
            assert torch.equal(states, other_states)
