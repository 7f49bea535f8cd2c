"""With the backend ucx, KV goes through memory and not through sockets: counted by NIXL's completions and by the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_harness import BASE, BLOCK, FULL, UPPER, LiveCluster, live_cluster, prompt
from socket_bytes import bytes_received

from kvkin.transport.messages import Finished, StatusReply

# each test has a cluster of its own
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_TOKENS = 1200


def pulled(status: StatusReply) -> int:
    """What the data planes of all nodes have counted from their backend's own completions."""
    return sum(node.load.pulled_bytes for node in status.nodes)


def pull_much(cluster: LiveCluster, num_contexts: int) -> tuple[int, int]:
    """Let three models pull contexts. Returns what the reports say, and what sockets of the workers received meanwhile.

    Every byte that crosses a socket between workers is received by one of them; what the router sends them counts, too.
    """
    contexts = [prompt(70 + number, NUM_TOKENS) for number in range(num_contexts)]
    for ids in contexts:
        cluster.order(ids)
        cluster.settled()
    workers = [node.pid for node in cluster.processes.nodes.values() if node.role != "router" and node.pid]
    before, sockets = pulled(cluster.settled()), bytes_received(workers)
    answers: list[Finished] = []
    for ids in contexts:
        for model, reuse in ((UPPER, "exact"), (FULL, "any"), (BASE, "exact")):
            answers += [cluster.ask(model, ids, 1, reuse=reuse, publish=False) for _ in range(2)]
    assert [answer.report.fallback for answer in answers] == [""] * len(answers)
    reported = sum(answer.report.bytes_pulled for answer in answers)
    # half the KV; five layers of eight and E; all of it: each context twice
    layer_bytes = NUM_TOKENS // BLOCK * 4096
    assert reported > num_contexts * 2 * (4 + 5 + 8) * layer_bytes
    status = cluster.until(lambda status: pulled(status) - before >= reported, "heartbeats")
    assert pulled(status) - before == reported
    return reported, sum(count - sockets.get(inode, 0) for inode, count in bytes_received(workers).items())


def test_ucx_completions_are_what_the_reports_say_and_sockets_carry_next_to_nothing(cluster: LiveCluster) -> None:
    reported, through_sockets = pull_much(cluster, 4)
    assert through_sockets < 0.01 * reported, f"{through_sockets} of {reported}"


def test_the_same_count_sees_every_byte_of_the_backend_that_uses_sockets(tmp_path: Path) -> None:
    with live_cluster(tmp_path, "tcp") as cluster:
        reported, through_sockets = pull_much(cluster, 2)
    assert reported < through_sockets < 1.05 * reported
