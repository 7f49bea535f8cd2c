"""Which recompute group a run of another model's blocks is reused with: the one of the best estimated rank within the bound.

Called for every match of a request and every group of its pair, so everything that does not depend on the group is worked out
before. Pure; part of the policy (router/candidates.py prices what is chosen here exactly).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvkin.kv.cost import prefill_work
from kvkin.router.chains import Match, Run
from kvkin.router.facts import Option

if TYPE_CHECKING:
    from kvkin.router.candidates import Candidate, Desk  # which chooses groups with this module

LATE = 10.0  # a second behind the deadline or the target weighs as much as so many others
WIRE = 0.01  # a pull that hides behind compute still uses the wire: among equals, the smaller one

Ahead = tuple[float, float, float, float]  # see ahead_of


def most_promising(desk: Desk, base: Candidate, matches: Sequence[Match], most: int) -> list[tuple[Match, Option]]:
    """The matches that continue ``base`` best under recompute groups, each with its group for that: the ``most`` best ones,
    and the one that is cheapest by the block if it is none of them, as another match may go on where it ends."""
    found: list[tuple[float, int, Match, Option]] = []
    ends: dict[int, Ahead] = {}
    after, only = base.stop, desk.max_blocks
    pace, cheapest = math.inf, -1
    for number, match in enumerate(matches):
        for run in match.runs:
            if run.stop_block > after:
                stop = min(run.stop_block, only)
                ahead = ends.get(stop)
                if ahead is None:
                    ahead = ends[stop] = ahead_of(desk, base, stop)
                option, rank = best_group(desk, base, run, match.node, ahead)
                if option is not None:
                    found.append((rank, number, match, option))
                    # what the blocks take by themselves: without what is computed behind them
                    _, computed_s, pulled_s, node_s = ahead
                    each = (rank - node_s - max(computed_s, pulled_s)) / (stop - after)
                    if each < pace:
                        pace, cheapest = each, number
                break
    found.sort()
    chosen = found[:most]
    chosen += [one for one in found[most:] if one[1] == cheapest]
    return [(match, option) for _, _, match, option in chosen]


def ahead_of(desk: Desk, base: Candidate, stop_block: int) -> Ahead:
    """For reuse of the blocks from ``base`` to ``stop_block``, whatever its group: (seconds that recomputing one of their
    layers takes, seconds until all else is computed, seconds until all else has come, price of all else's node-seconds)."""
    receiver, settings, layers = base.receiver, desk.settings, desk.facts.num_layers
    rate, work = receiver.rate, base.work
    first, stop = base.stop * desk.size, min(stop_block, desk.max_blocks) * desk.size
    layer_s = prefill_work(stop - first, first, 1, settings) / rate
    suffix_s = prefill_work(desk.request.num_tokens - stop, stop, layers, settings) / rate
    recompute_s = work.recompute / rate
    computed_s = receiver.queue_s + work.e_s + recompute_s + suffix_s
    pulled_s = receiver.queue_s + work.pull_s + suffix_s / layers
    return layer_s, computed_s, pulled_s, desk.policy.beta * (suffix_s + recompute_s)


def best_group(desk: Desk, base: Candidate, run: Run, node: str, ahead: Ahead) -> tuple[Option | None, float]:
    """The best allowed recompute group for a run, and about what the rank would be with it (a live source's is too low)."""
    best, best_rank = None, math.inf
    spent, max_loss, late_s = base.loss + run.provenance.loss, desk.max_loss, desk.late_s
    receiver, beta, overhead_s = base.receiver, desk.beta, desk.overhead_s
    layer_s, computed_s, pulled_s, node_s = ahead
    byte_s = 0.0
    if node != receiver.name:
        stop = min(desk.max_blocks, run.stop_block)
        byte_s = (stop - base.stop) / receiver.bytes_per_s(node, desk)
        pulled_s += overhead_s
    groups = desk.facts.groups_for(run.provenance.lineage_id, run.kv_layers, run.e_layers)
    for option, loss, layers, e_bytes, all_bytes in groups:
        recompute_s = layers * layer_s
        ttft_s = computed_s + recompute_s
        price_s = node_s + beta * recompute_s
        if ttft_s + price_s >= best_rank:
            break  # the others recompute as much or more
        if spent + loss > max_loss:
            continue
        pull_s = all_bytes * byte_s
        if e_bytes and byte_s:
            ttft_s += e_bytes * byte_s + overhead_s
        if pulled_s + pull_s > ttft_s:  # noqa: PLR1730 - max() would be a third of the loop
            ttft_s = pulled_s + pull_s
        rank = ttft_s + price_s + WIRE * pull_s
        if ttft_s > late_s:
            rank += LATE * (ttft_s - late_s)
        if rank < best_rank:
            best, best_rank = option, rank
    return best, best_rank
