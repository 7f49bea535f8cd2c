"""Drift: how far reuse across models is from private runs, pair by pair, and which pairs are switched off for it.

A share of the requests that reuse another model's KV approximately is checked by its decode node against a private run; the samples
come here (docs/operations.md, Drift). Pure; one per router process, asked by its core.

A pair whose bound is left stays off: nothing of it is reused any more, so nothing could show that it is well again. It is on
again after a restart of the router with another profile or other weights, never by itself and not for other settings.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kvkin.kv.hashing import digest
from kvkin.kv.plan import ReusePlan
from kvkin.kv.provenance import exact_provenance
from kvkin.router.chains import Match, Run
from kvkin.router.drift_estimate import PairEstimate, left
from kvkin.router.drift_types import DriftBound, DriftSettings, Judged, Pair, SwitchedOff
from kvkin.router.policy_types import Decision, FamilyView, PolicyRequest
from kvkin.router.taints import History, Step, Taints, foreign, group_of
from kvkin.transport.messages import DriftStatus, Reuse
from kvkin.transport.node_messages import DriftCheck, DriftSample, DriftSource

# A sample names the models of one plan.
MAX_SOURCES = 64
MAX_DIVERGENCE = 100.0  # nats; nodes clip at less, and far larger figures would make estimates infinite


class _Watched:
    """One pair: what was seen of it, since when that is so, and whether it is off. ``left`` is the bound that it was switched off
    for, perhaps by an earlier process; ``bound`` is today's."""

    def __init__(self, bound: DriftBound, now: float) -> None:
        self.bound, self.left, self.since, self.off, self.why = bound, bound, now, False, ""
        self.estimate = PairEstimate()


