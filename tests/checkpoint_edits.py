"""Changing tiny checkpoints on disk: what the lineage tests do to them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvkin.configs.checkpoints import ModelIdentity, read_model
from kvkin.kv.lineage import Lineage

Tensors = dict[str, torch.Tensor]


def copy(source: Path, target: Path) -> Path:
    """A copy of a checkpoint folder."""
    shutil.copytree(source, target)
    return target


def edit_weights(folder: Path, change: Callable[[Tensors], object], file: str = "model.safetensors") -> Path:
    """Apply ``change`` to the tensors of a checkpoint, in place."""
    tensors = load_file(str(folder / file))
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(folder / file), {"format": "pt"})
    return folder


def nudge(folder: Path, name: str) -> Path:
    """Change one tensor of a checkpoint a little, in every element."""

    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name] + 0.05

    return edit_weights(folder, change)


def edit_json(folder: Path, name: str = "config.json", /, **values: Any) -> Path:
    """Set keys of a JSON file; ``...`` deletes one."""
    data = json.loads((folder / name).read_text(encoding="utf-8"))
    data |= values
    data = {key: value for key, value in data.items() if value is not ...}
    (folder / name).write_text(json.dumps(data), encoding="utf-8")
    return folder


def shard(folder: Path, num_shards: int) -> Path:
    """Split model.safetensors into shards with an index, in place."""
    tensors = load_file(str(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    names = [f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]
    weight_map = {name: names[index % num_shards] for index, name in enumerate(sorted(tensors, reverse=True))}
    for file in names:
        part = {name: tensors[name] for name, where in weight_map.items() if where == file}
        save_file(part, str(folder / file), {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def identity(folder: Path, adapter: Path | None = None, **options: Any) -> ModelIdentity:
    """The identity of a checkpoint, computed in float32 without a cache."""
    options.setdefault("compute_dtype", "float32")
    return read_model("m", str(folder), None if adapter is None else str(adapter), **options)


def lineage(folder: Path, adapter: Path | None = None, **options: Any) -> Lineage:
    return identity(folder, adapter, **options).lineage


def load_model(folder: Path) -> Any:
    """The checkpoint as plain transformers runs it, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()


def kv_of(model: Any, token_ids: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of every layer as plain transformers computes them."""
    from transformers import DynamicCache

    cache = DynamicCache()  # without the config, so that a sliding window drops nothing
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model runs slower on several, above all on a busy machine
    try:
        with torch.no_grad():
            model.model(torch.tensor([token_ids]), past_key_values=cache, use_cache=True)
    finally:
        torch.set_num_threads(threads)
    return [(layer.keys, layer.values) for layer in cache.layers]


@contextmanager
def nudged(model: Any, name: str) -> Iterator[None]:
    """The loaded ``model`` with the tensor that its checkpoint calls ``name`` changed as :func:`nudge` does it."""
    rows = parameter_rows(model, name)
    kept = rows.detach().clone()
    with torch.no_grad():
        rows += 0.05
        yield
        rows.copy_(kept)


def parameter_rows(model: Any, name: str) -> torch.Tensor:
    """The parameter, or the part of a fused one, that a checkpoint calls ``name``."""
    parameters = dict(model.named_parameters())
    if ".block_sparse_moe." not in name:
        return parameters[name].data
    prefix, _, rest = name.partition(".block_sparse_moe.")
    if not rest.startswith("experts."):
        return parameters[f"{prefix}.mlp.{rest}"].data
    _, expert, part, _ = rest.split(".")
    if part == "w2":
        return parameters[f"{prefix}.mlp.experts.down_proj"].data[int(expert)]
    fused = parameters[f"{prefix}.mlp.experts.gate_up_proj"].data[int(expert)]
    width = fused.shape[0] // 2
    return fused[:width] if part == "w1" else fused[width:]
