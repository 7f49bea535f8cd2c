"""One process of vLLM's own disaggregated mode in ``kvkin bench engine disaggregated``: vLLM with its NIXL connector, in a child process.

It prefills for others, or pulls what another one prefilled: what ``kv_transfer_params`` of a request say. vLLM's steps and the requests that come
meanwhile take turns, as in vLLM's own engine process, and an idle step waits a millisecond as there.
"""

from __future__ import annotations

import os
import queue
import time
from dataclasses import dataclass, field

from kvkin.configs.families import ResolvedFamily
from kvkin.configs.vllm_node import VllmNode
from kvkin.engines.vllm.plain import PlainVllm
from kvkin.tools.bench_engine_lines import Inbox, Mouth
from kvkin.tools.bench_engine_messages import Asked, Failed, First, Generate, Generated, Ready, Setup
from kvkin.tools.vllm_engine import node_weights

IDLE_STEP_S = 0.001
"""What vLLM's engine process sleeps after a step that had nothing to run (vllm v1/engine/core.py)."""
UCX = {"UCX_TLS": "^posix,sysv", "UCX_NET_DEVICES": "lo"}


@dataclass
class _Running:
    number: int
    token_ids: list[int] = field(default_factory=list)


class Peer:
    """``turn`` takes in what was asked and runs one step."""

    def __init__(self, vllm: PlainVllm, inbox: Inbox, mouth: Mouth) -> None:
        self._vllm, self._inbox, self._mouth = vllm, inbox, mouth
        self._running: dict[str, _Running] = {}

    def turn(self) -> None:
        self._take_in()
        began = time.monotonic()
        progress = self._vllm.step()
        for each in progress:
            running = self._running[each.key]
            if each.new_tokens and not running.token_ids:
                self._mouth.say(running.number, First())
            running.token_ids += each.new_tokens
            if each.finished:
                del self._running[each.key]
                transfer = None if each.transfer is None else dict(each.transfer)
                self._mouth.say(running.number, Generated(tuple(running.token_ids), each.cached_tokens, transfer))
        # chunks of a prefill bring no tokens either, but take longer
        if not progress and time.monotonic() - began < IDLE_STEP_S:
            time.sleep(IDLE_STEP_S)

    def _take_in(self) -> None:
        """New requests; without anything to do, wait for one."""
        if not self._vllm.busy:
            self._add(self._inbox.get())
        while True:
            try:
                asked = self._inbox.get_nowait()
            except queue.Empty:
                return
            self._add(asked)

    def _add(self, asked: Asked) -> None:
        command = asked.command
        if not isinstance(command, Generate):
            self._mouth.say(asked.number, Failed("a peer only generates"))
            return
        key = str(asked.number)
        self._running[key] = _Running(asked.number)
        try:
            self._vllm.add(key, command.token_ids, command.max_tokens, command.transfer)
        except ValueError as error:
            del self._running[key]
            self._mouth.say(asked.number, Failed(str(error)))


def serve_peer(
    setup: Setup, family: ResolvedFamily, model: str, node: VllmNode, kv_bytes: int, inbox: Inbox, mouth: Mouth
) -> None:
    """Load ``model`` and serve until the process is ended. The cache has ``kv_bytes``: as much as vLLM's and kvkin's memory of a node together."""
    os.environ |= {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(setup.side_channel_port),
    }
    # as kvkin's own backend sets UCX up: nothing in /dev/shm that a killed process would leave behind, loopback only
    for name, value in UCX.items():
        os.environ.setdefault(name, value)
    checkpoint, _ = node_weights(family, family.models[model], (model,), node)
    options = {**node.options, "kv_cache_memory_bytes": kv_bytes}
    # its default of four threads for transfers is more than a process has for computing
    vllm = PlainVllm(checkpoint, options, nixl_threads=max(1, node.threads))
    mouth.say(0, Ready({**vllm.settings, "kv_bytes": kv_bytes, "threads": node.threads}))
    peer = Peer(vllm, inbox, mouth)
    while True:
        peer.turn()
