"""Digests: streamed with a bound on memory, cached by what identifies a file, and never stale."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoint_edits import copy, identity, lineage, nudge
from tiny_models import make_tiny

from kvkin.configs import digests
from kvkin.configs.digests import DigestCache, file_key, hash_tensor, tensor_digests
from kvkin.configs.safetensors_files import TensorRef, read_header
from kvkin.kv.errors import ConfigError

# of two layers, the embedding, which is the head as well, and the final norm
TENSORS = 2 * 9 + 2


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("digests") / "base", num_layers=2, tokenizer=False)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that were read, cache hits left out; files count as settled at once."""
    names: list[str] = []

    def spy(tensor: TensorRef) -> bytes:
        names.append(tensor.name)
        return hash_tensor(tensor)

    monkeypatch.setattr(digests, "hash_tensor", spy)
    monkeypatch.setattr(digests, "SETTLE_NS", -(10**12))
    return names


def test_the_second_start_reads_headers_only(base: Path, tmp_path: Path, hashed: list[str]) -> None:
    first = identity(base, cache_dir=tmp_path)
    assert len(hashed) == TENSORS
    hashed.clear()
    assert identity(base, cache_dir=tmp_path) == first
    assert hashed == []
    assert first == identity(base)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"], "no staging file is left"


def test_a_tied_embedding_is_read_once(base: Path, hashed: list[str], tmp_path: Path) -> None:
    identity(base)
    assert len(hashed) == len(set(hashed)) == TENSORS
    hashed.clear()
    # a head of its own is read; of a vocabulary with added tokens the family's rows and the others, each once
    identity(make_tiny("qwen3", tmp_path / "untied", num_layers=1, tokenizer=False))
    assert [name for name in hashed if "lm_head" in name] == ["lm_head.weight.0"]
    hashed.clear()
    identity(base, family_vocab=300)
    assert [name for name in hashed if "lm_head" in name or "embed" in name] == ["lm_head.weight.0", "lm_head.weight.1"]


def test_a_swap_of_weights_is_noticed(base: Path, tmp_path: Path, hashed: list[str]) -> None:
    folder, cache = copy(base, tmp_path / "m"), tmp_path / "cache"
    before = lineage(folder, cache_dir=cache)
    weights = folder / "model.safetensors"
    stat = weights.stat()
    nudge(folder, "model.layers.1.self_attn.k_proj.weight")
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as a careless copy does
    assert weights.stat().st_size == stat.st_size
    after = lineage(folder, cache_dir=cache)
    assert after == lineage(folder)
    assert after != before
    assert len(list(cache.iterdir())) == 1, "the old digests are replaced, not kept beside"


def test_a_file_changed_in_place_with_its_old_time_stamp_is_noticed(
    base: Path, tmp_path: Path, hashed: list[str]
) -> None:
    folder, cache = copy(base, tmp_path / "m"), tmp_path / "cache"
    before = lineage(folder, cache_dir=cache)
    weights = folder / "model.safetensors"
    stat = weights.stat()
    name = "model.layers.1.self_attn.k_proj.weight"
    tensor = next(tensor for tensor in read_header(weights, "k") if tensor.name == name)
    with weights.open("r+b") as file:  # same inode, same size
        file.seek(tensor.start)
        file.write(b"\x01\x02")
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = weights.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    assert lineage(folder, cache_dir=cache) != before


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"file": 1}', "\x00", '{"file": "FILE", "key": KEY, "digests": {"x": "zz"}}']
)
def test_a_damaged_cache_is_no_error(base: Path, tmp_path: Path, hashed: list[str], content: str) -> None:
    expected = lineage(base, cache_dir=tmp_path)
    (entry,) = tmp_path.iterdir()
    weights = base / "model.safetensors"
    entry.write_text(content.replace("FILE", str(weights)).replace("KEY", json.dumps(file_key(weights))))
    hashed.clear()
    assert lineage(base, cache_dir=tmp_path) == expected
    assert len(hashed) == TENSORS
    hashed.clear()
    assert lineage(base, cache_dir=tmp_path) == expected
    assert hashed == [], "the entry is repaired"


def test_a_forged_entry_of_another_length_is_not_used(base: Path, tmp_path: Path, hashed: list[str]) -> None:
    expected = lineage(base, cache_dir=tmp_path)
    (entry,) = tmp_path.iterdir()
    data = json.loads(entry.read_text())
    data["digests"] = {name: text[:8] for name, text in data["digests"].items()}
    entry.write_text(json.dumps(data))
    assert lineage(base, cache_dir=tmp_path) == expected


