"""Where the tensors of a checkpoint lie: safetensors headers, of one file or of a sharded index.

Reads headers only (a few hundred kilobytes, whatever the model's size). Called by ``configs.checkpoints`` and
``configs.adapters``; the bytes themselves are read by ``configs.digests``.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import msgspec

from kvkin.kv.errors import ConfigError

# The format's own bound on its JSON header.
MAX_HEADER_BYTES = 100_000_000

# safetensors name -> (name in a numerics class, bytes per element). Others are quantised or no weights.
WEIGHT_DTYPES = {"F32": ("float32", 4), "BF16": ("bfloat16", 2), "F16": ("float16", 2)}
_ELEMENT_BYTES = {"F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_ELEMENT_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1} | {name: size for name, (_, size) in WEIGHT_DTYPES.items()}


class TensorRef(msgspec.Struct, frozen=True):
    """A tensor in a file, row-major: bytes [start, stop) of ``path``."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    def rows(self, first: int, last: int, name: str = "") -> TensorRef:
        """Rows [first, last) of the leading dimension, which lie together in a row-major tensor."""
        row_bytes = self.num_bytes // self.shape[0]
        return TensorRef(
            name or self.name,
            self.path,
            self.dtype,
            (last - first, *self.shape[1:]),
            self.start + first * row_bytes,
            self.start + last * row_bytes,
        )

    def entry(self, index: int, name: str) -> TensorRef:
        """Entry ``index`` of the leading dimension, without that dimension."""
        row = self.rows(index, index + 1, name)
        return TensorRef(name, row.path, row.dtype, row.shape[1:], row.start, row.stop)


def read_tensors(folder: Path, stem: str, key: str) -> dict[str, TensorRef]:
    """All tensors below ``folder``: of ``<stem>.safetensors``, or of the shards that ``<stem>.safetensors.index.json`` names.

    Raises ConfigError under ``key`` for a checkpoint that is absent, damaged, incomplete or in another format.
    """
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if single.is_file():
        return {tensor.name: tensor for tensor in read_header(single, key)}
    if not index.is_file():
        others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
        problem = f"{folder} has no {single.name}" + (f", only {', '.join(others[:3])}" if others else "")
        raise ConfigError(key, problem, "safetensors weights: convert with save_pretrained")
    weight_map = read_json(index, key).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(key, f"{index} has no weight_map", "the index that save_pretrained writes")
    tensors: dict[str, TensorRef] = {}
    for shard in sorted({str(name) for name in weight_map.values()}):
        if Path(shard).name != shard:  # an index must not reach outside its own folder
            raise ConfigError(key, f"{index.name} names {shard!r}", "file names beside the index")
        if not (folder / shard).is_file():
            raise ConfigError(key, f"{folder} lacks the shard {shard}", "all shards that the index names")
        # what lies in a shard but not in the index is not loaded by anybody
        tensors |= {t.name: t for t in read_header(folder / shard, key) if weight_map.get(t.name) == shard}
    lacking = sorted(set(weight_map) - set(tensors))
    if lacking:
        raise ConfigError(key, f"the shards of {folder} lack {lacking[0]}", "all tensors that the index names")
    return tensors


def read_header(path: Path, key: str) -> list[TensorRef]:
    """The tensors of one safetensors file; ConfigError if it is truncated or not such a file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise ConfigError(key, f"{path} is not a safetensors file, or cut short", "a complete safetensors file")
            header: Any = json.loads(file.read(length))
        base = 8 + length
        return [_tensor(path, name, entry, base, size) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(key, f"{path}: damaged header: {error}", "a complete safetensors file") from None
    except OSError as error:
        raise ConfigError(key, f"{path} cannot be read: {error.strerror}", "a readable file") from None


def _tensor(path: Path, name: str, entry: dict[str, Any], base: int, size: int) -> TensorRef:
    """One header entry; ValueError if it contradicts itself or the file's size."""
    dtype, shape = str(entry["dtype"]), tuple(int(length) for length in entry["shape"])
    begin, end = (int(offset) for offset in entry["data_offsets"])
    element_bytes = _ELEMENT_BYTES.get(dtype)
    if begin < 0 or end < begin or base + end > size:
        raise ValueError(f"{name} reaches beyond the end of the file")
    if element_bytes is not None and math.prod(shape) * element_bytes != end - begin:
        raise ValueError(f"{name} has {end - begin} bytes, which is not {dtype} {list(shape)}")
    return TensorRef(name, path, dtype, shape, base + begin, base + end)


def read_json(path: Path, key: str) -> dict[str, Any]:
    """A JSON object from a file; ConfigError if it cannot be read or is something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(key, f"{path} cannot be read: {error.strerror}", "a readable file") from None
    except ValueError as error:
        raise ConfigError(key, f"{path} is not JSON: {error}", "a JSON object") from None
    if not isinstance(data, dict):
        raise ConfigError(key, f"{path} holds a {type(data).__name__}", "a JSON object")
    return data
