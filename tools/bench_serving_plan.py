"""What the options of ``kvkin bench serving`` mean together, and every refusal with the option's name.

``check_options`` needs nothing but the options and the trace that they name; ``plan_load`` also the models, of a cluster file or of a
running cluster. With ``--start`` both come before anything is started.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvkin.configs.convert import suggest
from kvkin.configs.families import ResolvedCluster
from kvkin.configs.schema import ClusterConfig
from kvkin.kv.errors import ConfigError
from kvkin.tools.bench_serving_options import AgentOptions, LoadOptions, Options, TraceOptions
from kvkin.tools.bench_serving_stats import Objective
from kvkin.tools.bench_serving_sweep import Room, SweepSettings, check_loads
from kvkin.tools.bench_serving_workloads import AgentWorkload, Common, TraceWorkload, Workload
from kvkin.tools.load_agents import AgentShape
from kvkin.tools.load_requests import Span, parse_span
from kvkin.tools.load_runner import LoadLimits
from kvkin.tools.load_tokens import family_vocabulary, range_vocabulary, vocabulary_size
from kvkin.tools.load_trace import Link, TraceLine, TraceScale, find_sessions, read_trace
from kvkin.transport.messages import ModelEntry, Reuse

DEFAULT_RATES = (0.2, 0.5, 1.0)
DEFAULT_DURATION_S = 60.0
# What nobody means, and what this process could not hold: a prompt is a tuple of its ids.
MAX_TOKENS, MAX_TURNS, MAX_REQUESTS, MAX_REPEATS = 1 << 20, 1000, 100_000, 1000
MAX_SEED = 2**63 - 1


class Replay(msgspec.Struct, frozen=True):
    """A trace, as far as it is replayed. Sessions were found in the whole of it."""

    lines: tuple[TraceLine, ...]
    links: tuple[Link, ...]


class Checked(msgspec.Struct, frozen=True):
    """What the options say by themselves. ``content``: what requests are made of."""

    settings: SweepSettings
    content: AgentShape | Replay


@dataclass(frozen=True)
class Plan:
    """What is asked of which models. ``vocabulary``: (num_ids,) int64."""

    models: tuple[str, ...]
    vocabulary: NDArray[np.int64]
    workload: Workload


def check_options(options: Options) -> Checked:
    """Everything that can be said without a cluster. Raises ConfigError with the option."""
    cluster, models = options.cluster, options.models
    if cluster.address is not None and (cluster.start or models.vocab is None):
        problem = "given with --start" if cluster.start else "given without --vocab"
        raise ConfigError("--address", problem, "--config FILE, or --address ADDRESS --vocab START STOP")
    _distinct("--models", models.models)
    _require(abs(models.seed) <= MAX_SEED, "--seed", str(models.seed), f"-{MAX_SEED} to {MAX_SEED}")
    if models.vocab is not None:
        range_vocabulary(models.vocab)
    return Checked(_sweep_settings(options), _content(options))


def plan_load(options: Options, checked: Checked, known: Sequence[ModelEntry], config: ClusterConfig | None) -> Plan:
    """The models to ask, of those ``known``, and the workload. ``config`` is the cluster's file, if there is one.

    Raises ConfigError for models and sizes that this cluster does not take.
    """
    entries = choose_models(options.models.models, known)
    room = room_of(entries, config)
    vocabulary = _vocabulary(options, config, entries[0].family)
    common = Common(
        models=tuple(entry.name for entry in entries),
        assign=options.models.assign,
        turns=options.load.turns,
        vocabulary=vocabulary,
        seed=options.models.seed,
        duration_s=_duration_s(options),
    )
    if isinstance(checked.content, Replay):
        workload: Workload = _trace(options, checked.content, common, room)
    else:
        workload = AgentWorkload(
            common,
            checked.content,
            _agent_rates(options.load),
            options.load.arrivals,
            options.agents.sessions,
            options.load.think_s,
        )
    check_loads(workload, checked.settings, room)
    return Plan(common.models, vocabulary, workload)


def entries_of(cluster: ResolvedCluster) -> list[ModelEntry]:
    """What a cluster will say of its models once all its nodes serve."""
    served = {
        model: tuple(name for name, node in cluster.config.decode_nodes.items() if model in node.models)
        for family in cluster.families.values()
        for model in family.models
    }
    return [
        ModelEntry(model, family.name, family.model_max_context(model), served[model])
        for family in cluster.families.values()
        for model in family.models
    ]


def choose_models(wanted: Sequence[str], known: Sequence[ModelEntry]) -> list[ModelEntry]:
    """The models to ask: those ``wanted``, or all that a node serves now. Raises ConfigError unless they are of one family."""
    by_name = {entry.name: entry for entry in known}
    for name in wanted:
        _require(name in by_name, "--models", f"the cluster has no model {name!r}", suggest(name, by_name))
        served = [entry.name for entry in known if entry.nodes]
        _require(
            bool(by_name[name].nodes), "--models", f"no decode node serves {name} now", ", ".join(served) or "none"
        )
    chosen = [by_name[name] for name in wanted] or [entry for entry in known if entry.nodes]
    _require(bool(chosen), "--models", "no node serves any model now", "`kvkin status` shows the nodes")
    families = sorted({entry.family for entry in chosen})
    _require(len(families) == 1, "--models", f"they are of the families {', '.join(families)}", "models of one family")
    return chosen


def room_of(entries: Sequence[ModelEntry], config: ClusterConfig | None) -> Room:
    """What all of them take. Without the cluster's file its limits are not known; it will say."""
    context = min(entry.max_context_tokens for entry in entries)
    if config is None:
        return Room(context, context - 1, context - 1)
    limits = config.limits
    return Room(context, min(context - 1, limits.max_prompt_tokens), min(context - 1, limits.max_new_tokens))


