"""``kvkin profile`` on a tiny random family: what it writes, that it goes on after Ctrl-C, what it refuses."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tiny_cluster import BASE, FULL, LAYERS, SPLIT, UPPER, make_cluster

from kvkin.configs.families import resolve_family
from kvkin.configs.loader import load_cluster
from kvkin.configs.profiles import Profile, check_profile, profile_name, read_profile
from kvkin.tools import profile_measure
from kvkin.tools.cli import main

WORDS = ["lamp", "ship", "glass", "bird", "keeper", "storm", "night", "wind", "salt", "rock", "bell", "tide"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cluster(tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Contexts of some 100 tokens with a question and an answer each."""
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "notes.jsonl"
    lines = [
        {
            "context": " ".join(rng.choices(WORDS, k=24)),
            "question": f"Which {rng.choice(WORDS)}?",
            "answer": rng.choice(WORDS),
        }
        for _ in range(5)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def run(cluster: Path, data: Path, out: Path, *options: str, receiver: str = FULL, metric: str = "loss") -> int:
    arguments = ["--sender", BASE, "--receiver", receiver, "--data", str(data), "--metric", metric, "--split", "all"]
    arguments += ["--config", str(cluster), "--out", str(out), "--samples", "4", "--threads", "1", *options]
    return main(["profile", *arguments])


def measured(profile: Profile) -> dict[str, Any]:
    """All that must not depend on when it was measured."""
    plain: dict[str, Any] = msgspec.to_builtins(profile)
    plain.pop("made")
    for group in plain["groups"]:
        group.pop("recompute_s")
    return plain


def test_a_profile_that_the_router_accepts(cluster: Path, data: Path, tmp_path: Path, capsys: Any) -> None:
    assert run(cluster, data, tmp_path, "--group-size", "1") == 0
    printed = capsys.readouterr()
    profile = read_profile(tmp_path / profile_name(BASE, FULL))
    family = resolve_family(load_cluster(cluster), "tiny")
    assert check_profile(profile, family) == ""
    assert profile.receiver.head_digest == family.models[FULL].head_digest.hex()
    assert profile.sender.head_digest is None, "it decides nothing of what the receiver makes of the KV"
    assert profile.metric == "loss"
    assert profile.data.samples == 5, "answers are scored on all that the data has"
    assert {one.divergence.n for one in profile.groups if one.divergence is not None} == {4}
    assert {one.quality.n for one in profile.groups if one.quality is not None} == {5}
    assert len(profile.groups) == LAYERS * (LAYERS + 1) // 2, "full reuse, and every group but the full prefill"
    assert [one.layer for one in profile.sensitivity] == list(range(LAYERS))
    by_group = {one.group: one for one in profile.groups}
    answered = {group for group, one in by_group.items() if one.quality is not None}
    assert None in answered
    assert any(group is not None and group[0] == 0 for group in answered)
    assert any(group is not None and group[1] == LAYERS for group in answered)
    assert all(by_group[group].recompute_s is not None for group in answered)
    losses = [one.loss for one in profile.frontier]
    assert losses == sorted(losses, reverse=True)
    assert profile.frontier[0].group is None
    full_reuse = by_group[None].quality
    assert full_reuse is not None
    assert profile.scores.full_reuse is not None
    assert full_reuse.loss == pytest.approx(1 - profile.scores.full_reuse.mean / profile.scores.full.mean, rel=1e-4)
    # everything but one layer recomputed is closer to the full prefill than nothing recomputed
    nothing, most = by_group[None].divergence, by_group[0, LAYERS - 1].divergence
    assert nothing is not None
    assert most is not None
    assert most.mean < nothing.mean
    files = {file.name for file in tmp_path.iterdir()}
    stem = f"{BASE}-{FULL}"
    assert files == {f"{stem}{end}" for end in (".json", ".md", "-sensitivity.svg", "-inputs.svg", "-frontier.svg")}
    report = (tmp_path / f"{stem}.md").read_text()
    assert all(f"({stem}-{figure}.svg)" in report for figure in ("sensitivity", "inputs", "frontier"))
    assert "nothing (full reuse)" in printed.out
    assert "search: 4/4" in printed.err


def test_layers_that_are_the_base_s_own_are_not_sensitive(cluster: Path, data: Path, tmp_path: Path) -> None:
    assert run(cluster, data, tmp_path, "--group-size", "2", receiver=UPPER) == 0
    profile = read_profile(tmp_path / profile_name(BASE, UPPER))
    mean = [one.mean for one in profile.sensitivity]
    assert max(mean[:SPLIT]) < 1e-6
    assert min(mean[SPLIT:]) > 1e-6
    by_group = {one.group: one for one in profile.groups}
    upper = by_group[SPLIT, LAYERS].divergence
    assert upper is not None
    assert upper.mean < 1e-6, "all that differs is recomputed"
    assert profile.chosen is not None
    assert profile.chosen.loss <= profile.max_loss


@pytest.mark.parametrize("metric", ["f1", "edit_similarity"])
def test_metrics_of_generated_text(cluster: Path, data: Path, tmp_path: Path, metric: str) -> None:
    code = run(cluster, data, tmp_path, "--group-size", "4", metric=metric)
    # a random model may say nothing right: then there is no quality to lose, and it says so
    assert code in (0, 2)
    assert (tmp_path / profile_name(BASE, FULL)).exists() == (code == 0)


def test_it_goes_on_after_ctrl_c(cluster: Path, data: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    assert run(cluster, data, tmp_path / "whole", "--group-size", "3", "--max-loss", "0.04") == 0
    log = next(file for file in (cluster.parent / "state" / "profiles").iterdir() if FULL in file.name)
    log.unlink()
    searched: list[str] = []
    original = profile_measure.CaseWork.search

    def interrupted(self: Any, *bounds: Any) -> Any:
        if len(searched) == 2:
            raise KeyboardInterrupt
        searched.append(self.case.id)
        return original(self, *bounds)

    monkeypatch.setattr(profile_measure.CaseWork, "search", interrupted)
    assert run(cluster, data, tmp_path / "parts", "--group-size", "3", "--max-loss", "0.04") == 130
    assert not (tmp_path / "parts").exists()
    searched_later: list[str] = []

    def counted(self: Any, *bounds: Any) -> Any:
        searched_later.append(self.case.id)
        return original(self, *bounds)

    monkeypatch.setattr(profile_measure.CaseWork, "search", counted)
    capsys.readouterr()
    assert run(cluster, data, tmp_path / "parts", "--group-size", "3", "--max-loss", "0.04") == 0
    assert "going on: 2 of 4 cases are searched, 0 of 5 answered" in capsys.readouterr().err
    assert len(searched_later) == 2
    assert not set(searched) & set(searched_later)
    name = profile_name(BASE, FULL)
    assert measured(read_profile(tmp_path / "parts" / name)) == measured(read_profile(tmp_path / "whole" / name))


def test_exhaustive_search_measures_all_and_chooses_alike(cluster: Path, data: Path, tmp_path: Path) -> None:
    name = profile_name(BASE, FULL)
    assert run(cluster, data, tmp_path / "pruned", "--group-size", "2") == 0
    assert run(cluster, data, tmp_path / "all", "--group-size", "2", "--exhaustive") == 0
    pruned, whole = read_profile(tmp_path / "pruned" / name), read_profile(tmp_path / "all" / name)
    assert all(one.quality is not None for one in whole.groups)
    mine = {one.group: one.quality for one in pruned.groups if one.quality is not None}
    theirs = {one.group: one.quality for one in whole.groups}
    for group, quality in mine.items():
        other = theirs[group]
        assert quality is not None
        assert other is not None
        assert quality.loss == pytest.approx(other.loss, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sender", "nobody", "--receiver", FULL], r"sender: no model 'nobody'.*tiny-base, tiny-full"),
        (["--sender", FULL, "--receiver", FULL], "receiver: tiny-full is the sender too"),
        (["--sender", BASE, "--receiver", FULL, "--samples", "0"], "samples: 0 is too small"),
        (["--sender", BASE, "--receiver", FULL, "--group-size", "0"], "group_size: 0 is too small"),
        (["--sender", BASE, "--receiver", FULL, "--answer-samples", "9"], "answer_samples: 9 is too small"),
        (["--sender", BASE, "--receiver", FULL, "--max-loss", "1.5"], "max_loss: 1.5"),
        (["--sender", BASE, "--receiver", FULL, "--metric", "bleu"], "no metric 'bleu'.*f1"),
        (["--sender", BASE, "--receiver", FULL, "--refresh"], "data: given together with refresh"),
    ],
)
def test_what_it_refuses(
    cluster: Path, data: Path, tmp_path: Path, capsys: Any, options: list[str], message: str
) -> None:
    where = ["--config", str(cluster), "--data", str(data), "--out", str(tmp_path)]
    assert main(["profile", *options, *where]) == 2
    error = capsys.readouterr().err
    assert pytest.raises(AssertionError, match=message).matches(AssertionError(error))
    assert not list(tmp_path.iterdir())


def test_what_costs_nothing_is_checked_before_anything_is_measured(
    cluster: Path, data: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "file").write_text("")
    assert run(cluster, data, tmp_path / "file") == 2
    assert "out:" in capsys.readouterr().err
    refresh = ["profile", "--sender", BASE, "--receiver", FULL, "--config", str(cluster), "--refresh"]
    assert main([*refresh, "--out", str(tmp_path / "new")]) == 2
    error = capsys.readouterr().err
    assert "refresh: the cluster has recorded nothing of this pair" in error
    assert "drift.record" in error


def test_missing_data_is_named(cluster: Path, tmp_path: Path, capsys: Any) -> None:
    common = ["profile", "--sender", BASE, "--receiver", FULL, "--config", str(cluster), "--out", str(tmp_path)]
    assert main(common) == 2
    assert "data: missing" in capsys.readouterr().err
    assert main([*common, "--data", str(tmp_path / "nothing.json")]) == 2
    assert "nothing.json" in capsys.readouterr().err
