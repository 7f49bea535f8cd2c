"""examples/agents: what is compared and how, the whole conversation on a tiny family, and every way in which it can go wrong."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import dialogue
import msgspec
import psutil
import pytest
import run
from dialogue import CODER, TESTER, Line, Round, Script, lines, marks, parses, script
from paired_figures import CAVEAT, report, summary, table, totals, turn_view
from paired_turns import Player, Turn, is_quiet
from rich.console import Console
from run import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_UNUSABLE, Agents, main
from tiny_cluster import BASE, FULL, UPPER, make_cluster

from kvkin.configs.loader import load_cluster
from kvkin.kv.errors import ConfigError, NodeUnavailable
from kvkin.kv.plan import PlanKind
from kvkin.kv.provenance import Quality
from kvkin.tools.demo import demo_config
from kvkin.tools.local import LocalCluster
from kvkin.tools.ports import check_ports
from kvkin.tools.router_address import RouterAddress
from kvkin.tools.scoring import normalize_answer
from kvkin.tools.smollm2 import find_gguf
from kvkin.transport.messages import (
    Finished,
    NodeLoad,
    NodeStatus,
    Reuse,
    ReuseReport,
    SegmentReport,
    StatusReply,
    Timings,
    Usage,
)

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "agents"


def tiny_script(rounds: int = 3) -> Script:
    """The example's rounds on a task cut short: the tiny tokenizer spends a token on nearly every letter."""
    whole = script()
    return Script(whole.task[:400], whole.rounds[:rounds])


def answer(
    kind: PlanKind = PlanKind.PRIVATE,
    *,
    tokens: tuple[int, ...] = (5, 6, 7),
    text: str = "    return 1\n",
    ttft_ms: float = 400.0,
    node: str = "decode-a",
    **changes: Any,
) -> Finished:
    reused = kind is not PlanKind.PRIVATE
    segments = [SegmentReport(0, 64, kind, ("decode-b",), 10, (10, 20), 64, 10, 4096)] if reused else []
    finished = Finished(
        id="1",
        text=text,
        token_ids=tokens,
        finish_reason="stop",
        usage=Usage(80, len(tokens), 64 if reused else 0),
        timings=Timings(ttft_ms=ttft_ms, recompute_ms=ttft_ms / 4, suffix_ms=ttft_ms / 2, total_ms=ttft_ms * 2),
        report=ReuseReport(
            kind=kind,
            quality=Quality.UNPROFILED if reused else Quality.EXACT,
            loss=None,
            segments=(*segments, SegmentReport(64 if reused else 0, 80, PlanKind.PRIVATE)),
            sources=("decode-b",) if reused else (),
            tokens_reused=64 if reused else 0,
            layers_recomputed=10 if reused else 0,
            bytes_pulled=4096 if reused else 0,
            reason="a reason",
            fallback=changes.pop("fallback", ""),
        ),
        node=node,
    )
    return msgspec.structs.replace(finished, **changes)


WRITES = Line(1, CODER, "go on", head="def one():\n    # one")
ANSWERS = Line(1, TESTER, "Question: which?\nAnswer:", expected="DeckFull")


def turn_of(shared: Finished, private: Finished, line: Line = WRITES) -> Turn:
    return Turn(line, "model", shared, private)


# --- the script and its marks -------------------------------------------------------------------------------------------


def test_the_script_asks_for_what_is_in_the_task_and_can_be_written() -> None:
    whole = script()
    assert len(whole.rounds) == 6
    compile(whole.task, "task", "exec")
    for each in whole.rounds:
        assert any(
            parses(each.head, f"{indent}return None", cut_off=False) for indent in (" " * 4, " " * 8, " " * 12)
        ), each
        assert f" {normalize_answer(each.expected)} " in f" {normalize_answer(whole.task)} ", each
        assert not marks(Line(1, TESTER, "", expected=each.expected), each.question, cut_off=False), "answers itself"


