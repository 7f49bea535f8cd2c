"""One cluster a module: its processes take seconds to start, so every test leaves it as healthy as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from cluster_harness import BASE, FULL, UPPER, LiveCluster, Used, live_cluster, prompt


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Warmed up: every process has done once what the tests do, so that what it holds afterwards is its level.

    A module chooses its data plane by ``BACKEND``.
    """
    backend = getattr(request.module, "BACKEND", "ucx")
    with live_cluster(tmp_path_factory.mktemp("cluster"), backend) as cluster:
        warm = prompt(1, 200)
        cluster.ask(BASE, warm)
        for model in (FULL, UPPER, FULL):
            cluster.ask(model, warm, reuse="any")
        cluster.order(prompt(2, 320))
        cluster.settled()
        cluster.ask(UPPER, prompt(2, 320), reuse="exact")
        with contextlib.ExitStack() as stack:  # all workers of the router
            streams = [stack.enter_context(cluster.client.stream(BASE, prompt="warm", max_tokens=2)) for _ in range(8)]
            for stream in streams:
                stream.finish()
        cluster.settled()
        yield cluster


@pytest.fixture
def unharmed(cluster: LiveCluster) -> Iterator[None]:
    """After each test: all nodes alive, nothing leased or held for nobody, no descriptor or thread more than before."""
    before: dict[str, Used] = cluster.used()
    yield
    cluster.thaw()
    cluster.restart(*cluster.dead())  # a test that failed must not take the next ones with it
    cluster.until(cluster.all_alive, "living nodes")
    cluster.settled()
    cluster.back_to(before)
