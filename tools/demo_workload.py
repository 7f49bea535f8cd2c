"""The demo's workload: what agents ask of the fine-tunes of one family, and which plan every request must get.

``run_workload`` sends it through the ZeroMQ client to any running cluster of such a family, each request followed by a private
run of the same prompt on the same node that leaves nothing behind. Used by ``demo.py`` and, on a tiny family, by its tests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvkin.kv.errors import KvkinError
from kvkin.kv.plan import PlanKind
from kvkin.kv.provenance import Quality
from kvkin.tools.local import status_until
from kvkin.tools.report_view import phases_ms
from kvkin.transport.client import AsyncClient
from kvkin.transport.messages import Finished, Reuse, SegmentReport, StatusReply

DATA = Path(__file__).parent / "demo_data"
REQUEST_S = 120.0
# Of the private run only the first token is wanted; the next few show that it says the same.
TWIN_TOKENS = 4
# The pool computes a context of a thousand tokens within seconds; this is for machines that are busy with something else.
ORDER_S = 120.0


@dataclass(frozen=True)
class Names:
    """Who plays the parts: the base, a fine-tune of all layers, one that has the base's lower layers; and their nodes."""

    base: str = "smollm2-135m-instruct"
    qa: str = "smollm2-135m-qa"
    code: str = "smollm2-135m-code"
    pool: str = "prefill-0"
    base_node: str = "decode-base"
    qa_node: str = "decode-qa"


@dataclass(frozen=True)
class Step:
    """One request. ``continues`` names the step whose conversation, answer included, it goes on with.

    ``sources`` are the nodes that it may reuse from, the first of them certainly. ``await_pool``: the router must have a
    prefill node compute the context in the background; the next step begins when that is done. Without ``chat`` the text is
    the prompt as it is, and does not share even the template's first words with others.
    """

    name: str
    title: str
    model: str
    text: str
    expect: PlanKind
    quality: Quality
    reuse: Reuse = Reuse.ANY
    sources: tuple[str, ...] = ()
    continues: str = ""
    chat: bool = True
    max_tokens: int = 24
    share_hint: float = -1.0
    await_pool: bool = False


@dataclass
class Record:
    """What one request did, next to its private twin."""

    step: Step
    messages: list[dict[str, Any]]
    answer: Finished
    private: Finished
    context_tokens: int
    problems: list[str] = field(default_factory=list)
    same_as_reference: bool | None = None

    @property
    def ratio(self) -> float:
        return self.private.timings.ttft_ms / self.answer.timings.ttft_ms

    def as_json(self) -> dict[str, Any]:
        answer, report = self.answer, self.answer.report
        return {
            "name": self.step.name,
            "model": self.step.model,
            "node": answer.node,
            "plan": report.kind.value,
            "quality": report.quality.value,
            "source": ", ".join(report.sources),
            "prompt_tokens": answer.usage.prompt_tokens,
            "context_tokens": self.context_tokens,
            "tokens_reused": report.tokens_reused,
            "tokens_cached": report.tokens_cached,
            "tokens_computed": report.tokens_computed,
            "layers_recomputed": report.layers_recomputed,
            "bytes_pulled": report.bytes_pulled,
            "ttft_ms": round(answer.timings.ttft_ms, 3),
            "phases_ms": phases_ms(answer.timings),
            "private_ttft_ms": round(self.private.timings.ttft_ms, 3),
            "tokens": list(answer.token_ids),
            "text": answer.text,
            "same_tokens_as_reference": self.same_as_reference,
            "starts_like_private": starts_like(answer, self.private),
            "segments": [segment_json(segment) for segment in report.segments],
            "reason": report.reason,
            "problems": self.problems,
        }


def segment_json(segment: SegmentReport) -> dict[str, Any]:
    return {
        "start": segment.start,
        "stop": segment.stop,
        "kind": segment.kind.value if segment.sources else "computed",
        "sources": list(segment.sources),
        "e_layer": segment.e_layer,
        "group": None if segment.group is None else list(segment.group),
        "bytes_pulled": segment.bytes_pulled,
    }


