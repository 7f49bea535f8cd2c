"""Profiles: written and read back, refused where they are damaged, stale where the models changed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_samples import LAYERS, Known, lineage, sample_profile

from kvkin.configs.profiles import (
    FORMAT,
    MeasuredGroup,
    Profile,
    Quality,
    pairs_of,
    parse_profile,
    profile_name,
    profile_text,
    read_profile,
    stale_reason,
    write_profile,
)
from kvkin.kv.errors import ConfigError
from kvkin.kv.frontier import pareto, point
from kvkin.kv.plan import LayerGroup

SENDER, RECEIVER = lineage("sender"), lineage("receiver")
MODELS = {"sender": Known(SENDER), "receiver": Known(RECEIVER, b"\x01" * 16)}


@pytest.fixture
def profile() -> Profile:
    return sample_profile("sender", SENDER, "receiver", RECEIVER)


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_profile_is_read_back_as_written(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "made" / profile_name(*profile.pair)
    write_profile(path, profile)
    assert read_profile(path) == profile
    assert sorted(os.listdir(path.parent)) == ["sender-receiver.json"]
    # plain JSON, for anybody's plots
    assert json.loads(path.read_text())["chosen"] == {"group": [2, 4], "loss": 0.02, "layers": 2}
    assert path.stat().st_mode & 0o600 == 0o600


def test_the_text_is_stable_and_one_group_stands_in_one_line(profile: Profile) -> None:
    text = profile_text(profile)
    assert profile_text(parse_profile(text.encode(), "again")) == text
    lines = [line for line in text.splitlines() if line.startswith('  {"group": [2, 4], "div')]
    assert len(lines) == 1
    assert json.loads(lines[0].rstrip(","))["quality"]["loss"] == 0.02


def test_floats_are_written_to_six_digits(profile: Profile) -> None:
    long = msgspec.structs.replace(profile, max_loss=0.0512345678901)
    assert parse_profile(profile_text(long).encode(), "p").max_loss == 0.0512346


def test_points_are_the_groups_with_answers(profile: Profile) -> None:
    assert profile.points() == (
        point(None, 0.2),
        point(LayerGroup(2, 4), 0.02),
        point(LayerGroup(0, 3), 0.01),
        point(LayerGroup(1, 6), -0.01),
    )
    assert [LayerGroup(*one.group) if one.group else None for one in profile.frontier] == [
        one.group for one in pareto(profile.points())
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_figures_that_are_none_are_not_written(profile: Profile, tmp_path: Path, value: float) -> None:
    quality = Quality(score=value, loss=0.02, loss_low=0.0, loss_high=0.1, n=9)
    broken = msgspec.structs.replace(profile, groups=(*profile.groups, MeasuredGroup(group=(3, 5), quality=quality)))
    with pytest.raises(ConfigError, match=r"p\.json"):
        write_profile(tmp_path / "p.json", broken)
    assert not list(tmp_path.iterdir())


def test_another_pairs_file_is_not_overwritten(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "a-b-c.json"
    write_profile(path, sample_profile("a-b", SENDER, "c", RECEIVER))
    with pytest.raises(ConfigError, match=r"holds the profile of sender a-b and receiver c \(allowed: another file\)"):
        write_profile(path, sample_profile("a", SENDER, "b-c", RECEIVER))
    assert read_profile(path).pair == ("a-b", "c")
    write_profile(path, sample_profile("a-b", SENDER, "c", lineage("newer")))
    assert read_profile(path).receiver.lineage == lineage("newer")


def test_what_is_no_profile_may_be_replaced(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text("{")
    write_profile(path, profile)
    assert read_profile(path) == profile


def test_a_folder_that_cannot_be_written_is_a_config_error(profile: Profile, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"p.json: cannot be written: .* \(allowed: a file in a writable folder\)"):
        write_profile(tmp_path / "file" / "p.json", profile)


@pytest.mark.parametrize(
    ("sender", "receiver", "name"),
    [
        ("base", "qa", "base-qa.json"),
        ("org/base", "a:b@c", "org%2Fbase-a:b@c.json"),
        ("..", "/etc/passwd", "..-%2Fetc%2Fpasswd.json"),
    ],
)
def test_any_model_name_gives_a_file_name(sender: str, receiver: str, name: str) -> None:
    assert profile_name(sender, receiver) == name
    assert Path(name).name == name


# --- damaged files ----------------------------------------------------------------------------------------------------


def change(*path: str | int, to: Any) -> Callable[[Any], None]:
    def apply(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = to

    return apply


def drop(name: str) -> Callable[[Any], None]:
    return lambda data: data.pop(name)


DAMAGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "another format": (change("format", to=9), rf"p.json: format: is 9 \(allowed: {FORMAT}; profile the pair again"),
    "no format": (drop("format"), r"p.json: Object missing required field `format`"),
    "no receiver": (drop("receiver"), "p.json: Object missing required field `receiver`"),
    "text for a number": (change("scores", "full", "mean", to="0.7"), "p.json: scores.full.mean: Expected `float`"),
    "no digest": (change("sender", "kv", 2, to="zz"), r"p.json: sender.kv\[2\]: Expected `str` matching"),
    "half a byte": (change("sender", "hidden", 2, to="abc"), r"p.json: sender.hidden\[2\]: has half a byte"),
    "a wrong lineage": (change("receiver", "lineage_id", to="00"), "receiver.lineage_id: is not that of its layers"),
    "layers missing": (change("sender", "kv", to=["ab"]), "sender.kv: has 1 layers"),
    "no layers": (change("receiver", "kv", to=[]), "receiver.kv: is empty"),
    "a hidden state missing": (change("receiver", "hidden", to=["ab"] * LAYERS), "receiver.hidden: has 6 entries"),
    "a layer too high": (change("sensitivity", 0, "layer", to=LAYERS), r"sensitivity\[0\].layer: 6 is beyond the last"),
    "a group backwards": (
        change("groups", 1, "group", to=[4, 2]),
        r"groups\[1\].group: \[4, 2\) is no range of layers",
    ),
    "a group too high": (change("groups", 1, "group", to=[4, 7]), r"groups\[1\].group: \[4, 7\) is no range"),
    "a group twice": (change("groups", 1, "group", to=None), r"groups\[1\].group: stands in groups\[0\] as well"),
    "a frontier of nothing": (
        change("frontier", 0, to={"group": [4, 5], "loss": 0.1, "layers": 1}),
        r"frontier\[0\].group: \(4, 5\) has no measured quality",
    ),
    "another loss": (change("chosen", "loss", to=0.0), "chosen.loss: 0 is not that of its group"),
    "another size": (change("chosen", "layers", to=3), "chosen.layers: 3 is not the size"),
    "an agreement above 1": (
        change("groups", 1, "first_token_agreement", to=1.5),
        r"groups\[1\].first_token_agreement",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_names_path_and_key(profile: Profile, tmp_path: Path, name: str) -> None:
    damage, problem = DAMAGES[name]
    data = json.loads(profile_text(profile))
    damage(data)
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=problem):
        read_profile(path)


@pytest.mark.parametrize(
    ("data", "problem"),
    [(b"", "not JSON"), (b"[]", "Expected `object`"), (b'{"format": 1', "not JSON"), (b"\xff\xfe", "not JSON")],
)
def test_what_is_no_profile_at_all(tmp_path: Path, data: bytes, problem: str) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=problem) as refused:
        read_profile(path)
    assert str(path) in str(refused.value)


def test_unreadable_files_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_profile(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_profile(tmp_path)


def test_fields_of_later_versions_are_read_over(profile: Profile) -> None:
    data = json.loads(profile_text(profile)) | {"later": 1}
    data["groups"][0]["later"] = 2
    assert parse_profile(json.dumps(data).encode(), "p") == profile


@given(st.binary(max_size=64))
def test_no_bytes_give_anything_but_a_config_error(data: bytes) -> None:
    with pytest.raises(ConfigError):
        parse_profile(data, "p")


# --- stale or not -----------------------------------------------------------------------------------------------------


def test_a_profile_holds_for_the_models_that_were_measured(profile: Profile) -> None:
    assert stale_reason(profile, MODELS) == ""
    assert pairs_of(profile, MODELS) == (("sender", "receiver"),)


def test_equal_weights_under_other_names_are_covered_too(profile: Profile) -> None:
    twins = {"other": MODELS["receiver"], **MODELS, "copy": MODELS["sender"]}
    assert pairs_of(profile, twins) == (
        ("sender", "receiver"),
        ("sender", "other"),
        ("copy", "other"),
        ("copy", "receiver"),
    )
    renamed = {"base": MODELS["sender"], "qa": MODELS["receiver"]}
    assert pairs_of(profile, renamed) == (("base", "qa"),)
    assert "the sender sender is no model of the family, which has base, qa" in stale_reason(profile, renamed)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_a_changed_layer_is_named(profile: Profile, role: str, layer: int) -> None:
    now = MODELS | {role: Known(lineage(role, changed=layer))}
    if role == "sender" and layer == LAYERS - 1:
        now[role] = Known(lineage(role, changed=layer, kv_too=True))
    reason = stale_reason(profile, now)
    assert f"the {role} {role} is not the one that was profiled: layer {layer} differs" in reason
    assert pairs_of(profile, now) == ()


def test_what_follows_the_senders_last_kv_does_not_matter_to_anybody(profile: Profile) -> None:
    # its KV and hidden states are the same; a receiver would answer otherwise, though
    now = MODELS | {"sender": Known(lineage("sender", changed=LAYERS - 1))}
    assert stale_reason(profile, now) == ""
    assert pairs_of(profile, now) == (("sender", "receiver"),)


def test_other_types_or_settings_differ_before_the_first_layer(profile: Profile) -> None:
    reason = stale_reason(profile, MODELS | {"receiver": Known(lineage("receiver", numerics=b"bfloat16"))})
    assert "what comes before layer 0" in reason


def test_another_number_of_layers_is_said(profile: Profile) -> None:
    reason = stale_reason(profile, MODELS | {"sender": Known(lineage("sender", layers=4))})
    assert "it had 6 layers and has 4" in reason


def with_head(head: bytes | None) -> Profile:
    return sample_profile("sender", SENDER, "receiver", RECEIVER, receiver_head=head)


def test_another_head_of_the_receiver_is_another_model(tmp_path: Path) -> None:
    measured = with_head(b"\x01" * 16)
    path = tmp_path / "p.json"
    write_profile(path, measured)
    assert json.loads(path.read_text())["receiver"]["head_digest"] == "01" * 16
    read = read_profile(path)
    assert stale_reason(read, MODELS) == ""
    twin = Known(RECEIVER, b"\x02" * 16)
    assert pairs_of(read, MODELS | {"twin": twin}) == (("sender", "receiver"),)
    reason = stale_reason(read, MODELS | {"receiver": twin})
    assert reason == (
        "the receiver receiver is not the one that was profiled: the output head differs, 01010101 then, 02020202 now"
    )
    assert pairs_of(read, MODELS | {"receiver": twin}) == ()


def test_the_senders_head_does_not_matter(tmp_path: Path) -> None:
    read = with_head(b"\x01" * 16)
    now = MODELS | {"sender": Known(SENDER, b"another")}
    assert (stale_reason(read, now), pairs_of(read, now)) == ("", (("sender", "receiver"),))


def test_a_profile_without_a_head_holds_by_its_layers_alone(profile: Profile) -> None:
    """Written before heads were recorded: nothing is known of it."""
    assert "head_digest" not in profile_text(profile)
    assert parse_profile(profile_text(profile).encode(), "p").receiver.head_digest is None
    now = MODELS | {"receiver": Known(RECEIVER, b"any")}
    assert (stale_reason(profile, now), pairs_of(profile, now)) == ("", (("sender", "receiver"),))


@pytest.mark.parametrize(("digits", "problem"), [("abc", "has half a byte"), ("xy", "Expected `str` matching")])
def test_a_damaged_head_names_its_key(digits: str, problem: str) -> None:
    data = json.loads(profile_text(with_head(b"\x01" * 16)))
    data["receiver"]["head_digest"] = digits
    with pytest.raises(ConfigError, match=rf"p: receiver\.head_digest: {problem}"):
        parse_profile(json.dumps(data).encode(), "p")
