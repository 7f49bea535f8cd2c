"""The tables of ``kvkin bench engine``: for the terminal, and for docs (tools/docs_evaluation.py). Pure but for ``show``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from kvkin.tools.bench_engine_result import MOST_OVERHEAD, WORK
from kvkin.tools.bench_pipeline_report import ratio_text

Result = Mapping[str, Any]
ARMS = {"plain": "vLLM", "kvkin": "vLLM under kvkin", "transformers": "transformers"}
EVENTS = {"alone": "nothing", "prefill": "vLLM prefills", "partial": "partial plan"}


@dataclass(frozen=True)
class Shown:
    """One table, and a sentence that says what comes of it (empty: it speaks for itself)."""

    head: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    verdict: str


def head(result: Result) -> str:
    """What was measured, and on what."""
    made, settings = result["made"], result["settings"]
    return (
        f"{_WHAT[result['part']](settings)}; {made['device']}, {made['dtype']}, {settings['threads']} thread(s) a process, vLLM "
        f"{made['versions']['vllm']} {settings['mode']}. Medians of {settings['repeats']} interleaved round(s)."
    )


def tables(result: Result) -> list[Shown]:
    """Everything that a result says."""
    return _TABLES[result["part"]](result)


def show(console: Console, result: Result) -> None:
    console.print(head(result).replace("`", ""), markup=False, highlight=False)
    for shown in tables(result):
        table = Table()
        for column in shown.head:
            table.add_column(column, justify="right")
        for row in shown.rows:
            table.add_row(*row)
        console.print(table)
        if shown.verdict:
            console.print(shown.verdict.replace("`", ""), markup=False, highlight=False)


# --- overhead ----------------------------------------------------------------------------------------------------------------


def _overhead_what(settings: Result) -> str:
    return (
        f"`{settings['model']}`: prefill of {settings['context'][0]} tokens; {settings['requests']} requests that generate "
        f"{settings['new_tokens']} tokens side by side"
    )


def _overhead(result: Result) -> list[Shown]:
    found = result["results"]
    rows = [
        [ARMS[arm], *(f"{speeds[f'{work}_tokens_per_s']:,.1f}" for work in WORK), *_prefix_caching(result, arm)]
        for arm, speeds in found["arms"].items()
    ]
    parts = [
        f"{work} {percent_text(found['kvkin_over_plain'][work])} ({_KEPT[found['within'][work]]})" for work in WORK
    ]
    verdict = f"kvkin's overhead over vLLM (95 %): {', '.join(parts)}; the aim is at most {MOST_OVERHEAD - 1:.0%}."
    return [Shown(("arm", "prefill tokens/s", "decode tokens/s", "prefix cache"), rows, verdict)]


_KEPT = {True: "kept", False: "not shown to be kept", None: "one round shows nothing"}


def _prefix_caching(result: Result, arm: str) -> list[str]:
    return ["on, new prompts" if result["engines"][arm]["prefix_caching"] else "off"]


def percent_text(found: Sequence[float | None]) -> str:
    """A ratio as what is added: ``+2.1 % (-0.4 to +4.5 %)``; without the interval where there is none."""
    middle, low, high = found
    text = "-" if middle is None else f"{100 * (middle - 1):+.1f} %"
    return text if low is None or high is None else f"{text} ({100 * (low - 1):+.1f} to {100 * (high - 1):+.1f} %)"


# --- stall -------------------------------------------------------------------------------------------------------------------


def _stall_what(settings: Result) -> str:
    start, stop = settings["group"]
    return (
        f"`{settings['model']}`: {settings['requests']} requests decode while one of {settings['context'][0]} + {settings['suffix']} tokens "
        f"comes, as a private prefill in chunks of {settings['budget']} tokens, or as a partial plan that recomputes layers [{start}, {stop}) in "
        f"slices of as many"
    )


def _stall(result: Result) -> list[Shown]:
    found = result["results"]
    rows = [
        [
            EVENTS[event],
            *(f"{each[key]:,.1f} ms" for key in ("p50_ms", "p99_ms", "max_ms")),
            "" if event == "alone" else f"{each['event_ms']:,.0f} ms",
        ]
        for event, each in found["events"].items()
    ]
    verdict = (
        f"The p99 during a partial plan over that during vLLM's prefill (95 %): {ratio_text(found['partial_over_prefill'])}: "
        f"{'it stalls the others more' if found['partial_worse'] else 'it does not stall the others more'}."
    )
    return [Shown(("meanwhile", "between tokens p50", "p99", "max", "its first token"), rows, verdict)]


# --- ttft --------------------------------------------------------------------------------------------------------------------


def _ttft_what(settings: Result) -> str:
    start, stop = settings["group"]
    return (
        f"`{settings['receiver']}` on the KV of `{settings['sender']}`, which a prefill node holds, with {settings['suffix']} tokens behind the "
        f"context; an exact plan pulls all layers, a partial one recomputes layers [{start}, {stop}) of {settings['num_layers']}; prefix caching off"
    )


def _ttft(result: Result) -> list[Shown]:
    rows = [
        [
            f"{context['context_tokens']:,}",
            f"{context['prefill_ms']:,.0f} ms",
            name,
            f"{shape['ttft_ms']:,.0f} ms",
            f"{shape['ideal_ms']:,.0f} ms",
            ratio_text(shape["prefill_over_ttft"]),
            ratio_text(shape["prefill_over_ideal"]),
            ratio_text(shape["ttft_over_ideal"]),
        ]
        for context in result["results"]["contexts"]
        for name, shape in context["shapes"].items()
    ]
    columns = (
        "context",
        "vLLM's prefill",
        "plan",
        "first token",
        "ideal",
        "speed-up (95 %)",
        "ideal speed-up",
        "first token / ideal (95 %)",
    )
    return [Shown(columns, rows, "")]


# --- disaggregated -----------------------------------------------------------------------------------------------------------


def _disaggregated_what(settings: Result) -> str:
    return (
        f"{settings['requests']} requests in flight, contexts of {settings['context'][0]} tokens and {settings['suffix']} behind them, "
        f"{settings['new_tokens']} tokens answered; one model: `{settings['model']}`, every request with a context of its own; shared: each of "
        f"{settings['documents']} contexts a round is asked about by all {len(settings['members'])} members in turn; prefix caching on"
    )


def _disaggregated(result: Result) -> list[Shown]:
    rows = []
    for workload, found in result["results"]["workloads"].items():
        for name, each in found["systems"].items():
            compared = ("ttft_vllm_over_kvkin", "throughput_kvkin_over_vllm") if name == "kvkin" else ()
            rows.append(
                [
                    workload,
                    "kvkin" if name == "kvkin" else "vLLM, NIXL",
                    f"{each['ttft_ms']:,.0f} ms",
                    f"{each['tokens_per_s']:.1f}",
                    f"{each['reused_share']:.0%}",
                    *([ratio_text(found[key]) for key in compared] or ["", ""]),
                ]
            )
    processes = {name: system["processes"] for name, system in result["engines"].items()}
    told = "; ".join(
        f"{name}: {', '.join(f'{count} {role}' for role, count in each.items() if count)}"
        for name, each in processes.items()
    )
    columns = (
        "workload",
        "system",
        "first token p50",
        "tokens/s",
        "prompt tokens reused",
        "vLLM's first token / kvkin's (95 %)",
        "kvkin's tokens/s / vLLM's (95 %)",
    )
    return [Shown(columns, rows, f"Processes: {told}.")]


_WHAT = {"overhead": _overhead_what, "stall": _stall_what, "ttft": _ttft_what, "disaggregated": _disaggregated_what}
_TABLES = {"overhead": _overhead, "stall": _stall, "ttft": _ttft, "disaggregated": _disaggregated}
