"""The cost model: phases of plain plans by hand, and what must hold for any."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkin.kv.cost import (
    NO_WORK,
    CostSettings,
    NodeRates,
    Work,
    estimate,
    measured_work,
    plan_work,
    prefill_work,
    with_reuse,
)
from kvkin.kv.layout import KVLayout, Plane
from kvkin.kv.plan import (
    Holder,
    LayerGroup,
    LayerSource,
    PlanKind,
    ReusePlan,
    Segment,
    TokenRows,
    private_plan,
)
from kvkin.kv.provenance import exact_provenance

LAYERS = 10
# one token's KV of a layer is 64 bytes, its E 128
LAYOUT = KVLayout(LAYERS, (Plane("k", 2, 4), Plane("v", 2, 4)), 32, "float32", 16)
SETTINGS = CostSettings(context_half_tokens=1e12, stream_overhead_s=0.0, chunk_tokens=100)
RATES = {"d": NodeRates(1000.0, 64_000.0), "s": NodeRates(1000.0, 64_000.0)}
SENDER = exact_provenance(b"sender")


def reused(stop: int, node: str, kind: PlanKind, group: tuple[int, int] | None = None, order_id: str = "") -> Segment:
    holder = Holder(node, SENDER, order_id)
    first, last = group or (LAYERS, LAYERS)
    spans = [span for span in (LayerGroup(0, first), LayerGroup(last, LAYERS)) if len(span)]
    return Segment(
        0,
        stop,
        tuple(LayerSource(span, holder) for span in spans),
        e_layer=first if group and first else None,
        e_holder=holder if group and first else None,
        recompute=LayerGroup(first, last) if group else None,
        kind=kind,
    )


def seconds(
    plan: ReusePlan, ready_s: float = 0.0, rates: dict[str, NodeRates] = RATES
) -> tuple[float, float, float, float]:
    """(pull, recompute, suffix, TTFT)"""
    work = plan_work(plan, "d", rates, LAYOUT, SETTINGS, {"o": ready_s})
    found = estimate(work, rates["d"], LAYERS, SETTINGS)
    return found.pull_s, found.recompute_s, found.suffix_s, found.ttft_s


def test_private() -> None:
    assert seconds(private_plan(100)) == (0.0, 0.0, pytest.approx(1.0), pytest.approx(1.0))


def test_own_blocks_cost_nothing() -> None:
    plan = ReusePlan((reused(80, "d", PlanKind.EXACT), Segment(80, 100)))
    assert seconds(plan) == (0.0, 0.0, pytest.approx(0.2), pytest.approx(0.2))


def test_exact_pull_is_waited_for_layer_by_layer() -> None:
    plan = ReusePlan((reused(80, "s", PlanKind.EXACT), Segment(80, 100)))
    # 80 tokens x 10 layers x 64 bytes at 64 kB/s; after the last byte only the last layer of the suffix is left
    assert seconds(plan) == (pytest.approx(0.8), 0.0, pytest.approx(0.2), pytest.approx(0.8 + 0.02))


def test_recompute_overlaps_with_the_pull() -> None:
    plan = ReusePlan((reused(80, "s", PlanKind.PARTIAL, (2, 7)), Segment(80, 100)))
    pull, recompute, suffix, ttft = seconds(plan)
    assert (pull, recompute, suffix) == (pytest.approx(0.16 + 0.4), pytest.approx(0.4), pytest.approx(0.2))
    # E first, then the recompute while the KV arrives
    assert ttft == pytest.approx(0.16 + 0.4 + 0.2)


def test_a_live_source_is_waited_for_but_its_chunks_are_not() -> None:
    plan = ReusePlan((reused(400, "s", PlanKind.PARTIAL, (2, 7), "o"), Segment(400, 420)))
    stored, live = seconds(plan)[3], seconds(plan, ready_s=100.0)[3]
    assert stored < 10.0
    # only the last chunk, a quarter, is pulled (2.8 s in all) and recomputed (2 s) after the source is complete
    assert live == pytest.approx(100.0 + max(2.8 / 4 + 0.02, 2.0 / 4 + 0.2))


def test_token_rows_count_as_the_share_that_they_are() -> None:
    segment = Segment(
        0, 80, (LayerSource(LayerGroup(0, LAYERS), Holder("s", SENDER)),), recompute=TokenRows(tuple(range(40)))
    )
    assert seconds(ReusePlan((segment, Segment(80, 100))))[1] == pytest.approx(0.4)


def test_queue_and_shared_links_delay() -> None:
    busy = {"d": NodeRates(1000.0, 64_000.0, queued_tokens=50.0), "s": NodeRates(1000.0, 64_000.0, leases=3.0)}
    plan = ReusePlan((reused(80, "s", PlanKind.EXACT), Segment(80, 100)))
    assert seconds(plan, rates=busy)[3] == pytest.approx(0.5 + 4 * 0.8 + 0.02)


def test_defaults_apply_where_nothing_is_measured() -> None:
    found = estimate(Work(suffix=20_000.0), NodeRates(), LAYERS, SETTINGS)
    assert found.ttft_s == pytest.approx(20_000.0 / SETTINGS.default_layer_tokens_per_s)
    assert SETTINGS.bytes_per_s(NodeRates(), NodeRates()) == SETTINGS.default_pull_bytes_per_s


def test_long_contexts_cost_more_per_token() -> None:
    settings = CostSettings(context_half_tokens=1000.0)
    assert prefill_work(100, 950, 1, settings) == pytest.approx(200.0)
    halves = prefill_work(500, 0, 4, settings) + prefill_work(500, 500, 4, settings)
    assert prefill_work(1000, 0, 4, settings) == pytest.approx(halves)


def test_objective_weighs_node_seconds_and_saving() -> None:
    found = estimate(Work(suffix=1000.0, order_s=2.0), RATES["d"], LAYERS, SETTINGS, saving_s=0.5)
    assert found.node_s == pytest.approx(3.0)
    assert found.objective_s(beta=0.1) == pytest.approx(1.0 + 0.3 - 0.5)


SMALL = st.floats(0, 1e6)


@given(
    tokens=st.integers(1, 10_000),
    layers=st.integers(0, LAYERS),
    kv_bytes=SMALL,
    e_bytes=SMALL,
    ready_s=st.floats(0, 100),
    suffix=st.floats(1, 1e6),
    queued=st.floats(0, 1e4),
)
def test_time_never_falls_with_more_work(
    tokens: int, layers: int, kv_bytes: float, e_bytes: float, ready_s: float, suffix: float, queued: float
) -> None:
    rates = NodeRates(1000.0, 64_000.0, queued_tokens=queued)

    def ttft(work: Work) -> float:
        return estimate(work, rates, LAYERS, SETTINGS).ttft_s

    base = with_reuse(Work(suffix=suffix), tokens, 0, layers, kv_bytes, e_bytes, 64_000.0, ready_s, SETTINGS)
    assert ttft(base) >= ttft(Work(suffix=suffix))
    for more in (
        with_reuse(base, 10, tokens, 1, 0, 0, 1.0, 0.0, SETTINGS),
        with_reuse(base, 10, tokens, 0, 1000, 0, 64_000.0, 0.0, SETTINGS),
        with_reuse(base, 10, tokens, 0, 1000, 1000, 64_000.0, ready_s + 1.0, SETTINGS),
    ):
        assert ttft(more) >= ttft(base) - 1e-9
    assert ttft(NO_WORK) == pytest.approx(queued * LAYERS / 1000.0)


@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(1, 40), st.floats(100, 1e6))
def test_work_that_was_measured_is_of_the_unit_of_work_that_is_estimated(
    num_tokens: int, first: int, num_layers: int, half: float
) -> None:
    estimated = prefill_work(num_tokens, first, num_layers, CostSettings(context_half_tokens=half))
    positions = num_layers * sum(range(first, first + num_tokens))
    measured = measured_work(num_layers * num_tokens, positions, half)
    assert measured == pytest.approx(estimated, rel=1 / half)  # half a position a token apart
