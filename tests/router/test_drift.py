"""The router's watch for drift, pure: estimates, bounds, who is blamed, what is switched off and what the policy then sees."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_world import BLOCK, FAMILY, LAYERS, LINEAGES, exact, held, node, request, run, view

from kvkin.kv.plan import Holder, LayerGroup, LayerSource, PlanKind, ReusePlan, Segment, private_plan, provenances
from kvkin.kv.provenance import Provenance
from kvkin.router import policy
from kvkin.router.drift import DriftWatch, chosen
from kvkin.router.drift_estimate import Decayed, PairEstimate, left
from kvkin.router.drift_types import DriftBound, DriftSettings
from kvkin.router.index import Match
from kvkin.router.taints import MAX_STEPS, Taints
from kvkin.transport.messages import DriftStatus, Reuse
from kvkin.transport.node_messages import DriftSample, DriftSource

IDS = {name: lineage.id for name, lineage in LINEAGES.items()}
BOUND = DriftBound(min_agreement=0.7, max_divergence=0.5)
# few samples convince it: what false alarms cost is test_drift_evidence.py's
SETTINGS = DriftSettings(share=1.0, min_samples=4, half_life_samples=8.0, false_alarms=0.5, bound=BOUND)


def source(sender: str, group: tuple[int, int] | None = (2, 6)) -> DriftSource:
    return DriftSource(IDS[sender], sender, PlanKind.PARTIAL, group)


def sample(
    sender: str | Sequence[DriftSource] = "base",
    receiver: str = "full",
    agreement: float = 1.0,
    divergence: float = 0.0,
    *,
    first: bool = True,
    inherited: bool = False,
) -> DriftSample:
    sources = (source(sender),) if isinstance(sender, str) else tuple(sender)
    return DriftSample("r1", IDS[receiver], sources, first, agreement, divergence, 8, inherited)


def watch(settings: DriftSettings = SETTINGS, **more: object) -> DriftWatch:
    return DriftWatch(settings, {"f": FAMILY}, **more)  # type: ignore[arg-type]


def feed(watching: DriftWatch, samples: Iterable[DriftSample], now: float = 1.0) -> list[DriftStatus]:
    return [one for each in samples for one in watching.sampled(each, now)]


def states(watching: DriftWatch) -> dict[tuple[str, str], str]:
    return {(one.sender, one.receiver): one.state for one in watching.status(1.0)}


def plan(*spans: tuple[str, int, int, PlanKind], tail: int = 8) -> ReusePlan:
    """Segments of blocks [start, stop) of a sender's exact KV under group [2, 6), then computed tokens."""
    segments = []
    for sender, start, stop, kind in spans:
        holder = Holder(f"on-{sender}", exact(sender))
        sources = (LayerSource(LayerGroup(0, 2), holder), LayerSource(LayerGroup(6, LAYERS), holder))
        group, e_layer, e_holder = LayerGroup(2, 6), 2, holder
        if kind is PlanKind.EXACT:
            segments.append(
                Segment(start * BLOCK, stop * BLOCK, (LayerSource(LayerGroup(0, LAYERS), holder),), kind=kind)
            )
        else:
            segments.append(Segment(start * BLOCK, stop * BLOCK, sources, -1, e_layer, e_holder, group, kind))
    last = segments[-1].stop if segments else 0
    made = ReusePlan((*segments, Segment(last, last + tail)))
    made.validate(LAYERS)
    return made


# --- estimates -----------------------------------------------------------------------------------------------------------

values = st.lists(st.floats(0, 20), min_size=1, max_size=60)
keeps = st.floats(0.5, 0.999)


def decayed(seen: Iterable[float], keep: float) -> Decayed:
    estimate = Decayed()
    for value in seen:
        estimate = estimate.with_value(value, keep)
    return estimate


@given(values, keeps)
def test_a_decayed_mean_is_the_weighted_mean_of_its_definition(seen: list[float], keep: float) -> None:
    weights = [keep ** (len(seen) - 1 - index) for index in range(len(seen))]
    found = decayed(seen, keep)
    assert found.mean == pytest.approx(math.fsum(w * v for w, v in zip(weights, seen, strict=True)) / sum(weights))
    assert found.weight == pytest.approx(sum(weights))
    assert min(seen) - 1e-9 <= found.mean <= max(seen) + 1e-9


