"""Plain ``vllm serve`` processes in a family: what others computed is pulled, what they compute is pulled by others, and nothing that
fails around them costs an answer."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_harness import greedy
from serve_checks import CONTEXT, holdings, in_part, publishing, two_prompts
from serve_harness import (
    BASE,
    BLOCK,
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

openai = pytest.importorskip("openai", reason="it comes with vLLM")

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


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


def test_a_partial_plan_runs_on_the_fine_tunes_server_and_never_passes_for_its_own_kv(
    cluster: FamilyCluster, servers: dict[str, Server], plain: Plain
) -> None:
    first, second = two_prompts(21)
    with publishing(cluster, "vllm-base"):
        servers[BASE].complete(first)

    expected, private = in_part(plain, TUNE, first, second), plain.answer(TUNE, second)

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
        assert (served.token_ids, served.said["plan"]) == (plain.answer(BASE, prompt), "private")
        assert next(iter(wishes)) in served.said["reason"]
    assert "reuse" in servers[BASE].text()


def test_a_salt_of_ones_own_shares_nothing(cluster: FamilyCluster, servers: dict[str, Server], plain: Plain) -> None:
    prompt = tokens(41, CONTEXT + 5)
    with publishing(cluster, "vllm-base") as before:
        served = servers[BASE].complete(prompt, body={"cache_salt": "mine"})
        assert (served.token_ids, served.said["plan"]) == (plain.answer(BASE, prompt), "private")
        assert "cache_salt" in served.said["reason"]
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
    ("node", "arguments", "words"),
    [
        (
            "vllm-none",
            (),
            "kv_connector_extra_config.node: {file} has no node 'vllm-none' of role attached (allowed: vllm-base, vllm-tune)",
        ),
        (
            "vllm-tune",
            (),
            "nodes.vllm-tune.models[0]: tune has other weights than {base}, which vllm serve runs (allowed: --model {tune}, or the names",
        ),
        ("vllm-base", ("--dtype", "bfloat16"), "families.tiny.compute_dtype: vllm serve computes in bfloat16"),
    ],
)
def test_a_wrong_configuration_ends_the_server_with_one_line(
    file: Path, checkpoints: dict[str, Path], tmp_path: Path, node: str, arguments: tuple[str, ...], words: str
) -> None:
    """Before it reads weights."""
    server = Server(checkpoints[BASE], transfer_config(file, node), tmp_path / "log", arguments)
    try:
        assert server.ended() != 0
    finally:
        server.stop()
    expected = f"kvkin: {words.format(file=file, **checkpoints)}"
    lines = [line for line in server.text().splitlines() if "kvkin: " in line]
    assert [line for line in lines if expected in line], server.text()[-3000:]
    assert len([line for line in lines if line.startswith("kvkin: ")]) <= 1
    assert "Loading weights took" not in server.text()