def workload(names: Names) -> list[Step]:
    """The script. Each of its contexts is new to the first reader only; what the others must reuse, the steps say."""
    report, orchard = (DATA / "lighthouse.txt").read_text().strip(), (DATA / "orchard.txt").read_text().strip()
    source = (DATA / "ledger.py.txt").read_text()
    exact, unprofiled = Quality.EXACT, Quality.UNPROFILED
    return [
        Step(
            "cold",
            "an agent reads a report that nobody has read",
            names.base,
            asked("Who built the lighthouse, and why was it built?", report),
            PlanKind.PRIVATE,
            exact,
        ),
        Step(
            "other-model",
            "the question-answering agent reads the same report",
            names.qa,
            asked("Which grain ship struck the reef?", report),
            PlanKind.PARTIAL,
            unprofiled,
            sources=(names.base_node,),
        ),
        Step(
            "other-question",
            "the first agent is asked something else about it",
            names.base,
            asked("Summarise the history of the lighthouse in three sentences.", report),
            PlanKind.EXACT,
            exact,
            sources=(names.base_node,),
            max_tokens=96,
        ),
        Step(
            "follow-up",
            "its next turn",
            names.base,
            asked("What can visitors do there today?"),
            PlanKind.EXACT,
            exact,
            sources=(names.base_node,),
            continues="other-question",
            max_tokens=72,
        ),
        Step(
            "hand-over",
            "the conversation, answers included, is handed to the question-answering agent",
            names.qa,
            asked("Who was the last keeper?"),
            PlanKind.PARTIAL,
            unprofiled,
            # its own KV of the report, the other agent's of what was said since
            sources=(names.base_node, names.qa_node),
            continues="follow-up",
        ),
        Step(
            "cold-source",
            "an agent reads a Python module; the pool prefills it for those who come after",
            names.qa,
            f"{source}\n\n{asked('Which exception is raised for a movement that cannot be entered?')}",
            PlanKind.PRIVATE,
            exact,
            reuse=Reuse.EXACT,
            share_hint=4,
            await_pool=True,
        ),
        Step(
            "shared-layers",
            "the coding agent goes on with the module; its lower layers are the base's",
            names.code,
            f"{source}\n\nContinue this text.",
            PlanKind.SHARED_PREFIX,
            exact,
            reuse=Reuse.EXACT,
            sources=(names.pool,),
            max_tokens=48,
        ),
        Step(
            "from-the-pool",
            "the base model is asked about the module",
            names.base,
            f"{source}\n\nWhat does the method find_room return?",
            PlanKind.EXACT,
            exact,
            # the template's system message, a block of its own, is there from other chats
            sources=(names.pool, names.base_node),
        ),
        Step(
            "unseen",
            "a context that nobody has seen",
            names.qa,
            asked("In which year was the orchard planted?", orchard),
            PlanKind.PRIVATE,
            exact,
            # nothing of it is held anywhere, and nothing approximate may be ordered for it
            reuse=Reuse.EXACT,
            chat=False,
            max_tokens=8,
        ),
    ]


def asked(question: str, context: str = "") -> str:
    """The prompt form that the question-answering fine-tune was trained on."""
    return (f"Context: {context}\n" if context else "") + f"Question: {question}\nAnswer:"


