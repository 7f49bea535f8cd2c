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
    prefill_work,
    with_reuse,
    with_suffix,
)
from kvkin.kv.plan import Holder, LayerSource, PlanKind, ReusePlan, Segment
from kvkin.kv.provenance import Provenance
from kvkin.router.chains import Match, Run
from kvkin.router.facts import Facts, Option
from kvkin.router.policy_types import NodeView, PolicyRequest, PolicySettings
from kvkin.transport.messages import Reuse

_IDLE = NodeRates()
_LATE = 10.0  # a second behind the deadline weighs as much as so many others
_WIRE = 0.01  # a pull that hides behind compute still uses the wire: among equals, the smaller one
_NOT_PRICED = Estimate(0.0, 0.0, 0.0, 0.0, math.inf, 0.0)


class Leg:
    """Blocks [start, stop) reused in one way from one run."""

    __slots__ = ("loss", "node", "option", "run", "start", "stop")

    def __init__(self, start: int, stop: int, option: Option, node: str, run: Run, loss: float) -> None:
        self.start, self.stop, self.option = start, stop, option
        self.node, self.run, self.loss = node, run, loss


class Candidate:
    """Legs from block 0 to ``stop`` on a receiving node. ``before`` is the provenance at ``stop``, None after a new taint."""

    __slots__ = ("before", "estimate", "exact", "legs", "loss", "node", "objective", "rank", "stop", "work")

    def __init__(
        self, node: NodeView, legs: tuple[Leg, ...], before: Provenance | None, exact: bool, loss: float, work: Work
    ) -> None:
        self.node, self.legs, self.before, self.exact, self.loss, self.work = node, legs, before, exact, loss, work
        self.stop = legs[-1].stop if legs else 0
        self.estimate = _NOT_PRICED
        self.objective = self.rank = math.inf


