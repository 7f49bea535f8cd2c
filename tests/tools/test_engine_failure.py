"""A node whose engine fails ends by itself, and says so with its exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_cluster import BASE, make_cluster

from kvkin.configs.loader import load_cluster
from kvkin.kv.errors import NodeUnavailable
from kvkin.tools import roles


@pytest.mark.parametrize("name", ["prefill-0", "decode-base"])
@pytest.mark.parametrize("when", ["serving", "before it serves"])
def test_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, when: str) -> None:
    config = load_cluster(make_cluster(tmp_path, models=(BASE,)))
    engines: list[Any] = []
    build, write = roles.build_engine, roles.write_ready_file
    lost = NodeUnavailable("a rank has died")

    def built(*arguments: Any) -> Any:
        engines.append(build(*arguments))
        if when != "serving":
            engines[0].failure.set_exception(lost)
        return engines[0]

    def ready(path: Path | None, text: str) -> None:
        write(path, text)
        if when == "serving":
            engines[0].failure.set_exception(lost)

    monkeypatch.setattr(roles, "build_engine", built)
    monkeypatch.setattr(roles, "write_ready_file", ready)
    monkeypatch.setattr(roles.gc, "freeze", lambda: None)
    assert roles.serve_worker(config, name, tmp_path / "ready") == 1
    assert (tmp_path / "ready").exists()
