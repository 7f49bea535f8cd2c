"""A plain ``vllm serve`` of a base and a LoRA adapter of it: both are members of the family."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_checks import CONTEXT, check_exact, check_partial, in_part, publishing, two_prompts
from serve_harness import (
    BASE,
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
    write_lora_family,
)

openai = pytest.importorskip("openai", reason="it comes with vLLM")

pytestmark = [pytest.mark.vllm, pytest.mark.alone, pytest.mark.timeout(900)]

NODE = "vllm-0"


def lora_arguments(adapter: Path, max_loras: int = 2) -> tuple[str, ...]:
    modules = ("--enable-lora", "--lora-modules", f"{TUNE}={adapter}")
    return (*modules, "--max-loras", str(max_loras), "--max-lora-rank", "8")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_lora_family(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def plain(models: tuple[Path, Path]) -> Plain:
    return Plain({BASE: models[0]}, {TUNE: models[1]})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, models: tuple[Path, Path]) -> Iterator[FamilyCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    adapters, attached = {TUNE: models[1]}, {NODE: [BASE, TUNE]}
    file = write_cluster(folder, {BASE: models[0]}, adapters=adapters, attached=attached, answer_s=30.0)
    with family_cluster(file) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def file(cluster: FamilyCluster) -> Path:
    return cluster.config.state_path.parent / "cluster.yaml"


@pytest.fixture(scope="module")
def server(cluster: FamilyCluster, file: Path, models: tuple[Path, Path]) -> Iterator[Server]:
    log = file.parent / f"{NODE}.log"
    with serving(Server(models[0], transfer_config(file, NODE), log, lora_arguments(models[1]))) as server:
        cluster.until(lambda status: cluster.attached(NODE, status), "server")
        yield server


def test_the_base_shares_exactly(cluster: FamilyCluster, server: Server, plain: Plain) -> None:
    check_exact(cluster, server, NODE, plain, BASE, 100)


def test_the_adapter_reuses_the_bases_context_in_part(cluster: FamilyCluster, server: Server, plain: Plain) -> None:
    check_partial(cluster, server, plain, TUNE, 200, asked=TUNE)
    assert "share nothing" not in server.text()


def test_both_in_one_batch_over_the_servers_own_context(cluster: FamilyCluster, server: Server, plain: Plain) -> None:
    """The context is the server's own; no request gets rows of another's adapter."""
    first, second = two_prompts(300)
    with publishing(cluster, NODE):
        server.complete(first)
    expected = in_part(plain, TUNE, first, second)
    alone = {number: tokens(400 + number, 70) for number in range(4)}
    answers: dict[Any, Answer] = {}

    def ask(name: Any, prompt: tuple[int, ...], model: str) -> None:
        answers[name] = server.complete(prompt, max_tokens=6, wishes={"reuse": "any"}, model=model)

    asking = [threading.Thread(target=ask, args=("reused", second, TUNE))]
    asking += [
        threading.Thread(target=ask, args=(number, prompt, TUNE if number % 2 else "served"))
        for number, prompt in alone.items()
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert answers["reused"].token_ids == expected
    assert (answers["reused"].said["plan"], answers["reused"].said["tokens_reused"]) == ("partial", CONTEXT)
    for number, prompt in alone.items():
        assert answers[number].token_ids == plain.answer(TUNE if number % 2 else BASE, prompt), number


@pytest.mark.parametrize(
    ("max_loras", "words"),
    [
        (0, "--enable-lora: is missing, and tune of nodes.vllm-0.models are LoRA adapters"),
        (1, "--max-loras: 1 is too few"),
    ],
)
def test_a_server_that_could_not_serve_the_adapter_is_refused(
    file: Path, models: tuple[Path, Path], tmp_path: Path, max_loras: int, words: str
) -> None:
    arguments = lora_arguments(models[1], max_loras) if max_loras else ()
    refused = Server(models[0], transfer_config(file, NODE), tmp_path / "log", arguments)
    try:
        assert refused.ended() != 0
    finally:
        refused.stop()
    assert f"kvkin: {words}" in refused.text(), refused.text()[-3000:]
