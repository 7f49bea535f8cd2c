"""The policy's search: candidates of one request on one receiver after the other, the best of them extended step by step. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvkin.router.candidates import Candidate, Desk, Receiver, shortlist
from kvkin.router.chains import Match
from kvkin.router.facts import Option
from kvkin.router.groups import LATE, WIRE, Ahead, ahead_of, best_group, most_promising
from kvkin.router.ordering import Ordering, live_ready_s

_MAX_PARTIAL = 2  # matches whose recompute groups are priced exactly: the most promising
_MAX_CHAINS = 3  # matches of one lineage that are tried: the longest, and shorter ones with more layers
_MAX_BEAM = 2  # plans of as many legs that are continued: the fastest is not always the one that begins best


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
        self._grown: list[
            tuple[list[Candidate], Sequence[Match]]
        ] = []  # by receiver: what was extended, with which matches
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
            if desk.only_own:
                if lineage_id == own_id and not last.order_id:
                    self.local.setdefault(name, []).append(match)
                    self.held[name] = max(self.held.get(name, 0), min(last.stop_block, desk.max_blocks))
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
        return min(self.weighed, key=rank_of if self.desk.slo_s is None else self._key)

    def _key(self, candidate: Candidate) -> tuple[float, float, float]:
        """What decides: the objective; under a target for the first token the least loss that keeps it, else the fastest."""
        slo_s = self.desk.slo_s
        if slo_s is None:
            return 0.0, 0.0, candidate.rank
        if candidate.ttft_s > slo_s:
            return 1.0, candidate.ttft_s, candidate.rank
        return 0.0, candidate.loss, candidate.rank

    def settle(self) -> Candidate:
        """The best of all. Under a target for the first token that the fastest plan keeps with some loss, look for the plan that
        keeps it with the least: the fastest plan within ever tighter bounds."""
        desk, best = self.desk, self.best
        if desk.slo_s is None or best.ttft_s > desk.slo_s:
            return best
        asked, bounds = desk.max_loss, [loss for loss in desk.facts.losses if loss < best.loss]
        first, last = 0, len(bounds)
        while first < last:
            middle = (first + last) // 2
            desk.max_loss = bounds[middle]
            for bases, foreign in self._grown:
                self._grow([base for base in bases if base.loss <= desk.max_loss], foreign)
            best = self.best
            if best.loss <= bounds[middle]:
                last = middle
            else:
                first = middle + 1
        desk.max_loss = asked
        return best

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

    @property
    def reach(self) -> int:
        """Blocks of the longest match that some node could pull."""
        own = max((match.runs[-1].stop_block for match in self._own), default=0)
        return max(own, self._reach)

    def hope(self, receiver: Receiver) -> float:
        """About the rank of the best plan on a receiver that reuses one match: cheap, for a first choice of receivers."""
        desk, name = self.desk, receiver.name
        held = min(self.held.get(name, 0), desk.max_blocks)
        base = desk.bare(receiver, held)
        ends: dict[int, Ahead] = {held: ahead_of(desk, base, held)}
        best = self._about(base, held, name, desk.facts.whole, ends[held])
        for match in (*self._short("own", self._own), *self._foreign_for(name)):
            run = match.runs[0]
            stop = min(run.stop_block, desk.max_blocks)
            if stop <= held:
                continue
            ahead = ends.get(stop)
            if ahead is None:
                ahead = ends[stop] = ahead_of(desk, base, stop)
            option = desk.facts.exact_option(run.provenance.lineage_id, run.kv_layers, run.e_layers)
            if option is not None and run.provenance.exact:
                best = min(best, self._about(base, stop, match.node, option, ahead))
            if not desk.only_exact:
                best = min(best, best_group(desk, base, run, match.node, ahead)[1])
        return best

    def _about(self, base: Candidate, stop: int, node: str, option: Option, ahead: Ahead) -> float:
        """About the rank with the blocks up to ``stop`` reused exactly."""
        desk, receiver = self.desk, base.receiver
        layer_s, computed_s, pulled_s, node_s = ahead
        pull_s = e_s = 0.0
        if node != receiver.name:
            block_s = (stop - base.stop) / receiver.bytes_per_s(node, desk)
            pull_s = block_s * (option.kv_block_bytes + option.e_block_bytes) + desk.overhead_s
            e_s = block_s * option.e_block_bytes
        recompute_s = option.recomputed_layers * layer_s
        ttft_s = max(computed_s + recompute_s + e_s, pulled_s + pull_s)
        late_s = max(0.0, ttft_s - desk.late_s)
        return ttft_s + node_s + desk.beta * recompute_s + WIRE * pull_s + LATE * late_s

    def on(self, receiver: Receiver) -> None:
        """Weigh what the receiver could do: its own lineage first, then other models' blocks behind that."""
        desk = self.desk
        nothing = desk.nothing(receiver)
        self.weighed.append(nothing)
        local = self.local.get(receiver.name, [])
        exact, others = self._own_blocks(nothing, local)
        self._bases.append(exact)
        if exact.stop == desk.max_blocks and all(leg.node == receiver.name for leg in exact.legs):
            return  # everything is here already, and exact: nothing can be better on this receiver
        bases = [base for base in (exact, *others) if base.stop < self._reach]
        if bases:
            foreign = self._foreign_for(receiver.name)
            self._grown.append((bases, foreign))
            self._grow(bases, foreign)

    def _grow(self, beam: list[Candidate], foreign: Sequence[Match]) -> None:
        """Weigh what continues the candidates of ``beam`` with other models' blocks, then what continues that, and so on."""
        desk = self.desk
        reach = min(self._reach, desk.max_blocks)
        for _ in range(desk.max_legs):
            found: list[Candidate] = []
            for base in beam:
                if base.stop < reach:
                    found += self._longer(base, foreign)
            if not found:
                return
            self.weighed += found
            beam = self._worth_continuing(found, reach)

    def _worth_continuing(self, found: list[Candidate], reach: int) -> list[Candidate]:
        """Those that would be the best plan if the rest of the matches cost nothing, the most hopeful first."""
        best = min(self.weighed, key=rank_of).rank
        hopes: list[tuple[float, int, Candidate]] = []
        for number, candidate in enumerate(found):
            if candidate.stop < reach:
                hope = candidate.rank - self.desk.computed_s(candidate, reach)
                if hope < best:
                    hopes.append((hope, number, candidate))
        hopes.sort()
        return [candidate for _, _, candidate in hopes[:_MAX_BEAM]]

    def live(self, ordering: Ordering, best: Candidate) -> Candidate | None:
        """Weigh pulling from an order while it is computed; the best such plan if it beats ``best``, the best without it."""
        desk, order = self.desk, ordering.request
        desk.ready_s[order.order_id] = ordering.ready_s
        candidates = []
        for base in self._bases:
            for found in (*self._exactly(base, ordering.match), *desk.with_partial(base, ordering.match)):
                if found.legs[-1].run.order_id == order.order_id:
                    found.work = msgspec.structs.replace(found.work, order_s=ordering.order_s)
                    candidates.append(desk.price(found))
        live = min(candidates, key=self._key, default=None)
        if live is None or not self._beats(live, best, ordering):
            return None
        self.weighed.append(live)
        return live

    def _beats(self, live: Candidate, best: Candidate, ordering: Ordering) -> bool:
        desk, slo_s = self.desk, self.desk.slo_s
        if slo_s is not None:
            if self._key(live) >= self._key(best):
                return False
            kept = best.ttft_s <= slo_s
            if live.ttft_s <= slo_s and (not kept or live.loss < best.loss):
                return True
        # the order's price is paid either way if it is worth it for others alone
        elif live.rank >= best.rank + (desk.policy.beta * ordering.order_s if ordering.background else 0.0):
            return False
        return live.ttft_s <= desk.policy.live_margin * best.ttft_s

    def _own_blocks(self, nothing: Candidate, local: Sequence[Match]) -> tuple[Candidate, list[Candidate]]:
        """The best candidate of exact blocks of the receiver's lineage; and what else other models' blocks may follow: the best with
        tainted ones if that is longer, and what is here of the exact ones, as others may have all that would be pulled."""
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
        here = exact
        if exact.stop < desk.max_blocks:
            for match in self._short("own", self._own):
                if match.node != name and match.runs[-1].stop_block > exact.stop:
                    take(match)
        longest = min(tainted, key=rank_of, default=None)
        others = [] if here is exact else [here]
        if longest is not None and longest.stop > exact.stop:
            others.append(longest)
        return exact, others

    def _longer(self, base: Candidate, matches: Sequence[Match]) -> list[Candidate]:
        desk, facts = self.desk, self.desk.facts
        found: list[Candidate] = []
        for match in matches if base.exact else ():
            if match.runs[0].provenance.lineage_id in facts.exact_senders and match.runs[-1].stop_block > base.stop:
                found += self._exactly(base, match)
        if not desk.only_exact and facts.groups:
            for match, option in most_promising(desk, base, matches, _MAX_PARTIAL):
                found += desk.with_partial(base, match, option)
        return found

    def _exactly(self, base: Candidate, match: Match) -> list[Candidate]:
        if match.runs[0].provenance.lineage_id == self.desk.facts.lineage_id:
            return self.desk.with_own(base, match)
        return self.desk.with_exact(base, match)


def rank_of(candidate: Candidate) -> float:
    return candidate.rank
