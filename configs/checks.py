"""Checks across keys of a cluster file that need no checkpoint: references, ports, addresses, layers.

Called by ``configs.loader`` once the tree is typed; ``configs.families`` checks what only the checkpoints can tell.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path

from kvkin.configs.attached import check_attached
from kvkin.configs.convert import child_key, suggest
from kvkin.configs.schema import ClusterConfig, FamilyConfig, NodeConfig, RouterNode, TimeoutsConfig, local_path
from kvkin.configs.vllm_rules import check_vllm, vllm_warnings
from kvkin.kv.errors import ConfigError

RDMA_DEVICES = Path("/sys/class/infiniband")
"""One entry an RDMA device of this host (Linux)."""
_WILDCARDS = ("0.0.0.0", "::", "*")


def check_cluster(config: ClusterConfig) -> None:
    """Raise ConfigError for the first contradiction; see :func:`cluster_warnings` for what is only odd."""
    if not config.families:
        raise ConfigError("families", "is empty", "at least one family")
    for name, family in config.families.items():
        _check_family(child_key("families", name), family)
    _check_model_names(config)
    for name, node in config.nodes.items():
        _check_node(config, name, node)
    if not config.routers:
        raise ConfigError("nodes", "no node has the role router", "at least one router")
    _check_ports(config)
    _check_timeouts(config.timeouts)
    check_vllm(config)
    check_attached(config)


def cluster_warnings(config: ClusterConfig) -> list[str]:
    """What works but is probably not meant, one sentence each."""
    warnings = []
    served = {model for node in config.decode_nodes.values() for model in node.models}
    served |= {model for node in config.attached.values() for model in node.models}
    prefilled = {config.family_of(model) for node in config.prefill_nodes.values() for model in node.models}
    warnings += _wire_warnings(config) + vllm_warnings(config)
    for name, prefill in config.prefill_nodes.items():
        family_name = config.family_of(prefill.models[0])
        base = "" if family_name is None else config.families[family_name].base
        if base and base not in prefill.models:
            key = f"{child_key('nodes', name)}.models"
            warnings.append(
                f"{key}: lacks {base}, the family's base, which is all that prefill nodes are ordered to compute"
            )
    for name, family in config.families.items():
        for model in family.models:
            if model not in served:
                key = child_key(child_key(child_key("families", name), "models"), model)
                warnings.append(f"{key}: no decode node serves this model, so clients cannot ask it")
        if name not in prefilled:
            key = child_key("families", name)
            warnings.append(f"{key}: no prefill node; contexts are shared only between the nodes that answer")
        key = child_key(child_key("families", name), "recompute_groups")
        pairs = [(entry.sender, entry.receiver) for entry in family.recompute_groups]
        warnings += [
            f"{key}[{index}]: never used, as an earlier entry covers every pair it names"
            for index, pair in enumerate(pairs)
            if any(_covers(earlier, pair) for earlier in pairs[:index])
        ]
    return warnings


def _wire_warnings(config: ClusterConfig) -> list[str]:
    """``ucx`` between hosts needs RDMA; whether this host has it says the kernel, of the others nothing is known."""
    workers = {
        node.host
        for node in (config.prefill_nodes | config.decode_nodes | config.attached).values()
        if not is_loopback(node.host)
    }
    if config.transport.backend != "ucx" or len(workers) < 2 or any(RDMA_DEVICES.glob("*")):
        return []
    return [
        (
            "transport.backend: ucx between hosts needs RDMA (InfiniBand or RoCE), and this host has no such device; "
            "pairs of hosts without it refuse to pull from each other: tcp serves them"
        )
    ]


def check_profiles_folder(key: str, profiles: str | tuple[str, ...]) -> None:
    """Raise ConfigError under ``key`` for a folder of profiles that is not there: a name typed wrong would switch all of them off.

    Single files may be missing or damaged (that costs their pair its profile), a folder may be empty. Called where profiles are
    read, for routers and ``kvkin config check``: nodes have no use for them.
    """
    if not isinstance(profiles, str):
        return
    folder = local_path(profiles)
    if folder.suffix == ".json":
        return
    allowed = "a folder (`kvkin profile` fills it), a list of files, or no such key"
    try:
        if not folder.is_file():
            next(folder.iterdir(), None)
    except FileNotFoundError:
        raise ConfigError(key, f"no such folder: {folder}", allowed) from None
    except OSError as error:
        raise ConfigError(key, f"{folder} cannot be read: {error.strerror}", allowed) from None


def _covers(earlier: tuple[str, str], later: tuple[str, str]) -> bool:
    return all(wide in ("*", narrow) for wide, narrow in zip(earlier, later, strict=True))


def _check_family(key: str, family: FamilyConfig) -> None:
    if not family.models:
        raise ConfigError(f"{key}.models", "is empty", "at least the base model")
    if family.base not in family.models:
        raise ConfigError(f"{key}.base", f"no model named {family.base!r}", suggest(family.base, family.models))
    for name, model in family.models.items():
        model_key = child_key(f"{key}.models", name)
        for field, text in (("checkpoint", model.checkpoint), ("adapter", model.adapter)):
            if text is not None and not text.strip():
                raise ConfigError(f"{model_key}.{field}", "is empty", "a path or a hub id (org/name)")
    if family.chunk_tokens % family.block_size:
        raise ConfigError(
            f"{key}.chunk_tokens",
            f"{family.chunk_tokens} is not a multiple of block_size {family.block_size}",
            f"a multiple of {family.block_size}",
        )
    _check_layers(key, family)
    folder = isinstance(family.profiles, str)
    paths = (family.profiles,) if isinstance(family.profiles, str) else family.profiles
    for index, path in enumerate(paths):
        if not path.strip():
            where = f"{key}.profiles" if folder else f"{key}.profiles[{index}]"
            raise ConfigError(where, "is empty", "a folder of profiles, or a list of their files")


def _check_layers(key: str, family: FamilyConfig) -> None:
    layers = family.transition_layers
    if len(layers) > family.max_transition_layers:
        raise ConfigError(
            f"{key}.transition_layers",
            f"{len(layers)} layers",
            f"at most max_transition_layers = {family.max_transition_layers}: each costs memory on every node",
        )
    for index, layer in enumerate(layers):
        if layer == 0:
            raise ConfigError(f"{key}.transition_layers[{index}]", "layer 0 needs no E", "layers from 1 on")
        if index and layer <= layers[index - 1]:
            raise ConfigError(f"{key}.transition_layers[{index}]", f"{layer} is not in order", "ascending, no repeats")
    for index, entry in enumerate(family.recompute_groups):
        entry_key = f"{key}.recompute_groups[{index}]"
        for field, name in (("sender", entry.sender), ("receiver", entry.receiver)):
            if name != "*" and name not in family.models:
                raise ConfigError(
                    f"{entry_key}.{field}", f"no model named {name!r}", suggest(name, ["*", *family.models])
                )
        start, stop = entry.group
        if start >= stop:
            raise ConfigError(
                f"{entry_key}.group", f"[{start}, {stop}) holds no layer", "[start, stop) with start < stop"
            )
        if start and start not in layers:
            allowed = ", ".join(map(str, (0, *layers)))
            raise ConfigError(
                f"{entry_key}.group[0]", f"{start} is not a transition layer, so no node keeps its E", allowed
            )


def _check_model_names(config: ClusterConfig) -> None:
    """Clients name a model without its family, so a name may stand only once in the cluster."""
    owners: dict[str, str] = {}
    for family_name, family in config.families.items():
        for model in family.models:
            if model in owners:
                key = child_key(child_key(child_key("families", family_name), "models"), model)
                raise ConfigError(key, f"the family {owners[model]} has a model of this name", "a name of its own")
            owners[model] = family_name


def _check_node(config: ClusterConfig, name: str, node: NodeConfig) -> None:
    key = child_key("nodes", name)
    if "/" in name or ":" in name:
        raise ConfigError(key, f"{name!r} cannot be a node name: it names files", "letters, digits and . _ @ + -")
    for field, host in (("host", node.host), ("bind", node.bind)):
        if host is None:
            continue
        if not host.strip() or any(letter in host for letter in " /") or host.count(":") == 1:
            raise ConfigError(f"{key}.{field}", f"{host!r} is no address", "a host name or IP address, without a port")
        if field == "host" and host in _WILDCARDS:
            raise ConfigError(
                f"{key}.host", f"nobody can reach {host!r}", "the node's own address; bind takes a wildcard"
            )
        if not is_loopback(host) and not config.transport.insecure:
            raise ConfigError(
                f"{key}.{field}",
                f"{host!r} is not a loopback address, and nothing is encrypted or authenticated yet",
                "127.0.0.1, ::1, localhost, or transport.insecure: true on a network that you trust",
            )
    if isinstance(node, RouterNode):
        return
    if not node.models:
        raise ConfigError(f"{key}.models", "is empty", suggest("", _all_models(config)))
    families: dict[str, str] = {}
    for index, model in enumerate(node.models):
        family = config.family_of(model)
        if family is None:
            raise ConfigError(
                f"{key}.models[{index}]", f"no model named {model!r}", suggest(model, _all_models(config))
            )
        if model in node.models[:index]:
            raise ConfigError(f"{key}.models[{index}]", f"{model!r} stands here twice", "each model once")
        families.setdefault(family, model)
        if len(families) > 1:
            allowed = f"models of {next(iter(families))} only, as a node's memory has one layout"
            raise ConfigError(f"{key}.models[{index}]", f"{model!r} is of another family, {family}", allowed)


def _all_models(config: ClusterConfig) -> list[str]:
    return [model for family in config.families.values() for model in family.models]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address; a name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _addresses(config: ClusterConfig) -> Iterator[tuple[str, str, int]]:
    """(key, host, port) of every fixed port."""
    for name, node in config.nodes.items():
        key = child_key("nodes", name)
        host = "127.0.0.1" if node.host == "localhost" else node.host
        if isinstance(node, RouterNode):
            yield f"{key}.client_port", host, node.client_port
            yield f"{key}.node_port", host, node.node_port
        else:
            if node.port:
                yield f"{key}.port", host, node.port
            if node.data_port:
                yield f"{key}.data_port", host, node.data_port


def _check_ports(config: ClusterConfig) -> None:
    taken: dict[tuple[str, int], str] = {}
    for key, host, port in _addresses(config):
        if (host, port) in taken:
            raise ConfigError(key, f"{host}:{port} is taken by {taken[host, port]}", "a port of its own on this host")
        taken[host, port] = key


def _check_timeouts(timeouts: TimeoutsConfig) -> None:
    if timeouts.node_dead_s < 2 * timeouts.heartbeat_s:
        raise ConfigError(
            "timeouts.node_dead_s",
            f"{timeouts.node_dead_s:g} s would bury a node that missed one heartbeat ({timeouts.heartbeat_s:g} s)",
            f"at least {2 * timeouts.heartbeat_s:g}, twice heartbeat_s",
        )
