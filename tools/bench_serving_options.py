"""The options of ``kvkin bench serving``, in the groups in which ``--help`` shows them; ``bench_serving_plan.py`` says what they mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from kvkin.tools.bench_serving_sweep import Arm
from kvkin.tools.load_arrivals import ArrivalKind
from kvkin.tools.load_requests import Assignment, Turns


@dataclass(frozen=True)
class ClusterOptions:
    """Which cluster is asked: a running one, by its file or its address, or one that is started for this."""

    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Cluster file; default: configs/clusters/local.yaml. Its first router is asked."""

    address: Annotated[str | None, tyro.conf.arg(metavar="ADDRESS")] = None
    """Address of a router instead, such as tcp://10.0.0.1:5570; needs --vocab."""

    start: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Start the cluster of the file here, on free ports, and stop it in the end."""


@dataclass(frozen=True)
class LoadOptions:
    """When requests come, and how sessions go on."""

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


@dataclass(frozen=True)
class ModelOptions:
    """Who is asked, and of which token ids contexts are made."""

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
    """Sizes in tokens; N or LOW-HIGH, drawn evenly for each session or turn."""

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
    """JSON lines in the Mooncake format: timestamp in ms, input_length, output_length, hash_ids of 512 tokens."""

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
class CompareOptions:
    """What is compared, how often, and what counts as good."""

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


@dataclass(frozen=True)
class LimitOptions:
    """When a request, a session or a point is given up."""

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


@dataclass(frozen=True)
class OutputOptions:
    """Where the figures go; tables are printed anyway."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object instead of tables."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Also write results.json, requests.csv and plots (SVG and PNG; needs matplotlib) there."""

    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace the results that --out already holds."""


@dataclass(frozen=True)
class Options:
    """All of them."""

    cluster: Annotated[ClusterOptions, tyro.conf.arg(name="cluster")] = field(default_factory=ClusterOptions)
    load: Annotated[LoadOptions, tyro.conf.arg(name="load")] = field(default_factory=LoadOptions)
    models: Annotated[ModelOptions, tyro.conf.arg(name="model")] = field(default_factory=ModelOptions)
    agents: Annotated[AgentOptions, tyro.conf.arg(name="agent workload")] = field(default_factory=AgentOptions)
    trace: Annotated[TraceOptions, tyro.conf.arg(name="trace workload")] = field(default_factory=TraceOptions)
    compare: Annotated[CompareOptions, tyro.conf.arg(name="comparison")] = field(default_factory=CompareOptions)
    limits: Annotated[LimitOptions, tyro.conf.arg(name="limit")] = field(default_factory=LimitOptions)
    output: Annotated[OutputOptions, tyro.conf.arg(name="output")] = field(default_factory=OutputOptions)