def test_only_the_first_turn_shows_the_task() -> None:
    whole = script()
    played = list(lines(whole, 2))
    assert [(line.round, line.agent) for line in played] == [(1, CODER), (1, TESTER), (2, CODER), (2, TESTER)]
    assert [whole.task in line.text for line in played] == [True, False, False, False]
    assert all(whole.rounds[line.round - 1].head in line.text for line in played if line.agent == CODER)
    assert all(whole.rounds[line.round - 1].question in line.text for line in played if line.agent == TESTER)


@pytest.mark.parametrize(
    ("text", "cut_off", "good"),
    [
        ("    return 1", False, True),
        ("\n    if x:\n        return 1\n    return 2\n", False, True),
        ("```python\n    return 1\n```", False, True),
        ("    return 1\n    retu", True, True),  # the last line is not complete
        ("    return 1", True, False),  # neither is this one, and nothing else is there
        ("    return (1\n", False, False),
        ('    return 1\n\n\ndef two():\n    """cut', True, True),  # what is not complete is another function
        ("    return 1\n\n\ndef two(:", False, True),
        ("    y = 2\n    if y:\n        retu", True, True),  # nor is the block
        ("    y = 2\n    if y:\n", False, False),  # but this model meant it to be
        ("    y = (2\n    if y:\n        retu", True, False),
        ("    if y:\n        retu", True, False),  # nothing is left
        ("return 1", False, False),  # outside of the function
        ("def two():\n    return 2", False, False),  # Python, but another function
        ("    # nothing is done", False, False),
        ("", False, False),
        ("    return 1\0", False, False),
        ("I would write a loop.", False, False),
    ],
)
def test_code_goes_on_with_its_head_or_not(text: str, cut_off: bool, good: bool) -> None:
    assert parses("def one():\n    # one\n    x = 1", text, cut_off=cut_off) is good
    assert marks(replace(WRITES, head="def one():\n    # one\n    x = 1"), text, cut_off=cut_off) is good


def test_a_head_that_is_not_complete_gets_no_mark_by_itself() -> None:
    assert not parses("def one():\n    for x in y:", "", cut_off=False)
    assert parses("def one():\n    for x in y:", "        pass", cut_off=False)


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("DeckFull", True),
        ("It raises deckfull.", True),
        ("the DeckFull, an exception", True),
        ("DeckFullError", False),
        ("Deck Full", False),
        ("", False),
    ],
)
def test_the_extract_is_in_the_answer_or_not(text: str, good: bool) -> None:
    assert marks(ANSWERS, text, cut_off=True) is good


# --- one turn, two answers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "theirs", "share"),
    [
        ((1, 2, 3), (1, 2, 3), 1.0),
        ((1, 2, 3, 4), (1, 2, 9, 4), 0.5),
        ((1, 2), (1, 2, 3, 4), 0.5),  # stopped earlier
        ((9,), (1, 2), 0.0),
        ((), (), 1.0),
    ],
)
def test_agreement_is_the_share_up_to_the_first_difference(
    mine: tuple[int, ...], theirs: tuple[int, ...], share: float
) -> None:
    assert turn_of(answer(tokens=mine), answer(tokens=theirs)).agreement == share
    assert turn_of(answer(tokens=theirs), answer(tokens=mine)).agreement == share


def test_a_fair_turn_has_no_problems_and_an_unfair_one_says_why() -> None:
    shared = answer(PlanKind.PARTIAL)
    assert turn_of(shared, answer()).problems == []
    assert turn_of(answer(fallback="source lost"), answer()).problems == ["fell back to a private prefill: source lost"]
    assert turn_of(shared, shared).problems == ["the private twin got a partial plan"]
    assert turn_of(shared, answer(node="decode-z")).problems == ["the private twin ran on decode-z, not on decode-a"]


