"""The data plane's contract on every backend, with a healthy source in a process of its own."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from check_transport import CHECKS, LONG_S, Check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transport_pairs import VARIANTS, InprocPair, Pair, ProcessPair, Source, held, prepare

from kvkin.transport.backends import open_transport
from kvkin.transport.data_plane import Copy, Peer

SPAN = 1 << 16
"""Random copies lie in the first bytes: collisions and neighbours become likely."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=VARIANTS)
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """One healthy source for all checks that leave it so."""
    before = held()
    with pytest.MonkeyPatch.context() as patch:
        backend = prepare(request.param, patch)
        source = Source(backend) if backend != "inproc" else None
        made = ProcessPair(source, open_transport(backend)) if source is not None else InprocPair()
        yield made
        await made.close()
        if source is not None:
            assert source.end() == ""
    assert not before.grew_to(held()), f"{before} -> {held()}"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(shared: Pair, check: Check) -> None:
    await check(shared)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def peer(shared: Pair) -> AsyncIterator[Peer]:
    peer = await shared.consumer.connect(shared.address, shared.local_region, deadline_s=LONG_S)
    yield peer
    await peer.close()


@st.composite
def copy_lists(draw: st.DrawFn) -> list[Copy]:
    """Copies with disjoint destinations, so that their order does not matter."""
    ends = sorted(draw(st.sets(st.integers(0, SPAN), min_size=2, max_size=24)))
    copies = []
    for start, end in itertools.pairwise(ends):
        size = draw(st.integers(0, end - start))
        remote = draw(st.one_of(st.just(start), st.integers(0, SPAN - size)))
        copies.append(Copy(remote, start, size))
    return draw(st.permutations(copies))


@pytest.mark.asyncio(loop_scope="module")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(copies=copy_lists())
async def test_random_copies(shared: Pair, peer: Peer, copies: list[Copy]) -> None:
    shared.local[:SPAN] = 0
    expected = shared.local[:SPAN].copy()
    for copy in copies:
        source = shared.content[copy.remote_offset : copy.remote_offset + copy.num_bytes]
        expected[copy.local_offset : copy.local_offset + copy.num_bytes] = source
    await peer.pull(copies, deadline_s=LONG_S).wait()
    assert np.array_equal(shared.local[:SPAN], expected)