@given(values, values)
def test_what_is_old_is_forgotten(old: list[float], new: list[float]) -> None:
    """Half a weight every eight samples: after a hundred of them, what came before moves the mean by less than a thousandth."""
    keep = 0.5 ** (1 / 8)
    filled = [new[index % len(new)] for index in range(100)]
    assert abs(decayed(old + filled, keep).mean - decayed(filled, keep).mean) <= 20e-3


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.floats(0, 1), st.integers(1, 20))
def test_a_pair_is_judged_only_on_enough_samples_and_beyond_its_bound(
    firsts: list[bool], least: float, min_samples: int
) -> None:
    bound = DriftBound(min_first_token=least)
    estimate = PairEstimate()
    for first in firsts:
        estimate = estimate.with_sample(sample(first=first), bound, 16.0)
    why = left(estimate, bound, min_samples, 0.01)
    if why:
        assert len(firsts) >= min_samples
        assert estimate.first_token.mean < least
    if estimate.first_token.mean >= least or len(firsts) < min_samples:
        assert why == ""
    if not any(firsts) and least > 0.5 and len(firsts) >= max(min_samples, 30):
        assert why, "never once the same token, again and again: no doubt about that"


def test_no_bound_is_never_left() -> None:
    estimate = PairEstimate()
    for _ in range(100):
        estimate = estimate.with_sample(sample(agreement=0, divergence=20, first=False), DriftBound(), 16.0)
    assert left(estimate, DriftBound(), 1, 0.5) == ""


def test_a_bound_of_nothing_is_always_kept() -> None:
    """And what it sees is no evidence for a bound that promises something."""
    bound = DriftBound(min_agreement=0.0, by_group=((None, 0.0), ((2, 6), 0.9)))
    estimate = PairEstimate()
    for _ in range(100):
        estimate = estimate.with_sample(sample([source("base", None)], agreement=0, first=False), bound, 16.0)
    assert (estimate.judged, left(estimate, bound, 1, 0.5)) == (0, "")


def test_each_group_is_held_to_what_it_promised() -> None:
    """Full reuse that agrees in half of all cases keeps its word; the group that promised 0.9 does not."""
    bound = DriftBound(by_group=((None, 0.4), ((2, 6), 0.9)))
    halves = [True, False] * 12
    for group, off in (((2, 6), True), (None, False)):
        watching = watch(DriftSettings(share=1, min_samples=8, bounds={("base", "full"): bound}))
        feed(watching, (sample([source("base", group)], first=first) for first in halves))
        (status,) = watching.status(1.0)
        assert (status.state == "off") is off
        assert status.min_first_token == pytest.approx(0.9 if off else 0.4)
        assert status.first_token == pytest.approx(0.5, abs=0.1)


def test_what_several_segments_promise_is_what_is_left_of_all_their_promises() -> None:
    bound = DriftBound(by_group=(((0, 3), 0.95), ((2, 6), 0.9), (None, 0.4)))
    assert bound.least_first_token([(2, 6)]) == pytest.approx(0.9)
    assert bound.least_first_token([(2, 6), (0, 3)]) == pytest.approx(0.85)
    assert bound.least_first_token([(2, 6), (2, 6), (2, 6)]) == pytest.approx(0.7)
    assert bound.least_first_token([None, None]) == 0.0
    # a group that was never measured promised nothing, and neither does a plan with it
    assert bound.least_first_token([(2, 6), (1, 7)]) is None
    assert DriftBound(0.8, by_group=(((2, 6), 0.9),)).least_first_token([(2, 6), (1, 7)]) == pytest.approx(0.7)
    # what the operator says holds for a plan as a whole
    assert DriftBound(0.8).least_first_token([(2, 6), (0, 3)]) == 0.8
    assert bound.least_first_token([]) is None
    assert DriftBound(0.8).least_first_token([]) is None
    assert DriftBound().least_first_token([(2, 6)]) is None


