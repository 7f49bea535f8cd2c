"""Plain YAML data -> the typed tree, with errors that name the exact key.

msgspec's own errors elide the keys of mappings (``$.nodes[...].models[0]``) and never suggest a name, so this walks the data
beside the annotations of ``configs.schema`` and lets msgspec judge only the leaves. Called by ``configs.loader``.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from kvkin.kv.errors import ConfigError

StructType = TypeVar("StructType", bound=msgspec.Struct)

SIZE_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,127}")
_NAME_RULE = "a letter or digit, then letters, digits and . _ / : @ + -, at most 128 characters"


def convert_struct(data: object, cls: type[StructType], key: str = "") -> StructType:
    """``data`` as a ``cls``; ConfigError names the first key that does not fit and what is allowed there."""
    return msgspec.convert(_walk(data, cls, key), cls, strict=True)


def child_key(parent: str, child: str) -> str:
    """Path of ``child`` below ``parent``; a name that holds dots is quoted so that the path stays readable."""
    if "." in child or "[" in child:
        return f'{parent}["{child}"]'
    return f"{parent}.{child}" if parent else child


def suggest(name: str, allowed: Iterable[str]) -> str:
    """The names that are allowed, the closest to ``name`` first: the text of ConfigError.allowed."""
    names = list(allowed)
    close = difflib.get_close_matches(name, names, n=1)
    text = ", ".join(sorted(names)) or "nothing"
    return f"did you mean {close[0]!r}? one of: {text}" if close else text


def parse_size(text: str) -> int | None:
    """Bytes of a size such as "1GiB" or "1.5 MiB"; None if it is none."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2] not in SIZE_UNITS:
        return None
    size = float(match[1]) * SIZE_UNITS[match[2]]
    return int(size) if size == int(size) else None


def format_size(num_bytes: int) -> int | str:
    """The shortest spelling that :func:`parse_size` reads back: "1GiB", or the number itself."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes and num_bytes % SIZE_UNITS[unit] == 0:
            return f"{num_bytes // SIZE_UNITS[unit]}{unit}"
    return num_bytes


def is_size(annotation: Any) -> bool:
    """Whether the annotation is marked as a size in bytes (``schema.Bytes``)."""
    if typing.get_origin(annotation) is not Annotated:
        return False
    metas = [meta for meta in typing.get_args(annotation)[1:] if isinstance(meta, msgspec.Meta)]
    return any((meta.extra or {}).get("size") for meta in metas)


def field_types(cls: type[msgspec.Struct]) -> dict[str, Any]:
    """Field name -> annotation of a struct, constraints included."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {name: hints[name] for name in cls.__struct_fields__}


