"""Families: the models of a cluster file, read and found to fit each other.

:func:`resolve_family` gives a node what it must know of its own family, :func:`resolve_cluster` gives the router and
``config check`` all of them. A member that cannot share a layout, positions or tokens with its base is refused here, with the
key to change.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec

from kvkin.configs.architectures import Geometry
from kvkin.configs.attached import check_attached_family
from kvkin.configs.checkpoints import ModelIdentity, read_model
from kvkin.configs.checks import check_profiles_folder, cluster_warnings, is_loopback
from kvkin.configs.convert import child_key, suggest
from kvkin.configs.digests import Progress
from kvkin.configs.numerics import resolve_compute_dtype, resolve_device
from kvkin.configs.pairs import FamilyProfiles, load_profiles
from kvkin.configs.prompt_files import TokenizerIdentity
from kvkin.configs.schema import ClusterConfig, FamilyConfig, RouterNode
from kvkin.configs.vllm_node import check_vllm_family
from kvkin.configs.vllm_rules import engine_key, quantization, vllm_nodes, worker_node
from kvkin.kv.errors import ConfigError
from kvkin.kv.hashing import BlockHash, root_hash
from kvkin.kv.layout import KVLayout
from kvkin.kv.plan import LayerGroup

# What a member must have in common with its base, and what to call it.
_MUST_MATCH = {
    "architecture": "architecture",
    "num_layers": "number of layers",
    "hidden_size": "hidden size",
    "num_heads": "number of heads",
    "kv_heads": "number of KV heads",
    "head_dim": "head size",
    "windows": "attention window",
    "rope": "rope (keys of one would mean other positions to the other)",
}


class ResolvedFamily(msgspec.Struct, frozen=True):
    """A family as all its nodes see it. Models that were not asked for are absent from ``models``."""

    name: str
    config: FamilyConfig
    device: str  # cpu or cuda
    compute_dtype: str
    models: dict[str, ModelIdentity]
    tokenizer: TokenizerIdentity
    layout: KVLayout
    max_context_tokens: int
    # members whose tokenizer adds tokens to the family's: prompts that hold one get the member's own root
    own_root: frozenset[str]
    warnings: tuple[str, ...]
    # read for all members only (routers, config check), empty on nodes
    profiles: FamilyProfiles = FamilyProfiles()

    @property
    def base(self) -> ModelIdentity:
        return self.models[self.config.base]

    @property
    def tokenizer_digest(self) -> bytes:
        return self.tokenizer.digest

    @property
    def tokenizer_path(self) -> Path:
        """Folder of the tokenizer that serves the whole family."""
        return self.tokenizer.path

    @property
    def vocab_size(self) -> int:
        """Tokens that all members have; ids from here on are a member's own."""
        return self.base.vocab_size

    @property
    def transition_layers(self) -> tuple[int, ...]:
        return self.config.transition_layers

    def model_tokenizer_path(self, model: str) -> Path:
        """Folder of the tokenizer that encodes prompts for ``model``: its own only if that adds tokens."""
        own = self.models[model].tokenizer
        return own.path if own is not None and model in self.own_root else self.tokenizer.path

    def model_max_context(self, model: str) -> int:
        """Longest prompt + answer of ``model`` in tokens."""
        return min(self.max_context_tokens, self.models[model].max_context_tokens)

    def chat_template(self, model: str) -> str | None:
        """The template that renders chats for ``model``: its own if it has one, else the family's."""
        own = self.models[model].chat_template
        return self.base.chat_template if own is None else own

    def group(self, sender: str, receiver: str) -> LayerGroup | None:
        """Layers that ``receiver`` recomputes when it reuses KV of ``sender`` without a profile: the first entry that fits; None
        if none does."""
        for entry in self.config.recompute_groups:
            if entry.sender in ("*", sender) and entry.receiver in ("*", receiver):
                return LayerGroup(*entry.group)
        return None

    def block_root(self, scope: str, own_tokens_of: str | None = None) -> BlockHash:
        """The hash before the first block; ``own_tokens_of`` names the member whose added tokens the prompt holds."""
        tokens = self.tokenizer_digest if own_tokens_of is None else self.models[own_tokens_of].tokenizer_digest
        return root_hash(tokens, self.config.block_size, scope)


class ResolvedCluster(msgspec.Struct, frozen=True):
    """All families of a cluster."""

    config: ClusterConfig
    families: dict[str, ResolvedFamily]
    warnings: tuple[str, ...]

    def family_of(self, model: str) -> ResolvedFamily | None:
        """The family that has ``model``; None if the cluster does not know it."""
        name = self.config.family_of(model)
        return None if name is None else self.families[name]


