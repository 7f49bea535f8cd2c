"""The contract suite notices what can go wrong between kvkin and vLLM: each fault, put in on purpose, fails it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from check_engine import GEOMETRIES, check_shape
from engine_harness import TAPS
from vllm_bench import SharedEngine, lora_family

from kvkin.engines.vllm import forward_watch, paged_kv
from kvkin.engines.vllm.adapters import Adapters
from kvkin.engines.vllm.layers import LayerRunner
from kvkin.engines.vllm.loads import Load
from kvkin.engines.vllm.orders import WriteData
from kvkin.engines.vllm.rank_memory import RankMemory
from kvkin.engines.vllm.spaces import Coverage

pytestmark = pytest.mark.vllm

Mutant = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, tuple[str, Mutant]] = {}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    engine = SharedEngine(lora_family("llama", tmp_path_factory.mktemp("family")))
    yield engine
    engine.close()


def mutant(shape: str) -> Callable[[Mutant], Mutant]:
    def enter(function: Mutant) -> Mutant:
        MUTANTS[function.__name__] = (shape, function)
        return function

    return enter


@mutant("partial_middle")
def rows_are_turned_to_the_next_position(patch: pytest.MonkeyPatch) -> None:
    original = LayerRunner.rows

    def shifted(self: LayerRunner, positions: Any, block_ids: Any) -> Any:
        rows = original(self, positions, block_ids)
        return replace(rows, positions=rows.positions + 1)

    patch.setattr(LayerRunner, "rows", shifted)


@mutant("exact_reuse")
def pulled_keys_and_values_are_swapped(patch: pytest.MonkeyPatch) -> None:
    original = LayerRunner.write
    patch.setattr(LayerRunner, "write", lambda self, layer, k, v, slots: original(self, layer, v, k, slots))


@mutant("exact_reuse")
def pulled_kv_goes_to_the_next_layer(patch: pytest.MonkeyPatch) -> None:
    original = LayerRunner.write
    patch.setattr(LayerRunner, "write", lambda self, layer, *rest: original(self, (layer + 1) % self.num_layers, *rest))


@mutant("exact_reuse")
def pulled_rows_are_one_slot_off(patch: pytest.MonkeyPatch) -> None:
    original = LayerRunner.write
    patch.setattr(LayerRunner, "write", lambda self, layer, k, v, slots: original(self, layer, k, v, slots.roll(1)))


@mutant("shared_prefix")
def units_run_without_their_adapter(patch: pytest.MonkeyPatch) -> None:
    original = Adapters.use
    patch.setattr(Adapters, "use", lambda self, _, rows: original(self, 0, rows))


@mutant("partial_lowest")
def kv_only_units_do_not_rotate(patch: pytest.MonkeyPatch) -> None:
    original = LayerRunner._project
    patch.setattr(LayerRunner, "_project", lambda self, layer, hidden, at: original(self, layer, hidden, at * 0))


@mutant("partial_middle")
def the_residual_is_lost(patch: pytest.MonkeyPatch) -> None:
    original = LayerRunner.run

    def run(self: LayerRunner, layer: int, mode: Any, hidden: Any, rows: Any) -> Any:
        out = original(self, layer, mode, hidden, rows)
        return None if out is None else out - hidden

    patch.setattr(LayerRunner, "run", run)


@mutant("token_wise_some")
def rows_do_not_see_their_neighbours(patch: pytest.MonkeyPatch) -> None:
    """Runs of rows are taken for one sequence, so that all but the last look from the wrong place."""
    original = LayerRunner.rows

    def as_one(self: LayerRunner, positions: Any, block_ids: Any) -> Any:
        whole = original(self, range(positions[-1] + 1 - len(positions), positions[-1] + 1), block_ids)
        mine = original(self, positions, block_ids)
        return replace(mine, metadata=whole.metadata)

    patch.setattr(LayerRunner, "rows", as_one)


@mutant("partial_middle")
def the_last_piece_of_a_load_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    original = RankMemory.write_kv

    def forgetful(self: RankMemory, layer: int, *rest: Any) -> None:
        if layer != 4:
            original(self, layer, *rest)

    patch.setattr(RankMemory, "write_kv", forgetful)


@mutant("partial_middle")
def a_load_ends_before_it_is_complete(patch: pytest.MonkeyPatch) -> None:
    original = Load.writes

    def some(self: Load, budget: int) -> Iterator[WriteData]:
        yield from original(self, budget)
        self._complete = self._complete or self.execution.missing < 3

    patch.setattr(Load, "writes", some)


@mutant("private")
def taps_are_one_row_off(patch: pytest.MonkeyPatch) -> None:
    original = forward_watch.tapped
    patch.setattr(forward_watch, "tapped", lambda model, layer: original(model, layer).roll(1, 0))


@mutant("private")
def taps_are_those_of_another_layer(patch: pytest.MonkeyPatch) -> None:
    original = forward_watch.tapped
    patch.setattr(forward_watch, "tapped", lambda model, layer: original(model, {1: 2, 2: 4, 4: 1}[layer]))


@mutant("everything_reused_inexactly")
def e_is_claimed_that_nobody_computed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coverage, "has", lambda self, layer, start, stop: layer in TAPS)


@mutant("private")
def reading_swaps_keys_and_values(patch: pytest.MonkeyPatch) -> None:
    original = paged_kv.CpuVectorLayout.read
    patch.setattr(paged_kv.CpuVectorLayout, "read", lambda *arguments: original(*arguments)[::-1])


@pytest.mark.parametrize("name", MUTANTS)
def test_the_suite_notices(shared: SharedEngine, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    shape, put_in = MUTANTS[name]
    with monkeypatch.context() as patch:
        put_in(patch)
        with pytest.raises(AssertionError):
            check_shape(shared.make, shared.family.name, shape, GEOMETRIES[:2])
    check_shape(shared.make, shared.family.name, shape, GEOMETRIES[:1])
    assert torch.get_default_dtype() is torch.float32