class Desk:
    """Everything that pricing one request's candidates needs. ``ready_s`` says when live sources are complete, by order id."""

    def __init__(
        self, request: PolicyRequest, facts: Facts, nodes: Mapping[str, NodeView], policy: PolicySettings
    ) -> None:
        self.request, self.facts, self.nodes, self.policy = request, facts, nodes, policy
        self.settings: CostSettings = policy.cost
        self.size = request.block_size
        # at least one token is always computed
        self.max_blocks = min(request.num_blocks, (request.num_tokens - 1) // self.size)
        self.min_pull_blocks = -(-policy.min_pull_tokens // self.size)
        self.max_legs = policy.max_segments - 1
        self.max_loss = _max_loss(request)
        self.only_exact = request.reuse is Reuse.EXACT
        self.ready_s: dict[str, float] = {}

    # --- extensions --------------------------------------------------------------------------------------------------

    def nothing(self, node: NodeView) -> Candidate:
        return Candidate(node, (), self.facts.provenance, True, 0.0, NO_WORK)

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

    def with_partial(self, base: Candidate, match: Match) -> list[Candidate]:
        """``base`` continued, run by run, with another model's blocks under recompute groups."""
        found: list[Candidate] = []
        current = base
        for run in match.runs if not self.only_exact else ():
            if run.stop_block <= current.stop:
                continue
            option = self._group(current, run, match.node)
            if option is None:
                break
            loss = current.loss + option.loss + run.provenance.loss
            longer = self._extend(current, option, match.node, run, None, loss)
            if longer is None:
                break
            found.append(longer)
            current = longer
        return found

    # --- pricing -----------------------------------------------------------------------------------------------------

    def alone_s(self, node: NodeView, held_blocks: int) -> float:
        """Estimated TTFT on a node that computes everything behind the blocks that it holds itself."""
        tokens, start, layers = self.request.num_tokens, held_blocks * self.size, self.facts.num_layers
        work = prefill_work(tokens - start, start, layers, self.settings)
        return self.settings.queue_s(node.rates, layers) + work / self.settings.layer_tokens_per_s(node.rates)

    def price(self, candidate: Candidate, penalty_s: float = 0.0) -> Candidate:
        """Fill in estimate, objective and rank: approximate and late candidates must be better by a margin."""
        start, layers, policy = candidate.stop * self.size, self.facts.num_layers, self.policy
        work = with_suffix(candidate.work, self.request.num_tokens - start, start, layers, self.settings)
        found = estimate(work, candidate.node.rates, layers, self.settings)
        candidate.estimate, candidate.objective = found, found.ttft_s + policy.beta * found.node_s
        candidate.rank = candidate.objective + penalty_s + _WIRE * found.pull_s
        if not candidate.exact:
            candidate.rank += candidate.objective * policy.exact_preference
        deadline_s = self.request.deadline_s
        if deadline_s is not None and found.ttft_s > deadline_s:
            candidate.rank += _LATE * (found.ttft_s - deadline_s)
        return candidate

    def _allows(self, loss: float) -> bool:
        return not self.only_exact and loss <= self.max_loss

    def _group(self, base: Candidate, run: Run, node: str) -> Option | None:
        """The cheapest allowed recompute group for a run, by what takes longer: the recompute or the pull."""
        best, best_s = None, math.inf
        spare = self.max_loss - base.loss - run.provenance.loss
        if not spare >= 0.0 and self.max_loss < math.inf:
            return None
        facts = self.facts
        block_s = self.size / self.settings.layer_tokens_per_s(base.node.rates)
        byte_s = 0.0 if node == base.node.name else 1.0 / self._bytes_per_s(base.node, node)
        for option in facts.groups.get(run.provenance.lineage_id, ()):
            e_layer = option.e_layer
            if run.kv_layers < option.needed_layers or (e_layer is not None and e_layer not in run.e_layers):
                continue
            if option.loss > spare and self.max_loss < math.inf:
                continue
            pulled_s = byte_s * option.pulled_layers * facts.kv_block_bytes
            seconds = max(option.recomputed_layers * block_s, pulled_s)
            if seconds < best_s:
                best, best_s = option, seconds
        return best

    def _bytes_per_s(self, receiver: NodeView, node: str) -> float:
        source = self.nodes.get(node)
        return self.settings.bytes_per_s(receiver.rates, _IDLE if source is None else source.rates)

    def _extend(
        self,
        base: Candidate,
        option: Option,
        node: str,
        run: Run,
        before: Provenance | None,
        loss: float,
    ) -> Candidate | None:
        """One more leg; None if it is too short to be pulled or the plan would have too many segments."""
        start, stop = base.stop, min(run.stop_block, self.max_blocks)
        blocks = stop - start
        local = node == base.node.name
        if blocks <= 0 or len(base.legs) >= self.max_legs or (not local and blocks < self.min_pull_blocks):
            return None
        facts = self.facts
        kv_bytes = e_bytes = 0
        bytes_per_s = 1.0
        if not local:
            kv_bytes = blocks * option.pulled_layers * facts.kv_block_bytes
            e_bytes = 0 if option.e_layer is None else blocks * facts.e_block_bytes
            bytes_per_s = self._bytes_per_s(base.node, node)
        ready_s = self.ready_s.get(run.order_id, 0.0) if run.order_id else 0.0
        work = with_reuse(
            base.work,
            blocks * self.size,
            start * self.size,
            option.recomputed_layers,
            kv_bytes,
            e_bytes,
            bytes_per_s,
            ready_s,
            self.settings,
        )
        exact = before is not None and before.exact
        leg = Leg(start, stop, option, node, run, _added(loss, base.loss, option, run))
        return Candidate(base.node, (*base.legs, leg), before, exact, loss, work)

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


def _added(loss: float, before: float, option: Option, run: Run) -> float:
    """Loss that a segment adds by itself: what its source brings along is in the source's provenance."""
    if option.kind is not PlanKind.PARTIAL:
        return 0.0
    if option.group is not None:
        return option.loss
    return 0.0 if loss == before else loss - before


def shortlist(matches: Sequence[Match], max_blocks: int, leases: Mapping[str, float], most: int) -> list[Match]:
    """Of matches that offer the same the one from whose node the fewest streams pull; the ``most`` longest of each lineage."""
    best: dict[tuple[object, ...], Match] = {}
    for match in matches:
        key = tuple(
            (run.provenance.key, min(run.stop_block, max_blocks), run.kv_layers, run.e_layers, run.order_id != "")
            for run in match.runs
        )
        known = best.get(key)
        if known is None or leases.get(match.node, 0.0) < leases.get(known.node, 0.0):
            best[key] = match
    counts: dict[bytes, int] = {}
    found = []
    for match in best.values():
        lineage_id = match.runs[0].provenance.lineage_id
        counts[lineage_id] = counts.get(lineage_id, 0) + 1
        if counts[lineage_id] <= most:
            found.append(match)
    return found
