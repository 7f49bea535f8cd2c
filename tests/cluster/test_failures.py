"""Processes of a running cluster are killed, frozen and restarted: only what ran on them is affected, and nothing stays behind."""

from __future__ import annotations

import contextlib
import threading

import pytest
from cluster_harness import (
    BASE,
    BLOCK,
    FULL,
    ON_BASE,
    ON_FULL,
    PREFILL,
    ROUTER,
    SPARE,
    UPPER,
    LiveCluster,
    bystander,
    greedy,
    prompt,
)

from kvkin.kv.errors import KvkinError, NodeUnavailable
from kvkin.transport.client import SyncStream

# every test starts processes anew, each of which takes seconds
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.usefixtures("unharmed")]


def first_token(stream: SyncStream) -> int:
    return next(iter(stream)).token_ids[0]


def error_of(stream: SyncStream) -> KvkinError:
    with pytest.raises(KvkinError) as caught:
        stream.finish()
    return caught.value


def test_prefill_node_killed_while_a_live_order_is_pulled(cluster: LiveCluster) -> None:
    """The consumers compute privately, in bounded time; the replacement under the same name works at once."""
    incarnation = cluster.node(PREFILL).incarnation
    with bystander(cluster, BASE, prompt(51, 60)):
        with cluster.halfway(50) as (ids, (stream,)):
            cluster.kill(PREFILL)
            answer = stream.finish()
        assert answer.report.fallback
        assert (answer.report.planned, answer.report.kind) == ("shared-prefix", "private")
        assert answer.token_ids == cluster.expected(UPPER, ids)
        cluster.restart(PREFILL)
    assert cluster.node(PREFILL).incarnation != incarnation
    assert cluster.settled().counters["fallbacks"] >= 1
    other = prompt(52, 320)
    cluster.order(other)
    cluster.settled()
    again = cluster.ask(UPPER, other, reuse="exact", publish=False)
    assert (again.report.fallback, again.report.sources) == ("", (PREFILL,))
    assert again.token_ids == cluster.expected(UPPER, other)


def test_sender_that_holds_another_agents_context_is_killed(cluster: LiveCluster) -> None:
    """Frozen first, so that the pull that was planned from it has certainly begun when it dies."""
    ids = prompt(53, 600)
    cluster.ask(BASE, ids, reuse="off")  # and so without help of the prefill node
    expected = cluster.expected(FULL, ids)
    with bystander(cluster, UPPER, prompt(54, 60)), contextlib.ExitStack() as stack:
        planned = cluster.client.status().counters.get("plan_partial", 0)
        cluster.freeze(ON_BASE)
        stream = stack.enter_context(cluster.client.stream(FULL, token_ids=ids, reuse="any", sampling=greedy(4)))
        cluster.until(lambda status: status.counters.get("plan_partial", 0) > planned, "plan")
        cluster.kill(ON_BASE)
        answer = stream.finish()
        assert answer.report.fallback
        assert (answer.report.planned, answer.report.kind) == ("partial", "private")
        assert answer.token_ids == expected
        cluster.restart(ON_BASE)
    # what the dead process held is gone from the index; the new one computes, and is pulled from again
    other = prompt(55, 600)
    first = cluster.ask(BASE, ids, reuse="exact")
    assert ON_BASE not in first.report.sources
    cluster.ask(BASE, other, reuse="off")  # and so without help of the prefill node
    again = cluster.ask(FULL, other, reuse="any", publish=False)
    assert (again.report.fallback, again.report.sources) == ("", (ON_BASE,))


def test_killed_decode_node_costs_only_its_own_requests(cluster: LiveCluster) -> None:
    """What was streamed already fails and may be retried; what nobody has seen anything of runs again elsewhere."""
    ids, unseen = prompt(56, 80), prompt(57, 80)
    expected = cluster.expected(FULL, unseen, 300)
    retries = cluster.client.status().counters.get("retries", 0)
    with (
        bystander(cluster, BASE, prompt(51, 60)),
        cluster.client.stream(FULL, token_ids=ids, sampling=greedy(1900)) as streamed,
    ):
        first_token(streamed)
        status = cluster.until(lambda s: cluster.load(ON_FULL, s).running + cluster.load(SPARE, s).running == 1, "load")
        victim = ON_FULL if cluster.load(ON_FULL, status).running else SPARE
        with contextlib.ExitStack() as stack:
            how = {"stream": False, "sampling": greedy(300), "reuse": "off"}
            quiet = []
            while cluster.load(victim).running < 2:
                assert len(quiet) < 20
                quiet.append(stack.enter_context(cluster.client.stream(FULL, token_ids=unseen, **how)))
                running = len(quiet) + 1
                cluster.until(
                    lambda s, all_=running: (
                        sum(_busy(cluster, name, s) for name in (ON_FULL, SPARE)) == all_
                        or _busy(cluster, victim, s) >= 2
                    ),
                    "requests on nodes",
                )
            cluster.kill(victim)
            error = error_of(streamed)
            assert isinstance(error, NodeUnavailable)
            assert error.retryable
            assert victim in str(error)
            for each in quiet:
                answer = each.finish()
                assert answer.token_ids == expected
                assert answer.node != victim
        assert cluster.client.status().counters["retries"] > retries
        cluster.restart(victim)


