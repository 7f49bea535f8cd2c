"""Publication: turning what a request pulled and computed into blocks that later turns and other agents hit.

Provenance is honest: it follows from the plan that was executed (``kv.plan.provenances``), tainted segments stay tainted, and so
does everything computed after them. Pulled bytes are adopted where they landed; computed rows are copied out of wherever the engine
has them (``Rows``). Decode nodes and attached servers use it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from kvkin.decode_nodes.sources import Scratch
from kvkin.engines.api import Engine
from kvkin.engines.arena_copies import store_layer, store_states
from kvkin.engines.spaces import Space
from kvkin.kv.errors import CapacityError
from kvkin.kv.hashing import extend_hashes
from kvkin.kv.plan import ReusePlan, provenances
from kvkin.kv.provenance import Provenance
from kvkin.transport.arena import Arena
from kvkin.transport.node_runtime import NodeRuntime

log = structlog.get_logger()


@dataclass
class Item:
    """One block to publish: its slot, and which layers and which E must still be copied into it (E layer -> E slot).

    ``whole`` once that was done; it cannot be where the engine has taken its memory back.
    """

    entry: tuple[bytes, bytes, Provenance, int]
    slot: int
    copy_layers: Sequence[int]
    e_slots: dict[int, int] = field(default_factory=dict)
    copy_e: dict[int, int] = field(default_factory=dict)
    whole: bool = False


class Rows(Protocol):
    """What a request pulled and computed, where the engine has it."""

    def has_e(self, layer: int, start: int, stop: int) -> bool:
        """Whether hidden states entering ``layer`` are there for all tokens [start, stop)."""

    async def copy(self, items: Sequence[Item]) -> None:
        """Copy rows into the items' slots, which nobody else can see yet, and say which items are ``whole`` by then."""


class SpaceRows:
    """Rows of a request's space, copied on the engine's thread."""

    def __init__(self, engine: Engine, arena: Arena, space: Space) -> None:
        self._engine, self._arena, self._space = engine, arena, space

    def has_e(self, layer: int, start: int, stop: int) -> bool:
        return self._space.has_e(layer, start, stop)

    async def copy(self, items: Sequence[Item]) -> None:
        await asyncio.wrap_future(self._engine.call(lambda: self._copy(items)))

    def _copy(self, items: Sequence[Item]) -> None:
        arena, space = self._arena, self._space
        size = arena.layout.block_size
        for item in items:
            item.whole = not len(item.copy_layers) or space.has_kv(item.entry[3], item.entry[3] + size)
        items = [item for item in items if item.whole]
        for run in neighbours(items, size):
            first = run[0]
            for layer in first.copy_layers:
                store_layer(arena, space, layer, first.entry[3], [item.slot for item in run])
        for item in items:
            for layer, slot in item.copy_e.items():
                store_states(arena, space, layer, item.entry[3], [slot])


def block_chain(
    tokens: Sequence[int], root: bytes, size: int, plan: ReusePlan, lineage_id: bytes
) -> list[tuple[bytes, bytes, Provenance, int]]:
    """(hash, parent, provenance, position) of every full block; tokens after the plan continue its last segment."""
    hashes = extend_hashes(root, tokens, size)
    folded = provenances(plan, lineage_id)
    chain = []
    segment = 0
    for index, block in enumerate(hashes):
        while segment + 1 < len(plan.segments) and plan.segments[segment].stop <= index * size:
            segment += 1
        chain.append((block, hashes[index - 1] if index else root, folded[segment], index * size))
    return chain


