"""Recorded prompts: bounded, private to their user, whole lines only, readable by ``kvkin profile``."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import pytest

from kvkin.decode_nodes import drift_records
from kvkin.decode_nodes.drift_records import FOLDER, Record, Records
from kvkin.tools.profile import recorded
from kvkin.tools.quality_data import read_examples


def record(number: int, num_tokens: int = 10, sender: str = "base") -> Record:
    return Record((number, *range(1, num_tokens)), num_tokens - 2, sender, "org/qa")


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_what_the_profile_tool_reads(tmp_path: Path) -> None:
    records = Records(tmp_path / FOLDER, 1 << 20)
    assert records.add(record(100))
    assert records.add(record(101))
    path = recorded(tmp_path, "base", "org/qa")  # where the tool looks for it
    assert path == records.path("base", "org/qa")
    assert lines(path)[0] == {
        "token_ids": [100, 1, 2, 3, 4, 5, 6, 7, 8, 9],
        "suffix_start": 8,
        "sender": "base",
        "receiver": "org/qa",
    }
    found = read_examples(path)
    assert found.kind == "recorded"
    assert {one.token_ids[0]: one.suffix_start for one in found.examples} == {100: 8, 101: 8}


def test_nobody_else_may_read_them(tmp_path: Path) -> None:
    records = Records(tmp_path / FOLDER, 1 << 20)
    previous = os.umask(0)
    try:
        records.add(record(1))
    finally:
        os.umask(previous)
    assert (tmp_path / FOLDER).stat().st_mode & 0o777 == 0o700
    assert records.path("base", "org/qa").stat().st_mode & 0o777 == 0o600


def test_the_older_half_goes_and_a_pair_has_its_own_file(tmp_path: Path) -> None:
    most = 2000
    records = Records(tmp_path, most)
    records.add(record(7, sender="other"))
    path = records.path("base", "org/qa")
    for number in range(1000, 1100):
        assert records.add(record(number))
        assert path.stat().st_size <= most
        kept = [one["token_ids"][0] for one in lines(path)]  # type: ignore[index]
        assert kept == list(range(number - len(kept) + 1, number + 1)), "the newest, in order, without a gap"
    assert len(kept) >= most // 2 // 80
    assert len(lines(records.path("other", "org/qa"))) == 1


def test_what_does_not_fit_is_not_written(tmp_path: Path) -> None:
    records = Records(tmp_path / "none", 0)
    assert not records.add(record(1))
    assert not (tmp_path / "none").exists()
    records = Records(tmp_path, 200)
    assert records.add(record(1))
    assert not records.add(record(2, num_tokens=500))
    assert [one["token_ids"][0] for one in lines(records.path("base", "org/qa"))] == [1]  # type: ignore[index]


def test_several_nodes_of_a_host_write_one_file(tmp_path: Path) -> None:
    """Each with its own object, as each process has; no line is torn, the bound holds."""

    def write(node: int) -> None:
        records = Records(tmp_path, 5000)
        for number in range(100):
            assert records.add(record(1000 * node + number))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(1, 5)))
    path = Records(tmp_path, 0).path("base", "org/qa")
    assert path.stat().st_size <= 5000
    assert len(lines(path)) > 20


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = Records(tmp_path, 1 << 20)
    records.add(record(1))

    class Full:
        """Takes half of what is written, then fails, as a disk does."""

        def __init__(self, descriptor: int, *how: object, **more: object) -> None:
            self._file = os.fdopen(descriptor, "r+b")
            self._descriptor = descriptor

        def __getattr__(self, name: str) -> object:
            return getattr(self._file, name)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *details: object) -> None:
            self._file.close()

        def write(self, line: bytes) -> None:
            os.write(self._descriptor, line[: len(line) // 2])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(drift_records, "open", Full, raising=False)
    with pytest.raises(OSError, match="No space"):
        records.add(record(2))
    monkeypatch.undo()
    records.add(record(3))
    assert [one["token_ids"][0] for one in lines(records.path("base", "org/qa"))] == [1, 3]  # type: ignore[index]
