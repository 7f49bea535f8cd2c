"""A family's profiles: which are used, which are refused and why, and who is told."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from profile_samples import LAYERS, Known, lineage, sample_profile
from tiny_models import make_tiny, make_tiny_lora

from kvkin.configs.families import ResolvedCluster, resolve_cluster, resolve_family
from kvkin.configs.loader import parse_cluster
from kvkin.configs.pairs import FamilyProfiles, PairState, load_profiles, pair_reuse
from kvkin.configs.profiles import profile_name, write_profile
from kvkin.configs.schema import FamilyConfig, ModelConfig
from kvkin.kv.frontier import Point
from kvkin.kv.layout import KVLayout, Plane
from kvkin.kv.plan import LayerGroup
from kvkin.tools.cli import main
from kvkin.tools.config_command import ConfigCheck, ConfigShow

LINEAGES = {name: lineage(name) for name in ("base", "qa", "code")}
LAYOUT = KVLayout(LAYERS, (Plane("k", 1, 16), Plane("v", 1, 16)), 64, "float32", 16)


def save(folder: Path, sender: str, receiver: str, name: str = "", **how: Any) -> Path:
    path = folder / (name or profile_name(sender, receiver))
    write_profile(path, sample_profile(sender, LINEAGES[sender], receiver, LINEAGES[receiver], **how))
    return path


def load(
    profiles: str | tuple[str, ...], lineages: Any = LINEAGES, transition: tuple[int, ...] = (1, 2)
) -> FamilyProfiles:
    models = {name: ModelConfig(checkpoint="x") for name in lineages}
    family = FamilyConfig(base="base", models=models, profiles=profiles, transition_layers=transition)
    known = {name: one if isinstance(one, Known) else Known(one) for name, one in lineages.items()}
    return load_profiles(family, known, LAYOUT, strangers=["alien", "martian"])


def test_a_folder_of_profiles(tmp_path: Path) -> None:
    path = save(tmp_path, "base", "qa")
    save(tmp_path, "base", "code")
    (tmp_path / "base-qa.md").write_text("# the report")
    found = load(str(tmp_path))
    assert set(found.pairs) == {("base", "qa"), ("base", "code")}
    assert found.pairs["base", "qa"].path == path
    assert found.refused == found.hints == ()
    # everything that runs here and is of use on some link; a measured gain counts as no loss
    assert found.pairs["base", "qa"].points == (
        Point(None, 0.2, 0),
        Point(LayerGroup(2, 4), 0.02, 2),
        Point(LayerGroup(0, 3), 0.01, 3),
        Point(LayerGroup(1, 6), 0.0, 5),
    )


def test_a_list_of_files_and_a_single_one(tmp_path: Path) -> None:
    paths = [save(tmp_path, "base", "qa"), save(tmp_path, "qa", "code", "mine.json")]
    assert set(load(tuple(map(str, paths))).pairs) == {("base", "qa"), ("qa", "code")}
    assert set(load(str(paths[1])).pairs) == {("qa", "code")}
    assert load(()) == FamilyProfiles()


def test_only_groups_that_start_where_hidden_states_are_kept(tmp_path: Path) -> None:
    save(tmp_path, "base", "qa")
    found = load(str(tmp_path), transition=())
    assert [one.group for one in found.pairs["base", "qa"].points] == [None, LayerGroup(0, 3)]
    # what the profile chose itself cannot run: worth a word
    starts = "nodes start a recompute only at layers 0 (transition_layers)"
    assert found.hints == (f"the group [2, 4] that {tmp_path / 'base-qa.json'} chose is not used: {starts}",)


def test_groups_of_all_layers_reuse_nothing(tmp_path: Path) -> None:
    save(tmp_path, "base", "qa", losses={(0, LAYERS): 0.0, (3, 5): 0.01})
    found = load(str(tmp_path))
    assert not found.pairs
    assert found.refused[0].reason.startswith(
        "none of its groups can run here: nodes start a recompute only at layers 0, 1, 2"
    )


def test_stale_profiles_are_refused_with_the_layer(tmp_path: Path) -> None:
    path = save(tmp_path, "base", "qa")
    found = load(str(tmp_path), LINEAGES | {"qa": lineage("qa", changed=3)})
    assert not found.pairs
    (refused,) = found.refused
    assert (refused.path, refused.pair, refused.malformed) == (path, ("base", "qa"), False)
    assert "the receiver qa is not the one that was profiled: layer 3 differs" in refused.reason
    assert found.warnings("fam") == [f"families.fam.profiles: {path} is refused: {refused.reason}"]


def test_unknown_models_are_refused_and_those_of_other_families_passed_over(tmp_path: Path) -> None:
    save(tmp_path, "base", "qa")
    alien = sample_profile("alien", lineage("alien"), "martian", lineage("martian"))
    write_profile(tmp_path / "alien-martian.json", alien)
    nobody = sample_profile("base", LINEAGES["base"], "nobody", lineage("nobody"))
    write_profile(tmp_path / "base-nobody.json", nobody)
    found = load(str(tmp_path))
    assert set(found.pairs) == {("base", "qa")}
    assert ["nobody is no model of the family" in one.reason for one in found.refused] == [True]
    # named by itself, a profile of another family is a mistake
    assert len(load((str(tmp_path / "alien-martian.json"),)).refused) == 1


def test_damaged_and_missing_files_are_refused_and_harm_no_others(tmp_path: Path) -> None:
    good = save(tmp_path, "base", "qa")
    broken = tmp_path / "broken.json"
    broken.write_text('{"format": 1, "sender": 3}')
    found = load((str(broken), str(tmp_path / "missing.json"), str(good)))
    assert set(found.pairs) == {("base", "qa")}
    malformed, missing = found.refused
    assert malformed.malformed
    assert "sender" in malformed.reason
    assert (missing.reason, missing.malformed, missing.pair) == ("no such file", False, ())
    assert load(str(tmp_path / "nowhere")).refused[0].reason == "cannot be read: No such file or directory"


def test_the_first_profile_of_a_pair_counts(tmp_path: Path) -> None:
    first, second = save(tmp_path, "base", "qa", "a.json"), save(tmp_path, "base", "qa", "b.json")
    found = load((str(second), str(first)))
    assert found.pairs["base", "qa"].path == second
    assert [(one.path, one.reason) for one in found.refused] == [(first, f"{second} is a profile of the same pair")]


def test_a_profile_of_weights_that_moved_to_another_name_does_not_block_the_new_one(tmp_path: Path) -> None:
    """The base was trained again, the old one is kept as base-old: its profile still names "base" and holds for base-old."""
    new = lineage("base", changed=0, kv_too=True)
    save(tmp_path, "base", "qa", "base-qa.2025.json")
    write_profile(tmp_path / "base-qa.json", sample_profile("base", new, "qa", LINEAGES["qa"]))
    found = load(str(tmp_path), LINEAGES | {"base": new, "base-old": LINEAGES["base"]})
    assert found.refused == ()
    assert found.pairs["base", "qa"].path.name == "base-qa.json"
    assert found.pairs["base-old", "qa"].path.name == "base-qa.2025.json"


def test_hostile_files_are_refused_at_once(tmp_path: Path) -> None:
    good = save(tmp_path, "base", "qa")
    (tmp_path / "nested.json").write_text("[" * 100_000)
    (tmp_path / "deep.json").write_text('{"format": 1, "sender": ' + "[" * 100_000 + "}")
    broken = good.read_text().replace(LINEAGES["base"].id.hex(), LINEAGES["base"].id.hex() + "\\n")
    (tmp_path / "newline.json").write_text(broken)
    os.mkfifo(tmp_path / "pipe")
    names = ("nested.json", "deep.json", "newline.json", "pipe")
    found = load((*(str(tmp_path / name) for name in names), str(good)))
    assert [one.path.name for one in found.refused] == list(names)
    assert found.refused[-1].reason == "is no regular file"
    assert set(found.pairs) == {("base", "qa")}


def test_the_same_weights_under_another_name_are_covered(tmp_path: Path) -> None:
    save(tmp_path, "base", "qa", losses={None: 0.01})
    twins = LINEAGES | {"copy": LINEAGES["qa"]}
    assert set(load(str(tmp_path), twins).pairs) == {("base", "qa"), ("base", "copy")}
    # a profile of their own comes first, whatever the order of the files
    other = sample_profile("base", LINEAGES["base"], "copy", LINEAGES["qa"], {None: 0.04})
    write_profile(tmp_path / "zz.json", other)
    found = load(str(tmp_path), twins)
    assert found.pairs["base", "copy"].points == (Point(None, 0.04, 0),)
    assert found.pairs["base", "qa"].points == (Point(None, 0.01, 0),)
    # a model that was renamed keeps its profile, and that is said
    renamed = {"base": LINEAGES["base"], "qa-v1": LINEAGES["qa"], "qa": lineage("qa-v2")}
    found = load(str(tmp_path / "base-qa.json"), renamed)
    assert set(found.pairs) == {("base", "qa-v1")}
    assert "is used for base to qa-v1" in found.hints[0]


def test_a_twin_with_another_head_has_no_part_in_a_profile(tmp_path: Path) -> None:
    save(tmp_path, "base", "qa", receiver_head=b"\x01" * 16)
    qa, twin = Known(LINEAGES["qa"], b"\x01" * 16), Known(LINEAGES["qa"], b"\x02" * 16)
    found = load(str(tmp_path), LINEAGES | {"qa": qa, "twin": twin})
    assert set(found.pairs) == {("base", "qa")}
    found = load(str(tmp_path), LINEAGES | {"qa": twin})
    assert not found.pairs
    assert "the receiver qa is not the one that was profiled: the output head differs" in found.refused[0].reason


# --- in a cluster -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    folder = tmp_path_factory.mktemp("pairs")
    base = make_tiny("llama", folder / "base", num_layers=LAYERS)
    models = {"base": {"checkpoint": str(base)}}
    for seed, name in enumerate(("qa", "code", "new"), 1):
        adapter = make_tiny_lora(base, folder / name, range(LAYERS), seed=seed)
        models[name] = {"checkpoint": str(base), "adapter": str(adapter)}
    return models


@pytest.fixture
def file(checkpoints: dict[str, dict[str, str]], tmp_path: Path) -> Path:
    """A cluster with one profiled, one unprofiled and one refused pair, and one that reuses exactly or not at all."""
    models = dict(checkpoints)
    cluster = {
        "state_dir": str(tmp_path / "state"),
        "families": {
            "fam": {
                "base": "base",
                "models": models,
                "device": "cpu",
                "transition_layers": [1, 2],
                "recompute_groups": [{"sender": "base", "group": [2, 5]}],
                "profiles": str(tmp_path / "profiles"),
            }
        },
        "nodes": {
            "router": {"role": "router"},
            "prefill": {"role": "prefill", "port": 0, "models": ["base"]},
            "decode": {"role": "decode", "port": 0, "models": list(models)},
        },
    }
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(cluster))
    (tmp_path / "profiles").mkdir()
    lineages = {name: one.lineage for name, one in resolve(path).families["fam"].models.items()}
    for receiver, measured in (("qa", lineages["qa"]), ("code", lineage("older"))):
        profile = sample_profile("base", lineages["base"], receiver, measured)
        write_profile(tmp_path / "profiles" / profile_name("base", receiver), profile)
    return path


def resolve(file: Path) -> ResolvedCluster:
    return resolve_cluster(parse_cluster(file.read_text(), str(file)))


def test_a_resolved_family_has_its_profiles(file: Path) -> None:
    cluster = resolve(file)
    found = {(one.sender, one.receiver): one for one in pair_reuse(cluster.families.values())}
    assert {pair: one.state for pair, one in found.items()} == {
        ("base", "qa"): PairState.PROFILED,
        ("base", "code"): PairState.REFUSED,
        ("base", "new"): PairState.UNPROFILED,
    }
    assert [one.loss for one in found["base", "qa"].points] == [0.2, 0.02, 0.01, 0.0]
    # a refused pair falls back to the configured group, unprofiled
    assert found["base", "code"].points == found["base", "new"].points == (Point(LayerGroup(2, 5), math.inf, 3),)
    assert "is not the one that was profiled" in found["base", "code"].why
    assert [warning for warning in cluster.warnings if "base-code.json is refused" in warning]
    # nodes have no use for profiles, and do not depend on them
    assert resolve_family(cluster.config, "fam", models=["base"]).profiles == FamilyProfiles()


def test_config_check_names_the_pairs(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ConfigCheck(file).run() == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "base qa profiled none: 0.200, [2, 4): 0.020, [0, 3): 0.010, [1, 6): 0.000" in out
    assert "base code refused [2, 5)" in out
    assert "base new unprofiled [2, 5)" in out
    assert "base-code.json is refused: the receiver code is not the one that was profiled" in out


def test_config_check_refuses_a_file_that_is_no_profile(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = file.parent / "profiles" / "broken.json"
    broken.write_text('{"format": 1, "sender": 3}')
    assert ConfigCheck(file).run() == 2
    captured = capsys.readouterr()
    assert f"kvkin: {file}: {broken}: is no profile: sender: Expected `object`, got `int`" in captured.err
    assert "usable" not in captured.out
    # a running cluster goes on: the router only says so
    assert set(resolve(file).families["fam"].profiles.pairs) == {("base", "qa")}


@pytest.mark.parametrize("what", ["missing", "file in the way", "broken link"])
def test_a_folder_that_is_not_there_is_an_error_for_config_check_and_routers(
    what: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = file.parent / "profiles"
    folder.rename(file.parent / "elsewhere")
    if what == "file in the way":
        folder.touch()
        folder = folder / "inside"
        file.write_text(file.read_text().replace(f"{folder.parent}\n", f"{folder}\n"))
    elif what == "broken link":
        folder.symlink_to(file.parent / "gone")
    problem = f"{folder} cannot be read: Not a directory" if "way" in what else f"no such folder: {folder}"
    said = f"families.fam.profiles: {problem} (allowed: a folder (`kvkin profile` fills it), a list of files, or no such key)"
    assert ConfigCheck(file).run() == 2
    captured = capsys.readouterr()
    assert (captured.err, captured.out) == (f"kvkin: {file}: {said}\n", "")
    assert main(["router", "--config", str(file), "--node", "router"]) == 2
    assert capsys.readouterr().err.endswith(f"kvkin: {said}\n")
    # nodes have no use for profiles, and `kvkin profile` makes the folder
    config = parse_cluster(file.read_text(), str(file))
    assert set(resolve_family(config, "fam", models=["qa"]).models) == {"base", "qa"}


def test_an_empty_folder_and_a_missing_single_file_are_no_errors(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = file.parent / "profiles"
    for one in folder.iterdir():
        one.unlink()
    assert ConfigCheck(file).run() == 0
    assert "profiles" not in capsys.readouterr().out
    file.write_text(file.read_text().replace(f"{folder}\n", f"{folder}/base-qa.json\n"))
    assert ConfigCheck(file).run() == 0
    assert f"families.fam.profiles: {folder}/base-qa.json is refused: " in " ".join(capsys.readouterr().out.split())


def test_config_show_names_the_pairs_in_comments(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ConfigShow(file).run() == 0
    out = capsys.readouterr().out
    comments = [line for line in out.splitlines() if line.startswith("# ")]
    path = file.parent / "profiles" / "base-qa.json"
    assert comments[0] == (f"# base -> qa: profiled, none: 0.200, [2, 4): 0.020, [0, 3): 0.010, [1, 6): 0.000 ({path})")
    assert comments[1].startswith("# base -> code: refused, [2, 5) (")
    assert comments[2] == "# base -> new: unprofiled, [2, 5)"
    # it is a cluster file again
    assert parse_cluster(out, "shown") == parse_cluster(file.read_text(), "written")


def test_config_show_needs_no_checkpoints(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = yaml.safe_load(file.read_text())
    data["families"]["fam"]["models"]["qa"] = {"checkpoint": "/not/here"}
    file.write_text(yaml.safe_dump(data))
    assert ConfigShow(file).run() == 0
    assert "# which profiles hold is not known: families.fam.models.qa.checkpoint" in capsys.readouterr().out
    del data["families"]["fam"]["profiles"]
    file.write_text(yaml.safe_dump(data))
    assert ConfigShow(file).run() == 0
    assert "#" not in capsys.readouterr().out
