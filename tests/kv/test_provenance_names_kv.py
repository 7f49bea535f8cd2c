"""The property of docs/design.md section 4: equal (block hash, provenance) means equal KV, and exact means that of a private prefill.

KV is symbolic here: a digest of everything that it was computed from, so that two contents are equal exactly if they came to be in
the same way. Blocks hold one token. Random turns of random models over random plans publish into an index; every publication
is compared with what the index holds under the same name, and with the receiver's private prefill if it claims to be exact.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkin.kv.hashing import block_hashes, root_hash
from kvkin.kv.lineage import LayerWeights, Lineage, fold_lineage
from kvkin.kv.plan import Holder, LayerGroup, LayerSource, PlanKind, ReusePlan, Segment, TokenRows, provenances
from kvkin.kv.provenance import Provenance

NUM_LAYERS = 3
# per layer: what makes k and v, and the rest. "twin" is "base"; "upper" shares layer 0; "late" all KV but that of layer 2
MODELS: dict[str, tuple[tuple[str, str], ...]] = {
    "base": (("a0", "a"), ("a1", "a"), ("a2", "a")),
    "twin": (("a0", "a"), ("a1", "a"), ("a2", "a")),
    "upper": (("a0", "a"), ("b1", "b"), ("b2", "b")),
    "late": (("a0", "a"), ("a1", "c"), ("a2", "a")),
    "tune": (("d0", "d"), ("d1", "d"), ("d2", "d")),
}
ROOT = root_hash(b"tokenizer", 1, "")


@dataclass(frozen=True)
class Content:
    """KV of each layer of one token, and the hidden states entering each layer (empty where nobody computed them)."""

    kv: tuple[str, ...]
    e: tuple[str, ...]


def made_of(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


def lineage_of(model: str) -> Lineage:
    layers = [LayerWeights(kv.encode(), f"{kv}/{rest}".encode(), b"") for kv, rest in MODELS[model]]
    return fold_lineage(b"root", b"symbolic", layers)


LINEAGES = {model: lineage_of(model) for model in MODELS}


def run_rows(model: str, before: list[Content], hidden: str, layers: range) -> tuple[dict[int, str], dict[int, str]]:
    """One token through ``layers``: its KV and the hidden states entering each of them."""
    kv, entering = {}, {}
    for layer in layers:
        weights = MODELS[model][layer]
        entering[layer] = hidden
        kv[layer] = made_of("kv", hidden, weights[0])
        hidden = made_of("layer", hidden, *weights, kv[layer], *(content.kv[layer] for content in before))
    return kv, entering


def compute(model: str, before: list[Content], token: int) -> Content:
    kv, entering = run_rows(model, before, made_of("embedded", str(token), str(len(before))), range(NUM_LAYERS))
    return Content(tuple(kv.values()), tuple(entering.values()))


def private(model: str, tokens: list[int]) -> list[Content]:
    made: list[Content] = []
    for token in tokens:
        made.append(compute(model, made, token))
    return made


class World:
    """What every node holds, by (block hash, provenance key); a node runs the model of its own name."""

    def __init__(self) -> None:
        self.held: dict[str, dict[tuple[bytes, bytes], tuple[Provenance, Content]]] = {model: {} for model in MODELS}

    def execute(self, receiver: str, tokens: list[int], plan: ReusePlan) -> list[Content]:
        hashes = block_hashes(tokens, ROOT, 1)
        made: list[Content] = []
        for segment in plan.segments:
            for at in range(segment.start, segment.stop):
                made.append(self._token(receiver, tokens[at], hashes[at], at, segment, made))
        return made

    def _token(
        self, receiver: str, token: int, block: bytes, at: int, segment: Segment, before: list[Content]
    ) -> Content:
        if not segment.sources or (isinstance(segment.recompute, TokenRows) and at in segment.recompute.rows):
            return compute(receiver, before, token)
        kv, entering = {}, {}
        for source in segment.sources:
            content = self._content(source.holder, block)
            kv.update({layer: content.kv[layer] for layer in range(source.layers.start, source.layers.stop)})
        if isinstance(segment.recompute, LayerGroup):
            hidden = made_of("embedded", str(token), str(at))
            if segment.e_holder is not None:
                hidden = self._content(segment.e_holder, block).e[segment.recompute.start]
            group = range(segment.recompute.start, segment.recompute.stop)
            new, entering = run_rows(receiver, before, hidden, group)
            kv.update(new)
        return Content(
            tuple(kv[layer] for layer in range(NUM_LAYERS)),
            tuple(entering.get(layer, "") for layer in range(NUM_LAYERS)),
        )

    def _content(self, holder: Holder, block: bytes) -> Content:
        return self.held[holder.node][block, holder.provenance.key][1]

    def publish(self, receiver: str, tokens: list[int], plan: ReusePlan, contents: list[Content]) -> None:
        """What the receiver offers from now on; raises if a name would stand for two different KVs."""
        hashes, alone = block_hashes(tokens, ROOT, 1), private(receiver, tokens)
        found = provenances(plan, LINEAGES[receiver].id)
        for segment, provenance in zip(plan.segments, found, strict=True):
            for at in range(segment.start, segment.stop):
                content = contents[at]
                if provenance.exact:
                    assert content.kv == alone[at].kv, f"offered as exact, and is not: token {at} of {plan}"
                    assert all(e in ("", wanted) for e, wanted in zip(content.e, alone[at].e, strict=True))
                name = hashes[at], provenance.key
                for node, blocks in self.held.items():
                    if name in blocks:
                        other = blocks[name][1]
                        assert content.kv == other.kv, f"one name, two contents: {node}, token {at} of {plan}"
                        both = zip(content.e, other.e, strict=True)
                        assert all(one == two or not one or not two for one, two in both)
                # a block that is held already stays, hidden states and all
                self.held[receiver].setdefault(name, (provenance, content))


def runs_of(world: World, tokens: list[int], start: int) -> list[tuple[Holder, int]]:
    """(holder, stop): what can be pulled as one segment from ``start`` on, under one provenance."""
    hashes = block_hashes(tokens, ROOT, 1)
    found = []
    for node, blocks in world.held.items():
        for (block, key), (provenance, _) in blocks.items():
            if block == hashes[start]:
                stop = start + 1
                while stop < len(tokens) - 1 and (hashes[stop], key) in blocks:
                    stop += 1
                found.append((Holder(node, provenance), stop))
    return found


def has_e(world: World, holder: Holder, hashes: list[bytes], layer: int) -> bool:
    return all(world.held[holder.node][block, holder.provenance.key][1].e[layer] for block in hashes)


def draw_segment(data: st.DataObject, world: World, receiver: str, tokens: list[int], start: int) -> Segment:
    """A segment of what is held, of any shape; claimed exact (or shared-prefix) only where the lineages say so."""
    holder, limit = data.draw(st.sampled_from(runs_of(world, tokens, start)))
    stop = data.draw(st.integers(start + 1, limit))
    hashes = block_hashes(tokens, ROOT, 1)[start:stop]
    mine, theirs = LINEAGES[receiver], LINEAGES[holder.node]
    shape = data.draw(st.sampled_from(["whole", "two holders", "group", "rows"]))
    others = [other for other, reach in runs_of(world, tokens, start) if reach >= stop]
    if shape == "group":
        first = data.draw(st.integers(0, NUM_LAYERS - 1))
        last = data.draw(st.integers(first + 1, NUM_LAYERS - (first == 0)))
        offering = [other for other in others if has_e(world, other, hashes, first)]
        if not first or offering:
            e_holder = data.draw(st.sampled_from(offering)) if first else None
            parts = [LayerGroup(low, high) for low, high in ((0, first), (last, NUM_LAYERS)) if low < high]
            sources = tuple(LayerSource(part, holder) for part in parts)
            shared = last == NUM_LAYERS and mine.kv[:first] == theirs.kv[:first]
            shared = shared and e_holder is not None and mine.hidden[first] == LINEAGES[e_holder.node].hidden[first]
            kind = PlanKind.SHARED_PREFIX if shared else PlanKind.PARTIAL
            return Segment(start, stop, sources, start, first or None, e_holder, LayerGroup(first, last), kind)
    sources = (LayerSource(LayerGroup(0, NUM_LAYERS), holder),)
    if shape == "two holders":
        second = data.draw(st.sampled_from(others))
        sources = (LayerSource(LayerGroup(0, 1), holder), LayerSource(LayerGroup(1, NUM_LAYERS), second))
    if shape == "rows":
        rows = data.draw(st.lists(st.integers(start, stop - 1), unique=True))
        return Segment(start, stop, sources, start, recompute=TokenRows(tuple(sorted(rows))), kind=PlanKind.TOKEN_WISE)
    equal = all(
        mine.kv[layer] == LINEAGES[source.holder.node].kv[layer]
        for source in sources
        for layer in range(source.layers.start, source.layers.stop)
    )
    return Segment(start, stop, sources, start, kind=PlanKind.EXACT if equal else PlanKind.PARTIAL)


def draw_plan(data: st.DataObject, world: World, receiver: str, tokens: list[int], earlier: list[Segment]) -> ReusePlan:
    """A plan that begins with some of an earlier turn's segments, as a next turn does, and goes on at random."""
    segments = earlier[: data.draw(st.integers(0, len(earlier)))]
    start = segments[-1].stop if segments else 0
    while start < len(tokens) - 1:
        if runs_of(world, tokens, start) and data.draw(st.integers(0, 3)):
            segments.append(draw_segment(data, world, receiver, tokens, start))
        else:
            segments.append(Segment(start, data.draw(st.integers(start + 1, len(tokens) - 1))))
        start = segments[-1].stop
    return ReusePlan((*segments, Segment(start, len(tokens))))


