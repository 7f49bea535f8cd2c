"""The generator against a real router with mock nodes: whatever happens to a request, it is accounted for exactly once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from mock_node import MockNode, choose_privately, make_settings, no_leaks, until

from kvkin.router.node import RouterNode
from kvkin.router.settings import Limits, RouterSettings, Timeouts
from kvkin.tools.load_records import Outcome, RequestRecord
from kvkin.tools.load_requests import EarlierAnswer, Load, LoadRequest
from kvkin.tools.load_runner import Asking, LoadLimits, LoadRun, flag_warm_up
from kvkin.transport.client import AsyncClient
from kvkin.transport.messages import Reuse
from kvkin.transport.node_messages import Abort, Execute

# Longer than any of these tests may take: a limit that is reached is a failure.
LONG_S = 60.0
ANSWER = (10, 11, 2)
ASKING = Asking(Reuse.BOUNDED)


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    with no_leaks():
        yield


@pytest.fixture
def settings(tmp_path: Path) -> RouterSettings:
    timeouts = Timeouts(tick_s=0.02, node_wait_s=0.1, node_dead_s=0.5)
    return make_settings(tmp_path, timeouts=timeouts, limits=Limits(max_new_tokens=64, max_request_bytes=1 << 16))


@pytest.fixture
async def router(nothing_leaks: None, settings: RouterSettings) -> AsyncIterator[RouterNode]:
    async with RouterNode(settings, choose=choose_privately) as node:
        yield node


@pytest.fixture
async def client(router: RouterNode) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(router.client_address) as client:
        yield client


def request(number: int, **fields: Any) -> LoadRequest:
    values: dict[str, Any] = {"session": number, "turn": 0, "model": "base", "at_s": 0.0, "output_tokens": 3}
    return LoadRequest(number=number, **{**values, "token_ids": (20 + number,) * 8, **fields})


def load_of(*requests: LoadRequest, horizon_s: float = LONG_S) -> Load:
    return Load(requests, horizon_s)


def run_of(client: AsyncClient, load: Load, asking: Asking = ASKING, **limits: Any) -> LoadRun:
    return LoadRun(client, load, asking, LoadLimits(**{"timeout_s": LONG_S, "drain_s": LONG_S, **limits}))


def check_accounts(load: Load, records: list[RequestRecord]) -> Counter[Outcome]:
    """One record for each request, with the times that its outcome means, in order."""
    assert [record.number for record in records] == [one.number for one in load.requests]
    for record, asked in zip(records, load.requests, strict=True):
        assert (record.session, record.turn, record.model) == (asked.session, asked.turn, asked.model)
        assert record.prompt_tokens == len(asked.token_ids)
        never = record.outcome in (Outcome.NOT_SENT, Outcome.ABANDONED, Outcome.NEVER_DUE)
        assert (record.sent_s is None) == (record.ended_s is None) == never
        assert (record.code != "") == (record.outcome is Outcome.FAILED)
        times = [
            one for one in (record.intended_s, record.sent_s, record.first_token_s, record.ended_s) if one is not None
        ]
        assert times == sorted(times)
        assert len(record.gaps_s) == max(0, record.tokens - 1)
        assert (record.e2e_ms is None) == (record.outcome is not Outcome.FINISHED)
    return Counter(record.outcome for record in records)


async def test_all_finish(router: RouterNode, client: AsyncClient) -> None:
    load = load_of(*(request(number, at_s=0.01 * number) for number in range(6)))
    async with MockNode(router.node_address, "d0") as node:
        run = run_of(client, load, Asking(Reuse.EXACT, publish=False, share_hint=3.0, ttft_slo_s=2.5))
        records = await run.run()
        executed = await node.expect(Execute)
    assert check_accounts(load, records) == {Outcome.FINISHED: 6}
    for record in records:
        assert (record.kind, record.quality, record.node, record.tokens) == ("private", "exact", "d0", 3)
        assert record.loss == 0.0
        assert record.phases_ms["suffix"] == 2.0
        # tokens that come in one message have no time between them
        assert record.gaps_s[1] == 0.0
    assert executed.sampling.ignore_eos
    assert executed.sampling.max_tokens == 3
    assert not executed.publish
    assert (run.in_flight, run.done, run.total) == (0, 6, 6)


async def test_requests_do_not_wait_for_each_other(router: RouterNode, client: AsyncClient) -> None:
    """Open loop: with a node that answers nothing all are sent nevertheless."""
    load = load_of(*(request(number, at_s=0.01 * number) for number in range(5)))
    async with MockNode(router.node_address, "d0", mode="hold") as node:
        run = run_of(client, load)
        running = asyncio.create_task(run.run())
        await until(lambda: node.count(Execute) == 5)
        assert run.in_flight == 5
        for execute in node.executed.values():
            node.generate(execute, 0, ANSWER, "abc")
            node.finish(execute, "abc")
        assert check_accounts(load, await running) == {Outcome.FINISHED: 5}


async def test_failures_are_told_apart(router: RouterNode, client: AsyncClient) -> None:
    load = load_of(
        request(0, model="nobody"),
        request(1),
        request(2, output_tokens=65),
        request(3, model="tuned"),
    )
    async with MockNode(router.node_address, "d0"):
        records = await run_of(client, load).run()
    assert check_accounts(load, records) == {Outcome.FINISHED: 1, Outcome.FAILED: 3}
    assert [record.code for record in records] == ["unknown_model", "", "invalid_request", "node_unavailable"]
    assert "nobody" in records[0].message


async def test_a_deadline_of_the_router_is_a_failure(router: RouterNode, client: AsyncClient) -> None:
    load = load_of(request(0), request(1))
    async with MockNode(router.node_address, "d0", mode="stream"):
        records = await run_of(client, load, Asking(Reuse.OFF, deadline_s=0.2)).run()
    assert check_accounts(load, records) == {Outcome.FAILED: 2}
    # on a busy machine the first token may not have come either
    assert all((record.code, record.e2e_ms) == ("deadline", None) and record.tokens <= 1 for record in records)


async def test_a_node_killed_in_the_middle(router: RouterNode, client: AsyncClient) -> None:
    load = load_of(*(request(number) for number in range(3)), request(3, session=0, turn=1, after=0))
    async with MockNode(router.node_address, "d0", mode="stream") as node:
        running = asyncio.create_task(run_of(client, load).run())
        await until(lambda: node.count(Execute) == 3)
        await node.kill()
        records = await running
    assert check_accounts(load, records) == {Outcome.FAILED: 3, Outcome.ABANDONED: 1}
    assert {record.code for record in records[:3]} == {"node_unavailable"}


async def test_too_many_in_flight_are_not_sent(router: RouterNode, client: AsyncClient) -> None:
    load = load_of(
        *(request(number, at_s=0.01 * number) for number in range(5)), request(5, session=4, turn=1, after=4, at_s=0.04)
    )
    async with MockNode(router.node_address, "d0", mode="hold") as node:
        run = run_of(client, load, max_in_flight=2)
        running = asyncio.create_task(run.run())
        await until(lambda: node.count(Execute) == 2 and run.done == 4)
        for execute in list(node.executed.values()):
            node.generate(execute, 0, ANSWER, "abc")
            node.finish(execute, "abc")
        records = await running
        assert node.count(Execute) == 2
    assert check_accounts(load, records) == {Outcome.FINISHED: 2, Outcome.NOT_SENT: 3, Outcome.ABANDONED: 1}


async def test_timeouts_are_cancelled_at_the_router(router: RouterNode, client: AsyncClient) -> None:
    load = load_of(request(0), request(1))
    async with MockNode(router.node_address, "d0", mode="stream") as node:
        records = await run_of(client, load, timeout_s=1.0).run()
        await until(lambda: node.count(Abort) == 2)
    assert check_accounts(load, records) == {Outcome.TIMED_OUT: 2}


async def test_the_end_of_a_point_cuts_off(router: RouterNode, client: AsyncClient) -> None:
    """What runs is cancelled, what was not due yet is never sent, what finished stays finished."""
    load = load_of(
        request(0),
        request(1, model="tuned"),
        request(2, session=1, turn=1, after=1),
        request(3, at_s=LONG_S),
        horizon_s=0.2,
    )
    async with (
        MockNode(router.node_address, "d0"),
        MockNode(router.node_address, "d1", models=("tuned",), mode="stream") as stuck,
    ):
        run = run_of(client, load, drain_s=2.0)
        records = await run.run()
        await until(lambda: stuck.count(Abort) == 1)
    assert check_accounts(load, records) == {Outcome.FINISHED: 1, Outcome.CUT_OFF: 1, Outcome.NEVER_DUE: 2}
    assert run.in_flight == 0


async def test_cancelling_a_run_cancels_its_requests(router: RouterNode, client: AsyncClient) -> None:
    load = load_of(*(request(number) for number in range(3)), request(3, at_s=LONG_S))
    async with MockNode(router.node_address, "d0", mode="stream") as node:
        running = asyncio.create_task(run_of(client, load).run())
        await until(lambda: node.count(Execute) == 3)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: node.count(Abort) == 3)
        status = await client.status()
        assert status.running == 0


async def test_a_turn_waits_for_its_answer_and_contains_it(router: RouterNode, client: AsyncClient) -> None:
    first = request(0, token_ids=(30,) * 8)
    second = request(
        1, session=0, turn=1, token_ids=(*(30,) * 8, 99, 99, 99, 40, 41), after=0, answers=(EarlierAnswer(0, 8, 3),)
    )
    async with MockNode(router.node_address, "d0", mode="hold") as node:
        running = asyncio.create_task(run_of(client, load_of(first, second)).run())
        execute = await node.expect(Execute)
        other = await client.status()
        assert (other.running, node.count(Execute)) == (1, 1)
        node.generate(execute, 0, ANSWER, "abc")
        node.finish(execute, "abc")
        later = await node.expect(Execute, lambda message: message.request_id != execute.request_id)
        assert later.token_ids == (*(30,) * 8, *ANSWER, 40, 41)
        node.generate(later, 0, ANSWER, "abc")
        node.finish(later, "abc")
        records = await running
    assert check_accounts(load_of(first, second), records) == {Outcome.FINISHED: 2}
    assert records[1].intended_s == records[0].ended_s


async def test_think_time_counts_from_the_answer(router: RouterNode, client: AsyncClient) -> None:
    load = load_of(request(0), request(1, session=0, turn=1, after=0), request(2, session=0, turn=2, after=1, at_s=0.5))
    async with MockNode(router.node_address, "d0"):
        records = await run_of(client, load, think_s=0.05).run()
    assert check_accounts(load, records) == {Outcome.FINISHED: 3}
    first, second, third = records
    assert first.ended_s is not None
    assert second.ended_s is not None
    assert second.intended_s == first.ended_s + 0.05
    # never before its own time
    assert third.intended_s == max(0.5, second.ended_s + 0.05)


async def test_latency_and_lateness_count_from_the_intended_time(router: RouterNode, client: AsyncClient) -> None:
    """A generator that was held up for seconds must not report fast answers."""
    load = load_of(request(0, at_s=1.0))
    async with MockNode(router.node_address, "d0"):
        # what the clock says from the first look on: three seconds later than planned
        loop, looks = asyncio.get_running_loop(), 0

        def clock() -> float:
            nonlocal looks
            looks += 1
            return loop.time() + (3.0 if looks > 1 else 0.0)

        run = LoadRun(client, load, ASKING, LoadLimits(timeout_s=LONG_S, drain_s=LONG_S), clock)
        (record,) = await run.run()
    assert record.intended_s == 1.0
    assert record.sent_s is not None
    assert record.late_s == record.sent_s - 1.0 >= 1.9
    assert record.ttft_ms is not None
    assert record.ttft_ms >= 1900


async def test_nothing_to_send(client: AsyncClient) -> None:
    assert await run_of(client, load_of()).run() == []


async def test_a_router_that_is_gone_fails_everything(tmp_path: Path, settings: RouterSettings) -> None:
    async with RouterNode(settings, choose=choose_privately) as node:
        address = node.client_address
    async with AsyncClient(address, ping_s=0.05, silence_s=0.2) as client:
        load = load_of(request(0), request(1, session=0, turn=1, after=0))
        records = await run_of(client, load).run()
    assert check_accounts(load, records) == {Outcome.FAILED: 1, Outcome.ABANDONED: 1}
    assert records[0].code == "node_unavailable"


async def test_a_fault_of_the_generator_is_raised(client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(client, load_of(request(0), request(1, at_s=LONG_S)))

    def broken(*arguments: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(run, "_stream", broken)
    with pytest.raises(ZeroDivisionError):
        await run.run()


def test_warm_up_follows_from_the_plan() -> None:
    load = load_of(
        request(0, at_s=0.0),
        request(1, at_s=5.0),
        request(2, at_s=1.0, session=0, turn=1),
        request(3, at_s=2.0),
    )
    records = [
        RequestRecord(number, 0, 0, "base", 8, 3, Outcome.FINISHED, intended_s=100.0 - number) for number in range(4)
    ]

    def warm(requests: int, seconds: float) -> list[int]:
        return [record.number for record in flag_warm_up(load, records, requests, seconds) if record.warm_up]

    assert warm(0, 0.0) == []
    assert warm(2, 0.0) == [0, 2]
    assert warm(0, 2.0) == [0, 2]
    assert warm(3, 0.5) == [0, 2, 3]
    assert warm(9, 0.0) == [0, 1, 2, 3]
