"""The options of ``kvkin finetune``, in the groups in which ``--help`` shows them. ``finetune.Finetune`` has all of them as its fields."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """What is learned, from what, and by which model."""

    task: Literal["qa", "code"]
    """What is learned: extractive question answering, or the continuation of plain text such as source code."""

    data: str
    """qa: a SQuAD-format JSON file. code: a folder or file of text, or 'stdlib' for this Python's own sources."""

    base: Path | None = None
    """Folder of the base model (safetensors with tokenizer); default: SmolLM2-135M-Instruct, converted on first use."""


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """What of the model is trained."""

    method: Literal["lora", "full"] = "lora"
    """A LoRA adapter, or a checkpoint in which all parameters of the layers are tuned."""

    layers: str = "all"
    """Layers that are trained, half-open: '15-30' is layer 15 up to and without 30; full: 'all' has the final norm too."""

    rank: int = 16
    """lora: rank of the matrices (1 to 256)."""

    alpha: float | None = None
    """lora: scale times rank; default: twice the rank."""

    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """lora: names of the linear modules that get matrices."""

    train_embeddings: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """full: train embeddings and output head as well; the result shares no KV with its base then."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How long and how fast it is trained, and on how much it is scored."""

    learning_rate: float | None = None
    """Peak learning rate of AdamW, after a linear warm-up and before a cosine decay to a tenth; default: 5e-4 for lora,
    1e-4 for full."""

    epochs: int = 3
    """Passes over the training split, unless max_tokens_budget ends the run before."""

    max_tokens_budget: int = 200_000
    """Tokens to read in training at most, over all epochs."""

    seq_len: int = 1024
    """Tokens of a training sequence at most."""

    batch_samples: int = 4
    """Sequences per optimizer step."""

    seed: int = 0
    """Seed of an adapter's start values and of the order of the samples; the split does not depend on it."""

    threads: int = 0
    """CPU threads of torch; 0 leaves torch's own choice."""

    eval_samples: int = 160
    """Held-out prompts on which base and fine-tune are scored; 0 scores nothing."""


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Where the result goes, and what its card says."""

    out: Path
    """Folder for the adapter or the checkpoint, and its card; while a run is unfinished it holds the checkpoint too."""

    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Continue the interrupted run in out, from its checkpoint."""

    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace the result or the unfinished run that out already holds."""

    base_name: str = ""
    """Name of the base in the card and in the adapter's config; default: the base folder's own name."""

    data_note: str = ""
    """Origin and licence of the data, quoted in the card."""
