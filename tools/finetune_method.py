"""The two methods of ``kvkin finetune``: which settings are theirs, how a base is opened for training, saved and loaded.

``METHODS`` is asked by ``finetune.py``, which is the same for both otherwise. Torch is imported on first use only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from kvkin.kv.errors import ConfigError

if TYPE_CHECKING:
    from kvkin.tools.finetune import Finetune


class Method(Protocol):
    """What differs between the methods."""

    results: ClassVar[str]
    """Glob of the weights that a finished run leaves in its folder."""
    learning_rate: ClassVar[float]
    """Peak learning rate where none is given."""
    foreign: ClassVar[tuple[str, ...]]
    """Settings that mean nothing here."""

    def check(self, job: Finetune, base: Path) -> None:
        """ConfigError for settings that do not fit this base. Loads no weights."""

    def open(self, job: Finetune, base: Path) -> Any:
        """The base in float32, with gradients for what is to be trained. Raises ConfigError."""

    def save(self, job: Finetune, model: Any, base: Path) -> None:
        """Write what was trained into ``job.out``."""

    def load(self, job: Finetune, base_model: Any) -> Any:
        """The fine-tune as it lies in ``job.out``, in float32 and eval mode; ``base_model`` is fresh and may be used up."""

    def stored_type(self, base: Path) -> str:
        """The type in which the trained weights are stored."""


class Lora:
    """Small matrices beside the weights."""

    results: ClassVar[str] = "adapter_model.safetensors"
    learning_rate: ClassVar[float] = 5e-4
    foreign: ClassVar[tuple[str, ...]] = ("train_embeddings",)

    def check(self, job: Finetune, base: Path) -> None:
        from kvkin.tools.finetune_adapter import check_targets

        check_targets(base, job.targets)

    def open(self, job: Finetune, base: Path) -> Any:
        from kvkin.tools.finetune_adapter import add_adapter

        alpha = 2 * job.rank if job.alpha is None else job.alpha
        return add_adapter(base, rank=job.rank, alpha=alpha, targets=job.targets, layers=job.layers, seed=job.seed)

    def save(self, job: Finetune, model: Any, base: Path) -> None:
        from kvkin.tools.finetune_adapter import save_adapter

        save_adapter(model, job.out, base_name=job.base_name or base.name)

    def load(self, job: Finetune, base_model: Any) -> Any:
        from kvkin.tools.finetune_adapter import load_adapter

        return load_adapter(base_model, job.out)

    def stored_type(self, base: Path) -> str:
        return "bfloat16"


class Full:
    """The weights themselves."""

    results: ClassVar[str] = "model*.safetensors"
    # far below the adapter's: every weight moves, by about this much a step
    learning_rate: ClassVar[float] = 1e-4
    foreign: ClassVar[tuple[str, ...]] = ("rank", "alpha", "targets")

    def check(self, job: Finetune, base: Path) -> None:
        pass  # all of its settings fit every base

    def open(self, job: Finetune, base: Path) -> Any:
        from kvkin.tools.finetune_full import open_base

        return open_base(base, layers=job.layers, train_embeddings=job.train_embeddings)

    def save(self, job: Finetune, model: Any, base: Path) -> None:
        from kvkin.tools.finetune_full import save_checkpoint

        save_checkpoint(model, base, job.out)

    def load(self, job: Finetune, base_model: Any) -> Any:
        from kvkin.tools.finetune_full import load_checkpoint

        return load_checkpoint(job.out)

    def stored_type(self, base: Path) -> str:
        from kvkin.tools.finetune_full import stored_type

        return stored_type(base)


METHODS: Mapping[str, Method] = {"lora": Lora(), "full": Full()}


def check_method(job: Finetune) -> None:
    """ConfigError for a method that there is not, for settings of the other one, and for a folder with its results."""
    if job.method not in METHODS:
        raise ConfigError("method", repr(job.method), ", ".join(METHODS))
    for field in fields(job):
        default = None if field.default is MISSING else field.default
        if field.name in METHODS[job.method].foreign and getattr(job, field.name) != default:
            others = [name for name, method in METHODS.items() if field.name not in method.foreign]
            raise ConfigError(field.name, f"given together with method {job.method}", f"method {', '.join(others)}")
    if job.train_embeddings and job.layers != "all":
        raise ConfigError("train_embeddings", f"given together with layers {job.layers}", "layers all")
    for name, method in METHODS.items():
        # one beside the other would leave open which of them counts
        if name != job.method and any(job.out.glob(method.results)):
            raise ConfigError("out", f"{job.out} holds a result of method {name}", "another folder")
