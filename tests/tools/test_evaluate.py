"""``kvkin evaluate`` on a tiny random family: every arm against the independent oracle, the files, resuming, refusals."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import oracle
import pytest
import torch
from tiny_cluster import BASE, FULL, LAYERS, SPLIT, UPPER, make_cluster

from kvkin.configs.families import resolve_family
from kvkin.configs.loader import load_cluster
from kvkin.configs.profiles import (
    Made,
    MeasuredGroup,
    Profile,
    ProfileData,
    ProfilePoint,
    Quality,
    Score,
    Scores,
    TokenStats,
    profiled_model,
    write_profile,
)
from kvkin.kv.plan import Holder, LayerGroup, LayerSource, ReusePlan, Segment
from kvkin.kv.provenance import exact_provenance
from kvkin.tools import evaluate_arms
from kvkin.tools.cli import main
from kvkin.tools.evaluate_arms import make_arms, measure_context, parse_groups
from kvkin.tools.model_pair import Pair, load_pair
from kvkin.tools.quality_cases import Case, make_cases
from kvkin.tools.quality_data import read_examples
from kvkin.tools.scoring import METRICS, first_lines

WORDS = ["lamp", "ship", "glass", "bird", "keeper", "storm", "night", "wind", "salt", "rock", "bell", "tide"]
COUNT = 5
GROUPS = [LayerGroup(0, 3), LayerGroup(2, 5), LayerGroup(SPLIT, LAYERS)]
NAMES = ["full", "sender", "reuse", "blend 0.1", "blend 0.5", "group 0-3", "group 2-5", f"group {SPLIT}-{LAYERS}"]
KV_BYTES, HIDDEN_BYTES = (
    2 * 2 * 16 * 4,
    64 * 4,
)  # of a token: two planes of two heads of 16 a layer, hidden states of 64


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cluster(tmp_path_factory.mktemp("evaluate"))


@pytest.fixture(scope="module")
def pair(cluster: Path) -> Pair:
    return load_pair(resolve_family(load_cluster(cluster), "tiny", models=(BASE, FULL)), BASE, FULL)


@pytest.fixture(scope="module")
def models(cluster: Path) -> dict[str, Any]:
    """Sender and receiver as transformers and peft load them."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(cluster.parent / "base", dtype=torch.float32).eval()

    return {BASE: load(), FULL: PeftModel.from_pretrained(load(), str(cluster.parent / "full")).merge_and_unload()}


def _cases(path: Path, pair: Pair, metric: str) -> list[Case]:
    examples = read_examples(path).of_split("all")
    return make_cases(examples, pair.tokenizer, count=COUNT, block_size=16, metric=metric, max_new_tokens=8)


