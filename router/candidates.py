"""Candidates: reuse plans in the making, extended span by span from what nodes hold; the policy weighs them (router/policy.py).

A candidate is cheap on purpose: many are priced for each request, one becomes a plan. Pure.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

from kvkin.kv.cost import (
    NO_WORK,
    CostSettings,
    Estimate,
    NodeRates,
    Work,
    estimate,
    first_token_s,
    prefill_work,
    with_reuse,
    with_suffix,
)
from kvkin.kv.plan import Holder, LayerSource, PlanKind, ReusePlan, Segment
from kvkin.kv.provenance import Provenance
from kvkin.router.chains import Match, Run
from kvkin.router.facts import Facts, Option
from kvkin.router.groups import LATE, WIRE, ahead_of, best_group
from kvkin.router.policy_types import NodeView, PolicyRequest, PolicySettings
from kvkin.transport.messages import Reuse

_IDLE = NodeRates()


class Leg:
    """Blocks [start, stop) reused in one way from one run."""

    __slots__ = ("loss", "node", "option", "run", "start", "stop")

    def __init__(self, start: int, stop: int, option: Option, node: str, run: Run, loss: float) -> None:
        self.start, self.stop, self.option = start, stop, option
        self.node, self.run, self.loss = node, run, loss


class Receiver:
    """A decode node that may run the request, with what pricing needs of it. ``penalty_s``: it must be better by so much."""

    __slots__ = ("_bytes_per_s", "block_s", "name", "penalty_s", "queue_s", "rate", "view")

    def __init__(self, view: NodeView, desk: Desk) -> None:
        self.view, self.name, self.penalty_s = view, view.name, 0.0
        self.rate = desk.settings.layer_tokens_per_s(view.rates)
        self.queue_s = view.rates.queued_tokens * desk.facts.num_layers / self.rate
        self.block_s = desk.size / self.rate
        self._bytes_per_s: dict[str, float] = {}

    def covers(self, other: Receiver) -> bool:
        """At least as fast and as free as another one."""
        ours, theirs = self.view.rates.pull_bytes_per_s, other.view.rates.pull_bytes_per_s
        return self.rate >= other.rate and self.queue_s <= other.queue_s and ours >= theirs

    def bytes_per_s(self, source: str, desk: Desk) -> float:
        found = self._bytes_per_s.get(source)
        if found is None:
            view = desk.nodes.get(source)
            found = desk.settings.bytes_per_s(self.view.rates, _IDLE if view is None else view.rates)
            self._bytes_per_s[source] = found
        return found


class Candidate:
    """Legs from block 0 to ``stop`` on a receiver, the rest computed. ``before`` is the provenance at ``stop``, None after a
    new taint. ``rank`` orders candidates: the objective with what speaks against it."""

    __slots__ = ("before", "exact", "legs", "loss", "objective", "rank", "receiver", "stop", "ttft_s", "work")

    def __init__(
        self, receiver: Receiver, legs: tuple[Leg, ...], stop: int, before: Provenance | None, loss: float, work: Work
    ) -> None:
        self.receiver, self.legs, self.stop, self.before = receiver, legs, stop, before
        self.exact, self.loss, self.work = before is not None and before.exact, loss, work
        self.ttft_s = self.objective = self.rank = math.inf


class Desk:
    """Everything that pricing one request's candidates needs. ``ready_s`` says when live sources are complete, by order id."""

    def __init__(
        self, request: PolicyRequest, facts: Facts, nodes: Mapping[str, NodeView], policy: PolicySettings
    ) -> None:
        self.request, self.facts, self.nodes, self.policy = request, facts, nodes, policy
        self.settings: CostSettings = policy.cost
        self.beta, self.overhead_s = policy.beta, policy.cost.stream_overhead_s
        self.size = request.block_size
        # at least one token is always computed
        self.max_blocks = min(request.num_blocks, (request.num_tokens - 1) // self.size)
        self.min_pull_blocks = -(-policy.min_pull_tokens // self.size)
        self.max_legs = policy.max_segments - 1
        self.max_loss = _max_loss(request)
        self.only_own = request.reuse is Reuse.OWN
        self.only_exact = self.only_own or request.reuse is Reuse.EXACT
        self.ready_s: dict[str, float] = {}
        deadline_s = math.inf if request.deadline_s is None else request.deadline_s
        # a plan that keeps its target beyond the deadline keeps nothing
        self.slo_s = None if request.slo_s is None else min(request.slo_s, deadline_s)
        self.late_s = deadline_s if self.slo_s is None else self.slo_s

    # --- extensions --------------------------------------------------------------------------------------------------

    def nothing(self, receiver: Receiver) -> Candidate:
        return self.price(Candidate(receiver, (), 0, self.facts.provenance, 0.0, NO_WORK))

    def with_own(self, base: Candidate, match: Match) -> list[Candidate]:
        """``base`` continued, run by run, with blocks of the receiver's own lineage: exact ones, and tainted ones if allowed."""
        found: list[Candidate] = []
        current, facts = base, self.facts
        for run in match.runs:
            if run.stop_block <= current.stop:
                continue
            before, provenance = current.before, run.provenance
            if before is None or provenance.lineage_id != facts.lineage_id or run.kv_layers < facts.num_layers:
                break
            if not provenance.exact and not self._allows(provenance.loss):
                break
            if run.start_block < current.stop:
                fits = provenance.key == before.key
            else:
                fits = run.start_block == current.stop and provenance.follows(before, current.stop * self.size)
            if not fits:
                break
            option = facts.whole if provenance.exact else facts.kept
            longer = self._extend(current, option, match.node, run, provenance, provenance.loss)
            if longer is None:
                break
            found.append(longer)
            current = longer
        return found

    def with_exact(self, base: Candidate, match: Match) -> list[Candidate]:
        """``base`` continued with exact blocks whose lower layers are the receiver's own: the result is exact as well."""
        found: list[Candidate] = []
        current = base
        for run in match.runs if base.exact else ():
            if not run.provenance.exact:
                break
            option = self.facts.exact_option(run.provenance.lineage_id, run.kv_layers, run.e_layers)
            if run.stop_block <= current.stop:
                continue
            longer = option and self._extend(current, option, match.node, run, base.before, 0.0)
            if not longer:
                break
            found.append(longer)
            current = longer
        return found

    def with_partial(self, base: Candidate, match: Match, first: Option | None = None) -> list[Candidate]:
        """``base`` continued, run by run, with another model's blocks under recompute groups, the best for each run. ``first``
        is that of the first run where the caller knows it."""
        found: list[Candidate] = []
        current = base
        for run in match.runs if not self.only_exact else ():
            if run.stop_block <= current.stop:
                continue
            option = first
            if option is None:
                option, _ = best_group(self, current, run, match.node, ahead_of(self, current, run.stop_block))
            first = None
            if option is None:
                break
            loss = current.loss + option.loss + run.provenance.loss
            longer = self._extend(current, option, match.node, run, None, loss)
            if longer is None:
                break
            found.append(longer)
            current = longer
        return found

    def bare(self, receiver: Receiver, held_blocks: int) -> Candidate:
        """What a receiver holds of its own, taken for exact and not priced: what estimates begin with."""
        return Candidate(receiver, (), held_blocks, self.facts.provenance, 0.0, NO_WORK)

    # --- pricing -----------------------------------------------------------------------------------------------------

    def alone_s(self, receiver: Receiver, held_blocks: int) -> float:
        """Estimated TTFT on a node that computes everything behind the blocks that it holds itself."""
        start = held_blocks * self.size
        work = prefill_work(self.request.num_tokens - start, start, self.facts.num_layers, self.settings)
        return receiver.queue_s + work / receiver.rate

    def computed_s(self, candidate: Candidate, stop_block: int) -> float:
        """What computing the blocks from the candidate's end to ``stop_block`` adds to its rank: reuse cannot save more."""
        first, stop = candidate.stop * self.size, stop_block * self.size
        seconds = prefill_work(stop - first, first, self.facts.num_layers, self.settings) / candidate.receiver.rate
        late = LATE if candidate.ttft_s > self.late_s else 0.0
        return ((1.0 + self.policy.beta) * (1.0 + self.policy.exact_preference) + late) * seconds

    def price(self, candidate: Candidate) -> Candidate:
        """Fill in time, objective and rank: approximate and late candidates must be better by a margin."""
        receiver, work, policy = candidate.receiver, candidate.work, self.policy
        start, layers = candidate.stop * self.size, self.facts.num_layers
        suffix = prefill_work(self.request.num_tokens - start, start, layers, self.settings)
        ttft_s = first_token_s(work, suffix, receiver.rate, receiver.queue_s, layers)
        objective = ttft_s + policy.beta * ((work.recompute + suffix) / receiver.rate + work.order_s)
        rank = objective + receiver.penalty_s + WIRE * work.pull_s
        if not candidate.exact:
            rank += objective * policy.exact_preference
        if ttft_s > self.late_s:
            rank += LATE * (ttft_s - self.late_s)
        candidate.ttft_s, candidate.objective, candidate.rank = ttft_s, objective, rank
        return candidate

    def estimate(self, candidate: Candidate) -> Estimate:
        """The candidate's time by phase."""
        start, layers = candidate.stop * self.size, self.facts.num_layers
        work = with_suffix(candidate.work, self.request.num_tokens - start, start, layers, self.settings)
        return estimate(work, candidate.receiver.view.rates, layers, self.settings)

    def _allows(self, loss: float) -> bool:
        return not self.only_exact and loss <= self.max_loss

    def _extend(
        self, base: Candidate, option: Option, node: str, run: Run, before: Provenance | None, loss: float
    ) -> Candidate | None:
        """One more leg; None if it is too short to be pulled or the plan would have too many segments."""
        start, receiver = base.stop, base.receiver
        stop = min(self.max_blocks, run.stop_block)
        blocks = stop - start
        local = node == receiver.name
        if blocks <= 0 or len(base.legs) >= self.max_legs or (not local and blocks < self.min_pull_blocks):
            return None
        work = with_reuse(
            base.work,
            blocks * self.size,
            start * self.size,
            option.recomputed_layers,
            0 if local else blocks * option.kv_block_bytes,
            0 if local else blocks * option.e_block_bytes,
            1.0 if local else receiver.bytes_per_s(node, self),
            self.ready_s.get(run.order_id, 0.0) if run.order_id else 0.0,
            self.settings,
        )
        leg = Leg(start, stop, option, node, run, _added(loss, base.loss, option))
        return self.price(Candidate(receiver, (*base.legs, leg), stop, before, loss, work))

    # --- the winner --------------------------------------------------------------------------------------------------

    def plan(self, candidate: Candidate, reason: str) -> ReusePlan:
        segments = [self._segment(leg) for leg in candidate.legs]
        segments.append(Segment(candidate.stop * self.size, self.request.num_tokens))
        return ReusePlan(tuple(segments), reason)

    def _segment(self, leg: Leg) -> Segment:
        option = leg.option
        holder = Holder(leg.node, leg.run.provenance, leg.run.order_id)
        return Segment(
            leg.start * self.size,
            leg.stop * self.size,
            sources=tuple(LayerSource(span, holder) for span in option.pulled),
            source_first_position=leg.start * self.size,
            e_layer=option.e_layer,
            e_holder=None if option.e_layer is None else holder,
            recompute=option.group,
            kind=option.kind,
            loss=leg.loss,
        )


def _max_loss(request: PolicyRequest) -> float:
    if request.reuse is Reuse.ANY:
        return math.inf
    if request.reuse is not Reuse.BOUNDED or not request.max_loss >= 0.0:
        return 0.0
    # a bound admits profiled losses only, however high it is
    return min(request.max_loss, sys.float_info.max)


def _added(loss: float, before: float, option: Option) -> float:
    """Loss that a segment adds by itself: what its source brings along is in the source's provenance."""
    if option.kind is not PlanKind.PARTIAL:
        return 0.0
    if not option.kept:
        return option.loss
    return 0.0 if loss == before else loss - before


def shortlist(matches: Sequence[Match], desk: Desk, most: int) -> list[Match]:
    """Of matches that offer the same the one from whose node the fewest streams pull; the ``most`` longest of each lineage."""
    best: dict[tuple[object, ...], Match] = {}
    counts: dict[bytes, int] = {}
    last, nodes = desk.max_blocks, desk.nodes
    for match in matches:
        run = match.runs[-1]
        key = (run.provenance.key, min(run.stop_block, last), run.e_layers, run.kv_layers, run.order_id != "")
        known = best.get(key)
        if known is None:
            lineage_id = run.provenance.lineage_id
            count = counts.get(lineage_id, 0)
            if count < most:
                best[key], counts[lineage_id] = match, count + 1
        elif nodes[match.node].rates.leases < nodes[known.node].rates.leases:
            best[key] = match
    return list(best.values())
