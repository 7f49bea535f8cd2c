"""Block hashes: framed, chained, incremental, and the same on every process and host."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkin.kv.hashing import DIGEST_BYTES, ChainedHasher, block_hashes, digest, extend_hashes, root_hash

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=70)
BLOCK = st.integers(1, 17)
ROOT = root_hash(b"tokenizer", 16, "")


def test_golden_values() -> None:
    """Nodes of different versions must agree or differ in HASH_VERSION: a change of these values is a change of the format."""
    assert digest(b"domain", b"ab", b"c").hex() == "882e67100a8063ff126c52678ba7457d"
    assert root_hash(b"tokenizer", 16, "tenant").hex() == "ad6d4a4230c96cad2a95a27cb7e9a922"
    hashes = block_hashes(range(40), root_hash(b"tokenizer", 16, "tenant"), 16)
    assert [block.hex() for block in hashes] == ["ba2dd03f4fad556573cceac5bf059de9", "e943710a340ee4325014a4d9c2b7eb16"]


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_same_in_every_process(seed: str) -> None:
    """LMCache#1139: two processes with different string hash seeds must find each other's blocks."""
    code = "from kvkin.kv.hashing import *; print([h.hex() for h in block_hashes(range(40), root_hash(b't', 16, 'x'), 16)])"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.strip() == str([block.hex() for block in block_hashes(range(40), root_hash(b"t", 16, "x"), 16)])


@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_fields_are_framed(one: list[bytes], other: list[bytes]) -> None:
    assert (digest(b"d", *one) == digest(b"d", *other)) == (one == other)


@given(st.lists(st.binary(min_size=1, max_size=4), min_size=2, max_size=4), st.data())
def test_moving_a_boundary_changes_the_digest(fields: list[bytes], data: st.DataObject) -> None:
    """Unframed concatenation would not notice (confidential-model-router#386)."""
    whole = b"".join(fields)
    cut = data.draw(st.integers(0, len(whole)))
    other = [whole[:cut], whole[cut:]]
    assert (digest(b"d", *fields) == digest(b"d", *other)) == (fields == other)


def test_domains_differ() -> None:
    assert len({digest(domain, b"x") for domain in (b"a", b"b", b"ab", b"root", b"kv")}) == 5


def test_roots_differ_in_every_part() -> None:
    base = ("tokenizer", 16, "tenant")
    roots = [
        ("tokenizer", 16, "tenant"),
        ("tokenizer2", 16, "tenant"),
        ("tokenizer", 32, "tenant"),
        ("tokenizer", 16, ""),
    ]
    roots += [("org_1", 16, "2345"), ("org_12345", 16, "")]
    made = {root_hash(tokenizer.encode(), size, scope) for tokenizer, size, scope in roots}
    assert len(made) == len(roots)
    assert root_hash(base[0].encode(), base[1], base[2]) in made


@given(TOKENS, BLOCK)
def test_one_hash_a_full_block(tokens: list[int], size: int) -> None:
    hashes = block_hashes(tokens, ROOT, size)
    assert len(hashes) == len(tokens) // size
    assert all(len(block) == DIGEST_BYTES for block in hashes)
    assert hashes == block_hashes(tokens[: len(hashes) * size], ROOT, size)


@given(TOKENS, BLOCK, st.data())
def test_a_hash_covers_all_tokens_before_it(tokens: list[int], size: int, data: st.DataObject) -> None:
    """Equal up to the changed token's block, different from there on."""
    hashes = block_hashes(tokens, ROOT, size)
    if not hashes:
        return
    at = data.draw(st.integers(0, len(hashes) * size - 1))
    changed = [*tokens[:at], (tokens[at] + data.draw(st.integers(1, 2**32 - 1))) % 2**32, *tokens[at + 1 :]]
    other = block_hashes(changed, ROOT, size)
    assert other[: at // size] == hashes[: at // size]
    assert not set(other[at // size :]) & set(hashes)


@given(TOKENS, BLOCK)
def test_another_root_shares_nothing(tokens: list[int], size: int) -> None:
    """Another tenant's scope: no hit, in the index neither (sglang PR#24579)."""
    other = root_hash(b"tokenizer", 16, "other tenant")
    assert not set(block_hashes(tokens, ROOT, size)) & set(block_hashes(tokens, other, size))


@given(st.lists(TOKENS, max_size=6), BLOCK)
def test_incremental_equals_whole(pieces: list[list[int]], size: int) -> None:
    hasher = ChainedHasher(ROOT, size)
    new = [block for piece in pieces for block in hasher.extend(piece)]
    whole = [token for piece in pieces for token in piece]
    assert new == hasher.hashes == block_hashes(whole, ROOT, size)
    assert hasher.num_tokens == len(whole)


@given(TOKENS, TOKENS, BLOCK)
def test_extending_equals_whole(first: list[int], second: list[int], size: int) -> None:
    aligned = first[: len(first) // size * size]
    before = block_hashes(aligned, ROOT, size)
    after = extend_hashes(before[-1] if before else ROOT, second, size)
    assert before + after == block_hashes([*aligned, *second], ROOT, size)


def test_repeated_blocks_have_different_hashes() -> None:
    assert len(set(block_hashes([7] * 64, ROOT, 16))) == 4


@pytest.mark.parametrize("bad", [-1, 2**32, 1.5, "7", None])
def test_ids_that_are_no_token_ids_are_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="token ids"):
        block_hashes([*range(15), bad], ROOT, 16)  # type: ignore[list-item]


def test_no_collision_in_many_blocks() -> None:
    source = random.Random(1)
    hashes = block_hashes([source.randrange(8) for _ in range(40_000)], ROOT, 4)
    assert len(set(hashes)) == len(hashes)