class Publisher:
    """Publishes one request's blocks, in two steps: the prompt when it is prefilled, the answer when it is complete."""

    def __init__(self, runtime: NodeRuntime, model: str, root: bytes) -> None:
        self._runtime, self._root = runtime, root
        self._lineage_id = runtime.settings.lineage(model).id
        self._published = 0

    async def publish(self, tokens: Sequence[int], plan: ReusePlan, scratch: dict[int, Scratch], rows: Rows) -> int:
        """Publish the full blocks of ``tokens`` that are not yet published; returns how many blocks are new here.

        Takes the slots that it adopts out of ``scratch``. Raises nothing that an engine raises while it copies. Without room for copies it publishes what fits: the blocks' worth
        is in later requests, this one is never held up for it.
        """
        size = self._runtime.settings.layout.block_size
        chain = block_chain(tokens, self._root, size, plan, self._lineage_id)
        items, whole = self._collect(chain, plan, scratch, rows)
        if await self._copied(items, rows):
            self._published = max(self._published, whole)
        new = self._adopt(items)
        self._runtime.routers.flush()
        return new

    async def _copied(self, items: list[Item], rows: Rows) -> bool:
        """Whether the copies were made. An engine that cannot make them costs later requests these blocks, never this one its answer:
        none is announced, for nobody knows which were whole, and the answer's publication tries them again."""
        try:
            if items:
                await rows.copy(items)
        except Exception as error:  # noqa: BLE001 - whatever an engine raises
            log.error("blocks are not published: they could not be copied", blocks=len(items), error=repr(error))
            for item in items:
                item.whole = False
            return False
        return True

    def _collect(
        self,
        chain: list[tuple[bytes, bytes, Provenance, int]],
        plan: ReusePlan,
        scratch: dict[int, Scratch],
        rows: Rows,
    ) -> tuple[list[Item], int]:
        size, store = self._runtime.settings.layout.block_size, self._runtime.store
        num_layers = self._runtime.settings.layout.num_layers
        items: list[Item] = []
        for index in range(self._published, len(chain)):
            entry = chain[index]
            if store.get(entry[0], entry[2].key) is not None:
                continue
            position = entry[3]
            number = next((n for n, s in enumerate(plan.segments) if s.start <= position < s.stop), None)
            landed = scratch.get(number) if number is not None else None
            segment = plan.segments[number] if number is not None else None
            offset = 0 if segment is None else (position - segment.start) // size
            try:
                # -1: where it landed was given back when its publication failed
                if segment is not None and segment.sources and landed is not None and landed.kv_slots[offset] >= 0:
                    item = Item(entry, landed.kv_slots[offset], segment.recomputed_layers(num_layers))
                    landed.kv_slots[offset] = -1
                    if segment.e_layer is not None:
                        item.e_slots[segment.e_layer] = landed.e_slots[offset]
                        landed.e_slots[offset] = -1
                else:
                    item = Item(entry, store.take_scratch(1, 0)[0][0], range(num_layers))
                items.append(item)
                self._collect_e(item, position, rows)
            except CapacityError as error:
                log.info("not everything is published", why=str(error))
                return items, index
        return items, len(chain)

    def _collect_e(self, item: Item, position: int, rows: Rows) -> None:
        size, store = self._runtime.settings.layout.block_size, self._runtime.store
        for layer in self._runtime.settings.transition_layers:
            if layer not in item.e_slots and rows.has_e(layer, position, position + size):
                try:
                    item.copy_e[layer] = store.take_scratch(0, 1)[1][0]
                except CapacityError:
                    return

    def _adopt(self, items: list[Item]) -> int:
        store, now, new = self._runtime.store, time.monotonic(), 0
        for item in items:
            e_slots = item.e_slots | item.copy_e
            if item.whole and store.adopt(item.entry, item.slot, e_slots, now):
                new += 1
            else:
                store.give_scratch([item.slot], list(e_slots.values()))
        return new


def neighbours(items: Sequence[Item], size: int) -> list[list[Item]]:
    """Runs of items that follow each other in the prompt and copy the same layers."""
    runs: list[list[Item]] = []
    for item in items:
        last = runs[-1][-1] if runs else None
        if last and last.entry[3] + size == item.entry[3] and list(last.copy_layers) == list(item.copy_layers):
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs
