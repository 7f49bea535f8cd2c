"""``python -m kvkin.tools.docs_evaluation``: writes the tables of docs/evaluation.md from the results beside it.

``evaluation/NAME`` is the JSON of ``kvkin evaluate`` in docs/evaluation/NAME.json, ``serving/NAME`` that of ``kvkin bench serving`` there,
``pipeline/NAME`` that of ``kvkin bench pipeline`` there, ``engine/NAME`` that of ``kvkin bench engine``, ``profile/NAME`` a profile in profiles/NAME.json, ``summary/NAME/NAME/...`` a line
of each of several evaluations. The table goes between
``<!-- KIND/NAME: begin -->`` and ``<!-- KIND/NAME: end -->``, and nothing else is touched: no figure is typed in by hand. A test compares.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvkin.configs.profiles import read_profile
from kvkin.tools.bench_engine_report import head as engine_head
from kvkin.tools.bench_engine_report import tables as engine_tables
from kvkin.tools.bench_pipeline_report import SPEEDUP_HEAD, SWEEP_HEAD, speedup_rows, sweep_rows
from kvkin.tools.bench_pipeline_report import head as pipeline_head
from kvkin.tools.evaluate_report import ARM_HEAD, EQUAL_HEAD, arm_rows, equal_rows
from kvkin.tools.profile_report import HEAD, rows, verdict
from kvkin.tools.report_view import bytes_text

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "evaluation.md"
_MARKED = re.compile(r"(<!-- (?P<name>[\w./-]+): begin -->\n)(?P<body>.*?)(<!-- (?P=name): end -->)", re.DOTALL)


def filled(text: str) -> str:
    """``text`` with what stands between each pair of marks replaced. Raises FileNotFoundError for a result that is not there."""
    return _MARKED.sub(lambda found: f"{found[1]}{_body(found['name'])}{found[4]}", text)


def names(text: str) -> list[str]:
    """The results that ``text`` shows."""
    return [found["name"] for found in _MARKED.finditer(text)]


def _body(name: str) -> str:
    kind, _, stem = name.partition("/")
    shown: dict[str, Callable[[str], str]] = {
        "evaluation": _evaluation,
        "profile": _profile,
        "serving": _serving,
        "pipeline": _pipeline,
        "engine": _engine,
        "summary": _summary,
    }
    return shown[kind](stem)


def _evaluation(stem: str) -> str:
    result: dict[str, Any] = json.loads((DOCUMENT.parent / "evaluation" / f"{stem}.json").read_text(encoding="utf-8"))
    context, made = result["context_tokens"], result["made"]
    head = (
        f"`{result['receiver']}` on the KV of `{result['sender']}`: {result['cases']} cases of {result['data']['name']} (split "
        f"{result['data']['split']}), contexts of {context['min']} to {context['max']} tokens (median {context['p50']}), "
        f"{result['metric']['title']}; {made['device']}, {made['dtype']}, {made['threads']} threads.\n\n"
        f"    {result['command']}\n\n"
    )
    text = head + _table(ARM_HEAD, arm_rows(result))
    if result["equal_latency"]:
        text += "\nAt equal latency:\n\n" + _table(EQUAL_HEAD, equal_rows(result))
    return text


def _profile(stem: str) -> str:
    profile = read_profile(ROOT / "profiles" / f"{stem}.json")
    data = profile.data
    head = (
        f"`{profile.receiver.name}` on the KV of `{profile.sender.name}`: {data.samples} cases of {data.name} (split {data.split}), "
        f"contexts of {data.context_tokens.min} to {data.context_tokens.max} tokens. {verdict(profile)}\n\n"
    )
    return head + _table(HEAD, rows(profile, frontier_only=True))


SUMMARY_HEAD = (
    "receiver on the sender's KV",
    "cases, context (median)",
    "full reuse keeps",
    "largest group within 40 % of the layers",
    "keeps",
    "full / group, first token",
)
_MOST_LAYERS = 0.4


def _summary(stems: str) -> str:
    """Of each evaluation: what full reuse keeps, and the group with the most layers of those that recompute at most 40 %."""
    body = []
    for stem in stems.split("/"):
        result: dict[str, Any] = json.loads(
            (DOCUMENT.parent / "evaluation" / f"{stem}.json").read_text(encoding="utf-8")
        )
        arms = {
            arm["name"]: dict(zip(ARM_HEAD, row, strict=True))
            for arm, row in zip(result["arms"], arm_rows(result), strict=True)
        }
        within = [
            arm
            for arm in result["arms"]
            if arm["kind"] == "group" and arm["group"][1] - arm["group"][0] <= _MOST_LAYERS * result["num_layers"]
        ]
        largest = max(within, key=lambda arm: arm["group"][1] - arm["group"][0])
        cells = arms[largest["name"]]
        start, stop = largest["group"]
        body.append(
            [
                f"`{result['receiver']}` on `{result['sender']}`, {result['metric']['title']}",
                f"{result['cases']}, {result['context_tokens']['p50']} tokens",
                arms["reuse"]["kept (95 %)"],
                f"[{start}, {stop})",
                cells["kept (95 %)"],
                cells["full / arm (95 %)"],
            ]
        )
    return _table(SUMMARY_HEAD, body)


SERVING_HEAD = (
    "requests/s",
    "arm",
    "finished",
    "first token p50",
    "p95",
    "kept the target, per s",
    "prompt tokens reused",
    "pulled",
)


def _serving(stem: str) -> str:
    result: dict[str, Any] = json.loads((DOCUMENT.parent / "evaluation" / f"{stem}.json").read_text(encoding="utf-8"))
    settings, summary = result["settings"], result["summary"]
    body = [
        [
            f"{point['rate']:g}",
            arm,
            f"{point['finished']} of {point['requests']}",
            f"{point['ttft_p50_ms']:,.0f} ms",
            f"{point['ttft_p95_ms']:,.0f} ms",
            f"{point['goodput_per_s']:.2f}",
            f"{point['reused_share']:.0%}",
            bytes_text(point["bytes_pulled"]),
        ]
        for points in zip(*(each["curve"] for each in summary["arms"].values()), strict=True)
        for arm, point in zip(summary["arms"], points, strict=True)
    ]
    agents = settings["agents"]
    head = (
        f"{agents['sessions']} sessions a point of {agents['session_turns']} turns that take turns over {len(settings['models'])} models, contexts of "
        f"{agents['context_tokens']} tokens and {agents['new_tokens']} more a turn, {agents['output_tokens']} tokens answered, "
        f"{settings['repeats']} repeat(s), target for the first token {settings['slo_ttft_s']:g} s, `reuse: {settings['reuse']}` in the "
        f"arm with sharing; {len(settings['nodes'])} nodes.\n\n"
    )
    text = head + _table(SERVING_HEAD, body)
    for arm, each in summary["arms"].items():
        found = each["throughput_at_p95_ttft"]
        text += f"\n- {arm}: p95 of the first token within the target {_reach(found)}"
    return text + "\n"


def _reach(found: dict[str, Any]) -> str:
    """Up to which rate a p95 kept the target: between two measured rates, or beyond what was measured."""
    words = {
        "at": "up to {:.2f} requests/s",
        "above": "at all rates up to {:.2f} requests/s",
        "below": "not even at {:.2f} requests/s",
    }
    return words[found["bound"]].format(found["rate"])


def _pipeline(stem: str) -> str:
    result: dict[str, Any] = json.loads((DOCUMENT.parent / "evaluation" / f"{stem}.json").read_text(encoding="utf-8"))
    text = f"{pipeline_head(result)}\n\n    {result['settings']['command']}\n\n"
    text += _table(SPEEDUP_HEAD, speedup_rows(result))
    if result["settings"]["rates"]:
        text += (
            "\nBy link, and what the policy chooses there, going by its estimates; *choice / other* is what the plan that it chose took, "
            "against the one that it did not choose:\n\n"
        )
        text += _table(SWEEP_HEAD, sweep_rows(result))
    return text


def _engine(stem: str) -> str:
    """Figures of vLLM need a host that has it: where there are none yet, the document says what measures them."""
    file = DOCUMENT.parent / "evaluation" / f"{stem}.json"
    if not file.exists():
        return f"Not measured yet: `kvkin bench engine {stem.removeprefix('engine-')} --json`.\n"
    return engine_text(json.loads(file.read_text(encoding="utf-8")))


def engine_text(result: dict[str, Any]) -> str:
    """A result of ``kvkin bench engine`` as it stands in a document."""
    text = f"{engine_head(result)}\n\n    {result['settings']['command']}\n"
    for shown in engine_tables(result):
        text += f"\n{_table(shown.head, [list(row) for row in shown.rows])}"
        text += f"\n{shown.verdict}\n" if shown.verdict else ""
    return text


def _table(head: tuple[str, ...], body: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *body))


if __name__ == "__main__":
    DOCUMENT.write_text(filled(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
