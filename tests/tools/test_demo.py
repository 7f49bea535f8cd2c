"""The demo: on a tiny family in every run of the suite, on the real one in the slow tests; and what must make it fail."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from rich.console import Console
from tiny_cluster import BASE, FULL, UPPER, make_cluster

from kvkin.kv.errors import ConfigError
from kvkin.kv.plan import PlanKind
from kvkin.kv.provenance import Quality
from kvkin.tools import demo
from kvkin.tools.demo_view import record_view, summary, table
from kvkin.tools.demo_workload import Names, Record, Step, check, check_twin, workload
from kvkin.tools.smollm2 import find_gguf
from kvkin.transport.messages import Finished, ReuseReport, SegmentReport, Timings, Usage

ROOT = Path(__file__).parents[2]
TINY = Names(BASE, FULL, UPPER, qa_node="decode-full")
FIELDS = {
    "model": str,
    "plan": str,
    "quality": str,
    "source": str,
    "context_tokens": int,
    "tokens_reused": int,
    "layers_recomputed": int,
    "bytes_pulled": int,
    "ttft_ms": float,
    "phases_ms": dict,
    "private_ttft_ms": float,
    "tokens": list,
    "text": str,
    "same_tokens_as_reference": bool,
}


def tiny_steps() -> list[Step]:
    """The real script with contexts cut short: the tiny tokenizer spends a token on nearly every letter."""
    steps = []
    for step in workload(TINY):
        separator = "\nQuestion" if "\nQuestion" in step.text else "\n\n"
        context, _, question = step.text.rpartition(separator)
        steps.append(replace(step, text=context[:600] + separator + question))
    return steps


def check_report(report: dict[str, Any], expected: list[str]) -> None:
    """What everybody may rely on in demo.json."""
    requests = report["requests"]
    assert report["failures"] == []
    assert [request["plan"] for request in requests] == expected
    for request in requests:
        for name, kind in FIELDS.items():
            assert isinstance(request[name], kind), (name, request[name])
        assert request["same_tokens_as_reference"], request
        assert set(request["phases_ms"]) >= {"hash", "queue", "pull", "recompute", "suffix"}
        assert request["segments"][0]["start"] == 0
        reused = sum(each["stop"] - each["start"] for each in request["segments"] if each["sources"])
        assert request["tokens_reused"] == reused <= request["context_tokens"]
        private = request["plan"] == "private"
        assert private == (reused == 0) == (request["source"] == "")
        assert request["bytes_pulled"] == 0 or not private
        assert request["layers_recomputed"] == 0 or request["plan"] in ("partial", "shared-prefix")
    assert report["peak_memory_bytes"] < 8 << 30


@pytest.mark.timeout(300)
async def test_the_whole_demo_on_a_tiny_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = make_cluster(tmp_path, backend="ucx")
    config = demo.demo_config(file)
    out = tmp_path / "demo.json"
    steps = tiny_steps()
    assert await demo.run_demo(config, steps, TINY, out) == 0, capsys.readouterr().out
    check_report(json.loads(out.read_text()), [step.expect.value for step in steps])
    shown = capsys.readouterr().out
    for number, step in enumerate(steps, 1):
        # a step that takes long is named while it runs, too
        assert shown.count(f"{number}. {step.title}") == 1
    assert "9 of 9 answers have the very tokens of plain transformers" in shown
    assert not psutil.Process().children(recursive=True)
    assert not list((config.state_path / "demo" / "logs").glob("*.ready"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_demo(tmp_path: Path) -> None:
    """As ``make demo`` runs it, in the checkout; the base model may have to be converted first."""
    import subprocess
    import sys

    try:
        find_gguf()
    except ConfigError as error:
        pytest.skip(str(error))
    out = tmp_path / "demo.json"
    done = subprocess.run(
        [sys.executable, "-m", "kvkin.tools.cli", "demo", "--out", str(out)],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    report = json.loads(out.read_text())
    check_report(report, [step.expect.value for step in workload(Names())])
    assert report["workload_s"] < 180
    by_name = {request["name"]: request for request in report["requests"]}
    # what is reused must be worth it even on a busy machine
    assert by_name["other-question"]["ttft_ms"] < by_name["other-question"]["private_ttft_ms"] / 3
    assert by_name["other-model"]["ttft_ms"] < by_name["other-model"]["private_ttft_ms"]
    assert by_name["hand-over"]["tokens_reused"] > by_name["other-model"]["tokens_reused"]
    assert os.path.isdir(ROOT / ".kvkin")


def answer(kind: PlanKind, quality: Quality, *, tokens: tuple[int, ...] = (5, 6, 7), **report: Any) -> Finished:
    source = report.pop("source", "decode-base")
    reused = kind is not PlanKind.PRIVATE
    segments = [SegmentReport(0, 64, kind, (source,), 10, (10, 20), 64, 10, 4096)] if reused else []
    return Finished(
        id="1",
        text="three words [x]",
        token_ids=tokens,
        finish_reason="length",
        usage=Usage(80, len(tokens), 64 if reused else 0),
        timings=Timings(ttft_ms=100.0 if reused else 400.0),
        report=ReuseReport(
            kind=kind,
            quality=quality,
            loss=None,
            segments=(*segments, SegmentReport(64 if reused else 0, 80, PlanKind.PRIVATE)),
            sources=(source,) if reused else (),
            tokens_reused=64 if reused else 0,
            layers_recomputed=10 if reused else 0,
            bytes_pulled=4096 if reused else 0,
            reason="a reason",
            **report,
        ),
        node="decode-qa",
    )


def step_of(kind: PlanKind, quality: Quality, sources: tuple[str, ...] = ()) -> Step:
    return Step("name", "a title", "model", "text", kind, quality, sources=sources)


PARTIAL = answer(PlanKind.PARTIAL, Quality.UNPROFILED)
PRIVATE = answer(PlanKind.PRIVATE, Quality.EXACT)


def test_an_expected_plan_is_no_problem() -> None:
    assert check(step_of(PlanKind.PARTIAL, Quality.UNPROFILED, ("decode-base", "decode-qa")), PARTIAL) == []
    assert check(step_of(PlanKind.PRIVATE, Quality.EXACT), PRIVATE) == []
    assert check_twin(PARTIAL, PRIVATE) == []


@pytest.mark.parametrize(
    ("step", "got", "said"),
    [
        (step_of(PlanKind.EXACT, Quality.EXACT), PARTIAL, "expected a exact plan, got partial"),
        (
            step_of(PlanKind.PARTIAL, Quality.UNPROFILED, ("decode-base",)),
            answer(PlanKind.PRIVATE, Quality.EXACT, fallback="source lost", planned=PlanKind.PARTIAL),
            "fell back to a private prefill: source lost",
        ),
        (step_of(PlanKind.PARTIAL, Quality.EXACT), PARTIAL, "expected quality exact, got unprofiled"),
        (
            step_of(PlanKind.PARTIAL, Quality.UNPROFILED, ("prefill-0", "decode-base")),
            PARTIAL,
            "expected KV from prefill-0 or decode-base, got it from decode-base",
        ),
    ],
)
def test_anything_else_is_a_problem(step: Step, got: Finished, said: str) -> None:
    assert any(said in problem for problem in check(step, got))


def test_a_private_run_must_be_private_there_and_say_the_same() -> None:
    assert "partial plan" in check_twin(PRIVATE, PARTIAL)[0]
    elsewhere = msgspec.structs.replace(PRIVATE, node="decode-base")
    assert "on decode-base" in check_twin(PRIVATE, elsewhere)[0]
    other = msgspec.structs.replace(PRIVATE, token_ids=(5, 9))
    assert check_twin(PRIVATE, other) == ["the private run said something else"]
    assert check_twin(PARTIAL, other) == [], "an approximate plan may say something else"


def record() -> Record:
    return Record(step_of(PlanKind.PARTIAL, Quality.UNPROFILED), [], PARTIAL, PRIVATE, 64)


def test_the_reference_is_really_compared() -> None:
    same = record()
    demo.compare(same, {"prompt_tokens": 80, "tokens": [5, 6, 7], "gaps": [1.0, 1.0, 1.0]})
    assert (same.same_as_reference, same.problems) == (True, [])
    other = record()
    demo.compare(other, {"prompt_tokens": 80, "tokens": [5, 8, 7], "gaps": [1.0, 0.5, 1.0]})
    assert other.same_as_reference is False
    assert other.problems == ["token 1 differs from plain transformers' (gap of its logits: 0.5000)"]
    tie = record()
    demo.compare(tie, {"prompt_tokens": 80, "tokens": [5, 8, 7], "gaps": [1.0, 0.0001, 1.0]})
    assert (tie.same_as_reference, tie.problems) == (False, []), "said to be different, but rounding decided it"
    longer = record()
    demo.compare(longer, {"prompt_tokens": 80, "tokens": [5, 6, 7, 8], "gaps": [1.0] * 4})
    assert longer.problems == ["token 3 differs from plain transformers' (gap of its logits: 1.0000)"]
    prompt = record()
    demo.compare(prompt, {"prompt_tokens": 81, "tokens": [5, 6, 7], "gaps": [1.0] * 3})
    assert prompt.problems == ["prompt of 80 tokens, the reference's has 81"]


def test_the_report_has_every_field_and_the_screen_every_figure() -> None:
    shown = record()
    shown.same_as_reference = True
    as_json = shown.as_json()
    for name, kind in FIELDS.items():
        assert isinstance(as_json[name], kind), name
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 - closed below
    with console.file:
        console.print(
            record_view(1, shown), table([shown]), summary([shown], 3 << 30, dict.fromkeys(TIMES, 1.0), Path("x"))
        )
        text = console.export_text()
    for part in ("partial", "decode-base", "[0, 64)", "layers [10, 20) from E 10", "4.1 kB", "100 ms", "4.0x", "[x]"):
        assert part in text, part


TIMES = ("start_s", "workload_s", "total_s")


def test_demo_config_takes_free_ports_and_finds_the_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = demo.demo_config(ROOT / "configs" / "clusters" / "local.yaml")
    router = config.routers["router-0"]
    assert router.client_port not in (0, 5570, router.node_port)
    assert all(node.port == 0 for node in (config.prefill_nodes | config.decode_nodes).values())
    # an installed kvkin, called from anywhere
    monkeypatch.chdir(tmp_path)
    family = demo.demo_config(None).families["smollm2"]
    adapter = family.models["smollm2-135m-qa"].adapter
    assert adapter is not None
    assert Path(adapter, "adapter_config.json").is_file()
