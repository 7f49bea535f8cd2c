"""A cluster with profiles, all of it in one process: bounded reuse of two senders, targets, ``own``; the tokens of the oracle."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import oracle
import pytest
import torch
import yaml
from profile_samples import sample_profile
from tiny_cluster import BASE, FULL, LAYERS, UPPER, make_cluster
from transformers import AutoModelForCausalLM

from kvkin.configs.families import resolve_cluster
from kvkin.configs.loader import load_cluster
from kvkin.configs.profiles import profile_name, write_profile
from kvkin.kv.plan import Holder, LayerGroup, LayerSource, PlanKind, ReusePlan, Segment
from kvkin.kv.provenance import Quality, exact_provenance
from kvkin.tools.local import LocalCluster
from kvkin.transport.messages import Finished, ReuseReport, Sampling, SegmentReport

BLOCK, MAX_TOKENS, WAIT_S = 16, 6, 60.0
# UPPER has read the first part of the context, BASE all of it
PART, WHOLE = 24 * BLOCK, 40 * BLOCK
IDS = tuple(int(one) for one in torch.randint(3, 256, (WHOLE + 8,), generator=torch.Generator().manual_seed(3)))
LOSSES: dict[str, dict[tuple[int, int] | None, float]] = {
    UPPER: {None: 0.01, (0, 7): 0.005},
    BASE: {(0, 6): 0.02, (3, 5): 0.01},  # no node keeps the hidden states entering layer 3
}
GREEDY = Sampling(max_tokens=MAX_TOKENS, ignore_eos=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The tiny cluster with two profiles, and a policy that depends on nothing that this machine is just doing."""
    file = make_cluster(tmp_path)
    cluster = yaml.safe_load(file.read_text())
    cluster["families"]["tiny"]["profiles"] = str(tmp_path / "profiles")
    cluster["router"]["policy"] |= {"exact_preference": 0.0, "min_order_tokens": 1_000_000, "stream_overhead_s": 0.0}
    cluster["drift"] = {"share": 0.0}
    file.write_text(yaml.safe_dump(cluster))
    (tmp_path / "profiles").mkdir()
    lineages = {name: one.lineage for name, one in resolve_cluster(load_cluster(file)).families["tiny"].models.items()}
    for sender, losses in LOSSES.items():
        profile = sample_profile(sender, lineages[sender], FULL, lineages[FULL], losses)
        write_profile(tmp_path / "profiles" / profile_name(sender, FULL), profile)
    return file


