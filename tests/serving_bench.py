"""The scheduler side of a plain vLLM server in this process: a vLLM that is stepped by hand, and a link that says what the test has it say.

Importing this skips the importing module where vLLM is not installed.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine_harness import NUM_LAYERS, arrivals
from oracle import State
from tiny_models import make_tiny_tokenizer
from vllm_bench import OPTIONS, Family

from kvkin.engines.vllm import compat, connector
from kvkin.engines.vllm.connector import KvkinConnector
from kvkin.engines.vllm.plugin import CONNECTOR, CONNECTOR_MODULE, register_here
from kvkin.engines.vllm.serving import LinkEvent, PartsArrived, PlanReady, Published, Question
from kvkin.engines.vllm.serving_side import ServingSide
from kvkin.kv.execution import PlanExecution
from kvkin.kv.layout import KVLayout, Plane
from kvkin.kv.plan import ReusePlan, provenances
from kvkin.transport.arena import Arena, ArenaDescription, place_of

BLOCK, CHUNK, TAP = 16, 32, 1
CONTEXT, TOTAL = 96, 103
LINEAGE = b"receiver"
LAYOUT = KVLayout(NUM_LAYERS, (Plane("keys", 2, 32), Plane("values", 2, 32)), 128, "float32", BLOCK)
STEPS = 3000


class ScriptedLink:
    """What the link says is what the test lets it say; it remembers what it is told."""

    layout, chunk_tokens, transition_layers = LAYOUT, CHUNK, (TAP,)

    def __init__(self) -> None:
        self.memory = Arena(LAYOUT, 256, 256, shared=True)
        assert self.memory.description is not None
        self.arena: ArenaDescription = self.memory.description
        self.alive = True
        self.events: deque[LinkEvent] = deque()
        self.answer: Callable[[Question], None] = lambda question: None
        self.forget()

    def forget(self) -> None:
        """Before the next test."""
        self.asked: list[Question] = []
        self.over: list[tuple[str, int, str]] = []
        self.given_up: list[str] = []
        self.done: list[tuple[str, ReusePlan, tuple[int, ...], bool]] = []
        self.covered: Any = None
        self.stores: dict[int, str] = {}
        self.publish: Callable[[str], None] = lambda key: self.events.append(Published(key))
        self._next = 0

    def take(self) -> LinkEvent | None:
        return self.events.popleft() if self.events else None

    def model_of(self, lora: tuple[str, str] | None) -> str | None:
        return "receiver" if lora is None else lora[0]

    def ask(self, question: Question) -> None:
        self.asked.append(question)
        self.answer(question)

    def unneeded(self, key: str) -> None:
        self.given_up.append(key)

    def computed(self, key: str, plan: ReusePlan, token_ids: tuple[int, ...], covered: Any, *, last: bool) -> None:
        self.done.append((key, plan, token_ids, last))
        self.covered = covered
        if last:
            self.publish(key)

    def stored(self, ticket: int, why: str) -> None:
        self.stores[ticket] = why

    def ended(self, key: str, tokens_reused: int, fallback: str) -> None:
        self.over.append((key, tokens_reused, fallback))

    def close(self) -> None:
        self.alive = False

    # --- what tests have it say ------------------------------------------------------------------------------------------

    def plan(self, key: str, plan: ReusePlan) -> None:
        self.events.append(PlanReady(key, plan, provenances(plan, LINEAGE)[-1], True))

    def bring(self, key: str, plan: ReusePlan, held: Mapping[str, State], *, most: int = 1 << 30) -> None:
        """The first ``most`` arrivals of a plan, out of slots of the arena."""
        execution = PlanExecution(plan, NUM_LAYERS, CHUNK)
        for arrival in arrivals(plan, execution, held, LAYOUT, random.Random(0))[:most]:
            parts = []
            for start, data in arrival.parts:
                # the blocks are moved as they are: bytes are bytes
                view = self.memory.buffer[self._next : self._next + data.nbytes]
                view[:] = data
                self._next += data.nbytes
                place = place_of(view)
                assert place is not None
                parts.append((start, place))
            self.events.append(PartsArrived(key, arrival.chunk, arrival.layer, tuple(parts)))


class Bench:
    """One vLLM, its serving side, and requests asked of it."""

    def __init__(self, llm: Any, side: ServingSide, link: ScriptedLink) -> None:
        self.llm, self.side, self.link = llm, side, link
        self._number = 0

    def add(
        self, tokens: tuple[int, ...], max_tokens: int = 5, wishes: Any = None, lora: Any = None, **how: Any
    ) -> str:
        from vllm import SamplingParams

        self._number += 1
        extra = None if wishes is None else {"kv_transfer_params": {"kvkin": wishes}}
        parameters = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=extra
        )
        internal: str = self.llm.add_request(
            f"r{self._number}", {"prompt_token_ids": list(tokens), **how}, parameters, lora_request=lora
        )
        return internal

    def step(self) -> list[Any]:
        connector_here = compat.current_connector()
        with compat.active(connector_here):
            outputs: list[Any] = self.llm.step()
        return outputs

    def run(self, until: Callable[[list[Any]], bool] | None = None) -> dict[str, Any]:
        """Step until nothing is left to do, or ``until`` holds; the finished outputs by request."""
        finished: dict[str, Any] = {}
        for _ in range(STEPS):
            outputs = self.step()
            finished |= {output.request_id: output for output in outputs if output.finished}
            if until is not None and until(outputs):
                return finished
            if until is None and not compat.scheduler_of(self.llm).has_requests():
                return finished
        raise AssertionError("it never ends")

    def tokens(self, tokens: tuple[int, ...], **how: Any) -> list[int]:
        """The answer to a request that runs alone."""
        self.add(tokens, **how)
        (output,) = self.run().values()
        return list(output.outputs[0].token_ids)

    def free(self) -> int:
        return self.side.free_blocks()


@dataclass
class Built:
    """A vLLM with a serving side, for all tests of a module. ``agent``: the worker side's connector, if it is in this process."""

    llm: Any
    side: ServingSide
    link: ScriptedLink
    agent: Any


