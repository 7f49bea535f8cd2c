"""Stores of an attached server: blocks that vLLM's workers copy into the arena once vLLM's scheduler has told them to.

A publication (``publication.py``) runs on the link's loop, the rows are in vLLM's cache: each copy is asked for by an event under a ticket,
and the scheduler's side says how it went.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

import structlog

from kvkin.decode_nodes.publication import Item, neighbours
from kvkin.engines.vllm.serving import Covered, LinkEvent, StoreWanted

log = structlog.get_logger()


class Stores:
    """Tickets of stores that are on their way. ``events`` is what vLLM's thread takes."""

    def __init__(self, events: deque[LinkEvent]) -> None:
        self._events = events
        self._waiting: dict[int, asyncio.Future[str]] = {}
        self._tickets = itertools.count()

    async def store(self, wanted: Callable[..., StoreWanted]) -> str:
        """Have the server's workers store blocks, under a ticket of its own; returns why it failed, or nothing."""
        ticket = next(self._tickets)
        self._waiting[ticket] = asyncio.get_running_loop().create_future()
        self._events.append(wanted(ticket=ticket))
        try:
            return await self._waiting[ticket]
        finally:
            del self._waiting[ticket]

    def stored(self, ticket: int, why: str) -> None:
        """A store has ended. Late and unknown ones are ignored."""
        waiting = self._waiting.get(ticket)
        if waiting is not None and not waiting.done():
            waiting.set_result(why)

    def stop(self) -> None:
        """Nobody waits for a store any more."""
        for waiting in self._waiting.values():
            waiting.cancel()


class OrderedRows:
    """Rows of one request in vLLM's cache (``publication.Rows``); ``size`` is the tokens of a block."""

    def __init__(self, stores: Stores, key: str, covered: Covered, size: int) -> None:
        self._stores, self._key, self._covered, self._size = stores, key, covered, size

    def has_e(self, layer: int, start: int, stop: int) -> bool:
        return self._covered.has(layer, start, stop)

    async def copy(self, items: Sequence[Item]) -> None:
        key = self._key
        stores: list[tuple[list[Item], asyncio.Future[str]]] = []

        def order(run: list[Item], wanted: Callable[..., StoreWanted]) -> None:
            stores.append((run, asyncio.ensure_future(self._stores.store(wanted))))

        for run in neighbours(list(items), self._size):
            layers, start = tuple(run[0].copy_layers), run[0].entry[3]
            slots = tuple(item.slot for item in run)
            if layers:
                order(run, partial(StoreWanted, key, start=start, slots=slots, layers=layers))
        for item in items:
            for layer, slot in item.copy_e.items():
                order([item], partial(StoreWanted, key, start=item.entry[3], slots=(slot,), e_layer=layer))
        whys = await asyncio.gather(*(ending for _, ending in stores))
        for item in items:
            item.whole = True
        missing: Counter[str] = Counter()
        for (run, _), why in zip(stores, whys, strict=True):
            if why:
                missing[why] += len(run)
            for item in run:
                item.whole = item.whole and not why
        for why, blocks in missing.items():
            log.info("blocks are not published", request=key, blocks=blocks, why=why)
