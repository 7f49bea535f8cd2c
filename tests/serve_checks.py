"""What is checked of every plain ``vllm serve`` in a family: contexts come from others and go to others, exactly and in part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import oracle
from cluster_harness import greedy
from serve_harness import BASE, BLOCK, GROUP, LAYERS, Answer, FamilyCluster, Plain, Server, tokens

from kvkin.kv.plan import Holder, LayerGroup, LayerSource, PlanKind, ReusePlan, Segment
from kvkin.kv.provenance import exact_provenance

CONTEXT = 384
assert CONTEXT % BLOCK == 0


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


def partial_plan(num_tokens: int) -> ReusePlan:
    """What the router is to plan for a fine-tune that finds the base's context, with its group."""
    held = Holder("base", exact_provenance(b"base"))
    start, stop = GROUP
    sources = (LayerSource(LayerGroup(0, start), held), LayerSource(LayerGroup(stop, LAYERS), held))
    context = Segment(0, CONTEXT, sources, 0, start, held, LayerGroup(start, stop), PlanKind.PARTIAL)
    return ReusePlan((context, Segment(CONTEXT, num_tokens)))


def in_part(plain: Plain, model: str, first: tuple[int, ...], second: tuple[int, ...]) -> list[int]:
    """What ``model`` must answer to ``second`` with its group over the base's KV of ``first``; it is not what it answers by itself."""
    held = {"base": oracle.private(plain.models[BASE], first).head(CONTEXT)}
    state = oracle.execute(plain.models[model], second, partial_plan(len(second)), held)
    _, expected, _ = oracle.generate(plain.models[model], state, 6)
    assert expected != plain.answer(model, second), "the test would not notice"
    return expected


def check_exact(
    cluster: FamilyCluster, server: Server, node: str, plain: Plain, model: str, seed: int, asked: str = "served"
) -> None:
    """``server`` (attached as ``node``) pulls what a decode node computed for ``model``, and the other way round."""
    decode = f"decode-{model}"
    first, second = two_prompts(seed)
    with publishing(cluster, decode):
        cluster.client.generate(model, token_ids=first, sampling=greedy(6), reuse="off")
    served = server.complete(second, model=asked)
    assert served.token_ids == plain.answer(model, second)
    assert (served.said["plan"], served.said["tokens_reused"]) == ("exact", CONTEXT), served.said
    assert "fallback" not in served.said

    first, second = two_prompts(seed + 3)
    with publishing(cluster, node):
        assert server.complete(first, model=asked).token_ids == plain.answer(model, first)
    answer = cluster.client.generate(model, token_ids=second, sampling=greedy(6), reuse="exact")
    assert list(answer.token_ids) == plain.answer(model, second)
    assert (answer.report.sources, answer.report.tokens_reused) == ((node,), CONTEXT)


def check_partial(
    cluster: FamilyCluster, server: Server, plain: Plain, model: str, seed: int, asked: str = "served"
) -> Answer:
    """``server`` reuses in part what the base's decode node computed, and nothing of it where exact KV is asked for."""
    first, second = two_prompts(seed)
    with publishing(cluster, "decode-base"):
        cluster.client.generate(BASE, token_ids=first, sampling=greedy(6), reuse="off")
    expected = in_part(plain, model, first, second)
    reused = server.complete(second, wishes={"reuse": "any"}, model=asked)
    assert (reused.said["plan"], reused.said["tokens_reused"]) == ("partial", CONTEXT), reused.said
    assert "fallback" not in reused.said
    assert reused.token_ids == expected
    exact = server.complete(second, wishes={"reuse": "exact"}, model=asked)
    assert exact.token_ids == plain.answer(model, second)
    return reused
