"""The arms that ``kvkin evaluate`` compares, and what each of them does on one case.

Runs in the caller's process over the LayerOps of both models. An arm is a way for the receiver to come by its KV of a context whose
KV the sender holds; ``full`` computes it all, and ``sender`` is the sender answering by itself. All KV is local: the time to first
token is the compute of an arm's context states and of the suffix up to the first logits, and the bytes are those that a plan of
this kind would pull (docs/design.md section 5). CacheBlend: Yao et al., EuroSys'25. DroidSpeak: Liu et al., NSDI'26.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kvkin.engines.answers import forced_logits, greedy_answers
from kvkin.engines.layer_ops import LayerOps
from kvkin.engines.states import ContextStates, blend_states, full_states, group_states
from kvkin.kv.errors import ConfigError
from kvkin.kv.layout import KVLayout
from kvkin.kv.plan import LayerGroup
from kvkin.tools.model_pair import Pair
from kvkin.tools.profile_search import name, order, parse
from kvkin.tools.quality_cases import Case
from kvkin.tools.scoring import EvaluationMetric, has_lines, likelihood_score

ArmKind = Literal["full", "sender", "reuse", "blend", "group"]


@dataclass(frozen=True)
class Arm:
    """One arm; ``ratio`` is CacheBlend's share of recomputed tokens, ``group`` DroidSpeak's recomputed layers."""

    kind: ArmKind
    group: LayerGroup | None = None
    ratio: float | None = None
    check_layer: int = 1

    @property
    def name(self) -> str:
        """``full``, ``blend 0.16``, ``group 10-20``: its key in records and results."""
        if self.kind == "blend":
            return f"blend {self.ratio:g}"
        return f"group {name(self.group)}" if self.kind == "group" else self.kind

    def pulled_bytes(self, num_tokens: int, layout: KVLayout) -> int:
        """Bytes that would be pulled for a context: KV of the layers that are not wholly recomputed, and E where the
        recompute starts above layer 0."""
        kv = num_tokens * layout.kv_token_bytes
        if self.kind in ("full", "sender"):
            return 0
        if self.kind == "blend":
            return (layout.num_layers - self.check_layer) * kv
        if self.group is None:
            return layout.num_layers * kv
        hidden = num_tokens * layout.hidden_size * layout.dtype_bytes if self.group.start else 0
        return (layout.num_layers - len(self.group)) * kv + hidden


def make_arms(
    ratios: Iterable[float], groups: Iterable[LayerGroup], *, num_layers: int, check_layer: int = 1
) -> list[Arm]:
    """The arms in the order in which results list them: full, sender, reuse, blends by ratio, groups by size; each once.

    Raises ConfigError for a ratio, check layer or group that the models do not have.
    """
    if not 0 <= check_layer < num_layers:
        raise ConfigError("check_layer", f"{check_layer}", f"a layer: 0 to {num_layers - 1}")
    for ratio in (ratios := list(ratios)):
        if not 0 <= ratio <= 1:
            raise ConfigError("blend_ratios", f"{ratio:g} is no share of the tokens", "0 to 1")
    for group in (groups := list(groups)):
        if not 0 <= group.start < group.stop <= num_layers:
            raise ConfigError("groups", f"{name(group)} is no range of layers", f"A-B with 0 <= A < B <= {num_layers}")
    blends = [Arm("blend", ratio=ratio, check_layer=check_layer) for ratio in sorted(set(ratios))]
    chosen = [Arm("group", group) for group in sorted(set(groups), key=order)]
    return [Arm("full"), Arm("sender"), Arm("reuse"), *blends, *chosen]


def parse_groups(texts: Iterable[str]) -> list[LayerGroup]:
    """Groups as they are written on the command line: ``10-20``, several of them also in one text. Raises ConfigError."""
    found = []
    for text in (part for each in texts for part in each.replace(",", " ").split()):
        try:
            group = parse(text)
        except ValueError as error:
            raise ConfigError("groups", str(error), "A-B, half-open, such as 10-20") from None
        if group is not None:  # full reuse is an arm of its own
            found.append(group)
    return found


def measure_context(
    pair: Pair,
    cases: Sequence[Case],
    arms: Sequence[Arm],
    metric: EvaluationMetric,
    *,
    turn: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[dict[str, Any]]:
    """Every arm (the sender among them) on the cases of one context, a record each:
    ``{"context", "tokens", "suffix_tokens", "arms": {name: {"score", "ttft_s", ...}}}``.

    An arm's states of the context are computed, and timed, once; a case's time to first token is that and its own suffix. The
    sender goes first: its states are what the others reuse. The receiver's arms follow one after the other, and ``turn`` (the
    context's number) decides which of them begins, so that drift of the machine hits none more than another.
    """
    with_hidden = any(arm.group is not None and arm.group.start for arm in arms)
    context_ids = cases[0].context_ids
    receiving = [arm for arm in arms if arm.kind != "sender"]
    start = turn % len(receiving)
    states: dict[str, ContextStates] = {}
    seconds: dict[str, float] = {}
    layer_tokens: dict[str, int] = {}
    firsts: dict[str, list[float]] = {}
    for arm in (Arm("sender"), *receiving[start:], *receiving[:start]):
        ops = pair.sender if arm.kind == "sender" else pair.receiver
        began = clock()
        states[arm.name], layer_tokens[arm.name] = _states(arm, pair, context_ids, states.get("sender"), with_hidden)
        _settle(ops)
        seconds[arm.name] = clock() - began
        for case in cases:
            began = clock()
            forced_logits(ops, [states[arm.name]], case.suffix_ids, [0])  # the logits of one token: the first
            _settle(ops)
            firsts.setdefault(arm.name, []).append(clock() - began)
    names = [arm.name for arm in receiving]
    records = []
    for index, case in enumerate(cases):
        found = _outcomes(pair, pair.receiver, case, metric, [states[key] for key in names])
        outcomes = dict(zip(names, found, strict=True))
        outcomes["sender"] = _outcomes(pair, pair.sender, case, metric, [states["sender"]])[0]
        measured = {
            arm.name: {
                "ttft_s": seconds[arm.name] + firsts[arm.name][index],
                "layer_tokens": layer_tokens[arm.name],
                "bytes": arm.pulled_bytes(len(context_ids), pair.family.layout),
            }
            | outcomes[arm.name]
            for arm in arms
        }
        sizes = {"tokens": len(context_ids), "suffix_tokens": len(case.suffix_ids)}
        records.append({"context": case.context_key, **sizes, "arms": measured})
    return records


def _states(
    arm: Arm, pair: Pair, context: Sequence[int], sender: ContextStates | None, with_hidden: bool
) -> tuple[ContextStates, int]:
    """An arm's states of the context, and the layer-tokens computed for them; ``sender`` are the sender's, once it has some."""
    ops, chunk = pair.receiver, pair.family.config.chunk_tokens
    if arm.kind == "sender":
        states = full_states(pair.sender, context, keep_hidden=with_hidden, chunk_tokens=chunk)
        return states, pair.sender.num_layers * len(context)
    if arm.kind == "full":
        return full_states(ops, context, chunk_tokens=chunk), ops.num_layers * len(context)
    assert sender is not None, "the sender goes first"
    if arm.kind == "blend":
        assert arm.ratio is not None
        # as in CacheBlend's own implementation: the check layer's fresh KV is there for all tokens, so it is kept
        return blend_states(ops, context, sender, ratio=arm.ratio, check_layer=arm.check_layer, update_check_layer=True)
    return group_states(ops, context, sender, arm.group), len(arm.group or ()) * len(context)


def _outcomes(
    pair: Pair, ops: LayerOps, case: Case, metric: EvaluationMetric, states: Sequence[ContextStates]
) -> list[dict[str, Any]]:
    """Score (and, where one is generated, the answer) over each of ``states``."""
    if metric.needs_logits:
        forced = (forced_logits(ops, [each], case.suffix_ids, case.answer_ids)[0] for each in states)
        return [{"score": likelihood_score(logits, case.answer_ids)} for logits in forced]

    def done(ids: Sequence[int]) -> bool:
        return bool(case.num_lines) and has_lines(pair.decode(ids), case.num_lines)

    model = pair.sender_name if ops is pair.sender else pair.receiver_name
    answers = greedy_answers(
        ops,
        states,
        case.suffix_ids,
        max_new_tokens=case.max_new_tokens,
        eos=frozenset(pair.family.models[model].eos_ids),
        done=done,
    )
    texts = [metric.cut(pair.decode(ids), case.num_lines) for ids in answers]
    return [{"score": metric.score(text, case.answers), "answer": text} for text in texts]


def _settle(ops: LayerOps) -> None:
    """Wait for the device: its work is queued, and a clock must not stop before it is done."""
    if ops.device.type == "cuda":
        torch.cuda.synchronize(ops.device)
