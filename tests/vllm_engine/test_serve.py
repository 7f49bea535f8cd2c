"""Plain ``vllm serve`` processes in a family: what others computed is pulled, what they compute is pulled by others, and nothing that
fails around them costs an answer."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import oracle
import pytest
from cluster_harness import greedy
from serve_harness import (
    BASE,
    BLOCK,
    GROUP,
    LAYERS,
    TUNE,
    Answer,
    FamilyCluster,
    Plain,
    Server,
    family_cluster,
    serving,
    tokens,
    transfer_config,
    write_cluster,
    write_family,
)

from kvkin.kv.plan import Holder, LayerGroup, LayerSource, PlanKind, ReusePlan, Segment
from kvkin.kv.provenance import exact_provenance

openai = pytest.importorskip("openai", reason="it comes with vLLM")

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CONTEXT = 384
assert CONTEXT % BLOCK == 0


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_family(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def plain(checkpoints: dict[str, Path]) -> Plain:
    return Plain(checkpoints)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path]) -> Iterator[FamilyCluster]:
    with family_cluster(write_cluster(tmp_path_factory.mktemp("cluster"), checkpoints)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def file(cluster: FamilyCluster) -> Path:
    return cluster.config.state_path.parent / "cluster.yaml"


@pytest.fixture(scope="module")
def servers(cluster: FamilyCluster, file: Path, checkpoints: dict[str, Path]) -> Iterator[dict[str, Server]]:
    """Both servers, in the family."""
    started = {
        name: Server(checkpoints[name], transfer_config(file, f"vllm-{name}"), file.parent / f"vllm-{name}.log")
        for name in (BASE, TUNE)
    }
    with contextlib.ExitStack() as stack:
        for server in started.values():
            stack.callback(server.stop)
        for server in started.values():
            stack.enter_context(serving(server))
        cluster.until(lambda status: all(cluster.attached(f"vllm-{name}", status) for name in started), "servers")
        yield started


@contextlib.contextmanager
def publishing(cluster: FamilyCluster, node: str) -> Iterator[int]:
    """What is done here has a node hold the context of one more prompt, which is waited for; how many blocks it held before."""
    before = holdings(cluster, node)
    yield before
    cluster.until(lambda status: cluster.node(node, status).holdings >= before + CONTEXT // BLOCK, node)


def two_prompts(seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """With one context."""
    context = tokens(seed, CONTEXT)
    return context + tokens(seed + 1, 6), context + tokens(seed + 2, 9)


def holdings(cluster: FamilyCluster, node: str) -> int:
    return cluster.node(node).holdings


def test_what_a_node_computed_is_pulled_by_the_server(
    cluster: FamilyCluster, servers: dict[str, Server], plain: Plain
) -> None:
    first, second = two_prompts(1)
    with publishing(cluster, "decode-base"):
        answer = cluster.client.generate(BASE, token_ids=first, sampling=greedy(6))
        assert list(answer.token_ids) == plain.answer(BASE, first)

    counters = cluster.client.status().counters
    served = servers[BASE].complete(second)
    assert served.token_ids == plain.answer(BASE, second)
    assert (served.said["plan"], served.said["tokens_reused"]) == ("exact", CONTEXT)
    assert "fallback" not in served.said
    after = cluster.until(
        lambda status: status.counters.get("attached_requests", 0) > counters.get("attached_requests", 0), "count"
    ).counters
    assert after["cached_tokens"] - counters.get("cached_tokens", 0) == CONTEXT
    load = cluster.load("vllm-base")
    layout = CONTEXT * LAYERS * 2 * 2 * 32 * 4  # keys and values of two heads of 32 floats
    cluster.until(lambda status: cluster.load("vllm-base", status).pulled_bytes >= load.pulled_bytes >= layout, "bytes")

    # the same again: vLLM's own cache has it by now, and nothing is pulled
    again = servers[BASE].complete(second)
    assert again.token_ids == served.token_ids
    assert again.said["tokens_reused"] <= BLOCK  # a block of ours may end behind the last whole one of vLLM's


def test_what_the_server_computed_is_pulled_by_a_node(
    cluster: FamilyCluster, servers: dict[str, Server], plain: Plain
) -> None:
    first, second = two_prompts(11)
    with publishing(cluster, "vllm-base"):
        served = servers[BASE].complete(first)
        assert served.token_ids == plain.answer(BASE, first)
        assert (served.said["plan"], served.said["tokens_reused"]) == ("private", 0)
    answer = cluster.client.generate(BASE, token_ids=second, sampling=greedy(6), reuse="exact")
    assert list(answer.token_ids) == plain.answer(BASE, second)
    assert answer.report.sources == ("vllm-base",)
    assert (answer.report.tokens_reused, answer.report.fallback) == (CONTEXT, "")


def partial_plan(cluster: FamilyCluster, num_tokens: int) -> ReusePlan:
    """What the router is to plan for a fine-tune that finds the base's context, with its group."""
    held = Holder("base", exact_provenance(b"base"))
    start, stop = GROUP
    sources = (LayerSource(LayerGroup(0, start), held), LayerSource(LayerGroup(stop, LAYERS), held))
    context = Segment(0, CONTEXT, sources, 0, start, held, LayerGroup(start, stop), PlanKind.PARTIAL)
    return ReusePlan((context, Segment(CONTEXT, num_tokens)))


