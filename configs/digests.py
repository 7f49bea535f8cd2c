"""Digests of tensors, streamed from disk and cached: a 70B checkpoint is read once, through buffers of a few MiB.

The cache is one small JSON file per weight file, valid for exactly the (path, size, mtime, ctime, inode) that was hashed. It
is only a cache: damaged or missing, the bytes are hashed again. Called by ``configs.checkpoints`` in any process.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from kvkin.configs.safetensors_files import TensorRef
from kvkin.kv.errors import ConfigError
from kvkin.kv.hashing import DIGEST_BYTES, digest

# Raise when the bytes under a digest change their meaning: all caches are void then.
HASH_VERSION = 1
CHUNK_BYTES = 4 << 20
MAX_THREADS = 8
# A file changed so recently may change again without a new time stamp (clocks tick in milliseconds): not cached yet.
SETTLE_NS = 50_000_000

# (what is read, bytes done, bytes in all); called from the thread that asked, at most once per tensor.
Progress = Callable[[str, int, int], None]

FileKey = tuple[int, ...]


class DigestCache:
    """Tensor digests by file, below ``folder`` (usually <state_dir>/digests); None keeps nothing."""

    def __init__(self, folder: Path | None, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._folder, self._now_ns = folder, now_ns

    def load(self, path: Path) -> dict[str, bytes]:
        """Digests known for the file as it is now."""
        if self._folder is None:
            return {}
        try:
            data = json.loads(self._entry(path).read_text(encoding="utf-8"))
            if data["file"] != str(path.resolve()) or tuple(data["key"]) != file_key(path):
                return {}
            known = {str(name): bytes.fromhex(text) for name, text in data["digests"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        return {name: value for name, value in known.items() if len(value) == DIGEST_BYTES}

    def store(self, path: Path, key: FileKey, digests: dict[str, bytes]) -> None:
        """Keep ``digests`` of the file that had ``key``. A cache that cannot be written is no error."""
        if self._folder is None or self._now_ns() - max(key[2], key[3]) < SETTLE_NS:
            return
        data = {
            "file": str(path.resolve()),
            "key": key,
            "digests": {name: d.hex() for name, d in sorted(digests.items())},
        }
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, staging = tempfile.mkstemp(prefix=".digests-", dir=self._folder)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump(data, file)
                os.replace(staging, self._entry(path))  # readers see the old file or the new one
            except OSError:
                os.unlink(staging)
                raise

    def _entry(self, path: Path) -> Path:
        assert self._folder is not None
        # one entry per path, so a swapped file replaces its predecessor's digests instead of piling up
        return self._folder / f"{digest(b'digest-cache', str(path.resolve()).encode()).hex()}.json"


def file_key(path: Path) -> FileKey:
    """What identifies a file's content without reading it: changes whenever the file is written or replaced."""
    stat = path.stat()
    # ctime as well: rsync and cp -p put the old mtime on new bytes
    return HASH_VERSION, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def tensor_digests(
    tensors: Iterable[TensorRef], cache: DigestCache, key: str, progress: Progress | None = None
) -> dict[str, bytes]:
    """Digest of dtype, shape and bytes of each tensor, by name. Independent of the file that it lies in.

    Hashes what the cache does not know, some tensors at a time; memory is MAX_THREADS x CHUNK_BYTES at most. Raises
    ConfigError under ``key`` if a file cannot be read, is shorter than its header says, or changes meanwhile.
    """
    by_file: dict[Path, list[TensorRef]] = {}
    for tensor in tensors:
        by_file.setdefault(tensor.path, []).append(tensor)
    plans = []
    for path, wanted in sorted(by_file.items()):
        known = cache.load(path)
        # bytes that are wanted under several names (a tied embedding) are read once
        by_slot = {slot: tensor for tensor in wanted if (slot := _slot(tensor)) not in known}
        plans.append((path, wanted, known, list(by_slot.values())))
    total = sum(tensor.num_bytes for *_, missing in plans for tensor in missing)
    done = 0
    result: dict[str, bytes] = {}
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        for path, wanted, known, missing in plans:
            try:
                before = file_key(path)
                for tensor, value in zip(missing, pool.map(hash_tensor, missing), strict=True):
                    known[_slot(tensor)] = value
                    done += tensor.num_bytes
                    if progress is not None:
                        progress(path.name, done, total)
                if missing and file_key(path) != before:
                    raise ConfigError(key, f"{path} changed while it was read", "weights that nobody is writing")
            except (OSError, EOFError) as error:
                raise ConfigError(key, f"{path} cannot be read: {error}", "a complete, readable file") from None
            if missing:
                cache.store(path, before, known)
            result |= {tensor.name: known[_slot(tensor)] for tensor in wanted}
    return result


def hash_tensor(tensor: TensorRef) -> bytes:
    """Stream one tensor's bytes through the hash. OSError or EOFError if they cannot be read."""
    state = blake2b(digest_size=DIGEST_BYTES, person=b"tensor")
    shape = struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape)
    for field in (tensor.dtype.encode(), shape):
        state.update(struct.pack("<Q", len(field)))
        state.update(field)
    # pread, not mmap: a file that is cut short meanwhile gives an error here instead of a SIGBUS
    buffer = memoryview(bytearray(min(CHUNK_BYTES, max(tensor.num_bytes, 1))))
    descriptor = os.open(tensor.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        position = tensor.start
        while position < tensor.stop:
            count = os.preadv(descriptor, [buffer[: min(len(buffer), tensor.stop - position)]], position)
            if count == 0:
                raise EOFError(f"ends at byte {position}, within {tensor.name}")
            state.update(buffer[:count])
            position += count
    finally:
        os.close(descriptor)
    return state.digest()


def _slot(tensor: TensorRef) -> str:
    """The cache's name for a tensor or a part of one."""
    return f"{tensor.dtype}:{'x'.join(map(str, tensor.shape))}:{tensor.start}:{tensor.stop}"
