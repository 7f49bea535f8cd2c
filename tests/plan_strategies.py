"""Hypothesis strategies for reuse plans that can be executed: any mixture of segments on a model of a few layers."""

from __future__ import annotations

from hypothesis import strategies as st

from kvkin.kv.plan import Holder, LayerGroup, LayerSource, PlanKind, ReusePlan, Segment, TokenRows
from kvkin.kv.provenance import exact_provenance

NODES = ("a", "b", "c")


def holder(node: str) -> Holder:
    return Holder(node, exact_provenance(node.encode()))


@st.composite
def sources(draw: st.DrawFn, layers: list[int]) -> tuple[LayerSource, ...]:
    """Holders of exactly ``layers``, cut at random and at gaps."""
    made: list[LayerSource] = []
    first = 0
    for index, layer in enumerate(layers):
        last = index == len(layers) - 1
        if last or layers[index + 1] != layer + 1 or draw(st.booleans()):
            made.append(LayerSource(LayerGroup(layers[first], layer + 1), holder(draw(st.sampled_from(NODES)))))
            first = index + 1
    return tuple(made)


@st.composite
def segments(draw: st.DrawFn, start: int, stop: int, num_layers: int) -> Segment:
    every = list(range(num_layers))
    shapes = ["computed", "exact", "rows", "full", *(["partial"] if num_layers > 1 else [])]
    match draw(st.sampled_from(shapes)):
        case "exact":
            return Segment(start, stop, draw(sources(every)), start, kind=PlanKind.EXACT)
        case "full":
            loss = draw(st.sampled_from([0.0, 0.25, float("inf")]))
            return Segment(start, stop, draw(sources(every)), start, kind=PlanKind.PARTIAL, loss=loss)
        case "rows":
            rows = draw(st.lists(st.integers(start, stop - 1), unique=True, max_size=stop - start))
            recompute = TokenRows(tuple(sorted(rows)))
            return Segment(start, stop, draw(sources(every)), start, recompute=recompute, kind=PlanKind.TOKEN_WISE)
        case "partial":
            first = draw(st.integers(0, num_layers - 1))
            last = draw(st.integers(first + 1, num_layers - (first == 0)))
            pulled = [layer for layer in every if not first <= layer < last]
            e_holder = holder(draw(st.sampled_from(NODES))) if first else None
            return Segment(
                start,
                stop,
                draw(sources(pulled)),
                start,
                first or None,
                e_holder,
                LayerGroup(first, last),
                PlanKind.PARTIAL,
                draw(st.sampled_from([0.0, 0.25, float("inf")])),
            )
        case _:
            return Segment(start, stop, recompute=draw(st.sampled_from([None, LayerGroup(0, num_layers)])))


@st.composite
def plans(draw: st.DrawFn, num_layers: int, max_segments: int = 4, max_tokens: int = 9) -> ReusePlan:
    """A valid plan; its last segment is computed."""
    lengths = draw(st.lists(st.integers(1, max_tokens), min_size=1, max_size=max_segments))
    made, start = [], 0
    for length in lengths[:-1]:
        made.append(draw(segments(start, start + length, num_layers)))
        start += length
    return ReusePlan((*made, Segment(start, start + lengths[-1])))
