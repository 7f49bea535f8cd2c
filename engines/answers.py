"""Answers after a context: greedy, or teacher-forced, over several states of the same context at once.

Evaluation generates with every way of reuse, profiling looks at the distribution of given answer tokens; both ask here. The
branches run as one batch (``engines/branches.py``), and the states that they start from are never written to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from kvkin.engines.branches import BranchRows, Tails, shared_contexts
from kvkin.engines.layer_ops import LayerOps
from kvkin.engines.states import ContextStates, check_tokens, embed

LOGIT_ROWS = 64
"""Rows that run through the head at once: the weights are read for many, and their logits stay small."""


@torch.inference_mode()
def greedy_answers(
    ops: LayerOps,
    states: Sequence[ContextStates],
    suffix_ids: Sequence[int],
    *,
    max_new_tokens: int,
    eos: Collection[int],
    done: Callable[[Sequence[int]], bool] | None = None,
) -> list[list[int]]:
    """The most likely continuation after ``suffix_ids`` over each of ``states``: up to ``max_new_tokens`` tokens each.

    A branch ends at a token of ``eos``, which is left out, or as soon as ``done`` is true of its tokens so far, the newest
    included, which stays in. Of equally likely tokens the lowest id is taken.

    Raises ValueError for no states, states of different lengths or depths, an empty suffix, or no tokens to generate.
    """
    num_tokens = _check(ops, states)
    check_tokens("suffix_ids", suffix_ids)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: {max_new_tokens} is not at least 1")
    capacity = len(suffix_ids) + max_new_tokens - 1  # the last token is never fed back
    contexts = [
        shared_contexts([(state.keys[layer], state.values[layer]) for state in states], capacity)
        for layer in range(ops.num_layers)
    ]
    tails = Tails(ops, len(states), capacity)
    answers: list[list[int]] = [[] for _ in states]
    running = list(range(len(states)))
    hidden = embed(ops, suffix_ids).expand(len(states), -1, -1)
    while True:
        rows = BranchRows(ops, num_tokens + tails.filled, hidden.shape[1])
        for layer in range(ops.num_layers):
            hidden = rows.run(layer, hidden, contexts[layer], tails)
        tails.filled += rows.num_rows
        tokens = ops.logits(hidden[:, -1]).argmax(dim=-1).tolist()
        going_on = []
        for index, token in enumerate(tokens):
            answer = answers[running[index]]
            if token in eos:
                continue
            answer.append(token)
            if len(answer) < max_new_tokens and not (done is not None and done(answer)):
                going_on.append(index)
        if not going_on:
            return answers
        if len(going_on) < len(running):
            running = [running[index] for index in going_on]
            contexts = [[layer[index] for index in going_on] for layer in contexts]
            tails.keep(going_on)
        hidden = embed(ops, [answers[branch][-1] for branch in running])[:, None]


@torch.inference_mode()
def forced_logits(
    ops: LayerOps, states: Sequence[ContextStates], suffix_ids: Sequence[int], answer_ids: Sequence[int]
) -> Tensor:
    """Logits (len(states), m, vocab) float32 at the m positions that predict the m tokens of ``answer_ids``, teacher-forced.

    Raises ValueError for no states, states of different lengths or depths, an empty suffix or answer.
    """
    num_tokens = _check(ops, states)
    forced = forced_tokens(suffix_ids, answer_ids)
    rows = BranchRows(ops, num_tokens, len(forced))
    hidden = embed(ops, forced).expand(len(states), -1, -1)
    for layer in range(ops.num_layers):
        kv = [(state.keys[layer], state.values[layer]) for state in states]
        hidden = rows.run(layer, hidden, shared_contexts(kv, rows.num_rows))
    return torch.cat(list(answer_logits(ops, hidden, len(answer_ids))))


def forced_tokens(suffix_ids: Sequence[int], answer_ids: Sequence[int]) -> list[int]:
    """What is fed to a model so that its last ``len(answer_ids)`` rows predict the answer. Raises ValueError if one is empty."""
    check_tokens("suffix_ids", suffix_ids)
    check_tokens("answer_ids", answer_ids)
    return [*suffix_ids, *answer_ids[:-1]]


def answer_logits(ops: LayerOps, hidden: Tensor, num_answer_tokens: int) -> Iterator[Tensor]:
    """Logits (some branches, m, vocab) float32 of the last m rows of ``hidden`` (branches, rows, hidden), a few branches at a time."""
    rows = hidden[:, -num_answer_tokens:]
    step = max(1, LOGIT_ROWS // num_answer_tokens)
    for first in range(0, len(rows), step):
        part = rows[first : first + step]
        yield ops.logits(part.flatten(0, 1)).view(len(part), num_answer_tokens, -1)


def _check(ops: LayerOps, states: Sequence[ContextStates]) -> int:
    """The common number of tokens of ``states``."""
    if not states:
        raise ValueError("states: at least one is needed")
    lengths = sorted({state.num_tokens for state in states})
    if len(lengths) > 1:
        raise ValueError(f"states: of one length, not of {', '.join(map(str, lengths))} tokens")
    for state in states:
        if state.num_layers != ops.num_layers:
            raise ValueError(f"states: of {state.num_layers} layers, the model has {ops.num_layers}")
    return lengths[0]