def _walk(value: object, annotation: Any, key: str) -> object:
    """``value`` with sizes as integers and tuples for lists; raises ConfigError where it does not fit ``annotation``."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return _walk_struct(value, annotation, key)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is dict:
        return _walk_mapping(value, arguments[1], key)
    if origin is tuple and arguments[-1] is Ellipsis:
        items = _expect_list(value, key, "a list")
        return [_walk(item, arguments[0], f"{key}[{index}]") for index, item in enumerate(items)]
    if origin is tuple:
        items = _expect_list(value, key, f"a list of {len(arguments)}")
        if len(items) != len(arguments):
            raise ConfigError(key, f"has {len(items)} entries", f"exactly {len(arguments)}")
        return [
            _walk(item, kind, f"{key}[{index}]")
            for index, (item, kind) in enumerate(zip(items, arguments, strict=True))
        ]
    if origin in (types.UnionType, typing.Union) and any(_is_struct(kind) for kind in arguments):
        return _walk_tagged(value, arguments, key)
    return _leaf(value, annotation, key)


def _walk_struct(value: object, cls: type[msgspec.Struct], key: str) -> dict[str, object]:
    fields = field_types(cls)
    data = _expect_mapping(value, key)
    tag_field = cls.__struct_config__.tag_field
    allowed = [*fields, *([tag_field] if tag_field else [])]
    for name in data:
        if name not in allowed:
            raise ConfigError(child_key(key, name), "unknown key", suggest(name, allowed))
    for field in msgspec.structs.fields(cls):
        if field.required and field.name not in data:
            raise ConfigError(child_key(key, field.name), "is missing", describe(fields[field.name]))
    return {
        name: item if name == tag_field else _walk(item, fields[name], child_key(key, name))
        for name, item in data.items()
    }


def _walk_mapping(value: object, kind: Any, key: str) -> dict[str, object]:
    data = _expect_mapping(value, key)
    for name in data:
        if not _NAME.fullmatch(name):
            raise ConfigError(child_key(key, name), f"{name!r} cannot be a name", _NAME_RULE)
    return {name: _walk(item, kind, child_key(key, name)) for name, item in data.items()}


def _walk_tagged(value: object, kinds: Iterable[Any], key: str) -> dict[str, object]:
    """One of several structs that a tag tells apart."""
    by_tag = {str(kind.__struct_config__.tag): kind for kind in kinds}
    tag_field = str(next(iter(by_tag.values())).__struct_config__.tag_field)
    data = _expect_mapping(value, key)
    tag = data.get(tag_field)
    if tag is None:
        raise ConfigError(child_key(key, tag_field), "is missing", suggest("", by_tag))
    if not isinstance(tag, str) or tag not in by_tag:
        raise ConfigError(child_key(key, tag_field), f"no such {tag_field}: {tag!r}", suggest(str(tag), by_tag))
    return _walk_struct(data, by_tag[tag], key)


def _leaf(value: object, annotation: Any, key: str) -> object:
    if is_size(annotation) and isinstance(value, str):
        size = parse_size(value)
        if size is None:
            raise ConfigError(key, f"{value!r} is no size", describe(annotation))
        value = size
    # msgspec would take 1 for True and the like only in lax mode; strict mode also keeps "5570" from being a number
    try:
        msgspec.convert(value, annotation, strict=True)
    except msgspec.ValidationError:
        raise ConfigError(key, f"cannot be {_show(value)}", describe(annotation, str(value))) from None
    return value


def describe(annotation: Any, given: str = "") -> str:
    """What an annotation allows, in words; ``given`` helps to suggest a name."""
    if is_size(annotation):
        return 'bytes from 0 on, as a number or as text such as "256MiB" (B, KiB, MiB, GiB, TiB)'
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        meta = next(item for item in arguments[1:] if isinstance(item, msgspec.Meta))
        return describe(arguments[0], given) + _bounds(meta)
    if origin is Literal:
        return suggest(given, [str(choice) for choice in arguments])
    if origin in (types.UnionType, typing.Union):
        return " or ".join(describe(kind, given) for kind in arguments)
    if origin is dict or _is_struct(annotation):
        return "a mapping"
    if origin is tuple:
        return "a list"
    words = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}
    return words.get(annotation, str(annotation))


def _bounds(meta: msgspec.Meta) -> str:
    if meta.min_length is not None or meta.max_length is not None:
        return f" of {meta.min_length or 0} to {meta.max_length} characters"
    low = f" above {meta.gt:g}" if meta.gt is not None else f" from {meta.ge:g}" if meta.ge is not None else ""
    return low + (f" to {meta.le}" if meta.le is not None else "")


def _is_struct(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)


def _expect_mapping(value: object, key: str) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise ConfigError(key or "(file)", f"cannot be {_show(value)}", "a mapping (key: value)")
    for name in value:
        if not isinstance(name, str):
            raise ConfigError(child_key(key, str(name)), f"the key {name!r} is not text", "a name; quote it if need be")
    return dict(value)


def _expect_list(value: object, key: str, allowed: str) -> list[object]:
    if not isinstance(value, list | tuple):
        raise ConfigError(key, f"cannot be {_show(value)}", allowed)
    return list(value)


def _show(value: object) -> str:
    """A value as an error shows it: short, and empty YAML values by their name."""
    if value is None:
        return "empty (null)"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
