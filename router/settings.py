"""What a router process needs to know, in one frozen struct: built from the cluster's configuration, passed in.

``settings_from`` (router/configured.py) makes it of a resolved configuration; tests write it by hand.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvkin.kv.layout import KVLayout
from kvkin.kv.lineage import Lineage
from kvkin.router.drift_types import DriftSettings
from kvkin.router.policy_types import FamilyView, GroupChoice, PolicySettings
from kvkin.transport.messages import PairStatus

ATTACHED = "attached"
"""Role of a server that takes its requests itself and asks for plans."""


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One model that clients may ask for. ``tokenizer_dir`` holds tokenizer.json; without a template only text and ids work.

    ``vocab_size`` counts its ids, ``bos_id`` is put before a plain prompt. ``own_digest`` is the tokenizer digest of a member
    that adds tokens to the family's (else empty). ``logits_digest`` names all that its logits come of, the head included.
    """

    name: str
    family: str
    lineage: Lineage
    tokenizer_dir: str
    vocab_size: int
    max_context_tokens: int
    chat_template: str | None = None
    bos_id: int | None = None
    own_digest: bytes = b""
    logits_digest: bytes = b""


class FamilySettings(msgspec.Struct, frozen=True, kw_only=True):
    """One family. ``vocab_size`` counts the ids that all members share; ``groups`` are keyed by (sender, receiver). ``notes``
    say which profiles are not used, for the log."""

    name: str
    base_model: str
    layout: KVLayout
    tokenizer_digest: bytes
    vocab_size: int
    transition_layers: tuple[int, ...] = ()
    groups: Mapping[tuple[str, str], tuple[GroupChoice, ...]] = {}
    notes: tuple[str, ...] = ()


class NodeSettings(msgspec.Struct, frozen=True):
    """A prefill node, decode node or attached server of the configuration: what may register under this name."""

    name: str
    role: str
    models: tuple[str, ...]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on one request and on what may pile up (see docs/protocol.md)."""

    max_request_bytes: int = 8 << 20
    max_prompt_tokens: int = 131_072
    max_new_tokens: int = 8192
    max_queue: int = 256
    max_clients: int = 4096
    max_running: int = 16_384
    max_id_chars: int = 128
    max_messages: int = 4096
    max_role_chars: int = 32
    max_stop_strings: int = 16
    max_stop_chars: int = 256
    max_logprobs: int = 20
    max_temperature: float = 100.0


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. ``node_wait_s``: how long a request waits for a node of its model to (re)appear. ``sign_of_life_s``: a waiting
    request's ``accepted`` is repeated after that much silence. ``client_dead_s``: silence of a client that pings."""

    heartbeat_s: float = 1.0
    node_dead_s: float = 5.0
    register_s: float = 10.0
    request_s: float = 600.0
    order_s: float = 120.0
    drain_s: float = 30.0
    node_wait_s: float = 3.0
    sign_of_life_s: float = 2.0
    client_dead_s: float = 30.0
    tick_s: float = 0.1


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything. Addresses are ZeroMQ endpoints to bind; port 0 (``tcp://127.0.0.1:0``) takes any free port. ``pairs`` is what
    ``status`` tells of which pairs of models are profiled.

    With an empty ``nodes`` any node whose models fit may register.
    """

    name: str
    families: Mapping[str, FamilySettings]
    models: Mapping[str, ModelSettings]
    nodes: Mapping[str, NodeSettings] = {}
    client_address: str = "tcp://127.0.0.1:5570"
    node_address: str = "tcp://127.0.0.1:5571"
    insecure: bool = False
    scope: str = "default"
    load_half_life_s: float = 5.0
    index_max_blocks: int = 1_000_000
    fan_out_half_life_s: float = 120.0
    prompt_memory_bytes: int = 256 << 20
    prompt_threads: int = 2
    max_attempts: int = 3
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    policy: PolicySettings = PolicySettings()
    pairs: tuple[PairStatus, ...] = ()
    drift: DriftSettings = DriftSettings()

    def family_of(self, model: str) -> FamilySettings:
        return self.families[self.models[model].family]


def family_views(settings: RouterSettings) -> dict[str, FamilyView]:
    """The families as the policy sees them."""
    views: dict[str, FamilyView] = {}
    for family in settings.families.values():
        members = [model for model in settings.models.values() if model.family == family.name]
        names: dict[bytes, tuple[str, ...]] = {}
        for member in members:
            key = member.lineage.id
            names[key] = (*names.get(key, ()), member.name)
        views[family.name] = FamilyView(
            name=family.name,
            base_model=family.base_model,
            layout=family.layout,
            lineages={member.lineage.id: member.lineage for member in members},
            models_of=names,
            groups=family.groups,
            transition_layers=family.transition_layers,
        )
    return views
