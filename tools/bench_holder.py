"""The holder of ``kvkin bench pipeline``: a real prefill node in a process of its own, whose link can be slowed down.

Reads commands from stdin, a line each: ``rate BYTES_PER_S`` paces connections opened from then on, ``stop`` ends it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import msgspec
import torch

from kvkin.engines.loading import load_model
from kvkin.engines.reference import ReferenceEngine
from kvkin.prefill_nodes.node import PrefillNode
from kvkin.transport.backends.tcp import TcpTransport
from kvkin.transport.node_runtime import NodeSettings


async def main() -> None:
    """Arguments: the node's settings as JSON, the checkpoint, the adapter (empty: none), threads."""
    settings = msgspec.json.decode(sys.argv[1], type=NodeSettings)
    torch.set_num_threads(int(sys.argv[4]))
    adapter = Path(sys.argv[3]) if sys.argv[3] else None
    model = load_model(Path(sys.argv[2]), adapter, device="cpu", compute_dtype="float32")
    engine = ReferenceEngine(
        {settings.models[0].name: model}, block_size=settings.layout.block_size, chunk_tokens=settings.chunk_tokens
    )
    transport = TcpTransport(settings.bind_host)
    node = PrefillNode(settings, engine, transport)
    stop = asyncio.Event()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    serving = asyncio.ensure_future(node.serve(stop))
    print(json.dumps({"address": node.runtime.source_address}), flush=True)
    while line := (await reader.readline()).decode().split():
        if line[0] == "stop":
            break
        transport.limit_rate(int(line[1]))
        print(json.dumps({"rate": int(line[1])}), flush=True)
    stop.set()
    await serving


if __name__ == "__main__":
    asyncio.run(main())
