"""``kvkin evaluate``: on a pair of models, what each way to reuse KV costs in quality and saves in time, on the same cases.

Compared are full prefill, full reuse, CacheBlend at several ratios, DroidSpeak at the frontier of a profile or at groups that are
named, and the sender by itself (``evaluate_arms.py``). Runs in its own process with both models loaded. The cases of
a finished context are appended to ``cases.jsonl`` in the output folder, so that Ctrl-C loses one context at most and ``--resume``
goes on.
"""

from __future__ import annotations

import datetime
import itertools
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console

from kvkin.configs.families import ResolvedFamily
from kvkin.configs.loader import load_cluster
from kvkin.configs.profiles import layer_group, pairs_of, profile_name, read_profile, stale_reason
from kvkin.kv.errors import ConfigError
from kvkin.kv.plan import LayerGroup
from kvkin.tools.case_log import CaseLog
from kvkin.tools.eta import Eta, speaker
from kvkin.tools.model_pair import resolve_pair

if TYPE_CHECKING:
    from kvkin.tools.evaluate_arms import Arm
    from kvkin.tools.quality_cases import Case
    from kvkin.tools.quality_data import ExampleSet
    from kvkin.tools.scoring import EvaluationMetric

EXIT_INTERRUPTED = 130
CASES_FILE, RESULT_FILE, REPORT_FILE, FIGURE_STEM = "cases.jsonl", "evaluation.json", "evaluation.md", "quality_latency"
FORMAT = 2
STAGE = "arms"


