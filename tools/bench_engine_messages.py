"""What ``kvkin bench engine`` and its child processes say to each other: one JSON object a line on stdin and stdout. Pure."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvkin.kv.plan import LayerGroup

ArmName = Literal["plain", "kvkin", "transformers", "receiver", "nixl"]
Event = Literal["alone", "prefill", "partial"]


class Receiving(msgspec.Struct, frozen=True):
    """What a receiver reuses: up to ``context_tokens`` of ``sender``'s KV, which the node ``holder`` computes."""

    sender: str
    holder: str
    group: LayerGroup
    context_tokens: int
    suffix_tokens: int
    seed: int


class Setup(msgspec.Struct, frozen=True):
    """What a child is to be: the node ``node`` of the cluster file ``file``, as ``arm`` runs it."""

    arm: ArmName
    file: str
    node: str
    receiving: Receiving | None = None
    # of the NIXL connector's handshake
    side_channel_port: int = 0


class _Command(msgspec.Struct, frozen=True, tag=True):
    pass


class Prefill(_Command, frozen=True):
    """One request; answered by Timed, until its first token."""

    token_ids: tuple[int, ...]


class Decode(_Command, frozen=True):
    """Requests side by side; answered by Timed, from the last one's first token to the end of all."""

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int


class Stall(_Command, frozen=True):
    """``decoding`` requests generate up to ``most_tokens`` while ``event`` happens: nothing for ``alone_tokens`` tokens, a private prefill of
    ``token_ids``, or a partial plan that reuses their first ``context_tokens``. Answered by Stalled."""

    decoding: tuple[tuple[int, ...], ...]
    most_tokens: int
    event: Event
    token_ids: tuple[int, ...]
    context_tokens: int
    group: LayerGroup
    alone_tokens: int
    seed: int


class Reuse(_Command, frozen=True):
    """One request on a context that the holder has; answered by Reused."""

    context_tokens: int
    shape: Literal["exact", "partial"]


class Generate(_Command, frozen=True):
    """One request among others, with vLLM's ``kv_transfer_params``; answered by First and Generated."""

    token_ids: tuple[int, ...]
    max_tokens: int
    transfer: dict[str, Any]


Command = Prefill | Decode | Stall | Reuse | Generate


class _Reply(msgspec.Struct, frozen=True, tag=True):
    pass


class Ready(_Reply, frozen=True):
    """Loaded. ``settings`` are what the engine was resolved to."""

    settings: dict[str, Any]


class Timed(_Reply, frozen=True):
    """``num_tokens`` in ``seconds``; ``cached_tokens`` of the prompts came from the engine's prefix cache."""

    seconds: float
    num_tokens: int
    cached_tokens: int = 0


class Stalled(_Reply, frozen=True):
    """Times between tokens of the decoding requests while the event went on, and how long it took."""

    gaps_s: tuple[float, ...]
    event_s: float


class Reused(_Reply, frozen=True):
    """Seconds until the first token; and of its parts, each run alone: everything that is pulled, the hidden states only, the computing with all
    data in memory, the last layer with the head."""

    seconds: float
    bytes_pulled: int
    transfer_s: float
    states_s: float
    compute_s: float
    last_layer_s: float


class First(_Reply, frozen=True):
    """The first token."""


class Generated(_Reply, frozen=True):
    """All tokens. ``transfer`` is what a prefill process says of where its KV is."""

    token_ids: tuple[int, ...]
    cached_tokens: int
    transfer: dict[str, Any] | None


class Failed(_Reply, frozen=True):
    """The command could not be carried out."""

    why: str


Reply = Ready | Timed | Stalled | Reused | First | Generated | Failed


class Asked(msgspec.Struct, frozen=True):
    """A command under its number."""

    number: int
    command: Command


class Answered(msgspec.Struct, frozen=True):
    """A reply to the command of this number; 0: Ready."""

    number: int
    reply: Reply
