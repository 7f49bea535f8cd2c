"""A child process of ``kvkin bench engine``: one engine, which is asked over stdin and answers on stdout (``bench_engine_messages.py``).

    python -m kvkin.tools.bench_engine_child SETUP

with a :class:`Setup` as JSON. Commands are carried out one after the other, but for ``Generate``, which run side by side. The end of
stdin ends the process, whatever it is doing: it never outlives the bench. What vLLM prints goes to stderr, which is its log.
"""

from __future__ import annotations

import gc
import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from kvkin.configs.families import ResolvedFamily
from kvkin.configs.loader import load_cluster
from kvkin.configs.vllm_node import VllmNode, vllm_node
from kvkin.configs.vllm_rules import worker_node
from kvkin.kv.errors import ConfigError
from kvkin.tools.bench_engine_lines import Inbox, Mouth, listen
from kvkin.tools.bench_engine_messages import (
    Command,
    Decode,
    Failed,
    Generate,
    Prefill,
    Ready,
    Reply,
    Reuse,
    Setup,
    Stall,
)
from kvkin.tools.logs import setup_logging
from kvkin.tools.roles import resolve_worker
from kvkin.tools.vllm_engine import prepare_environment

log = structlog.get_logger()


def serve(setup: Setup, inbox: Inbox, mouth: Mouth) -> None:
    """Load what ``setup`` names and carry out commands until the process is ended."""
    config = load_cluster(Path(setup.file))
    family = resolve_worker(config, setup.node)
    node = vllm_node(config, family, setup.node)
    assert node is not None, "nodes of the bench run on vLLM"
    prepare_environment(node)
    (model,) = worker_node(config, setup.node).models
    match setup.arm:
        case "nixl":
            from kvkin.tools.bench_engine_peer import serve_peer

            worker = worker_node(config, setup.node)
            kv_bytes = int(node.options["kv_cache_memory_bytes"]) + worker.kv_bytes + worker.e_bytes
            serve_peer(setup, family, model, node, kv_bytes, inbox, mouth)
        case "receiver":
            from kvkin.tools.bench_engine_receiver import serve_receiver

            serve_receiver(setup, config, model, node, inbox, mouth)
        case "plain" | "kvkin" | "transformers":
            _serve_arm(setup, family, model, node, inbox, mouth)


def _serve_arm(setup: Setup, family: ResolvedFamily, model: str, node: VllmNode, inbox: Inbox, mouth: Mouth) -> None:
    import torch

    from kvkin.tools.bench_engine_arms import Arm, KvkinArm, PlainArm, TransformersArm

    if node.threads:
        torch.set_num_threads(node.threads)
    kinds: dict[str, Callable[[ResolvedFamily, str, VllmNode], Arm]] = {
        "plain": PlainArm,
        "kvkin": KvkinArm,
        "transformers": TransformersArm,
    }
    arm = kinds[setup.arm](family, model, node)
    # a collection of all that torch and vLLM consist of takes a second: not in the middle of a run
    gc.freeze()
    mouth.say(0, Ready({**arm.settings, "threads": torch.get_num_threads()}))

    def carry_out(command: Command) -> Reply:
        match command:
            case Prefill(token_ids):
                return arm.prefill(token_ids)
            case Decode(prompts, new_tokens):
                return arm.decode(prompts, new_tokens)
            case Stall() if isinstance(arm, KvkinArm):
                from kvkin.tools.bench_engine_stall import stall

                return stall(arm, command)
            case Stall() | Reuse() | Generate():
                return Failed(f"the arm {setup.arm} does not do this")

    while True:
        asked = inbox.get()
        try:
            reply = carry_out(asked.command)
        except Exception as error:  # told to the bench, which ends this process
            log.exception("a command failed")
            reply = Failed(f"{type(error).__name__}: {error}")
        mouth.say(asked.number, reply)


def main() -> int:
    """Returns the exit code: 2 for what cannot be done as asked."""
    # vLLM, and whatever it loads, may print: the bench's answers have a descriptor of their own
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    setup_logging("warning")
    setup = msgspec.json.decode(sys.argv[1], type=Setup)
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=listen, args=(inbox,), name="kvkin-bench-stdin", daemon=True).start()
    try:
        serve(setup, inbox, Mouth(out))
    except ConfigError as error:
        print(f"kvkin: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