@dataclass(frozen=True)
class Evaluate:
    """Compare full prefill, full reuse, CacheBlend, DroidSpeak and the sender alone on one data set, paired."""

    sender: str
    """Model whose KV is reused."""

    receiver: str
    """Model that reuses it and answers."""

    data: str
    """SQuAD or HotpotQA JSON, LongBench, HumanEval or plain jsonl, a text file or folder, or 'stdlib' (this Python's sources)."""

    metric: str = "f1"
    """How answers are scored: f1, exact_match, rouge_l, edit_similarity, or loss (likelihood of the accepted answer)."""

    config: Path = Path("configs/clusters/local.yaml")
    """Cluster file that names the family."""

    count: int = 250
    """Cases to compare on."""

    split: Literal["train", "profile", "test", "all"] = "test"
    """Part of the data: test, profile, train, or all (data that no model of the pair was trained on)."""

    context_tokens: int = 0
    """Set each example's paragraph among paragraphs of others, up to so many tokens; 0: its own context alone."""

    max_new_tokens: int = 0
    """Tokens of an answer at most; 0: the metric's own number."""

    chat: bool = True
    """Ask through the chat template, where the family has one."""

    blend_ratios: tuple[float, ...] = (0.05, 0.1, 0.16, 0.3)
    """CacheBlend: shares of the context's tokens that are recomputed. May be empty."""

    check_layer: int = 1
    """CacheBlend: the layer at which the tokens are chosen by the deviation of their values."""

    profile: Path | None = None
    """DroidSpeak: a profile of this pair; every point of its frontier is measured."""

    groups: tuple[str, ...] = ()
    """DroidSpeak: further groups of recomputed layers, half-open: 10-20 is layer 10 up to and without 20."""

    seed: int = 0
    """Chooses the cases, and seeds the bootstrap."""

    threads: int = 0
    """CPU threads of torch, the same in every arm; 0 leaves torch's own choice."""

    out: Path | None = None
    """Folder for cases, result, report and figure; default: evaluations/SENDER-RECEIVER."""

    plot: bool = True
    """Draw quality over latency (needs matplotlib)."""

    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Go on with the interrupted run in out."""

    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace the cases that out already holds."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the result as JSON instead of tables."""

    def run(self) -> int:
        """Compare and write everything. Returns 0, or 130 after Ctrl-C."""
        self.check()
        from kvkin.tools.evaluate_arms import make_arms, parse_groups
        from kvkin.tools.quality_cases import cases_digest
        from kvkin.tools.quality_data import read_examples
        from kvkin.tools.scoring import metric_named

        metric = metric_named(self.metric)
        groups = parse_groups(self.groups)
        config = load_cluster(self.config)
        family = resolve_pair(config, self.sender, self.receiver)
        arms = make_arms(
            self.blend_ratios,
            [*groups, *self._profiled(family)],
            num_layers=family.layout.num_layers,
            check_layer=self.check_layer,
        )
        examples = read_examples(self.data)
        cases = self._cases(family, examples, metric)
        data = {
            "name": examples.label,
            "kind": examples.kind,
            "digest": examples.digest,
            "split": self.split,
            "cases_digest": cases_digest(cases),
        }
        self._set_threads()
        log = self._open(self._fingerprint(family, arms, metric, data))
        say = speaker("evaluate")
        try:
            self._measure(family, cases, arms, metric, log, say)
        except KeyboardInterrupt:
            done = len(log.records(STAGE))
            say(f"stopped after {done} of {len(cases)} cases, which are kept: --resume goes on (out: {self.folder})")
            return EXIT_INTERRUPTED
        self._report({case.id: log.done[STAGE, case.id] for case in cases}, arms, family, metric, data, say)
        return 0

    @property
    def folder(self) -> Path:
        name = profile_name(self.sender, self.receiver).removesuffix(".json")
        return Path("evaluations") / name if self.out is None else self.out

    def check(self) -> None:
        """ConfigError for a setting that cannot be used, naming it and what is allowed."""
        at_least = {"count": 1, "context_tokens": 0, "max_new_tokens": 0, "threads": 0}
        for key, least in at_least.items():
            if getattr(self, key) < least:
                raise ConfigError(key, f"{getattr(self, key)} is too small", f"{least} or more")
        if self.resume and self.overwrite:
            raise ConfigError("resume", "given together with overwrite", "one of them")
        if self.plot:
            from kvkin.tools.plots import check_plots

            check_plots("--no-plot goes without")

    def _profiled(self, family: ResolvedFamily) -> list[LayerGroup]:
        """Groups of the profile's frontier. Raises ConfigError for a profile that is not one of this pair as it is now."""
        if self.profile is None:
            return []
        profile = read_profile(self.profile)
        if (self.sender, self.receiver) not in pairs_of(profile, family.models):
            problem = stale_reason(profile, family.models) or f"is of {profile.sender.name} and {profile.receiver.name}"
            raise ConfigError("profile", f"{self.profile}: {problem}", f"one of {self.sender} and {self.receiver}")
        return [group for point in profile.frontier if (group := layer_group(point.group)) is not None]

    def _cases(self, family: ResolvedFamily, examples: ExampleSet, metric: EvaluationMetric) -> list[Case]:
        from transformers import AutoTokenizer

        from kvkin.tools.quality_cases import make_cases

        if examples.kind == "recorded":
            raise ConfigError("data", "recorded prompts have no accepted answers", "data with answers")
        tokenizer = AutoTokenizer.from_pretrained(family.model_tokenizer_path(self.receiver), local_files_only=True)
        tokenizer.chat_template = family.chat_template(self.receiver)
        return make_cases(
            examples.of_split(self.split),
            tokenizer,
            count=self.count,
            seed=self.seed,
            block_size=family.layout.block_size,
            context_tokens=self.context_tokens,
            chat=self.chat,
            metric=metric,
            max_tokens=min(family.model_max_context(name) for name in (self.sender, self.receiver)),
            max_new_tokens=self.max_new_tokens or None,
        )

    def _set_threads(self) -> None:
        if self.threads:
            import torch

            torch.set_num_threads(self.threads)

    def _fingerprint(
        self, family: ResolvedFamily, arms: Sequence[Arm], metric: EvaluationMetric, data: Mapping[str, str]
    ) -> dict[str, Any]:
        """What decides the records: only those of the same are mixed."""
        import torch

        return {
            "format": FORMAT,
            "sender": family.models[self.sender].logits_digest.hex(),
            "receiver": family.models[self.receiver].logits_digest.hex(),
            "device": family.device,
            "dtype": family.compute_dtype,
            "threads": torch.get_num_threads(),
            "cases": data["cases_digest"],
            "metric": metric.name,
            "arms": [arm.name for arm in arms],
            "check_layer": self.check_layer,
        }

    def _open(self, fingerprint: Mapping[str, Any]) -> CaseLog:
        """The log of cases in ``folder``. Raises ConfigError where it holds another run's, or this one's unasked."""
        path = self.folder / CASES_FILE
        if path.exists() and not self.overwrite:
            if not self.resume:
                raise ConfigError("out", f"{path} is there already", "--resume, --overwrite or another folder")
            before = _fingerprint_in(path)
            changed = [key for key, value in fingerprint.items() if before.get(key) != value]
            if changed:
                problem = f"the run in {self.folder} had another {', '.join(changed)}"
                raise ConfigError("resume", problem, "the same settings, --overwrite or another folder")
        if self.resume and not path.exists():
            raise ConfigError("resume", f"no run in {self.folder}", "the out folder of an interrupted run")
        if self.overwrite:
            path.unlink(missing_ok=True)
        return CaseLog(path, fingerprint)

    def _measure(
        self,
        family: ResolvedFamily,
        cases: Sequence[Case],
        arms: Sequence[Arm],
        metric: EvaluationMetric,
        log: CaseLog,
        say: Callable[[str], None],
    ) -> None:
        """Measure the cases that the log lacks, those of one context together."""
        from kvkin.tools.quality_cases import by_context

        contexts = by_context(cases)
        left = [
            (turn, missing)
            for turn, context in enumerate(contexts)
            if (missing := [case for case in context if (STAGE, case.id) not in log.done])
        ]
        if not left:
            return
        from kvkin.tools.evaluate_arms import measure_context
        from kvkin.tools.model_pair import load_pair

        num_left = sum(len(missing) for _, missing in left)
        if num_left < len(cases):
            say(f"going on: {len(cases) - num_left} of {len(cases)} cases are measured")
        pair = load_pair(family, self.sender, self.receiver)
        # the first run of everything is slower: it allocates and fills caches
        shortest = min((case for _, missing in left for case in missing), key=lambda case: case.num_tokens)
        measure_context(pair, [shortest], arms, metric, turn=0)
        eta = Eta(f"{len(arms)} arms", len(cases), len(cases) - num_left, say)
        for turn, missing in left:
            found = measure_context(pair, missing, arms, metric, turn=turn)
            for case, record in zip(missing, found, strict=True):
                log.add(STAGE, case.id, record)
                eta.step()

    def _report(
        self,
        records: Mapping[str, Mapping[str, Any]],
        arms: Sequence[Arm],
        family: ResolvedFamily,
        metric: EvaluationMetric,
        data: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        from kvkin.tools.evaluate_report import draw, markdown, show
        from kvkin.tools.evaluate_result import summarize

        head = {
            "format": FORMAT,
            "sender": self.sender,
            "receiver": self.receiver,
            "family": family.name,
            "num_layers": family.layout.num_layers,
            "data": dict(data),
            "metric": {"name": metric.name, "title": metric.title},
            "command": self.command(data["name"]),
            "made": _made(family),
        }
        result = summarize(records, arms, seed=self.seed, head=head)
        files = draw(result, self.folder / FIGURE_STEM) if self.plot else []
        (self.folder / RESULT_FILE).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        text = markdown(result, files[0].name if files else None)
        (self.folder / REPORT_FILE).write_text(text, encoding="utf-8")
        if self.json:
            print(json.dumps(result))
        else:
            show(Console(width=None if sys.stdout.isatty() else 160), result)
        say(
            f"wrote {', '.join([CASES_FILE, RESULT_FILE, REPORT_FILE, *(file.name for file in files)])} in {self.folder}"
        )

    def command(self, data: str) -> str:
        """The command that measures this again, without paths of this machine; ``data`` is the data's name."""
        words = ["kvkin", "evaluate", "--sender", self.sender, "--receiver", self.receiver, "--data", data]
        for key in ("metric", "count", "split", "context_tokens", "max_new_tokens", "check_layer", "seed", "threads"):
            value = getattr(self, key)
            if value != type(self).__dataclass_fields__[key].default or key in ("metric", "count", "split"):
                words += [f"--{key.replace('_', '-')}", str(value)]
        words += [] if self.chat else ["--no-chat"]
        words += ["--blend-ratios", *(f"{ratio:g}" for ratio in self.blend_ratios)]
        words += ["--profile", self.profile.name] if self.profile is not None else []
        words += ["--groups", *itertools.chain.from_iterable(map(str.split, self.groups))] if self.groups else []
        return shlex.join(words)


def _fingerprint_in(path: Path) -> Mapping[str, Any]:
    """The fingerprint that a file of cases begins with; empty if it has none."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            found = json.loads(file.readline())
        fingerprint = found["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return fingerprint if isinstance(fingerprint, dict) else {}


def _made(family: ResolvedFamily) -> dict[str, Any]:
    from importlib.metadata import version

    import torch

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": family.device,
        "dtype": family.compute_dtype,
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("kvkin", "torch", "transformers")},
    }
