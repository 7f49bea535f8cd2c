"""Profiles: what was measured of a pair of models, and when it no longer holds (docs/design.md section 5).

``kvkin profile`` writes ``profiles/<sender>-<receiver>.json`` with :func:`write_profile`; ``configs.families`` reads them for the
router and ``kvkin config check``, and refuses those that :func:`check_profile` finds stale. Plain data: no torch.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

import msgspec

from kvkin.configs.profile_types import (
    FORMAT,
    Divergence,
    Group,
    LayerSensitivity,
    Made,
    MeasuredGroup,
    Profile,
    ProfileData,
    ProfiledModel,
    ProfilePoint,
    Quality,
    Score,
    Scores,
    TokenStats,
    layer_group,
    profile_point,
    profiled_model,
)
from kvkin.kv.errors import ConfigError
from kvkin.kv.lineage import Lineage

if TYPE_CHECKING:
    from kvkin.configs.families import ResolvedFamily  # which reads profiles itself

__all__ = [
    "FORMAT",
    "Divergence",
    "Group",
    "LayerSensitivity",
    "Made",
    "MeasuredGroup",
    "Profile",
    "ProfileData",
    "ProfilePoint",
    "ProfiledModel",
    "Quality",
    "Score",
    "Scores",
    "TokenStats",
    "Weights",
    "check_profile",
    "layer_group",
    "pairs_of",
    "parse_profile",
    "profile_data",
    "profile_name",
    "profile_point",
    "profile_text",
    "profiled_model",
    "read_profile",
    "stale_reason",
    "write_profile",
]

MAX_FILE_BYTES = 64 << 20
# Floats are written with so many significant digits: more than any measurement here has.
DIGITS = 6


def profile_name(sender: str, receiver: str) -> str:
    """File name of a pair's profile. Characters of model names that a file name cannot have are percent-encoded.

    >>> profile_name("smollm2-135m", "org/qa")
    'smollm2-135m-org%2Fqa.json'
    """
    return f"{quote(sender, safe='@+:')}-{quote(receiver, safe='@+:')}.json"


# --- reading ----------------------------------------------------------------------------------------------------------


def read_profile(path: Path) -> Profile:
    """The profile in ``path``. Raises ConfigError with path and key for what cannot be read or contradicts itself."""
    return parse_profile(profile_data(path), str(path))


def profile_data(path: Path) -> bytes:
    """The bytes of a profile's file. Raises ConfigError if they cannot be read."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            # reading a pipe would wait for somebody to write
            raise ConfigError(str(path), "is no regular file", "a file that kvkin profile wrote")
        if found.st_size > MAX_FILE_BYTES:
            raise ConfigError(str(path), f"{found.st_size} bytes are no profile", f"at most {MAX_FILE_BYTES} bytes")
        return path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(str(path), "no such file", "a file that kvkin profile wrote") from None
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}", "a readable file") from None


def parse_profile(data: bytes, source: str) -> Profile:
    """The profile of JSON ``data``; ``source`` names it in errors. Raises ConfigError."""
    try:
        found = msgspec.json.decode(data, type=_Format)
        if found.format != FORMAT:
            problem, allowed = f"is {found.format}", f"{FORMAT}; profile the pair again with this version"
            raise ConfigError(f"{source}: format", problem, allowed)
        profile = msgspec.json.decode(data, type=Profile)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `")
        key = where.rstrip("`").removeprefix("$").removeprefix(".")
        raise ConfigError(f"{source}: {key}" if key else source, problem, "what kvkin profile writes") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(source, f"not JSON: {error}", "a file that kvkin profile wrote") from None
    for key, problem, allowed in _contradictions(profile):
        raise ConfigError(f"{source}: {key}", problem, allowed)
    return profile


class _Format(msgspec.Struct):
    """Only what says how to read the rest."""

    format: int


