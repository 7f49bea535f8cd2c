"""What the tests of ``kvkin finetune`` share: a small SQuAD file, and Ctrl-C at a certain sample."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvkin.tools.finetune_progress import Reporter


def write_squad(path: Path) -> Path:
    """Twenty articles with two paragraphs of two questions each."""
    articles = [
        {
            "title": f"Town_{town}",
            "paragraphs": [
                {
                    "context": f"Town {town} has {town + 3} {kind}s.",
                    "qas": [
                        {"question": f"What has {town + 3}?", "answers": [{"text": kind}]},
                        {"question": f"How many {kind}s?", "answers": [{"text": f"{town + 3}"}, {"text": "some"}]},
                    ],
                }
                for kind in ("bridge", "tower")
            ],
        }
        for town in range(20)
    ]
    path.write_text(json.dumps({"version": "1.1", "data": articles}))
    return path


@contextmanager
def interrupt_after(num_samples: int, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> Iterator[None]:
    """Send this process ``times`` SIGINTs once ``num_samples`` training samples are done."""
    original = Reporter.training
    count = 0

    @contextmanager
    def training(self: Reporter, *args: Any) -> Iterator[Any]:
        with original(self, *args) as on_sample:

            def wrapped(*seen: Any) -> None:
                nonlocal count
                on_sample(*seen)
                count += 1
                if count == num_samples:
                    for _ in range(times):
                        signal.raise_signal(signal.SIGINT)

            yield wrapped

    with monkeypatch.context() as patch:
        patch.setattr(Reporter, "training", training)
        yield
