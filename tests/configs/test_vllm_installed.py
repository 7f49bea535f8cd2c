"""The arguments read from the installed vLLM's source are those that its dataclass has. Imports vllm: half a minute."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import pytest

from kvkin.configs.vllm_arguments import read_arguments
from kvkin.configs.vllm_install import installed_vllm
from kvkin.configs.vllm_rules import LIMITED, REFUSED

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def engine_args() -> Any:
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs


def test_names_and_defaults_are_those_of_the_dataclass(engine_args: Any) -> None:
    vllm = installed_vllm()
    assert vllm is not None
    arguments = read_arguments(vllm.folder)
    assert arguments is not None
    fields = {field.name: field for field in dataclasses.fields(engine_args) if not field.name.startswith("_")}
    assert set(arguments.names) == set(fields)
    refused, unknown = [], []
    for name, field in fields.items():
        kind = arguments.type_of(name)
        unknown += [name] if kind.anything else []
        made = field.default_factory is not dataclasses.MISSING
        default = field.default_factory() if made else field.default
        if default is dataclasses.MISSING:
            continue
        if isinstance(default, enum.Enum):
            default = default.name
        elif isinstance(default, set | frozenset | tuple):
            default = list(default)
        elif dataclasses.is_dataclass(default) or isinstance(default, Mapping):
            default = {}  # what a file has in its place
        # max_model_len and a few others have None for "not said", whatever their type says
        refused += [] if default is None or kind.takes(default) else [(name, default, kind.words())]
    assert refused == []
    # a type that cannot be followed takes anything; few may be
    assert unknown == []


def test_what_kvkin_refuses_or_limits_is_an_argument_of_this_version(engine_args: Any) -> None:
    names = {field.name for field in dataclasses.fields(engine_args)}
    assert sorted(set(REFUSED) - names) == []
    assert sorted(set(LIMITED) - names) == []
