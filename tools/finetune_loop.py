"""The training loop of ``kvkin finetune``: steps over a fixed list of samples, resumable to the very step.

Called by ``finetune.py`` in its own process. A checkpoint holds the trained weights, optimizer, schedule, torch's random
state and the number of finished steps; since the samples are a function of data and seed, that is all a run needs to go
on as if it had never stopped. An interrupted step is thrown away and done again.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from peft import PeftModel

from kvkin.kv.errors import ConfigError
from kvkin.tools.finetune_data import IGNORED, Sample

CHECKPOINT_EVERY_S = 120.0
_BEFORE_THERE_WAS_A_CHOICE = {"method": "lora"}  # what a checkpoint means that does not say it
WARMUP_SHARE = 0.06  # of all steps, rising linearly; then a cosine down to a tenth


@dataclass
class Progress:
    """Where a run stands: finished steps, tokens read, seconds spent (over all its resumptions), loss of each step."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)

    def curve(self, points: int = 60) -> list[dict[str, float]]:
        """The loss curve in at most ``points`` means of consecutive steps: ``{"step", "loss"}``."""
        width = max(1, math.ceil(len(self.losses) / points))
        chunks = (self.losses[start : start + width] for start in range(0, len(self.losses), width))
        return [
            {"step": min((index + 1) * width, len(self.losses)), "loss": round(math.fsum(chunk) / len(chunk), 4)}
            for index, chunk in enumerate(chunks)
        ]


class Interrupted(Exception):
    """The run was asked to stop; its checkpoint is on disk."""


class StopRequest:
    """Set by the first Ctrl-C or SIGTERM; the loop asks ``requested`` between samples."""

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Turn SIGINT and SIGTERM into a request; a second Ctrl-C stops at once, as usual."""

        def on_signal(signum: int, frame: FrameType | None) -> None:
            if self.requested:
                raise KeyboardInterrupt
            self.requested = True

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def save_atomically(path: Path, payload: Mapping[str, Any]) -> None:
    """Write ``payload`` with torch.save so that ``path`` is always a whole file, the old or the new one."""
    temporary = path.with_name(path.name + ".part")
    torch.save(dict(payload), temporary)
    os.replace(temporary, path)


def read_checkpoint(path: Path, fingerprint: Mapping[str, Any], *, whole: bool = True) -> dict[str, Any]:
    """What a checkpoint holds; unless ``whole``, its tensors are not read, only looked at. ConfigError names the setting in
    which it is of another run."""
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, mmap=not whole)
        made_with = _BEFORE_THERE_WAS_A_CHOICE | state["fingerprint"]
    except FileNotFoundError:
        raise ConfigError("resume", f"no checkpoint at {path}", "the out folder of an interrupted run") from None
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, KeyError, TypeError) as error:
        problem = f"{path} is no checkpoint of a run, or damaged ({type(error).__name__})"
        raise ConfigError("resume", problem, "--overwrite to begin anew") from None
    for key, now in fingerprint.items():
        then = made_with.get(key)
        if then != now:
            raise ConfigError("resume", f"the checkpoint was made with {key}={then!r}, not {now!r}", f"{then!r}")
    return state


class Trainer:
    """Training of those parameters of ``model`` that have gradients; ``fingerprint`` says which run a checkpoint is of."""

    def __init__(
        self,
        model: Any,
        samples: Sequence[Sample],
        *,
        batch_samples: int,
        learning_rate: float,
        checkpoint: Path,
        fingerprint: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.batches = [samples[start : start + batch_samples] for start in range(0, len(samples), batch_samples)]
        self.checkpoint = checkpoint
        self.fingerprint = dict(fingerprint)
        self.clock = clock
        self.progress = Progress()
        self.trained: dict[str, torch.nn.Parameter] = {
            name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=learning_rate, weight_decay=0.0)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)

    def _rate(self, step: int) -> float:
        warmup = max(1, round(WARMUP_SHARE * len(self.batches)))
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, len(self.batches) - warmup)
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    def run(self, stop: StopRequest, on_sample: Callable[[Sample, Progress], None]) -> Progress:
        """Train from where the progress stands to the end; raises ``Interrupted`` once the checkpoint is written."""
        self.model.train()
        saved = self.clock()
        while self.progress.step < len(self.batches):
            rng = torch.get_rng_state()
            started = self.clock()
            loss = self._accumulate(self.batches[self.progress.step], stop, on_sample)
            if loss is None:
                torch.set_rng_state(rng)
                self.save()
                raise Interrupted
            torch.nn.utils.clip_grad_norm_(self.trained.values(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.progress.losses.append(loss)
            self.progress.tokens += sum(len(sample.ids) for sample in self.batches[self.progress.step])
            self.progress.seconds += self.clock() - started
            self.progress.step += 1
            if self.clock() - saved > CHECKPOINT_EVERY_S:
                self.save()
                saved = self.clock()
        self.save()
        return self.progress

    def _accumulate(
        self, batch: Sequence[Sample], stop: StopRequest, on_sample: Callable[[Sample, Progress], None]
    ) -> float | None:
        """Gradients of one step (mean over all its target tokens) and its loss; None if a stop was asked for."""
        self.optimizer.zero_grad()
        targets = sum(sample.num_targets for sample in batch)
        total = 0.0
        for sample in batch:
            if stop.requested:
                return None
            loss = sample_loss(self.model, sample) / targets
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves Tensor.backward unannotated
            total += loss.item()
            on_sample(sample, self.progress)
        return None if stop.requested else total

    def save(self) -> None:
        """Write the checkpoint; see the module's docstring for what it holds."""
        state = {
            "fingerprint": self.fingerprint,
            "trained": {name: parameter.detach() for name, parameter in self.trained.items()},
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "torch_rng": torch.get_rng_state(),
            "progress": vars(self.progress),
        }
        save_atomically(self.checkpoint, state)

    def restore(self) -> None:
        """Continue from the checkpoint on disk; ConfigError names the setting in which it differs from this run."""
        state = read_checkpoint(self.checkpoint, self.fingerprint)
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(state["trained"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["torch_rng"])
        self.progress = Progress(**state["progress"])


def sample_loss(model: Any, sample: Sample) -> torch.Tensor:
    """Summed cross entropy of one sample's target tokens, a scalar float32.

    Only the hidden states that predict a target go through the output head: with a vocabulary of 49,152 it costs a
    fifth of a small model's work, and most tokens of a question's context are no targets.
    """
    causal = model.get_base_model() if isinstance(model, PeftModel) else model
    out = causal.model(input_ids=torch.tensor([sample.ids]), use_cache=False)
    hidden = out.last_hidden_state[0]  # (tokens, hidden)
    labels = torch.tensor(sample.labels)[1:]
    rows = (labels != IGNORED).nonzero()[:, 0]
    logits = causal.get_output_embeddings()(hidden[:-1][rows])  # (targets, vocab)
    return torch.nn.functional.cross_entropy(logits.float(), labels[rows], reduction="sum")
