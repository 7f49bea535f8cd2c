"""No sequence of plans, turns and publications makes the index offer as exact what a private prefill would not have computed.

The KV of a block is a digest of everything that really went into it, followed through pulls, recomputes, answers, fallbacks,
orders and evictions on several nodes; index, policy and ``kv.plan.provenances`` are the real ones. Two more claims are checked on
the way: one (block, provenance) never names two different KVs, and every plan of exact quality yields the private KV.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkin.kv.cost import CostSettings, NodeRates
from kvkin.kv.hashing import block_hashes, digest, root_hash
from kvkin.kv.layout import KVLayout, Plane
from kvkin.kv.lineage import LayerWeights, Lineage, fold_lineage, shared_transition
from kvkin.kv.plan import (
    Holder,
    LayerGroup,
    LayerSource,
    PlanKind,
    ReusePlan,
    Segment,
    private_plan,
    provenances,
)
from kvkin.kv.provenance import Provenance, Quality
from kvkin.router.index import Match, PrefixIndex
from kvkin.router.policy import choose
from kvkin.router.policy_types import (
    ClusterView,
    Decision,
    FamilyView,
    GroupChoice,
    NodeView,
    OrderRequest,
    PolicyRequest,
    PolicySettings,
)
from kvkin.transport.messages import Reuse
from kvkin.transport.node_messages import Holding, Holdings

LAYERS, BLOCK = 4, 2
TRANSITIONS = (1, 2)
ROOT = root_hash(b"tokenizer", BLOCK, "scope")
# KV and hidden states of a block, as digests by layer
KV = dict[int, bytes]


class Model:
    """Symbolic weights: which layers are the base's, and whether it is the whole layer or only what follows k and v."""

    def __init__(self, name: str, own_from: int, mlp_only: bool = False) -> None:
        self.name = name
        self.layers = []
        for layer in range(LAYERS):
            own = (name if layer >= own_from else "base").encode()
            inputs = b"base" if mlp_only and layer == own_from else own
            self.layers.append(LayerWeights(inputs, own, b"geometry"))
        self.lineage: Lineage = fold_lineage(b"root", b"float32", self.layers)

    def layer(self, index: int, hidden: bytes, before: bytes) -> tuple[bytes, bytes, bytes]:
        """(kv, all kv so far, hidden states entering the next layer) of a block that enters layer ``index``."""
        weights = self.layers[index]
        kv = digest(b"kv", weights.kv_inputs, hidden)
        context = digest(b"context", before, kv)
        return kv, context, digest(b"out", weights.whole, hidden, context)


MODELS = {
    one.name: one
    for one in (
        Model("base", LAYERS),
        Model("twin", LAYERS),
        Model("upper", 2),
        Model("mlp", 1, True),
        Model("full", 0),
    )
}
BY_LINEAGE = {one.lineage.id: one for one in MODELS.values()}
GROUPS = (
    GroupChoice(LayerGroup(1, 3), 0.01),
    GroupChoice(LayerGroup(2, 3)),
    GroupChoice(LayerGroup(0, 2), 0.02),
    GroupChoice(None, 0.03),
)


class Stored:
    """A block as it lies on a node."""

    def __init__(self, parent: bytes, provenance: Provenance, position: int, kv: KV, hidden: KV) -> None:
        self.parent, self.provenance, self.position = parent, provenance, position
        self.kv, self.hidden = kv, hidden


Chain = list[tuple[KV, KV]]


def compute(
    model: Model, hashes: Sequence[bytes], plan: ReusePlan, stores: dict[str, dict[tuple[bytes, bytes], Stored]]
) -> Chain:
    """(KV, hidden states) of every block as the executor makes them; KeyError if a source does not have what the plan pulls."""
    contexts = [b""] * LAYERS
    blocks: Chain = []
    segment_index = 0
    for index, block in enumerate(hashes):
        while segment_index + 1 < len(plan.segments) and plan.segments[segment_index].stop <= index * BLOCK:
            segment_index += 1
        segment = plan.segments[segment_index]
        kv: KV = {}
        for source in segment.sources:
            held = stores[source.holder.node][block, source.holder.provenance.key]
            kv |= {layer: held.kv[layer] for layer in range(source.layers.start, source.layers.stop)}
        hidden: KV = {}
        computed = segment.recomputed_layers(LAYERS)
        state = digest(b"embed", block)
        if segment.e_holder is not None and segment.e_layer is not None:
            state = stores[segment.e_holder.node][block, segment.e_holder.provenance.key].hidden[segment.e_layer]
        for layer in range(LAYERS):
            if layer in computed:
                hidden[layer] = state
                kv[layer], contexts[layer], state = model.layer(layer, state, contexts[layer])
            else:
                contexts[layer] = digest(b"context", contexts[layer], kv[layer])
        blocks.append((kv, {layer: one for layer, one in hidden.items() if layer in TRANSITIONS}))
    return blocks