def test_figures_are_sums_and_means_of_both() -> None:
    cut = answer(PlanKind.PARTIAL, text="    return", ttft_ms=100.0, finish_reason="length")
    turns = [
        turn_of(answer(text="    return 1"), answer(text="    return 1", tokens=(5, 6, 7))),
        turn_of(cut, answer(tokens=(5, 6, 9))),
        turn_of(answer(PlanKind.EXACT, text="DeckFull", ttft_ms=50.0), answer(text="a wall"), ANSWERS),
    ]
    figures = totals(turns)
    assert figures["ttft_ms"] == {"shared": 550.0, "private": 1200.0}
    assert figures["compute_ms"] == {"shared": 412.5, "private": 900.0}
    assert figures["total_ms"] == {"shared": 1100.0, "private": 2400.0}
    assert (figures["prompt_tokens"], figures["tokens_reused"], figures["bytes_pulled"]) == (240, 128, 8192)
    assert figures["agreement"] == pytest.approx((1 + 2 / 3 + 1) / 3, abs=1e-4)
    assert figures["same_answers"] == 2
    assert figures["tasks"] == {
        CODER: {"n": 2, "shared": 1, "private": 2, "only_shared": 0, "only_private": 1},
        TESTER: {"n": 1, "shared": 1, "private": 0, "only_shared": 1, "only_private": 0},
    }
    assert totals([])["agreement"] == 0.0

    console = Console(width=200, record=True, markup=False, file=open(os.devnull, "w"))  # noqa: SIM115 - closed below
    with console.file:
        console.print(*(turn_view(turn) for turn in turns), table(turns), summary(figures))
        text = " ".join(console.export_text().split())
    for part in (
        "round 1, coder (model)",
        "partial reuse (unprofiled) on decode-a: 64 of 80 prompt tokens from decode-b, 10 layers recomputed",
        "privately 400 ms; 67% of the tokens until they differ; code that parses: no (privately yes)",
        "waiting for first tokens: 0.55 s instead of 1.20 s (a ratio of 2.2x)",
        "128 of 240 prompt tokens were reused; 8.2 kB moved between nodes",
        "2 of 3 are token for token the private ones",
        "coder, code that parses: 1 of 2 with sharing, 2 privately (better in 0, worse in 1)",
        "tester, the expected extract is in the answer: 1 of 1 with sharing, 0 privately (better in 1, worse in 0)",
        CAVEAT,
    ):
        assert part in text, part


def status(**changes: Any) -> StatusReply:
    load = NodeLoad(**changes.pop("load", {}))
    node = NodeStatus("decode-a", "decode", "alive", "1", ("model",), load, 0, 0.0)
    return StatusReply("1", "router-0", 1.0, changes.pop("running", 0), (node,), 0, changes)


def test_what_is_timed_waits_for_what_would_share_the_cores() -> None:
    assert is_quiet(status())
    assert is_quiet(status(orders_open=0))
    for busy in (
        {"running": 1},
        {"orders_open": 1},
        {"load": {"running": 1}},
        {"load": {"waiting": 1}},
        {"load": {"checks_running": 1}},
    ):
        assert not is_quiet(status(**busy)), busy


class BusyCluster:
    """A client of a cluster on which somebody else always runs something; counts how often it is asked for its status."""

    def __init__(self) -> None:
        self.asked = 0

    async def status(self) -> StatusReply:
        self.asked += 1
        return status(running=1)

    async def generate(self, model: str, **request: Any) -> Finished:
        return answer()


async def test_a_cluster_that_is_never_quiet_is_measured_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paired_turns.QUIET_S", 0.05)
    busy = BusyCluster()
    player = Player(busy, {CODER: "a", TESTER: "b"}, Reuse.ANY, 4)  # type: ignore[arg-type]  # what of a client is used
    waited: list[int] = []
    await player.play(list(lines(tiny_script(), 2)), lambda turn: waited.append(busy.asked))
    assert not player.stopped
    assert len(player.turns) == 4
    # a look and a second one that the router is still there, before each of the two requests
    assert [later - earlier for earlier, later in itertools.pairwise(waited)] == [4, 4, 4]


