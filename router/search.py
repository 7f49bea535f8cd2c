"""The policy's search: candidates of one request on one receiver after the other, greedily extended. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvkin.router.candidates import Candidate, Desk, shortlist
from kvkin.router.chains import Match
from kvkin.router.ordering import Ordering
from kvkin.router.policy_types import NodeView

_MAX_CHAINS = 3  # matches of one lineage that are tried: the longest, and shorter ones with more layers


class Search:
    """``weighed`` are all candidates so far."""

    def __init__(self, desk: Desk, matches: Sequence[Match]) -> None:
        self.desk = desk
        self.weighed: list[Candidate] = []
        own, foreign = list[Match](), list[Match]()
        self._local: dict[str, list[Match]] = {}
        for match in matches:
            lineage_id = match.runs[0].provenance.lineage_id
            if lineage_id == desk.facts.lineage_id:
                own.append(match)
            elif desk.facts.offers(lineage_id):
                foreign.append(match)
            self._local.setdefault(match.node, []).append(match)
        leases = {name: node.rates.leases for name, node in desk.nodes.items()}
        self._own = shortlist(own, desk.max_blocks, leases, _MAX_CHAINS)
        self._foreign = shortlist(foreign, desk.max_blocks, leases, _MAX_CHAINS)
        self._receivers: list[tuple[Candidate, float]] = []

    @property
    def best(self) -> Candidate:
        return min(self.weighed, key=lambda candidate: candidate.rank)

    def on(self, receiver: NodeView, penalty_s: float) -> None:
        """Weigh what the receiver could do: its own lineage first, then other models' blocks behind that."""
        desk = self.desk
        nothing = self._weigh(desk.nothing(receiver), penalty_s)
        local = self._local.get(receiver.name, ())
        exact, tainted = self._own_blocks(nothing, [*local, *self._own], penalty_s)
        self._receivers.append((exact, penalty_s))
        if exact.stop == desk.max_blocks and all(leg.node == receiver.name for leg in exact.legs):
            return  # everything is here already, and exact: nothing can be better on this receiver
        foreign = [*local, *(match for match in self._foreign if match.node != receiver.name)]
        best = exact
        for base in (exact, *tainted):
            longer = self._best_longer(base, foreign, penalty_s)
            if longer is not None and longer.rank < best.rank:
                best = longer
        while best is not exact:
            longer = self._best_longer(best, foreign, penalty_s)
            if longer is None or longer.rank >= best.rank:
                return
            best = longer

    def live(self, ordering: Ordering, best: Candidate) -> bool:
        """Weigh pulling from an order while it is computed; whether that beats ``best``, the best without it."""
        desk, order = self.desk, ordering.request
        desk.ready_s[order.order_id] = ordering.ready_s
        candidates = []
        for base, penalty_s in self._receivers:
            for found in self._longer(base, ordering.match):
                if found.legs[-1].run.order_id != order.order_id:
                    continue
                found.work = msgspec.structs.replace(found.work, order_s=ordering.order_s)
                candidates.append(desk.price(found, penalty_s))
        live = min(candidates, key=lambda candidate: candidate.rank, default=None)
        # the order's price is paid either way if it is worth it for others alone
        rival = best.rank + (desk.policy.beta * ordering.order_s if ordering.background else 0.0)
        if live is None or live.rank >= rival:
            return False
        if live.estimate.ttft_s > desk.policy.live_margin * best.estimate.ttft_s:
            return False
        live.rank = min(live.rank, best.rank)
        self.weighed.insert(0, live)
        return True

    def _own_blocks(
        self, nothing: Candidate, matches: Sequence[Match], penalty_s: float
    ) -> tuple[Candidate, list[Candidate]]:
        """The best candidate of exact blocks of the receiver's lineage, and the best with tainted ones if that is longer."""
        exact, tainted = nothing, list[Candidate]()
        for match in matches:
            found = self.desk.with_own(nothing, match)
            if exact is not nothing:
                # what is here already need not be pulled with the rest
                found += self.desk.with_own(exact, match)
            for candidate in found:
                self._weigh(candidate, penalty_s)
                if not candidate.exact:
                    tainted.append(candidate)
                elif candidate.rank <= exact.rank:
                    exact = candidate
        longest = min(tainted, key=lambda candidate: candidate.rank, default=None)
        return exact, [longest] if longest is not None and longest.stop > exact.stop else []

    def _best_longer(self, base: Candidate, matches: Sequence[Match], penalty_s: float) -> Candidate | None:
        best = None
        for match in matches:
            if match.runs[-1].stop_block > base.stop:
                for longer in self._longer(base, match):
                    self._weigh(longer, penalty_s)
                    if best is None or longer.rank < best.rank:
                        best = longer
        return best

    def _longer(self, base: Candidate, match: Match) -> list[Candidate]:
        desk = self.desk
        if match.runs[0].provenance.lineage_id == desk.facts.lineage_id:
            return desk.with_own(base, match)
        return [*desk.with_exact(base, match), *desk.with_partial(base, match)]

    def _weigh(self, candidate: Candidate, penalty_s: float) -> Candidate:
        self.weighed.append(self.desk.price(candidate, penalty_s))
        return candidate
