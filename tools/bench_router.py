"""``kvkin bench router``: how long a routing decision takes, and what the ZeroMQ front sustains.

Decisions are timed in this process on the router's own index and policy: prompts of 8,192 tokens, 16 nodes, an index at its bound
of 100,000 blocks that forgets leaves all the time, eight senders with four recompute groups each. Four kinds of prompts take
turns: held by every node, held by all but the receiver's, held in part, and new. The front (tools/bench_front.py) is a real
router process with mock decode nodes.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import tyro
from rich.console import Console
from rich.table import Table

from kvkin.kv.cost import NodeRates
from kvkin.kv.hashing import block_hashes, root_hash
from kvkin.kv.layout import KVLayout, Plane
from kvkin.kv.lineage import LayerWeights, Lineage, fold_lineage
from kvkin.kv.plan import LayerGroup
from kvkin.kv.provenance import exact_provenance
from kvkin.router.index import PrefixIndex
from kvkin.router.policy import choose
from kvkin.router.policy_types import (
    ClusterView,
    Decision,
    FamilyView,
    GroupChoice,
    NodeView,
    PolicyRequest,
    PolicySettings,
)
from kvkin.tools.bench_front import Front, bench_front
from kvkin.transport.messages import Reuse
from kvkin.transport.node_messages import Holding, Holdings

LAYERS, BLOCK, VOCABULARY = 32, 16, 49_152
TRANSITIONS = (8, 12, 16)
GROUPS = tuple(GroupChoice(LayerGroup(start, stop)) for start, stop in ((8, 20), (8, 24), (12, 24), (16, 28)))
SENDERS = tuple(f"sender{number}" for number in range(8))
RECEIVER = "receiver"
CASES = ("everywhere", "elsewhere", "half", "nowhere")


class Percentiles(msgspec.Struct, frozen=True):
    """Microseconds."""

    p50: float
    p99: float


class Case(msgspec.Struct, frozen=True):
    """One kind of prompt; ``plan`` is the kind of plan that it got."""

    plan: str
    decision_us: Percentiles
    lookup_policy_us: Percentiles


class Outcome(msgspec.Struct, frozen=True):
    """What ``--json`` prints. ``decision_us`` = hash + lookup + policy, over all cases alike."""

    decision_us: Percentiles
    lookup_policy_us: Percentiles
    cases: dict[str, Case]
    blocks: int
    nodes: int
    evicted: int
    delta_us_per_block: float
    front: Front | None


@dataclass(frozen=True)
class BenchRouter:
    """Time a routing decision, and the router's front under 64 clients."""

    tokens: int = 8192
    """Tokens of a prompt."""
    blocks: int = 100_000
    """Blocks in the index."""
    decode_nodes: int = 14
    """Decode nodes, besides two prefill nodes."""
    repeats: int = 150
    """Decisions of each case."""
    clients: int = 64
    """Clients of the front, each with one request at a time; 0 leaves the front out."""
    front_s: float = 5.0
    """Seconds during which the front is measured."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the results as JSON instead of a table."""

    def run(self) -> int:
        bench = DecisionBench(self.tokens, self.blocks, self.decode_nodes)
        bench.fill()
        outcome = bench.measure(self.repeats)
        if self.clients:
            outcome = msgspec.structs.replace(outcome, front=bench_front(self.clients, self.front_s))
        if self.json:
            print(json.dumps(msgspec.to_builtins(outcome)))
        else:
            show(outcome, Console())
        return 0


