"""A fully tuned checkpoint's life for ``kvkin finetune --method full``: opened for training, saved as a folder, loaded again.

The folder is what a cluster file names as ``checkpoint:`` of a member. Every tensor is written in the type that it has in
the base (bfloat16 for most), so that what was frozen is the base's own bit for bit: lineages below the first trained layer
are equal, and KV is shared there exactly. All other files are copies of the base's. Called by ``finetune.py``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvkin.tools.finetune_adapter import load_base
from kvkin.tools.finetune_checks import parse_layers

# What of the base's folder a member needs besides weights: how it is shaped, how text becomes tokens, where answers end.
_COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "config.json",  # last: a folder without it was not finished
)


def open_base(base: Path, *, layers: str, train_embeddings: bool) -> Any:
    """The base in float32 in which only what is to be trained has gradients.

    ``layers`` 'A-B': all parameters of these layers and nothing else. 'all': all layers and the final norm, with
    ``train_embeddings`` the embeddings and the output head too. Raises ConfigError for layers that do not exist.
    """
    model = load_base(base)
    first, last = parse_layers(layers, model.config.num_hidden_layers)
    model.requires_grad_(False)
    if layers == "all":
        # the head is outside of the decoder, unless it is tied to the embeddings
        model.model.requires_grad_(True)
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            module.requires_grad_(train_embeddings)
    else:
        model.model.layers[first:last].requires_grad_(True)
    return model


def save_checkpoint(model: Any, base: Path, out: Path) -> None:
    """Write ``model`` (float32) as a checkpoint folder: safetensors in the base's types, then the base's other files."""
    types, common = _tensor_types(base)
    # transformers knows by which names an architecture's tensors go on disk, and what is tied and therefore left out
    staging = Path(tempfile.mkdtemp(prefix=".weights.", dir=out))
    try:
        model.save_pretrained(str(staging))
        for file in sorted(staging.glob("*.safetensors")):
            tensors = {name: each.to(types.get(name, common)) for name, each in load_file(str(file)).items()}
            save_file(tensors, str(file), metadata={"format": "pt"})
            file.chmod(0o644)  # safetensors makes it private
        for file in sorted(staging.glob("*.safetensors*")):  # with the index of a model in several files
            os.replace(file, out / file.name)
    finally:
        shutil.rmtree(staging)
    for name in _COPIED:
        if (base / name).is_file():
            shutil.copyfile(base / name, out / name)


def load_checkpoint(out: Path) -> Any:
    """The checkpoint that lies in ``out``, its values computed in float32."""
    return load_base(out)


def stored_type(base: Path) -> str:
    """The type that most of the base's bytes have, and so most of a checkpoint's that was made from it."""
    return str(_tensor_types(base)[1]).removeprefix("torch.")


def _tensor_types(base: Path) -> tuple[dict[str, torch.dtype], torch.dtype]:
    """The type of each tensor on disk, and the one that most bytes have."""
    types: dict[str, torch.dtype] = {}
    num_bytes: Counter[torch.dtype] = Counter()
    for file in sorted(base.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping: it has keys() and is not iterable
                tensor = tensors.get_tensor(name)
                types[name] = tensor.dtype
                num_bytes[tensor.dtype] += tensor.nbytes
    return types, max(num_bytes, key=lambda dtype: (num_bytes[dtype], str(dtype)))
