"""Cluster files: what is refused, under which key, and that show_cluster gives back the same tree."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvkin.configs import checks, schema
from kvkin.configs.convert import format_size, parse_size
from kvkin.configs.loader import cluster_warnings, load_cluster, parse_cluster, show_cluster
from kvkin.kv.errors import ConfigError

CLUSTERS = Path(__file__).parents[2] / "configs" / "clusters"

GOOD = """
families:
  fam:
    base: base
    transition_layers: [2, 4]
    recompute_groups:
      - {receiver: tuned, group: [2, 5]}
    models:
      base: {checkpoint: models/base}
      tuned: {checkpoint: models/base, adapter: adapters/tuned}
      v2.5: {checkpoint: models/v2}
  other:
    base: alien
    models:
      alien: {checkpoint: models/alien}
nodes:
  router-0: {role: router, client_port: 5570, node_port: 5571}
  prefill-0: {role: prefill, port: 5580, models: [base], kv_bytes: 1GiB}
  decode-0: {role: decode, port: 5590, models: [base, v2.5]}
  decode-1: {role: decode, port: 0, models: [tuned]}
  decode-2: {role: decode, port: 0, models: [alien], e_bytes: 1048576}
  prefill-1: {role: prefill, port: 0, models: [alien]}
"""


def edited(**changes: Any) -> str:
    """GOOD with values set by dotted path (``__`` for the dots); None deletes."""
    data = yaml.safe_load(GOOD)
    for path, value in changes.items():
        *parents, last = path.split("__")
        target = data
        for name in parents:
            target = target[int(name)] if isinstance(target, list) else target.setdefault(name, {})
        if value is None:
            del target[last]
        else:
            target[last] = value
    return yaml.safe_dump(data, sort_keys=False)


def test_a_good_file_has_its_values_and_all_defaults() -> None:
    config = parse_cluster(GOOD, "good.yaml")
    family = config.families["fam"]
    assert family.recompute_groups[0].group == (2, 5)
    assert family.recompute_groups[0].sender == "*"
    assert config.prefill_nodes["prefill-0"].kv_bytes == 1 << 30
    assert config.decode_nodes["decode-2"].e_bytes == 1 << 20
    assert config.timeouts.lease_s == 15
    assert config.transport.backend == "ucx"
    assert config.family_of("tuned") == "fam"
    assert config.family_of("nobody") is None
    assert cluster_warnings(config) == []


# (what is wrong, text, exact key, a part of the message)
BROKEN: list[tuple[str, str, str, str]] = [
    ("a profile without a name", edited(families__fam__profiles=["a.json", " "]), "families.fam.profiles[1]", "empty"),
    ("profiles without a name", edited(families__fam__profiles=""), "families.fam.profiles", "a folder of profiles"),
    ("profiles as a mapping", edited(families__fam__profiles={"a": 1}), "families.fam.profiles", "text or a list"),
    ("a target of no time", edited(router__policy__ttft_slo_s=0), "router.policy.ttft_slo_s", "above 0"),
    ("a margin above all", edited(router__policy__live_margin=1.5), "router.policy.live_margin", "to 1"),
    ("no speed", edited(router__policy__default_pull_bytes_per_s=0), "router.policy.default_pull_bytes_per_s", "above 0"),
    ("empty file", "", "f.yaml", "empty"),
    ("only a comment", "# nothing\n", "f.yaml", "empty"),
    ("a list", "- 1\n", "f.yaml", "list"),
    ("no YAML", "nodes: [1, 2\nfamilies: {\n", "f.yaml", "line 2"),
    ("a tab", "nodes:\n\t- 1\n", "f.yaml", "line 2"),
    ("two documents", "a: 1\n---\nb: 2\n", "f.yaml", "line 2"),
    ("a key twice", GOOD + "nodes: {}\n", "nodes", "lines 16 and 23"),
    ("a nested key twice", "families:\n  a: {base: x}\n  a: {base: y}\n", "families.a", "lines 2 and 3"),
    ("a number as key", "1: 2\n", "1", "not text"),
    ("an alias in itself", "families: &a\n  b: *a\n", "families.b", "contains itself"),
    ("a python object", "families: !!python/object:os.system {}\n", "families", "tag"),
    ("a python name", "families: !!python/name:os.system ''\n", "f.yaml", "not YAML"),
    ("unknown key", edited(famlies={}), "famlies", "did you mean 'families'"),
    ("unknown family key", edited(families__fam__block=3), "families.fam.block", "did you mean 'block_size'"),
    ("unknown model key", edited(families__fam__models__base__lora="x"), "families.fam.models.base.lora", "adapter"),
    ("quoted path", edited(**{"families__fam__models__v2.5__x": 1}), 'families.fam.models["v2.5"].x', "unknown"),
    ("unknown node key", edited(**{"nodes__decode-0__thread": 1}), "nodes.decode-0.thread", "'threads'"),
    ("a router with models", edited(**{"nodes__router-0__models": ["base"]}), "nodes.router-0.models", "unknown key"),
    ("no such role", edited(**{"nodes__decode-0__role": "decoder"}), "nodes.decode-0.role", "did you mean 'decode'"),
    ("no role", edited(**{"nodes__decode-0__role": None}), "nodes.decode-0.role", "missing"),
    ("role is a list", edited(**{"nodes__decode-0__role": ["decode"]}), "nodes.decode-0.role", "decode"),
    ("no families", edited(families=None), "families", "missing"),
    ("families empty", edited(families={}), "families", "empty"),
    ("no nodes", edited(nodes=None), "nodes", "missing"),
    ("nodes are a list", edited(nodes=[1]), "nodes", "mapping"),
    ("a node is text", edited(**{"nodes__decode-0": "decode"}), "nodes.decode-0", "mapping"),
    ("a section is null", GOOD + "router:\n", "router", "empty (null)"),
    ("no port", edited(**{"nodes__decode-0__port": None}), "nodes.decode-0.port", "missing"),
    ("port as text", edited(**{"nodes__decode-0__port": "5590"}), "nodes.decode-0.port", "whole number"),
    ("port too high", edited(**{"nodes__decode-0__port": 65536}), "nodes.decode-0.port", "65535"),
    ("router port 0", edited(**{"nodes__router-0__client_port": 0}), "nodes.router-0.client_port", "from 1"),
    ("bool as number", edited(**{"nodes__decode-0__threads": True}), "nodes.decode-0.threads", "whole number"),
    ("fraction of a thread", edited(**{"nodes__decode-0__threads": 1.5}), "nodes.decode-0.threads", "whole number"),
    ("bad size", edited(**{"nodes__decode-0__kv_bytes": "1GB"}), "nodes.decode-0.kv_bytes", "GiB"),
    ("negative size", edited(**{"nodes__decode-0__kv_bytes": -1}), "nodes.decode-0.kv_bytes", "bytes from 0"),
    ("half a byte", edited(**{"nodes__decode-0__kv_bytes": "0.3B"}), "nodes.decode-0.kv_bytes", "no size"),
    ("no time", edited(timeouts__pull_s=0), "timeouts.pull_s", "above 0"),
    ("endless time", edited(timeouts__pull_s=float("inf")), "timeouts.pull_s", "above 0"),
    ("no backend", edited(transport__backend="nixl"), "transport.backend", "ucx"),
    ("no engine", edited(families__fam__engine="vlm"), "families.fam.engine", "did you mean 'vllm'"),
    ("no device", edited(families__fam__device="gpu"), "families.fam.device", "cuda"),
    ("no type", edited(families__fam__compute_dtype="fp16"), "families.fam.compute_dtype", "float16"),
    ("scope empty", edited(router__scope=""), "router.scope", "1 to 64 characters"),
    ("unknown policy key", edited(router__policy__bta=1), "router.policy.bta", "did you mean 'beta'"),
    ("base is no model", edited(families__fam__base="bass"), "families.fam.base", "did you mean 'base'"),
    ("no models", edited(families__fam__models={}), "families.fam.models", "empty"),
    ("no checkpoint", edited(families__fam__models__base={}), "families.fam.models.base.checkpoint", "missing"),
    ("blank checkpoint", edited(families__fam__models__base__checkpoint=" "), "families.fam.models.base.checkpoint", "empty"),
    ("bad model name", edited(families__fam__models={"a b": {"checkpoint": "x"}}), "families.fam.models.a b", "name"),
    ("one name in two families", edited(families__other__models__base={"checkpoint": "x"}), "families.other.models.base", "fam"),
    ("chunk and block", edited(families__fam__chunk_tokens=100), "families.fam.chunk_tokens", "multiple of 16"),
    ("too many transition layers", edited(families__fam__transition_layers=[1, 2, 4, 5]), "families.fam.transition_layers", "at most"),
    ("transition layer 0", edited(families__fam__transition_layers=[0, 2]), "families.fam.transition_layers[0]", "no E"),
    ("transition layers unordered", edited(families__fam__transition_layers=[4, 2]), "families.fam.transition_layers[1]", "order"),
    ("negative layer", edited(families__fam__transition_layers=[-1]), "families.fam.transition_layers[0]", "from 0"),
    ("group empty", edited(families__fam__recompute_groups__0__group=[4, 4]), "families.fam.recompute_groups[0].group", "no layer"),
    ("group backwards", edited(families__fam__recompute_groups__0__group=[4, 2]), "families.fam.recompute_groups[0].group", "start < stop"),
    ("group of three", edited(families__fam__recompute_groups__0__group=[1, 2, 3]), "families.fam.recompute_groups[0].group", "exactly 2"),
    ("group a number", edited(families__fam__recompute_groups__0__group=7), "families.fam.recompute_groups[0].group", "a list of 2"),
    ("group off the transition layers", edited(families__fam__recompute_groups__0__group=[3, 5]), "families.fam.recompute_groups[0].group[0]", "0, 2, 4"),
    ("group sender", edited(families__fam__recompute_groups__0__sender="bose"), "families.fam.recompute_groups[0].sender", "'base'"),
    ("group receiver", edited(families__fam__recompute_groups__0__receiver="alien"), "families.fam.recompute_groups[0].receiver", "tuned"),
    ("unknown model on a node", edited(**{"nodes__decode-0__models": ["base", "tunned"]}), "nodes.decode-0.models[1]", "'tuned'"),
    ("model twice on a node", edited(**{"nodes__decode-0__models": ["base", "base"]}), "nodes.decode-0.models[1]", "twice"),
    ("no model on a node", edited(**{"nodes__decode-0__models": []}), "nodes.decode-0.models", "empty"),
    ("models as text", edited(**{"nodes__decode-0__models": "base"}), "nodes.decode-0.models", "a list"),
    ("two families on a node", edited(**{"nodes__decode-0__models": ["base", "alien"]}), "nodes.decode-0.models[1]", "another family"),
    ("two families on a prefill node", edited(**{"nodes__prefill-0__models": ["base", "alien"]}), "nodes.prefill-0.models[1]", "family"),
    ("two nodes on a port", edited(**{"nodes__decode-0__port": 5580}), "nodes.decode-0.port", "nodes.prefill-0.port"),
    ("a node on the router's port", edited(**{"nodes__decode-0__port": 5571}), "nodes.decode-0.port", "router-0.node_port"),
    ("localhost is 127.0.0.1", edited(**{"nodes__decode-0": {"role": "decode", "host": "localhost", "port": 5580, "models": ["base"]}}), "nodes.decode-0.port", "taken"),
    ("the router against itself", edited(**{"nodes__router-0__node_port": 5570}), "nodes.router-0.node_port", "client_port"),
    ("no router", edited(**{"nodes__router-0": None}), "nodes", "router"),
    ("an open address", edited(**{"nodes__decode-0__host": "10.0.0.1"}), "nodes.decode-0.host", "transport.insecure"),
    ("an open name", edited(**{"nodes__decode-0__host": "gpu-7"}), "nodes.decode-0.host", "loopback"),
    ("an open bind", edited(**{"nodes__router-0__bind": "0.0.0.0"}), "nodes.router-0.bind", "transport.insecure"),
    ("a wildcard host", edited(transport__insecure=True, **{"nodes__decode-0__host": "0.0.0.0"}), "nodes.decode-0.host", "bind"),
    ("host with port", edited(**{"nodes__decode-0__host": "127.0.0.1:80"}), "nodes.decode-0.host", "without a port"),
    ("host with scheme", edited(**{"nodes__decode-0__host": "tcp://127.0.0.1"}), "nodes.decode-0.host", "no address"),
    ("node name with a slash", edited(**{"nodes__a/b": {"role": "router"}}), "nodes.a/b", "node name"),
    ("more than all requests", edited(drift__share=1.5), "drift.share", "from 0 to 1"),
    ("a share in words", edited(drift__share="all"), "drift.share", "number"),
    ("no token to compare", edited(drift__tokens=0), "drift.tokens", "from 1"),
    ("a bound of nothing", edited(drift__max_divergence=0), "drift.max_divergence", "above 0"),
    ("a folder to record in", edited(drift__record="prompts"), "drift.record", "true or false"),
    ("records of negative size", edited(drift__record_bytes=-1), "drift.record_bytes", "bytes from 0"),
    ("unknown drift key", edited(drift__min_sample=4), "drift.min_sample", "did you mean 'min_samples'"),
    ("dead before a heartbeat", edited(timeouts__node_dead_s=1), "timeouts.node_dead_s", "heartbeat"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "key", "part"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_what_is_wrong_is_named_by_its_key(text: str, key: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_cluster(text, "f.yaml")
    assert caught.value.key == key
    assert part in str(caught.value)
    assert caught.value.allowed
    assert "\n" not in str(caught.value)


def test_errors_tell_the_line() -> None:
    with pytest.raises(ConfigError, match=r"nodes\.decode-1\.models\[0\]: no model named 'tunned', line 20 "):
        parse_cluster(GOOD.replace("[tuned]", "[tunned]"), "f.yaml")
    with pytest.raises(ConfigError, match=r"nodes\.decode-1\.port: is missing, line 20 "):
        parse_cluster(GOOD.replace("decode-1: {role: decode, port: 0,", "decode-1: {role: decode,"), "f.yaml")


def test_open_addresses_are_allowed_when_they_are_asked_for() -> None:
    open_hosts = {
        "nodes__decode-0__host": "gpu-7",
        "nodes__router-0__bind": "0.0.0.0",
        "nodes__prefill-0__host": "fe80::1",
    }
    config = parse_cluster(edited(transport__insecure=True, **open_hosts), "f.yaml")
    assert config.nodes["router-0"].bind_host == "0.0.0.0"
    assert config.nodes["decode-0"].bind_host == "gpu-7"


def test_one_port_on_two_hosts_and_any_port_are_no_conflict() -> None:
    parse_cluster(edited(**{"nodes__decode-0__host": "127.0.0.2", "nodes__decode-0__port": 5580}), "f.yaml")


def test_merge_keys_work_and_the_own_key_wins() -> None:
    text = GOOD.replace(
        "  decode-0: {role: decode, port: 5590,", "  decode-0: {<<: {port: 1, threads: 3}, role: decode, port: 5590,"
    )
    node = parse_cluster(text, "f.yaml").decode_nodes["decode-0"]
    assert (node.port, node.threads) == (5590, 3)


def test_oddities_are_warned_about() -> None:
    text = edited(
        **{
            "nodes__decode-1": None,
            "nodes__prefill-1": None,
            "families__fam__recompute_groups": [{"group": [2, 5]}, {"sender": "base", "group": [0, 2]}],
        }
    )
    warnings = cluster_warnings(parse_cluster(text, "f.yaml"))
    assert [warning.split(":")[0] for warning in warnings] == [
        "families.fam.models.tuned",
        "families.fam.recompute_groups[1]",
        "families.other",
    ]


def test_unreadable_files(tmp_path: Path) -> None:
    missing, binary, large = tmp_path / "missing.yaml", tmp_path / "binary.yaml", tmp_path / "large.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with large.open("wb") as file:
        file.truncate(1 << 30)
    for path, part in (
        (missing, "no such file"),
        (tmp_path, "cannot be read"),
        (binary, "UTF-8"),
        (large, "no cluster"),
    ):
        with pytest.raises(ConfigError, match=part) as caught:
            load_cluster(path)
        assert caught.value.key == str(path)


@pytest.mark.parametrize("file", sorted(CLUSTERS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_clusters_are_good(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlx5_0").touch()  # they are for hosts with RDMA
    monkeypatch.setattr(checks, "RDMA_DEVICES", tmp_path)
    config = load_cluster(file)
    assert cluster_warnings(config) == []
    assert parse_cluster(show_cluster(config), "shown") == config


def test_every_field_has_a_comment() -> None:
    lines = Path(schema.__file__).read_text(encoding="utf-8").splitlines()
    sections = ("RouterConfig", "ClusterConfig")  # whose other fields are sections with a docstring of their own
    current = ""
    for previous, line in itertools.pairwise(lines):
        current = line.split()[1].split("(")[0] if line.startswith("class ") else current
        field = line.strip().split(":")[0]
        if line.startswith("    ") and not line.startswith("     ") and field.isidentifier() and ":" in line:
            documented = previous.strip().startswith("#") or "_stop_" in field
            assert documented or current in sections, f"{current}.{field} has no comment"


# Round trip ----------------------------------------------------------------------------------------------------------

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,12}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda text: bool(text.strip())
)
sizes = st.one_of(st.integers(0, 2**60), st.integers(0, 2**20).map(lambda n: n << 20))
seconds = st.floats(2**-20, 1e6)


@st.composite
def clusters(draw: st.DrawFn) -> schema.ClusterConfig:
    model_names = draw(st.lists(names, min_size=1, max_size=4, unique=True))
    block_size = draw(st.integers(1, 64))
    layers = tuple(sorted(draw(st.sets(st.integers(1, 40), max_size=3))))
    starts = st.sampled_from((0, *layers))
    group = st.builds(
        lambda start, width, sender: schema.RecomputeGroup(sender=sender, group=(start, start + width)),
        starts,
        st.integers(1, 9),
        st.sampled_from(("*", *model_names)),
    )
    family = schema.FamilyConfig(
        base=model_names[0],
        models={
            name: schema.ModelConfig(checkpoint=draw(texts), adapter=draw(st.none() | texts)) for name in model_names
        },
        device=draw(st.sampled_from(["auto", "cpu", "cuda"])),
        block_size=block_size,
        chunk_tokens=block_size * draw(st.integers(1, 9)),
        transition_layers=layers,
        recompute_groups=tuple(draw(st.lists(group, max_size=3))),
        max_context_tokens=draw(st.none() | st.integers(1, 2**31)),
    )
    worker = draw(st.sampled_from([schema.PrefillNode, schema.DecodeNode]))
    node_names = draw(st.lists(names, min_size=2, max_size=2, unique=True))
    return schema.ClusterConfig(
        state_dir=draw(texts),
        families={draw(names): family},
        nodes={
            node_names[0]: schema.RouterNode(),
            node_names[1]: worker(port=draw(st.integers(1, 5000)), models=(model_names[-1],), kv_bytes=draw(sizes)),
        },
        drift=schema.DriftConfig(
            share=draw(st.floats(0, 1)),
            idle_s=draw(seconds),
            max_divergence=draw(st.none() | st.floats(2**-10, 20)),
            record=draw(st.booleans()),
            record_bytes=draw(sizes),
        ),
        router=schema.RouterConfig(policy=schema.PolicyConfig(beta=draw(st.floats(0, 1000))), scope=draw(texts)),
        limits=schema.LimitsConfig(max_request_bytes=draw(sizes)),
        timeouts=schema.TimeoutsConfig(pull_s=draw(seconds), lease_s=draw(seconds)),
        transport=schema.TransportConfig(insecure=draw(st.booleans()), pull_window_bytes=draw(sizes)),
    )


# shrinking would parse YAML for minutes; the tree that fails is small enough to read
@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(clusters())
def test_show_loads_back_to_an_equal_tree(config: schema.ClusterConfig) -> None:
    assert parse_cluster(show_cluster(config), "shown") == config


@given(st.integers(0, 2**60))
def test_sizes_round_trip(num_bytes: int) -> None:
    shown = format_size(num_bytes)
    assert (shown if isinstance(shown, int) else parse_size(shown)) == num_bytes


def test_ucx_between_hosts_without_rdma_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_cluster(CLUSTERS / "two-hosts.yaml")
    monkeypatch.setattr(checks, "RDMA_DEVICES", tmp_path)
    (warning,) = cluster_warnings(config)
    assert warning.startswith("transport.backend: ucx between hosts needs RDMA")
    assert "tcp" in warning
    (tmp_path / "mlx5_0").touch()
    assert cluster_warnings(config) == []
    local = load_cluster(CLUSTERS / "local.yaml")
    (tmp_path / "mlx5_0").unlink()
    assert cluster_warnings(local) == [], "shared memory serves one host"
    tcp = msgspec.structs.replace(config, transport=msgspec.structs.replace(config.transport, backend="tcp"))
    assert cluster_warnings(tcp) == []


def test_prefill_node_without_the_base_is_warned_of() -> None:
    config = load_cluster(CLUSTERS / "local.yaml")
    lacking = msgspec.structs.replace(config.nodes["prefill-0"], models=("smollm2-135m-qa",))
    (warning,) = cluster_warnings(msgspec.structs.replace(config, nodes=config.nodes | {"prefill-0": lacking}))
    assert warning.startswith("nodes.prefill-0.models: lacks smollm2-135m-instruct")
