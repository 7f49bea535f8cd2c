"""A checkpoint with a LoRA adapter merged into it, written once and kept: for engines that load folders.

vLLM's LoRA on CPUs gathers both matrices for every token and runs uncompiled; the merged weights run as any other model's. They are
written in the type that the engine computes in, so that they are the very numbers that the reference engine has in memory
(``engines/loading.py``): rounded to the checkpoint's type they would be another model. Called by nodes before they load anything.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from kvkin.engines.loading import pick_dtype
from kvkin.kv.errors import ConfigError

# Written last: a folder without it is not whole.
MARKER = "merged.ok"
# Files of the checkpoint that hold weights: the merged ones take their place.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def merged_checkpoint(checkpoint: Path, adapter: Path, folder: Path, compute_dtype: str) -> Path:
    """``folder``, holding ``checkpoint`` with ``adapter`` merged in, in ``compute_dtype``; written if it is not there yet.

    ``folder``'s name must stand for exactly these weights: what is there is not looked at again. Several processes may ask at once;
    all of them get the same files. Raises ConfigError if it cannot be written.
    """
    if (folder / MARKER).is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise _unwritable(folder, error) from None
    try:
        _write(checkpoint, adapter, draft, compute_dtype)
        _publish(draft, folder)
    except OSError as error:
        raise _unwritable(folder, error) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _write(checkpoint: Path, adapter: Path, draft: Path, compute_dtype: str) -> None:
    from peft import PeftModel

    dtype = pick_dtype(compute_dtype, torch.device("cpu"))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, local_files_only=True)
    merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    merged.save_pretrained(draft)
    for file in checkpoint.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHTS) and not (draft / file.name).exists():
            shutil.copyfile(file, draft / file.name)
    (draft / MARKER).touch()


def _publish(draft: Path, folder: Path) -> None:
    """Put the whole folder in its place at once, unless another process was first."""
    draft.chmod(0o755)  # a temporary folder is for its owner only
    try:
        os.rename(draft, folder)
    except OSError:
        if not (folder / MARKER).is_file():
            raise


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    problem = f"the merged checkpoint {folder} cannot be written: {error.strerror}"
    return ConfigError("state_dir", problem, "a folder with room for a copy of the weights")
