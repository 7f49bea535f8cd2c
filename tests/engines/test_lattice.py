"""The group lattice: every divergence equals that of the group computed by itself, and it runs as few layers as it says."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import oracle
import pytest
import torch
from engine_harness import NUM_LAYERS, VARIANTS, contexts, family
from mutants import Shifted
from states_harness import (
    ANSWER,
    CONTEXT,
    GROUPS,
    SUFFIX,
    WHOLE,
    CountedOps,
    copied,
    kl,
    ops_of,
    oracle_context,
    oracle_logits,
    same,
    sender_states,
)
from tiny_models import ARCHITECTURES
from torch import Tensor

from kvkin.engines import lattice
from kvkin.engines.answers import LOGIT_ROWS, forced_logits
from kvkin.engines.lattice import group_divergences, lattice_groups, layer_divergences, passes
from kvkin.engines.layer_ops import LayerOps
from kvkin.engines.states import ContextStates, full_states, group_states
from kvkin.kv.plan import LayerGroup

ALL = [*ARCHITECTURES, *VARIANTS]
TOLERANCE = 1e-4
EVERY_START, EVERY_STOP = tuple(range(NUM_LAYERS)), tuple(range(1, NUM_LAYERS + 1))
BOUNDS: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "all": (EVERY_START, EVERY_STOP),
    "every second": (range(0, NUM_LAYERS, 2), (2, 4, NUM_LAYERS)),
    "neither end": ((1, 3), (2, 4)),
    "starts behind the last stop": ((0, 2, 4), (1, 3)),
    "one group": ((2,), (4,)),
    "from the embeddings only": ((0,), EVERY_STOP),
    "no group": ((3, 4), (1, 2)),
    "nothing": ((), ()),
}


@functools.cache
def reference(arch: str) -> Tensor:
    """The full prefill's logits (m, vocab)."""
    ops = ops_of(arch)
    return forced_logits(ops, [full_states(ops, CONTEXT)], SUFFIX, ANSWER)[0]


def search(arch: str, bounds: str = "all", ops: LayerOps | None = None, **options: Any) -> dict[Any, float]:
    starts, stops = BOUNDS[bounds]
    given: dict[str, Any] = {
        "token_ids": CONTEXT,
        "sender": sender_states(arch),
        "suffix_ids": SUFFIX,
        "answer_ids": ANSWER,
        "starts": starts,
        "stops": stops,
        "reference": reference(arch),
        **options,
    }
    return group_divergences(ops or ops_of(arch), **given)


def one_by_one(
    ops: LayerOps, sender: ContextStates, groups: Sequence[LayerGroup | None], wanted: Tensor
) -> dict[LayerGroup | None, float]:
    """Brute force: each group's context, then the answer over it, then the divergence by its definition."""
    found = {}
    for group in groups:
        states = [group_states(ops, CONTEXT, sender, group)]
        found[group] = kl(wanted, forced_logits(ops, states, SUFFIX, ANSWER)[0])
    return found


def assert_same(found: dict[Any, float], wanted: dict[Any, float]) -> None:
    assert list(found) == list(wanted)
    for group, divergence in wanted.items():
        assert abs(found[group] - divergence) <= TOLERANCE, f"{group}: {found[group]} instead of {divergence}"


# --- groups --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("bounds", BOUNDS)
def test_each_group_is_as_if_computed_by_itself(arch: str, bounds: str) -> None:
    groups = [None, *lattice_groups(*BOUNDS[bounds])]
    assert_same(search(arch, bounds), one_by_one(ops_of(arch), sender_states(arch), groups, reference(arch)))


