"""``kvkin finetune``: train a fine-tune of a family's base, save it, reload it, and score it against the base.

Runs in its own process, on the CPU, in float32. Stages: check all that can be (``finetune_checks.py``),
read and split the data, train (``finetune_loop.py``), save what
was trained, load it again from disk, score base and fine-tune on the same held-out prompts (``finetune_probes.py``), write
the card (``finetune_card.py``). Two methods: a LoRA adapter (Hu et al., 2021, through peft; ``finetune_adapter.py``) or a
checkpoint with all parameters tuned (``finetune_full.py``). With ``layers`` limited to the upper ones either leaves the
lower layers bit-identical to the base, whose KV it then shares exactly.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from kvkin.kv.errors import ConfigError
from kvkin.tools import finetune_options as options
from kvkin.tools.finetune_card import Card, write_card
from kvkin.tools.finetune_checks import CHECKPOINT_FILE, check_base, check_settings, open_prompts
from kvkin.tools.finetune_data import Corpus, Probe, Prompts, Sample, epoch_samples, read_qa, read_text
from kvkin.tools.finetune_method import METHODS
from kvkin.tools.finetune_probes import METRICS, Scores, gain, probes, run_probes
from kvkin.tools.finetune_progress import Reporter
from kvkin.tools.smollm2 import prepare_base

if TYPE_CHECKING:
    from kvkin.tools.finetune_loop import Progress

EXIT_INTERRUPTED = 130  # what a shell shows after Ctrl-C
# Settings that do not change what is trained: a resumed run may choose them anew.
_FREE_ON_RESUME = {"base", "data", "out", "threads", "eval_samples", "resume", "overwrite", "data_note"}


@tyro.conf.configure(tyro.conf.OmitArgPrefixes)
@dataclass(frozen=True)
class FinetuneCommand:
    """Fine-tune a base on question answering (SQuAD format) or plain text, and score it before and after.

    --method lora trains small matrices beside the weights: megabytes on disk, little memory, many adapters of one base
    side by side. It is what a fleet of fine-tunes wants.

    --method full trains the weights themselves: a checkpoint as large as the base, and 16 bytes of memory for each trained
    parameter besides the activations. It is for a model that must move far from its base; less of its KV can be reused then.

    A cluster file names the result as "adapter:" or as "checkpoint:" of a member. With --layers A-B either leaves the layers
    below A as they are, and shares their KV exactly.

    Example: kvkin finetune --task qa --data train-v2.0.json --layers 15-30 --out models/my-qa
    """

    task: Annotated[options.TaskOptions, tyro.conf.arg(name="task")]
    output: Annotated[options.OutputOptions, tyro.conf.arg(name="output")]
    method: Annotated[options.MethodOptions, tyro.conf.arg(name="method")] = field(
        default_factory=options.MethodOptions
    )
    training: Annotated[options.TrainingOptions, tyro.conf.arg(name="training")] = field(
        default_factory=options.TrainingOptions
    )

    def run(self) -> int:
        """Do it. Returns the exit code; raises ConfigError."""
        groups = (self.task, self.output, self.method, self.training)
        return Finetune(**{name: value for group in groups for name, value in vars(group).items()}).run()


@dataclass(frozen=True, kw_only=True)
class Finetune(options.TaskOptions, options.MethodOptions, options.TrainingOptions, options.OutputOptions):
    """One run, with all options as its own fields."""

    def run(self) -> int:
        """Train, save, score, write the card. Returns the exit code: 0, or 130 after Ctrl-C with a checkpoint kept."""
        self.check()
        from kvkin.tools.finetune_loop import Interrupted, StopRequest

        reporter = Reporter()
        with StopRequest().listening() as stop:
            try:
                self._run(stop, reporter)
            except Interrupted:
                reporter.say(f"stopped; checkpoint kept. Continue with --resume (out: {self.out})")
                return EXIT_INTERRUPTED
        return 0

    def check(self) -> None:
        """ConfigError for a setting that cannot be used, naming it and what is allowed."""
        check_settings(self)

    @property
    def peak_rate(self) -> float:
        return METHODS[self.method].learning_rate if self.learning_rate is None else self.learning_rate

    def recipe(self) -> dict[str, object]:
        """The settings that decide what is trained, as JSON values: what the card states and a resumed run must share."""
        left_out = _FREE_ON_RESUME.union(METHODS[self.method].foreign)
        settings = asdict(self) | {"learning_rate": self.peak_rate}
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in settings.items()
            if key not in left_out
        }

    def _run(self, stop: Any, reporter: Reporter) -> None:
        import torch

        if self.threads:
            torch.set_num_threads(self.threads)
        corpus = read_qa(Path(self.data)) if self.task == "qa" else read_text(self.data)
        sizes = {name: len(groups) for name, groups in corpus.splits.items()}
        reporter.say(f"{corpus.label}: {len(corpus.items)} texts; groups per split: {sizes}")
        base = self.base if self.base is not None else prepare_base(Path.cwd())
        check_base(self, base)
        METHODS[self.method].check(self, base)
        fingerprint = self.recipe() | {"data_digest": corpus.digest}
        if self.resume:
            from kvkin.tools.finetune_loop import read_checkpoint

            read_checkpoint(self.out / CHECKPOINT_FILE, fingerprint, whole=False)
        prompts = open_prompts(base)
        samples = self._samples(corpus, prompts)
        held_out = self._held_out(corpus, prompts)
        self.out.mkdir(parents=True, exist_ok=True)
        progress = self._train(base, samples, fingerprint, stop, reporter)
        before, after, texts = self._score(base, prompts, held_out, stop, reporter)
        write_card(
            self.out,
            Card(
                settings=self.recipe(),
                base=base,
                base_name=self.base_name or base.name,
                data_note=self.data_note,
                corpus=corpus,
                progress=progress,
                metric=METRICS[self.task].name,
                probes=held_out,
                before=before,
                after=after,
                texts=texts,
                stored_type=METHODS[self.method].stored_type(base),
            ),
        )
        if held_out:
            reporter.say(f"{METRICS[self.task].name}: {before.of()} -> {after.of()}; gain {gain(before, after)}")
        (self.out / CHECKPOINT_FILE).unlink()
        reporter.say(f"done: {self.out}")

    def _samples(self, corpus: Corpus, prompts: Prompts) -> list[Sample]:
        """The whole run's samples, cut off where the token budget ends."""
        samples: list[Sample] = []
        tokens = 0
        for epoch in range(self.epochs):
            for sample in epoch_samples(corpus, prompts, epoch=epoch, seed=self.seed, seq_len=self.seq_len):
                tokens += len(sample.ids)
                if tokens > self.max_tokens_budget and samples:
                    return samples
                samples.append(sample)
            if not samples:
                break
        if not samples:
            raise ConfigError("seq_len", f"{self.seq_len} tokens leave no sample with a target", "more tokens")
        return samples

    def _held_out(self, corpus: Corpus, prompts: Prompts) -> list[Probe]:
        if not self.eval_samples:
            return []
        chosen = probes(corpus, prompts, count=self.eval_samples, seq_len=self.seq_len)
        if not chosen:
            problem = f"the test split of {corpus.label} has no text that is long enough to be asked about"
            raise ConfigError("eval_samples", problem, "0, or more data")
        return chosen

    def _train(
        self, base: Path, samples: list[Sample], fingerprint: dict[str, object], stop: Any, reporter: Reporter
    ) -> Progress:
        from kvkin.tools.finetune_loop import Trainer

        model = METHODS[self.method].open(self, base)
        trainer = Trainer(
            model,
            samples,
            batch_samples=self.batch_samples,
            learning_rate=self.peak_rate,
            checkpoint=self.out / CHECKPOINT_FILE,
            fingerprint=fingerprint,
        )
        if self.resume:
            trainer.restore()
        with reporter.training(samples, self.batch_samples, trainer.progress) as on_sample:
            progress = trainer.run(stop, on_sample)
        METHODS[self.method].save(self, model, base)
        return progress

    def _score(
        self, base: Path, prompts: Prompts, held_out: list[Probe], stop: Any, reporter: Reporter
    ) -> tuple[Scores, Scores, tuple[list[str], list[str]]]:
        """Scores of the base, and of the fine-tune as it lies on disk."""
        from kvkin.tools.finetune_adapter import load_base

        if not held_out:
            return Scores((), ()), Scores((), ()), ([], [])
        model = load_base(base)
        with reporter.scoring("base", len(held_out)) as on_prompt:
            before, old = run_probes(model, prompts, held_out, METRICS[self.task], _stoppable(on_prompt, stop))
        model = METHODS[self.method].load(self, model)
        with reporter.scoring("fine-tune", len(held_out)) as on_prompt:
            after, new = run_probes(model, prompts, held_out, METRICS[self.task], _stoppable(on_prompt, stop))
        return before, after, (old, new)


def _stoppable(on_prompt: Any, stop: Any) -> Any:
    """``on_prompt`` that ends the scoring when a stop was asked for; the finished training's checkpoint stays."""
    from kvkin.tools.finetune_loop import Interrupted

    def wrapped(count: int) -> None:
        on_prompt(count)
        if stop.requested:
            raise Interrupted

    return wrapped


@contextmanager
def _errors_as_exit() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        print(f"kvkin finetune: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def main() -> int:
    """``python -m kvkin.tools.finetune``: the same as ``kvkin finetune``."""
    with _errors_as_exit():
        return tyro.cli(FinetuneCommand, prog="kvkin finetune").run()


if __name__ == "__main__":
    sys.exit(main())