async def run_workload(
    client: AsyncClient,
    steps: list[Step],
    names: Names,
    block_size: int,
    on_start: Callable[[int, Step], None],
    on_done: Callable[[int, Record], None],
) -> list[Record]:
    """All steps in order. A plan other than the expected one is noted in its record; an error of the cluster is raised."""
    records: dict[str, Record] = {}
    for number, step in enumerate(steps, 1):
        on_start(number, step)
        messages = conversation(records[step.continues]) if step.continues else []
        messages.append({"role": "user", "content": step.text})
        before = await client.status()
        answer = await _generate(
            client, step, messages, reuse=step.reuse, max_tokens=step.max_tokens, share_hint=step.share_hint
        )
        problems = check(step, answer)
        if step.await_pool:
            await _until_the_pool_holds(client.status, names.pool, before, answer, block_size, problems)
        private = await _generate(client, step, messages, reuse=Reuse.OFF, publish=False, max_tokens=TWIN_TOKENS)
        problems += check_twin(answer, private)
        context_tokens = (answer.usage.prompt_tokens - 1) // block_size * block_size
        record = Record(step, messages, answer, private, context_tokens, problems)
        records[step.name] = record
        on_done(number, record)
    return list(records.values())


def conversation(record: Record) -> list[dict[str, Any]]:
    """A step's messages and its answer; the answer's ids go to the reference only."""
    answer = {"role": "assistant", "content": record.answer.text, "token_ids": list(record.answer.token_ids)}
    return [*record.messages, answer]


def check(step: Step, answer: Finished) -> list[str]:
    """What is not as the step expects, in words."""
    report, problems = answer.report, []
    if report.fallback:
        problems.append(f"fell back to a private prefill: {report.fallback}")
    if report.kind is not step.expect:
        problems.append(f"expected a {step.expect} plan, got {report.kind} ({report.reason})")
    elif report.quality is not step.quality:
        problems.append(f"expected quality {step.quality}, got {report.quality}")
    wanted = set(step.sources[:1]) <= set(report.sources) <= set(step.sources)
    if not problems and not wanted:
        problems.append(f"expected KV from {' or '.join(step.sources)}, got it from {', '.join(report.sources)}")
    return problems


def check_twin(answer: Finished, private: Finished) -> list[str]:
    """What is wrong with the private run beside an answer; of exact quality means: the same tokens."""
    problems = []
    if private.report.kind is not PlanKind.PRIVATE or private.node != answer.node:
        problems.append(f"the private run got a {private.report.kind} plan on {private.node}")
    if answer.report.quality is Quality.EXACT and not starts_like(answer, private):
        problems.append("the private run said something else")
    return problems


def starts_like(answer: Finished, private: Finished) -> bool:
    return answer.token_ids[: len(private.token_ids)] == private.token_ids


async def _generate(client: AsyncClient, step: Step, messages: list[dict[str, Any]], **request: Any) -> Finished:
    if step.chat:
        request["messages"] = [(message["role"], message["content"]) for message in messages]
    else:
        request["prompt"] = step.text
    return await client.generate(step.model, timeout_s=REQUEST_S, **request)


async def _until_the_pool_holds(
    status: Callable[[], Awaitable[StatusReply]],
    pool: str,
    before: StatusReply,
    answer: Finished,
    block_size: int,
    problems: list[str],
) -> None:
    """Return once the pool's node holds the prompt's blocks; a prefill that was not ordered, or failed, is a problem."""
    wanted = answer.usage.prompt_tokens // block_size - 1

    def settled(reply: StatusReply) -> bool:
        return not reply.counters.get("orders_open") and (
            _grown(before, reply, "orders_failed") > 0 or _holdings(reply, pool) - _holdings(before, pool) >= wanted
        )

    after = await status()
    if not _grown(before, after, "orders"):
        problems.append("the router did not order a shared prefill of the context")
        return
    try:
        after = await status_until(status, settled, ORDER_S)
    except KvkinError as error:
        problems.append(f"the shared prefill did not end: {error}")
        return
    if _grown(before, after, "orders_failed"):
        problems.append("the shared prefill failed")


def _grown(before: StatusReply, after: StatusReply, counter: str) -> int:
    return after.counters.get(counter, 0) - before.counters.get(counter, 0)


def _holdings(status: StatusReply, name: str) -> int:
    return next((node.holdings for node in status.nodes if node.name == name), 0)
