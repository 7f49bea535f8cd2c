"""The data plane's contract on every backend when the source is killed, frozen or replaced, at every state of a pull.

On one host UCX reads the source's memory through the kernel, so a frozen source hurts little. ``ucx-tcp`` is the same backend
on a link where UCX has to emulate READ: there a frozen source stops the bytes, and a READ that was given up goes on
writing when it thaws, which is what quarantine is for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from check_transport import FAILURE_CHECKS, Check, check_close_while_frozen, check_freeze_before_connect
from transport_pairs import VARIANTS, InprocPair, Pair, ProcessPair, Source, held, prepare

from kvkin.transport.backends import open_transport

LEAVE_IN_THE_MIDDLE = (check_close_while_frozen, check_freeze_before_connect)


@pytest.fixture(scope="module")
def sources() -> Iterator[dict[str, Source]]:
    """Sources that survived the last check, by variant."""
    kept: dict[str, Source] = {}
    yield kept
    for source in kept.values():
        source.end()


@pytest.fixture
async def pair(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, sources: dict[str, Source]
) -> AsyncIterator[Pair]:
    backend = prepare(request.param, monkeypatch)
    if backend == "inproc":
        before = held()
        inproc = InprocPair()
        yield inproc
        await inproc.close()
    else:
        source = sources.pop(request.param, None) or Source(backend)
        before = held()
        made = ProcessPair(source, open_transport(backend))
        yield made
        await made.close()
        # where UCX emulates READ, a consumer that goes away in the middle can abort the source a moment later
        doubtful = request.param == "ucx-tcp" and request.node.callspec.params["check"] in LEAVE_IN_THE_MIDDLE
        if made.source.alive and not doubtful:
            sources[request.param] = made.source
        elif made.source.process.returncode is None:
            made.source.kill()
    assert not before.grew_to(held()), f"{before} -> {held()}"


@pytest.mark.parametrize("check", FAILURE_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("pair", VARIANTS, indirect=True)
async def test_failures(pair: Pair, check: Check) -> None:
    await check(pair)