def resolve_cluster(config: ClusterConfig, *, progress: Progress | None = None) -> ResolvedCluster:
    """Read every model of every family. Raises ConfigError for the first that cannot be used."""
    families = {name: resolve_family(config, name, progress=progress) for name in config.families}
    warnings = cluster_warnings(config)
    remote = any(not is_loopback(node.host) for node in config.nodes.values())
    for name, family in families.items():
        check_vllm_family(config, family)
        check_attached_family(config, family)
        _check_quantised(config, family)
        warnings += family.warnings
        warnings += _room_warnings(config, family)
        if remote and "auto" in (family.config.device, family.config.compute_dtype):
            key = child_key("families", name)
            warnings.append(f"{key}: device or compute_dtype is auto, and hosts that choose differently share nothing")
    return ResolvedCluster(config, families, tuple(warnings))


def resolve_family(
    config: ClusterConfig,
    name: str,
    *,
    models: Collection[str] | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> ResolvedFamily:
    """Read a family's base and ``models`` (none: all members).

    ``device`` (cpu or cuda) overrides the configured one. Raises ConfigError with the path of the key for what cannot be used.
    """
    key = child_key("families", name)
    if name not in config.families:
        raise ConfigError(key, "no such family", suggest(name, config.families))
    family = config.families[name]
    if models is None:
        check_profiles_folder(f"{key}.profiles", family.profiles)
    device = device or resolve_device(family.device)
    compute_dtype = resolve_compute_dtype(family.compute_dtype, device, f"{key}.compute_dtype")
    base = _read_member(config, family, family.base, compute_dtype, None, key, progress)
    if base.tokenizer is None:
        problem = f"the base {base.path} has no tokenizer"
        raise ConfigError(f"{_model_key(key, family.base)}.checkpoint", problem, "a checkpoint with tokenizer.json")
    _check_layers(key, family, base.num_layers)
    max_context = _max_context(key, family, base)
    members, own_root, warnings = {family.base: base}, set(), _base_warnings(key, family, base)
    for member in sorted(set(family.models if models is None else models) - {family.base}):
        if member not in family.models:
            raise ConfigError(f"{key}.models", f"no model named {member!r}", suggest(member, family.models))
        model = _read_member(config, family, member, compute_dtype, base.vocab_size, key, progress)
        member_key = _model_key(key, member)
        _check_geometry(member_key, model.geometry, base.geometry)
        if _check_tokenizer(member_key, model, base.tokenizer):
            own_root.add(member)
        warnings += _member_warnings(member_key, model, base)
        members[member] = model
    layout = base.layout(compute_dtype, family.block_size)
    profiles = FamilyProfiles()
    if models is None:
        strangers = [model for other in config.families.values() for model in other.models if model not in members]
        profiles = load_profiles(family, members, layout, strangers)
        warnings += profiles.warnings(name)
    return ResolvedFamily(
        name=name,
        config=family,
        device=device,
        compute_dtype=compute_dtype,
        models={member: members[member] for member in family.models if member in members},
        tokenizer=base.tokenizer,
        layout=layout,
        max_context_tokens=max_context,
        own_root=frozenset(own_root),
        warnings=tuple(warnings),
        profiles=profiles,
    )


def _model_key(family_key: str, model: str) -> str:
    return child_key(f"{family_key}.models", model)


def _read_member(
    config: ClusterConfig,
    family: FamilyConfig,
    name: str,
    compute_dtype: str,
    family_vocab: int | None,
    key: str,
    progress: Progress | None,
) -> ModelIdentity:
    entry = family.models[name]
    return read_model(
        name,
        entry.checkpoint,
        entry.adapter,
        compute_dtype=compute_dtype,
        quantization=quantization(family.vllm),
        cache_dir=config.state_path / "digests",
        family_vocab=family_vocab,
        progress=progress,
        key=_model_key(key, name),
    )


def _check_layers(key: str, family: FamilyConfig, num_layers: int) -> None:
    for index, layer in enumerate(family.transition_layers):
        if layer >= num_layers:
            problem = f"{layer} is beyond the base's {num_layers} layers"
            raise ConfigError(f"{key}.transition_layers[{index}]", problem, f"layers 1 to {num_layers - 1}")
    for index, entry in enumerate(family.recompute_groups):
        if entry.group[1] > num_layers:
            problem = f"{entry.group[1]} is beyond the base's {num_layers} layers"
            raise ConfigError(f"{key}.recompute_groups[{index}].group[1]", problem, f"at most {num_layers}")


def _check_quantised(config: ClusterConfig, family: ResolvedFamily) -> None:
    """vLLM has kernels of its own for such weights, and whether their KV is the reference engine's has not been tried."""
    for node in vllm_nodes(config, family.name):
        for model in worker_node(config, node).models:
            if family.models[model].geometry.quantisation is not None:
                problem = f"the checkpoint of {model} is quantised, which has not been tried on vLLM"
                raise ConfigError(
                    engine_key(config, node), problem, "engine: reference, or weights that are not quantised"
                )


def _max_context(key: str, family: FamilyConfig, base: ModelIdentity) -> int:
    configured = family.max_context_tokens
    if configured is not None and configured > base.max_context_tokens:
        problem = f"{configured} is more than the base was made for"
        raise ConfigError(f"{key}.max_context_tokens", problem, f"at most {base.max_context_tokens}")
    return base.max_context_tokens if configured is None else configured


def _check_geometry(member_key: str, member: Geometry, base: Geometry) -> None:
    for field, words in _MUST_MATCH.items():
        mine, wanted = getattr(member, field), getattr(base, field)
        if mine != wanted:
            problem = f"{words} differs from the base's: {_short(mine)}"
            raise ConfigError(f"{member_key}.checkpoint", problem, f"{_short(wanted)}, or a family of its own")


def _short(value: object) -> str:
    """A geometry value for an error: windows by their distinct values, rope by the fields that it uses."""
    if isinstance(value, tuple):
        kinds = sorted({"full" if window is None else str(window) for window in value})
        return " and ".join(kinds)
    if isinstance(value, msgspec.Struct):
        return ", ".join(f"{name} {item}" for name, item in msgspec.structs.asdict(value).items() if item)
    return str(value)


def _check_tokenizer(member_key: str, member: ModelIdentity, base: TokenizerIdentity) -> bool:
    """Whether the member adds tokens to the family's tokenizer; ConfigError if it encodes text in any other way."""
    if member.tokenizer is None:
        return False
    beyond = member.tokenizer.added_beyond(base)
    if beyond is None:
        in_adapter = member.adapter_path is not None and member.tokenizer.path == member.adapter_path
        problem = f"its tokenizer differs from the base's in: {member.tokenizer.difference(base)}"
        allowed = "the base's tokenizer, or that with tokens added after its last id"
        raise ConfigError(f"{member_key}.{'adapter' if in_adapter else 'checkpoint'}", problem, allowed)
    if beyond and member.tokenizer.num_ids > member.vocab_size:
        problem = f"its tokenizer has {member.tokenizer.num_ids} tokens, but the weights embed {member.vocab_size}"
        raise ConfigError(f"{member_key}.checkpoint", problem, "weights with an embedding row for every token")
    return beyond


def _room_warnings(config: ClusterConfig, family: ResolvedFamily) -> list[str]:
    """Nodes whose memory holds not one block: they serve, and share nothing with anybody."""
    least, found = family.layout.kv_slot_bytes, []
    for name, node in config.nodes.items():
        if (
            not isinstance(node, RouterNode)
            and config.family_of(node.models[0]) == family.name
            and node.kv_bytes < least
        ):
            key = f"{child_key('nodes', name)}.kv_bytes"
            found.append(
                f"{key}: {node.kv_bytes} bytes hold no block of {family.name} ({least} bytes): no KV is shared"
            )
    return found


def _base_warnings(key: str, family: FamilyConfig, base: ModelIdentity) -> list[str]:
    if base.chat_template is None:
        return [f"{_model_key(key, family.base)}: no chat template, so chat messages are refused; prompts work"]
    return []


def _member_warnings(member_key: str, member: ModelIdentity, base: ModelIdentity) -> list[str]:
    warnings = []
    if member.chat_template is not None and member.chat_template_digest != base.chat_template_digest:
        warnings.append(f"{member_key}: a chat template of its own: no cross-model hits for chats")
    if member.tokenizer is not None and member.bos_id != base.bos_id:
        warnings.append(
            f"{member_key}: puts {member.bos_id} before a prompt; the family's rule ({base.bos_id}) is used"
        )
    if member.max_context_tokens < base.max_context_tokens:
        warnings.append(f"{member_key}: contexts of {member.max_context_tokens} tokens, shorter than the base's")
    return warnings
