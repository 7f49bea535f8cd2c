"""The cheap search: how far every recompute group moves the answer from the full prefill's, in one walk through the layers.

Profiling runs this once a sample; generating answers is left for the groups near the frontier. For one sample and all groups
[a, b) the walk computes each distinct state once. The KV that the receiver computes from layer a on is that of every group which
starts there, so contexts take O(L^2) layer passes for O(L^2) groups, never O(L^3). The suffix (with the answer, teacher-forced)
goes along in branches; at a layer i these are

- one that has read the sender's KV in all layers so far: the empty group, and every group that starts at i or later;
- one for each start a <= i that reads the receiver's KV: every group [a, b) with b > i;
- one for each group [a, b) with b <= i: back on the sender's KV.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkin.engines.answers import answer_logits, forced_tokens
from kvkin.engines.branches import BranchRows, SharedContext
from kvkin.engines.layer_ops import LayerOps
from kvkin.engines.states import ContextRows, ContextStates, check_sender, embed, entering_states, new_kv
from kvkin.kv.plan import LayerGroup


@dataclass(frozen=True)
class Passes:
    """Layer passes of the search over one sample: as it runs, and if each group were recomputed by itself."""

    groups: int
    """Groups measured, without the empty one."""
    context: int
    """Passes of the whole context through one layer (of a start's last layer k and v only)."""
    context_naive: int
    suffix: int
    """Passes of the suffix and answer through one layer."""
    suffix_naive: int


def lattice_groups(starts: Sequence[int], stops: Sequence[int]) -> list[LayerGroup]:
    """All groups [a, b) with a in ``starts``, b in ``stops`` and a < b, by start, then stop."""
    return [LayerGroup(start, stop) for start in starts for stop in stops if start < stop]


def passes(num_layers: int, starts: Sequence[int], stops: Sequence[int]) -> Passes:
    """Count what ``group_divergences`` runs for these bounds. Raises ValueError as it does."""
    _check_bounds(num_layers, starts, stops)
    groups = lattice_groups(starts, stops)
    inside = sum(max(stops) - start for start in {group.start for group in groups})
    return Passes(
        groups=len(groups),
        context=inside,
        context_naive=sum(len(group) for group in groups),
        suffix=num_layers + inside + sum(num_layers - group.stop for group in groups),
        suffix_naive=num_layers * (len(groups) + 1),
    )


@torch.inference_mode()
def group_divergences(
    ops: LayerOps,
    token_ids: Sequence[int],
    sender: ContextStates,
    suffix_ids: Sequence[int],
    answer_ids: Sequence[int],
    starts: Sequence[int],
    stops: Sequence[int],
    reference: Tensor,
) -> dict[LayerGroup | None, float]:
    """KL(full prefill || group) in nats of each group and of the empty one (None), mean over the m answer positions.

    ``reference`` (m, vocab) float32 are the full prefill's logits there: ``forced_logits`` over ``full_states``. ``sender`` keeps
    its hidden states, unless 0 is the only start. Equals ``group_states`` and ``forced_logits`` for each group by itself.

    Raises ValueError, naming the argument, for bounds that do not ascend or lie outside of the layers, an empty suffix or
    answer, a reference of another shape, a ``sender`` of another context or model or without the hidden states.
    """
    check_sender(ops, token_ids, sender)
    _check_bounds(ops.num_layers, starts, stops)
    forced = forced_tokens(suffix_ids, answer_ids)
    _check_reference(reference, answer_ids)
    walk = _Walk(ops, token_ids, sender, forced)
    for layer in range(ops.num_layers):
        if layer in stops:
            walk.stop(layer)
        if not stops or layer >= stops[-1]:
            walk.leave()
        elif layer in starts:
            walk.start(layer)
        walk.advance(layer, last=bool(stops) and layer == stops[-1] - 1)
    if ops.num_layers in stops:
        walk.stop(ops.num_layers)
    found = dict(zip(walk.outside, divergences(ops, walk.outside.values(), reference), strict=True))
    return {group: found[group] for group in (None, *lattice_groups(starts, stops))}


class _Walk:
    """The states of all branches and contexts of one sample between two layers."""

    def __init__(self, ops: LayerOps, token_ids: Sequence[int], sender: ContextStates, forced: Sequence[int]) -> None:
        self._ops, self._token_ids, self._sender = ops, token_ids, sender
        self._context_rows = ContextRows(ops, range(len(token_ids)))
        self._branch_rows = BranchRows(ops, len(token_ids), len(forced))
        self.outside: dict[LayerGroup | None, Tensor] = {None: embed(ops, forced)}
        """Branches that read the sender's KV now, (rows, hidden): by group that they have left, None before any."""
        self._inside: dict[int, Tensor] = {}  # branches that read the receiver's KV, by the start of their group
        self._contexts: dict[int, Tensor] = {}  # hidden states of the context (n, hidden), likewise

    def start(self, layer: int) -> None:
        """Groups that start at ``layer`` begin."""
        self._inside[layer] = self.outside[None]
        self._contexts[layer] = entering_states(self._ops, self._token_ids, self._sender, layer)

    def stop(self, layer: int) -> None:
        """Groups that stop at ``layer`` read the sender's KV from here on; those that go on are not affected."""
        for start, state in self._inside.items():
            self.outside[LayerGroup(start, layer)] = state

    def leave(self) -> None:
        """No group reaches further."""
        self._inside.clear()
        self._contexts.clear()

    def advance(self, layer: int, *, last: bool) -> None:
        """Run ``layer`` on all contexts (``last``: only their k and v), then on all branches as one batch."""
        room = self._branch_rows.num_rows
        sender = SharedContext(self._sender.keys[layer], self._sender.values[layer], room)
        contexts = [sender] * len(self.outside)
        for start, hidden in self._contexts.items():
            keys, values = new_kv(self._ops, len(hidden))
            if last:
                self._context_rows.project(layer, hidden, keys, values)
            else:
                self._contexts[start] = self._context_rows.run(layer, hidden, keys, values)
            contexts.append(SharedContext(keys, values, room))
        states = torch.stack([*self.outside.values(), *self._inside.values()])
        states = self._branch_rows.run(layer, states, contexts)
        count = len(self.outside)
        self.outside = dict(zip(self.outside, states[:count], strict=True))
        self._inside = dict(zip(self._inside, states[count:], strict=True))


@torch.inference_mode()
def layer_divergences(
    ops: LayerOps,
    token_ids: Sequence[int],
    sender: ContextStates,
    receiver: ContextStates,
    suffix_ids: Sequence[int],
    answer_ids: Sequence[int],
    reference: Tensor,
) -> list[float]:
    """Sensitivity of each layer (DroidSpeak, section 3): KL(full prefill || only this layer's KV is the sender's), in nats.

    ``receiver`` are the receiver's ``full_states``, ``reference`` (m, vocab) its logits over them; mean over the m answer
    positions. A branch parts from the receiver's path at its layer, so what lies below is computed once for all.

    Raises ValueError, naming the argument, as ``group_divergences`` does.
    """
    check_sender(ops, token_ids, sender)
    check_sender(ops, token_ids, receiver, "receiver")
    forced = forced_tokens(suffix_ids, answer_ids)
    _check_reference(reference, answer_ids)
    rows = BranchRows(ops, len(token_ids), len(forced))
    path, branches = embed(ops, forced), list[Tensor]()
    for layer in range(ops.num_layers):
        own = SharedContext(receiver.keys[layer], receiver.values[layer], rows.num_rows)
        other = SharedContext(sender.keys[layer], sender.values[layer], rows.num_rows)
        states = rows.run(layer, torch.stack([path, *branches, path]), [own] * (1 + len(branches)) + [other])
        path, *branches = states.unbind()
    return divergences(ops, branches, reference)


def divergences(ops: LayerOps, branches: Iterable[Tensor], reference: Tensor) -> list[float]:
    """KL(reference || branch) in nats, mean over the m rows of ``reference`` (m, vocab) logits, of each branch's last m rows.

    ``branches`` are hidden states (rows, hidden) leaving the last layer. Logits of a few branches exist at a time.
    """
    wanted = reference.log_softmax(dim=-1)
    weights = wanted.exp()
    rows = torch.stack([branch[-len(reference) :] for branch in branches])
    found = []
    for logits in answer_logits(ops, rows, len(reference)):
        if logits.shape[1:] != reference.shape:
            raise ValueError(f"reference: a vocabulary of {reference.shape[1]}, the model has {logits.shape[2]}")
        log_probabilities = logits.log_softmax(dim=-1)
        # never negative but for rounding
        found += (weights * (wanted - log_probabilities)).sum(dim=-1).mean(dim=-1).clamp(min=0).tolist()
    return found


def _check_bounds(num_layers: int, starts: Sequence[int], stops: Sequence[int]) -> None:
    for name, bounds, low, high in (("starts", starts, 0, num_layers - 1), ("stops", stops, 1, num_layers)):
        if list(bounds) != sorted(set(bounds)):
            raise ValueError(f"{name}: {list(bounds)} must ascend")
        outside = [bound for bound in bounds if not low <= bound <= high]
        if outside:
            raise ValueError(f"{name}: {outside[0]} is outside of {low} .. {high}")


def _check_reference(reference: Tensor, answer_ids: Sequence[int]) -> None:
    if reference.dim() != 2 or len(reference) != len(answer_ids):
        shape = tuple(reference.shape)
        raise ValueError(
            f"reference: logits of shape {shape}, wanted ({len(answer_ids)}, vocab): a row an answer token"
        )
