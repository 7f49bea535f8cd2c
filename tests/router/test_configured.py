"""The router's settings from a real cluster file, and nodes of that file that the router takes in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from mock_node import MockNode, choose_privately
from profile_samples import sample_profile
from structlog.testing import capture_logs
from tiny_models import make_tiny, make_tiny_lora, make_tiny_tokenizer

from kvkin.configs.families import ResolvedCluster, resolve_cluster
from kvkin.configs.loader import parse_cluster
from kvkin.configs.profiles import write_profile
from kvkin.configs.schema import PolicyConfig
from kvkin.kv.errors import ConfigError
from kvkin.kv.hashing import root_hash
from kvkin.kv.plan import LayerGroup
from kvkin.router.configured import settings_from
from kvkin.router.node import RouterNode
from kvkin.router.policy_types import GroupChoice, PolicySettings
from kvkin.router.settings import family_views
from kvkin.transport.client import AsyncClient
from kvkin.transport.messages import PairGroup
from kvkin.transport.node_messages import Execute, ServedModel


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> ResolvedCluster:
    folder = tmp_path_factory.mktemp("cluster")
    base = make_tiny("llama", folder / "base")
    wider = make_tiny("llama", folder / "wider", vocab_size=328)
    make_tiny_tokenizer(wider, extra_tokens=[f"<extra-{number}>" for number in range(60)])
    models: dict[str, Any] = {
        "base": {"checkpoint": str(base)},
        "lora": {"checkpoint": str(base), "adapter": str(make_tiny_lora(base, folder / "lora", [2, 3]))},
        "wider": {"checkpoint": str(wider)},
    }
    cluster = {
        "state_dir": str(folder / "state"),
        "families": {
            "tiny": {
                "base": "base",
                "models": models,
                "device": "cpu",
                "transition_layers": [2],
                "recompute_groups": [{"receiver": "lora", "group": [2, 4]}],
            }
        },
        "nodes": {
            "router-0": {"role": "router", "client_port": 15570, "node_port": 15571, "bind": "127.0.0.2"},
            "p0": {"role": "prefill", "port": 0, "models": ["base"]},
            "d0": {"role": "decode", "port": 0, "models": ["base", "lora", "wider"]},
        },
        "router": {"scope": "acme", "policy": {"beta": 0.5, "spill_s": 1.5, "ttft_slo_s": 0.75, "min_fan_out": 2.5}},
        "limits": {"max_queue": 7},
        "timeouts": {"node_dead_s": 9.0},
    }
    return resolve_cluster(parse_cluster(yaml.safe_dump(cluster), "cluster.yaml"))


def test_everything_of_the_file_arrives(resolved: ResolvedCluster) -> None:
    settings = settings_from(resolved, "router-0")
    assert (settings.client_address, settings.node_address) == ("tcp://127.0.0.2:15570", "tcp://127.0.0.2:15571")
    assert (settings.scope, settings.limits.max_queue, settings.timeouts.node_dead_s) == ("acme", 7, 9.0)
    assert (settings.policy.beta, settings.policy.spill_s, settings.policy.cost.chunk_tokens) == (0.5, 1.5, 512)
    assert settings.policy.min_pull_tokens == 128
    assert (settings.policy.ttft_slo_s, settings.policy.min_fan_out) == (0.75, 2.5)
    assert {name: (node.role, node.models) for name, node in settings.nodes.items()} == {
        "p0": ("prefill", ("base",)),
        "d0": ("decode", ("base", "lora", "wider")),
    }
    family = settings.families["tiny"]
    assert (family.base_model, family.vocab_size, family.transition_layers) == ("base", 320, (2,))
    assert {pair: choice[0].group for pair, choice in family.groups.items()} == {
        (sender, "lora"): LayerGroup(2, 4) for sender in ("base", "lora", "wider")
    }
    lora, wider = settings.models["lora"], settings.models["wider"]
    assert (lora.tokenizer_dir, lora.own_digest) == (settings.models["base"].tokenizer_dir, b"")
    assert wider.tokenizer_dir != lora.tokenizer_dir
    assert wider.own_digest not in (b"", family.tokenizer_digest)
    digests = {name: model.logits_digest for name, model in settings.models.items()}
    assert digests == {name: model.logits_digest for name, model in resolved.families["tiny"].models.items()}
    assert lora.chat_template is not None


def test_what_the_file_leaves_out_of_the_policy_keeps_its_default() -> None:
    """The cluster file's defaults are the policy's own, but for those that a real cluster wants otherwise."""
    ours, theirs = PolicyConfig(), PolicySettings()
    for name in (
        "exact_preference",
        "min_order_tokens",
        "min_fan_out",
        "max_pool_queue_s",
        "live_margin",
        "ttft_slo_s",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("default_layer_tokens_per_s", "default_pull_bytes_per_s", "context_half_tokens", "stream_overhead_s"):
        assert getattr(ours, name) == getattr(theirs.cost, name), name


def test_every_policy_setting_arrives(resolved: ResolvedCluster) -> None:
    """Whatever an operator sets changes the policy: a key that is read and forgotten would be worse than none."""
    config, before = resolved.config, settings_from(resolved, "router-0")
    for field in msgspec.structs.fields(PolicyConfig):
        value = getattr(config.router.policy, field.name)
        # above both of the keys of which the larger one counts
        other = 4000 if field.name in ("min_reuse_tokens", "bypass_tokens") else (0.5 if value is None else value / 2)
        policy = msgspec.structs.replace(config.router.policy, **{field.name: other})
        changed = msgspec.structs.replace(config, router=msgspec.structs.replace(config.router, policy=policy))
        assert settings_from(msgspec.structs.replace(resolved, config=changed), "router-0") != before, field.name


def test_a_profile_takes_the_place_of_the_configured_group(resolved: ResolvedCluster, tmp_path: Path) -> None:
    lineages = {name: model.lineage for name, model in resolved.families["tiny"].models.items()}
    losses: dict[tuple[int, int] | None, float] = {None: 0.2, (2, 3): 0.02, (1, 3): 0.01, (0, 3): -0.01}
    good = sample_profile("base", lineages["base"], "lora", lineages["lora"], losses)
    stale = sample_profile("base", lineages["base"], "wider", lineages["lora"], losses)
    write_profile(tmp_path / "base-lora.json", good)
    write_profile(tmp_path / "wider.json", msgspec.structs.replace(stale, sender=good.receiver))
    family = msgspec.structs.replace(resolved.config.families["tiny"], profiles=str(tmp_path))
    config = msgspec.structs.replace(resolved.config, families={"tiny": family})
    settings = settings_from(resolve_cluster(config), "router-0")
    groups = settings.families["tiny"].groups
    assert groups["base", "lora"] == (
        GroupChoice(None, 0.2),
        GroupChoice(LayerGroup(2, 3), 0.02),
        GroupChoice(LayerGroup(0, 3), 0.0),
    )
    assert groups["wider", "lora"] == (GroupChoice(LayerGroup(2, 4)),), "what is not profiled is as it was"
    assert ("lora", "wider") not in groups
    (note,) = settings.families["tiny"].notes
    assert "wider.json is refused" in note
    profiled = [pair for pair in settings.pairs if pair.state == "profiled"]
    assert [(pair.sender, pair.receiver) for pair in profiled] == [("base", "lora")]
    assert profiled[0].groups == (PairGroup(None, 0.2), PairGroup((2, 3), 0.02), PairGroup((0, 3), 0.0))
    assert profiled[0].why == str(tmp_path / "base-lora.json")


async def test_a_router_with_a_profile_that_is_no_good_starts_and_says_so(
    resolved: ResolvedCluster, tmp_path: Path
) -> None:
    (tmp_path / "broken.json").write_text("{")
    family = msgspec.structs.replace(resolved.config.families["tiny"], profiles=(str(tmp_path / "broken.json"), "none"))
    config = msgspec.structs.replace(resolved.config, families={"tiny": family})
    settings = msgspec.structs.replace(
        settings_from(resolve_cluster(config), "router-0"),
        client_address="tcp://127.0.0.1:0",
        node_address="tcp://127.0.0.1:0",
    )
    with capture_logs() as logs:
        async with RouterNode(settings, choose=choose_privately):
            pass
    problems = [entry["problem"] for entry in logs if entry["event"] == "profile"]
    assert len(problems) == 2
    assert "broken.json is refused: not JSON" in problems[0]
    assert "none is refused: no such file" in problems[1]


def test_unprofiled_pairs_are_told_of_too(resolved: ResolvedCluster) -> None:
    assert {
        (pair.sender, pair.receiver, pair.state, pair.groups) for pair in settings_from(resolved, "router-0").pairs
    } == {(sender, "lora", "unprofiled", (PairGroup((2, 4), None),)) for sender in ("base", "wider")}


def test_the_policy_sees_which_models_share_a_lineage(resolved: ResolvedCluster) -> None:
    view = family_views(settings_from(resolved, "router-0"))["tiny"]
    assert view.base_lineage == resolved.families["tiny"].base.lineage.id
    assert sorted(sum(view.models_of.values(), ())) == ["base", "lora", "wider"]
    assert set(view.lineages) == set(view.models_of)


def test_a_router_that_is_not_in_the_file_is_a_config_error(resolved: ResolvedCluster) -> None:
    with pytest.raises(ConfigError, match=r"nodes.d0: no router of this name \(allowed: router-0\)"):
        settings_from(resolved, "d0")


@pytest.fixture
async def cluster(resolved: ResolvedCluster) -> AsyncIterator[tuple[AsyncClient, MockNode]]:
    settings = msgspec.structs.replace(
        settings_from(resolved, "router-0"), client_address="tcp://127.0.0.1:0", node_address="tcp://127.0.0.1:0"
    )
    family = resolved.families["tiny"]
    served = [ServedModel(name, "tiny", one.lineage, family.tokenizer_digest) for name, one in family.models.items()]
    async with (
        RouterNode(settings, choose=choose_privately) as router,
        MockNode(router.node_address, "d0", models=served, layout=family.layout) as node,
        AsyncClient(router.client_address) as client,
    ):
        yield client, node


async def test_a_members_own_tokens_get_its_own_root(
    resolved: ResolvedCluster, cluster: tuple[AsyncClient, MockNode]
) -> None:
    client, node = cluster
    family = resolved.families["tiny"]
    shared = root_hash(family.tokenizer_digest, 16, "acme")
    own = family.block_root("acme", own_tokens_of="wider")
    for model, prompt, root in (
        ("base", "the text", shared),
        ("lora", "the text", shared),
        ("wider", "the text", shared),
        ("wider", "the <extra-59> text", own),
        ("lora", "the <extra-59> text", shared),  # plain letters to a model that has no such token
    ):
        await client.generate(model, prompt=prompt, max_tokens=5)
        execute = [one for one in node.received if isinstance(one, Execute)][-1]
        assert execute.root == root, (model, prompt)