async def test_a_router_that_goes_away_ends_the_conversation() -> None:
    class Gone(BusyCluster):
        async def status(self) -> StatusReply:
            raise NodeUnavailable("the router was silent")

    player = Player(Gone(), {CODER: "a", TESTER: "b"}, Reuse.ANY, 4)  # type: ignore[arg-type]  # what of a client is used
    await player.play(list(lines(tiny_script(), 1)), lambda turn: None)
    assert player.stopped == "round 1, coder: node_unavailable: the router was silent"
    assert player.turns == []


# --- on a tiny family ---------------------------------------------------------------------------------------------------


def check_report(figures: dict[str, Any], rounds: int) -> None:
    """What everybody may rely on in the report of a conversation that went to its end."""
    assert figures["stopped"] == ""
    assert figures["problems"] == []
    turns = figures["turns"]
    assert [(turn["round"], turn["agent"]) for turn in turns] == [
        (number, agent) for number in range(1, rounds + 1) for agent in (CODER, TESTER)
    ]
    for turn in turns:
        shared, private = turn["shared"], turn["private"]
        assert (private["plan"], private["tokens_reused"], private["bytes_pulled"]) == ("private", 0, 0)
        assert shared["node"] == private["node"]
        assert shared["prompt_tokens"] == private["prompt_tokens"]
        assert 0 <= turn["agreement"] <= 1
        if shared["quality"] == "exact":
            assert shared["tokens"] == private["tokens"]
            assert (turn["agreement"], turn["edit_similarity"]) == (1.0, 1.0)
    prompts = [turn["shared"]["prompt_tokens"] for turn in turns]
    assert prompts == sorted(set(prompts)), "the conversation grows"
    first, *others = turns
    assert first["shared"]["plan"] == "private"
    for turn, before in zip(others, turns, strict=False):
        # all full blocks of what was said up to the turn before, and at least the task file
        assert turn["shared"]["tokens_reused"] >= turns[0]["shared"]["prompt_tokens"] // 16 * 16, turn
        assert turn["shared"]["tokens_reused"] <= before["shared"]["prompt_tokens"] + len(before["shared"]["tokens"])
    handed_over = turns[1]["shared"]
    assert handed_over["sources"] == [first["shared"]["node"]], "what one agent's node holds is reused by the other"
    assert handed_over["bytes_pulled"] > 0
    sums = figures["totals"]
    assert sums["ttft_ms"]["shared"] == pytest.approx(sum(turn["shared"]["ttft_ms"] for turn in turns), abs=0.1)
    assert sums["bytes_pulled"] == sum(turn["shared"]["bytes_pulled"] for turn in turns)


@pytest.mark.timeout(300)
def test_the_whole_example_on_a_tiny_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = make_cluster(tmp_path, backend="ucx"), tmp_path / "out" / "report.json"
    arguments = ["--rounds", "3", "--coder", UPPER, "--tester", FULL, "--max-tokens", "6"]
    code = main([*arguments, "--config", str(file), "--json", str(out)], tiny_script())
    shown = capsys.readouterr().out
    assert code == 0, shown
    figures = json.loads(out.read_text())
    check_report(figures, 3)
    assert figures["setting"] == {"coder": UPPER, "tester": FULL, "rounds": 3, "reuse": "any", "max_tokens": 6}
    assert [turn["model"] for turn in figures["turns"]] == [UPPER, FULL] * 3
    assert "starting router-0, prefill-0, decode-full, decode-upper" in shown, "the base's node is not needed"
    for turn in figures["turns"]:
        assert shown.count(f"round {turn['round']}, {turn['agent']} (") == 1
    assert "What sharing saved in 6 turns" in shown
    assert " ".join(CAVEAT.split()) in " ".join(shown.split())
    assert not psutil.Process().children(recursive=True)
    check_ports(load_cluster(file), load_cluster(file).nodes)


def local(folder: Path) -> LocalCluster:
    return LocalCluster(load_cluster(make_cluster(folder)), (UPPER, FULL))


