"""The part ``disaggregated`` of ``kvkin bench engine``: kvkin's cluster beside vLLM's disaggregated mode, both with vLLM's prefix cache on.

Two workloads, the same prompts for both systems, a fixed number of requests in flight:

- ``one model``: every request has a context of its own. Nothing can be shared; kvkin must be no worse.
- ``shared``: all members of the family answer on each context, one after the other, as agents do that hand work on; several contexts at a time. vLLM prefills a
  context once for each member, kvkin's members reuse what the first one computed, the fine-tunes under the family's recompute groups.

Processes have equal threads and equal memory for KV (vLLM's has what kvkin's node has in its arena and in vLLM's cache together). For the shared workload vLLM has
a prefill process for each model, kvkin one: more processes for vLLM, on the same cores. kvkin's router is a process besides; vLLM's proxy is the bench itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from kvkin.configs.schema import ClusterConfig
from kvkin.kv.errors import ConfigError
from kvkin.tools.bench_engine_options import ModelOptions, Sizes
from kvkin.tools.bench_engine_parts import Measured, Say, TokenIds, made_on
from kvkin.tools.bench_engine_result import SystemRound, disaggregated_result
from kvkin.tools.bench_engine_setup import Shape, arrange, family_name
from kvkin.tools.bench_engine_systems import Session, System, in_flight, kvkin_system, vllm_system
from kvkin.tools.eta import Eta

ONE, SHARED = "one model", "shared"


async def disaggregated(config: ClusterConfig, models: ModelOptions, sizes: Sizes, seed: int, say: Say) -> Measured:
    """Both workloads on both systems, in rounds."""
    family = family_name(config, models.model)
    base = config.families[family].base
    members = (base, *(name for name in config.families[family].models if name != base))
    model = models.model or base
    (context,) = sizes.context
    if len(members) < 2:
        raise ConfigError("--config", f"{family} has one model: nothing is shared", "a family of several models")
    longest = context + sizes.suffix + sizes.new_tokens
    # room for what runs, and for as many contexts of earlier rounds
    together = 2 * max(sizes.requests, sizes.documents) * (longest + config.families[family].block_size)
    shape = Shape(longest, together, sizes.requests, sizes.threads, sizes.compiled, prefix_caching=True)
    bench = arrange(config, family, members, shape)
    ids = TokenIds(bench.family.vocab_size, seed)
    count = 2 + 2 * len(members)
    say(f"starting kvkin's cluster and {count - 2} processes of vLLM; logs in {bench.logs}")
    async with contextlib.AsyncExitStack() as stack:
        systems: dict[str, System] = {
            "kvkin": await stack.enter_async_context(kvkin_system(bench)),
            "vllm": await stack.enter_async_context(vllm_system(bench, members, sizes.threads)),
        }
        for system in systems.values():
            await _one(system, _shared(ids, members, 1, context, sizes.suffix), sizes)
            await _one(system, _own(ids, model, 2, context, sizes.suffix), sizes)
        eta = Eta("rounds", sizes.repeats, 0, say)
        rounds: dict[str, list[Mapping[str, SystemRound]]] = {ONE: [], SHARED: []}
        for number in range(sizes.repeats):
            workloads = {
                ONE: _own(ids, model, sizes.documents * len(members), context, sizes.suffix),
                SHARED: _shared(ids, members, sizes.documents, context, sizes.suffix),
            }
            for workload, sessions in workloads.items():
                order = reversed(list(systems)) if number % 2 else list(systems)
                rounds[workload].append({name: await _one(systems[name], sessions, sizes) for name in order})
            eta.step()
        engines = {name: {"processes": each.processes, "nodes": each.engines} for name, each in systems.items()}
    settings = {"model": model, "members": list(members)}
    return Measured(disaggregated_result(rounds, seed), engines, settings, made_on(bench))


async def _one(system: System, sessions: Sequence[Session], sizes: Sizes) -> SystemRound:
    """One workload once on one system."""
    answers, seconds = await in_flight(system, sessions, sizes.requests, sizes.new_tokens)
    await system.settle()
    return SystemRound(tuple(answers), seconds)


def _own(ids: TokenIds, model: str, count: int, context: int, suffix: int) -> list[Session]:
    """Requests to one model, each with a prompt of its own."""
    return [[(model, ids.take(context + suffix))] for _ in range(count)]


def _shared(ids: TokenIds, members: Sequence[str], documents: int, context: int, suffix: int) -> list[Session]:
    """Requests to all members, the base first, on each of some contexts."""
    contexts = [ids.take(context) for _ in range(documents)]
    return [[(model, (*each, *ids.take(suffix))) for model in members] for each in contexts]