@pytest.mark.parametrize("arch", ALL)
def test_groups_are_as_the_oracle_has_them(arch: str) -> None:
    """Contexts, logits and reference of unmodified transformers."""
    model, found = family(arch)["receiver"], search(arch)
    wanted = oracle_logits(model, oracle.private(model, CONTEXT), SUFFIX, ANSWER)
    for group in (None, LayerGroup(0, 2), LayerGroup(1, 4), LayerGroup(2, 3), LayerGroup(3, NUM_LAYERS), WHOLE):
        logits = oracle_logits(model, oracle_context(arch, group), SUFFIX, ANSWER)
        assert found[group] == pytest.approx(kl(wanted, logits), abs=TOLERANCE)


@pytest.mark.parametrize("arch", ALL)
def test_recomputing_everything_is_the_full_prefill(arch: str) -> None:
    found = search(arch)
    assert 0 <= found[WHOLE] < 1e-6
    assert min(divergence for group, divergence in found.items() if group != WHOLE) > 1e-3, "no other group is"


def test_the_receivers_own_states_diverge_nowhere() -> None:
    found = search("mistral", sender=sender_states("mistral", "receiver"))
    assert max(found.values()) < 1e-6


def test_an_answer_of_one_token() -> None:
    ops, sender = ops_of("llama"), sender_states("llama")
    wanted = forced_logits(ops, [full_states(ops, CONTEXT)], SUFFIX, ANSWER[:1])[0]
    found = search("llama", answer_ids=ANSWER[:1], reference=wanted)
    for group in (None, LayerGroup(1, 3)):
        logits = forced_logits(ops, [group_states(ops, CONTEXT, sender, group)], SUFFIX, ANSWER[:1])[0]
        assert found[group] == pytest.approx(kl(wanted, logits), abs=TOLERANCE)


def test_the_sender_is_not_modified_and_hidden_states_are_needed_only_above_0() -> None:
    sender = sender_states("llama")
    before = copied(sender)
    first = search("llama", "from the embeddings only", sender=sender)
    assert same(sender, before)
    bare = ContextStates(sender.keys, sender.values)
    assert search("llama", "from the embeddings only", sender=bare) == first


def test_twice_the_same() -> None:
    assert search("mixtral") == search("mixtral")


# --- what must be noticed ------------------------------------------------------------------------------------------------


def _stop_late(patch: pytest.MonkeyPatch) -> None:
    original = lattice._Walk.stop
    patch.setattr(lattice._Walk, "stop", lambda self, layer: original(self, min(layer + 1, NUM_LAYERS)))


def _e_of_the_layer_below(patch: pytest.MonkeyPatch) -> None:
    original = lattice.entering_states
    patch.setattr(lattice, "entering_states", lambda *rest: original(*rest[:-1], max(rest[-1] - 1, 0)))


def _last_layer_left_out(patch: pytest.MonkeyPatch) -> None:
    """The receiver's KV of the layer at which most groups stop is not computed: what the memory held is read."""
    patch.setattr(lattice.ContextRows, "project", lambda self, layer, hidden, keys, values: keys.zero_())


def _suffix_not_forked(patch: pytest.MonkeyPatch) -> None:
    """Groups go on from the suffix as it was at the bottom."""

    def start(self: Any, layer: int) -> None:
        original(self, layer)
        self._inside[layer] = self._bottom = getattr(self, "_bottom", self.outside[None])

    original = lattice._Walk.start
    patch.setattr(lattice._Walk, "start", start)


def _receiver_kv_mixed_up(patch: pytest.MonkeyPatch) -> None:
    """Each branch reads the context of another start."""
    original = lattice.BranchRows.run

    def run(self: Any, layer: int, hidden: Tensor, contexts: list[Any]) -> Tensor:
        return original(self, layer, hidden, contexts[:-2] + contexts[:-3:-1])

    patch.setattr(lattice.BranchRows, "run", run)


