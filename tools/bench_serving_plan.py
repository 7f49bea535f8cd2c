"""What the options of ``kvkin bench serving`` mean together: the settings of the sweep, the workload, and every refusal with the option's name."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvkin.configs.convert import suggest
from kvkin.kv.errors import ConfigError
from kvkin.tools.bench_serving_options import (
    AgentOptions,
    CompareOptions,
    LimitOptions,
    LoadOptions,
    ModelOptions,
    TraceOptions,
)
from kvkin.tools.bench_serving_stats import Objective
from kvkin.tools.bench_serving_sweep import SweepSettings
from kvkin.tools.bench_serving_workloads import AgentWorkload, Common, TraceWorkload, Workload
from kvkin.tools.load_agents import AgentShape
from kvkin.tools.load_requests import parse_span
from kvkin.tools.load_runner import LoadLimits
from kvkin.tools.load_trace import TraceScale, find_sessions, read_trace
from kvkin.transport.messages import ModelEntry, Reuse

DEFAULT_RATES = (0.2, 0.5, 1.0)
DEFAULT_DURATION_S = 60.0


def sweep_settings(
    load: LoadOptions, models: ModelOptions, compare: CompareOptions, limits: LimitOptions
) -> SweepSettings:
    """The settings of all points. Raises ConfigError with the option."""
    _require(len(compare.arms) > 0, "--arms", "none is given", "sharing, own, off")
    _distinct("--arms", compare.arms)
    _require(compare.repeats >= 1, "--repeats", f"{compare.repeats} runs measure nothing", "1 or more")
    _require(limits.max_in_flight >= 1, "--max-in-flight", str(limits.max_in_flight), "1 or more")
    _require(
        math.isfinite(compare.max_loss) and compare.max_loss >= 0, "--max-loss", str(compare.max_loss), "0 or more"
    )
    _require(math.isfinite(compare.share_hint), "--share-hint", str(compare.share_hint), "a finite number")
    for option, seconds in (
        ("--slo-ttft", compare.slo_ttft_s),
        ("--slo-tbt", compare.slo_tbt_s),
        ("--timeout", limits.timeout_s),
        ("--deadline", limits.deadline_s),
        ("--idle", limits.idle_s),
        ("--duration", load.duration_s),
    ):
        _require(seconds is None or (math.isfinite(seconds) and seconds > 0), option, f"{seconds}", "seconds above 0")
    for option, number in (("--drain", limits.drain_s), ("--think", load.think_s), ("--late-ms", limits.late_ms)):
        _require(math.isfinite(number) and number >= 0, option, f"{number}", "0 or more")
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
        salt=secrets.token_hex(4) if models.salt is None else models.salt,
    )


def build_workload(
    load: LoadOptions,
    models: ModelOptions,
    agents: AgentOptions,
    trace: TraceOptions,
    entries: Sequence[ModelEntry],
    vocabulary: NDArray[np.int64],
) -> Workload:
    """The workload for the models ``entries``. Raises ConfigError with the option that cannot be."""
    replay = check_workload(load, trace)
    common = Common(
        models=tuple(entry.name for entry in entries),
        assign=models.assign,
        turns=load.turns,
        vocabulary=vocabulary,
        seed=models.seed,
        duration_s=_duration_s(load, agents, replay is not None),
    )
    return _agents(load, agents, common) if replay is None else _trace(load, trace, replay, common, room(entries))


def check_workload(load: LoadOptions, trace: TraceOptions) -> Path | None:
    """The trace to replay; None: agents. What does not go together is refused."""
    _require(all(math.isfinite(rate) and rate > 0 for rate in load.rates), "--rates", str(load.rates), "above 0")
    _require(
        all(math.isfinite(one) and one > 0 for one in trace.speed_up), "--speed-up", str(trace.speed_up), "above 0"
    )
    _distinct("--rates", load.rates)
    _distinct("--speed-up", trace.speed_up)
    if load.workload == "agents" or (load.workload is None and trace.trace is None):
        _require(trace.trace is None, "--trace", "given with --workload agents", "--workload trace")
        _require(not trace.speed_up, "--speed-up", "given without --trace", "--rates")
        return None
    if trace.trace is None:
        raise ConfigError("--trace", "not given with --workload trace", "a file in the Mooncake format")
    _require(not (load.rates and trace.speed_up), "--speed-up", "given with --rates", "one of them")
    _require(trace.tokens_per_hash >= 1, "--tokens-per-hash", str(trace.tokens_per_hash), "1 or more")
    _require(trace.max_output_tokens >= 1, "--max-output-tokens", str(trace.max_output_tokens), "1 or more")
    _require(trace.requests is None or trace.requests >= 1, "--requests", str(trace.requests), "1 or more")
    return trace.trace


def choose_models(wanted: Sequence[str], known: Sequence[ModelEntry]) -> list[ModelEntry]:
    """The models to ask: those ``wanted``, or all that a node serves now. Raises ConfigError unless they are of one family."""
    by_name = {entry.name: entry for entry in known}
    for name in wanted:
        _require(name in by_name, "--models", f"the cluster has no model {name!r}", suggest(name, by_name))
    _distinct("--models", wanted)
    chosen = [by_name[name] for name in wanted] or [entry for entry in known if entry.nodes]
    _require(bool(chosen), "--models", "no node serves any model now", "`kvkin status` shows the nodes")
    families = sorted({entry.family for entry in chosen})
    _require(len(families) == 1, "--models", f"they are of the families {', '.join(families)}", "models of one family")
    return chosen


def room(entries: Sequence[ModelEntry]) -> int:
    """Longest prompt + answer in tokens that all of them take."""
    return min(entry.max_context_tokens for entry in entries)


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


def _agents(load: LoadOptions, agents: AgentOptions, common: Common) -> AgentWorkload:
    _require(agents.sessions is None or agents.sessions >= 1, "--sessions", str(agents.sessions), "1 or more")
    _require(agents.system_tokens >= 0, "--system-tokens", str(agents.system_tokens), "0 or more")
    _require(agents.documents >= 0, "--documents", str(agents.documents), "0 or more")
    shape = AgentShape(
        turns=parse_span(agents.session_turns, "--session-turns"),
        system_tokens=agents.system_tokens,
        context_tokens=parse_span(agents.context_tokens, "--context-tokens", least=0),
        documents=agents.documents,
        new_tokens=parse_span(agents.new_tokens, "--new-tokens"),
        output_tokens=parse_span(agents.output_tokens, "--output-tokens"),
    )
    rates = load.rates or DEFAULT_RATES
    return AgentWorkload(common, shape, tuple(sorted(rates)), load.arrivals, agents.sessions, load.think_s)


def _trace(load: LoadOptions, trace: TraceOptions, file: Path, common: Common, context_tokens: int) -> TraceWorkload:
    space = context_tokens - trace.max_output_tokens
    _require(
        space >= 1, "--max-output-tokens", f"{trace.max_output_tokens} fill the context", f"below {context_tokens}"
    )
    lines = read_trace(file)
    links = find_sessions(lines)
    return TraceWorkload(
        common,
        lines[: trace.requests],
        links[: trace.requests],
        TraceScale(trace.tokens_per_hash, trace.max_output_tokens, space),
        spread=not trace.bursts,
        rates=tuple(sorted(load.rates)),
        speed_ups=tuple(sorted(trace.speed_up)) or (1.0,),
    )


def _duration_s(load: LoadOptions, agents: AgentOptions, replays: bool) -> float | None:
    if load.duration_s is None and not replays and agents.sessions is None:
        return DEFAULT_DURATION_S
    return load.duration_s


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _distinct(option: str, values: Sequence[object]) -> None:
    _require(len(set(values)) == len(values), option, "one of them is given twice", "each once")


def _require(fits: bool, option: str, problem: str, allowed: str) -> None:
    if not fits:
        raise ConfigError(option, problem, allowed)
