"""The part ``ttft`` of ``kvkin bench engine``: the first token of exact and partial plans on vLLM, against vLLM's own prefill of the same length.

A prefill node holds the sender's KV of one context; the receiver pulls it over a loopback socket. Both run on vLLM, as does the process that is
vLLM by itself. Prefix caching is off everywhere: the same context is reused in every round.
"""

from __future__ import annotations

from kvkin.configs.schema import ClusterConfig
from kvkin.kv.errors import ConfigError
from kvkin.tools.bench_engine_children import Child, running
from kvkin.tools.bench_engine_messages import Prefill, Receiving, Reuse, Reused, Setup, Timed
from kvkin.tools.bench_engine_options import ModelOptions, Sizes
from kvkin.tools.bench_engine_parts import ANSWER_S, Measured, Say, TokenIds, arms_of, check_alike, made_on
from kvkin.tools.bench_engine_result import TtftRound, ttft_result
from kvkin.tools.bench_engine_setup import PREFILL, START_S, Shape, arrange, chosen_group, family_name
from kvkin.tools.eta import Eta

SHAPES = ("exact", "partial")


async def ttft(config: ClusterConfig, models: ModelOptions, sizes: Sizes, seed: int, say: Say) -> Measured:
    """All contexts, in rounds: vLLM's prefill, an exact plan, a partial plan."""
    family, sender, receiver = pair_of(config, models)
    size = config.families[family].block_size
    for tokens in sizes.context:
        if tokens % size:
            raise ConfigError("--context", f"{tokens} is not a multiple of the block size", f"k x {size}, k >= 1")
    shape = Shape(
        longest=sizes.longest + 1,
        kv_tokens=2 * (sizes.longest + 1),
        side_by_side=1,
        threads=sizes.threads,
        compiled=sizes.compiled,
        prefix_caching=False,
    )
    bench = arrange(config, family, (receiver,), shape, sender)
    group = chosen_group(bench.family, sender, receiver, models.group)
    node = bench.decode_node(receiver)
    reuse = Receiving(sender, PREFILL, group, max(sizes.context), sizes.suffix, seed)
    (plain,) = arms_of(bench, ("plain",), node, sizes.threads).values()
    setup = Setup("receiver", str(bench.file), node, reuse)
    receiving = Child("receiver", setup, sizes.threads, bench.logs / "receiver.log")
    ids = TokenIds(bench.family.vocab_size, seed)

    async def one(tokens: int, *, reverse: bool) -> TtftRound:
        prefill, reused = Timed(0.0, 0), dict[str, Reused]()
        names = ("plain", *SHAPES)
        for name in reversed(names) if reverse else names:
            match name:
                case "exact" | "partial":
                    reused[name] = await receiving.ask(Reuse(tokens, name), Reused, ANSWER_S)
                case _:
                    prefill = await plain.ask(Prefill(ids.take(tokens + sizes.suffix)), Timed, ANSWER_S)
        return TtftRound(prefill, reused)

    say(f"loading {receiver}, and {sender} to compute {max(sizes.context):,} tokens; logs in {bench.logs}")
    async with running([plain, receiving], START_S):
        engines = {child.name: child.settings for child in (plain, receiving)}
        check_alike(engines)
        await one(min(sizes.context), reverse=False)
        eta = Eta("rounds", sizes.repeats * len(sizes.context), 0, say)
        rounds: dict[int, list[TtftRound]] = {tokens: [] for tokens in sizes.context}
        for number in range(sizes.repeats):
            for tokens in sizes.context:
                rounds[tokens].append(await one(tokens, reverse=bool(number % 2)))
                eta.step(f"{tokens:,} tokens")
    settings = {
        "sender": sender,
        "receiver": receiver,
        "group": [group.start, group.stop],
        "num_layers": bench.family.layout.num_layers,
    }
    return Measured(ttft_result(rounds, seed), engines, settings, made_on(bench))


def pair_of(config: ClusterConfig, models: ModelOptions) -> tuple[str, str, str]:
    """(family, sender, receiver). ConfigError for names that are not there, or a family without a fine-tune."""
    family = family_name(config, models.model or models.sender)
    members = config.families[family].models
    sender = models.sender or config.families[family].base
    others = [name for name in members if name != sender]
    receiver = models.model or (others[0] if others else sender)
    for key, name in (("--sender", sender), ("--model", receiver)):
        if name not in members:
            raise ConfigError(key, f"{name} is not of the family {family}", ", ".join(members))
    if sender == receiver:
        raise ConfigError("--model", f"{receiver} is the sender too", ", ".join(others) or "a family of several models")
    return family, sender, receiver
