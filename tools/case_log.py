"""``CaseLog``: results of a long measurement, one JSON line a case, appended as they come, so that an interrupted run goes on.

The first line is the run's fingerprint: whatever decides the results (models' lineages, data, settings). A file of another
fingerprint is not mixed in but started anew. A last line that a kill cut off is ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class CaseLog:
    """``done`` are the records read so far, by stage and case: ``done["search", "case-7"]``."""

    def __init__(self, path: Path, fingerprint: Mapping[str, Any]) -> None:
        self.path = path
        self._head = json.dumps({"fingerprint": dict(fingerprint)}, sort_keys=True)
        self.done: dict[tuple[str, str], dict[str, Any]] = {}
        lines = list(_whole_lines(path)) if path.is_file() else []
        self.resumed = bool(lines) and lines[0] == self._head
        if self.resumed:
            for line in lines[1:]:
                record = json.loads(line)
                self.done[record["stage"], record["case"]] = record
            self._write(lines, anew=True)  # without a line that was cut off
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write([self._head], anew=True)

    def add(self, stage: str, case: str, record: Mapping[str, Any]) -> dict[str, Any]:
        """Append one case's record; on disk when this returns."""
        full = {"stage": stage, "case": case, **record}
        # through JSON at once: a resumed run must see the very same values
        line = json.dumps(full, sort_keys=True)
        self._write([line], anew=False)
        kept: dict[str, Any] = json.loads(line)
        self.done[stage, case] = kept
        return kept

    def records(self, stage: str) -> dict[str, dict[str, Any]]:
        """Records of one stage by case, in the order in which they were added."""
        return {case: record for (kind, case), record in self.done.items() if kind == stage}

    def _write(self, lines: list[str], *, anew: bool) -> None:
        """Append lines, or replace the file by them, whole."""
        if not anew:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
                file.flush()
                os.fsync(file.fileno())
            return
        temporary = self.path.with_name(self.path.name + ".part")
        temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        os.replace(temporary, self.path)


def _whole_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.endswith("\n"):
                return
            try:
                json.loads(line)
            except ValueError:
                return
            yield line.rstrip("\n")