def parse_warm_up(text: str) -> tuple[int, float]:
    """(requests, seconds) of ``8`` or ``8s``. Raises ConfigError."""
    number = text.removesuffix("s")
    try:
        seconds = float(number)
        requests = 0 if text.endswith("s") else int(number)
    except ValueError:
        seconds, requests = math.nan, 0
    _require(
        math.isfinite(seconds) and seconds >= 0, "--warm-up", f"{text!r}", "requests such as 8, or seconds such as 8s"
    )
    return requests, seconds if text.endswith("s") else 0.0


def _sweep_settings(options: Options) -> SweepSettings:
    load, compare, limits = options.load, options.compare, options.limits
    _require(len(compare.arms) > 0, "--arms", "none is given", "sharing, own, off")
    _distinct("--arms", compare.arms)
    for option, count, least, most in (
        ("--repeats", compare.repeats, 1, MAX_REPEATS),
        ("--max-in-flight", limits.max_in_flight, 1, MAX_REQUESTS),
    ):
        _require(least <= count <= most, option, str(count), f"{least} to {most}")
    for option, seconds in (
        ("--slo-ttft", compare.slo_ttft_s),
        ("--slo-tbt", compare.slo_tbt_s),
        ("--timeout", limits.timeout_s),
        ("--deadline", limits.deadline_s),
        ("--idle", limits.idle_s),
        ("--duration", load.duration_s),
    ):
        _require(seconds is None or (math.isfinite(seconds) and seconds > 0), option, f"{seconds}", "seconds above 0")
    for option, number in (
        ("--drain", limits.drain_s),
        ("--think", load.think_s),
        ("--late-ms", limits.late_ms),
        ("--max-loss", compare.max_loss),
    ):
        _require(math.isfinite(number) and number >= 0, option, f"{number}", "0 or more")
    _require(math.isfinite(compare.share_hint), "--share-hint", str(compare.share_hint), "a finite number")
    _require(not compare.send_slo or compare.slo_ttft_s is not None, "--send-slo", "given without --slo-ttft", "both")
    requests, warm_up_s = parse_warm_up(compare.warm_up)
    return SweepSettings(
        arms=compare.arms,
        repeats=compare.repeats,
        reuse=Reuse(compare.reuse),
        max_loss=compare.max_loss,
        share_hint=compare.share_hint,
        deadline_s=limits.deadline_s,
        ttft_slo_s=compare.slo_ttft_s if compare.send_slo else None,
        limits=LoadLimits(limits.max_in_flight, limits.timeout_s, limits.drain_s, load.think_s),
        objective=Objective(_ms(compare.slo_ttft_s), _ms(compare.slo_tbt_s)),
        late_bound_ms=limits.late_ms,
        warm_up_requests=requests,
        warm_up_s=warm_up_s,
        idle_s=limits.idle_s,
        salt=secrets.token_hex(4) if options.models.salt is None else options.models.salt,
    )


def _content(options: Options) -> AgentShape | Replay:
    load, trace = options.load, options.trace
    for option, factors in (("--rates", load.rates), ("--speed-up", trace.speed_up)):
        _require(all(math.isfinite(one) and one > 0 for one in factors), option, str(factors), "above 0")
        _distinct(option, factors)
    if load.workload == "agents" or (load.workload is None and trace.trace is None):
        _require(trace.trace is None, "--trace", "given with --workload agents", "--workload trace")
        _require(not trace.speed_up, "--speed-up", "given without --trace", "--rates")
        _refuse_others(trace, "given without --trace", "a trace to replay")
        return _agent_shape(load, options.agents, _duration_s(options))
    if trace.trace is None:
        raise ConfigError("--trace", "not given with --workload trace", "a file in the Mooncake format")
    _require(not (load.rates and trace.speed_up), "--speed-up", "given with --rates", "one of them")
    _refuse_others(options.agents, "given with a trace, which has its own sizes", "--workload agents")
    _require(load.arrivals == LoadOptions.arrivals, "--arrivals", "given with a trace, which has its own", "--speed-up")
    for option, count in (
        ("--tokens-per-hash", trace.tokens_per_hash),
        ("--max-output-tokens", trace.max_output_tokens),
        ("--requests", trace.requests),
    ):
        _require(count is None or 1 <= count <= MAX_TOKENS, option, str(count), f"1 to {MAX_TOKENS}")
    lines = read_trace(trace.trace)
    links = find_sessions(lines)
    return Replay(tuple(lines[: trace.requests]), tuple(links[: trace.requests]))