@pytest.mark.timeout(180)
async def test_on_a_running_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with local(tmp_path) as cluster:
        address = cluster.router.client_address
        exact = Agents(rounds=1, coder=UPPER, tester=FULL, router=address, reuse="exact", max_tokens=4)
        assert await exact._on_running(RouterAddress(address, "--router"), tiny_script()) == 0
        figures = json.loads((tmp_path / ".kvkin" / "agents.json").read_text())
        # nothing of the fine-tune on all layers is the other one's
        assert [turn["shared"]["plan"] for turn in figures["turns"]] == ["private", "private"]
        assert figures["totals"]["same_answers"] == 2

        unknown = replace(exact, tester="tiny-ful")
        with pytest.raises(
            ConfigError, match=rf"^--tester: the cluster at {address} does not serve tiny-ful .*{UPPER}"
        ):
            await unknown._on_running(RouterAddress(address, "--router"), tiny_script())
        # in the cluster file, but nobody serves it
        with pytest.raises(ConfigError, match=r"^--coder: .* does not serve tiny-base now"):
            await replace(exact, coder=BASE)._on_running(RouterAddress(address, "--router"), tiny_script())


@pytest.mark.timeout(180)
async def test_a_turn_that_fails_ends_it_and_what_was_played_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tiny_script(2)
    first, second = short.rounds
    too_long = Script(short.task, (first, Round(second.head, "How long? " * 300, "long")))
    out = tmp_path / "report.json"
    async with local(tmp_path) as cluster:
        job = Agents(rounds=2, coder=UPPER, tester=FULL, max_tokens=4, json=out, router=cluster.router.client_address)
        assert await job._on_running(RouterAddress(cluster.router.client_address, "--router"), too_long) == EXIT_FAILED
    figures = json.loads(out.read_text())
    assert len(figures["turns"]) == 3
    assert figures["stopped"].startswith("round 2, tester: prompt_too_long: ")
    shown = capsys.readouterr().out
    assert "ended early: round 2, tester: prompt_too_long" in shown
    assert "What sharing saved in 3 turns" in shown


@pytest.mark.timeout(240)
def test_ctrl_c_stops_the_cluster_and_keeps_what_was_played(tmp_path: Path) -> None:
    file, out = make_cluster(tmp_path), tmp_path / "report.json"
    arguments = ["--rounds", "4", "--coder", UPPER, "--tester", FULL, "--max-tokens", "60"]
    arguments += ["--config", str(file), "--json", str(out)]
    program = (
        # a suite that was started in the background has SIGINT ignored, and hands that down
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "import sys; import dialogue, run; whole = dialogue.script(); "
        f"sys.exit(run.main({arguments!r}, dialogue.Script(whole.task[:200], whole.rounds)))"
    )
    log = tmp_path / "output.txt"
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(EXAMPLE), "PYTHONUNBUFFERED": "1"},
        )
        deadline = time.monotonic() + 120
        while "round 1, coder (" not in log.read_text():
            assert child.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.05)
        nodes = psutil.Process(child.pid).children(recursive=True)
        assert len(nodes) == 4
        # a tiny family plays all rounds within a second: nobody answers before Ctrl-C is there
        for node in nodes:
            node.suspend()
        try:
            assert child.poll() is None
            child.send_signal(signal.SIGINT)
        finally:
            for node in nodes:
                node.resume()
        try:
            assert child.wait(60) == EXIT_INTERRUPTED, log.read_text()
        finally:
            child.kill()
    _, left = psutil.wait_procs(nodes, timeout=15)
    assert not left
    figures = json.loads(out.read_text())
    assert figures["stopped"] == "interrupted"
    assert 1 <= len(figures["turns"]) < 8
    assert "ended early: interrupted" in log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_example(tmp_path: Path) -> None:
    """As ``make example-agents`` runs it, in the checkout."""
    try:
        find_gguf()
    except ConfigError as error:
        pytest.skip(str(error))
    out = tmp_path / "agents.json"
    command = [sys.executable, str(EXAMPLE / "run.py"), "--json", str(out)]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    figures = json.loads(out.read_text())
    check_report(figures, 3)
    assert figures["totals"]["ttft_ms"]["shared"] < figures["totals"]["ttft_ms"]["private"]
    assert figures["totals"]["compute_ms"]["shared"] < figures["totals"]["compute_ms"]["private"] / 1.5