def test_a_plan_of_several_segments_is_not_held_to_what_one_of_them_promised() -> None:
    """Each of three segments changes every tenth token, within its group's 0.85; together they do so to three of ten."""
    bound = DriftBound(by_group=(((2, 6), 0.85),))
    for segments, off in ((3, False), (1, True)):
        watching = watch(DriftSettings(share=1, min_samples=8, bounds={("base", "full"): bound}))
        sources = [source("base")] * segments
        feed(watching, (sample(sources, first=number % 10 not in (2, 5, 8)) for number in range(2000)))
        (status,) = watching.status(1.0)
        assert (status.state == "off") is off


# --- switching off ---------------------------------------------------------------------------------------------------------


def test_a_bad_pair_is_switched_off_once_it_has_enough_samples() -> None:
    watching = watch()
    assert states(watching) == {}
    bad = [sample(agreement=0.1, divergence=3.0, first=False) for _ in range(4)]
    assert feed(watching, bad[:3]) == []
    # models with the same weights are one sender
    assert states(watching) == {("base, copy", "full"): "watching"}
    (switched,) = feed(watching, bad[3:])
    assert (switched.state, switched.samples, switched.agreement) == ("off", 4, pytest.approx(0.1))
    assert (switched.min_agreement, switched.max_divergence) == (0.7, 0.5)


def test_a_fine_pair_stays_and_one_on_the_edge_gets_the_benefit_of_the_doubt() -> None:
    watching = watch()
    assert feed(watching, [sample(agreement=0.9, divergence=0.01)] * 50) == []
    # below 0.7 on average, but not so far that it could not be chance
    edge = [sample(sender="other", agreement=value) for value in (1.0, 1.0, 0.0, 0.75)]
    assert feed(watching, edge) == []
    found = {one.sender: one.state for one in watching.status(1.0)}
    assert found["other"] == "ok"
    assert set(found.values()) == {"ok"}


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 20)), max_size=60))
def test_off_is_for_good(figures: list[tuple[float, float]]) -> None:
    """Once switched off, no sample brings the pair back, and it is reported as switched off once."""
    watching = watch()
    switched = feed(watching, [sample(agreement=0.0, divergence=9.0, first=False)] * 4)
    assert len(switched) == 1
    families = watching.families
    assert feed(watching, (sample(agreement=a, divergence=d) for a, d in figures)) == []
    assert set(states(watching).values()) == {"off"}
    assert watching.families is families, "no new views where nothing was switched"


@given(st.lists(st.sampled_from(["base", "other", "upper"]), max_size=30), st.data())
def test_only_a_check_of_one_pair_alone_says_something_of_it(senders: list[str], data: st.DataObject) -> None:
    watching = watch(DriftSettings(share=1.0))
    seen: dict[str, int] = {}
    alone: dict[str, list[float]] = {}
    for _ in senders:
        named = data.draw(st.lists(st.sampled_from(["base", "other", "upper"]), min_size=1, max_size=3))
        agreement, inherited = data.draw(st.floats(0, 1)), data.draw(st.booleans())
        watching.sampled(sample([source(one) for one in named], agreement=agreement, inherited=inherited), 1.0)
        for one in set(named):  # named twice, in two segments: still one sample
            seen[one] = seen.get(one, 0) + 1
            own = alone.setdefault(one, [])
            if len(set(named)) == 1 and not inherited:
                own.append(agreement)
    found = {one.sender.split(",")[0]: one for one in watching.status(1.0)}
    assert {name: one.samples for name, one in found.items()} == seen
    for name, values in alone.items():
        assert found[name].inherited == seen[name] - len(values)
        if values:
            assert found[name].agreement == pytest.approx(decayed(values, 0.5 ** (1 / 32)).mean)
        else:
            assert (found[name].first_token, found[name].agreement, found[name].divergence) == (None, None, None)


