"""Token ids for load: drawn from a family's vocabulary by name, so that equal names give equal ids in every process and run.

Pure but for ``family_vocabulary`` and ``vocabulary_size``, which read a checkpoint's JSON. Ids come out of SHAKE-128 over (seed, salt, name): a longer draw
under one name begins with the shorter one, and draws under different salts have nothing in common. Used by the workloads of
``kvkin bench serving``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvkin.configs.architectures import read_geometry
from kvkin.configs.checkpoints import locate
from kvkin.configs.convert import child_key
from kvkin.configs.prompt_files import read_eos_ids, read_tokenizer
from kvkin.configs.safetensors_files import read_json
from kvkin.configs.schema import ClusterConfig
from kvkin.kv.errors import ConfigError

# Fewer different ids than this make equal blocks by chance likely.
MIN_IDS = 16


class TokenSource:
    """Names -> token ids. One source for each measured point: its salt keeps the contexts of all points apart."""

    def __init__(self, vocabulary: Sequence[int] | NDArray[np.int64], seed: int, salt: str) -> None:
        """``vocabulary``: the ids to draw from, (num_ids,) int64."""
        self._ids = np.asarray(vocabulary, dtype=np.int64)
        self._seed, self._salt = seed, salt

    def draw(self, count: int, kind: str, *numbers: int) -> tuple[int, ...]:
        """``count`` ids under the name (kind, numbers)."""
        # MessagePack frames each field: ("a", 1, 23) is not ("a", 12, 3)
        name = msgspec.msgpack.encode((self._seed, self._salt, kind, numbers))
        drawn = np.frombuffer(hashlib.shake_128(name).digest(4 * count), dtype="<u4")
        return tuple(self._ids[drawn % len(self._ids)].tolist())


def range_vocabulary(bounds: tuple[int, int]) -> NDArray[np.int64]:
    """The ids [start, stop) of ``--vocab``: (num_ids,) int64. Raises ConfigError."""
    start, stop = bounds
    if start < 0 or stop - start < MIN_IDS:
        raise ConfigError("--vocab", f"{start} {stop}", f"start and stop of at least {MIN_IDS} ids, from 0 on")
    return np.arange(start, stop, dtype=np.int64)


def vocabulary_size(config: ClusterConfig, family_name: str) -> int:
    """How many token ids the base of a family embeds. Raises ConfigError if its checkpoint cannot be read."""
    family = config.families[family_name]
    key = f"{child_key(child_key('families', family_name) + '.models', family.base)}.checkpoint"
    folder = locate(family.models[family.base].checkpoint, "config.json", key)
    return read_geometry(read_json(folder / "config.json", key), key).vocab_size


def family_vocabulary(config: ClusterConfig, family_name: str) -> NDArray[np.int64]:
    """All ids of a family's tokenizer but added tokens and those that end an answer: (num_ids,) int64.

    Raises ConfigError if the base's checkpoint or its tokenizer cannot be read.
    """
    family = config.families[family_name]
    key = f"{child_key(child_key('families', family_name) + '.models', family.base)}.checkpoint"
    folder = locate(family.models[family.base].checkpoint, "config.json", key)
    tokenizer = read_tokenizer(folder, key)
    if tokenizer is None:
        raise ConfigError(key, f"{folder} has no tokenizer", "a checkpoint with tokenizer.json, or --vocab START STOP")
    settings = read_json(folder / "config.json", key)
    vocab_size = min(tokenizer.num_ids, int(settings.get("vocab_size", tokenizer.num_ids)))
    special = [token for token, _ in tokenizer.added] + list(read_eos_ids(folder, settings, vocab_size, key))
    ids = np.setdiff1d(np.arange(vocab_size, dtype=np.int64), np.asarray(special, dtype=np.int64))
    if len(ids) < MIN_IDS:
        raise ConfigError(key, f"its tokenizer has {len(ids)} ids that are not special", f"at least {MIN_IDS}")
    return ids