def _says(model: Any, case: Case, held: Mapping[str, oracle.State], group: LayerGroup | str | None, pair: Pair) -> str:
    """What the oracle's ``model`` answers with everything private ("private"), nothing recomputed (None) or a group."""
    context, total = len(case.context_ids), case.num_tokens
    holder = Holder("holder", exact_provenance(b"x" * 16))
    if group == "private":
        plan = ReusePlan((Segment(0, total),))
    else:
        inside = group if isinstance(group, LayerGroup) else LayerGroup(0, 0)
        spans = [LayerGroup(0, inside.start), LayerGroup(inside.stop, LAYERS)]
        sources = tuple(LayerSource(span, holder) for span in spans if len(span))
        e_layer = inside.start or None
        reused = Segment(
            0,
            context,
            sources,
            e_layer=e_layer,
            e_holder=holder if e_layer else None,
            recompute=inside if len(inside) else None,
        )
        plan = ReusePlan((reused, Segment(context, total)))
    state = oracle.execute(model, [*case.context_ids, *case.suffix_ids], plan, held)
    ids = oracle.generate(model, state, case.max_new_tokens)[1]
    ended = next((place for place, token in enumerate(ids) if token in pair.eos), len(ids))
    return first_lines(pair.decode(ids[:ended]), case.num_lines)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Any], pair: Pair) -> Path:
    """Questions whose accepted answer is what the oracle's receiver says after a private prefill."""
    path = tmp_path_factory.mktemp("data") / "notes.jsonl"
    rng = random.Random(0)
    lines = [
        {
            "id": f"n{n}",
            "context": " ".join(rng.choices(WORDS, k=20)),
            "question": f"Which {rng.choice(WORDS)}?",
            "answer": "?",
        }
        for n in range(9)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    examples = read_examples(path).of_split("all")
    cases = make_cases(examples, pair.tokenizer, count=9, block_size=16, metric="edit_similarity", max_new_tokens=8)
    gold = {case.id: _says(models[FULL], case, {}, "private", pair) for case in cases}
    answered = [line | {"answer": gold[line["id"]]} for line in lines if gold[line["id"]].strip()]
    assert len(answered) >= COUNT
    path.write_text("".join(f"{json.dumps(line)}\n" for line in answered))
    return path


def arguments(cluster: Path, data: Path, out: Path, *options: str) -> list[str]:
    words = ["evaluate", "--sender", BASE, "--receiver", FULL, "--data", str(data), "--config", str(cluster)]
    words += ["--split", "all", "--count", str(COUNT), "--threads", "1", "--out", str(out)]
    words += ["--metric", "edit_similarity", "--max-new-tokens", "8"]
    return [*words, "--blend-ratios", "0.5", "0.1", "--groups", "2-5 0-3", f"{SPLIT}-{LAYERS}", *options]


@pytest.fixture(scope="module")
def whole(cluster: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run from end to end."""
    out = tmp_path_factory.mktemp("whole")
    assert main(arguments(cluster, data, out)) == 0
    return out


def _result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "evaluation.json").read_text())
    return found


def _records(folder: Path) -> dict[str, dict[str, Any]]:
    lines = (folder / "cases.jsonl").read_text().splitlines()[1:]
    return {record["case"]: record for record in map(json.loads, lines)}


def _untimed(folder: Path) -> Any:
    """Records without what depends on when they were taken."""
    return {
        case: {
            name: {key: value for key, value in arm.items() if key != "ttft_s"} for name, arm in record["arms"].items()
        }
        for case, record in _records(folder).items()
    }


# --- what it computes ----------------------------------------------------------------------------------------------------


def test_every_arm_answers_as_the_oracle_does(whole: Path, data: Path, models: dict[str, Any], pair: Pair) -> None:
    records, differ = _records(whole), 0
    for case in _cases(data, pair, "edit_similarity"):
        held = {"holder": oracle.private(models[BASE], case.context_ids)}
        arms = records[case.id]["arms"]
        said = {
            "full": _says(models[FULL], case, held, "private", pair),
            "sender": _says(models[BASE], case, held, "private", pair),
            "reuse": _says(models[FULL], case, held, None, pair),
            **{f"group {each.start}-{each.stop}": _says(models[FULL], case, held, each, pair) for each in GROUPS},
        }
        assert {name: arms[name]["answer"] for name in said} == said
        assert arms["full"]["score"] == 1.0
        for name in NAMES:
            assert arms[name]["score"] == METRICS["edit_similarity"].score(arms[name]["answer"], case.answers)
        differ += len(set(said.values())) > 2
    assert differ  # the arms are not all alike, so the comparison says something


def test_what_is_pulled_and_computed(whole: Path) -> None:
    for record in _records(whole).values():
        tokens, arms = record["tokens"], record["arms"]
        assert tokens % 16 == 0
        chosen = {ratio: int(ratio * tokens) for ratio in (0.1, 0.5)}
        expected = {
            "full": (0, LAYERS * tokens),
            "sender": (0, LAYERS * tokens),
            "reuse": (LAYERS * tokens * KV_BYTES, 0),
            # CacheBlend: layer 0 and k and v of layer 1 for all, then the chosen ones
            **{
                f"blend {ratio}": ((LAYERS - 1) * tokens * KV_BYTES, 2 * tokens + (LAYERS - 2) * rows)
                for ratio, rows in chosen.items()
            },
            "group 0-3": (5 * tokens * KV_BYTES, 3 * tokens),
            "group 2-5": (5 * tokens * KV_BYTES + tokens * HIDDEN_BYTES, 3 * tokens),
            f"group {SPLIT}-{LAYERS}": (SPLIT * tokens * KV_BYTES + tokens * HIDDEN_BYTES, (LAYERS - SPLIT) * tokens),
        }
        assert {name: (arm["bytes"], arm["layer_tokens"]) for name, arm in arms.items()} == expected


def test_likelihood_needs_no_answers_and_agrees_with_the_oracle(
    cluster: Path, data: Path, tmp_path: Path, models: dict[str, Any], pair: Pair
) -> None:
    assert main(arguments(cluster, data, tmp_path, "--metric", "loss")) == 0
    records = _records(tmp_path)
    for case in _cases(data, pair, "loss"):
        for name, model in (("full", FULL), ("sender", BASE)):
            ids = torch.tensor([[*case.context_ids, *case.suffix_ids, *case.answer_ids]])
            with torch.inference_mode():
                logits = models[model](ids).logits[0, case.num_tokens - 1 : -1].double()
            chances = logits.log_softmax(-1)[range(len(case.answer_ids)), list(case.answer_ids)]
            assert records[case.id]["arms"][name]["score"] == pytest.approx(float(chances.mean().exp()), rel=1e-3)
            assert "answer" not in records[case.id]["arms"][name]
    assert _result(tmp_path)["metric"] == {"name": "loss", "title": "likelihood of the answer"}


def test_recomputing_everything_is_the_full_prefill(cluster: Path, data: Path, tmp_path: Path) -> None:
    options = ["--metric", "loss", "--blend-ratios", "1", "--receiver", UPPER, "--no-plot"]
    options += ["--groups", f"0-{LAYERS}", f"{SPLIT}-{LAYERS}"]
    assert main([*arguments(cluster, data, tmp_path), *options]) == 0
    for arm in _result(tmp_path)["arms"]:
        if arm["kind"] in ("blend", "group"):
            # all tokens, all layers, or all layers that are not the sender's own
            assert arm["difference"]["estimate"] == pytest.approx(0, abs=1e-5), arm["name"]
            assert arm["kept"]["estimate"] == pytest.approx(1, abs=1e-4), arm["name"]


def test_arms_take_turns_and_are_timed_alone(data: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = make_arms([0.5], GROUPS[:2], num_layers=LAYERS)
    case = _cases(data, pair, "loss")[0]
    ran: list[str] = []
    original = evaluate_arms._states
    monkeypatch.setattr(evaluate_arms, "_states", lambda arm, *rest: (ran.append(arm.name), original(arm, *rest))[1])
    others = [arm.name for arm in arms if arm.kind != "sender"]
    begun = []
    for turn in range(2 * len(others)):
        ran.clear()
        ticks = iter(range(1000))
        found = measure_context(pair, [case], arms, METRICS["loss"], turn=turn, clock=lambda ticks=ticks: next(ticks))[
            0
        ]
        assert ran[0] == "sender"  # its states are what the others reuse
        assert sorted(ran[1:]) == sorted(others)
        assert [arm["ttft_s"] for arm in found["arms"].values()] == [2] * len(
            arms
        )  # two readings around the context, two around the suffix
        assert list(found["arms"]) == [arm.name for arm in arms]
        begun.append(ran[1])
    assert begun == others * 2


def test_questions_about_one_context_pay_for_it_once(data: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = make_arms([0.5], GROUPS[:2], num_layers=LAYERS)
    first, other, *_ = _cases(data, pair, "edit_similarity")
    cases = [first, replace(other, context_ids=first.context_ids), replace(first, id="z", suffix_ids=other.suffix_ids)]
    ran: list[str] = []
    original = evaluate_arms._states
    monkeypatch.setattr(evaluate_arms, "_states", lambda arm, *rest: (ran.append(arm.name), original(arm, *rest))[1])
    together = measure_context(pair, cases, arms, METRICS["edit_similarity"], turn=0)
    assert sorted(ran) == sorted(arm.name for arm in arms)
    alone = [measure_context(pair, [case], arms, METRICS["edit_similarity"], turn=0)[0] for case in cases]
    assert [_without_times(record) for record in together] == [_without_times(record) for record in alone]
    assert len({record["context"] for record in together}) == 1


def _without_times(record: Mapping[str, Any]) -> dict[str, Any]:
    arms = {name: {key: arm[key] for key in arm if key != "ttft_s"} for name, arm in record["arms"].items()}
    return {**record, "arms": arms}


# --- what it writes and prints -------------------------------------------------------------------------------------------


def test_the_files(whole: Path, cluster: Path, data: Path) -> None:
    assert {file.name for file in whole.iterdir()} == {
        "cases.jsonl",
        "evaluation.json",
        "evaluation.md",
        "quality_latency.svg",
        "quality_latency.png",
    }
    result = _result(whole)
    assert [arm["name"] for arm in result["arms"]] == NAMES
    assert (result["sender"], result["receiver"], result["family"], result["cases"]) == (BASE, FULL, "tiny", COUNT)
    assert result["data"]["name"] == "notes.jsonl"
    assert result["data"]["digest"] == read_examples(data).digest
    assert str(data.parent) not in json.dumps(result)  # no machine's paths
    assert str(cluster.parent) not in json.dumps(result)
    assert {one["name"] for one in result["equal_latency"]} == {"reuse", *NAMES[5:]}
    text = "".join(ElementTree.parse(whole / "quality_latency.svg").getroot().itertext())  # well-formed
    drawn = (whole / "quality_latency.svg").read_text() + text
    assert all(words in drawn for words in ("CacheBlend", "DroidSpeak", "full prefill", "[2, 5)", "0.5"))
    assert (whole / "quality_latency.png").read_bytes().startswith(b"\x89PNG")


def test_means_in_the_result_are_those_of_the_cases(whole: Path) -> None:
    records, result = _records(whole), _result(whole)
    scores = {name: [record["arms"][name]["score"] for record in records.values()] for name in NAMES}
    for arm in result["arms"]:
        mean = sum(scores[arm["name"]]) / COUNT
        assert arm["score"]["estimate"] == pytest.approx(mean, abs=1e-6)
        assert arm["score"]["n"] == COUNT
        assert arm["difference"]["estimate"] == pytest.approx(mean - 1.0, abs=1e-6)
        assert arm["kept"]["estimate"] == pytest.approx(mean, abs=1e-6)
        assert arm["score"]["low"] <= arm["score"]["estimate"] <= arm["score"]["high"]
    shares = {arm["name"]: arm["compute_share"] for arm in result["arms"]}
    assert (shares["full"], shares["reuse"], shares["group 2-5"]) == (1.0, 0.0, 3 / LAYERS)


def test_tables_say_what_the_json_says(whole: Path) -> None:
    text, result = (whole / "evaluation.md").read_text(), _result(whole)
    rows = [re.split(r" *\| *", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    named = {row[0]: row for row in rows if len(row) == 8}
    for arm in result["arms"]:
        words = {"full": "full prefill", "sender": "sender alone", "reuse": "full reuse"}.get(arm["kind"])
        if words is None:
            words = (
                f"CacheBlend {arm['ratio']:g}" if arm["ratio"] else f"DroidSpeak [{arm['group'][0]}, {arm['group'][1]})"
            )
        assert float(named[words][1].split()[0]) == round(arm["score"]["estimate"], 3)
        assert named[words][7] == f"{arm['compute_share']:.0%}"
    assert "quality_latency.svg" in text
    assert result["command"] in text
    command = result["command"].split()
    assert command[:2] == ["kvkin", "evaluate"]
    assert command[command.index("--groups") + 1 :] == ["2-5", "0-3", f"{SPLIT}-{LAYERS}"]


def test_json_on_standard_output(cluster: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(cluster, data, tmp_path, "--json", "--no-plot", "--count", "1")) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == _result(tmp_path)
    assert "8 arms: 1/1" in printed.err
    assert not list(tmp_path.glob("*.svg"))
    # one case has no interval, and says so
    assert {arm["score"]["low"] for arm in _result(tmp_path)["arms"]} == {None}
    assert "(95 %)" in (tmp_path / "evaluation.md").read_text()


def test_the_terminal_shows_every_arm(
    cluster: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(cluster, data, tmp_path, "--count", "2")) == 0
    out = capsys.readouterr().out
    for words in (
        "full prefill",
        "sender alone",
        "full reuse",
        "CacheBlend 0.1",
        "DroidSpeak [2, 5)",
        "at equal latency",
    ):
        assert words in out
    assert "…" not in out


def test_long_contexts_without_the_chat_template(cluster: Path, data: Path, tmp_path: Path) -> None:
    options = ["--context-tokens", "400", "--count", "2", "--no-chat", "--no-plot", "--blend-ratios", "--groups"]
    assert main(arguments(cluster, data, tmp_path, *options)) == 0
    result = _result(tmp_path)
    assert [arm["name"] for arm in result["arms"]] == ["full", "sender", "reuse"]
    assert 300 < result["context_tokens"]["min"] <= result["context_tokens"]["max"] < 420
    assert result["equal_latency"] == []
    assert "--context-tokens 400" in result["command"]
    assert "--no-chat" in result["command"]
    assert "at equal latency" not in (tmp_path / "evaluation.md").read_text()


# --- Ctrl-C and going on -------------------------------------------------------------------------------------------------


def _interrupted(monkeypatch: pytest.MonkeyPatch, after: int) -> list[str]:
    """Ctrl-C instead of the case after ``after`` ones; returns the ids of those measured (the first run warms up)."""
    seen: list[str] = []

    def measured(pair: Pair, cases: Sequence[Case], *rest: Any, **options: Any) -> Any:
        if len(seen) == after + 1:
            raise KeyboardInterrupt
        (case,) = cases  # of these data every case has a context of its own
        seen.append(case.id)
        return measure_context(pair, cases, *rest, **options)

    monkeypatch.setattr(evaluate_arms, "measure_context", measured)
    return seen


def test_ctrl_c_keeps_cases_and_resume_goes_on(
    whole: Path,
    cluster: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = arguments(cluster, data, tmp_path)
    with monkeypatch.context() as patch:
        first = _interrupted(patch, 2)
        assert main(words) == 130
    assert "stopped after 2 of 5 cases" in capsys.readouterr().err
    assert set(_records(tmp_path)) == set(first[1:])
    assert not (tmp_path / "evaluation.json").exists()
    # a kill may cut the last line
    with (tmp_path / "cases.jsonl").open("a") as file:
        file.write('{"stage": "arms", "case": "n')
    assert main(words) == 2
    assert re.search(r"out: .*cases\.jsonl is there already \(allowed: --resume, --overwrite", capsys.readouterr().err)
    with monkeypatch.context() as patch:
        second = _interrupted(patch, 99)
        assert main([*words, "--resume"]) == 0
    assert "going on: 2 of 5 cases are measured" in capsys.readouterr().err
    assert len(second) == 1 + 3
    assert not set(second[1:]) & set(first[1:])
    assert _untimed(tmp_path) == _untimed(whole)
    with monkeypatch.context() as patch:  # once all is measured only the report is made again
        again = _interrupted(patch, 0)
        assert main([*words, "--resume"]) == 0
        assert not again


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (["--metric", "f1"], "cases, metric"),
        (["--groups", "1-2"], "arms"),
        (["--check-layer", "2"], "check_layer"),
        (["--count", "3"], "cases"),
        (["--receiver", UPPER], "receiver"),
    ],
)
def test_other_settings_are_not_mixed_in(
    whole: Path, cluster: Path, data: Path, capsys: pytest.CaptureFixture[str], change: list[str], key: str
) -> None:
    before = (whole / "cases.jsonl").read_bytes()
    assert main([*arguments(cluster, data, whole), *change, "--resume"]) == 2
    assert f"resume: the run in {whole} had another {key} (allowed: the same settings" in capsys.readouterr().err
    assert (whole / "cases.jsonl").read_bytes() == before


def test_a_file_that_is_no_log_is_not_mixed_in(
    cluster: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for content in ("", "hello\n", "[]\n", '{"fingerprint": 5}\n'):
        (tmp_path / "cases.jsonl").write_text(content)
        assert main(arguments(cluster, data, tmp_path, "--resume")) == 2
        assert "had another format, sender" in capsys.readouterr().err
    assert main(arguments(cluster, data, tmp_path, "--overwrite", "--count", "1", "--no-plot")) == 0
    assert len(_records(tmp_path)) == 1


# --- profiles ------------------------------------------------------------------------------------------------------------


def _profile(cluster: Path, path: Path, groups: list[tuple[int, int] | None], receiver: str = FULL) -> Path:
    family = resolve_family(load_cluster(cluster), "tiny")
    score = Score(mean=0.5, low=0.4, high=0.6, n=9)
    quality = Quality(score=0.4, loss=0.2, loss_low=0.1, loss_high=0.3, n=9)
    sizes = [0 if group is None else group[1] - group[0] for group in groups]
    profile = Profile(
        sender=profiled_model(BASE, family.models[BASE].lineage),
        receiver=profiled_model(receiver, family.models[receiver].lineage),
        metric="f1",
        data=ProfileData(
            name="x", digest="00", split="profile", samples=9, context_tokens=TokenStats(min=1, p50=1, mean=1.0, max=1)
        ),
        group_size=1,
        max_loss=0.05,
        scores=Scores(full=score),
        full_reuse_is_fine=False,
        chosen=None,
        frontier=tuple(
            ProfilePoint(group=group, loss=0.2, layers=size) for group, size in zip(groups, sizes, strict=True)
        ),
        sensitivity=(),
        groups=tuple(MeasuredGroup(group=group, quality=quality) for group in groups),
        made=Made(date="2026-01-01"),
    )
    write_profile(path, profile)
    return path


def test_the_frontier_of_a_profile_is_measured(cluster: Path, data: Path, tmp_path: Path) -> None:
    profile = _profile(cluster, tmp_path / "p.json", [None, (3, 4), (2, 5)])
    words = arguments(cluster, data, tmp_path / "out", "--profile", str(profile), "--count", "1", "--no-plot")
    assert main(words) == 0
    names = [arm["name"] for arm in _result(tmp_path / "out")["arms"]]
    assert names == ["full", "sender", "reuse", "blend 0.1", "blend 0.5", "group 3-4", *NAMES[5:]]
    assert "--profile p.json" in _result(tmp_path / "out")["command"]


def test_a_profile_that_cannot_be_used(
    cluster: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = _profile(cluster, tmp_path / "other.json", [None], receiver=UPPER)
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    for path, message in (
        (tmp_path / "none.json", r"none\.json: no such file"),
        (broken, r"broken\.json.*`format`"),
        (other, rf"profile: .*other\.json: .*{UPPER}.*\(allowed: one of {BASE} and {FULL}\)"),
    ):
        assert main(arguments(cluster, data, tmp_path / "out", "--profile", str(path))) == 2
        assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


# --- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sender", "nobody"], r"sender: no model 'nobody'.*tiny-base"),
        (["--sender", FULL], "receiver: tiny-full is the sender too"),
        (["--metric", "bleu"], r"metric: no metric 'bleu' \(allowed: f1, "),
        (["--groups", "5-2"], r"groups: '5-2' is no group.*A-B, half-open"),
        (["--groups", "a-b"], "groups: 'a-b' is no group"),
        (["--groups", "2-9"], r"groups: 2-9 is no range of layers \(allowed: A-B with 0 <= A < B <= 8\)"),
        (["--blend-ratios", "1.5"], r"blend_ratios: 1\.5 is no share of the tokens \(allowed: 0 to 1\)"),
        (["--check-layer", "8"], r"check_layer: 8 \(allowed: a layer: 0 to 7\)"),
        (["--count", "0"], "count: 0 is too small"),
        (["--context-tokens", "-1"], "context_tokens: -1 is too small"),
        (["--max-new-tokens", "-1"], "max_new_tokens: -1 is too small"),
        (["--resume", "--overwrite"], "resume: given together with overwrite"),
        (["--data", "nowhere.json"], r"data: cannot read nowhere\.json"),
        (["--config", "nowhere.yaml"], r"nowhere\.yaml"),
    ],
)
def test_what_it_refuses(
    cluster: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    out = tmp_path / "out"
    assert main([*arguments(cluster, data, out), *options]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not out.exists()


def test_a_split_without_examples(cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.jsonl"  # "Force" is of split train by its name
    path.write_text(json.dumps({"context": "c " * 40, "question": "q", "answer": "a", "group": "Force"}) + "\n")
    assert main(arguments(cluster, path, tmp_path / "out", "--split", "test")) == 2
    assert "split: none of one.jsonl's 1 group(s) is in test (allowed: all" in capsys.readouterr().err


def test_recorded_prompts_have_no_answers(cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recorded.jsonl"
    path.write_text(json.dumps({"token_ids": list(range(3, 60)), "suffix_start": 40}) + "\n")
    assert main(arguments(cluster, path, tmp_path / "out")) == 2
    assert "data: recorded prompts have no accepted answers (allowed: data with answers)" in capsys.readouterr().err


def test_without_matplotlib_it_says_how_to_get_it(
    cluster: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    assert main(arguments(cluster, data, tmp_path)) == 2
    assert re.search(r"plot: .*matplotlib.*\(allowed: pip install 'kvkin\[plots\]'.*--no-plot", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_groups_on_the_command_line() -> None:
    assert parse_groups(["10-20 0-15", "3-4,5-6", "none"]) == [
        LayerGroup(10, 20),
        LayerGroup(0, 15),
        LayerGroup(3, 4),
        LayerGroup(5, 6),
    ]
    arms = make_arms([0.3, 0.1, 0.3], [LayerGroup(2, 4), LayerGroup(1, 2), LayerGroup(2, 4)], num_layers=4)
    assert [arm.name for arm in arms] == ["full", "sender", "reuse", "blend 0.1", "blend 0.3", "group 1-2", "group 2-4"]
