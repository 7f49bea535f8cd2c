"""Leases: until when a consumer may read which blocks. Pure, clock passed in; the holder's side of docs/design.md section 8.

A lease belongs to one (stream, consumer, rank), pins its blocks by reference, and ends by release, by expiry plus grace, or with
the holder. Releasing validates the generation: a block that was recycled under a lease is a bug that must show.
"""

from __future__ import annotations

import msgspec

from kvkin.kv.store import Block, BlockStore


class Lease(msgspec.Struct):
    """``expires`` on the holder's clock (s); the holder recycles only ``grace_s`` later, the consumer stops earlier."""

    key: tuple[str, str, int]
    blocks: list[Block]
    generations: list[int]
    generation: int
    expires: float


class LeaseTable:
    """All leases of one holder."""

    def __init__(self, store: BlockStore, lease_s: float, grace_s: float) -> None:
        self._store, self.lease_s, self._grace_s = store, lease_s, grace_s
        self._leases: dict[tuple[str, str, int], Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, key: tuple[str, str, int]) -> Lease | None:
        return self._leases.get(key)

    def grant(self, key: tuple[str, str, int], blocks: list[Block], now: float) -> Lease:
        """Pin ``blocks`` for ``key``. An active duplicate raises ValueError: ids are never trusted to be unique."""
        if key in self._leases:
            raise ValueError(f"stream {key[0]!r} of {key[1]!r} is already open")
        for block in blocks:
            self._store.acquire(block, now)
        generations = [block.generation for block in blocks]
        lease = Lease(key, blocks, generations, max(generations, default=0), now + self.lease_s)
        self._leases[key] = lease
        return lease

    def renew(self, key: tuple[str, str, int], now: float) -> bool:
        """Extend a lease that has not ended; False for one that has."""
        lease = self._leases.get(key)
        if lease is None or lease.expires < now:
            return False
        lease.expires = now + self.lease_s
        return True

    def release(self, key: tuple[str, str, int], generation: int | None, now: float) -> bool:
        """End a lease; whether it was valid until now. Unknown leases are invalid, not an error (late or duplicate release)."""
        lease = self._leases.pop(key, None)
        if lease is None:
            return False
        intact = [block.generation for block in lease.blocks] == lease.generations
        for block in lease.blocks:
            self._store.release(block, now)
        return intact and lease.expires >= now and generation in (None, lease.generation)

    def expire(self, now: float) -> list[tuple[str, str, int]]:
        """End every lease that is over by more than the grace; returns their keys."""
        over = [key for key, lease in self._leases.items() if lease.expires + self._grace_s < now]
        for key in over:
            self.release(key, None, now)
        return over

    def release_consumer(self, consumer: str, now: float) -> list[tuple[str, str, int]]:
        """A consumer is gone for good: end all its leases."""
        gone = [key for key in self._leases if key[1] == consumer]
        for key in gone:
            self.release(key, None, now)
        return gone
