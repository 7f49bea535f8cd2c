"""A command's output folder, tried before anything is measured or trained: hours of work must not end at a folder that takes none of it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kvkin.kv.errors import ConfigError


def check_out_folder(key: str, folder: Path) -> None:
    """Raise ConfigError under ``key`` unless ``folder`` is one that can be written to, or can be made. Leaves nothing behind."""
    place = folder
    try:
        while not (place.exists() or place.is_symlink() or place == place.parent):
            place = place.parent
        if not place.is_dir():
            raise ConfigError(key, f"{place} is no folder", "a folder, there or not")
        # asking for permissions is not enough: root has them on a file system that is read-only or full, too
        with tempfile.TemporaryDirectory(prefix=".kvkin-", dir=place):
            pass
    except OSError as error:
        raise ConfigError(
            key, f"{folder} cannot be written: {error.strerror}", "a folder that you can write to"
        ) from None