@settings(max_examples=120)
@given(st.data())
def test_a_name_stands_for_one_kv_and_exact_for_a_private_prefill(data: st.DataObject) -> None:
    world = World()
    plans: dict[str, list[Segment]] = {}
    for _ in range(data.draw(st.integers(2, 9))):
        receiver = data.draw(st.sampled_from(["base", "base", *MODELS]))
        tokens = data.draw(st.sampled_from([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7]]))
        plan = draw_plan(data, world, receiver, tokens, plans.get(receiver, []))
        plan.validate(NUM_LAYERS)
        world.publish(receiver, tokens, plan, world.execute(receiver, tokens, plan))
        plans[receiver] = [segment for segment in plan.segments[:-1] if segment.stop < 5]


def test_the_check_can_fail() -> None:
    """A sender's KV under a claim of exactness that its lineage does not bear out is found."""
    world = World()
    tokens = [1, 2, 3]
    alone = ReusePlan((Segment(0, 3),))
    world.publish("tune", tokens, alone, world.execute("tune", tokens, alone))
    (holder, stop), *_ = runs_of(world, tokens, 0)
    sources = (LayerSource(LayerGroup(0, NUM_LAYERS), holder),)
    lie = ReusePlan((Segment(0, stop, sources, 0, kind=PlanKind.EXACT), Segment(stop, 3)))
    with pytest.raises(AssertionError, match="offered as exact"):
        world.publish("base", tokens, lie, world.execute("base", tokens, lie))


