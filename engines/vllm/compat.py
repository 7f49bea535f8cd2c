"""Everything that depends on how one minor release of vLLM is built inside, in one place.

The rest of this room uses vLLM's documented extension points. What is touched here: the module global that names a process's
connector (so that several engines can live in one process), the path from an engine to its scheduler, and the environment that
vLLM reads when it is imported.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvkin.configs.vllm_install import SUPPORTED_MINOR, declared, is_supported
from kvkin.kv.errors import ConfigError

PROCESS_LOCK = threading.RLock()
"""vLLM's forward context, current connector and parallel state belong to the process: one engine steps at a time."""
_engines = 0


def installed_version() -> str | None:
    """The version of vLLM that is installed here, None if none is. Imports nothing."""
    found = declared()
    return None if found is None else found[1]


def check_version() -> None:
    """Raise ConfigError unless the supported minor release of vLLM is installed."""
    version = installed_version()
    allowed = f"vLLM {SUPPORTED_MINOR}.x"
    if version is None:
        raise ConfigError("engine", "vLLM is not installed", f"{allowed}, or engine: reference")
    if not is_supported(version):
        raise ConfigError("engine", f"vLLM {version} is installed, and this kvkin knows another one's inside", allowed)


def prepare_environment() -> None:
    """What vLLM reads when it is imported: the engine's core in this process, no phoning home, threads as they are."""
    wanted = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # ranks are started from a process that has threads
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    for key, value in wanted.items():
        os.environ.setdefault(key, value)
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        problem = "vLLM's engine core must run in the node's own process"
        raise ConfigError("VLLM_ENABLE_V1_MULTIPROCESSING", problem, "0, or unset")


def scheduler_of(llm: Any) -> Any:
    return llm.engine_core.engine_core.scheduler


@contextmanager
def building() -> Iterator[None]:
    """Around the construction of an engine: it gets a connector of its own although another engine may have one."""
    import vllm.distributed.kv_transfer.kv_transfer_state as state

    global _engines
    with PROCESS_LOCK:
        before, state._KV_CONNECTOR_AGENT = state._KV_CONNECTOR_AGENT, None
        try:
            yield
            _engines += 1
        finally:
            state._KV_CONNECTOR_AGENT = before


def use_salt(request: Any, salt: str | None) -> bool:
    """Have vLLM's prefix cache know a request of its scheduler under ``salt``; False if it does already.

    Only while nothing of the request is cached: before its blocks are allocated, or after they were given back.
    """
    if request.cache_salt == salt:
        return False
    request.cache_salt = salt
    # hashed when the request was made, each block over the one before
    request.block_hashes.clear()
    request.update_block_hashes()
    return True


def current_connector() -> Any:
    """The worker side's connector of the engine that is being built; None if its workers are other processes."""
    import vllm.distributed.kv_transfer.kv_transfer_state as state

    return state._KV_CONNECTOR_AGENT


def on_failure(llm: Any, callback: Callable[[], None]) -> None:
    """Have ``callback`` called, on a thread of vLLM's, when one of the processes that run the model has died."""
    register = getattr(llm.model_executor, "register_failure_callback", None)
    if register is not None:
        register(callback)


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Around the start of child processes: they inherit that Ctrl-C is not for them. Their parent ends them when it has drained."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def active(connector: Any) -> Iterator[None]:
    """Around whatever an engine does: its connector is the process's, and no other engine runs meanwhile."""
    import torch
    import vllm.distributed.kv_transfer.kv_transfer_state as state

    # torch sets a thread's OpenMP threads at its first operation there; vLLM's attention ends the process if that comes between
    # its planning and its running
    torch.get_num_threads()
    with PROCESS_LOCK:
        before, state._KV_CONNECTOR_AGENT = state._KV_CONNECTOR_AGENT, connector
        try:
            yield
        finally:
            state._KV_CONNECTOR_AGENT = before


def shut_down(llm: Any, connector: Any) -> None:
    """End an engine. The parallel state is the process's: the last one takes it down, earlier ones only let go of their memory.

    An engine whose ranks are other processes (no ``connector`` here) has none in this one: its end is theirs.
    """
    global _engines
    with active(connector):
        _engines -= 1
        if connector is None:
            llm.model_executor.shutdown()
        if not _engines:
            llm.engine_core.shutdown()
        else:
            _leftovers.append(llm)


_leftovers: list[Any] = []
"""Engines that were closed while others ran: their destructor would take the parallel state from those."""