_PRIVATE: dict[tuple[str, bytes], Chain] = {}


def private(model: Model, hashes: Sequence[bytes]) -> Chain:
    key = (model.name, hashes[-1])
    if key not in _PRIVATE:
        _PRIVATE[key] = compute(model, hashes, private_plan(len(hashes) * BLOCK), {})
    return _PRIVATE[key]


class World:
    """A router and its nodes; every step checks what must hold."""

    NODES = (
        NodeView("d0", "decode", ("base", "upper"), NodeRates(1e4, 1e12)),
        NodeView("d1", "decode", ("twin", "full"), NodeRates(1e4, 1e12)),
        NodeView("d2", "decode", ("mlp", "upper", "full"), NodeRates(1e4, 1e12)),
        NodeView("p0", "prefill", ("base",), NodeRates(1e7, 1e12)),
    )
    SETTINGS = PolicySettings(
        exact_preference=0.0,
        min_pull_tokens=0,
        min_order_tokens=0,
        live_margin=1.0,
        spill_s=0.0,
        cost=CostSettings(stream_overhead_s=0.0, chunk_tokens=2),
    )

    def __init__(self, seed: int, max_blocks: int) -> None:
        self.random = random.Random(seed)
        self.index = PrefixIndex(max_blocks)
        self.stores: dict[str, dict[tuple[bytes, bytes], Stored]] = {node.name: {} for node in self.NODES}
        self.prefixes: dict[bytes, list[bytes]] = {}
        self.names: dict[tuple[bytes, bytes], Stored] = {}
        self.conversations: list[list[int]] = [[]]
        self.orders: dict[str, tuple[OrderRequest, list[bytes]]] = {}
        self.num_orders = 0
        models_of: dict[bytes, tuple[str, ...]] = {}
        for one in MODELS.values():
            models_of[one.lineage.id] = (*models_of.get(one.lineage.id, ()), one.name)
        family = FamilyView(
            "f",
            "base",
            KVLayout(LAYERS, (Plane("k", 1, 4), Plane("v", 1, 4)), 8, "float32", BLOCK),
            {one.lineage.id: one.lineage for one in MODELS.values()},
            models_of,
            {(sender, receiver): GROUPS for sender in MODELS for receiver in MODELS if sender != receiver},
            TRANSITIONS,
        )
        self.view = ClusterView({node.name: node for node in self.NODES}, {"f": family})
        self.kinds: set[PlanKind] = set()

    # --- steps -------------------------------------------------------------------------------------------------------

    def ask(
        self, model_name: str, conversation: int, new: list[int], answer: int, reuse: Reuse, free: bool, lost: bool
    ) -> None:
        """One turn of a conversation: plan, execute, publish. ``free``: any plan at all instead of the policy's."""
        model = MODELS[model_name]
        tokens = [*self.conversations[conversation % len(self.conversations)], *new]
        hashes = block_hashes(tokens, ROOT, BLOCK)
        matches = self.index.match(hashes, ROOT)
        self.check_matches(matches, hashes)
        decision = self.decide(model, tokens, hashes, reuse, matches)
        plan, node = decision.plan, decision.node
        if free:
            plan = self.any_plan(model, tokens, matches, node)
        plan.validate(LAYERS)
        self.finish_orders()
        # every model answers the same: only then do its blocks meet another model's under one hash
        answered = [*tokens, *[0] * answer]
        every = block_hashes(answered[:-1], ROOT, BLOCK)
        self.remember(every)
        if lost and any(segment.sources for segment in plan.segments):
            plan = private_plan(len(tokens), "a source was lost")
        try:
            blocks = compute(model, every, plan, self.stores)
        except KeyError:
            # announced or evicted meanwhile: what every node does then
            plan = private_plan(len(tokens), "a source was lost")
            blocks = compute(model, every, plan, self.stores)
        self.kinds |= {segment.kind for segment in plan.segments}
        folded = provenances(plan, model.lineage.id)
        if folded[-1].quality is Quality.EXACT:
            assert [kv for kv, _ in blocks] == [kv for kv, _ in private(model, every)] if every else True
        if not free:
            assert folded[-1].exact or reuse in (Reuse.ANY, Reuse.BOUNDED)
        self.publish(node, every, plan, folded, blocks)
        self.conversations.append(answered)

    def decide(
        self, model: Model, tokens: list[int], hashes: list[bytes], reuse: Reuse, matches: list[Match]
    ) -> Decision:
        self.num_orders += 1
        asked = PolicyRequest(
            model=model.name,
            family="f",
            lineage=model.lineage,
            num_tokens=len(tokens),
            block_size=BLOCK,
            num_blocks=len(hashes),
            num_layers=LAYERS,
            reuse=reuse,
            max_loss=0.03,
            share_hint=self.random.choice([-1.0, 5.0]),
            order_id=f"o{self.num_orders}",
        )
        decision = choose(asked, matches, self.view, self.SETTINGS)
        if reuse in (Reuse.EXACT, Reuse.OFF):
            assert decision.quality is Quality.EXACT
        for order in filter(None, (decision.live_order, decision.background_order)):
            prefix = hashes[: order.num_blocks]
            self.orders[order.order_id] = (order, prefix)
            self.index.announce(order.node, order.order_id, prefix, order.provenance, order.kv_layers, order.e_layers)
        return decision

    def finish_orders(self) -> None:
        """Orders are computed some time; a plan that pulls from one that is not finished falls back."""
        for order_id, (order, hashes) in list(self.orders.items()):
            if self.random.random() < 0.7:
                del self.orders[order_id]
                self.remember(hashes)
                plan = private_plan(len(hashes) * BLOCK)
                model = MODELS[order.model]
                self.publish(order.node, hashes, plan, provenances(plan, model.lineage.id), private(model, hashes))
                self.index.withdraw(order_id)

    def evict(self, count: int) -> None:
        """Any blocks of a node, not only leaves: gaps must be harmless."""
        name = self.random.choice(list(self.stores))
        store = self.stores[name]
        for key in self.random.sample(sorted(store), min(count, len(store))):
            gone = store.pop(key)
            self.index.apply_delta(name, Holdings("i", 1, (gone.provenance,), removed=((key[0], 0),)))

    def publish(
        self, name: str, hashes: Sequence[bytes], plan: ReusePlan, folded: list[Provenance], blocks: Chain
    ) -> None:
        added = []
        segment = 0
        for index, block in enumerate(hashes):
            while segment + 1 < len(plan.segments) and plan.segments[segment].stop <= index * BLOCK:
                segment += 1
            provenance = folded[segment]
            kv, hidden = blocks[index]
            stored = Stored(hashes[index - 1] if index else ROOT, provenance, index * BLOCK, kv, hidden)
            self.check_block(block, stored)
            known = self.stores[name].setdefault((block, provenance.key), stored)
            holding = Holding(block, known.parent, 0, known.position, LAYERS, tuple(sorted(known.hidden)))
            added.append((provenance, holding))
        for provenance, holding in added:
            self.index.apply_delta(name, Holdings("i", 1, (provenance,), (holding,)))

    # --- checks ------------------------------------------------------------------------------------------------------

    def remember(self, hashes: list[bytes]) -> None:
        for index, block in enumerate(hashes):
            self.prefixes[block] = hashes[: index + 1]

    def check_block(self, block: bytes, stored: Stored) -> None:
        provenance = stored.provenance
        if provenance.exact:
            kv, hidden = private(BY_LINEAGE[provenance.lineage_id], self.prefixes[block])[-1]
            assert stored.kv == kv, "a block is published as exact that no private prefill would have computed"
            assert all(hidden[layer] == one for layer, one in stored.hidden.items())
        named = self.names.setdefault((block, provenance.key), stored)
        assert named.kv == stored.kv, "one provenance names two different KVs"
        common = named.hidden.keys() & stored.hidden.keys()
        assert all(named.hidden[layer] == stored.hidden[layer] for layer in common)

    def check_matches(self, matches: list[Match], hashes: list[bytes]) -> None:
        for match in matches:
            for run in match.runs:
                if run.order_id:
                    continue
                for block in hashes[run.start_block : run.stop_block]:
                    stored = self.stores[match.node][block, run.provenance.key]
                    assert set(run.e_layers) <= stored.hidden.keys()
                    self.check_block(block, stored)

    # --- plans that no policy would make -----------------------------------------------------------------------------

    def any_plan(self, model: Model, tokens: list[int], matches: list[Match], node: str) -> ReusePlan:
        """A valid, honestly labelled plan of random pieces: also exact blocks after tainted ones, and tainted from anywhere."""
        segments: list[Segment] = []
        position = 0
        last = (len(tokens) - 1) // BLOCK
        while position < last and matches and self.random.random() < 0.8:
            match = self.random.choice(matches)
            runs = [run for run in match.runs if run.start_block <= position < min(run.stop_block, last)]
            if not runs:
                break
            run = runs[0]
            ends = [min(run.stop_block, last), min(position + 2, run.stop_block, last)]
            stop = self.random.choice(ends)
            holder = Holder(match.node, run.provenance, run.order_id)
            segments.append(self.any_segment(model, position * BLOCK, stop * BLOCK, holder, run.e_layers))
            position = stop
        return ReusePlan((*segments, Segment(position * BLOCK, len(tokens))))

    def any_segment(self, model: Model, start: int, stop: int, holder: Holder, e_layers: tuple[int, ...]) -> Segment:
        sender = BY_LINEAGE[holder.provenance.lineage_id]
        shared = shared_transition(sender.lineage, model.lineage) if holder.provenance.exact else 0
        options: list[tuple[PlanKind, LayerGroup | None]] = [
            (PlanKind.PARTIAL, LayerGroup(0, 2)),
            (PlanKind.EXACT if shared == LAYERS else PlanKind.PARTIAL, None),
        ]
        for layer in e_layers:
            kind = PlanKind.SHARED_PREFIX if layer <= shared else PlanKind.PARTIAL
            options += [(kind, LayerGroup(layer, LAYERS)), (PlanKind.PARTIAL, LayerGroup(layer, LAYERS - 1))]
        kind, group = self.random.choice(options)
        first, last = (LAYERS, LAYERS) if group is None else (group.start, group.stop)
        spans = [span for span in (LayerGroup(0, first), LayerGroup(last, LAYERS)) if len(span)]
        pulls_e = 0 < first < LAYERS
        return Segment(
            start,
            stop,
            tuple(LayerSource(span, holder) for span in spans),
            start,
            first if pulls_e else None,
            holder if pulls_e else None,
            group,
            kind,
            0.01 if kind is PlanKind.PARTIAL else 0.0,
        )


