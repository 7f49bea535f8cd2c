"""A sender and a receiver of one family, loaded in this process: what ``kvkin profile`` measures on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvkin.configs.families import ResolvedFamily, resolve_family
from kvkin.configs.schema import ClusterConfig
from kvkin.kv.errors import ConfigError

if TYPE_CHECKING:
    from kvkin.engines.layer_ops import LayerOps


@dataclass(frozen=True)
class Pair:
    """``tokenizer`` is transformers' tokenizer of the receiver's prompts (with its chat template set, if there is one);
    ``decode`` turns answer ids into text, ``encode`` text into ids, both without special tokens."""

    family: ResolvedFamily
    sender_name: str
    receiver_name: str
    sender: LayerOps
    receiver: LayerOps
    eos: frozenset[int]
    tokenizer: Any
    decode: Callable[[Sequence[int]], str]
    encode: Callable[[str], list[int]]


def resolve_pair(config: ClusterConfig, sender: str, receiver: str) -> ResolvedFamily:
    """Their family, with just the two. Raises ConfigError for unknown names, two families or twice the same model."""
    if sender == receiver:
        raise ConfigError("receiver", f"{receiver} is the sender too", "another member of the family")
    families = {}
    for key, name in (("sender", sender), ("receiver", receiver)):
        family = config.family_of(name)
        if family is None:
            known = [model for each in config.families.values() for model in each.models]
            raise ConfigError(key, f"no model {name!r} in this cluster file", ", ".join(known))
        families[key] = family
    if families["sender"] != families["receiver"]:
        problem = f"{sender} is of family {families['sender']}, {receiver} of {families['receiver']}"
        raise ConfigError("receiver", problem, "two models of one family")
    return resolve_family(config, families["receiver"], models=(sender, receiver))


def load_pair(family: ResolvedFamily, sender: str, receiver: str) -> Pair:
    """Load both models' weights onto the family's device."""
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from kvkin.engines.loading import load_model

    disable_progress_bar()
    ops = {}
    for name in (sender, receiver):
        identity = family.models[name]
        loaded = load_model(
            identity.path, identity.adapter_path, device=family.device, compute_dtype=family.compute_dtype
        )
        ops[name] = loaded.ops
    tokenizer = AutoTokenizer.from_pretrained(family.model_tokenizer_path(receiver), local_files_only=True)
    tokenizer.chat_template = family.chat_template(receiver)
    return Pair(
        family=family,
        sender_name=sender,
        receiver_name=receiver,
        sender=ops[sender],
        receiver=ops[receiver],
        eos=frozenset(family.models[receiver].eos_ids),
        tokenizer=tokenizer,
        decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
        encode=lambda text: list(tokenizer(text, add_special_tokens=False).input_ids),
    )