class DecisionBench:
    """Index, cluster and prompts of the measurement. Everything is seeded: two runs decide the same."""

    def __init__(self, num_tokens: int, max_blocks: int, decode_nodes: int) -> None:
        self._random = random.Random(1)
        self._num_tokens, self._max_blocks = num_tokens, max_blocks
        self._root = root_hash(b"bench", BLOCK, "default")
        self._lineages = {name: lineage_of(name) for name in (*SENDERS, RECEIVER)}
        self._request_lineage = self._lineages[RECEIVER]
        self._index = PrefixIndex(max_blocks)
        self._view = self._cluster(decode_nodes)
        self._settings = PolicySettings()
        self._prompts: dict[str, list[list[int]]] = {case: [] for case in CASES}
        self._added = 0
        self._delta_s: list[float] = []

    def _cluster(self, decode_nodes: int) -> ClusterView:
        models = [RECEIVER, *SENDERS]
        nodes = [
            NodeView(f"d{number}", "decode", (models[number % len(models)],), self._rates())
            for number in range(decode_nodes)
        ]
        nodes += [NodeView(f"p{number}", "prefill", (SENDERS[0],), self._rates()) for number in range(2)]
        layout = KVLayout(LAYERS, (Plane("k", 8, 128), Plane("v", 8, 128)), 4096, "bfloat16", BLOCK)
        ids = {name: lineage.id for name, lineage in self._lineages.items()}
        family = FamilyView(
            name="f",
            base_model=SENDERS[0],
            layout=layout,
            lineages={ids[name]: lineage for name, lineage in self._lineages.items()},
            models_of={key: (name,) for name, key in ids.items()},
            groups={(sender, RECEIVER): GROUPS for sender in SENDERS},
            transition_layers=TRANSITIONS,
        )
        return ClusterView({node.name: node for node in nodes}, {"f": family})

    def _rates(self) -> NodeRates:
        return NodeRates(2e5, 1e9, self._random.uniform(0, 500), self._random.uniform(0, 2))

    # --- filling -----------------------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Publish prompts until the index has been full for a while, the measured ones last."""
        system = self._tokens(32 * BLOCK)
        measured = 8
        while self._added < self._max_blocks:
            self._publish(self._prompt(system), list(self._view.nodes))
        for _ in range(measured):
            for case in CASES:
                prompt = self._prompt(system)
                self._prompts[case].append(prompt)
                self._publish_case(case, prompt)

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(VOCABULARY) for _ in range(count)]

    def _prompt(self, system: Sequence[int]) -> list[int]:
        return [*system, *self._tokens(self._num_tokens - len(system))]

    def _publish_case(self, case: str, prompt: list[int]) -> None:
        receivers = [name for name, node in self._view.nodes.items() if RECEIVER in node.models]
        others = [name for name in self._view.nodes if name not in receivers]
        match case:
            case "everywhere":
                self._publish(prompt, [*receivers, *others])
            case "elsewhere":
                self._publish(prompt, others)
            case "half":
                # an agent's turn: its own half, and each of the others a bit more
                self._publish(prompt[: len(prompt) // 2], receivers)
                for number, name in enumerate(others):
                    self._publish(prompt[: len(prompt) // 2 + (number % 8 + 1) * len(prompt) // 32], [name])
            case _:
                pass

    def _publish(self, prompt: list[int], names: Iterable[str]) -> None:
        hashes = block_hashes(prompt, self._root, BLOCK)
        for name in names:
            model = self._view.nodes[name].models[0]
            self._apply(name, hashes, self._lineages[model].id)
        self._added += len(hashes)

    def _apply(self, name: str, hashes: Sequence[bytes], lineage_id: bytes) -> None:
        added = tuple(
            Holding(block, hashes[number - 1] if number else self._root, 0, number * BLOCK, LAYERS, TRANSITIONS)
            for number, block in enumerate(hashes)
        )
        holdings = Holdings("bench", 1, (exact_provenance(lineage_id),), added)
        started = time.perf_counter()
        self._index.apply_delta(name, holdings)
        self._delta_s.append((time.perf_counter() - started) / len(added))

    # --- measuring ---------------------------------------------------------------------------------------------------

    def measure(self, repeats: int) -> Outcome:
        """Cases take turns; between two decisions new blocks arrive and old ones are forgotten."""
        times: dict[str, list[tuple[float, float]]] = {case: [] for case in CASES}
        plans: dict[str, str] = {}
        churned = 0
        gc.collect()
        gc.freeze()  # a full collection walks the whole index: rare, and not what is measured here
        for number in range(repeats):
            for case in CASES:
                prompts = self._prompts[case]
                prompt = prompts[number % len(prompts)]
                self._apply(
                    "d1", block_hashes(self._tokens(4 * BLOCK), self._root, BLOCK), self._lineages[SENDERS[0]].id
                )
                churned += 4
                decision, decision_s, lookup_s = self._decide(prompt, number)
                times[case].append((decision_s, lookup_s))
                plans[case] = decision.plan.kind.value
        gc.unfreeze()
        cases = {
            case: Case(plans[case], percentiles([one for one, _ in taken]), percentiles([one for _, one in taken]))
            for case, taken in times.items()
        }
        every = [pair for taken in times.values() for pair in taken]
        return Outcome(
            decision_us=percentiles([one for one, _ in every]),
            lookup_policy_us=percentiles([one for _, one in every]),
            cases=cases,
            blocks=len(self._index),
            nodes=len(self._view.nodes),
            evicted=self._added + churned - len(self._index),
            delta_us_per_block=round(statistics.median(self._delta_s) * 1e6, 2),
            front=None,
        )

    def _decide(self, prompt: list[int], number: int) -> tuple[Decision, float, float]:
        started = time.perf_counter()
        hashes = block_hashes(prompt, self._root, BLOCK)
        hashed = time.perf_counter()
        fan_out = self._index.fan_out("f", RECEIVER, hashes, hashed)
        matches = self._index.match(hashes, self._root)
        request = PolicyRequest(
            model=RECEIVER,
            family="f",
            lineage=self._request_lineage,
            num_tokens=len(prompt),
            block_size=BLOCK,
            num_blocks=len(hashes),
            num_layers=LAYERS,
            reuse=Reuse.ANY,
            fan_out=fan_out,
            order_id=str(number),
            deadline_s=60.0,
        )
        decision = choose(request, matches, self._view, self._settings)
        ended = time.perf_counter()
        return decision, ended - started, ended - hashed


def lineage_of(name: str) -> Lineage:
    weights = name.encode()
    return fold_lineage(b"root", b"bfloat16", [LayerWeights(weights, weights, b"geometry")] * LAYERS)


def percentiles(seconds: Sequence[float]) -> Percentiles:
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return Percentiles(round(statistics.median(ordered) * 1e6, 1), round(p99 * 1e6, 1))


def show(outcome: Outcome, console: Console) -> None:
    table = Table("prompt", "plan", "decision p50", "p99", "lookup + policy p50", "p99", title="microseconds")
    rows = [(case, one.plan, one.decision_us, one.lookup_policy_us) for case, one in outcome.cases.items()]
    for case, plan, decision, lookup in [*rows, ("all", "", outcome.decision_us, outcome.lookup_policy_us)]:
        table.add_row(case, plan, *(f"{one:.0f}" for one in (decision.p50, decision.p99, lookup.p50, lookup.p99)))
    console.print(table)
    console.print(
        f"{outcome.nodes} nodes, {outcome.blocks} blocks in the index, {outcome.evicted} forgotten meanwhile, "
        f"{outcome.delta_us_per_block} us to take in a block"
    )
    if outcome.front is not None:
        front = outcome.front
        console.print(
            f"front: {front.clients} clients, {front.requests_per_s:.0f} requests/s, "
            f"p50 {front.p50_us:.0f} us, p99 {front.p99_us:.0f} us"
        )
