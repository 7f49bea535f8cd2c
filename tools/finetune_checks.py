"""What ``kvkin finetune`` checks before it loads a model, cheapest first: settings, folders, data, then the base's files.

Training takes minutes to hours: whatever a setting, the data or the base can be refused for is said before. Called by
``finetune.py``. Keys of errors are the options' names.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from kvkin.configs.architectures import Geometry, read_geometry
from kvkin.configs.layer_tensors import sort_tensors
from kvkin.configs.safetensors_files import read_json, read_tensors
from kvkin.kv.errors import ConfigError
from kvkin.tools.finetune_data import Prompts
from kvkin.tools.finetune_method import METHODS, check_method
from kvkin.tools.finetune_probes import METRICS
from kvkin.tools.out_folder import check_out_folder
from kvkin.tools.smollm2 import MARKER, base_path, find_gguf

if TYPE_CHECKING:
    from kvkin.tools.finetune import Finetune

CHECKPOINT_FILE = "checkpoint.pt"
# What torch's generator takes as a seed.
MAX_SEED = 2**63 - 1


def check_settings(job: Finetune) -> None:
    """ConfigError for a setting that cannot be used whatever the data and the base hold, naming it and what is allowed."""
    _check_ranges(job)
    check_method(job)
    if not 0 < job.peak_rate < 1:
        raise ConfigError("learning_rate", f"{job.learning_rate}", "above 0 and below 1")
    if job.alpha is not None and not (math.isfinite(job.alpha) and job.alpha > 0):
        raise ConfigError("alpha", f"{job.alpha}", "above 0")
    if job.task not in METRICS:
        raise ConfigError("task", repr(job.task), ", ".join(METRICS))
    if not job.data.strip():
        raise ConfigError("data", "is empty", "a file, for --task code also a folder or stdlib")
    if job.resume and job.overwrite:
        raise ConfigError("resume", "given together with overwrite", "one of them")
    _check_base_folder(job.base)
    _check_out(job)


def base_folder(job: Finetune) -> Path:
    """Where the base lies or will lie."""
    return base_path(Path.cwd()) if job.base is None else job.base


def check_base(job: Finetune, base: Path) -> Geometry:
    """What the base's config.json and the headers of its weights tell. Raises ConfigError."""
    geometry = read_geometry(read_json(base / "config.json", "base"), "base")
    if geometry.quantisation is not None:
        problem = f"its weights are quantised by {geometry.quantisation.method}"
        raise ConfigError("base", problem, "the plain weights that they were made of")
    sort_tensors(read_tensors(base, "model", "base"), geometry, "base")
    parse_layers(job.layers, geometry.num_layers)
    if job.seq_len > geometry.max_position:
        problem = f"{job.seq_len} tokens are more than the base was made for"
        raise ConfigError("seq_len", problem, f"16 to {geometry.max_position}")
    return geometry


def open_prompts(base: Path) -> Prompts:
    """With the tokenizer of a checkpoint's folder. Raises ConfigError if there is none."""
    from transformers import AutoTokenizer

    allowed = "a folder with tokenizer.json and tokenizer_config.json"
    if not (base / "tokenizer.json").is_file():
        raise ConfigError("base", f"{base} has no tokenizer.json", allowed)
    try:
        return Prompts(AutoTokenizer.from_pretrained(str(base), local_files_only=True))
    except Exception as error:  # noqa: BLE001 - tokenizers raises bare exceptions
        first = (str(error).strip() or repr(error)).splitlines()[0]
        raise ConfigError("base", f"the tokenizer of {base} cannot be used: {first}", allowed) from None


def parse_layers(text: str, num_layers: int) -> tuple[int, int]:
    """'all' or 'A-B' as the half-open range [A, B) of layers."""
    if text == "all":
        return 0, num_layers
    first, dash, last = text.partition("-")
    if len(text) < 32 and dash and first.isdecimal() and last.isdecimal() and int(first) < int(last) <= num_layers:
        return int(first), int(last)
    raise ConfigError("layers", repr(text), f"'all' or 'A-B' with 0 <= A < B <= {num_layers}, B not included")


def _check_ranges(job: Finetune) -> None:
    ranges: dict[str, tuple[int, float]] = {
        "rank": (1, 256),
        "epochs": (1, math.inf),
        "max_tokens_budget": (1, math.inf),
        "seq_len": (16, math.inf),
        "batch_samples": (1, math.inf),
        "seed": (-MAX_SEED, MAX_SEED),
        "threads": (0, 1024),
        "eval_samples": (0, math.inf),
    }
    for key, (least, most) in ranges.items():
        value = getattr(job, key)
        if not least <= value <= most:
            allowed = f"{least} or more" if most == math.inf else f"{least} to {most}"
            raise ConfigError(key, f"{value} is too {'small' if value < least else 'large'}", allowed)


def _check_base_folder(base: Path | None) -> None:
    if base is not None and not (base / "config.json").is_file():
        raise ConfigError("base", f"{base} holds no config.json", "a folder with a checkpoint in safetensors")
    if base is None and not (base_path(Path.cwd()) / MARKER).is_file():
        find_gguf()  # what the default base is made of


def _check_out(job: Finetune) -> None:
    if job.out.resolve() == base_folder(job).resolve():
        raise ConfigError("out", f"{job.out} is the base's own folder", "another folder")
    check_out_folder("out", job.out)
    for pattern in (METHODS[job.method].results, CHECKPOINT_FILE):
        found = next(job.out.glob(pattern), None)
        if found is not None and not (job.overwrite or job.resume):
            raise ConfigError("out", f"{job.out} already holds {found.name}", "--resume, --overwrite or another folder")
    checkpoint = job.out / CHECKPOINT_FILE
    if job.resume and not checkpoint.is_file():
        raise ConfigError("resume", f"no checkpoint at {checkpoint}", "the out folder of an interrupted run")
