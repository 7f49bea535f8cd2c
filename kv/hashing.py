"""Block hashes: which tokens a block of KV stands for (docs/design.md section 4).

A block's hash chains over all tokens before it, so equal hashes mean equal prefixes. Keyed BLAKE2b-128, every field
length-prefixed and domain-tagged; the same on every process, host and Python version. The router and every node call this.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

HASH_VERSION = b"kvkin-block-1"
DIGEST_BYTES = 16

BlockHash = bytes


def digest(domain: bytes, *fields: bytes) -> bytes:
    """128-bit digest of framed ``fields`` under a ``domain`` tag: ("ab", "c") and ("a", "bc") differ."""
    state = blake2b(digest_size=DIGEST_BYTES, person=domain[:16].ljust(16, b"\0"))
    for field in fields:
        state.update(struct.pack("<Q", len(field)))
        state.update(field)
    return state.digest()


def root_hash(tokenizer_digest: bytes, block_size: int, scope: str) -> BlockHash:
    """The hash before the first block: two roots differ unless tokenizer, block size and tenant scope are equal."""
    return digest(b"root", HASH_VERSION, tokenizer_digest, struct.pack("<I", block_size), scope.encode())


def extend_hashes(parent: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Hashes of the full blocks of ``token_ids`` that follow ``parent``; an unaligned tail has no hash.

    Raises ValueError for an id that does not fit 32 bits.
    """
    hashes: list[BlockHash] = []
    num_blocks = len(token_ids) // block_size
    try:
        packed = struct.pack(f"<{num_blocks * block_size}I", *token_ids[: num_blocks * block_size])
    except struct.error as error:
        raise ValueError(f"token ids must be integers in 0 .. 2^32-1: {error}") from None
    width = 4 * block_size
    for start in range(0, len(packed), width):
        # the key is the parent: a keyed hash of a fixed-length message needs no further framing
        parent = blake2b(packed[start : start + width], digest_size=DIGEST_BYTES, key=parent, person=b"block").digest()
        hashes.append(parent)
    return hashes


def block_hashes(token_ids: Sequence[int], root: BlockHash, block_size: int) -> list[BlockHash]:
    """Hashes of all full blocks of a prompt."""
    return extend_hashes(root, token_ids, block_size)


class ChainedHasher:
    """Hashes a growing token list (turns of a chat) without hashing the older blocks again."""

    def __init__(self, root: BlockHash, block_size: int) -> None:
        self._root, self._block_size = root, block_size
        self.hashes: list[BlockHash] = []
        self._tail: list[int] = []

    @property
    def num_tokens(self) -> int:
        return len(self.hashes) * self._block_size + len(self._tail)

    def extend(self, token_ids: Sequence[int]) -> list[BlockHash]:
        """Append tokens; returns the hashes of the blocks that became full."""
        pending = [*self._tail, *token_ids]
        new = extend_hashes(self.hashes[-1] if self.hashes else self._root, pending, self._block_size)
        self.hashes += new
        self._tail = pending[len(new) * self._block_size :]
        return new
