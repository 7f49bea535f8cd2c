"""Drift in a cluster of real processes: a pair that diverges is switched off and stays off, one that does not goes on.

The base's contexts are reused by two models under the same group: ``near`` has next to the base's weights, ``far`` has others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_harness import BLOCK, LiveCluster, live_cluster, prompt
from tiny_models import make_tiny, make_tiny_lora

from kvkin.kv.provenance import Quality
from kvkin.tools.cli import main
from kvkin.tools.ports import free_ports
from kvkin.tools.profile import recorded
from kvkin.tools.quality_data import read_examples
from kvkin.transport.messages import DriftStatus, Finished, StatusReply

pytestmark = [pytest.mark.timeout(300)]

BASE, NEAR, FAR = "base", "near", "far"
ON_BASE, ON_TUNED = "decode-base", "decode-tuned"
LAYERS, GROUP = 6, [2, 4]
MIN_SAMPLES, BOUND = 3, 0.05


def write_cluster(folder: Path) -> Path:
    """A router, a node for the base, one for both fine-tunes; every request that may be checked is."""
    base = make_tiny("llama", folder / "base", num_layers=LAYERS, max_position_embeddings=2048)
    far = make_tiny("llama", folder / "far", seed=9, num_layers=LAYERS, max_position_embeddings=2048)
    near = make_tiny_lora(base, folder / "near", range(LAYERS), seed=1, lora_alpha=0.004)
    client_port, node_port = free_ports(2)
    small = {"role": "decode", "kv_bytes": "32MiB", "e_bytes": "16MiB", "threads": 1, "port": 0}
    cluster: dict[str, Any] = {
        "state_dir": str(folder / "state"),
        "families": {
            "tiny": {
                "base": BASE,
                "transition_layers": [GROUP[0]],
                "chunk_tokens": BLOCK,
                "recompute_groups": [{"sender": BASE, "group": GROUP}],
                "models": {
                    BASE: {"checkpoint": str(base)},
                    NEAR: {"checkpoint": str(base), "adapter": str(near)},
                    FAR: {"checkpoint": str(far)},
                },
            }
        },
        "nodes": {
            "router-0": {"role": "router", "client_port": client_port, "node_port": node_port},
            ON_BASE: {"models": [BASE], **small},
            ON_TUNED: {"models": [NEAR, FAR], **small},
        },
        # reuse is worth it whenever it saves a layer, however fast this machine computes
        "router": {"policy": {"bypass_tokens": 0, "min_reuse_tokens": 16, "stream_overhead_s": 0}},
        "drift": {
            "share": 1,
            "tokens": 4,
            "idle_s": 0.05,
            "min_samples": MIN_SAMPLES,
            "max_divergence": BOUND,
            "record": True,
        },
        "timeouts": {"heartbeat_s": 0.1, "node_dead_s": 5, "drain_s": 10, "start_s": 170},
        "transport": {"backend": "tcp"},
    }
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster, sort_keys=False))
    return file


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    folder = tmp_path_factory.mktemp("drift")
    with live_cluster(folder, "tcp", write_cluster(folder)) as cluster:
        yield cluster
        cluster.settled()


def hand_over(cluster: LiveCluster, model: str, ids: tuple[int, ...]) -> Finished:
    """The base reads a context, ``model`` goes on with it."""
    cluster.ask(BASE, ids, reuse="off")
    return cluster.ask(model, ids, reuse="any")


def pair(status: StatusReply, model: str) -> DriftStatus | None:
    return next((one for one in status.drift if (one.sender, one.receiver) == (BASE, model)), None)


def checked(cluster: LiveCluster, model: str, samples: int) -> DriftStatus:
    """The pair, once it has so many samples."""

    def enough(status: StatusReply) -> bool:
        found = pair(status, model)
        return found is not None and found.samples >= samples

    found = pair(cluster.until(enough, f"{samples} samples of {model}"), model)
    assert found is not None
    return found


def until_off(cluster: LiveCluster, model: str, seeds: Iterator[int]) -> tuple[int, ...]:
    """Hand over contexts until the pair is off; returns the first of them."""
    first: tuple[int, ...] = ()
    for count in range(1, MIN_SAMPLES + 1):
        ids = prompt(next(seeds), 120)
        first = first or ids
        answer = hand_over(cluster, model, ids)
        assert answer.report.kind == "partial"
        found = checked(cluster, model, count)
        assert found.state == ("off" if count == MIN_SAMPLES else "watching")
    return first


def test_a_pair_that_keeps_its_bound_goes_on(cluster: LiveCluster) -> None:
    for number in range(MIN_SAMPLES + 1):
        assert hand_over(cluster, NEAR, prompt(100 + number, 120)).report.kind == "partial"
        checked(cluster, NEAR, number + 1)
    found = checked(cluster, NEAR, MIN_SAMPLES + 1)
    assert found.state == "ok"
    assert found.divergence is not None
    assert found.divergence < 0.1 * BOUND
    assert (found.first_token, found.agreement, found.max_divergence) == (1.0, 1.0, BOUND)


def test_a_pair_that_diverges_is_switched_off_for_good(
    cluster: LiveCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    first = until_off(cluster, FAR, iter(range(200, 300)))
    status = cluster.settled()
    found = pair(status, FAR)
    assert found is not None
    assert found.divergence is not None
    assert found.divergence > BOUND
    assert status.counters["drift_switched_off"] == 1

    # the next one computes, and says why
    ids = prompt(290, 120)
    after = hand_over(cluster, FAR, ids)
    assert (after.report.kind, after.report.quality) == ("private", Quality.EXACT)
    assert "base is switched off as its sender (divergence" in after.report.reason
    assert after.token_ids == cluster.expected(FAR, ids)
    # its own exact blocks are used as ever
    again = cluster.ask(FAR, (*ids, 7, 8, 9), reuse="any")
    assert (again.report.kind, again.report.quality) == ("exact", Quality.EXACT)

    # what came of the pair before is not continued, whatever the request allows
    onward = cluster.ask(FAR, (*first, 7, 8, 9), reuse="any")
    assert onward.report.quality is Quality.EXACT
    assert "blocks that came of a switched-off pair are not used" in onward.report.reason
    assert onward.token_ids == cluster.expected(FAR, (*first, 7, 8, 9))
    # nobody else suffers
    assert hand_over(cluster, NEAR, prompt(291, 120)).report.kind == "partial"

    # it is said: in the status of the command, in its JSON and in the router's log
    assert main(["status", "--address", cluster.client_address]) == 0
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.split()[:2] == [BASE, FAR] and " off " in one]
    assert f"(to {BOUND:.2f})" in line
    assert main(["status", "--address", cluster.client_address, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["drift"]
    assert {one["receiver"]: one["state"] for one in told}[FAR] == "off"
    log = cluster.processes.nodes["router-0"].log_path.read_text()
    assert len([one for one in log.splitlines() if "pair switched off for drift" in one]) == 1

    # a restarted router goes on with it, although it has forgotten the samples of all other pairs
    before = found.samples
    cluster.kill("router-0")
    cluster.restart("router-0")
    restarted = pair(cluster.client.status(), FAR)
    assert restarted is not None
    assert (restarted.state, restarted.samples) == ("off", before)
    assert "switched off" in hand_over(cluster, FAR, prompt(292, 120)).report.reason
    assert hand_over(cluster, NEAR, prompt(293, 120)).report.kind == "partial"


def test_recorded_prompts_are_what_the_profile_tool_reads(cluster: LiveCluster) -> None:
    ids = prompt(300, 100)
    before = cluster.client.status().counters.get("drift_samples", 0)
    hand_over(cluster, NEAR, ids)
    cluster.until(lambda status: status.counters.get("drift_samples", 0) > before, "sample")
    path = recorded(cluster.config.state_path, BASE, NEAR)
    written = str(list(ids)).replace(" ", "")
    cluster.until(lambda status: path.exists() and written in path.read_text(), "record")
    found = [one for one in read_examples(path).examples if one.token_ids == ids]
    assert [one.suffix_start for one in found] == [len(ids) // BLOCK * BLOCK]


def begun(cluster: LiveCluster, status: StatusReply, done: int) -> bool:
    """Whether a check runs, or ran so fast that nobody saw it."""
    load = cluster.load(ON_TUNED, status)
    return bool(load.checks_running) or load.checks_done > done


@pytest.mark.slow
def test_a_node_that_is_killed_in_the_middle_of_a_check_leaves_nothing(cluster: LiveCluster) -> None:
    """The sample is lost, nothing else is."""
    for seed in range(400, 420):
        done = cluster.load(ON_TUNED).checks_done
        answer = hand_over(cluster, NEAR, prompt(seed))
        assert answer.report.kind == "partial"
        load = cluster.load(ON_TUNED, cluster.until(lambda s, was=done: begun(cluster, s, was), "check"))
        if load.checks_running:
            break
    else:
        raise AssertionError("no check was seen while it ran")
    cluster.kill(ON_TUNED)
    cluster.restart(ON_TUNED)
    load = cluster.load(ON_TUNED, cluster.settled())
    assert (load.checks_waiting, load.checks_running, load.checks_done) == (0, 0, 0)
    samples = cluster.client.status().counters.get("drift_samples", 0)
    assert hand_over(cluster, NEAR, prompt(430, 120)).report.kind == "partial"
    cluster.until(lambda status: status.counters.get("drift_samples", 0) > samples, "sample of the new process")
