"""A plain ``vllm serve`` in a family: what its command line says to kvkin's connector, and what its scheduler side and its link to the
family say to each other. Plain data, no vllm, no torch.

The link (``decode_nodes/attached.py``) runs on a thread of its own beside vLLM's scheduler: it talks to routers and to other nodes, and
owns the server's arena. It is found by name, because this room knows nothing of nodes.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from kvkin.configs.convert import child_key, convert_struct, suggest
from kvkin.configs.loader import load_cluster
from kvkin.configs.schema import AttachedNode, ClusterConfig, FamilyConfig
from kvkin.kv.errors import ConfigError
from kvkin.kv.layout import KVLayout
from kvkin.kv.plan import ReusePlan
from kvkin.kv.provenance import Provenance
from kvkin.transport.arena import ArenaDescription, Place
from kvkin.transport.messages import Reuse

LINK = "kvkin.decode_nodes.attached:open_link"
WEIGHTS = "kvkin.decode_nodes.attached_models:check_weights"
EXTRA = "kv_connector_extra_config"
_KEYS = ("config", "node", "reuse", "max_loss")


class Wishes(msgspec.Struct, frozen=True):
    """What a request allows, as in ``generate`` (docs/protocol.md): the server's, or its own (``kv_transfer_params: {kvkin: ...}``)."""

    reuse: Reuse = Reuse.BOUNDED
    max_loss: float = 0.05
    publish: bool = True
    share_hint: float = -1.0


@dataclass(frozen=True)
class ServingOptions:
    """``kv_connector_extra_config`` of an attached server, read. ``path`` is the cluster file."""

    path: Path
    config: ClusterConfig
    name: str
    node: AttachedNode
    family_name: str
    family: FamilyConfig
    wishes: Wishes


def serving_options(extra: Mapping[str, Any]) -> ServingOptions:
    """Read ``kv_connector_extra_config``. Raises ConfigError."""
    for key in extra:
        if key not in _KEYS:
            raise ConfigError(f"{EXTRA}.{key}", "no such key", suggest(key, _KEYS))
    for key, what in (("config", "the cluster file"), ("node", "the server's name in the cluster file")):
        if not isinstance(extra.get(key), str) or not extra[key].strip():
            raise ConfigError(f"{EXTRA}.{key}", "is missing" if key not in extra else f"cannot be {extra[key]!r}", what)
    path, name = Path(extra["config"]).expanduser(), str(extra["node"])
    config = load_cluster(path)
    node = config.nodes.get(name)
    if not isinstance(node, AttachedNode):
        problem = f"{path} has no node {name!r} of role attached"
        raise ConfigError(f"{EXTRA}.node", problem, ", ".join(config.attached) or "one with role: attached")
    family_name = config.family_of(node.models[0])
    assert family_name is not None, "the loader checks that node models exist"
    wishes = wishes_of({key: extra[key] for key in ("reuse", "max_loss") if key in extra}, Wishes(), EXTRA)
    return ServingOptions(path, config, name, node, family_name, config.families[family_name], wishes)


def wishes_of(given: object, default: Wishes, key: str) -> Wishes:
    """``default`` with what ``given`` (a JSON object) says in its place. Raises ConfigError below ``key``."""
    if not isinstance(given, Mapping):
        raise ConfigError(key, f"cannot be {given!r}", "an object")
    if given.get("reuse", default.reuse) not in list(Reuse):
        raise ConfigError(child_key(key, "reuse"), f"cannot be {given['reuse']!r}", suggest(str(given["reuse"]), Reuse))
    wishes = convert_struct({**msgspec.to_builtins(default), **given}, Wishes, key)
    if not (math.isfinite(wishes.max_loss) and wishes.max_loss >= 0):
        raise ConfigError(child_key(key, "max_loss"), f"cannot be {wishes.max_loss}", "a finite number, at least 0")
    if not math.isfinite(wishes.share_hint):
        raise ConfigError(child_key(key, "share_hint"), f"cannot be {wishes.share_hint}", "a finite number")
    return wishes


