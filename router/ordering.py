"""Whether a cold prefix is worth a prefill by the family's prefill nodes, and which node should do it. Pure; part of the policy.

The order pays if later requests are expected (the client's hint, or how many requests of other models shared the prefix lately)
or if pulling while it is computed answers this request sooner (docs/design.md section 5).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvkin.kv.cost import prefill_work
from kvkin.kv.provenance import exact_provenance
from kvkin.router.candidates import Candidate, Desk, Receiver
from kvkin.router.chains import Match, Run
from kvkin.router.facts import saving_after_base
from kvkin.router.policy_types import FamilyView, NodeView, OrderRequest

_COLD = 0.5  # a prefix is cold while the best plan reuses less than this share of it
_COVERED = 0.9  # base model's blocks, held or ordered, beyond this share are not ordered again


class Ordering(msgspec.Struct, frozen=True):
    """An order that could be made. ``match`` is how its blocks would be offered, complete after ``ready_s``.

    ``background``: worth it for later requests alone, which save ``saving_s`` for ``order_s`` node-seconds.
    """

    request: OrderRequest
    match: Match
    order_s: float
    ready_s: float
    saving_s: float
    background: bool


def live_ready_s(node: NodeView, desk: Desk) -> float:
    """Seconds until an order on a node is complete: after its queue, at least one chunk."""
    settings, layers = desk.settings, desk.facts.num_layers
    chunk = prefill_work(settings.chunk_tokens, 0, layers, settings) / settings.layer_tokens_per_s(node.rates)
    return max(settings.queue_s(node.rates, layers), chunk)


def order_for(desk: Desk, family: FamilyView, base: Sequence[Match], best: Candidate) -> Ordering | None:
    """The order that a request could make; None if there is no reason, no need or no node for one.

    ``base`` are the matches of the base model's exact blocks, ``best`` is what would be done without an order.
    """
    request, facts = desk.request, desk.facts
    if not request.publish or not request.order_id or facts.base_lineage is None:
        return None
    blocks, fan_out = _wanted(desk)
    if blocks * desk.size < desk.policy.min_order_tokens or best.stop >= _COLD * blocks:
        return None
    exact_stops = [max(run.stop_block for run in match.runs if run.provenance.exact) for match in base]
    if max(exact_stops, default=0) >= _COVERED * blocks:
        return None
    pool = _pool(desk, family, base, blocks)
    if pool is None:
        return None
    node, held, order_s, ready_s = pool
    saving_s = fan_out * _saving_s(desk, family, best.receiver, blocks) if fan_out >= desk.policy.min_fan_out else 0.0
    # what the base model's own request computes it publishes itself
    worth_it = facts.lineage_id != facts.base_lineage and saving_s > desk.policy.beta * order_s
    if not worth_it and ready_s > desk.policy.live_margin * best.ttft_s:
        return None
    provenance = exact_provenance(facts.base_lineage)
    run = Run(provenance, held, blocks, facts.num_layers, family.transition_layers, request.order_id)
    before = () if not held else (msgspec.structs.replace(run, start_block=0, stop_block=held, order_id=""),)
    order = OrderRequest(
        order_id=request.order_id,
        node=node.name,
        model=family.base_model,
        num_blocks=blocks,
        provenance=provenance,
        kv_layers=facts.num_layers,
        e_layers=family.transition_layers,
        background=True,
    )
    return Ordering(order, Match(node.name, (*before, run)), order_s, ready_s, saving_s, worth_it)


def _wanted(desk: Desk) -> tuple[int, float]:
    """(blocks, expected later requests): the prefix that is worth most, or the whole prompt if none is expected again."""
    options = [(min(blocks, desk.max_blocks), count) for blocks, count in desk.request.fan_out]
    if desk.request.share_hint >= 0.0:
        # the client knows better than what was seen so far
        options = [(desk.max_blocks, desk.request.share_hint)]
    likely = [(blocks, count) for blocks, count in options if count >= desk.policy.min_fan_out]
    return max(likely, key=lambda option: option[0] * option[1], default=(desk.max_blocks, 0.0))


def _pool(
    desk: Desk, family: FamilyView, base: Sequence[Match], blocks: int
) -> tuple[NodeView, int, float, float] | None:
    """(node, blocks that it holds, node-seconds, seconds until it is done) of the prefill node that is done first."""
    settings, layers = desk.settings, desk.facts.num_layers
    found: list[tuple[float, float, int, NodeView]] = []
    for node in desk.nodes.values():
        if node.role != "prefill" or not node.usable or family.base_model not in node.models:
            continue
        queue_s = settings.queue_s(node.rates, layers)
        if queue_s > desk.policy.max_pool_queue_s:
            continue
        stored = [match.runs[0].stop_block for match in base if match.node == node.name and not match.runs[0].order_id]
        held = min(max(stored, default=0), blocks)
        start = held * desk.size
        work = prefill_work(blocks * desk.size - start, start, layers, settings)
        order_s = work / settings.layer_tokens_per_s(node.rates)
        found.append((queue_s + order_s, order_s, held, node))
    if not found:
        return None
    ready_s, order_s, held, node = min(found, key=lambda option: option[0])
    return node, held, order_s, ready_s


def _saving_s(desk: Desk, family: FamilyView, receiver: Receiver, blocks: int) -> float:
    """Seconds that a later request of another model saves if the base model's KV is there: compute less what the pull takes."""
    share = saving_after_base(family, desk.request.model)
    layout = family.layout
    private_s = prefill_work(blocks * desk.size, 0, layout.num_layers, desk.settings) / receiver.rate
    pull_s = share * layout.num_layers * blocks * layout.kv_block_bytes / receiver.bytes_per_s(receiver.name, desk)
    return max(0.0, private_s - max((1.0 - share) * private_s, pull_s))
