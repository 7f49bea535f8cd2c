"""The mutation test: break the executor in one way at a time, and the contract suite must notice every time.

A mutant patches one thing that a plausible mistake would get wrong (most of them live in ``mutants.py``). It names the check that
is expected to fail; if it does not, the suite has a hole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import check_engine_steps as steps
import pytest
import torch
from mutants import LLAMA, MUTANTS, Patch, in_unit, mutant, shapes
from reference_bench import make_reference

from kvkin.engines import recompute, reference, requests
from kvkin.engines.workspace import Workspace
from kvkin.kv.execution import PlanExecution, UnitMode

# --- what is read and written --------------------------------------------------------------------------------------------


@mutant(shapes("llama", "exact_reuse"))
def keys_and_values_swapped(patch: Patch) -> None:
    original = Workspace.load_kv

    def swapped(self: Workspace, *arguments: Any) -> None:
        self.keys, self.values = self.values, self.keys
        original(self, *arguments)
        self.keys, self.values = self.values, self.keys

    patch.setattr(Workspace, "load_kv", swapped)


@mutant(shapes("llama", "exact_reuse"))
def pulled_one_token_late(patch: Patch) -> None:
    original = Workspace.load_kv
    patch.setattr(Workspace, "load_kv", lambda self, layer, start, *rest: original(self, layer, start + 1, *rest))


@mutant(shapes("llama", "exact_reuse"))
def pulled_into_the_next_layer(patch: Patch) -> None:
    original = Workspace.load_kv
    patch.setattr(Workspace, "load_kv", lambda self, layer, *rest: original(self, (layer + 1) % len(self.keys), *rest))


def _write(patch: Patch, change: Callable[..., Any]) -> None:
    original = recompute._write
    patch.setattr(recompute, "_write", lambda *arguments: change(original, *arguments))


@mutant(LLAMA)
def recomputed_kv_not_kept(patch: Patch) -> None:
    _write(patch, lambda write, space, unit, *rest: None if unit.recompute else write(space, unit, *rest))


@mutant(LLAMA)
def kv_only_keeps_the_last_row_only(patch: Patch) -> None:
    def wrong(write: Any, space: Any, unit: Any, positions: Any, keys: Any, values: Any) -> None:
        if unit.mode is UnitMode.KV_ONLY:
            space.keys[unit.layer][unit.stop - 1], space.values[unit.layer][unit.stop - 1] = keys[-1], values[-1]
        else:
            write(space, unit, positions, keys, values)

    _write(patch, wrong)


@mutant(LLAMA)
def last_row_mode_keeps_the_last_row_only(patch: Patch) -> None:
    def wrong(write: Any, space: Any, unit: Any, positions: Any, keys: Any, values: Any) -> None:
        if unit.mode is UnitMode.LAST_ROW:
            space.keys[unit.layer][unit.stop - 1], space.values[unit.layer][unit.stop - 1] = keys[-1], values[-1]
        else:
            write(space, unit, positions, keys, values)

    _write(patch, wrong)


@mutant(LLAMA)
def first_row_taken_for_the_last(patch: Patch) -> None:
    def change(ops: Any, space: Any, unit: Any, hidden: Any, positions: Any) -> tuple[Any, ...]:
        if unit.mode is UnitMode.LAST_ROW:
            hidden, positions = hidden.flip(0), positions.flip(0)
        return ops, space, unit, hidden, positions

    in_unit(patch, change)


@mutant(shapes("llama", "token_wise_some"))
def token_rows_written_side_by_side(patch: Patch) -> None:
    def wrong(write: Any, space: Any, unit: Any, positions: Any, keys: Any, values: Any) -> None:
        where = torch.arange(unit.start, unit.start + len(positions)) if unit.rows else positions
        write(space, unit, where, keys, values)

    _write(patch, wrong)


@mutant(shapes("llama", "token_wise_some"))
def token_rows_see_the_pulled_kv_of_each_other(patch: Patch) -> None:
    """Rows attend before the recomputed keys and values of their layer are in place."""

    def wrong(write: Any, space: Any, unit: Any, positions: Any, keys: Any, values: Any) -> None:
        if unit.rows is None:
            return write(space, unit, positions, keys, values)
        stale_keys, stale_values = space.keys[unit.layer].clone(), space.values[unit.layer].clone()
        write(space, unit, positions, keys, values)
        space.stale = stale_keys, stale_values
        return None

    original = recompute.partial_prefill

    def late(ops: Any, space: Any, unit: Any, hidden: Any, positions: Any) -> Any:
        if unit.rows is None or unit.mode is UnitMode.KV_ONLY:
            return original(ops, space, unit, hidden, positions)
        out = original(ops, space, unit, hidden, positions)
        keys, values = space.stale
        q = ops.project_qkv(unit.layer, hidden, positions)[0]
        attended = ops.attend(unit.layer, q, positions, keys[: unit.stop], values[: unit.stop])
        return ops.finish(unit.layer, hidden, attended) if out is not None else None

    _write(patch, wrong)
    patch.setattr(requests, "partial_prefill", late)


# --- order, lateness, fairness -------------------------------------------------------------------------------------------


@mutant(lambda: steps.check_held_layer(make_reference, "llama", 3, 2))
def missing_kv_not_waited_for(patch: Patch) -> None:
    original = PlanExecution._final

    def careless(self: PlanExecution, index: int, layer: int) -> None:
        original(self, index, layer)
        self._prefix = [len(self.chunks)] * self.num_layers

    patch.setattr(PlanExecution, "_final", careless)


@mutant(lambda: steps.check_held_layer(make_reference, "llama", 0, 2))
def recompute_waits_for_all_layers(patch: Patch) -> None:
    original = PlanExecution._runnable
    patch.setattr(PlanExecution, "_runnable", lambda self: None if self.missing else original(self))


@mutant(lambda: steps.check_repeated_data(make_reference, "llama", steps.PARTIAL))
def repeated_data_taken_again(patch: Patch) -> None:
    patch.setattr(PlanExecution, "expects", lambda self, index, layer: True)


@mutant(lambda: steps.check_replan(make_reference, "llama", "computing"))
def late_data_of_a_plan_given_up_taken(patch: Patch) -> None:
    patch.setattr(PlanExecution, "expects", lambda self, index, layer: True)


@mutant(lambda: steps.check_replan_keeps_own_blocks(make_reference, "llama", steps.CONTEXT))
def taps_of_a_plan_given_up_kept(patch: Patch) -> None:
    patch.setattr(Workspace, "forget_taps", lambda self: None)


@mutant(lambda: steps.check_interleaving(make_reference, "llama"))
def one_request_at_a_time(patch: Patch) -> None:
    original = reference.ReferenceEngine.step

    def greedy(self: reference.ReferenceEngine) -> bool:
        if self._turns and self._turns[-1] in self._requests:
            self._turns.appendleft(self._turns.pop())
        return original(self)

    patch.setattr(reference.ReferenceEngine, "step", greedy)


@mutant(lambda: steps.check_cancel(make_reference, "llama", "computing"))
def a_cancel_ends_everybody(patch: Patch) -> None:
    original = reference.ReferenceEngine.cancel

    def wide(self: reference.ReferenceEngine, request_id: str, reason: str) -> None:
        for each in list(self._requests):
            original(self, each, reason)

    patch.setattr(reference.ReferenceEngine, "cancel", wide)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_contract_notices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, check = MUTANTS[name]
    patch(monkeypatch)
    with pytest.raises(AssertionError):
        check()


def test_without_a_mutation_they_pass() -> None:
    """Otherwise the test above would prove nothing."""
    for check in dict.fromkeys(check for _, check in MUTANTS.values()):
        check()
