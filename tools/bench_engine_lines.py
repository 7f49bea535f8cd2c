"""A child's end of the lines between ``kvkin bench engine`` and its children: what was asked comes in, replies go out."""

from __future__ import annotations

import os
import queue
import sys
from typing import TextIO

import msgspec

from kvkin.tools.bench_engine_messages import Answered, Asked, Reply


class Mouth:
    """Replies, a line each. ``out`` is the stdout that the bench reads."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def say(self, number: int, reply: Reply) -> None:
        self._out.write(msgspec.json.encode(Answered(number, reply)).decode() + "\n")
        self._out.flush()


Inbox = queue.SimpleQueue[Asked]


def listen(inbox: Inbox) -> None:
    """Read commands for as long as there is a bench; then end this process at once."""
    decoder = msgspec.json.Decoder(Asked)
    for line in sys.stdin:
        inbox.put(decoder.decode(line))
    os._exit(0)
