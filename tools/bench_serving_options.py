"""The options of ``kvkin bench serving``, and what they mean together: workload, sweep, and every refusal with the option's name."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from numpy.typing import NDArray

from kvkin.configs.convert import suggest
from kvkin.kv.errors import ConfigError
from kvkin.tools.bench_serving_stats import Objective
from kvkin.tools.bench_serving_sweep import Arm, SweepSettings
from kvkin.tools.bench_serving_workloads import AgentWorkload, Common, TraceWorkload, Workload
from kvkin.tools.load_agents import AgentShape
from kvkin.tools.load_arrivals import ArrivalKind
from kvkin.tools.load_requests import Assignment, Turns, parse_span
from kvkin.tools.load_runner import LoadLimits
from kvkin.tools.load_trace import TraceScale, find_sessions, read_trace
from kvkin.transport.messages import ModelEntry, Reuse

DEFAULT_RATES = (0.2, 0.5, 1.0)
DEFAULT_DURATION_S = 60.0


@dataclass(frozen=True)
class LoadOptions:
    """What is asked, and when."""

    workload: Literal["agents", "trace"] | None = None
    """agents: sessions whose turns go from model to model over a growing context; trace: replay --trace. Default: agents, with --trace: trace."""

    rates: Annotated[tuple[float, ...], tyro.conf.arg(metavar="PER_S ...")] = ()
    """Offered loads in requests/s, swept. Default: 0.2 0.5 1; a trace: as --speed-up says."""

    arrivals: ArrivalKind = "poisson"
    """How the sessions of --workload agents arrive."""

    duration_s: Annotated[float | None, tyro.conf.arg(name="duration", metavar="SECONDS")] = None
    """How long requests (sessions) arrive in each point. Default: 60 s, with --sessions or --trace until all of them came."""

    turns: Turns = "after-answer"
    """after-answer: a session's next turn is sent once the answer has come and the think time has passed, and contains the answer. on-time: at its
    time whatever became of the one before."""

    think_s: Annotated[float, tyro.conf.arg(name="think", metavar="SECONDS")] = 0.0
    """Think time of a session between an answer and the next turn; with --turns on-time, and without a trace, the time between two turns."""

    models: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MODEL ...")] = ()
    """Models that are asked, of one family. Default: all that the cluster serves."""

    assign: Assignment = "round-robin"
    """Who answers which turn: round-robin: the next model with every turn; random: any; per-session: one a session."""

    vocab: Annotated[tuple[int, int] | None, tyro.conf.arg(metavar="START STOP")] = None
    """Draw token ids from [START, STOP). Default: all ids of the family's tokenizer (needs the cluster file) that are not special."""

    seed: int = 0
    """Decides on arrivals, lengths, models and, with --salt, token ids."""

    salt: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """Names this run's token ids. Default: a new one, so that a cluster that still holds an earlier run's contexts has no use for them."""


@dataclass(frozen=True)
class AgentOptions:
    """--workload agents. Numbers of tokens; N or LOW-HIGH, drawn evenly for each session or turn."""

    sessions: int | None = None
    """Most sessions in a point. Default: as many as arrive."""

    session_turns: Annotated[str, tyro.conf.arg(metavar="N|LOW-HIGH")] = "4"
    """Turns of a session."""

    system_tokens: int = 32
    """System prompt, the same in all sessions of a point."""

    context_tokens: Annotated[str, tyro.conf.arg(metavar="N|LOW-HIGH")] = "512"
    """Document that a session is about."""

    documents: int = 0
    """Different documents; sessions pick one. 0: every session has its own."""

    new_tokens: Annotated[str, tyro.conf.arg(metavar="N|LOW-HIGH")] = "32"
    """New text of a turn."""

    output_tokens: Annotated[str, tyro.conf.arg(metavar="N|LOW-HIGH")] = "16"
    """Answer of a turn, exactly."""


@dataclass(frozen=True)
class TraceOptions:
    """--trace: JSON lines in the Mooncake format (timestamp in ms, input_length, output_length, hash_ids of 512 tokens)."""

    trace: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Requests to replay."""

    speed_up: Annotated[tuple[float, ...], tyro.conf.arg(metavar="FACTOR ...")] = ()
    """How many times as fast as recorded, swept; instead of --rates. Default: 1."""

    tokens_per_hash: int = 32
    """Tokens of a 512-token block of the trace; output lengths shrink alike."""

    max_output_tokens: int = 64
    """Longest answer."""

    requests: int | None = None
    """Only the first so many requests."""

    bursts: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Send requests with equal timestamps at once. Default: evenly until the next timestamp, as recorded clocks are coarse."""