def turn(world: World, receiver: str, *segments: Segment) -> None:
    """One published turn over tokens 1 .. 5."""
    tokens, plan = [1, 2, 3, 4, 5], ReusePlan(segments)
    plan.validate(NUM_LAYERS)
    world.publish(receiver, tokens, plan, world.execute(receiver, tokens, plan))


def held_by(world: World, node: str, start: int, **wanted: bool) -> Holder:
    """The one holding of ``node`` at token ``start`` whose provenance has these properties."""
    holders = [holder for holder, _ in runs_of(world, [1, 2, 3, 4, 5], start) if holder.node == node]
    (found,) = [
        holder for holder in holders if all(getattr(holder.provenance, name) == value for name, value in wanted.items())
    ]
    return found


def group_of(
    holder: Holder, start: int, stop: int, e_holder: Holder, group: tuple[int, int], kind: PlanKind
) -> Segment:
    first, last = group
    parts = [LayerGroup(low, high) for low, high in ((0, first), (last, NUM_LAYERS)) if low < high]
    sources = tuple(LayerSource(part, holder) for part in parts)
    return Segment(start, stop, sources, start, first, e_holder, LayerGroup(first, last), kind)


def test_exact_kv_after_a_taint_is_not_what_would_be_computed_there() -> None:
    world = World()
    turn(world, "tune", Segment(0, 5))
    turn(world, "twin", Segment(0, 5))
    tune, twin = held_by(world, "tune", 0, exact=True), held_by(world, "twin", 0, exact=True)
    tainted = group_of(tune, 0, 2, tune, (1, 2), PlanKind.PARTIAL)
    whole = (LayerSource(LayerGroup(0, NUM_LAYERS), twin),)
    turn(world, "base", tainted, Segment(2, 4, whole, 2, kind=PlanKind.EXACT), Segment(4, 5))
    turn(world, "base", tainted, Segment(2, 5))


def test_hidden_states_of_an_approximation_are_not_shared() -> None:
    """ "upper" and "base" share layer 0 only, but "late" shares hidden states up to layer 1 with them."""
    world = World()
    turn(world, "tune", Segment(0, 5))
    turn(world, "base", Segment(0, 5))
    tune, base = held_by(world, "tune", 0, exact=True), held_by(world, "base", 0, exact=True)
    turn(world, "twin", group_of(base, 0, 2, tune, (1, 3), PlanKind.PARTIAL), Segment(2, 5))
    approximate = held_by(world, "twin", 0, exact=False)
    turn(world, "late", group_of(base, 0, 2, approximate, (1, 3), PlanKind.SHARED_PREFIX), Segment(2, 5))
