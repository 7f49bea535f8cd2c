"""Cluster files: YAML text -> checked, typed tree, and back.

Every command and every node calls :func:`load_cluster` once at start. Whatever is wrong becomes a ConfigError with the path of
the key, its line, and what is allowed there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml

from kvkin.configs.checks import check_cluster, cluster_warnings
from kvkin.configs.convert import child_key, convert_struct, field_types, format_size, is_size
from kvkin.configs.schema import ClusterConfig
from kvkin.kv.errors import ConfigError

__all__ = ["cluster_warnings", "load_cluster", "parse_cluster", "show_cluster"]

# A cluster file is typed by hand; something larger is another file given by mistake.
MAX_FILE_BYTES = 4 << 20
_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


def load_cluster(path: Path) -> ClusterConfig:
    """The cluster that the file ``path`` describes; ConfigError if it cannot be read or used."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ConfigError(str(path), f"{size} bytes are no cluster file", f"at most {MAX_FILE_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(str(path), "no such file", "a cluster file such as configs/clusters/local.yaml") from None
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), f"byte {error.start} is not UTF-8", "YAML text in UTF-8") from None
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}", "a readable file") from None
    return parse_cluster(text, str(path))


def parse_cluster(text: str, source: str) -> ClusterConfig:
    """The cluster that YAML ``text`` describes; ``source`` names it in errors about the file as a whole."""
    lines: dict[str, int] = {}
    data = _read_yaml(text, source, lines)
    if data is None:
        raise ConfigError(source, "the file is empty", "a mapping with families and nodes")
    if not isinstance(data, dict):
        raise ConfigError(source, f"holds a {type(data).__name__}", "a mapping with families and nodes")
    try:
        config = convert_struct(data, ClusterConfig)
        check_cluster(config)
    except ConfigError as error:
        line = _line_of(error.key, lines)
        if line is None:
            raise
        raise ConfigError(error.key, f"{error.problem}, line {line}", error.allowed) from None
    return config


def show_cluster(config: ClusterConfig) -> str:
    """YAML of ``config`` with all defaults filled in; parses back to an equal tree."""
    return yaml.dump(
        _plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None
    )


class _Dumper(yaml.SafeDumper):
    """Writes text with Unicode line breaks in double quotes: PyYAML's other styles turn those into plain newlines."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _represent_text)


def _plain(value: Any, annotation: Any = None) -> Any:
    """Builtins for YAML, sizes in readable units."""
    if isinstance(value, msgspec.Struct):
        tag_field, tag = value.__struct_config__.tag_field, value.__struct_config__.tag
        tagged = {tag_field: tag} if tag_field else {}
        return tagged | {name: _plain(getattr(value, name), kind) for name, kind in field_types(type(value)).items()}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return format_size(value) if is_size(annotation) else value


def _read_yaml(text: str, source: str, lines: dict[str, int]) -> Any:
    """Plain data of one YAML document; ``lines`` receives key path -> line. Repeated keys are refused, not merged."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        return None if node is None else _build(loader, node, "", lines, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(source, f"not YAML{where}: {error.problem or error.context}", "YAML") from None
    except yaml.YAMLError as error:
        raise ConfigError(source, f"not YAML: {error}", "YAML") from None
    finally:
        loader.dispose()


def _build(loader: yaml.SafeLoader, node: yaml.Node, key: str, lines: dict[str, int], parents: tuple[int, ...]) -> Any:
    """The value of a YAML node; PyYAML's own constructor would silently keep the last of two equal keys."""
    lines.setdefault(key, node.start_mark.line + 1)
    if id(node) in parents:
        raise ConfigError(key, f"an alias contains itself, line {node.start_mark.line + 1}", "data without loops")
    if not isinstance(node, yaml.ScalarNode) and node.tag not in _PLAIN_TAGS:
        raise ConfigError(key, f"has the tag {node.tag}, line {node.start_mark.line + 1}", "plain mappings and lists")
    parents = (*parents, id(node))
    if isinstance(node, yaml.SequenceNode):
        return [_build(loader, item, f"{key}[{index}]", lines, parents) for index, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node)
    _refuse_repeats(loader, node, key)
    loader.flatten_mapping(node)  # "<<" merges; what the mapping says itself stands last and wins
    data: dict[Any, Any] = {}
    for name_node, value_node in node.value:
        name = _build(loader, name_node, key, lines, parents)
        if not isinstance(name, str):
            line = name_node.start_mark.line + 1
            problem = f"the key {name!r} is not text, line {line}"
            raise ConfigError(child_key(key, str(name)), problem, "a name; put it in quotes")
        path = child_key(key, name)
        lines[path] = name_node.start_mark.line + 1
        data[name] = _build(loader, value_node, path, lines, parents)
    return data


def _refuse_repeats(loader: yaml.SafeLoader, node: yaml.MappingNode, key: str) -> None:
    seen: dict[str, int] = {}
    for name_node, _ in node.value:
        if not isinstance(name_node, yaml.ScalarNode) or name_node.value == "<<":
            continue
        line = name_node.start_mark.line + 1
        if name_node.value in seen:
            first = seen[name_node.value]
            raise ConfigError(child_key(key, name_node.value), f"stands in lines {first} and {line}", "each key once")
        seen[name_node.value] = line


def _line_of(key: str, lines: dict[str, int]) -> int | None:
    """Line of a key, or of the nearest key above it that the file has (a missing key has none of its own)."""
    while key:
        if key in lines:
            return lines[key]
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return None