def test_nobody_is_judged_by_what_others_did() -> None:
    """Whatever a plan of two senders shows, or one that built on somebody else's approximate blocks: a pair stays on."""
    watching = watch()
    both = [source("base"), source("other")]
    feed(watching, [sample(both, agreement=0.0, divergence=9.0, first=False)] * 200)
    feed(watching, [sample(agreement=0.0, divergence=9.0, first=False, inherited=True)] * 200)
    assert set(states(watching).values()) == {"watching"}
    feed(watching, itertools.chain.from_iterable([sample("base"), sample("other", agreement=0.1)] for _ in range(20)))
    found = {one.sender.split(",")[0]: one.state for one in watching.status(1.0)}
    assert found == {"base": "ok", "other": "off"}


def test_a_pair_without_a_bound_is_only_watched() -> None:
    watching = watch(DriftSettings(share=1.0, min_samples=1))
    feed(watching, [sample(agreement=0.0, divergence=20.0, first=False)] * 40)
    (status,) = watching.status(1.0)
    assert (status.state, status.samples, status.min_agreement) == ("watching", 40, None)
    assert watching.records(1.0) == ()


def test_the_pairs_own_bound_comes_first() -> None:
    settings = msgspec.structs.replace(SETTINGS, bounds={("other", "full"): DriftBound(min_agreement=0.01)})
    watching = watch(settings)
    feed(watching, [sample(name, agreement=0.2) for name in ("base", "other") for _ in range(6)])
    found = {one.sender.split(",")[0]: one.state for one in watching.status(1.0)}
    assert found == {"base": "off", "other": "ok"}


