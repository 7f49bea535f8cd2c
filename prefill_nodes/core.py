"""The prefill node's decisions, pure: which order runs next, who is told when it ends.

Foreground orders (somebody waits) before background ones, each first come first served; one runs at a time, so that the first
one's layers come as early as possible. An order for a context that is queued or running already joins it: one computation
for everybody.
"""

from __future__ import annotations

from collections import deque

import msgspec

from kvkin.transport.node_messages import PrefillOrder

# events


class OrderReceived(msgspec.Struct, frozen=True):
    """``reply_to`` names the router that wants to hear of it."""

    order: PrefillOrder
    reply_to: str
    now: float


class OrderAborted(msgspec.Struct, frozen=True):
    order_id: str
    reason: str


class ComputeEnded(msgspec.Struct, frozen=True):
    """The running order is complete (``error`` empty) or failed."""

    order_id: str
    computed_tokens: int = 0
    seconds: float = 0.0
    code: str = ""
    error: str = ""
    retryable: bool = True


class Tick(msgspec.Struct, frozen=True):
    now: float


# instructions


class StartCompute(msgspec.Struct, frozen=True):
    order: PrefillOrder


class CancelCompute(msgspec.Struct, frozen=True):
    order_id: str
    reason: str


class ReportDone(msgspec.Struct, frozen=True):
    order_id: str
    reply_to: str
    num_tokens: int
    computed_tokens: int
    seconds: float


class ReportFailed(msgspec.Struct, frozen=True):
    order_id: str
    reply_to: str
    code: str
    message: str
    retryable: bool


Event = OrderReceived | OrderAborted | ComputeEnded | Tick
Instruction = StartCompute | CancelCompute | ReportDone | ReportFailed


class _Entry(msgspec.Struct):
    """One computation and everybody who ordered it: (order id, router)."""

    order: PrefillOrder
    deadline: float
    members: list[tuple[str, str]]


class PrefillCore:
    """State of the order queue. Unknown or repeated signals are ignored."""

    def __init__(self, max_queue: int) -> None:
        self._max_queue = max_queue
        self._foreground: deque[_Entry] = deque()
        self._background: deque[_Entry] = deque()
        self._running: _Entry | None = None

    @property
    def waiting(self) -> int:
        return len(self._foreground) + len(self._background)

    @property
    def running(self) -> int:
        return int(self._running is not None)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are ordered and not yet computed."""
        entries = [*self._foreground, *self._background, *([self._running] if self._running else [])]
        return sum(len(entry.order.token_ids) for entry in entries)

    def handle(self, event: Event) -> list[Instruction]:
        match event:
            case OrderReceived(order, reply_to, now):
                return self._received(order, reply_to, now)
            case OrderAborted(order_id, reason):
                return self._aborted(order_id, reason)
            case ComputeEnded():
                return self._ended(event)
            case Tick(now):
                return self._expired(now)

    def _received(self, order: PrefillOrder, reply_to: str, now: float) -> list[Instruction]:
        same = self._same(order)
        if same is not None:
            same.members.append((order.order_id, reply_to))
            if same in self._background and not order.background:
                self._background.remove(same)
                self._foreground.append(same)
            return []
        if self.waiting >= self._max_queue:
            message = f"{self.waiting} orders are waiting (allowed: {self._max_queue})"
            return [ReportFailed(order.order_id, reply_to, "capacity", message, True)]
        entry = _Entry(order, now + order.deadline_s, [(order.order_id, reply_to)])
        (self._background if order.background else self._foreground).append(entry)
        return self._next()

    def _same(self, order: PrefillOrder) -> _Entry | None:
        entries = [*([self._running] if self._running else []), *self._foreground, *self._background]
        wanted = (order.model, order.root, order.token_ids)
        return next((e for e in entries if (e.order.model, e.order.root, e.order.token_ids) == wanted), None)

    def _aborted(self, order_id: str, reason: str) -> list[Instruction]:
        """One member leaves; the computation ends with the last."""
        for entry in [*self._foreground, *self._background, *([self._running] if self._running else [])]:
            if any(member == order_id for member, _ in entry.members):
                entry.members = [member for member in entry.members if member[0] != order_id]
                if entry.members:
                    return []
                if entry is self._running:
                    return [CancelCompute(entry.order.order_id, reason)]
                (self._foreground if entry in self._foreground else self._background).remove(entry)
                return []
        return []

    def _ended(self, event: ComputeEnded) -> list[Instruction]:
        entry = self._running
        if entry is None or entry.order.order_id != event.order_id:
            return []
        self._running = None
        out: list[Instruction] = []
        for order_id, reply_to in entry.members:
            if event.code:
                out.append(ReportFailed(order_id, reply_to, event.code, event.error, event.retryable))
            else:
                num_tokens = len(entry.order.token_ids)
                out.append(ReportDone(order_id, reply_to, num_tokens, event.computed_tokens, event.seconds))
        return out + self._next()

    def _expired(self, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for queue in (self._foreground, self._background):
            for entry in [entry for entry in queue if entry.deadline < now]:
                queue.remove(entry)
                for order_id, reply_to in entry.members:
                    out.append(ReportFailed(order_id, reply_to, "capacity", "the order's deadline passed", True))
        if self._running is not None and self._running.deadline < now:
            out.append(CancelCompute(self._running.order.order_id, "the order's deadline passed"))
        return out

    def _next(self) -> list[Instruction]:
        if self._running is not None:
            return []
        queue = self._foreground or self._background
        if not queue:
            return []
        self._running = queue.popleft()
        return [StartCompute(self._running.order)]