@pytest.fixture
async def cluster(file: Path) -> AsyncIterator[LocalCluster]:
    """Both senders hold their contexts, and the router knows it."""
    async with LocalCluster(load_cluster(file)) as cluster:
        for model, tokens in ((UPPER, PART), (BASE, WHOLE)):
            await cluster.client.generate(
                model, token_ids=IDS[: tokens + 4], max_tokens=1, reuse="off", timeout_s=WAIT_S
            )
        wanted = {"decode-upper": PART // BLOCK, "decode-base": WHOLE // BLOCK}
        await cluster.until(
            lambda status: all(node.holdings >= wanted[node.name] for node in status.nodes if node.name in wanted)
        )
        yield cluster


async def ask(cluster: LocalCluster, **request: Any) -> Finished:
    """FULL reads the whole context; nothing of it stays, so that every question finds the same cluster."""
    return await cluster.client.generate(
        FULL, token_ids=IDS, sampling=GREEDY, publish=False, timeout_s=WAIT_S, **request
    )


@functools.cache
def load(checkpoint: Path, adapter: Path | None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    if adapter is None:
        return model
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().eval()


def executed(report: ReuseReport) -> ReusePlan:
    """The plan that the report says was executed; holders are named, which is all that the oracle asks of them."""

    def segment(one: SegmentReport) -> Segment:
        if not one.sources:
            return Segment(one.start, one.stop)
        holder = Holder(one.sources[0], exact_provenance(one.sources[0].encode()))
        first, last = one.group or (LAYERS, LAYERS)
        spans = [span for span in (LayerGroup(0, first), LayerGroup(last, LAYERS)) if len(span)]
        return Segment(
            one.start,
            one.stop,
            tuple(LayerSource(span, holder) for span in spans),
            one.start,
            one.e_layer,
            None if one.e_layer is None else holder,
            None if one.group is None else LayerGroup(*one.group),
            one.kind,
        )

    return ReusePlan(tuple(map(segment, report.segments)))


def expected(file: Path, report: ReuseReport) -> list[int]:
    """Tokens of the oracle, which runs unmodified transformers layers."""
    torch.set_num_threads(1)
    models = resolve_cluster(load_cluster(file)).families["tiny"].models
    loaded = {name: load(one.path, one.adapter_path) for name, one in models.items()}
    held = {
        "decode-upper": oracle.private(loaded[UPPER], IDS[:PART]),
        "decode-base": oracle.private(loaded[BASE], IDS[:WHOLE]),
    }
    state = oracle.execute(loaded[FULL], IDS, executed(report), held)
    return oracle.generate(loaded[FULL], state, MAX_TOKENS)[1]


async def test_two_senders_in_one_plan_and_the_tokens_of_the_oracle(file: Path, cluster: LocalCluster) -> None:
    answer = await ask(cluster, reuse="bounded", max_loss=0.05)
    report = answer.report
    assert [(one.kind, one.start, one.stop, one.sources, one.group) for one in report.segments] == [
        (PlanKind.PARTIAL, 0, PART, ("decode-upper",), None),
        (PlanKind.PARTIAL, PART, WHOLE, ("decode-base",), (0, 6)),
        (PlanKind.PRIVATE, WHOLE, len(IDS), (), None),
    ]
    assert not report.fallback
    assert (report.quality, report.planned) == (Quality.BOUNDED, PlanKind.PARTIAL)
    assert report.loss == pytest.approx(0.03)
    assert report.layers_recomputed == 6
    assert [one.layers_recomputed for one in report.segments] == [0, 6, 0]
    kv_bytes = 2 * 2 * 16 * 4
    assert report.bytes_pulled == kv_bytes * (PART * LAYERS + (WHOLE - PART) * (LAYERS - 6))
    assert list(answer.token_ids) == expected(file, report)

    inputs = report.inputs
    assert inputs is not None
    assert (inputs.max_loss, inputs.slo_s) == (0.05, None)
    assert inputs.ttft_s > 0.0
    assert inputs.pull_bytes_per_s > 0.0
    chosen, *others = inputs.considered
    assert (chosen.chosen, chosen.kind, chosen.loss) == (True, PlanKind.PARTIAL, pytest.approx(0.03))
    assert set(chosen.sources) == {"decode-upper", "decode-base"}
    assert PlanKind.PRIVATE in {one.kind for one in others}
    assert all(one.ttft_s >= chosen.ttft_s for one in others)


@pytest.mark.parametrize(
    ("request_", "sources", "loss"),
    [
        ({"reuse": "bounded", "max_loss": 0.01}, ("decode-upper",), 0.01),
        ({"reuse": "bounded", "max_loss": 0.0}, (), 0.0),
        ({"reuse": "exact"}, (), 0.0),
        ({"reuse": "own"}, (), 0.0),
        # computing is in time for anything: no loss is worth it
        ({"reuse": "bounded", "ttft_slo_s": 1000.0}, (), 0.0),
        # too late anyhow: the fastest plan within the bound
        ({"reuse": "bounded", "ttft_slo_s": 1e-6}, ("decode-upper", "decode-base"), 0.03),
    ],
    ids=["tight", "no loss", "exact", "own", "easy target", "hopeless target"],
)
async def test_bounds_and_targets_choose_the_plan(
    file: Path, cluster: LocalCluster, request_: dict[str, Any], sources: tuple[str, ...], loss: float
) -> None:
    answer = await ask(cluster, **request_)
    assert answer.report.sources == sources
    assert answer.report.loss == pytest.approx(loss)
    assert list(answer.token_ids) == expected(file, answer.report)
    inputs = answer.report.inputs
    assert inputs is not None
    assert inputs.slo_s == request_.get("ttft_slo_s")


async def test_own_blocks_are_hit_and_others_only_where_sharing_is_allowed(cluster: LocalCluster) -> None:
    """The arm without sharing of a benchmark: what the node computed for the same model before, and nothing else."""

    async def turn(reuse: str) -> Finished:
        return await cluster.client.generate(
            BASE, token_ids=IDS[: WHOLE + 6], sampling=GREEDY, reuse=reuse, publish=False, timeout_s=WAIT_S
        )

    own = await turn("own")
    assert (own.report.kind, own.report.sources, own.report.bytes_pulled) == (PlanKind.EXACT, ("decode-base",), 0)
    assert own.report.tokens_reused == WHOLE
    other = await cluster.client.generate(
        UPPER, token_ids=IDS[: WHOLE + 6], sampling=GREEDY, reuse="own", publish=False, timeout_s=WAIT_S
    )
    assert (other.report.tokens_reused, other.report.sources) == (PART, ("decode-upper",))
    shared = await cluster.client.generate(
        UPPER, token_ids=IDS[: WHOLE + 6], sampling=GREEDY, reuse="exact", publish=False, timeout_s=WAIT_S
    )
    assert shared.report.tokens_reused == WHOLE, "the layers that both models share are the base's"
    assert shared.token_ids == other.token_ids


async def test_the_status_tells_of_the_pairs(cluster: LocalCluster) -> None:
    status = await cluster.client.status()
    pairs = {(one.sender, one.receiver): one for one in status.pairs}
    assert pairs[UPPER, FULL].state == pairs[BASE, FULL].state == "profiled"
    assert [(one.group, one.loss) for one in pairs[BASE, FULL].groups] == [((0, 6), 0.02)]
    assert pairs[FULL, BASE].state == "unprofiled"
    # the reply stays readable to those who know nothing of it
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(status), type=type(status)) == status