@pytest.mark.parametrize(
    "change",
    [
        {"agreement": 1.5},
        {"agreement": math.nan},
        {"divergence": 1e200},
        {"divergence": -0.1},
        {"divergence": math.inf},
        {"tokens": 0},
        {"sources": ()},
        {"sources": (source("base"),) * 65},
        {"receiver": b"unknown"},
        {"sources": (source("full"),)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_cannot_be_true_is_named(change: dict[str, object]) -> None:
    assert watch().problem(sample()) == ""
    assert watch().problem(msgspec.structs.replace(sample(), **change)) != ""


def test_a_sender_that_is_not_known_here_is_left_out() -> None:
    watching = watch()
    stranger = DriftSource(b"stranger", "x", PlanKind.PARTIAL)
    feed(watching, [sample([stranger, source("base")])])
    assert len(watching.status(1.0)) == 1


# --- which requests are checked --------------------------------------------------------------------------------------------

PARTIAL, EXACT = PlanKind.PARTIAL, PlanKind.EXACT


def test_only_plans_that_reuse_another_models_kv_approximately_are_checked() -> None:
    watching = watch()
    receiver = IDS["full"]
    for one in (private_plan(40), plan(("full", 0, 2, EXACT)), plan(("base", 0, 2, PlanKind.SHARED_PREFIX))):
        assert watching.check_of("r", one, receiver) is None
    found = watching.check_of("r", plan(("full", 0, 1, EXACT), ("base", 1, 3, PARTIAL)), receiver)
    assert found is not None
    assert (found.tokens, found.sources, found.inherited) == (8, (source("base"),), False)
    two = plan(("base", 0, 1, PARTIAL), ("other", 1, 3, PARTIAL), ("base", 3, 4, PARTIAL))
    # one for each segment: what they promise adds up
    assert [one.model for one in watching.check_of("r", two, receiver).sources] == ["base", "other", "base"]  # type: ignore[union-attr]


def test_full_reuse_of_another_model_is_checked_and_own_tainted_blocks_alone_are_not() -> None:
    watching, receiver = watch(), IDS["full"]
    whole = (LayerSource(LayerGroup(0, LAYERS), Holder("n", exact("base"))),)
    full_reuse = ReusePlan((Segment(0, 32, whole, kind=PARTIAL, loss=math.inf), Segment(32, 40)))
    found = watching.check_of("r", full_reuse, receiver)
    assert found is not None
    assert found.sources == (source("base", None),)
    tainted = provenances(plan(("base", 0, 2, PARTIAL)), receiver)[0]
    own = (LayerSource(LayerGroup(0, LAYERS), Holder("n", tainted)),)
    kept = Segment(0, 32, own, kind=PARTIAL)
    # whose fault would it be? its blocks were checked, or not, when they were made
    assert watching.check_of("r", ReusePlan((kept, Segment(32, 40))), receiver) is None
    more = plan(("base", 0, 2, PARTIAL)).segments[0]
    onward = ReusePlan((kept, msgspec.structs.replace(more, start=32, stop=64), Segment(64, 70)))
    found = watching.check_of("r", onward, receiver)
    assert found is not None
    assert found.inherited, "nobody knows what the first blocks come of"


def test_what_a_plan_builds_on_is_laid_to_the_pair_that_made_it() -> None:
    """The turns of one conversation: what the pair made approximate before is named with what it makes so now."""
    watching, receiver = watch(), IDS["full"]
    first = plan(("base", 0, 2, PARTIAL))
    watching.dispatched(first, receiver)
    reused, computed = provenances(first, receiver)

    def kept(start: int, stop: int, provenance: Provenance) -> Segment:
        return Segment(start, stop, (LayerSource(LayerGroup(0, LAYERS), Holder("n", provenance)),), kind=PARTIAL)

    own = (kept(0, 32, reused), kept(32, 48, computed))
    for sender, pairs in (("base", ["base", "base"]), ("other", ["base", "other"])):
        more = msgspec.structs.replace(plan((sender, 0, 1, PARTIAL)).segments[0], start=48, stop=64)
        found = watching.check_of("r", ReusePlan((*own, more, Segment(64, 70))), receiver)
        assert found is not None
        assert [one.model for one in found.sources] == pairs
        assert [one.group for one in found.sources] == [(2, 6), (2, 6)]
        assert not found.inherited, "all of it is named"


def test_what_a_third_model_made_approximate_judges_nobody() -> None:
    """full reused the base's blocks; other takes full's. What is wrong with that may be the base's doing."""
    watching = watch()
    first = plan(("base", 0, 4, PARTIAL))
    watching.dispatched(first, IDS["full"])
    holder = Holder("d0", provenances(first, IDS["full"])[0])
    handed = Segment(0, 64, (LayerSource(LayerGroup(4, LAYERS), holder),), recompute=LayerGroup(0, 4), kind=PARTIAL)
    found = watching.check_of("r", ReusePlan((handed, Segment(64, 70))), IDS["other"])
    assert found is not None
    assert ([one.model for one in found.sources], found.inherited) == (["full"], True)


def test_a_history_that_is_too_long_to_name_judges_nobody() -> None:
    watching = watch()
    long = plan(*(("base", number, number + 1, PARTIAL) for number in range(MAX_STEPS + 1)))
    found = watching.check_of("r", long, IDS["full"])
    assert found is not None
    assert found.inherited
    assert len(found.sources) <= 64
    watching.dispatched(long, IDS["full"])
    assert watching.usable([tainted_match(long, "full", "d0")]), "its pairs are known all the same"
    feed(watching, [sample(agreement=0.0)] * 4)
    assert watching.usable([tainted_match(long, "full", "d0")]) == []


@given(st.floats(0, 1))
def test_the_share_is_kept_and_depends_on_the_id_alone(share: float) -> None:
    ids = [f"abcdef-{number:06}" for number in range(2000)]
    picked = [one for one in ids if chosen(one, share)]
    assert abs(len(picked) / len(ids) - share) < 0.05
    assert picked == [one for one in ids if chosen(one, share)]
    assert {one for one in ids if chosen(one, share / 2)} <= set(picked)


def test_no_share_no_check() -> None:
    watching = watch(msgspec.structs.replace(SETTINGS, share=0.0))
    assert watching.check_of("r", plan(("base", 0, 2, PARTIAL)), IDS["full"]) is None


# --- what the policy sees --------------------------------------------------------------------------------------------------


def switched_off(*senders: str, receiver: str = "full") -> DriftWatch:
    watching = watch()
    feed(watching, [sample(one, receiver, 0.0, 9.0, first=False) for one in senders for _ in range(4)])
    return watching


def decide(watching: DriftWatch, matches: list[Match], **how: object) -> policy.Decision:
    nodes = view(node("d0", "full"), node("d1", "base"), node("d2", "other"))
    asked = request("full", **how)
    seen = msgspec.structs.replace(nodes, families=watching.families)
    return watching.explained(policy.choose(asked, watching.usable(matches), seen), asked, matches)


def test_views_are_new_only_when_the_set_of_pairs_changes() -> None:
    watching = watch()
    assert watching.families["f"] is FAMILY
    feed(watching, [sample(agreement=0.0)] * 3)
    assert watching.families["f"] is FAMILY
    feed(watching, [sample(agreement=0.0)])
    first = watching.families["f"]
    assert first is not FAMILY
    assert set(FAMILY.groups) - set(first.groups) == {("base", "full")}
    feed(watching, [sample(agreement=0.0)] * 5)
    assert watching.families["f"] is first


def test_a_switched_off_sender_is_not_used_and_the_reason_says_so() -> None:
    matches = [held("d1", "base", 100)]
    before = decide(watch(), matches)
    assert before.plan.kind is PARTIAL
    after = decide(switched_off("base"), matches)
    assert after.plan.kind is PlanKind.PRIVATE
    assert "base" in after.reason
    assert "drift" in after.reason
    assert "agreement 0.00, bound 0.70, 4 checks" in after.reason
    assert after.plan.reason == after.reason
    # another sender goes on, and exact reuse, too
    assert decide(switched_off("base"), [*matches, held("d2", "other", 100)]).plan.segments[0].nodes == ("d2",)
    assert decide(switched_off("base"), [*matches, held("d0", "full", 90)]).quality == "exact"


def test_shared_layers_of_a_switched_off_pair_stay() -> None:
    """upper has the base's lower layers: what is exact needs no trust."""
    watching = switched_off("base", receiver="upper")
    asked = request("upper", reuse=Reuse.BOUNDED)
    nodes = msgspec.structs.replace(view(node("d0", "upper"), node("d1", "base")), families=watching.families)
    matches = [held("d1", "base", 100)]
    found = watching.explained(policy.choose(asked, watching.usable(matches), nodes), asked, matches)
    assert found.plan.kind is PlanKind.SHARED_PREFIX
    assert "drift" not in found.reason, "nothing that the request could have had was left out"


@pytest.mark.parametrize("reuse", [Reuse.EXACT, Reuse.OFF])
def test_who_asks_for_exact_hears_nothing_of_it(reuse: Reuse) -> None:
    assert "drift" not in decide(switched_off("base"), [held("d1", "base", 100)], reuse=reuse).reason


def test_a_bounded_request_hears_of_it_if_its_bound_would_have_allowed_the_pair() -> None:
    matches = [held("d1", "base", 100)]
    for max_loss, told in ((0.03, True), (0.01, False)):
        found = decide(switched_off("base"), matches, reuse=Reuse.BOUNDED, max_loss=max_loss)
        assert ("drift" in found.reason) is told


def tainted_match(made: ReusePlan, receiver: str, name: str) -> Match:
    """What the receiver holds after it executed a plan: one run for each segment."""
    runs = []
    for segment, provenance in zip(made.segments, provenances(made, IDS[receiver]), strict=True):
        runs.append(run(provenance, segment.start // BLOCK, -(-segment.stop // BLOCK)))
    return Match(name, tuple(runs))


def test_blocks_that_came_of_a_switched_off_pair_are_not_continued() -> None:
    made = plan(("base", 0, 80, PARTIAL))
    for known in (True, False):
        watching = watch()
        if known:
            watching.dispatched(made, IDS["full"])
        matches = [tainted_match(made, "full", "d0")]
        assert decide(watching, matches).plan.kind is PARTIAL
        feed(watching, [sample(agreement=0.0)] * 4)
        after = decide(watching, matches)
        assert after.plan.kind is PlanKind.PRIVATE
        assert "blocks that came of a switched-off pair are not used" in after.reason


def test_what_stands_before_the_taint_is_used() -> None:
    made = plan(("full", 0, 60, EXACT), ("base", 60, 90, PARTIAL))
    watching = switched_off("base")
    matches = [tainted_match(made, "full", "d0")]
    (cut,) = watching.usable(matches)
    assert [one.provenance.exact for one in cut.runs] == [True]
    assert decide(watching, matches).plan.reused_tokens == 60 * BLOCK


def test_blocks_of_other_pairs_are_continued_where_their_history_is_known() -> None:
    made = plan(("other", 0, 80, PARTIAL))
    knowing, ignorant = switched_off("base"), switched_off("base")
    knowing.dispatched(made, IDS["full"])
    matches = [tainted_match(made, "full", "d0")]
    assert list(knowing.usable(matches)) == matches
    assert list(ignorant.usable(matches)) == [], "it may have come of the bad pair"


def test_a_taint_is_followed_through_several_models() -> None:
    """base -> full is off. What full made of it went on to other: it is not used there either."""
    first = plan(("base", 0, 4, PARTIAL))
    tainted = provenances(first, IDS["full"])[0]
    group = LayerGroup(0, 4)
    handed = Segment(
        0, 64, (LayerSource(LayerGroup(4, LAYERS), Holder("d0", tainted)),), recompute=group, kind=PARTIAL, loss=0.03
    )
    second = ReusePlan((handed, Segment(64, 70)))
    for bad, used in ((("base", "full"), False), (("full", "other"), False), (("upper", "base"), True)):
        watching = watch()
        watching.dispatched(first, IDS["full"])
        watching.dispatched(second, IDS["other"])
        feed(watching, [sample(bad[0], bad[1], 0.0)] * 4)
        assert bool(watching.usable([tainted_match(second, "other", "d2")])) is used, bad


def pairs_of(taints: Taints, provenance: Provenance) -> frozenset[tuple[bytes, bytes]] | None:
    history = taints.history_of(provenance)
    return None if history is None else history.pairs


def test_taints_are_bounded_and_forget_what_was_used_longest_ago() -> None:
    taints = Taints({"f": FAMILY}, most=4)
    made = [plan(("base", 0, stop, PARTIAL), tail=3) for stop in range(1, 8)]
    for one in made:
        taints.learn(one, IDS["full"])
    assert len(taints) == 4
    newest, oldest = provenances(made[-1], IDS["full"])[-1], provenances(made[0], IDS["full"])[-1]
    assert pairs_of(taints, newest) == {(IDS["base"], IDS["full"])}
    assert pairs_of(taints, oldest) is None
    assert pairs_of(taints, exact("full")) == frozenset()
    before = len(taints)
    taints.learn(plan(("full", 0, 4, EXACT)), IDS["full"])
    assert len(taints) == before


def test_a_history_is_kept_for_as_long_as_a_block_needs_it() -> None:
    """Nothing is ever cleaned up in one go: with many of them that would be a look at all of them for every plan."""
    taints, receivers = Taints({"f": FAMILY}, most=6), [bytes([number]) for number in range(40)]
    for receiver in receivers:
        for stop in (2, 4):
            taints.learn(plan(("base", 0, stop, PARTIAL)), receiver)
        assert taints.num_histories <= 3
    assert len(taints) == 6
    for _ in range(3):  # the same again: nothing is counted twice
        taints.learn(plan(("base", 0, 2, PARTIAL)), receivers[0])
    for receiver in receivers[-3:]:
        taints.learn(plan(("base", 0, 2, PARTIAL)), receiver)
    assert (len(taints), taints.num_histories) == (6, 3)
    for receiver in receivers[-3:]:
        after = provenances(plan(("base", 0, 2, PARTIAL)), receiver)[-1]
        assert pairs_of(taints, after) == {(IDS["base"], receiver)}


def test_what_follows_unknown_blocks_is_unknown() -> None:
    taints = Taints({"f": FAMILY})
    receiver = IDS["full"]
    unknown = provenances(plan(("base", 0, 2, PARTIAL)), receiver)[0]
    kept = Segment(0, 32, (LayerSource(LayerGroup(0, LAYERS), Holder("n", unknown)),), kind=PARTIAL)
    more = msgspec.structs.replace(plan(("other", 0, 2, PARTIAL)).segments[0], start=32, stop=64)
    made = ReusePlan((kept, more, Segment(64, 70)))
    taints.learn(made, receiver)
    assert all(pairs_of(taints, one) is None for one in provenances(made, receiver))
