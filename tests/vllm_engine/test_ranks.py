"""Which heads a rank has, and what its reports come to with those of others. Without vLLM."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkin.engines.vllm.ranks import heads_of, is_writer, joined
from kvkin.engines.vllm.reports import LoadFailed, RankReports, Report, SliceTook, StatesKept, Stored, UnitRan
from kvkin.kv.execution import Unit, UnitMode

# --- heads -----------------------------------------------------------------------------------------------------------------


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, int]:
    """(KV heads, ranks): one divides the other."""
    small, times = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    return (small * times, small) if draw(st.booleans()) else (small, small * times)


@given(splits())
def test_every_head_is_somewhere_and_written_once(split: tuple[int, int]) -> None:
    kv_heads, num_ranks = split
    shares = [heads_of(kv_heads, num_ranks, rank) for rank in range(num_ranks)]
    assert {len(share) for share in shares} == {max(1, kv_heads // num_ranks)}
    held = list(itertools.chain.from_iterable(shares))
    assert held == sorted(held)
    assert all(held.count(head) == max(1, num_ranks // kv_heads) for head in range(kv_heads))
    written = [head for rank, share in enumerate(shares) if is_writer(kv_heads, num_ranks, rank) for head in share]
    assert written == list(range(kv_heads))


@given(splits(), splits())
def test_ranks_of_two_nodes_meet_at_whole_blocks(first: tuple[int, int], second: tuple[int, int]) -> None:
    """Heads that one node's ranks put into blocks are those that another's, of any number, take out."""
    kv_heads, theirs = first
    _, ours = second
    if not (kv_heads % ours == 0 or ours % kv_heads == 0):
        ours = kv_heads
    rows = torch.arange(3 * kv_heads * 2).view(3, kv_heads, 2)
    block = joined(
        [rows[:, heads_of(kv_heads, theirs, r).start : heads_of(kv_heads, theirs, r).stop] for r in range(theirs)],
        kv_heads,
    )
    assert torch.equal(block, rows)
    again = joined(
        [block[:, heads_of(kv_heads, ours, r).start : heads_of(kv_heads, ours, r).stop] for r in range(ours)], kv_heads
    )
    assert torch.equal(again, rows)


@pytest.mark.parametrize(("kv_heads", "num_ranks", "rank"), [(3, 2, 0), (4, 6, 1), (4, 2, 2), (4, 2, -1)])
def test_what_no_split_is(kv_heads: int, num_ranks: int, rank: int) -> None:
    with pytest.raises(AssertionError):
        heads_of(kv_heads, num_ranks, rank)


def test_as_vllm_splits_them() -> None:
    """vllm/model_executor/layers/linear.py, QKVParallelLinear: shard ``rank // replicas`` of the KV heads."""
    for kv_heads, num_ranks in [(8, 1), (8, 2), (8, 8), (8, 16), (2, 4), (1, 4)]:
        replicas = max(1, num_ranks // kv_heads)
        size = max(1, kv_heads // num_ranks)
        for rank in range(num_ranks):
            shard = rank // replicas
            assert heads_of(kv_heads, num_ranks, rank) == range(shard * size, (shard + 1) * size)


# --- reports ---------------------------------------------------------------------------------------------------------------


def merged(by_rank: Sequence[Sequence[Report]], num_ranks: int) -> list[Report]:
    """Of ranks that all say what they have to say in one step."""
    return RankReports(num_ranks).add(by_rank)


def unit(chunk: int, layer: int = 0) -> Unit:
    return Unit(chunk, layer, 0, 8, UnitMode.FULL, layer == 0, recompute=True)


def ran(chunk: int, seconds: float = 1.0, key: str = "a") -> UnitRan:
    return UnitRan(key, unit(chunk), range(8), seconds)


def test_one_ranks_reports_are_its_own() -> None:
    reports: list[Report] = [ran(0), StatesKept("a", 1, 0, 8), ran(1), Stored(3), SliceTook(0.5)]
    assert merged([reports], 1) == reports


def test_a_unit_is_done_when_all_ranks_say_so_and_takes_as_long_as_the_slowest() -> None:
    first: list[Report] = [StatesKept("a", 1, 0, 8), ran(0, 0.1), ran(1, 0.3), SliceTook(0.4)]
    second: list[Report] = [ran(0, 0.2), SliceTook(0.6)]
    assert merged([first, second], 2) == [StatesKept("a", 1, 0, 8), ran(0, 0.2), SliceTook(0.6)]
    assert merged([first], 2) == [StatesKept("a", 1, 0, 8)], "a rank that said nothing"


def test_units_of_other_requests_are_others() -> None:
    assert merged([[ran(0, key="a"), ran(0, key="b")], [ran(0, key="b")]], 2) == [ran(0, key="b")]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_load_that_fails_on_one_rank_has_failed_before_anything_of_it_counts(rank: int) -> None:
    by_rank: list[list[Report]] = [[ran(0), ran(1)] for _ in range(3)]
    by_rank[rank].insert(1, LoadFailed("a", "no such arena"))
    assert merged(by_rank, 3)[0] == LoadFailed("a", "no such arena")
    assert merged(by_rank, 3).count(LoadFailed("a", "no such arena")) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_stores_are_done_when_all_ranks_are(rank: int) -> None:
    by_rank: list[Sequence[Report]] = [[Stored(1), Stored(2)], [Stored(1), Stored(2)]]
    assert merged(by_rank, 2) == [Stored(1), Stored(2)]
    by_rank[rank] = [Stored(1, "gone"), Stored(2)]
    assert merged(by_rank, 2) == [Stored(1, "gone"), Stored(2)]
    by_rank[rank] = [Stored(2)]
    assert merged(by_rank, 2) == [Stored(2)]


@given(st.permutations(range(4)), st.integers(1, 4))
def test_the_order_of_ranks_does_not_matter(order: Sequence[int], num_ranks: int) -> None:
    by_rank = [[ran(0, rank), Stored(1, "x" if rank == 2 else ""), SliceTook(rank)] for rank in range(num_ranks)]
    shuffled = [by_rank[rank] for rank in order if rank < num_ranks]
    assert merged(shuffled, num_ranks) == merged(by_rank, num_ranks)


def test_reports_travel() -> None:
    reports = [ran(0), StatesKept("a", 1, 0, 8), LoadFailed("a", "why"), Stored(1, "why"), SliceTook(0.5)]
    assert pickle.loads(pickle.dumps(reports)) == reports
