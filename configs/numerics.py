"""Numerics classes: when do equal weights give equal KV?

A class is "<weights>/<compute>/<KV>", e.g. "bfloat16/float32/float32"; weights that the engine quantises as it loads them are
"<weights>+<method>", and a checkpoint's that are quantised "<method>@<digest of its settings>". It is part of every lineage. Neither engine nor device are in it: the same weights in the same types give the
same KV up to rounding on all of them (float32: well below 1e-4 of the scale), as they do in other batches of one engine. So nodes of
both engines exchange KV. Called by ``configs.checkpoints`` and ``configs.families``.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from kvkin.kv.errors import ConfigError
from kvkin.kv.layout import DTYPE_BYTES

# Classes that give the same KV from the same weights: class -> the one that stands for it in a lineage. float32 holds every
# bfloat16 and float16 number, so such weights are widened without loss before anything is computed; tensor digests tell
# apart weights that are not the same. No other two classes round alike.
COMPATIBLE = {
    "bfloat16/float32/float32": "float32/float32/float32",
    "float16/float32/float32": "float32/float32/float32",
}


def numerics_class(weights: str, compute: str, kv: str, quantization: str | None = None) -> str:
    """The class of a model whose weights, activations and KV have these types; ``quantization`` is the method that is applied to
    the weights when they are loaded. Weights that are stored quantised have a type of their own (``Quantisation.weights``)."""
    for dtype in (compute, kv):
        assert dtype in DTYPE_BYTES, dtype
    assert weights in DTYPE_BYTES or "@" in weights, weights
    return f"{weights}{f'+{quantization}' if quantization else ''}/{compute}/{kv}"


def lineage_class(numerics: str) -> bytes:
    """What of a class enters a lineage: equal for compatible classes."""
    return COMPATIBLE.get(numerics, numerics).encode()


def resolve_device(device: str) -> str:
    """``auto`` becomes cuda where there is a device and a torch built for it, else cpu. Imports no torch."""
    if device != "auto":
        return device
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return "cpu"
    has_device = Path("/dev/nvidia0").exists() or Path("/dev/dxg").exists()
    return "cuda" if has_device and _torch_has_cuda() else "cpu"


def _torch_has_cuda() -> bool:
    """Whether the installed torch is a CUDA build: its version file says so without loading gigabytes of libraries."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return False
    version = Path(spec.submodule_search_locations[0]) / "version.py"
    try:
        text = version.read_text(encoding="utf-8")
    except OSError:
        return False
    lines = [line.split("=")[-1].strip() for line in text.splitlines() if line.startswith("cuda")]
    return any(value not in ("None", "") for value in lines)


def resolve_compute_dtype(compute_dtype: str, device: str, key: str) -> str:
    """``auto`` becomes float32 on cpu and bfloat16 on cuda."""
    if compute_dtype == "auto":
        return "bfloat16" if device == "cuda" else "float32"
    if compute_dtype not in DTYPE_BYTES:
        raise ConfigError(key, f"no such type: {compute_dtype!r}", ", ".join(("auto", *DTYPE_BYTES)))
    return compute_dtype