@contextmanager
def clear_refusal() -> Iterator[None]:
    """Around what refuses a server's configuration: one line that stands by itself, as vLLM surrounds what it raises by a lot."""
    try:
        yield
    except ConfigError as error:
        print(f"kvkin: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        raise


def taps_of(extra: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers whose entering hidden states a server with this ``kv_connector_extra_config`` keeps. Raises ConfigError."""
    if "taps" in extra:  # a node's own engine (launch.py)
        return tuple(extra["taps"])
    return serving_options(extra).family.transition_layers


# --- from the scheduler side to the link --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A request that vLLM has taken. ``key`` is vLLM's name for it."""

    key: str
    model: str
    token_ids: tuple[int, ...]
    wishes: Wishes


class Covered(Protocol):
    """Of which tokens hidden states are kept."""

    def has(self, layer: int, start: int, stop: int) -> bool: ...


# --- from the link to the scheduler side --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanReady:
    """The plan of a request; ``provenance`` is that of what it leaves. ``publishable``: others may be told of it at its end."""

    key: str
    plan: ReusePlan
    provenance: Provenance
    publishable: bool


@dataclass(frozen=True)
class PartsArrived:
    """KV of one (chunk, layer) of a plan, or its E with layer -1, lies in the arena: (first token, whole blocks from there on)."""

    key: str
    chunk: int
    layer: int
    parts: tuple[tuple[int, Place], ...]


@dataclass(frozen=True)
class SourcesFailed:
    """What is missing of a plan does not come any more."""

    key: str
    why: str


@dataclass(frozen=True)
class StoreWanted:
    """Copy whole blocks of a request, of tokens from ``start`` on, into ``slots`` of the arena: KV of ``layers``, or E entering
    ``e_layer``. Answered by ``Link.stored(ticket)``."""

    key: str
    ticket: int
    start: int
    slots: tuple[int, ...]
    layers: Sequence[int] = ()
    e_layer: int | None = None


@dataclass(frozen=True)
class Published:
    """Nothing of a request that has ended is read any more."""

    key: str


LinkEvent = PlanReady | PartsArrived | SourcesFailed | StoreWanted | Published


class Link(Protocol):
    """All methods may be called from vLLM's thread, return at once and never raise."""

    layout: KVLayout
    chunk_tokens: int
    transition_layers: tuple[int, ...]
    arena: ArenaDescription
    """Where pulled blocks land and stored ones go."""

    @property
    def alive(self) -> bool:
        """Whether anything comes of what is asked; False once the link has failed or was closed."""

    def take(self) -> LinkEvent | None:
        """The next event, None if there is none now."""

    def model_of(self, lora: tuple[str, str] | None) -> str | None:
        """Name of the model that requests with the adapter (name, path) have, or those without one; None: none of this node's."""

    def ask(self, question: Question) -> None:
        """Find a plan and start its pulls; answered by ``PlanReady`` within ``timeouts.plan_s``."""

    def unneeded(self, key: str) -> None:
        """vLLM has the KV of the plan itself, or computes it: stop pulling."""

    def computed(self, key: str, plan: ReusePlan, token_ids: tuple[int, ...], covered: Covered, *, last: bool) -> None:
        """KV of ``token_ids`` is in vLLM's cache, made as ``plan`` says: publish what is new. After the last one comes ``Published``."""

    def stored(self, ticket: int, why: str) -> None:
        """A store that was wanted has ended; ``why`` it failed, or nothing."""

    def ended(self, key: str, tokens_reused: int, fallback: str) -> None:
        """The request is over; once. ``tokens_reused`` came from others."""

    def close(self) -> None:
        """Leave the family. Idempotent."""


def open_link(options: ServingOptions, checkpoint: str, dtype: str) -> Link:
    """Join the family as the node that ``options`` name, with the weights of ``checkpoint`` in ``dtype``. Raises ConfigError."""
    return cast(Link, _named(LINK)(options, checkpoint, dtype))


def check_weights(options: ServingOptions, checkpoint: str, dtype: str) -> None:
    """Raise ConfigError if the weights of ``checkpoint`` in ``dtype`` are not those of the node that ``options`` name."""
    _named(WEIGHTS)(options, checkpoint, dtype)


def _named(where: str) -> Callable[[ServingOptions, str, str], object]:
    module, _, name = where.partition(":")
    return cast(Callable[[ServingOptions, str, str], object], getattr(importlib.import_module(module), name))
