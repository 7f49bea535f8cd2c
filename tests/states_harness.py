"""What the tests of ``engines/states.py``, ``answers.py`` and ``lattice.py`` share: pairs of tiny models, counted operations, KL.

The oracle carries out the plan that a state stands for, over unmodified transformers; see ``oracle.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import oracle
import torch
from engine_harness import NUM_LAYERS, computed, contexts, exact, family, partial, plan_of, prompt
from oracle import State
from torch import Tensor

from kvkin.engines.layer_ops import ReferenceOps
from kvkin.engines.states import ContextStates, full_states
from kvkin.kv.plan import LayerGroup

CONTEXT = prompt(37)
SUFFIX = prompt(6, seed=1)
ANSWER = prompt(4, seed=2)
GROUPS = tuple(LayerGroup(a, b) for a in range(NUM_LAYERS) for b in range(a + 1, NUM_LAYERS + 1))
WHOLE = LayerGroup(0, NUM_LAYERS)


@dataclass
class CountedOps:
    """LayerOps that note how many rows each call took, context and suffix apart (positions up to ``len(CONTEXT)`` or beyond)."""

    ops: ReferenceOps
    calls: list[tuple[str, int, int, bool]] = field(default_factory=list)
    """(method, layer, rows, whether the rows are the context's); layer -1 for ``logits``."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.ops, name)
        if name == "logits":

            def logits(hidden: Tensor) -> Any:
                self.calls.append((name, -1, len(hidden), False))
                return found(hidden)

            return logits
        if name not in ("project_kv", "project_qkv", "attend", "finish"):
            return found

        def counted(layer: int, hidden: Tensor, other: Tensor, *rest: Tensor) -> Any:
            # the second tensor of ``finish`` are no positions
            in_context = name != "finish" and int(other.max()) < len(CONTEXT)
            self.calls.append((name, layer, len(hidden), in_context))
            return found(layer, hidden, other, *rest)

        return counted

    def rows(self, *names: str, context: bool) -> int:
        return sum(rows for name, _, rows, in_context in self.calls if name in names and in_context == context)

    def layers(self, name: str) -> list[int]:
        """Layers in which ``name`` was called, in order of the calls."""
        return [layer for called, layer, *_ in self.calls if called == name]


def ops_of(arch: str, name: str = "receiver") -> ReferenceOps:
    return ReferenceOps(family(arch)[name])


@functools.cache
def sender_states(arch: str, name: str = "sender") -> ContextStates:
    return full_states(ops_of(arch, name), CONTEXT, keep_hidden=True)


def oracle_context(arch: str, group: LayerGroup | None, token_ids: Sequence[int] = CONTEXT) -> State:
    """The context's state under the partial plan of ``group`` (None: full reuse of the sender's KV), by the oracle."""
    held = contexts(arch, len(token_ids))
    end = len(token_ids)
    reused = exact(0, end, "sender") if group is None else partial(0, end, (group.start, group.stop), "sender")
    if group == WHOLE:
        reused = computed(0, end)
    return oracle.execute(family(arch)["receiver"], token_ids, plan_of(reused), held)


def oracle_logits(model: Any, state: State, suffix: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Logits (m, vocab) that predict the answer tokens, by the oracle."""
    state = oracle.compute(model, state, suffix)
    return oracle.generate(model, state, len(answer), answer)[2]


def kl(reference: Tensor, logits: Tensor) -> float:
    """KL(reference || logits) in nats by its definition, mean over the rows, in double precision."""
    wanted, found = (torch.log_softmax(part.double(), dim=-1) for part in (reference, logits))
    return float((wanted.exp() * (wanted - found)).sum(dim=-1).mean())


def copied(states: ContextStates) -> ContextStates:
    return ContextStates(*([tensor.clone() for tensor in part] for part in (states.keys, states.values, states.hidden)))


def same(left: ContextStates, right: ContextStates) -> bool:
    """Whether two states are equal, bit for bit."""
    pairs = zip((left.keys, left.values, left.hidden), (right.keys, right.values, right.hidden), strict=True)
    return all(torch.equal(a, b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))