def _busy(cluster: LiveCluster, name: str, status: object) -> int:
    load = cluster.load(name, status)  # type: ignore[arg-type]
    return load.running + load.waiting


def test_router_killed_and_restarted(cluster: LiveCluster) -> None:
    """In-flight clients get an answer, nodes come back with what they hold, what nobody listens to is stopped."""
    ids = prompt(58, 600)
    cluster.ask(BASE, ids, reuse="off")  # and so without help of the prefill node
    before = {node.name: (node.incarnation, node.holdings) for node in cluster.settled().nodes}
    with (
        cluster.new_client() as other,
        cluster.client.stream(FULL, token_ids=prompt(59, 80), sampling=greedy(1900)) as streamed,
        other.stream(BASE, token_ids=prompt(60), reuse="off", stream=False, sampling=greedy(400)) as quiet,
    ):
        first_token(streamed)
        cluster.until(lambda status: cluster.load(ON_BASE, status).running == 1, "running request")
        cluster.kill(ROUTER)
        cluster.restart(ROUTER)
        for stream in (streamed, quiet):
            error = error_of(stream)
            assert isinstance(error, NodeUnavailable)
            assert error.retryable
    cluster.settled()
    # a node's snapshot follows its registration
    cluster.until(
        lambda status: all(node.holdings >= before[node.name][1] for node in status.nodes), "what nodes held before"
    )
    status = cluster.client.status()
    assert {node.name: node.incarnation for node in status.nodes} == {name: one[0] for name, one in before.items()}
    assert before[ON_BASE][1] > 0
    hit = cluster.ask(BASE, (*ids, 7, 8, 9), reuse="exact", publish=False)
    assert hit.report.tokens_reused == len(ids) // BLOCK * BLOCK
    assert hit.token_ids == cluster.expected(BASE, (*ids, 7, 8, 9))


def test_two_nodes_frozen_at_once(cluster: LiveCluster) -> None:
    """Others answer as ever; what ran on the frozen ones fails in bounded time; thawed, they are members again."""
    with bystander(cluster, FULL, prompt(62, 60)):
        on_frozen = cluster.client.stream(BASE, token_ids=prompt(63, 80), sampling=greedy(1900))
        with cluster.halfway(61) as (ids, (consumer,)), on_frozen:
            first_token(on_frozen)
            cluster.freeze(ON_BASE)
            answer = consumer.finish()
            assert answer.report.fallback
            error = error_of(on_frozen)
            assert isinstance(error, NodeUnavailable)
            assert ON_BASE in str(error)
        assert answer.token_ids == cluster.expected(UPPER, ids)
        with pytest.raises(NodeUnavailable):
            cluster.ask(BASE, prompt(64, 80))
        status = cluster.client.status()
        assert {node.name for node in status.nodes if node.state == "dead"} == {PREFILL, ON_BASE}
        cluster.thaw()
        cluster.until(cluster.all_alive, "thawed nodes")
    cluster.settled()
    assert cluster.ask(BASE, prompt(64, 80)).usage.completion_tokens == 4


def test_a_router_that_is_frozen_for_longer_than_a_silence_is_allowed_loses_nobody(cluster: LiveCluster) -> None:
    """Whatever fell silent by its clock only is no reason to end anything: the nodes computed on, the client waited."""
    ids = prompt(69, 80)
    expected = cluster.expected(FULL, ids, 300)
    lost = cluster.client.status().counters.get("nodes_lost", 0)
    with cluster.client.stream(FULL, token_ids=ids, sampling=greedy(300), reuse="off", publish=False) as stream:
        first = first_token(stream)
        cluster.freeze(ROUTER)
        # time itself is what the test is about
        threading.Event().wait(cluster.config.timeouts.node_dead_s + 1)
        cluster.thaw()
        answer = stream.finish()
    assert (first, answer.token_ids) == (expected[0], expected)
    assert cluster.client.status().counters.get("nodes_lost", 0) == lost


def test_consumer_killed_while_it_pulls_leaves_no_lease(cluster: LiveCluster) -> None:
    with bystander(cluster, BASE, prompt(51, 60)):
        with cluster.halfway(65) as (ids, (stream,)):
            cluster.kill(SPARE)
            cluster.thaw()
            assert error_of(stream).retryable
        cluster.until(lambda status: not cluster.load(PREFILL, status).leases, "end of the lease")
        cluster.restart(SPARE)
    cluster.settled()
    # the order went on: its context is there for the replacement
    answer = cluster.ask(UPPER, ids, reuse="exact", publish=False)
    assert (answer.report.fallback, answer.report.sources) == ("", (PREFILL,))
    assert answer.token_ids == cluster.expected(UPPER, ids)
