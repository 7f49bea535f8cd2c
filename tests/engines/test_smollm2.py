"""The engine contract on the demo family: SmolLM2-135M as sender, a LoRA fine-tune of it as receiver, real text.

The oracle's receiver is plain transformers with the adapter added by hand (W + scale x B A), so that loading is checked as well.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from check_engine import Geometry, Shape, Tally, run_case
from engine_harness import computed, exact, greedy, partial, plan_of, token_wise
from oracle import State
from reference_bench import ReferenceBench
from smollm2_models import ADAPTERS, LAYERS, adapter_path, add_adapter, base_folder, load, text_tokens

from kvkin.engines.layer_ops import ReferenceOps
from kvkin.engines.loading import load_model
from kvkin.engines.reference import LoadedModel, ReferenceEngine
from kvkin.kv.plan import PlanKind

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHARED = 12  # the lower layers that "upper" has from the base
CONTEXT, TOTAL = 288, 309
GEOMETRY = Geometry(16, 128, CONTEXT, TOTAL)


@pytest.fixture(scope="module")
def base_path() -> Path:
    return base_folder()


@pytest.fixture(scope="module")
def base(base_path: Path) -> Any:
    torch.set_num_threads(1)  # under load, a second thread costs more than it gives
    return load(base_path)


@pytest.fixture(scope="module")
def receiver(base: Any) -> Any:
    return add_adapter(base, adapter_path(ADAPTERS[0]))


@pytest.fixture(scope="module")
def token_ids(base_path: Path) -> list[int]:
    """288 tokens of a real text as the context, then an instruction."""
    return text_tokens(base_path, TOTAL)


@pytest.fixture(scope="module")
def upper(base: Any, receiver: Any) -> Any:
    """A fine-tune whose lower layers were frozen."""
    model = copy.deepcopy(receiver)
    for layer in range(SHARED):
        model.model.layers[layer].load_state_dict(base.model.layers[layer].state_dict())
    return model


@pytest.fixture(scope="module")
def models(base: Any, receiver: Any, upper: Any) -> dict[str, Any]:
    return {"sender": base, "receiver": receiver, "twin": receiver, "upper": upper}


@pytest.fixture(scope="module")
def held(models: dict[str, Any], token_ids: list[int]) -> dict[str, State]:
    found = oracle.contexts({name: models[name] for name in ("sender", "receiver", "upper")}, token_ids)
    return {**found, "twin": found["receiver"]}


@pytest.fixture(scope="module")
def engine_models(models: dict[str, Any], base_path: Path) -> dict[str, LoadedModel]:
    """What a node would load; only "upper" is no checkpoint of its own."""
    loaded = load_model(base_path, adapter_path(ADAPTERS[0]), device="cpu", compute_dtype="float32")
    return {"receiver": loaded, "upper": LoadedModel(ReferenceOps(models["upper"]), None, frozenset())}


def shapes() -> dict[str, Shape]:
    rest = computed(CONTEXT, TOTAL)
    rows = sorted({0, 1, CONTEXT - 1, *range(5, CONTEXT, 7)})
    return {
        "private": ("receiver", plan_of(computed(0, TOTAL)), True),
        "exact": ("receiver", plan_of(exact(0, CONTEXT, "twin", num_layers=LAYERS), rest), True),
        "shared-prefix": (
            "upper",
            plan_of(
                partial(0, CONTEXT, (SHARED, LAYERS), "sender", kind=PlanKind.SHARED_PREFIX, num_layers=LAYERS), rest
            ),
            True,
        ),
        "partial-middle": (
            "receiver",
            plan_of(partial(0, CONTEXT, (10, 22), "sender", num_layers=LAYERS), rest),
            False,
        ),
        "partial-low": ("receiver", plan_of(partial(0, CONTEXT, (0, 9), "sender", num_layers=LAYERS), rest), False),
        "token-wise": ("receiver", plan_of(token_wise(0, CONTEXT, rows, "sender", num_layers=LAYERS), rest), False),
        "agent-turn": (
            "receiver",
            plan_of(
                exact(0, 96, "twin", num_layers=LAYERS),
                partial(96, 192, (8, 20), "sender", num_layers=LAYERS),
                computed(192, 208),
                partial(208, 272, (15, LAYERS), "sender", num_layers=LAYERS),
                computed(272, TOTAL),
            ),
            False,
        ),
    }


@pytest.mark.parametrize("name", shapes())
def test_plan_shape(
    name: str,
    models: dict[str, Any],
    engine_models: dict[str, LoadedModel],
    token_ids: list[int],
    held: dict[str, State],
) -> None:
    def make(_: Any, *, block_size: int, chunk_tokens: int, eos: frozenset[int] = frozenset()) -> ReferenceBench:
        return ReferenceBench(
            ReferenceEngine(engine_models, block_size=block_size, chunk_tokens=chunk_tokens, start=False)
        )

    vocabulary = models["sender"].config.vocab_size
    tally = Tally()
    sampling = greedy(5, logprobs=vocabulary)
    run_case(make, models, token_ids, held, shapes()[name], GEOMETRY, tally, sampling=sampling)
    tally.close()


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_is_loaded_as_it_is_defined(name: str, base: Any, base_path: Path) -> None:
    """W + scale x B A in every layer that it touches, the base's weights elsewhere."""
    path = adapter_path(name)
    wanted = add_adapter(base, path).state_dict()
    loaded = load_model(base_path, path, device="cpu", compute_dtype="float32").ops
    assert isinstance(loaded, ReferenceOps)
    ids = torch.arange(40, 72)
    hidden = loaded.embed(ids)
    assert torch.equal(hidden, wanted["model.embed_tokens.weight"][ids])
    changed = 0
    for layer in range(LAYERS):
        values = loaded.project_kv(layer, hidden, torch.arange(len(ids)))[1].flatten(1)
        normed = torch.nn.functional.rms_norm(
            hidden, hidden.shape[-1:], wanted[f"model.layers.{layer}.input_layernorm.weight"], base.config.rms_norm_eps
        )
        weight = wanted[f"model.layers.{layer}.self_attn.v_proj.weight"]
        torch.testing.assert_close(values, normed @ weight.T, rtol=1e-4, atol=1e-4)
        changed += not torch.equal(weight, base.model.layers[layer].self_attn.v_proj.weight)
    assert changed > 0
