"""PullScheduler: urgency, readiness, window, against a naive list."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvkin.kv.pulls import E_LAYER, PullItem, PullScheduler

PAIRS = st.tuples(st.integers(0, 4), st.integers(E_LAYER, 4))
ITEMS = st.dictionaries(PAIRS, st.integers(1, 100), max_size=14).map(
    lambda sizes: [PullItem(layer, chunk, size) for (chunk, layer), size in sizes.items()]
)


def urgency(item: PullItem) -> tuple[bool, int, int]:
    """All chunks' E, then KV by layer, then by chunk."""
    return item.layer != E_LAYER, item.layer, item.chunk


def drain(scheduler: PullScheduler) -> list[PullItem]:
    out = []
    while (item := scheduler.next()) is not None:
        out.append(item)
        scheduler.completed(item)
    return out


@given(ITEMS)
def test_a_stored_context_is_pulled_by_urgency(items: list[PullItem]) -> None:
    scheduler = PullScheduler(items, window_bytes=1)
    assert scheduler.next() is None, "nothing is ready before it is said to be"
    scheduler.mark_ready()
    assert drain(scheduler) == sorted(items, key=urgency)
    assert scheduler.done


def test_nothing_to_pull_is_done_at_once() -> None:
    """All blocks already present: a no-op completes, too (vllm-ascend#10098)."""
    scheduler = PullScheduler([], window_bytes=1)
    assert scheduler.done
    scheduler.mark_ready()
    assert scheduler.next() is None


def test_e_goes_before_the_kv_of_every_chunk() -> None:
    items = [PullItem(layer, chunk, 1) for chunk in (0, 1) for layer in (0, 1, E_LAYER)]
    scheduler = PullScheduler(items, window_bytes=100)
    scheduler.mark_ready()
    found = [scheduler.next() for _ in items]
    assert [(item.chunk, item.layer) for item in found if item] == [(0, -1), (1, -1), (0, 0), (1, 0), (0, 1), (1, 1)]


def test_a_live_prefill_is_pulled_as_it_comes() -> None:
    """Chunk 0 is computed first: its KV goes at once, and E of chunk 1 jumps the queue when it is announced."""
    items = [PullItem(layer, chunk, 1) for chunk in (0, 1) for layer in (E_LAYER, 0, 1)]
    scheduler = PullScheduler(items, window_bytes=100)
    scheduler.mark_ready([(0, 0), (0, 1)])
    first = scheduler.next()
    assert first == PullItem(0, 0, 1)
    scheduler.mark_ready([(1, E_LAYER)])
    assert scheduler.next() == PullItem(E_LAYER, 1, 1)
    assert scheduler.next() == PullItem(1, 0, 1)
    assert scheduler.next() is None
    assert not scheduler.done


@settings(max_examples=150)
@given(ITEMS, st.integers(1, 250), st.data())
def test_any_sequence_of_events(items: list[PullItem], window: int, data: st.DataObject) -> None:
    """Always the most urgent ready item, never more than the window in flight, every item once."""
    scheduler = PullScheduler(items, window)
    by_pair = {(item.chunk, item.layer): item for item in items}
    ready: list[PullItem] = []
    flying: list[PullItem] = []
    seen: list[PullItem] = []
    announced: set[tuple[int, int]] = set()
    for _ in range(data.draw(st.integers(0, 40))):
        match data.draw(st.sampled_from(["ready", "next", "complete", "late"])):
            case "ready":
                pairs = data.draw(st.lists(st.sampled_from([*by_pair, (9, 9)]), max_size=4))
                scheduler.mark_ready(pairs)
                new = [pair for pair in dict.fromkeys(pairs) if pair in by_pair and pair not in announced]
                announced |= set(new)
                ready += [by_pair[pair] for pair in new]
            case "next":
                best = min(ready, key=urgency, default=None)
                in_flight = sum(item.num_bytes for item in flying)
                if best is not None and flying and in_flight + best.num_bytes > window:
                    best = None
                assert scheduler.next() == best
                if best is not None:
                    ready.remove(best)
                    flying.append(best)
                    seen.append(best)
            case "complete" if flying:
                scheduler.completed(flying.pop(data.draw(st.integers(0, len(flying) - 1))))
            case "late" if seen:
                item = data.draw(st.sampled_from(seen))
                if item not in flying:
                    scheduler.completed(item)  # a duplicate completion changes nothing
            case _:
                pass
        assert scheduler.in_flight == len(flying)
        assert scheduler.done == (len(seen) == len(items) and not flying)
        assert sum(item.num_bytes for item in flying) <= window or len(flying) == 1
    assert len(seen) == len(set(seen))
    scheduler.mark_ready()
    for item in flying:
        scheduler.completed(item)
    assert sorted([*seen, *drain(scheduler)], key=urgency) == sorted(items, key=urgency)
    assert scheduler.done


def test_an_item_larger_than_the_window_still_goes() -> None:
    scheduler = PullScheduler([PullItem(0, 0, 1000), PullItem(1, 0, 1)], window_bytes=10)
    scheduler.mark_ready()
    first = scheduler.next()
    assert first == PullItem(0, 0, 1000)
    assert scheduler.next() is None
    scheduler.completed(first)
    assert scheduler.next() == PullItem(1, 0, 1)
