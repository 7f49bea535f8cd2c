"""What ``kvkin profile`` computes on one case: how far every group diverges, and what the receiver answers under some of them.

Runs in the caller's process over ``LayerOps``. The sender's states are computed once a case and stage; the search costs
O(L^2) layer passes over the context (``engines/lattice.py``), answers of all groups are generated as one batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rapidfuzz.distance import Levenshtein

from kvkin.engines.answers import forced_logits, greedy_answers
from kvkin.engines.lattice import group_divergences, layer_divergences
from kvkin.engines.layer_ops import LayerOps
from kvkin.engines.states import ContextStates, full_states, group_states, states_of_groups
from kvkin.tools.model_pair import Pair
from kvkin.tools.profile_search import Group, name
from kvkin.tools.quality_cases import Case
from kvkin.tools.scoring import EvaluationMetric, has_lines, likelihood_score

T = TypeVar("T")
# Of a long answer the first tokens show the divergence: later ones are forced onto the full prefill's path anyway.
FORCED_TOKENS = 24
AGREEMENT = EvaluationMetric(
    "agreement", "agreement with the private answer", 24, 0, lambda text, answers: float(text in answers)
)
"""For recorded contexts, which have no accepted answers: what the receiver says privately is right by definition."""


class NewestContext:
    """States of the context that was asked for last: cases that share one follow each other, and it is computed once."""

    def __init__(self) -> None:
        self._context_ids: Sequence[int] = ()
        self._states: dict[Any, Any] = {}

    def get(self, context_ids: Sequence[int], key: object, compute: Callable[[], T]) -> T:
        """What ``compute`` returns, or returned for the same context and key before."""
        if context_ids != self._context_ids:
            self._context_ids, self._states = context_ids, {}
        if key not in self._states:
            self._states[key] = compute()
        found: T = self._states[key]
        return found


class CaseWork:
    """One case on one pair; ``metric`` scores what is answered. Works of one run share ``newest``."""

    def __init__(self, pair: Pair, case: Case, metric: EvaluationMetric, newest: NewestContext | None = None) -> None:
        self.pair, self.case, self.metric = pair, case, metric
        self.chunk_tokens = pair.family.config.chunk_tokens
        self._newest = NewestContext() if newest is None else newest

    def search(self, starts: Sequence[int], stops: Sequence[int]) -> dict[str, Any]:
        """Divergence of every group of the grid, sensitivity of every layer, and what the two models answer by themselves."""
        pair, case = self.pair, self.case
        sender, receiver = self._sender(), self._receiver()
        alone = self._alone(sender, receiver)
        forced = (alone["answer_ids"] or [min(pair.eos, default=0)])[:FORCED_TOKENS]
        reference = forced_logits(pair.receiver, [receiver], case.suffix_ids, forced)[0]
        groups = group_divergences(
            pair.receiver, case.context_ids, sender, case.suffix_ids, forced, starts, stops, reference
        )
        layers = layer_divergences(
            pair.receiver, case.context_ids, sender, receiver, case.suffix_ids, forced, reference
        )
        return alone | {
            # a group of all layers is the full prefill
            "divergences": {
                name(group): value
                for group, value in groups.items()
                if group is None or len(group) < pair.receiver.num_layers
            },
            "sensitivity": layers,
        }

    def answers(self, groups: Sequence[Group], searched: Mapping[str, Any] | None) -> dict[str, Any]:
        """Score of the receiver's answer under each group, and how much of it is the full prefill's answer.

        ``searched`` is the case's record of the search, if it was searched: what the models answer by themselves stands there.
        """
        pair, case = self.pair, self.case
        sender = self._sender()
        if searched is None:
            alone = self._alone(sender, self._receiver())
        else:
            alone = {key: searched[key] for key in ("tokens", "answer_ids", "full", "sender")}
            alone["context"] = case.context_key
        full = alone["answer_ids"]
        states = self._newest.get(
            case.context_ids,
            tuple(groups),
            lambda: states_of_groups(pair.receiver, case.context_ids, sender, groups),
        )
        outcomes = self._outcome(pair.receiver, states)
        found = list(zip(map(name, groups), states, outcomes, strict=True))
        return alone | {
            "scores": {key: self._score(pair.receiver, state, ids, full) for key, state, ids in found},
            "agreement": {key: agreeing(ids, full) for key, _, ids in found},
        }

    def _sender(self) -> ContextStates:
        """The sender's states of the context, with the hidden states."""
        return self._newest.get(
            self.case.context_ids,
            "sender",
            lambda: full_states(
                self.pair.sender, self.case.context_ids, keep_hidden=True, chunk_tokens=self.chunk_tokens
            ),
        )

    def _receiver(self) -> ContextStates:
        """A private prefill of the context."""
        return self._newest.get(
            self.case.context_ids,
            "receiver",
            lambda: full_states(self.pair.receiver, self.case.context_ids, chunk_tokens=self.chunk_tokens),
        )

    def _alone(self, sender: ContextStates, receiver: ContextStates) -> dict[str, Any]:
        """The full prefill's answer and score, and the score of the sender by itself."""
        full = self._outcome(self.pair.receiver, [receiver])[0]
        sender_alone = self._outcome(self.pair.sender, [sender])[0]
        return {
            "context": self.case.context_key,
            "tokens": len(self.case.context_ids),
            "answer_ids": full,
            "full": self._score(self.pair.receiver, receiver, full, full),
            "sender": self._score(self.pair.sender, sender, sender_alone, full),
        }

    def recompute_seconds(self, groups: Sequence[Group], repeats: int) -> dict[str, float]:
        """Median seconds that the receiver computes for the context under each group; runs of the groups alternate."""
        sender = self._sender()
        seconds: dict[str, list[float]] = {name(group): [] for group in groups}
        for _ in range(repeats):
            for group in groups:
                began = time.perf_counter()
                group_states(self.pair.receiver, self.case.context_ids, sender, group)
                seconds[name(group)].append(time.perf_counter() - began)
        return {key: sorted(values)[len(values) // 2] for key, values in seconds.items()}

    def _outcome(self, ops: LayerOps, states: Sequence[ContextStates]) -> list[list[int]]:
        """What is answered over each of ``states``; of a metric that needs no answer the gold one's most likely tokens."""
        case, lines = self.case, self.case.num_lines
        if self.metric.needs_logits:
            gold = case.answer_ids[:FORCED_TOKENS]
            return [forced_logits(ops, [each], case.suffix_ids, gold)[0].argmax(-1).tolist() for each in states]

        def done(ids: Sequence[int]) -> bool:
            return bool(lines) and has_lines(self.pair.decode(ids), lines)

        return greedy_answers(
            ops, states, case.suffix_ids, max_new_tokens=case.max_new_tokens, eos=self.pair.eos, done=done
        )

    def _score(self, ops: LayerOps, states: ContextStates, answer: Sequence[int], full: Sequence[int]) -> float:
        if self.metric is AGREEMENT:
            return float(Levenshtein.normalized_similarity(answer, full))
        if self.metric.needs_logits:
            gold = self.case.answer_ids
            return likelihood_score(forced_logits(ops, [states], self.case.suffix_ids, gold)[0], gold)
        text = self.metric.cut(self.pair.decode(answer), self.case.num_lines)
        return self.metric.score(text, self.case.answers)


def agreeing(answer: Sequence[int], reference: Sequence[int]) -> float:
    """Share of the longer of two answers that both have before the first difference (both empty: 1)."""
    longer = max(len(answer), len(reference))
    same = 0
    for mine, wanted in zip(answer, reference, strict=False):
        if mine != wanted:
            break
        same += 1
    return same / longer if longer else 1.0
