"""Half-precision models on vLLM: what leaves an engine as bytes comes back as the same bits, in caches, arenas and hidden states.

Whatever is computed in them is compared with another run of the same engine: two batches differ by the type's own rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from check_engine_steps import BLOCK, CONTEXT, TOTAL, Run
from engine_harness import NUM_LAYERS, Heard, computed, exact, greedy, partial, plan_of, run_until_idle
from vllm_bench import SharedEngine, lora_family

from kvkin.engines.api import Arrival
from kvkin.kv.errors import ConfigError
from kvkin.kv.execution import PlanExecution
from kvkin.kv.plan import ReusePlan
from kvkin.kv.pulls import E_LAYER

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

PRIVATE = plan_of(computed(0, TOTAL))
EXACT = plan_of(exact(0, CONTEXT, "twin"), computed(CONTEXT, TOTAL))
GROUP = (2, 4)
PARTIAL = plan_of(partial(0, CONTEXT, GROUP, "twin"), computed(CONTEXT, TOTAL))
ROUNDING = {"bfloat16": 2**-5, "float16": 2**-8}
"""What a few layers in this type may differ by, of the scale."""


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    try:
        engine = SharedEngine(lora_family("llama", tmp_path_factory.mktemp("family")), dtype=request.param)
    except ConfigError as error:
        # CPUs with tile instructions pack keys in them: refused at the start, with the types that go
        if error.key != "vllm.dtype":
            raise
        pytest.skip(str(error))
    yield engine
    engine.close()


def finished(run: Run, name: str) -> Heard:
    run_until_idle(run.bench)
    heard = run.recorder.of(name)
    assert heard.error is None, heard.error
    assert heard.result is not None
    return heard


def stored(run: Run, space: Any, layer: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Whole blocks of the context as a node's arena has them; E of the layer that enters ``GROUP`` for layer -1."""
    layout = run.bench.engine.layout("receiver")
    size = layout.e_block_bytes if layer == E_LAYER else layout.kv_block_bytes
    data = np.zeros(CONTEXT // BLOCK * size, dtype=np.uint8)
    if layer == E_LAYER:
        space.store_e(GROUP[0], 0, data, layout)
    else:
        space.store_kv(layer, 0, data, layout)
    return data


def under(run: Run, name: str, plan: ReusePlan, space: Any) -> Heard:
    """The answer under a plan that pulls what ``space`` has."""
    size = run.bench.engine.layout("receiver")
    execution: PlanExecution = run.submit(name, plan, sampling=greedy(4))
    for index, layer in execution.pull_pairs(0):
        chunk, block_bytes = execution.chunks[index], size.e_block_bytes if layer == E_LAYER else size.kv_block_bytes
        low, high = chunk.start // BLOCK * block_bytes, chunk.stop // BLOCK * block_bytes
        part = stored(run, space, layer)[low:high]
        run.bench.engine.arrived(name, Arrival(index, layer, ((chunk.start, part),)))
    return finished(run, name)


def test_what_is_pulled_is_there_bit_by_bit(shared: SharedEngine) -> None:
    run = Run(shared.make, shared.family.name)
    dtype = shared.options["dtype"]
    layout = run.bench.engine.layout("receiver")
    assert (layout.dtype, layout.dtype_bytes) == (dtype, 2)
    run.submit("private", PRIVATE, sampling=greedy(4))
    private = finished(run, "private")
    again = under(run, "exact", EXACT, private.space)
    for layer in range(NUM_LAYERS):
        assert stored(run, private.space, layer).any()
        assert np.array_equal(stored(run, private.space, layer), stored(run, again.space, layer)), layer
        for found, wanted in zip(
            run.bench.kv(again.space, layer, TOTAL), run.bench.kv(private.space, layer, TOTAL), strict=True
        ):
            assert found.dtype is getattr(torch, dtype)
            assert torch.equal(found[:CONTEXT], wanted[:CONTEXT])
            assert_near(found, wanted, dtype)


def test_hidden_states_enter_the_group_that_is_recomputed(shared: SharedEngine) -> None:
    """Sender and receiver are one model here: what is recomputed from its E is what it had."""
    run = Run(shared.make, shared.family.name)
    dtype = shared.options["dtype"]
    run.submit("private", PRIVATE, sampling=greedy(4))
    private = finished(run, "private")
    assert stored(run, private.space, E_LAYER).any()
    again = under(run, "partial", PARTIAL, private.space)
    assert again.counters is not None
    assert again.counters.recomputed_layers == {0: set(range(*GROUP))}
    for layer in range(NUM_LAYERS):
        for found, wanted in zip(
            run.bench.kv(again.space, layer, TOTAL), run.bench.kv(private.space, layer, TOTAL), strict=True
        ):
            assert_near(found, wanted, dtype)
    # other hidden states would not do
    states = private.space.states(GROUP[0], 0, CONTEXT)
    assert states.dtype is getattr(torch, dtype)
    assert float((states[1:] - states[:-1]).abs().max()) > 4 * ROUNDING[dtype] * float(states.abs().max())


def assert_near(found: torch.Tensor, wanted: torch.Tensor, dtype: str) -> None:
    scale = max(1.0, float(wanted.float().abs().max()))
    # written so that a NaN fails
    assert float((found.float() - wanted.float()).abs().max()) <= ROUNDING[dtype] * scale
