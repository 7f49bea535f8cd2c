"""Clusters of both kinds of nodes, as processes over real sockets: each pulls from the other, and answers are the oracle's.

What a node of one kind prefilled is reused by one of the other, exactly and in part. When the vLLM node dies in the middle, only what
ran on it is affected.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import yaml
from check_engine import NEAR_TIE
from cluster_harness import LiveCluster, bystander, greedy, live_cluster, prompt
from engine_harness import computed, exact, partial, plan_of
from oracle import State
from peft import PeftModel
from tiny_cluster import BASE, FULL, LAYERS, SPLIT, UPPER, make_family
from transformers import AutoModelForCausalLM
from vllm_bench import WIDE

from kvkin.kv.errors import NodeUnavailable
from kvkin.kv.plan import PlanKind, ReusePlan
from kvkin.kv.provenance import Quality
from kvkin.tools.ports import free_ports
from kvkin.transport.messages import Finished

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(500)]

BLOCK = 16
PREFILL, DECODE, SPARE = "prefill-0", "decode-0", "decode-spare"
TWIN = "tiny-twin"  # FULL under another name, on both kinds of decode nodes
VLLM = {"enforce_eager": True, "kv_cache_memory_bytes": "64MiB", "max_num_batched_tokens": 512, "max_num_seqs": 8}
TOKENS = 8


def write_cluster(folder: Path, nodes: dict[str, Any]) -> Path:
    """A family whose heads vLLM's CPU attention takes; every reuse that saves a layer is worth it."""
    family = make_family(folder, **WIDE)
    family["tiny"]["models"][TWIN] = family["tiny"]["models"][FULL]
    family["tiny"] |= {"chunk_tokens": 64, "compute_dtype": "float32", "device": "cpu", "vllm": VLLM}
    client_port, node_port = free_ports(2)
    small = {"kv_bytes": "24MiB", "e_bytes": "24MiB", "threads": 1, "port": 0}
    cluster = {
        "state_dir": str(folder / "state"),
        "families": family,
        "nodes": {"router-0": {"role": "router", "client_port": client_port, "node_port": node_port}}
        | {name: {**small, **node} for name, node in nodes.items()},
        "router": {
            "policy": {"bypass_tokens": 0, "min_reuse_tokens": 16, "stream_overhead_s": 0},
            "load_half_life_s": 1e-6,
        },
        "drift": {"share": 0},
        "timeouts": {"heartbeat_s": 0.1, "node_dead_s": 20, "drain_s": 20, "order_s": 60, "start_s": 400},
        "transport": {"backend": "tcp"},
    }
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster, sort_keys=False))
    return file


@pytest.fixture(scope="module")
def vllm_decodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Reference prefill; the fine-tunes on vLLM as adapters of one engine, one of them on the reference engine as well."""
    nodes = {
        PREFILL: {"role": "prefill", "models": [BASE], "engine": "reference"},
        DECODE: {"role": "decode", "models": [FULL, UPPER, TWIN], "engine": "vllm", "max_running": 6},
        SPARE: {"role": "decode", "models": [TWIN], "engine": "reference", "max_running": 6},
    }
    folder = tmp_path_factory.mktemp("vllm_decodes")
    with live_cluster(folder, "tcp", write_cluster(folder, nodes)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def vllm_prefills(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Prefill on vLLM; both fine-tunes on the reference engine."""
    nodes = {
        PREFILL: {"role": "prefill", "models": [BASE], "engine": "vllm"},
        DECODE: {"role": "decode", "models": [FULL, UPPER], "engine": "reference"},
    }
    folder = tmp_path_factory.mktemp("vllm_prefills")
    with live_cluster(folder, "tcp", write_cluster(folder, nodes)) as cluster:
        yield cluster


# --- the oracle -----------------------------------------------------------------------------------------------------------


def plain_models(cluster: LiveCluster) -> dict[str, Any]:
    """The family's members as plain transformers models, adapters merged by peft."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, member in cluster.config.families["tiny"].models.items():
        model = AutoModelForCausalLM.from_pretrained(member.checkpoint, dtype=torch.float32).eval()
        if member.adapter is not None:
            model = PeftModel.from_pretrained(model, member.adapter).merge_and_unload().eval()
        found[name] = model.requires_grad_(False)
    return found


def executed(answer: Finished) -> ReusePlan:
    """The plan that the report says was executed. Whatever was reused is the prefill node's."""
    segments = []
    for one in answer.report.segments:
        if not one.sources:
            segments.append(computed(one.start, one.stop))
        elif one.group is None:
            segments.append(exact(one.start, one.stop, PREFILL, num_layers=LAYERS))
        else:
            segments.append(partial(one.start, one.stop, one.group, PREFILL, num_layers=LAYERS))
    return plan_of(*segments)