def _contradictions(profile: Profile) -> Iterator[tuple[str, str, str]]:
    """(key, problem, allowed) of what a profile says against itself."""
    num_layers = profile.num_layers
    if not num_layers:
        yield "receiver.kv", "is empty", "a digest a layer"
    for side in ("sender", "receiver"):
        model: ProfiledModel = getattr(profile, side)
        if model.num_layers != num_layers:
            yield f"{side}.kv", f"has {model.num_layers} layers", f"as many as receiver.kv: {num_layers}"
        if len(model.hidden) != model.num_layers + 1:
            yield f"{side}.hidden", f"has {len(model.hidden)} entries", f"{model.num_layers + 1}: one more than kv"
        for key, text in _digests_of(side, model):
            if len(text) % 2:
                yield key, "has half a byte", "hexadecimal digits, two a byte"
        if model.lineage.id.hex() != model.lineage_id:
            yield f"{side}.lineage_id", "is not that of its layers", "the digest of all entries of kv"
    for index, layer in enumerate(profile.sensitivity):
        if layer.layer >= num_layers:
            yield f"sensitivity[{index}].layer", f"{layer.layer} is beyond the last", f"0 to {num_layers - 1}"
    seen: dict[Group, int] = {}
    for index, one in enumerate(profile.groups):
        yield from _group_problem(f"groups[{index}].group", one.group, num_layers)
        if one.group in seen:
            yield f"groups[{index}].group", f"stands in groups[{seen[one.group]}] as well", "each group once"
        seen[one.group] = index
        if one.expected_loss is not None and one.quality is None:
            yield f"groups[{index}].expected_loss", "stands without a quality", "a loss that was measured"
    losses = {one.group: one.loss for one in profile.groups if one.loss is not None}
    points = [(f"frontier[{index}]", one) for index, one in enumerate(profile.frontier)]
    if profile.chosen is not None:
        points.append(("chosen", profile.chosen))
    for key, chosen in points:
        yield from _group_problem(f"{key}.group", chosen.group, num_layers)
        if chosen.layers != len(layer_group(chosen.group) or ()):
            yield f"{key}.layers", f"{chosen.layers} is not the size of {chosen.group}", "the group's number of layers"
        if chosen.group not in losses:
            yield f"{key}.group", f"{chosen.group} has no measured quality", "a group of groups with a quality"
        elif not math.isclose(chosen.loss, losses[chosen.group], rel_tol=1e-4, abs_tol=1e-6):
            yield f"{key}.loss", f"{chosen.loss:g} is not that of its group", f"{losses[chosen.group]:g}"


def _digests_of(side: str, model: ProfiledModel) -> Iterator[tuple[str, str]]:
    """(key, hexadecimal digits) of every digest."""
    yield f"{side}.lineage_id", model.lineage_id
    if model.head_digest is not None:
        yield f"{side}.head_digest", model.head_digest
    for field, digests in (("kv", model.kv), ("hidden", model.hidden)):
        for index, text in enumerate(digests):
            yield f"{side}.{field}[{index}]", text


def _group_problem(key: str, group: Group, num_layers: int) -> Iterator[tuple[str, str, str]]:
    if group is not None and not 0 <= group[0] < group[1] <= num_layers:
        yield key, f"[{group[0]}, {group[1]}) is no range of layers", f"[start, stop) within 0 to {num_layers}, or null"