@dataclass(frozen=True)
class MeasureOptions:
    """What is compared, and what counts."""

    arms: tuple[Arm, ...] = ("sharing", "own", "off")
    """sharing: KV of other models and nodes, as --reuse allows; own: only what the answering node holds itself; off: nothing."""

    reuse: Literal["any", "bounded", "exact"] = "bounded"
    """What the arm sharing allows."""

    max_loss: float = 0.05
    """Bound of --reuse bounded."""

    share_hint: float = -1.0
    """Later requests that the arm sharing announces for each prompt; negative: it does not know."""

    repeats: int = 1
    """Runs of every arm at every rate. Intervals need several."""

    warm_up: Annotated[str, tyro.conf.arg(metavar="N|SECONDSs")] = "0"
    """Not measured in each point: the first N requests (8), or those that arrive in the first seconds (8s)."""

    slo_ttft_s: Annotated[float | None, tyro.conf.arg(name="slo-ttft", metavar="SECONDS")] = None
    """Objective for the time to first token: for goodput, and for the throughput at equal p95."""

    send_slo: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Requests of the arm sharing tell the router --slo-ttft as their target: it then takes the plan of the least loss that meets it."""

    slo_tbt_s: Annotated[float | None, tyro.conf.arg(name="slo-tbt", metavar="SECONDS")] = None
    """Objective for the mean time between tokens of an answer."""

    max_in_flight: int = 256
    """A request that comes while so many run is not sent, and counted."""

    timeout_s: Annotated[float, tyro.conf.arg(name="timeout", metavar="SECONDS")] = 120.0
    """From a request's intended arrival; then it is cancelled and counted as timed out."""

    deadline_s: Annotated[float | None, tyro.conf.arg(name="deadline", metavar="SECONDS")] = None
    """Deadline that requests carry, enforced by the router."""

    drain_s: Annotated[float, tyro.conf.arg(name="drain", metavar="SECONDS")] = 60.0
    """What running requests and sessions get after the last arrival of a point; then they are cut off."""

    idle_s: Annotated[float, tyro.conf.arg(name="idle", metavar="SECONDS")] = 120.0
    """How long to wait for an idle cluster before and after each point."""

    late_ms: float = 20.0
    """Requests that this program itself sends later than this are counted."""


def sweep_settings(load: LoadOptions, measure: MeasureOptions) -> SweepSettings:
    """The settings of all points. Raises ConfigError with the option."""
    _require(len(measure.arms) > 0, "--arms", "none is given", "sharing, own, off")
    _distinct("--arms", measure.arms)
    _require(measure.repeats >= 1, "--repeats", f"{measure.repeats} runs measure nothing", "1 or more")
    _require(measure.max_in_flight >= 1, "--max-in-flight", str(measure.max_in_flight), "1 or more")
    _require(
        math.isfinite(measure.max_loss) and measure.max_loss >= 0, "--max-loss", str(measure.max_loss), "0 or more"
    )
    _require(math.isfinite(measure.share_hint), "--share-hint", str(measure.share_hint), "a finite number")
    for option, seconds in (
        ("--slo-ttft", measure.slo_ttft_s),
        ("--slo-tbt", measure.slo_tbt_s),
        ("--timeout", measure.timeout_s),
        ("--deadline", measure.deadline_s),
        ("--idle", measure.idle_s),
        ("--duration", load.duration_s),
    ):
        _require(seconds is None or (math.isfinite(seconds) and seconds > 0), option, f"{seconds}", "seconds above 0")
    for option, number in (("--drain", measure.drain_s), ("--think", load.think_s), ("--late-ms", measure.late_ms)):
        _require(math.isfinite(number) and number >= 0, option, f"{number}", "0 or more")
    _require(not measure.send_slo or measure.slo_ttft_s is not None, "--send-slo", "given without --slo-ttft", "both")
    requests, warm_up_s = parse_warm_up(measure.warm_up)
    return SweepSettings(
        arms=measure.arms,
        repeats=measure.repeats,
        reuse=Reuse(measure.reuse),
        max_loss=measure.max_loss,
        share_hint=measure.share_hint,
        deadline_s=measure.deadline_s,
        ttft_slo_s=measure.slo_ttft_s if measure.send_slo else None,
        limits=LoadLimits(measure.max_in_flight, measure.timeout_s, measure.drain_s, load.think_s),
        objective=Objective(_ms(measure.slo_ttft_s), _ms(measure.slo_tbt_s)),
        late_bound_ms=measure.late_ms,
        warm_up_requests=requests,
        warm_up_s=warm_up_s,
        idle_s=measure.idle_s,
        salt=secrets.token_hex(4) if load.salt is None else load.salt,
    )


def build_workload(
    load: LoadOptions,
    agents: AgentOptions,
    trace: TraceOptions,
    entries: Sequence[ModelEntry],
    vocabulary: NDArray[np.int64],
) -> Workload:
    """The workload for the models ``entries``. Raises ConfigError with the option that cannot be."""
    replay = check_workload(load, trace)
    common = Common(
        models=tuple(entry.name for entry in entries),
        assign=load.assign,
        turns=load.turns,
        vocabulary=vocabulary,
        seed=load.seed,
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