# few prompts, few models at a time: what could be confused must meet
ASK = st.tuples(
    st.just("ask"),
    st.sampled_from(["full", "full", "upper", "base", "mlp", "twin"]),
    st.integers(0, 2),
    st.sampled_from([[0] * 10, [0] * 6, [1, 0]]),
    st.integers(1, 2),
    st.sampled_from([Reuse.ANY, Reuse.ANY, Reuse.BOUNDED, Reuse.EXACT, Reuse.OWN, Reuse.OFF]),
    st.booleans(),
    st.sampled_from([False, False, False, True]),
)
STEPS = st.lists(st.one_of(ASK, ASK, ASK, st.tuples(st.just("evict"), st.integers(1, 4))), min_size=8, max_size=40)


def play(steps: list[tuple], seed: int, max_blocks: int) -> World:  # type: ignore[type-arg]
    world = World(seed, max_blocks)
    for name, *arguments in steps:
        getattr(world, name)(*arguments)
    return world


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, seed=st.integers(0, 2**16), max_blocks=st.sampled_from([12, 1000]))
def test_nothing_is_offered_as_exact_that_is_not(steps: list[tuple], seed: int, max_blocks: int) -> None:  # type: ignore[type-arg]
    play(steps, seed, max_blocks)


def long_history(seed: int, free: float, num_steps: int = 120) -> World:
    """Many turns of few prompts in one world, most of them by one model: whatever could be confused meets sooner or later."""
    world, choice = World(seed, 1000), random.Random(seed)
    favourite = choice.choice(sorted(MODELS))
    for _ in range(num_steps):
        model = favourite if choice.random() < 0.6 else choice.choice(sorted(MODELS))
        reuse = choice.choice([Reuse.ANY, Reuse.ANY, Reuse.BOUNDED, Reuse.EXACT, Reuse.OWN])
        new = [0] * choice.choice([2, 4, 8])
        world.conversations = world.conversations[:3]
        world.ask(model, choice.randrange(3), new, 1, reuse, choice.random() < free, choice.random() < 0.05)
        if choice.random() < 0.2:
            world.evict(choice.randrange(4))
    return world


@pytest.mark.parametrize("seed", range(24))
def test_long_histories(seed: int) -> None:
    long_history(seed, free=0.8)


def test_the_policy_alone_makes_every_kind_of_plan() -> None:
    """Guards the tests above against becoming empty."""
    kinds = set[PlanKind]().union(*(long_history(seed, free=0.0).kinds for seed in range(6)))
    assert kinds == {PlanKind.EXACT, PlanKind.SHARED_PREFIX, PlanKind.PARTIAL, PlanKind.PRIVATE}