def test_a_hash_version_voids_the_cache(
    base: Path, tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage(base, cache_dir=tmp_path)
    hashed.clear()
    monkeypatch.setattr(digests, "HASH_VERSION", 99)
    lineage(base, cache_dir=tmp_path)
    assert len(hashed) == TENSORS


def test_a_cache_that_cannot_be_written_is_no_error(base: Path, tmp_path: Path, hashed: list[str]) -> None:
    (tmp_path / "file").write_text("")
    assert lineage(base, cache_dir=tmp_path / "file" / "below") == lineage(base)


def test_a_file_written_just_now_is_not_cached(base: Path, tmp_path: Path) -> None:
    weights = base / "model.safetensors"
    key = file_key(weights)
    changed_ns = max(key[2], key[3])
    for now_ns, kept in ((changed_ns + 1_000_000, {}), (changed_ns + 10**9, {"x": b"1" * 16})):
        cache = DigestCache(tmp_path, now_ns=lambda now_ns=now_ns: now_ns)
        cache.store(weights, key, {"x": b"1" * 16})
        assert cache.load(weights) == kept


def test_a_symlink_and_its_target_share_an_entry(base: Path, tmp_path: Path, hashed: list[str]) -> None:
    folder, cache = tmp_path / "snapshot", tmp_path / "cache"
    folder.mkdir()
    for file in base.iterdir():
        (folder / file.name).symlink_to(file)
    assert lineage(folder, cache_dir=cache) == lineage(base, cache_dir=cache)
    assert len(hashed) == TENSORS


def test_weights_that_change_while_they_are_read_are_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy(base, tmp_path / "m")
    weights = folder / "model.safetensors"

    def meddle(tensor: TensorRef) -> bytes:
        os.utime(weights, ns=(1, time.time_ns()))
        return hash_tensor(tensor)

    monkeypatch.setattr(digests, "hash_tensor", meddle)
    with pytest.raises(ConfigError, match="changed while it was read"):
        lineage(folder)


def test_a_file_cut_short_while_it_is_read(base: Path, tmp_path: Path) -> None:
    folder = copy(base, tmp_path / "m")
    tensors = read_header(folder / "model.safetensors", "k")
    os.truncate(folder / "model.safetensors", tensors[-1].stop - 10)
    with pytest.raises(ConfigError, match="ends at byte"):
        tensor_digests(tensors, DigestCache(None), "k")


def test_progress_tells_bytes_up_to_all(base: Path, tmp_path: Path, hashed: list[str]) -> None:
    seen: list[tuple[str, int, int]] = []
    identity(base, cache_dir=tmp_path, progress=lambda *report: seen.append(report))
    assert len(seen) == TENSORS
    assert {what for what, _, _ in seen} == {"model.safetensors"}
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1] == seen[-1][2] > 0
    seen.clear()
    identity(base, cache_dir=tmp_path, progress=lambda *report: seen.append(report))
    assert seen == []


def test_digests_do_not_depend_on_chunks(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = lineage(base)
    monkeypatch.setattr(digests, "CHUNK_BYTES", 1000)
    assert lineage(base) == expected


def test_dtype_and_shape_count(base: Path) -> None:
    tensor = read_header(base / "model.safetensors", "k")[0]
    values = {
        hash_tensor(tensor),
        hash_tensor(TensorRef(tensor.name, tensor.path, "I32", tensor.shape, tensor.start, tensor.stop)),
        hash_tensor(TensorRef(tensor.name, tensor.path, tensor.dtype, (*tensor.shape, 1), tensor.start, tensor.stop)),
    }
    assert len(values) == 3


LIMITED = """
import resource, sys
from pathlib import Path
from kvkin.configs.digests import DigestCache, tensor_digests
from kvkin.configs.safetensors_files import read_header
tensors = read_header(Path(sys.argv[1]), "k")
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
# threads reserve address space for stacks and heaps (72 MiB each) without using it
limit = used + (800 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
print(len(tensor_digests(tensors, DigestCache(None), "k")), tensors[0].num_bytes)
# not ru_maxrss, which remembers the parent's memory from before exec
status = Path("/proc/self/status").read_text()
print(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and RLIMIT_AS")
def test_a_tensor_larger_than_the_memory_allowed_is_digested(tmp_path: Path) -> None:
    num_bytes = 1 << 30  # sparse on disk
    header = json.dumps({"huge": {"dtype": "BF16", "shape": [num_bytes // 2], "data_offsets": [0, num_bytes]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + num_bytes)
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "model.safetensors")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    count, size, peak_kib = (int(word) for word in result.stdout.split())
    assert (count, size) == (1, num_bytes)
    assert peak_kib < 150 << 10
