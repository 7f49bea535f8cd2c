"""Membership: which nodes there are, what they serve, how loaded they are, and in which order their holdings count.

Pure: the router's core calls it with messages and a clock and carries out the facts that it returns. A node is known by its
configured name; a restart is a new incarnation under the same name.
"""

from __future__ import annotations

import enum
import statistics
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable

import msgspec

from kvkin.kv.cost import NodeRates
from kvkin.router.holdings_order import HoldingsOrder, well_formed
from kvkin.router.policy_types import NodeView
from kvkin.router.settings import ATTACHED, RouterSettings
from kvkin.transport.messages import PROTOCOL_VERSION, NodeLoad, NodeStatus
from kvkin.transport.node_messages import (
    Heartbeat,
    Holdings,
    Leave,
    Refused,
    Register,
    Registered,
    RouterToNode,
    SnapshotWanted,
)

# What a node may be.
ROLES = ("prefill", "decode", ATTACHED)
# Reason of a loss that is none: the node said goodbye.
LEFT = "left"
# Superseded incarnations and unknown peers that are remembered.
MAX_REMEMBERED = 1024
# What was sent to a node this short before its heartbeat may not be in the heartbeat's figures yet.
DISPATCH_GRACE_S = 0.25
# What was sent within this time counts as sent at once, so that a busy second is a few entries.
DISPATCH_BUCKET_S = 0.05


class NodeState(enum.StrEnum):
    """Heartbeats move between alive and draining; silence, a lost connection or a successor ends in dead, for good."""

    ALIVE = "alive"
    DRAINING = "draining"
    DEAD = "dead"


class Tell(msgspec.Struct, frozen=True):
    """Send a message to a node's connection."""

    peer: bytes
    message: RouterToNode


class NodeJoined(msgspec.Struct, frozen=True):
    node: str


class NodeLost(msgspec.Struct, frozen=True):
    """The incarnation is gone, and with it everything that it held and ran."""

    node: str
    incarnation: str
    reason: str


class HoldingsInOrder(msgspec.Struct, frozen=True):
    """Holdings that count now: a snapshot replaces everything, anything else is a change."""

    node: str
    snapshot: bool
    holdings: Holdings


Fact = Tell | NodeJoined | NodeLost | HoldingsInOrder


class Member:
    """One configured name and its newest incarnation."""

    def __init__(self, peer: bytes, message: Register, now: float) -> None:
        self.peer, self.registration = peer, message
        self.state = NodeState.ALIVE
        self.last_seen = now
        self.load, self.load_at = NodeLoad(), now
        self.order = HoldingsOrder(now)
        self._dispatched: list[tuple[float, int]] = []

    @property
    def name(self) -> str:
        return self.registration.node

    @property
    def incarnation(self) -> str:
        return self.registration.incarnation

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(model.name for model in self.registration.models)

    def serves(self, lineage_id: bytes) -> bool:
        return any(model.lineage.id == lineage_id for model in self.registration.models)

    def repeats(self, message: Register) -> bool:
        """Whether the message says nothing new: the same registration, and no holdings came since the last one."""
        return message == self.registration and self.order.epoch < 0

    def dispatched(self, num_tokens: int, now: float) -> None:
        """Work was sent that no heartbeat tells of yet."""
        if self._dispatched and now - self._dispatched[-1][0] < DISPATCH_BUCKET_S:
            at, before = self._dispatched.pop()
            self._dispatched.append((at, before + num_tokens))
        else:
            self._dispatched.append((now, num_tokens))

    def heartbeat(self, message: Heartbeat, now: float) -> None:
        self.load, self.load_at = message.load, now
        self._dispatched = [entry for entry in self._dispatched if entry[0] > now - DISPATCH_GRACE_S]
        self.state = NodeState.DRAINING if message.draining else NodeState.ALIVE

    def view(self, now: float, half_life_s: float, usable: bool) -> NodeView:
        """Load decays: what a heartbeat said a while ago is less and less true, and a burst of our own fades as well."""
        factor = 0.5 ** (max(0.0, now - self.load_at) / half_life_s)
        queued = self.load.queued_tokens * factor
        queued += sum(tokens * 0.5 ** (max(0.0, now - at) / half_life_s) for at, tokens in self._dispatched)
        rates = NodeRates(
            prefill_layer_tokens_per_s=self.load.prefill_layer_tokens_per_s,
            pull_bytes_per_s=self.load.pull_bytes_per_s,
            queued_tokens=queued,
            leases=self.load.leases * factor,
        )
        return NodeView(
            self.name,
            self.registration.role,
            self.models,
            rates,
            alive=usable and self.state is not NodeState.DEAD,
            draining=self.state is NodeState.DRAINING,
        )


