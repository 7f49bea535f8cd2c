"""Outbox: what the core decides while it handles one event, in order, and what it counts."""

from __future__ import annotations

from collections import Counter

from kvkin.router.events import Instruction, Note, Reply, TellNode
from kvkin.transport.messages import ClientReply
from kvkin.transport.node_messages import RouterToNode


class Outbox:
    """``now`` is the time of the event that is being handled; ``counters`` go into the status."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.instructions: list[Instruction] = []
        self.counters: Counter[str] = Counter()

    def begin(self, now: float) -> None:
        self.now, self.instructions = now, []

    def add(self, instruction: Instruction) -> None:
        self.instructions.append(instruction)

    def reply(self, client: bytes, message: ClientReply) -> None:
        self.add(Reply(client, message))

    def tell(self, peer: bytes, message: RouterToNode) -> None:
        self.add(TellNode(peer, message))

    def note(self, level: str, event: str, **fields: object) -> None:
        self.add(Note(level, event, fields))

    def count(self, name: str, amount: int = 1) -> None:
        self.counters[name] += amount