# --- writing ----------------------------------------------------------------------------------------------------------


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile so that readers see the old file or the new one, never a half.

    Raises ConfigError for a profile that :func:`read_profile` would refuse (a figure that is not finite, say), for one that
    would replace another pair's, and where the file cannot be written.
    """
    text = profile_text(profile)
    parse_profile(text.encode(), str(path))
    there = None
    with suppress(ConfigError):  # what is no profile may be replaced
        there = read_profile(path)
    if there is not None and there.pair != profile.pair:
        problem = f"holds the profile of sender {there.sender.name} and receiver {there.receiver.name}"
        raise ConfigError(str(path), problem, "another file")
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with staging.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(staging, path)
        finally:
            staging.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(str(path), f"cannot be written: {error.strerror}", "a file in a writable folder") from None


def profile_text(profile: Profile) -> str:
    """JSON of a profile: fields in their order, one entry of a list a line, floats to ``DIGITS`` significant digits."""
    data = _rounded(msgspec.to_builtins(profile))
    parts = [f" {json.dumps(name)}: {_value_text(value)}" for name, value in data.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _value_text(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n ]"
    if isinstance(value, dict) and any(isinstance(item, dict | list) for item in value.values()):
        return "{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(item)}" for name, item in value.items()) + "\n }"
    return json.dumps(value)


def _rounded(value: Any) -> Any:
    """Builtins with floats rounded. NaN and infinity stay, and are refused when the text is read back."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


# --- stale or not -----------------------------------------------------------------------------------------------------


def check_profile(profile: Profile, family: ResolvedFamily) -> str:
    """Why a profile does not hold for the models of ``family`` as they are now; empty if it does."""
    return "" if pairs_of(profile, family.models) else stale_reason(profile, family.models)


class Weights(Protocol):
    """What a profile is compared with: a ``ModelIdentity``, or whatever else says as much."""

    @property
    def lineage(self) -> Lineage: ...

    @property
    def head_digest(self) -> bytes: ...


def pairs_of(profile: Profile, models: Mapping[str, Weights]) -> tuple[tuple[str, str], ...]:
    """(sender, receiver) pairs of ``models`` for which a profile holds, the one that it names first.

    By weights, not by name: the same ones under another name behave alike. A sender must have the same KV and hidden
    states, a receiver must be the same in every layer as a whole and in its head.
    """
    senders = [name for name, model in models.items() if not _changed(profile.sender, model, answers=False)]
    receivers = [name for name, model in models.items() if not _changed(profile.receiver, model, answers=True)]
    pairs = [(sender, receiver) for sender in senders for receiver in receivers]
    return tuple(sorted(pairs, key=lambda pair: pair != profile.pair))


def stale_reason(profile: Profile, models: Mapping[str, Weights]) -> str:
    """Why a profile does not hold for the very models that it names; empty if it does."""
    for role, then in (("sender", profile.sender), ("receiver", profile.receiver)):
        now = models.get(then.name)
        if now is None:
            return f"the {role} {then.name} is no model of the family, which has {', '.join(sorted(models))}"
        changed = _changed(then, now, answers=role == "receiver")
        if changed:
            return f"the {role} {then.name} is not the one that was profiled: {changed}"
    return ""


def _changed(model: ProfiledModel, now: Weights, *, answers: bool) -> str:
    """What differs between a model then and now, by its first layer; ``answers``: the last layer as a whole and the head count,
    too. Of profiles that do not record the head nothing is known of it."""
    lineage = now.lineage
    if lineage.num_layers != model.num_layers:
        return f"it had {model.num_layers} layers and has {lineage.num_layers}"
    then, num_layers = model.lineage, model.num_layers
    for layer in range(num_layers + answers):
        if then.hidden[layer] != lineage.hidden[layer]:
            where = f"layer {layer - 1}" if layer else "what comes before layer 0 (embeddings, rope, settings, types)"
            return f"{where} differs, {_short(then.hidden[layer])} then, {_short(lineage.hidden[layer])} now"
        if layer < num_layers and then.kv[layer] != lineage.kv[layer]:
            return f"layer {layer} differs, KV {_short(then.kv[layer])} then, {_short(lineage.kv[layer])} now"
    if answers and model.head_digest is not None and bytes.fromhex(model.head_digest) != now.head_digest:
        return f"the output head differs, {model.head_digest[:8]} then, {_short(now.head_digest)} now"
    return ""


def _short(value: bytes) -> str:
    return value.hex()[:8]
