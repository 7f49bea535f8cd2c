"""The receiver of ``kvkin bench engine ttft``, in a child process: a decode node's streams and engine, on vLLM, next to a real prefill node.

It opens what ``kvkin bench pipeline`` opens, the holder (a process of its own, on vLLM too) with the KV of one context, over loopback sockets
without a limit, and runs its schedules.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from kvkin.configs.families import resolve_family
from kvkin.configs.schema import ClusterConfig
from kvkin.configs.vllm_node import VllmNode
from kvkin.tools.bench_engine_lines import Inbox, Mouth
from kvkin.tools.bench_engine_messages import Failed, Ready, Reuse, Reused, Setup
from kvkin.tools.bench_engine_setup import family_name
from kvkin.tools.bench_pipeline_arms import Bench
from kvkin.tools.bench_pipeline_open import OnVllm, open_bench

log = structlog.get_logger()

# Only for the deadline of a run: the link has no limit.
SLOWEST_GBIT_PER_S = 0.1


def serve_receiver(setup: Setup, config: ClusterConfig, model: str, node: VllmNode, inbox: Inbox, mouth: Mouth) -> None:
    """Open and carry out commands until the process is ended."""
    asyncio.run(_serve(setup, config, model, node, inbox, mouth))


async def _serve(setup: Setup, config: ClusterConfig, model: str, node: VllmNode, inbox: Inbox, mouth: Mouth) -> None:
    reuse = setup.receiving
    assert reuse is not None, "a receiver is told what it reuses"
    family = resolve_family(config, family_name(config, model), models=(reuse.sender, model))
    async with open_bench(
        family,
        reuse.sender,
        model,
        reuse.group,
        context_tokens=reuse.context_tokens,
        suffix_tokens=reuse.suffix_tokens,
        threads=node.threads,
        seed=reuse.seed,
        slowest_gbit_per_s=SLOWEST_GBIT_PER_S,
        vllm=OnVllm(Path(setup.file), reuse.holder, node),
    ) as bench:
        await bench.arms(reuse.context_tokens).connect()
        mouth.say(0, Ready(settings_of(bench)))
        while True:
            asked = await asyncio.to_thread(inbox.get)
            command = asked.command
            if not isinstance(command, Reuse):
                mouth.say(asked.number, Failed("a receiver only reuses"))
                continue
            try:
                reply: Reused | Failed = await reuse_once(bench, command)
            except Exception as error:  # told to the bench, which ends this process
                log.exception("a command failed")
                reply = Failed(f"{type(error).__name__}: {error}")
            mouth.say(asked.number, reply)


async def reuse_once(bench: Bench, command: Reuse) -> Reused:
    """One request, and its parts alone."""
    arms = bench.arms(command.context_tokens)
    # an exact plan pulls the KV of all layers and computes nothing for the context, whatever model it is of
    plan = arms.reuse_all if command.shape == "exact" else arms.partial
    seconds, moved = await arms.run(plan)
    transfer_s, computed = await arms.parts(plan)
    states_s = await arms.states_alone(plan)
    return Reused(seconds, moved, transfer_s, states_s, computed.seconds, computed.last_layer_s)


def settings_of(bench: Bench) -> dict[str, object]:
    """What the receiver's vLLM was resolved to."""
    from kvkin.engines.vllm.engine import VllmEngine
    from kvkin.engines.vllm.plain import settings_under_kvkin

    assert isinstance(bench.engine, VllmEngine)
    return settings_under_kvkin(bench.engine)