@contextlib.contextmanager
def built_server(family: Family, folder: Path, adapters: Sequence[str] = (), **options: Any) -> Iterator[Built]:
    """``options`` are vLLM's engine arguments; the server's models are the receiver and the family's ``adapters``."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    compat.prepare_environment()
    register_here()
    link = ScriptedLink()
    patch = pytest.MonkeyPatch()
    patch.setattr(connector, "open_link", lambda *_: link)
    extra = {"config": str(_cluster_file(family, folder, adapters)), "node": "vllm-0"}
    config = EngineArgs(
        **OPTIONS | {"enable_prefix_caching": True, "block_size": 32, "async_scheduling": False} | options,
        model=str(family.checkpoint),
        skip_tokenizer_init=True,
        disable_log_stats=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector=CONNECTOR,
            kv_connector_module_path=CONNECTOR_MODULE,
            kv_role="kv_both",
            kv_connector_extra_config=extra,
        ),
    ).create_engine_config()
    with compat.building():
        llm = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
        agent = compat.current_connector()
    here: KvkinConnector = compat.scheduler_of(llm).get_kv_connector()
    side = here.scheduler_side
    assert isinstance(side, ServingSide)
    patch.setattr(compat, "current_connector", lambda: agent)
    yield Built(llm, side, link, agent)
    compat.shut_down(llm, agent)
    link.memory.close()
    patch.undo()


def _cluster_file(family: Family, folder: Path, adapters: Sequence[str]) -> Path:
    if not (family.checkpoint / "tokenizer.json").exists():
        make_tiny_tokenizer(family.checkpoint)
    checkpoint = {"checkpoint": str(family.checkpoint)}
    models = {"receiver": checkpoint} | {name: checkpoint | {"adapter": str(family.members[name])} for name in adapters}
    members = {"base": "receiver", "device": "cpu", "compute_dtype": "float32", "models": models}
    node = {"role": "attached", "port": 0, "models": list(models)}
    cluster = {
        "state_dir": str(folder / "state"),
        "families": {"tiny": members | {"transition_layers": [TAP], "chunk_tokens": CHUNK, "block_size": BLOCK}},
        "nodes": {"router-0": {"role": "router"}, "vllm-0": node},
    }
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster, sort_keys=False))
    return file


@contextlib.contextmanager
def fresh_bench(built: Built) -> Iterator[Bench]:
    """For one test, which must leave nothing behind."""
    side, link = built.side, built.link
    link.forget()
    link.alive, side._clock, side._consumes, side._produces = True, lambda: 0.0, True, True
    bench = Bench(built.llm, side, link)
    compat.scheduler_of(built.llm).reset_prefix_cache()
    free = bench.free()
    yield bench
    bench.run()
    assert not side._asked
    assert not side.entries
    assert not side._held
    assert bench.free() == free, "blocks are lost"
    assert len(link.over) == len(link.asked), "each request ends once"