class DriftWatch:
    """All pairs of one router. ``families`` are what the policy may see: without the groups of pairs that are off.

    ``logits`` are the digests of all that the logits of each model come of (``ModelIdentity.logits_digest``).
    """

    def __init__(
        self,
        settings: DriftSettings,
        families: Mapping[str, FamilyView],
        remembered: Iterable[SwitchedOff] = (),
        now: float = 0.0,
        logits: Mapping[str, bytes] = {},
    ) -> None:
        self._settings, self._whole = settings, dict(families)
        self.families: Mapping[str, FamilyView] = self._whole
        self._names = {key: names for family in families.values() for key, names in family.models_of.items()}
        self._family_of = {key: name for name, family in families.items() for key in family.models_of}
        self._logits = {name: logits.get(name, b"") for names in self._names.values() for name in names}
        self._pairs: dict[Judged, _Watched] = {}
        # by KV alone: what blocks come of has nothing to do with heads
        self._off: frozenset[Pair] = frozenset()
        self._taints = Taints(self._whole)
        self._elsewhere: list[tuple[SwitchedOff, float]] = []  # of models that are not here now, and since when
        self._restore(remembered, now)

    # --- which requests are checked --------------------------------------------------------------------------------------

    def check_of(self, request_id: str, plan: ReusePlan, receiver: bytes) -> DriftCheck | None:
        """What to ask of the node that executes ``plan`` for the model with lineage id ``receiver``; None: no check.

        A hash of the router's own request id decides: a client cannot choose, a retry keeps its fate, a test can know.
        """
        if not self._settings.share or not chosen(request_id, self._settings.share):
            return None
        own = [
            Step(sender, receiver, segment.kind, group_of(segment))
            for segment in plan.segments
            for sender in sorted(foreign(segment, receiver))
        ]
        if self._names.keys().isdisjoint(step.sender for step in own):
            return None
        *_, (_, history) = self._taints.fold(plan, receiver)
        # what the plan builds on is laid to the pairs that made it; where that is not known, or another model's, nobody is judged
        whole = None if history is None else history.steps
        inherited = whole is None or any(step.receiver != receiver for step in whole)
        steps = own if whole is None or inherited else whole
        sources = tuple(
            DriftSource(step.sender, self._names[step.sender][0], step.kind, step.group)
            for step in steps
            if step.sender in self._names
        )
        return DriftCheck(self._settings.tokens, sources, inherited)

    def dispatched(self, plan: ReusePlan, receiver: bytes) -> None:
        """Remember what the blocks of a plan will come of."""
        self._taints.learn(plan, receiver)

    # --- what checks show ------------------------------------------------------------------------------------------------

    def problem(self, sample: DriftSample) -> str:
        """Why a node's sample cannot be true; empty if it can."""
        figures = (sample.agreement, sample.divergence)
        if (
            not all(map(math.isfinite, figures))
            or not 0 <= sample.agreement <= 1
            or not 0 <= sample.divergence <= MAX_DIVERGENCE
        ):
            return f"agreement {sample.agreement}, divergence {sample.divergence}"
        if not 0 < len(sample.sources) <= MAX_SOURCES or sample.tokens < 1:
            return f"{len(sample.sources)} sources, {sample.tokens} tokens"
        names = self._names.get(sample.receiver, ())
        if not names or any(one.lineage_id == sample.receiver for one in sample.sources):
            return "no such pair of models"
        if sample.model and sample.model not in names:
            return f"{sample.model} is no such receiver"
        return ""

    def sampled(self, sample: DriftSample, now: float) -> list[DriftStatus]:
        """Take in a sample; returns the pairs that it has switched off.

        It judges a pair only if nothing else was in it: of several senders, or of blocks that somebody else had made approximate before,
        it cannot be told whose fault it was.
        """
        switched = []
        senders = dict.fromkeys(source.lineage_id for source in sample.sources)
        alone = len(senders) == 1 and not sample.inherited
        # a node that does not name the model means any of these layers
        judged = {self._logits[sample.model]} if sample.model else self._heads(sample.receiver)
        known = filter(self._names.__contains__, senders)
        for pair in ((sender, sample.receiver, logits) for sender in known for logits in sorted(judged)):
            watched = self._watched(pair, now)
            if not alone:
                watched.estimate = watched.estimate.with_other()
                continue
            settings, bound = self._settings, watched.bound
            watched.estimate = watched.estimate.with_sample(sample, bound, settings.half_life_samples)
            why = left(watched.estimate, bound, settings.min_samples, settings.false_alarms)
            if why and not watched.off:
                watched.off, watched.since, watched.why = True, now, why
                switched.append(self._status(pair, watched, now))
        if switched:
            self._apply()
        return switched

    def records(self, now: float) -> tuple[SwitchedOff, ...]:
        """What must survive a restart of the router: all that is off, pairs of models included that are not in this configuration."""
        elsewhere = [msgspec.structs.replace(record, off_s=now - since) for record, since in self._elsewhere]
        here = (
            SwitchedOff(
                sender=pair[0],
                receiver=pair[1],
                logits=pair[2],
                sender_names=self._name(pair[0]),
                receiver_names=", ".join(self._receivers(pair)),
                bound=watched.left,
                estimate=watched.estimate.without_evidence(),
                why=watched.why,
                off_s=now - watched.since,
            )
            for pair, watched in self._pairs.items()
            if watched.off
        )
        return (*here, *elsewhere)

    def status(self, now: float) -> tuple[DriftStatus, ...]:
        """Every pair of which something is known, by name."""
        found = [self._status(pair, watched, now) for pair, watched in self._pairs.items()]
        return tuple(sorted(found, key=lambda one: (one.receiver, one.sender)))

    # --- what the policy sees --------------------------------------------------------------------------------------------

    def usable(self, matches: Sequence[Match]) -> Sequence[Match]:
        """``matches`` with the losses of today's profiles, without blocks that came of a pair that is off and what follows them.

        Blocks whose history is not known here (another router's plan, a group that is no longer offered) have an infinite loss:
        they are of use to who asks for any reuse. While any pair of their family is off they count as having come of it.
        """
        return [read for read in map(self._read, matches) if read is not None]

    def explained(self, decision: Decision, asked: PolicyRequest, matches: Sequence[Match]) -> Decision:
        """The decision with a word on what ``matches`` offered and was not looked at."""
        if not self._off or asked.reuse not in (Reuse.BOUNDED, Reuse.ANY):
            return decision
        receiver = (asked.lineage.id, self._logits[asked.model])
        offered = {run.provenance.lineage_id for match in matches for run in match.runs}
        seen = [(one, self._pairs.get((one, *receiver))) for one in sorted(offered)]
        off = [(one, pair.why) for one, pair in seen if pair is not None and pair.off and self._admitted(one, asked)]
        words = [f"{self._name(one)} is switched off as its sender ({why})" for one, why in off]
        if any((read := self._read(match)) is None or len(read.runs) < len(match.runs) for match in matches):
            words.append("blocks that came of a switched-off pair are not used")
        if not words:
            return decision
        reason = "; ".join([decision.reason, f"drift: {', '.join(words)}"])
        return msgspec.structs.replace(
            decision, reason=reason, plan=msgspec.structs.replace(decision.plan, reason=reason)
        )

    def _read(self, match: Match) -> Match | None:
        """What ``usable`` makes of one match; itself where nothing changes, None where nothing is left."""
        if all(run.provenance.exact for run in match.runs):
            return match
        runs: list[Run] = []
        before = exact_provenance(match.runs[0].provenance.lineage_id)
        for run in match.runs:
            history = self._taints.traced(run.provenance, before)
            if not self._trusts(history, run.provenance.lineage_id):
                break
            loss = math.inf if history is None else history.loss
            before = run.provenance
            if before.loss != loss:
                before = msgspec.structs.replace(before, loss=loss)
                run = msgspec.structs.replace(run, provenance=before)
            runs.append(run)
        if len(runs) == len(match.runs) and all(map(operator.is_, runs, match.runs)):
            return match
        return Match(match.node, tuple(runs)) if runs else None

    def _trusts(self, history: History | None, lineage_id: bytes) -> bool:
        if not self._off:
            return True
        if history is not None:
            return history.pairs.isdisjoint(self._off)
        return self._family_of.get(lineage_id) not in {self._family_of[pair[1]] for pair in self._off}

    def _admitted(self, sender: bytes, asked: PolicyRequest) -> bool:
        """Whether the request would have allowed some reuse of the pair."""
        most = math.inf if asked.reuse is Reuse.ANY else asked.max_loss
        groups = self._whole[asked.family].groups
        losses = [choice.loss for name in self._names[sender] for choice in groups.get((name, asked.model), ())]
        return any(loss <= most and (asked.reuse is Reuse.ANY or math.isfinite(loss)) for loss in losses)

    # --- inside ----------------------------------------------------------------------------------------------------------

    def _apply(self) -> None:
        """New views, made only when the set of pairs changes: the policy remembers what follows from each of them."""
        off = [pair for pair, watched in self._pairs.items() if watched.off]
        self._off = frozenset((sender, receiver) for sender, receiver, _ in off)
        names = {
            (sender, receiver) for pair in off for sender in self._names[pair[0]] for receiver in self._receivers(pair)
        }
        self.families = {name: _without(family, names) for name, family in self._whole.items()}

    def _restore(self, remembered: Iterable[SwitchedOff], now: float) -> None:
        for record in remembered:
            here = {record.sender, record.receiver} <= self._names.keys()
            heads = self._heads(record.receiver) if here else set[bytes]()
            judged = sorted(heads & {record.logits} if record.logits else heads)
            if not judged:
                self._elsewhere.append((record, now - record.off_s))
            for pair in ((record.sender, record.receiver, logits) for logits in judged):
                if not record.profiled_since(self._bound(pair)):
                    watched = self._watched(pair, now)
                    watched.left, watched.off, watched.why = record.bound, True, record.why
                    watched.estimate, watched.since = record.estimate.without_evidence(), now - record.off_s
        if self._pairs:
            self._apply()

    def _heads(self, lineage_id: bytes) -> set[bytes]:
        """What the logits of the models with a lineage come of: one digest, or several if their heads differ."""
        return {self._logits[name] for name in self._names[lineage_id]}

    def _receivers(self, pair: Judged) -> list[str]:
        """Names of the models that answer as the receiver of a pair does."""
        return [name for name in self._names[pair[1]] if self._logits[name] == pair[2]]

    def _watched(self, pair: Judged, now: float) -> _Watched:
        found = self._pairs.get(pair)
        if found is None:
            found = self._pairs[pair] = _Watched(self._bound(pair), now)
        return found

    def _bound(self, pair: Judged) -> DriftBound:
        """Of models with the same weights the bound of the first that has one of its own."""
        bounds = self._settings.bounds
        names = [(sender, receiver) for sender in self._names[pair[0]] for receiver in self._receivers(pair)]
        return next((bounds[one] for one in names if one in bounds), self._settings.bound)

    def _name(self, lineage_id: bytes) -> str:
        return ", ".join(self._names[lineage_id])

    def _status(self, pair: Judged, watched: _Watched, now: float) -> DriftStatus:
        estimate, bound = watched.estimate, watched.bound
        judged = bound.num_bounds > 0 and estimate.own >= self._settings.min_samples
        seen = estimate.own > 0
        return DriftStatus(
            sender=self._name(pair[0]),
            receiver=", ".join(self._receivers(pair)),
            state="off" if watched.off else "ok" if judged else "watching",
            since_s=max(0.0, now - watched.since),
            samples=estimate.samples,
            inherited=estimate.inherited,
            first_token=estimate.first_token.mean if seen else None,
            agreement=estimate.agreement.mean if seen else None,
            divergence=estimate.divergence.mean if seen else None,
            min_first_token=_least(estimate, bound),
            min_agreement=bound.min_agreement,
            max_divergence=bound.max_divergence,
        )


def _least(estimate: PairEstimate, bound: DriftBound) -> float | None:
    """The bound on the first token as it was on average over what was checked; before that, the lowest of all groups."""
    if estimate.judged:
        return estimate.promised.mean
    return min((least for _, least in bound.by_group), default=bound.min_first_token)


def chosen(request_id: str, share: float) -> bool:
    """Whether a request is among the ``share`` of all that is checked."""
    return int.from_bytes(digest(b"drift", request_id.encode())[:8], "little") < share * 2**64


def _without(family: FamilyView, pairs: set[tuple[str, str]]) -> FamilyView:
    """The family without the recompute groups of ``pairs`` (sender, receiver); itself if it has none of them."""
    if pairs.isdisjoint(family.groups):
        return family
    groups = {pair: choices for pair, choices in family.groups.items() if pair not in pairs}
    return msgspec.structs.replace(family, groups=groups)


__all__ = ["DriftBound", "DriftSettings", "DriftWatch", "SwitchedOff", "chosen"]
