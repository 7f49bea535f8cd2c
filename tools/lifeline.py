"""Children that must not outlive the process that started them: a pipe whose other end only the parent holds.

The parent keeps the write end and never writes; when it dies, however it dies, the kernel closes that end and every child reads
the end of file. ``tools/cluster_processes.py`` makes the pipe, ``tools/cli.py`` watches it. Unlike PR_SET_PDEATHSIG, a thread
that ends in the parent does not count as its death, and a child gets the time to close its shared memory.
"""

from __future__ import annotations

import os
import signal
import threading
import time

LIFELINE_VARIABLE = "KVKIN_LIFELINE"
# An orphan has nobody to answer: it gets less time than a drain.
ORPHAN_GRACE_S = 10.0


def watch_parent() -> None:
    """Start a thread that ends this process when its parent is gone; the descriptor is named by ``KVKIN_LIFELINE``."""
    descriptor = int(os.environ.pop(LIFELINE_VARIABLE))
    threading.Thread(target=_watch, args=(descriptor,), name="kvkin-lifeline", daemon=True).start()


def _watch(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_GRACE_S)
    os._exit(1)