class Membership:
    """All nodes of one router."""

    def __init__(self, settings: RouterSettings, incarnation: str) -> None:
        self._settings, self._incarnation = settings, incarnation
        self._members: dict[str, Member] = {}
        self._by_peer: dict[bytes, Member] = {}
        self._superseded: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._asked_to_register: OrderedDict[bytes, float] = OrderedDict()

    # --- questions ---------------------------------------------------------------------------------------------------

    def member(self, name: str) -> Member | None:
        return self._members.get(name)

    def member_of(self, peer: bytes) -> Member | None:
        """The live member behind a connection; None for strangers and for incarnations that are over."""
        member = self._by_peer.get(peer)
        return member if member is not None and member.state is not NodeState.DEAD else None

    def views(self, now: float, excluded: Collection[tuple[str, str]] = ()) -> dict[str, NodeView]:
        """All nodes as the policy sees them; ``excluded`` (node, incarnation) pairs are as good as dead.

        A node that has not measured itself yet is taken for as fast as the median of those living ones of its family that have:
        of its own role, if there are any.
        """
        half_life_s = self._settings.load_half_life_s
        views = {
            name: member.view(now, half_life_s, (name, member.incarnation) not in excluded)
            for name, member in self._members.items()
        }
        unmeasured = [view for view in views.values() if not view.rates.prefill_layer_tokens_per_s]
        medians = self._medians(views.values()) if unmeasured else {}
        for view in unmeasured:
            family = self._family_of(view)
            rate = medians.get((family, view.role)) or medians.get((family, ""))
            if rate:
                rates = msgspec.structs.replace(view.rates, prefill_layer_tokens_per_s=rate)
                views[view.name] = msgspec.structs.replace(view, rates=rates)
        return views

    def _medians(self, views: Iterable[NodeView]) -> dict[tuple[str, str], float]:
        """Median prefill rate of the measured living nodes by (family, role), and by (family, "") of both roles."""
        found: dict[tuple[str, str], list[float]] = {}
        for view in views:
            if view.alive and view.rates.prefill_layer_tokens_per_s:
                for role in (view.role, ""):
                    found.setdefault((self._family_of(view), role), []).append(view.rates.prefill_layer_tokens_per_s)
        return {key: statistics.median_high(rates) for key, rates in found.items()}

    def _family_of(self, view: NodeView) -> str:
        """A node's models are all of one family."""
        return self._settings.models[view.models[0]].family if view.models else ""

    def serving(self, model: str) -> tuple[str, ...]:
        """Names of the live decode nodes that answer for ``model``."""
        return tuple(
            member.name
            for member in self._members.values()
            if member.state is not NodeState.DEAD and member.registration.role == "decode" and model in member.models
        )

    def status(self, now: float, num_held: Callable[[str], int]) -> tuple[NodeStatus, ...]:
        """All nodes for ``status_reply``; ``num_held`` says how many blocks of a node the index knows."""
        return tuple(
            NodeStatus(
                name=member.name,
                role=member.registration.role,
                state=member.state.value,
                incarnation=member.incarnation,
                models=member.models,
                load=member.load,
                holdings=num_held(member.name),
                last_seen_s=max(0.0, now - member.last_seen),
            )
            for member in self._members.values()
        )

    # --- messages ----------------------------------------------------------------------------------------------------

    def register(self, peer: bytes, message: Register, now: float) -> list[Fact]:
        refused = self._refusal(message)
        if refused is not None:
            return [Tell(peer, refused)]
        before = self._members.get(message.node)
        if before is not None and before is self.member_of(peer) and before.repeats(message):
            return []  # a node repeats its registration until it is answered; the answer is on its way
        facts: list[Fact] = []
        if before is not None:
            # the same incarnation again (it was cut off, or thought dead): whatever was under way may be lost
            facts += self._end(
                before, "it registered again" if before.incarnation == message.incarnation else "replaced"
            )
            if before.incarnation != message.incarnation:
                self._superseded[(message.node, before.incarnation)] = None
                while len(self._superseded) > MAX_REMEMBERED:
                    self._superseded.popitem(last=False)
        member = Member(peer, message, now)
        self._members[message.node] = self._by_peer[peer] = member
        self._asked_to_register.pop(peer, None)
        answer = Registered(self._settings.name, self._incarnation, self._settings.timeouts.heartbeat_s)
        # the answer goes first: what the loss of the predecessor frees may be given to the new incarnation at once
        return [Tell(peer, answer), *facts, NodeJoined(message.node)]

    def heartbeat(self, peer: bytes, message: Heartbeat, now: float) -> list[Fact]:
        member = self.member_of(peer)
        if member is None or member.incarnation != message.incarnation:
            return self.stranger(peer, message.incarnation, now)
        member.last_seen = now
        member.heartbeat(message, now)
        return []

    def holdings(self, peer: bytes, message: Holdings, now: float) -> list[Fact]:
        member = self.member_of(peer)
        if member is None or member.incarnation != message.incarnation:
            return self.stranger(peer, message.incarnation, now)
        member.last_seen = now
        if not well_formed(message):
            return self._ask_for_snapshot(member, now)
        ready, missing = member.order.accept(message)
        facts: list[Fact] = []
        for snapshot, holdings in ready:
            facts.append(HoldingsInOrder(member.name, snapshot, holdings))
        if missing:
            return facts + self._ask_for_snapshot(member, now)
        if member.order.whole:
            member.order.asked_at = None
        return facts

    def leave(self, peer: bytes, message: Leave) -> list[Fact]:
        member = self.member_of(peer)
        if member is None or member.incarnation != message.incarnation:
            return []
        return self._end(member, LEFT)

    def alive(self, peer: bytes, now: float) -> bool:
        """Any other message of a member counts as a sign of life; returns whether the peer is one."""
        member = self.member_of(peer)
        if member is not None:
            member.last_seen = now
        return member is not None

    def stranger(self, peer: bytes, incarnation: str | None, now: float) -> list[Fact]:
        """A message of a connection that is no member: it is asked to register, or told that another took its place."""
        names = [name for name, over in self._superseded if over == incarnation]
        if names:
            return [Tell(peer, Refused("superseded", f"another process serves as {names[0]} now"))]
        asked_at = self._asked_to_register.get(peer)
        if asked_at is not None and now - asked_at < self._settings.timeouts.heartbeat_s:
            return []
        self._asked_to_register[peer] = now
        self._asked_to_register.move_to_end(peer)
        while len(self._asked_to_register) > MAX_REMEMBERED:
            self._asked_to_register.popitem(last=False)
        return [Tell(peer, SnapshotWanted(register=True))]

    def peer_lost(self, peer: bytes) -> list[Fact]:
        """The connection does not take messages any more."""
        member = self.member_of(peer)
        return self._end(member, "disconnected") if member is not None else []

    def overlook(self, seconds: float, now: float) -> None:
        """Nobody could be heard for so long: it does not count as their silence."""
        for member in self._members.values():
            member.last_seen = min(now, member.last_seen + seconds)

    def tick(self, now: float) -> list[Fact]:
        timeouts = self._settings.timeouts
        facts: list[Fact] = []
        for member in list(self._members.values()):
            if member.state is NodeState.DEAD:
                continue
            if now - member.last_seen > timeouts.node_dead_s:
                facts += self._end(member, f"silent for {now - member.last_seen:.1f} s")
            elif member.order.asked_at is not None and now - member.order.asked_at > timeouts.register_s:
                facts += self._ask_for_snapshot(member, now)
        return facts

    # --- inside ------------------------------------------------------------------------------------------------------

    def _end(self, member: Member, reason: str) -> list[Fact]:
        self._by_peer.pop(member.peer, None)
        if member.state is NodeState.DEAD:
            return []
        member.state = NodeState.DEAD
        return [NodeLost(member.name, member.incarnation, reason)]

    def _ask_for_snapshot(self, member: Member, now: float) -> list[Fact]:
        """Once per gap: what is on its way while the snapshot is made shows the same gap again."""
        asked_at = member.order.asked_at
        if asked_at is not None and now - asked_at <= self._settings.timeouts.register_s:
            return []
        member.order.asked_at = now
        return [Tell(member.peer, SnapshotWanted())]

    def _refusal(self, message: Register) -> Refused | None:
        """Why the node does not fit this cluster. Version first: nothing else may mean the same in another one."""
        if message.version != PROTOCOL_VERSION:
            return Refused("version", f"the node speaks protocol {message.version}, this router {PROTOCOL_VERSION}")
        if (message.node, message.incarnation) in self._superseded:
            return Refused("superseded", f"another process serves as {message.node} now")
        if message.role not in ROLES:
            return Refused("role", f"role {message.role!r} (allowed: {', '.join(ROLES)})")
        configured = self._settings.nodes.get(message.node)
        if self._settings.nodes and (configured is None or configured.role != message.role):
            return Refused("unknown_node", f"no {message.role} node {message.node!r} in this cluster's configuration")
        if not message.models:
            return Refused("unknown_model", "the node serves no model")
        return next(filter(None, (self._model_refusal(message, index) for index in range(len(message.models)))), None)

    def _model_refusal(self, message: Register, index: int) -> Refused | None:
        served = message.models[index]
        known = self._settings.models.get(served.name)
        if known is None or known.family != served.family:
            allowed = ", ".join(sorted(self._settings.models))
            return Refused("unknown_model", f"model {served.name!r} of family {served.family!r} (allowed: {allowed})")
        family = self._settings.families[known.family]
        if served.tokenizer_digest != family.tokenizer_digest:
            return Refused(
                "tokenizer", f"{served.name}: the node's tokenizer is not the one in this router's configuration"
            )
        if served.lineage != known.lineage:
            return Refused(
                "lineage", f"{served.name}: the node's weights are not the ones in this router's configuration"
            )
        if message.layout != family.layout:
            return Refused("layout", f"{served.name}: KV layout {message.layout} (allowed: {family.layout})")
        return None
