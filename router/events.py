"""What happens to a router (events, named as facts) and what it does about it (instructions, named as commands).

``RouterCore.handle(event, now)`` turns the former into the latter; ``node.py`` and the tests carry them out.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvkin.router.drift_types import SwitchedOff
from kvkin.router.prompts import Prompt, Tail
from kvkin.transport.messages import AskStatus, Cancel, ClientReply, Generate, ListModels, Ping
from kvkin.transport.node_messages import NodeToRouter, RouterToNode

# --- events ---------------------------------------------------------------------------------------------------------------


class ClientAsked(msgspec.Struct, frozen=True):
    """A client's message, checked by the front. ``client`` is its connection."""

    client: bytes
    message: Generate | Cancel | ListModels | AskStatus | Ping


class ClientSentGarbage(msgspec.Struct, frozen=True):
    """A message that the front could not accept; ``request_id`` is the client's id as far as it was readable."""

    client: bytes
    id: str
    code: str
    problem: str


class ClientLost(msgspec.Struct, frozen=True):
    """The connection takes no messages any more."""

    client: bytes
    reason: str


class PromptReady(msgspec.Struct, frozen=True):
    request_id: str
    prompt: Prompt


class PromptFailed(msgspec.Struct, frozen=True):
    request_id: str
    code: str
    problem: str
    retryable: bool = False


class NodeSaid(msgspec.Struct, frozen=True):
    peer: bytes
    message: NodeToRouter


class NodeSentGarbage(msgspec.Struct, frozen=True):
    peer: bytes
    problem: str


class PeerLost(msgspec.Struct, frozen=True):
    """A node's connection takes no messages any more."""

    peer: bytes


class TimePassed(msgspec.Struct, frozen=True):
    """``stood_still_s``: for so long the router itself did not run (a paused machine, no CPU): nobody's silence in it means anything."""

    stood_still_s: float = 0.0


class StopAsked(msgspec.Struct, frozen=True):
    """Take nothing new and stop when all is done; ``at_once`` ends what still runs."""

    at_once: bool = False


Event = (
    ClientAsked
    | ClientSentGarbage
    | ClientLost
    | PromptReady
    | PromptFailed
    | NodeSaid
    | NodeSentGarbage
    | PeerLost
    | TimePassed
    | StopAsked
)

# --- instructions ---------------------------------------------------------------------------------------------------------


class Reply(msgspec.Struct, frozen=True):
    client: bytes
    message: ClientReply


class TellNode(msgspec.Struct, frozen=True):
    peer: bytes
    message: RouterToNode


class PreparePrompt(msgspec.Struct, frozen=True):
    """Render, tokenize and hash on a worker thread; answered by PromptReady or PromptFailed."""

    request_id: str
    request: Generate


class RememberAnswer(msgspec.Struct, frozen=True):
    """Keep the generated ids for the next turn, before the client can send it."""

    model: str
    tail: Tail
    answer: str
    token_ids: tuple[int, ...]


class RememberDrift(msgspec.Struct, frozen=True):
    """Keep which pairs are switched off, over a restart of this router."""

    pairs: tuple[SwitchedOff, ...]


class Note(msgspec.Struct, frozen=True):
    """A line of the log."""

    level: str
    event: str
    fields: Mapping[str, object] = {}


class Stop(msgspec.Struct, frozen=True):
    """All is done: close the sockets and end the process."""


Instruction = Reply | TellNode | PreparePrompt | RememberAnswer | RememberDrift | Note | Stop
