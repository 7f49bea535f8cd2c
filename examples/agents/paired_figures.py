"""What sharing saved and whether the answers got worse: figures of a whole conversation, for the screen and for a file. Pure.

Every figure is paired: the same turns with sharing and privately. Nothing is taken from a plan; the reports of the answers say what
was computed and moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from dialogue import CODER, TESTER
from paired_turns import Turn, compute_ms
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvkin.tools.demo_workload import segment_json
from kvkin.tools.report_view import KIND_STYLES, bytes_text, headline, phases_ms
from kvkin.transport.messages import Finished

CAVEAT = (
    "Models of 135 million parameters write weak code and weak answers, with sharing and without: look at what is reused "
    "and at the difference between the two, not at the marks themselves."
)
TASKS = {CODER: "code that parses", TESTER: "the expected extract is in the answer"}


def totals(turns: Sequence[Turn]) -> dict[str, Any]:
    """Sums over the conversation, and means of what compares the answers."""
    answers = [turn.answer for turn in turns]
    return {
        "turns": len(turns),
        "ttft_ms": _both(turns, lambda answer: answer.timings.ttft_ms),
        "compute_ms": _both(turns, compute_ms),
        "total_ms": _both(turns, lambda answer: answer.timings.total_ms),
        "prompt_tokens": sum(answer.usage.prompt_tokens for answer in answers),
        "tokens_reused": sum(answer.report.tokens_reused for answer in answers),
        "bytes_pulled": sum(answer.report.bytes_pulled for answer in answers),
        "agreement": _mean([turn.agreement for turn in turns]),
        "edit_similarity": _mean([turn.similarity for turn in turns]),
        "same_answers": sum(turn.agreement == 1.0 for turn in turns),
        "tasks": {agent: _marks([turn for turn in turns if turn.line.agent == agent]) for agent in TASKS},
    }


def report(turns: Sequence[Turn], setting: dict[str, Any], stopped: str) -> dict[str, Any]:
    """Everything, as JSON values. ``stopped`` says why the conversation ended early."""
    return {
        "setting": setting,
        "turns": [_turn_json(turn) for turn in turns],
        "totals": totals(turns),
        "stopped": stopped,
        "problems": [f"{_name(turn)}: {problem}" for turn in turns for problem in turn.problems],
        "caveat": CAVEAT,
    }


def turn_view(turn: Turn) -> RenderableType:
    """One turn as it ends: who, what was reused, the private twin beside it, and the answer."""
    private = turn.private.timings.ttft_ms
    twin = f"privately {private:,.0f} ms; "
    twin += "same answer" if turn.agreement == 1.0 else f"{turn.agreement:.0%} of the tokens until they differ"
    done = dict(zip(("shared", "private"), turn.marks, strict=True))
    parts: list[RenderableType] = [
        headline(turn.answer),
        Text(f"{twin}; {TASKS[turn.line.agent]}: {_yes(done['shared'])} (privately {_yes(done['private'])})"),
        Text(turn.answer.text.strip("\n"), style="italic"),
        *(Text(f"NOT AS EXPECTED: {problem}", style="bold red") for problem in turn.problems),
    ]
    title = Text(f"round {turn.line.round}, {turn.line.agent}", style="bold")
    return Group(
        Text(),
        title.append(f" ({turn.model})", style="not bold dim"),
        Padding(Group(*parts), (0, 0, 0, 3), expand=False),
    )


def table(turns: Sequence[Turn]) -> Table:
    """A row a turn."""
    shown = Table(title="\nTurn by turn", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in ("turn", "plan", "from"):
        shown.add_column(column, no_wrap=True)
    for column in ("prompt", "reused", "layers", "pulled", "first token", "privately", "ratio", "agree", "similar"):
        shown.add_column(column, justify="right", no_wrap=True)
    shown.add_column("task done", no_wrap=True)
    for turn in turns:
        answer, own = turn.answer.report, turn.answer.timings.ttft_ms
        shown.add_row(
            f"{turn.line.round} {turn.line.agent}",
            Text(answer.kind.value, style=KIND_STYLES[answer.kind]),
            ", ".join(answer.sources),
            f"{turn.answer.usage.prompt_tokens:,}",
            f"{answer.tokens_reused:,}",
            str(answer.layers_recomputed) if answer.sources else "",
            bytes_text(answer.bytes_pulled) if answer.bytes_pulled else "",
            f"{own:,.0f} ms",
            f"{turn.private.timings.ttft_ms:,.0f} ms",
            _times(turn.private.timings.ttft_ms, own),
            f"{turn.agreement:.2f}",
            f"{turn.similarity:.2f}",
            f"{_yes(turn.marks[0])} / {_yes(turn.marks[1])}",
        )
    return shown


def summary(figures: dict[str, Any]) -> RenderableType:
    """What sharing saved and whether the answers got worse, of :func:`totals`."""
    lines = ["", f"What sharing saved in {figures['turns']} turns"]
    for key, words in (
        ("ttft_ms", "waiting for first tokens"),
        ("compute_ms", "computing prompts"),
        ("total_ms", "whole answers"),
    ):
        shared, private = figures[key]["shared"], figures[key]["private"]
        lines.append(
            f"  {words}: {shared / 1e3:,.2f} s instead of {private / 1e3:,.2f} s (a ratio of {_times(private, shared)})"
        )
    reused = f"{figures['tokens_reused']:,} of {figures['prompt_tokens']:,} prompt tokens were reused"
    same = f"{figures['same_answers']} of {figures['turns']} are token for token the private ones"
    alike = f"edit similarity {figures['edit_similarity']:.2f}"
    lines += [
        f"  {reused}; {bytes_text(figures['bytes_pulled'])} moved between nodes for it (privately 0 B)",
        "",
        "Did the answers get worse?",
        f"  {same}; on average {figures['agreement']:.0%} of the tokens agree up to the first difference, {alike}",
    ]
    for agent, marks in figures["tasks"].items():
        if marks["n"]:
            lines.append(
                f"  {agent}, {TASKS[agent]}: {marks['shared']} of {marks['n']} with sharing, {marks['private']} privately "
                f"(better in {marks['only_shared']}, worse in {marks['only_private']})"
            )
    return Text("\n".join([*lines, "", CAVEAT]))


def _turn_json(turn: Turn) -> dict[str, Any]:
    return {
        "round": turn.line.round,
        "agent": turn.line.agent,
        "model": turn.model,
        "said_to_it": turn.line.text,
        "agreement": round(turn.agreement, 4),
        "edit_similarity": round(turn.similarity, 4),
        "task_done": dict(zip(("shared", "private"), turn.marks, strict=True)),
        "shared": _answer_json(turn.answer),
        "private": _answer_json(turn.private),
        "problems": turn.problems,
    }


def _answer_json(answer: Finished) -> dict[str, Any]:
    report = answer.report
    return {
        "node": answer.node,
        "plan": report.kind.value,
        "quality": report.quality.value,
        "sources": list(report.sources),
        "prompt_tokens": answer.usage.prompt_tokens,
        "tokens_reused": report.tokens_reused,
        "layers_recomputed": report.layers_recomputed,
        "bytes_pulled": report.bytes_pulled,
        "ttft_ms": round(answer.timings.ttft_ms, 3),
        "compute_ms": round(compute_ms(answer), 3),
        "total_ms": round(answer.timings.total_ms, 3),
        "phases_ms": phases_ms(answer.timings),
        "segments": [segment_json(segment) for segment in report.segments],
        "reason": report.reason,
        "finish_reason": answer.finish_reason,
        "tokens": list(answer.token_ids),
        "text": answer.text,
    }


def _both(turns: Sequence[Turn], of: Callable[[Finished], float]) -> dict[str, float]:
    sums = (math.fsum(of(turn.answer) for turn in turns), math.fsum(of(turn.private) for turn in turns))
    return {"shared": round(sums[0], 3), "private": round(sums[1], 3)}


def _marks(turns: Sequence[Turn]) -> dict[str, int]:
    """How often the task was done, and in how many turns by one of the two answers only."""
    pairs = [turn.marks for turn in turns]
    return {
        "n": len(pairs),
        "shared": sum(shared for shared, _ in pairs),
        "private": sum(private for _, private in pairs),
        "only_shared": sum(shared and not private for shared, private in pairs),
        "only_private": sum(private and not shared for shared, private in pairs),
    }


def _mean(values: Sequence[float]) -> float:
    return round(math.fsum(values) / len(values), 4) if values else 0.0


def _times(private: float, shared: float) -> str:
    return f"{private / shared:.1f}x" if shared else ""


def _yes(done: bool) -> str:
    return "yes" if done else "no"


def _name(turn: Turn) -> str:
    return f"round {turn.line.round}, {turn.line.agent}"
