"""The engine contract on CUDA: ``make test-gpu``. NEVER RUN YET: written without a GPU at hand; without one all of it is skipped.

Attention in float32 exists on Triton only, and multiplies in TF32 there; FlashAttention and FlashInfer take bfloat16. So two things
are asked: KV that was pulled must come back bit by bit on every backend (the layout, ``paged_kv.py``), and what is computed must be
the oracle's within the rounding of its type, which tells a wrong layer, row, position or adapter from noise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import check_engine
import pytest
import torch
from check_engine import GEOMETRIES, SHAPES, Geometry, Tally, run_tiny
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
)
from torch import Tensor
from vllm_bench import SharedEngine, VllmBench, lora_family

from kvkin.engines.vllm.engine import VllmEngine

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