@pytest.mark.parametrize(
    "mutate",
    [_stop_late, _e_of_the_layer_below, _last_layer_left_out, _suffix_not_forked, _receiver_kv_mixed_up],
)
def test_a_mistake_in_the_walk_is_noticed(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = one_by_one(ops_of("llama"), sender_states("llama"), [None, *GROUPS], reference("llama"))
    mutate(monkeypatch)
    try:
        found = search("llama")
    except KeyError:  # a group that was never measured
        return
    with pytest.raises(AssertionError):
        assert_same(found, wanted)


def test_shifted_layers_are_noticed() -> None:
    """The receiver's weights of the next layer, or the divergences of the group beside."""
    wanted = one_by_one(ops_of("llama"), sender_states("llama"), [None, *GROUPS], reference("llama"))
    with pytest.raises(AssertionError):
        assert_same(search("llama", ops=Shifted(ops_of("llama"), 1)), wanted)
    beside = {group: LayerGroup(group.start + 1, group.stop + 1) for group in GROUPS if group.stop < NUM_LAYERS}
    assert all(abs(wanted[group] - wanted[other]) > 10 * TOLERANCE for group, other in beside.items())


# --- layers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ALL)
def test_layer_divergences_are_of_single_layers_reused(arch: str) -> None:
    ops, sender = ops_of(arch), sender_states(arch)
    receiver = full_states(ops, CONTEXT)
    before = copied(receiver)
    found = layer_divergences(ops, CONTEXT, sender, receiver, SUFFIX, ANSWER, reference(arch))
    held, model = contexts(arch, len(CONTEXT)), family(arch)["receiver"]
    whole = held["receiver"]
    wanted = oracle_logits(model, whole, SUFFIX, ANSWER)
    assert len(found) == NUM_LAYERS
    for layer in range(NUM_LAYERS):
        keys, values = list(whole.keys), list(whole.values)
        keys[layer], values[layer] = held["sender"].keys[layer], held["sender"].values[layer]
        logits = oracle_logits(model, oracle.State(keys, values, whole.hidden), SUFFIX, ANSWER)
        assert found[layer] == pytest.approx(kl(wanted, logits), abs=TOLERANCE), f"layer {layer}"
        assert found[layer] > 10 * TOLERANCE
    assert same(receiver, before)


def test_layer_divergences_of_equal_models_are_zero_below_the_split() -> None:
    """``upper`` has the sender's weights, and so its KV, in the lower layers."""
    ops, sender = ops_of("llama", "upper"), sender_states("llama")
    receiver = full_states(ops, CONTEXT)
    wanted = forced_logits(ops, [receiver], SUFFIX, ANSWER)[0]
    found = layer_divergences(ops, CONTEXT, sender, receiver, SUFFIX, ANSWER, wanted)
    # layer 2 differs in its weights, though not in the hidden states that enter it
    assert [divergence < 1e-6 for divergence in found] == [True, True, False, False, False]


# --- what it costs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", BOUNDS)
def test_passes_are_those_that_run(bounds: str) -> None:
    starts, stops = BOUNDS[bounds]
    promised, projections = passes(NUM_LAYERS, starts, stops), ("project_kv", "project_qkv")
    forced = len(SUFFIX) + len(ANSWER) - 1
    walk, alone = CountedOps(ops_of("llama")), CountedOps(ops_of("llama"))
    search("llama", bounds, ops=walk)
    assert promised.context * len(CONTEXT) == walk.rows(*projections, context=True)
    assert promised.suffix * forced == walk.rows(*projections, context=False)
    groups = lattice_groups(starts, stops)
    assert promised.groups == len(groups)
    one_by_one(alone, sender_states("llama"), [None, *groups], reference("llama"))
    assert promised.context_naive * len(CONTEXT) == alone.rows(*projections, context=True)
    assert promised.suffix_naive * forced == alone.rows(*projections, context=False)


def test_passes_grow_with_the_square_of_the_layers() -> None:
    """Per sample: twice the layers, four times the contexts' passes, where groups by themselves take eight times."""
    few, many = (passes(layers, range(layers), range(1, layers + 1)) for layers in (32, 64))
    assert many.context / few.context == pytest.approx(4, rel=0.05)
    assert many.context_naive / few.context_naive == pytest.approx(8, rel=0.1)
    thirty = passes(30, range(0, 30, 2), range(2, 31, 2))
    assert (thirty.groups, thirty.context, thirty.context_naive) == (120, 240, 1360)


def test_context_kv_of_a_layer_is_dropped_when_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    original = lattice.SharedContext

    def noted(keys: Tensor, values: Tensor, room: int) -> Any:
        nonlocal most
        made = original(keys, values, room)
        alive.append(weakref.ref(made._keys))
        most = max(most, sum(each() is not None for each in alive))
        return made

    monkeypatch.setattr(lattice, "SharedContext", noted)
    search("llama")
    assert len(alive) == NUM_LAYERS + passes(NUM_LAYERS, EVERY_START, EVERY_STOP).context
    assert most <= 2 * (len(EVERY_START) + 1)


def test_logits_of_all_branches_never_exist_at_once() -> None:
    ops = CountedOps(ops_of("llama"))
    answer = (*ANSWER, *SUFFIX)
    whole = full_states(ops_of("llama"), CONTEXT)
    search("llama", ops=ops, answer_ids=answer, reference=forced_logits(ops_of("llama"), [whole], SUFFIX, answer)[0])
    rows = [rows for name, _, rows, _ in ops.calls if name == "logits"]
    assert sum(rows) == (len(GROUPS) + 1) * len(answer)
    assert max(rows) <= LOGIT_ROWS


# --- bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "options"),
    [
        (r"starts: \[2, 0\] must ascend", {"starts": (2, 0)}),
        (r"starts: \[1, 1\] must ascend", {"starts": (1, 1)}),
        (r"stops: \[4, 3\] must ascend", {"stops": (4, 3)}),
        ("starts: 5 is outside of 0 .. 4", {"starts": (0, NUM_LAYERS)}),
        ("starts: -1 is outside", {"starts": (-1, 2)}),
        ("stops: 6 is outside of 1 .. 5", {"stops": (2, NUM_LAYERS + 1)}),
        ("stops: 0 is outside", {"stops": (0, 2)}),
        ("suffix_ids", {"suffix_ids": ()}),
        ("answer_ids", {"answer_ids": ()}),
        ("token_ids", {"token_ids": ()}),
        ("sender: states of 37 tokens, token_ids has 36", {"token_ids": CONTEXT[1:]}),
        (r"reference: logits of shape \(3, 320\), wanted \(4, vocab\)", {"reference": torch.zeros(3, 320)}),
        (r"reference: logits of shape \(320,\)", {"reference": torch.zeros(320)}),
        ("reference: a vocabulary of 319, the model has 320", {"reference": torch.zeros(4, 319)}),
    ],
)
def test_bad_input_is_named(named: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=named):
        search("llama", **options)


def test_a_sender_without_hidden_states_is_named() -> None:
    with pytest.raises(ValueError, match="sender: its hidden states entering layer 1 were not kept"):
        search("llama", sender=full_states(ops_of("llama", "sender"), CONTEXT))


def test_bad_bounds_are_not_counted_either() -> None:
    with pytest.raises(ValueError, match="stops: 31"):
        passes(30, (0,), (31,))


@pytest.mark.parametrize(
    ("named", "changed"),
    [("receiver: states of 36 tokens", 3), ("suffix_ids", 4), ("answer_ids", 5), ("reference: logits of shape", 6)],
)
def test_bad_input_of_layer_divergences_is_named(named: str, changed: int) -> None:
    ops = ops_of("llama")
    bad = {3: full_states(ops, CONTEXT[1:]), 4: (), 5: (), 6: torch.zeros(1, 320)}
    arguments = [ops, CONTEXT, sender_states("llama"), full_states(ops, CONTEXT), SUFFIX, ANSWER, reference("llama")]
    arguments[changed] = bad[changed]
    with pytest.raises(ValueError, match=named):
        layer_divergences(*arguments)
