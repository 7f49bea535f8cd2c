"""``kvkin bench transport`` with tiny sizes: the shape of what it prints, not the figures."""

from __future__ import annotations

import json
import multiprocessing

import pytest

from kvkin.kv.errors import ConfigError
from kvkin.tools.bench_transport import ARMS, BenchTransport, parse_size, ratio


def test_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert BenchTransport(sizes=("4K", "100000"), repeats=2, json=True).run() == 0
    results = json.loads(capfd.readouterr().out)["results"]
    assert {(row["backend"], row["bytes"]) for row in results} == {
        (arm, size) for arm in ARMS for size in (4096, 100000)
    }
    for row in results:
        assert set(row) == {"backend", "bytes", "gb_per_s", "latency_us"}
        assert row["latency_us"] > 0
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["latency_us"] / 1e3, rel=0.05, abs=1e-3)
    assert not multiprocessing.active_children()


def test_table(capfd: pytest.CaptureFixture[str]) -> None:
    assert BenchTransport(sizes=("8K",), repeats=1).run() == 0
    out = capfd.readouterr().out
    assert "8,192" in out
    assert "2 interleaved" not in out


def test_parse_size() -> None:
    assert [parse_size(text) for text in ("64K", "16M", "1g", "17")] == [64 << 10, 16 << 20, 1 << 30, 17]
    for bad in ("", "K", "0", "-1", "1.5M", "64KiB"):
        with pytest.raises(ConfigError):
            parse_size(bad)


def test_ratio_is_of_pairs() -> None:
    seconds = {("tcp", 8): [1.0, 2.0, 4.0], ("socket", 8): [0.5, 1.0, 2.0]}
    assert ratio(seconds, "tcp", "socket", 8) == (0.5, 0.5, 0.5)
