"""Opening ``kvkin bench pipeline``: the holder process with a context computed, and the loaded receiver in this process.

With ``OnVllm`` both run on vLLM (``kvkin bench engine ttft``), as nodes of a cluster file."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from kvkin.configs.families import ResolvedFamily
from kvkin.configs.vllm_node import VllmNode
from kvkin.kv.hashing import root_hash
from kvkin.kv.plan import Holder, LayerGroup
from kvkin.kv.provenance import exact_provenance
from kvkin.tools.bench_holder import HolderSetup, holding
from kvkin.tools.bench_pipeline_arms import Bench
from kvkin.tools.roles import build_engine
from kvkin.transport.messages import NodeLoad
from kvkin.transport.node_messages import ServedModel
from kvkin.transport.node_runtime import NodeRuntime, NodeSettings

DEADLINE_S = 900.0  # of anything that moves no data; a process that dies is noticed at once
FIRST_TOKEN_ID = 100  # below are special tokens


@dataclass(frozen=True)
class OnVllm:
    """The nodes of the cluster file ``file`` that run on vLLM: ``holder`` by name, the receiver as it starts here."""

    file: Path
    holder: str
    receiver: VllmNode


@contextlib.asynccontextmanager
async def open_bench(
    family: ResolvedFamily,
    sender: str,
    receiver: str,
    group: LayerGroup,
    *,
    context_tokens: int,
    suffix_tokens: int,
    threads: int,
    seed: int,
    slowest_gbit_per_s: float,
    vllm: OnVllm | None = None,
) -> AsyncIterator[Bench]:
    """A holder that has computed ``context_tokens`` random tokens, and the loaded receiver; both are gone afterwards.

    ``context_tokens`` is the longest context that will be asked for. Raises NodeUnavailable or DeadlineExceeded for a holder that cannot.
    """
    rng = random.Random(seed)
    ids = tuple(rng.randrange(FIRST_TOKEN_ID, family.vocab_size) for _ in range(context_tokens + suffix_tokens))
    root = root_hash(family.tokenizer_digest, family.layout.block_size, "bench")
    blocks = context_tokens // family.layout.block_size + 1
    # at the slowest link a run may take as long as moving everything does
    deadline_s = DEADLINE_S + 2 * blocks * family.layout.kv_slot_bytes * 8 / (slowest_gbit_per_s * 1e9)
    identity = family.models[sender]
    setup = HolderSetup(
        settings=_settings(family, "holder", sender, group, blocks, deadline_s),
        checkpoint=str(identity.path),
        adapter=str(identity.adapter_path or ""),
        device=family.device,
        compute_dtype=family.compute_dtype,
        threads=threads,
        file=str(vllm.file) if vllm else "",
        node=vllm.holder if vllm else "",
    )
    async with holding(setup, ids[:context_tokens], root, DEADLINE_S) as holder:
        engine = await asyncio.to_thread(build_engine, family, (receiver,), vllm.receiver if vllm else None)
        runtime = NodeRuntime(
            _settings(family, "receiver", receiver, group, blocks, deadline_s), lambda link, message: None, NodeLoad
        )
        try:
            yield Bench(
                runtime=runtime,
                engine=engine,
                holder=holder,
                model=receiver,
                context_ids=ids[:context_tokens],
                suffix_ids=ids[context_tokens:],
                root=root,
                held=Holder("holder", exact_provenance(identity.lineage.id)),
                group=group,
                deadline_s=deadline_s,
                told_within=vllm is not None,
            )
        finally:
            await asyncio.to_thread(engine.close)
            await runtime.close()


def _settings(
    family: ResolvedFamily, name: str, model: str, group: LayerGroup, blocks: int, deadline_s: float
) -> NodeSettings:
    layout = family.layout
    served = ServedModel(model, family.name, family.models[model].lineage, family.tokenizer_digest)
    return NodeSettings(
        name=name,
        role="prefill" if name == "holder" else "decode",
        family=family.name,
        host="127.0.0.1",
        bind_host="127.0.0.1",
        port=0,
        models=(served,),
        layout=layout,
        transition_layers=(group.start,) if group.start else (),
        chunk_tokens=family.config.chunk_tokens,
        kv_bytes=2 * blocks * layout.kv_slot_bytes,
        e_bytes=2 * blocks * layout.e_block_bytes,
        routers=(),
        backend="tcp",
        pull_s=deadline_s,
        lease_s=60.0,
        drain_s=1.0,
    )