def assert_answer(cluster: LiveCluster, model: str, ids: tuple[int, ...], answer: Finished) -> State:
    """The answer's tokens are those of the oracle for the reported plan; where its two best logits are equal, either will do."""
    models = plain_models(cluster)
    held = oracle.contexts({PREFILL: models[BASE]}, ids)
    state = oracle.execute(models[model], ids, executed(answer), held)
    _, choices, logits = oracle.generate(models[model], state, len(answer.token_ids), answer.token_ids)
    for index, (found, wanted) in enumerate(zip(answer.token_ids, choices, strict=True)):
        best = torch.topk(logits[index], 2).values
        assert found == wanted or best[0] - best[1] < NEAR_TIE, f"token {index} is {found}, oracle: {wanted}"
    return state


def assert_reused(
    answer: Finished, ids: tuple[int, ...], kind: PlanKind, quality: Quality, group: tuple[int, int]
) -> None:
    report, context = answer.report, (len(ids) - 1) // BLOCK * BLOCK
    assert (answer.node, report.fallback, report.kind, report.quality) == (DECODE, "", kind, quality), report
    assert report.sources == (PREFILL,)
    assert report.segments[0].group == group
    assert (report.tokens_reused, report.layers_recomputed) == (context, group[1] - group[0])
    assert (report.tokens_cached, report.tokens_loaded, report.tokens_computed) == (0, context, len(ids) - context)
    assert report.bytes_pulled > 0


def check_both_plans(cluster: LiveCluster, seed: int) -> None:
    """The pool prefills a context; one fine-tune reuses it in part, the other, whose lower layers are the base's, exactly."""
    for attempt in range(10):
        ids = prompt(100 * seed + attempt, 401)
        cluster.order(ids)
        cluster.settled()
        answer = cluster.ask(FULL, ids, TOKENS, reuse="any", publish=False)
        if answer.report.kind is not PlanKind.EXACT:  # whoever had it ordered was answered before it left
            break
    assert_reused(answer, ids, PlanKind.PARTIAL, Quality.UNPROFILED, (2, 5))
    approximate = assert_answer(cluster, FULL, ids, answer)
    answer = cluster.ask(UPPER, ids, TOKENS, reuse="exact", publish=False)
    assert_reused(answer, ids, PlanKind.SHARED_PREFIX, Quality.EXACT, (SPLIT, LAYERS))
    assert_answer(cluster, UPPER, ids, answer)
    # the plans are no private prefills in disguise
    alone = oracle.private(plain_models(cluster)[FULL], ids)
    assert float((approximate.keys[LAYERS - 1] - alone.keys[LAYERS - 1]).abs().max()) > 1e-2


# --- both directions -------------------------------------------------------------------------------------------------------


def test_vllm_pulls_what_the_reference_engine_prefilled(vllm_decodes: LiveCluster) -> None:
    check_both_plans(vllm_decodes, 1)


def test_the_reference_engine_pulls_what_vllm_prefilled(vllm_prefills: LiveCluster) -> None:
    check_both_plans(vllm_prefills, 2)


def test_a_vllm_node_that_is_killed_costs_only_its_own_requests(vllm_decodes: LiveCluster) -> None:
    """What it had begun to answer fails and may be retried; everybody else gets the same answers as ever, also when it is back."""
    cluster = vllm_decodes
    ids = prompt(3, 80)
    with (
        bystander(cluster, TWIN, ids),
        cluster.client.stream(FULL, token_ids=prompt(4, 60), sampling=greedy(1900)) as streamed,
    ):
        next(iter(streamed))
        cluster.kill(DECODE)
        with pytest.raises(NodeUnavailable) as caught:
            streamed.finish()
        assert caught.value.retryable
        assert DECODE in str(caught.value)
        answer = cluster.ask(TWIN, ids, TOKENS, reuse="off", publish=False)
        assert answer.node == SPARE
        assert_answer(cluster, TWIN, ids, answer)
        cluster.restart(DECODE)
    check_both_plans(cluster, 5)
