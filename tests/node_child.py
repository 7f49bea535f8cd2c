"""A prefill or decode node as a process of its own, to be killed and frozen by tests: see ``ChildNode`` in node_processes.py."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import torch
from node_harness import BLOCK, CHUNK, load_member, settings_for

from kvkin.decode_nodes.node import DecodeNode
from kvkin.engines.reference import ReferenceEngine
from kvkin.prefill_nodes.node import PrefillNode
from kvkin.transport.node_runtime import stop_on_signals


async def main(role: str, name: str, model: str, path: str, cache: str, router: str, backend: str) -> None:
    torch.set_num_threads(1)
    member = load_member(model, Path(path), Path(cache))
    engine = ReferenceEngine({model: member.loaded}, block_size=BLOCK, chunk_tokens=CHUNK)
    settings = settings_for(role, name, [member], router, backend=backend)
    stop = asyncio.Event()
    stop_on_signals(stop, name)
    await (PrefillNode if role == "prefill" else DecodeNode)(settings, engine).serve(stop)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
