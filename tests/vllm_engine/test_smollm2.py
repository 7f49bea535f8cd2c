"""Same request, same plan: vLLM against the oracle on the demo family, whose adapters run beside the base or merged into it.

The oracle is unmodified transformers with the adapters added by hand. What is allowed (``check_engine.py``: KV, E and log
probabilities within 1e-4 of their scale, float32) is what thirty layers of another order of summation may give: adapters beside the
base sum W x + B A x where the oracle multiplies once, and vLLM fuses q, k and v. A wrong scale, row, layer or position is off by
orders of magnitude more.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from check_engine import Geometry, Tally, assert_result, run_case
from engine_harness import (
    Recorder,
    arrivals,
    computed,
    exact,
    greedy,
    partial,
    plan_of,
    request,
    run_until_idle,
    token_wise,
)
from oracle import State
from smollm2_models import LAYERS, adapter_path, add_adapter, base_folder, load, text_tokens
from vllm_bench import Family, SharedEngine

from kvkin.engines.merging import merged_checkpoint
from kvkin.kv.plan import PlanKind, ReusePlan

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BASE, QA, CODE = "base", "qa", "code"
ADAPTERS = {QA: "smollm2-135m-qa", CODE: "smollm2-135m-code"}
SPLIT = 15  # the code adapter touches no layer below: there its KV is the base's
CONTEXT, TOTAL = 288, 309
GEOMETRY = Geometry(16, 128, CONTEXT, TOTAL)
REST = computed(CONTEXT, TOTAL)
ROWS = sorted({0, 1, CONTEXT - 1, *range(5, CONTEXT, 7)})

# receiver, plan, whether the result must equal a private prefill
CASES: dict[str, tuple[str, ReusePlan, bool]] = {
    "base private": (BASE, plan_of(computed(0, TOTAL)), True),
    "base partial": (BASE, plan_of(partial(0, CONTEXT, (10, 20), QA, num_layers=LAYERS), REST), False),
    "qa private": (QA, plan_of(computed(0, TOTAL)), True),
    "qa exact": (QA, plan_of(exact(0, CONTEXT, QA, num_layers=LAYERS), REST), True),
    "qa partial": (QA, plan_of(partial(0, CONTEXT, (10, 20), BASE, num_layers=LAYERS), REST), False),
    "qa lowest": (QA, plan_of(partial(0, CONTEXT, (0, 9), CODE, num_layers=LAYERS), REST), False),
    "qa token rows": (QA, plan_of(token_wise(0, CONTEXT, ROWS, BASE, num_layers=LAYERS), REST), False),
    "qa agent's turn": (
        QA,
        plan_of(
            exact(0, 96, QA, num_layers=LAYERS),
            partial(96, 192, (10, 20), BASE, num_layers=LAYERS),
            computed(192, 208),
            partial(208, 272, (SPLIT, LAYERS), CODE, num_layers=LAYERS),
            computed(272, TOTAL),
        ),
        False,
    ),
    "code shared layers": (
        CODE,
        plan_of(
            partial(0, CONTEXT, (SPLIT, LAYERS), BASE, kind=PlanKind.SHARED_PREFIX, num_layers=LAYERS),
            REST,
        ),
        True,
    ),
    "code partial": (CODE, plan_of(partial(0, CONTEXT, (10, 22), QA, num_layers=LAYERS), REST), False),
}
BESIDE = "adapters beside the base"
# one object each: by its identity pytest knows that an engine is there already
MERGED = {QA: "qa merged", CODE: "code merged"}
RUNS = [(BESIDE, name) for name in CASES] + [
    (MERGED[of], name)
    for of, name in (
        *((QA, name) for name in ("qa private", "qa exact", "qa partial", "qa token rows", "qa agent's turn")),
        (CODE, "code shared layers"),
    )
]


@pytest.fixture(scope="module")
def base_path() -> Path:
    return base_folder()


@pytest.fixture(scope="module")
def models(base_path: Path) -> dict[str, Any]:
    torch.set_num_threads(1)  # under load, a second thread costs more than it gives
    base = load(base_path)
    return {BASE: base} | {name: add_adapter(base, adapter_path(adapter)) for name, adapter in ADAPTERS.items()}


@pytest.fixture(scope="module")
def token_ids(base_path: Path) -> list[int]:
    return text_tokens(base_path, TOTAL)


@pytest.fixture(scope="module")
def held(models: dict[str, Any], token_ids: list[int]) -> dict[str, State]:
    return oracle.contexts(models, token_ids)


@pytest.fixture(scope="module")
def engine(
    request: pytest.FixtureRequest, base_path: Path, models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedEngine]:
    adapters = {name: adapter_path(adapter) for name, adapter in ADAPTERS.items()}
    if request.param == BESIDE:
        family = Family(BESIDE, base_path, {BASE: None, **adapters}, models)
    else:
        name = request.param.split()[0]
        folder = tmp_path_factory.mktemp("merged") / name
        family = Family(
            request.param, merged_checkpoint(base_path, adapters[name], folder, "float32"), {name: None}, models
        )
    shared = SharedEngine(family)
    yield shared
    shared.close()


@pytest.mark.parametrize(("engine", "case"), RUNS, indirect=["engine"], scope="module")
def test_a_plan_gives_what_the_oracle_gives(
    engine: SharedEngine, case: str, models: dict[str, Any], token_ids: list[int], held: dict[str, State]
) -> None:
    tally = Tally()
    sampling = greedy(5, logprobs=models[BASE].config.vocab_size)
    run_case(engine.make, models, token_ids, held, CASES[case], GEOMETRY, tally, sampling=sampling)
    tally.close()


@pytest.mark.parametrize("engine", [BESIDE], indirect=True, scope="module")
def test_base_and_both_adapters_in_one_batch(
    engine: SharedEngine, models: dict[str, Any], token_ids: list[int], held: dict[str, State]
) -> None:
    """Each under a plan of its own, data in pieces between the steps: nobody gets another's adapter or KV."""
    names = ("base private", "qa partial", "code shared layers", "base partial", "qa exact")
    bench = engine.make(models, block_size=GEOMETRY.block_size, chunk_tokens=GEOMETRY.chunk_tokens)
    recorder = Recorder(bench)
    waiting = []
    source = random.Random(7)
    for name in names:
        receiver, plan, _ = CASES[name]
        sampling = greedy(8, logprobs=models[BASE].config.vocab_size)
        execution = bench.engine.submit(request(name, token_ids, plan, receiver, sampling=sampling), recorder)
        layout = bench.engine.layout(receiver)
        waiting += [(name, arrival) for arrival in arrivals(plan, execution, held, layout, source)]
    source.shuffle(waiting)
    while waiting:
        for name, arrival in [waiting.pop() for _ in range(min(40, len(waiting)))]:
            bench.engine.arrived(name, arrival)
        bench.step()
    run_until_idle(bench)
    tally = Tally()
    for name in names:
        receiver, plan, _ = CASES[name]
        assert_result(bench, recorder.of(name), models[receiver], token_ids, plan, held, tally)
    tally.close()
