"""Prefill orders that a router has placed and that are not finished."""

from __future__ import annotations

from collections.abc import Iterable

from kvkin.kv.plan import ReusePlan


class Order:
    """One order: where it runs, until when, and which requests pull from it while it runs.

    A background order is for requests to come: it goes on when those that happen to pull from it end.
    """

    def __init__(
        self, order_id: str, node: str, peer: bytes, context: tuple[str, bytes], deadline_at: float, background: bool
    ) -> None:
        self.order_id, self.node, self.peer = order_id, node, peer
        self.context, self.deadline_at, self.background = context, deadline_at, background
        self.users: set[str] = set()


class Orders:
    """All of them, by id and by (model, last block): one computation for everybody who asks for the same context."""

    def __init__(self) -> None:
        self._orders: dict[str, Order] = {}
        self._by_context: dict[tuple[str, bytes], str] = {}

    def __len__(self) -> int:
        return len(self._orders)

    def get(self, order_id: str) -> Order | None:
        return self._orders.get(order_id)

    def of_context(self, context: tuple[str, bytes]) -> str | None:
        return self._by_context.get(context)

    def add(self, order: Order) -> None:
        self._orders[order.order_id] = order
        self._by_context[order.context] = order.order_id

    def remove(self, order_id: str) -> Order | None:
        """Idempotent: late and duplicate ends of an order find nothing."""
        order = self._orders.pop(order_id, None)
        if order is not None and self._by_context.get(order.context) == order_id:
            del self._by_context[order.context]
        return order

    def on_node(self, node: str) -> list[Order]:
        return [order for order in self._orders.values() if order.node == node]

    def expired(self, now: float) -> list[Order]:
        return [order for order in self._orders.values() if now > order.deadline_at]


def orders_of(plan: ReusePlan) -> Iterable[str]:
    """Ids of the orders that a plan pulls from."""
    for segment in plan.segments:
        for source in segment.sources:
            if source.holder.order_id:
                yield source.holder.order_id
        if segment.e_holder is not None and segment.e_holder.order_id:
            yield segment.e_holder.order_id
