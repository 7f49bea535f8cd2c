"""A node that speaks the node protocol and computes nothing, and the settings of a small cluster to go with it.

Its answers are scripted: ``answer`` is what it generates, ``mode`` how far it goes by itself. Tests of the router and of the
clients run it on loopback sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import zmq
import zmq.asyncio
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvkin.kv.cost import Estimate
from kvkin.kv.errors import NodeUnavailable
from kvkin.kv.hashing import block_hashes
from kvkin.kv.layout import KVLayout, Plane
from kvkin.kv.lineage import LayerWeights, Lineage, fold_lineage
from kvkin.kv.plan import PlanKind, private_plan
from kvkin.kv.provenance import Quality, exact_provenance
from kvkin.router.index import Match
from kvkin.router.policy_types import ClusterView, Decision, PolicyRequest, PolicySettings
from kvkin.router.settings import FamilySettings, Limits, ModelSettings, RouterSettings, Timeouts
from kvkin.transport.codec import encode, router_to_node
from kvkin.transport.messages import PROTOCOL_VERSION, NodeLoad, ReuseReport, Timings
from kvkin.transport.node_messages import (
    Abort,
    Done,
    Execute,
    Failed,
    Generated,
    Heartbeat,
    Holding,
    Holdings,
    Leave,
    NodeToRouter,
    OrderDone,
    PrefillOrder,
    Refused,
    Register,
    Registered,
    RouterToNode,
    ServedModel,
    SnapshotWanted,
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2
BLOCK_SIZE = 4
NUM_LAYERS = 3
VOCAB_SIZE = 320
MAX_CONTEXT_TOKENS = 512
TOKENIZER_DIGEST = hashlib.blake2b(b"tiny tokenizer", digest_size=16).digest()
LAYOUT = KVLayout(NUM_LAYERS, (Plane("keys", 2, 16), Plane("values", 2, 16)), 64, "float32", BLOCK_SIZE)
NODE_TIMEOUT_S = 20.0

M = TypeVar("M")


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer like that of ``tiny_models``, made without importing torch."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("Ġ", "the"), ("Ġ", "a"), ("o", "n")]
    words = [*SPECIAL_TOKENS, *alphabet, *("".join(pair) for pair in merges)]
    vocab = {word: number for number, word in enumerate(dict.fromkeys(words))}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def lineage(name: str) -> Lineage:
    """A made-up lineage, another one for each name."""
    weights = [LayerWeights(name.encode(), name.encode() + bytes([layer]), b"geometry") for layer in range(NUM_LAYERS)]
    return fold_lineage(b"root", b"float32", weights)


def make_settings(folder: Path, names: Sequence[str] = ("base", "tuned"), **overrides: Any) -> RouterSettings:
    """A router on free ports for one family whose tokenizer is written into ``folder``."""
    if not (folder / "tokenizer.json").exists():
        write_tokenizer(folder)
    family = FamilySettings(
        name="tiny", base_model=names[0], layout=LAYOUT, tokenizer_digest=TOKENIZER_DIGEST, vocab_size=VOCAB_SIZE
    )
    served = {
        name: ModelSettings(
            name=name,
            family="tiny",
            lineage=lineage(name),
            tokenizer_dir=str(folder),
            vocab_size=VOCAB_SIZE,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            chat_template=CHAT_TEMPLATE,
        )
        for name in names
    }
    return RouterSettings(
        **{
            "name": "router-0",
            "families": {"tiny": family},
            "models": served,
            "client_address": "tcp://127.0.0.1:0",
            "node_address": "tcp://127.0.0.1:0",
            "limits": Limits(max_new_tokens=256, max_request_bytes=1 << 16),
            "timeouts": Timeouts(tick_s=0.02, node_wait_s=0.5),
            **overrides,
        }
    )


def choose_privately(
    request: PolicyRequest, matches: Sequence[Match], view: ClusterView, settings: PolicySettings
) -> Decision:
    """A policy for tests that are not about the policy: the first usable decode node, a private plan."""
    names = [
        node.name
        for node in view.nodes.values()
        if node.usable and node.role == "decode" and request.model in node.models
    ]
    if not names:
        raise NodeUnavailable(f"no decode node for {request.model}")
    plan = private_plan(request.num_tokens, "test")
    estimate = Estimate(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    return Decision(min(names), plan, estimate, Quality.EXACT, 0.0, "test")


def registration(
    node: str,
    *,
    role: str = "decode",
    models: Sequence[str | ServedModel] = ("base",),
    incarnation: str = "one",
    **overrides: Any,
) -> Register:
    """A registration that ``make_settings`` accepts."""
    return Register(
        **{
            "version": PROTOCOL_VERSION,
            "node": node,
            "role": role,
            "incarnation": incarnation,
            "source_address": f"tcp://127.0.0.1:1/{node}",
            "models": tuple(
                one if isinstance(one, ServedModel) else ServedModel(one, "tiny", lineage(one), TOKENIZER_DIGEST)
                for one in models
            ),
            "layout": LAYOUT,
            **overrides,
        }
    )


def report(tokens_reused: int = 0, **overrides: Any) -> ReuseReport:
    """The report of a private run, or of one that reused tokens exactly."""
    kind = PlanKind.EXACT if tokens_reused else PlanKind.PRIVATE
    return ReuseReport(
        **{
            "kind": kind,
            "quality": Quality.EXACT,
            "loss": 0.0,
            "segments": (),
            "sources": (),
            "tokens_reused": tokens_reused,
            "layers_recomputed": 0,
            "bytes_pulled": 0,
            "reason": "test",
            "planned": kind,
            **overrides,
        }
    )


class MockNode:
    """``mode``: ``answer`` generates and finishes, ``hold`` sends nothing by itself, ``stream`` sends the first token only."""

    def __init__(
        self,
        address: str,
        name: str,
        *,
        models: Sequence[str] = ("base",),
        role: str = "decode",
        answer: Sequence[int] = (10, 11, EOS_ID),
        text: str | None = None,
        mode: str = "answer",
        heartbeat_s: float = 0.1,
        **register: Any,
    ) -> None:
        self.name, self.mode, self.answer, self.text = name, mode, tuple(answer), text
        self.tokens_reused = 0
        self.registration = registration(name, role=role, models=models, **register)
        self.holdings: list[Holdings] = []
        self.received: list[RouterToNode] = []
        self.executed: dict[str, Execute] = {}
        self.load = NodeLoad()
        self.draining = False
        self.publishing = False  # holdings of what was computed follow each answer, as real nodes send them
        self._arrived = asyncio.Condition()
        self._heartbeat_s = heartbeat_s
        self._epoch = self._sequence = 0
        self._codec = router_to_node()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(address)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._read())]
        self.say(self.registration)
        await self.expect(Registered)
        self._tasks.append(asyncio.create_task(self._beat()))
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.kill()

    async def kill(self) -> None:
        """Die without a word: the connection is closed, nothing is sent. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if not self._socket.closed:
            self._socket.close()
            self._context.term()

    def freeze(self) -> None:
        """Fall silent; the connection stays."""
        for task in self._tasks:
            task.cancel()

    def thaw(self) -> None:
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._beat())]

    def leave(self) -> None:
        self.say(Leave(self.registration.incarnation))

    def say(self, message: NodeToRouter) -> None:
        self._socket.send(encode(message))

    def say_raw(self, frame: bytes) -> None:
        self._socket.send(frame)

    async def expect(self, kind: type[M], fits: Callable[[M], bool] = lambda message: True) -> M:
        """The first message of ``kind`` that fits, whether it came already or comes within the deadline."""
        async with asyncio.timeout(NODE_TIMEOUT_S), self._arrived:
            while True:
                for message in self.received:
                    if isinstance(message, kind) and fits(message):
                        return message
                await self._arrived.wait()

    def count(self, kind: type) -> int:
        return sum(isinstance(message, kind) for message in self.received)

    # --- what a node does ------------------------------------------------------------------------------------------------

    def generate(self, execute: Execute, index: int, token_ids: Sequence[int], text: str) -> None:
        self.say(Generated(execute.request_id, index, tuple(token_ids), text))

    def finish(self, execute: Execute, text: str | None = None) -> None:
        text = self._text() if text is None else text
        timings = Timings(queue_ms=1.0, suffix_ms=2.0)
        self.say(Done(execute.request_id, text, self.answer, "stop", timings, report(self.tokens_reused)))

    def publish(self, execute: Execute) -> None:
        """Advertise the full blocks of prompt + answer - 1 as exact KV of the request's model."""
        ids = (*execute.token_ids, *self.answer[:-1])
        hashes = block_hashes(ids, execute.root, BLOCK_SIZE)
        parents = [execute.root, *hashes]
        added = tuple(
            Holding(block, parents[number], 0, number * BLOCK_SIZE, NUM_LAYERS) for number, block in enumerate(hashes)
        )
        self._sequence += 1
        provenance = exact_provenance(lineage(execute.model).id)
        incarnation = self.registration.incarnation
        self.say(Holdings(incarnation, self._sequence, (provenance,), added, epoch=self._epoch))

    def fail(self, request_id: str, code: str = "internal", *, retryable: bool = False) -> None:
        self.say(Failed(request_id, code, "the test wants it", retryable))

    def snapshot(self, holdings: Sequence[Holding] = (), provenances: Sequence[Any] = ()) -> None:
        self._epoch, self._sequence = self._epoch + 1, 0
        incarnation = self.registration.incarnation
        self.say(Holdings(incarnation, 0, tuple(provenances), tuple(holdings), epoch=self._epoch))

    def _text(self) -> str:
        return "".join(f"t{token} " for token in self.answer) if self.text is None else self.text

    def _run(self, execute: Execute) -> None:
        if self.mode == "hold":
            return
        text = self._text()
        self.generate(execute, 0, self.answer[:1], text[:1])
        if self.mode == "stream":
            return
        self.generate(execute, 1, self.answer[1:], text[1:])
        if self.publishing:
            self.publish(execute)
        self.finish(execute)

    async def _read(self) -> None:
        while True:
            message = self._codec.decode(await self._socket.recv())
            match message:
                case Registered():
                    self.snapshot()
                case SnapshotWanted(register):
                    if register:
                        self.say(self.registration)
                    else:
                        self.snapshot()
                case Execute():
                    self.executed[message.request_id] = message
                    self._run(message)
                case PrefillOrder() if self.mode == "answer":
                    self.say(OrderDone(message.order_id, len(message.token_ids), len(message.token_ids), 0.1))
                case Refused() | Abort() | _:
                    pass
            async with self._arrived:
                self.received.append(message)
                self._arrived.notify_all()

    async def _beat(self) -> None:
        while True:
            self.say(Heartbeat(self.registration.incarnation, self.load, self.draining))
            await asyncio.sleep(self._heartbeat_s)


async def until(condition: Callable[[], bool], timeout_s: float = NODE_TIMEOUT_S) -> None:
    """Wait for a state that nobody announces; a deadline, never a fixed sleep."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the state belongs to code that announces nothing
            await asyncio.sleep(0.005)


@contextlib.contextmanager
def no_leaks() -> Any:
    """Threads and descriptors are as many after the block as before it."""
    import gc
    import os
    import threading

    def count() -> tuple[int, int]:
        # the loop's own executor keeps its threads until the loop is closed
        threads = [thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")]
        return len(threads), len(os.listdir("/proc/self/fd"))

    before = count()
    yield
    after = count()
    if _more(after, before):
        gc.collect()  # slow with torch in the process, so only where it may matter
        after = count()
    assert not _more(after, before), f"(threads, descriptors) before {before}, after {after}"


def _more(after: tuple[int, int], before: tuple[int, int]) -> bool:
    return any(now > then for now, then in zip(after, before, strict=True))