def test_a_partial_plan_runs_on_the_fine_tunes_server_and_never_passes_for_its_own_kv(
    cluster: FamilyCluster, servers: dict[str, Server], plain: Plain
) -> None:
    first, second = two_prompts(21)
    with publishing(cluster, "vllm-base"):
        servers[BASE].complete(first)

    held = {"base": oracle.private(plain.models[BASE], first).head(CONTEXT)}
    state = oracle.execute(plain.models[TUNE], second, partial_plan(cluster, len(second)), held)
    _, expected, _ = oracle.generate(plain.models[TUNE], state, 6)
    private = plain.answer(TUNE, second)
    assert expected != private, "the test would not notice"

    with publishing(cluster, "vllm-tune"):
        reused = servers[TUNE].complete(second, wishes={"reuse": "any"})
        assert (reused.said["plan"], reused.said["tokens_reused"]) == ("partial", CONTEXT)
        assert reused.token_ids == expected

    # neither vLLM's own cache nor the router offers that KV to who wants exact KV
    for wishes in ({"reuse": "off"}, {"reuse": "exact"}):
        exact = servers[TUNE].complete(second, wishes=wishes)
        assert exact.token_ids == private, wishes
    # whoever allows it finds it again
    assert servers[TUNE].complete(second, wishes={"reuse": "any"}).token_ids in (expected, private)


def test_a_request_that_says_nonsense_shares_nothing(servers: dict[str, Server], plain: Plain) -> None:
    prompt = tokens(31, 100)
    for wishes in ({"reuse": "sometimes"}, {"nothing": 1}, {"max_loss": -1}):
        served = servers[BASE].complete(prompt, wishes=wishes)
        assert (served.token_ids, served.said) == (plain.answer(BASE, prompt), {})
    assert "reuse" in servers[BASE].text()


def test_a_salt_of_ones_own_shares_nothing(cluster: FamilyCluster, servers: dict[str, Server], plain: Plain) -> None:
    prompt = tokens(41, CONTEXT + 5)
    with publishing(cluster, "vllm-base") as before:
        served = servers[BASE].complete(prompt, body={"cache_salt": "mine"})
        assert (served.token_ids, served.said) == (plain.answer(BASE, prompt), {})
        follow = servers[BASE].complete(tokens(42, CONTEXT + 5))
    assert holdings(cluster, "vllm-base") == before + (CONTEXT + 5 + 5) // BLOCK, follow


