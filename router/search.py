"""The policy's search: candidates of one request on one receiver after the other, greedily extended. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvkin.router.candidates import Candidate, Desk, Receiver, shortlist
from kvkin.router.chains import Match
from kvkin.router.ordering import Ordering, live_ready_s

_MAX_PARTIAL = 2  # matches whose recompute groups are priced exactly: the most promising
_MAX_CHAINS = 3  # matches of one lineage that are tried: the longest, and shorter ones with more layers


class Search:
    """``weighed`` are all candidates so far, ``base`` the matches of the base model's exact blocks."""

    def __init__(self, desk: Desk, matches: Sequence[Match]) -> None:
        self.desk = desk
        self.weighed: list[Candidate] = []
        self.local: dict[str, list[Match]] = {}
        self.held: dict[str, int] = {}  # blocks of the request's own lineage by node
        self.sharing: set[str] = set()  # nodes with other models' blocks
        self.base: list[Match] = []
        self._own: list[Match] = []
        self._foreign: list[Match] = []
        self._bases: list[Candidate] = []
        self._reach = 0  # of the longest of other models' matches
        self._shortlists: dict[str, list[Match]] = {}
        self._sort(matches)

    def _sort(self, matches: Sequence[Match]) -> None:
        """Keep what is of use and reachable: a draining node still serves what it holds, but may never finish an order."""
        desk, nodes = self.desk, self.desk.nodes
        own_id, base_id, senders = desk.facts.lineage_id, desk.facts.base_lineage, desk.facts.senders
        for match in matches:
            name, first, last = match.node, match.runs[0].provenance, match.runs[-1]
            node, lineage_id = nodes.get(name), first.lineage_id
            if node is None or not node.alive or (last.order_id and node.draining):
                continue
            if last.order_id:
                desk.ready_s[last.order_id] = live_ready_s(node, desk)
            if first.key == base_id:
                self.base.append(match)
            if lineage_id == own_id:
                self._own.append(match)
                self.held[name] = max(self.held.get(name, 0), min(last.stop_block, desk.max_blocks))
            elif lineage_id in senders:
                self._foreign.append(match)
                self._reach = max(self._reach, last.stop_block)
                self.sharing.add(name)
            else:
                continue
            self.local.setdefault(name, []).append(match)

    @property
    def best(self) -> Candidate:
        return min(self.weighed, key=rank_of)

    def _short(self, name: str, matches: Sequence[Match]) -> list[Match]:
        found = self._shortlists.get(name)
        if found is None:
            found = self._shortlists[name] = shortlist(matches, self.desk, _MAX_CHAINS)
        return found

    def _foreign_for(self, name: str) -> Sequence[Match]:
        """Other models' matches that are worth a try on a node: its own ones, and the best of each lineage."""
        found = self._short("foreign", self._foreign)
        if name not in self.sharing:
            return found
        return [*self.local[name], *(match for match in found if match.node != name)]

    def on(self, receiver: Receiver) -> None:
        """Weigh what the receiver could do: its own lineage first, then other models' blocks behind that."""
        desk = self.desk
        nothing = desk.nothing(receiver)
        self.weighed.append(nothing)
        local = self.local.get(receiver.name, [])
        exact, tainted = self._own_blocks(nothing, local)
        self._bases.append(exact)
        if exact.stop == desk.max_blocks and all(leg.node == receiver.name for leg in exact.legs):
            return  # everything is here already, and exact: nothing can be better on this receiver
        if self._reach <= exact.stop:
            return
        foreign = self._foreign_for(receiver.name)
        best = exact
        for base in (exact, *tainted):
            longer = self._best_longer(base, foreign)
            if longer is not None and longer.rank < best.rank:
                best = longer
        while best is not exact:
            longer = self._best_longer(best, foreign)
            if longer is None or longer.rank >= best.rank:
                return
            best = longer

    def live(self, ordering: Ordering, best: Candidate) -> bool:
        """Weigh pulling from an order while it is computed; whether that beats ``best``, the best without it."""
        desk, order = self.desk, ordering.request
        desk.ready_s[order.order_id] = ordering.ready_s
        candidates = []
        for base in self._bases:
            for found in (*self._exactly(base, ordering.match), *desk.with_partial(base, ordering.match)):
                if found.legs[-1].run.order_id == order.order_id:
                    found.work = msgspec.structs.replace(found.work, order_s=ordering.order_s)
                    candidates.append(desk.price(found))
        live = min(candidates, key=rank_of, default=None)
        # the order's price is paid either way if it is worth it for others alone
        rival = best.rank + (desk.policy.beta * ordering.order_s if ordering.background else 0.0)
        if live is None or live.rank >= rival:
            return False
        if live.ttft_s > desk.policy.live_margin * best.ttft_s:
            return False
        live.rank = min(live.rank, best.rank)
        self.weighed.insert(0, live)
        return True

    def _own_blocks(self, nothing: Candidate, local: Sequence[Match]) -> tuple[Candidate, list[Candidate]]:
        """The best candidate of exact blocks of the receiver's lineage, and the best with tainted ones if that is longer."""
        desk, exact, tainted = self.desk, nothing, list[Candidate]()
        name, own_id = nothing.receiver.name, desk.facts.lineage_id

        def take(match: Match) -> None:
            nonlocal exact
            found = desk.with_own(nothing, match)
            if exact is not nothing:
                # what is here already need not be pulled with the rest
                found += desk.with_own(exact, match)
            for candidate in found:
                self.weighed.append(candidate)
                if not candidate.exact:
                    tainted.append(candidate)
                elif candidate.rank <= exact.rank:
                    exact = candidate

        for match in local:
            if match.runs[0].provenance.lineage_id == own_id:
                take(match)
        if exact.stop < desk.max_blocks:
            for match in self._short("own", self._own):
                if match.node != name and match.runs[-1].stop_block > exact.stop:
                    take(match)
        longest = min(tainted, key=rank_of, default=None)
        return exact, [longest] if longest is not None and longest.stop > exact.stop else []

    def _best_longer(self, base: Candidate, matches: Sequence[Match]) -> Candidate | None:
        desk, facts = self.desk, self.desk.facts
        if base.stop >= desk.max_blocks:
            return None
        found: list[Candidate] = []
        for match in matches if base.exact else ():
            if match.runs[0].provenance.lineage_id in facts.exact_senders and match.runs[-1].stop_block > base.stop:
                found += self._exactly(base, match)
        if not desk.only_exact and facts.groups:
            for match in desk.most_promising(base, matches, _MAX_PARTIAL):
                found += desk.with_partial(base, match)
        self.weighed += found
        return min(found, key=rank_of, default=None)

    def _exactly(self, base: Candidate, match: Match) -> list[Candidate]:
        if match.runs[0].provenance.lineage_id == self.desk.facts.lineage_id:
            return self.desk.with_own(base, match)
        return self.desk.with_exact(base, match)


def rank_of(candidate: Candidate) -> float:
    return candidate.rank