# --- arguments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rounds", "0"], "--rounds: 0 (allowed: 1 to 6)"),
        (["--rounds", "7"], "--rounds: 7 (allowed: 1 to 6)"),
        (["--max-tokens", "0"], "--max-tokens: 0 is too small (allowed: 1 or more)"),
        (["--coder", "nobody"], "--coder: no decode node serves nobody (allowed: smollm2-135m-code, "),
        (["--tester", "nobody"], "--tester: no decode node serves nobody (allowed: smollm2-135m-code, "),
        (["--router", "x:1", "--config", "y.yaml"], "--router: given together with --config (allowed: one of them)"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--json", "."], "--json: . is a folder (allowed: a file)"),
        (["--router", "nonsense"], "address: 'tcp://nonsense'"),
    ],
)
def test_bad_arguments_are_one_line_before_anything_is_started(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)

    def never(*given: Any, **named: Any) -> None:
        raise AssertionError("started")

    monkeypatch.setattr(run, "ClusterProcesses", never)
    monkeypatch.setattr(run, "prepare_missing", never)
    assert main(arguments) == EXIT_UNUSABLE
    error = capsys.readouterr().err
    assert error.startswith("agents: ")
    assert error.count("\n") == 1
    assert said in error


def test_a_router_that_does_not_answer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.reach, "__defaults__", ("", 0.2))
    assert main(["--router", "127.0.0.1:9"]) == EXIT_UNUSABLE
    assert capsys.readouterr().err == (
        "agents: the router at tcp://127.0.0.1:9 does not answer (waited 0.2 s): nothing listens there. The address comes from "
        "--router; `kvkin up FILE` starts a cluster; without --router a cluster is started for this run\n"
    )


def test_models_of_two_families_do_not_talk(tmp_path: Path) -> None:
    config = load_cluster(make_cluster(tmp_path))
    other = msgspec.structs.replace(
        config.families["tiny"],
        base="other",
        models={"other": config.families["tiny"].models[BASE]},
        recompute_groups=(),
    )
    node = msgspec.structs.replace(config.nodes["decode-base"], models=("other",))
    mixed = msgspec.structs.replace(
        config, families={**config.families, "second": other}, nodes={**config.nodes, "decode-other": node}
    )
    with pytest.raises(ConfigError, match=r"^--tester: other and tiny-upper are of different families"):
        Agents(coder=UPPER, tester="other").nodes(mixed)


def test_only_needed_nodes_are_started() -> None:
    config = demo_config(ROOT / "configs" / "clusters" / "local.yaml")
    assert Agents().nodes(config) == ["router-0", "prefill-0", "decode-qa", "decode-code"]
    base = "smollm2-135m-instruct"
    assert Agents(coder=base, tester=base).nodes(config) == ["router-0", "prefill-0", "decode-base"]


def test_a_report_that_cannot_be_written_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^--json: cannot write .*/file/report\.json"):
        run._write(tmp_path / "file" / "report.json", "{}", "--json")


def test_help_and_readme_name_the_same_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    options = set(re.findall(r"^\W*(--\w[\w-]*)", capsys.readouterr().out, re.MULTILINE))
    assert options == {"--rounds", "--coder", "--tester", "--reuse", "--max-tokens", "--config", "--router", "--json"}
    readme = (EXAMPLE / "README.md").read_text()
    assert set(re.findall(r"`(--[\w-]+)", readme)) == options
    assert CAVEAT.split(":")[0] in " ".join(readme.split())
    assert str(len(dialogue.ROUNDS)) in readme


def test_the_report_is_plain_json() -> None:
    figures = report([turn_of(answer(PlanKind.PARTIAL), answer())], {"rounds": 1}, "")
    assert json.loads(json.dumps(figures)) == figures
    assert figures["turns"][0]["shared"]["segments"][0]["group"] == [10, 20]
