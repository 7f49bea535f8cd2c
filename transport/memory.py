"""A node's KV memory: the arena, the store that says what lies in it, and the transport that it is registered with."""

from __future__ import annotations

from kvkin.kv.layout import KVLayout
from kvkin.kv.store import BlockStore
from kvkin.transport.arena import Arena
from kvkin.transport.data_plane import Transport


class KVMemory:
    """Owns arena and store; closes the transport. ``kv_bytes`` and ``e_bytes`` are budgets, rounded down to whole slots."""

    def __init__(self, layout: KVLayout, kv_bytes: int, e_bytes: int, transport: Transport) -> None:
        self.layout, self.transport = layout, transport
        num_slots, num_e_slots = kv_bytes // layout.kv_slot_bytes, e_bytes // layout.e_block_bytes
        # an engine's ranks may be other processes: they map it
        self.arena = Arena(layout, num_slots, num_e_slots, shared=True)
        self.store = BlockStore(num_slots, num_e_slots, layout.num_layers)
        self.region = transport.register(self.arena.buffer)

    async def close(self) -> None:
        await self.transport.close()
        self.arena.close()