def test_a_source_that_is_killed_in_the_middle_costs_a_private_prefill(
    cluster: FamilyCluster, servers: dict[str, Server], plain: Plain
) -> None:
    first, second = two_prompts(51)
    with publishing(cluster, "decode-base"):
        cluster.client.generate(BASE, token_ids=first, sampling=greedy(6))
    planned = cluster.planned("exact")
    cluster.freeze("decode-base")  # whatever is asked of it is on its way for certain
    answers: list[Answer] = []
    asking = threading.Thread(target=lambda: answers.append(servers[BASE].complete(second)))
    asking.start()
    try:
        cluster.until(lambda status: cluster.planned("exact", status) > planned, "plan")
        cluster.kill("decode-base")
    finally:
        asking.join(120)
    (served,) = answers
    assert served.token_ids == plain.answer(BASE, second)
    assert served.said["fallback"]
    assert (served.said["plan"], served.said["tokens_reused"]) == ("private", 0)
    cluster.restart("decode-base")
    cluster.until(lambda status: not cluster.load("vllm-base", status).quarantined_bytes, "end of the quarantine")
    # what vLLM computed instead is exact, and shared as such
    answer = cluster.client.generate(BASE, token_ids=second, sampling=greedy(6), reuse="exact")
    assert answer.report.sources == ("vllm-base",)
    assert list(answer.token_ids) == plain.answer(BASE, second)


def test_a_client_that_leaves_while_its_kv_is_on_the_way_leaves_nothing(
    cluster: FamilyCluster, servers: dict[str, Server], plain: Plain
) -> None:
    first, second = two_prompts(61)
    with publishing(cluster, "decode-base"):
        cluster.client.generate(BASE, token_ids=first, sampling=greedy(6))
    cluster.freeze("decode-base")
    with pytest.raises(openai.APITimeoutError):
        servers[BASE].complete(second, timeout_s=1.0)
    cluster.thaw()
    cluster.until(
        lambda status: (
            not any(
                getattr(cluster.load(node, status), what)
                for node in ("vllm-base", "decode-base")
                for what in ("running", "leases", "quarantined_bytes")
            )
        ),
        "end of it",
    )
    status = cluster.client.status()
    assert cluster.load("vllm-base", status).kv_slots_used == cluster.node("vllm-base", status).holdings
    assert servers[BASE].complete(second).token_ids == plain.answer(BASE, second)


def test_without_a_router_it_is_a_plain_server_and_it_comes_back(
    cluster: FamilyCluster, servers: dict[str, Server], plain: Plain
) -> None:
    context = tokens(71, CONTEXT)
    cluster.kill("router-0")
    prompt = context + tokens(72, 6)
    served = servers[BASE].complete(prompt)
    assert served.token_ids == plain.answer(BASE, prompt)
    assert served.said["plan"] == "private"
    cluster.restart("router-0")
    cluster.until(lambda status: cluster.attached("vllm-base", status), "server")
    cluster.until(lambda status: cluster.node("vllm-base", status).holdings > 0, "snapshot")
    other = tokens(73, CONTEXT) + tokens(74, 6)
    with publishing(cluster, "decode-base"):
        cluster.client.generate(BASE, token_ids=other, sampling=greedy(6), reuse="off")
    again = servers[BASE].complete(other[:CONTEXT] + tokens(75, 5))
    assert again.token_ids == plain.answer(BASE, other[:CONTEXT] + tokens(75, 5))
    assert again.said["tokens_reused"] == CONTEXT


@pytest.mark.parametrize(
    ("node", "model", "words"),
    [
        (
            "vllm-none",
            BASE,
            "kv_connector_extra_config.node: .* no node 'vllm-none' of role attached (allowed: vllm-base, vllm-tune)",
        ),
        ("vllm-tune", BASE, "nodes.vllm-tune.models[0]: tune has other weights than"),
    ],
)
def test_a_wrong_configuration_ends_the_server_with_one_line(
    file: Path, checkpoints: dict[str, Path], tmp_path: Path, node: str, model: str, words: str
) -> None:
    server = Server(checkpoints[model], transfer_config(file, node), tmp_path / "log")
    try:
        assert server.ended() != 0
    finally:
        server.stop()
    lines = [line for line in server.text().splitlines() if "kvkin: " in line]
    head, _, tail = words.partition(".* ")
    assert any(head in line and tail in line for line in lines), server.text()[-3000:]