def _refuse_others(group: AgentOptions | TraceOptions, problem: str, allowed: str) -> None:
    """Options of the workload that is not run would be ignored in silence."""
    for field in fields(group):
        if getattr(group, field.name) != field.default:
            raise ConfigError(f"--{field.name.replace('_', '-')}", problem, allowed)


def _agent_shape(load: LoadOptions, agents: AgentOptions, duration_s: float | None) -> AgentShape:
    for option, count, least, most in (
        ("--sessions", agents.sessions, 1, MAX_REQUESTS),
        ("--system-tokens", agents.system_tokens, 0, MAX_TOKENS),
        ("--documents", agents.documents, 0, MAX_REQUESTS),
    ):
        _require(count is None or least <= count <= most, option, str(count), f"{least} to {most}")
    shape = AgentShape(
        turns=parse_span(agents.session_turns, "--session-turns", most=MAX_TURNS),
        system_tokens=agents.system_tokens,
        context_tokens=parse_span(agents.context_tokens, "--context-tokens", least=0, most=MAX_TOKENS),
        documents=agents.documents,
        new_tokens=parse_span(agents.new_tokens, "--new-tokens", most=MAX_TOKENS),
        output_tokens=parse_span(agents.output_tokens, "--output-tokens", most=MAX_TOKENS),
    )
    _check_amount(max(_agent_rates(load)), duration_s, agents.sessions, shape.turns)
    return shape


def _check_amount(rate: float, duration_s: float | None, sessions: int | None, turns: Span) -> None:
    arriving = math.inf if duration_s is None else rate * duration_s
    bounded = math.inf if sessions is None else sessions * turns.high
    if min(arriving, bounded) > MAX_REQUESTS:
        option, what = ("--rates", "rate") if arriving <= bounded else ("--sessions", "number of sessions")
        problem = f"about {min(arriving, bounded):.3g} requests would arrive in a point"
        raise ConfigError(option, problem, f"up to {MAX_REQUESTS}: a smaller {what}, or less --duration")


def _vocabulary(options: Options, config: ClusterConfig | None, family: str) -> NDArray[np.int64]:
    bounds = options.models.vocab
    if config is None:
        assert bounds is not None, "--address without --vocab is refused"
        return range_vocabulary(bounds)
    if family not in config.families:
        raise ConfigError("--config", f"the cluster's family {family} is not in the file", "the cluster's own file")
    if bounds is None:
        return family_vocabulary(config, family)
    size = vocabulary_size(config, family)
    _require(bounds[1] <= size, "--vocab", f"{family} has {size} tokens", f"ids from 0 up to {size}")
    return range_vocabulary(bounds)


def _trace(options: Options, replay: Replay, common: Common, room: Room) -> TraceWorkload:
    trace, most = options.trace, room.new_tokens
    fits = trace.max_output_tokens <= most
    _require(fits, "--max-output-tokens", f"{trace.max_output_tokens} is too long an answer here", f"1 to {most}")
    space = min(room.context_tokens - trace.max_output_tokens, room.prompt_tokens)
    return TraceWorkload(
        common,
        replay.lines,
        replay.links,
        TraceScale(trace.tokens_per_hash, trace.max_output_tokens, space),
        spread=not trace.bursts,
        rates=tuple(sorted(options.load.rates)),
        speed_ups=tuple(sorted(trace.speed_up)) or (1.0,),
    )


def _agent_rates(load: LoadOptions) -> tuple[float, ...]:
    return tuple(sorted(load.rates or DEFAULT_RATES))


def _duration_s(options: Options) -> float | None:
    replays = options.trace.trace is not None
    if options.load.duration_s is None and not replays and options.agents.sessions is None:
        return DEFAULT_DURATION_S
    return options.load.duration_s


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _distinct(option: str, values: Sequence[object]) -> None:
    _require(len(set(values)) == len(values), option, "one of them is given twice", "each once")


def _require(fits: bool, option: str, problem: str, allowed: str) -> None:
    if not fits:
        raise ConfigError(option, problem, allowed)
