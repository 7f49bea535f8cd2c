"""``kvkin profile``: measure what a receiver loses when it reuses a sender's KV, and which layers to recompute (DroidSpeak, section 4).

Two stages. *Search*, on a part of the cases: one forward of the sender, one of the receiver, and one pass from every start layer;
that gives the divergence of all groups and the sensitivity of all layers (O(L^2) layer passes a case, ``engines/lattice.py``).
*Answers*, on all cases: for the groups that may lie on the frontier the receiver answers, and the answers are scored. A divergence is an
average over every answer token's distribution, a score is one figure an answer, so answers need more cases than the search does.
Both stages append to a log under the state directory: Ctrl-C loses one case at most and the same command goes on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvkin.configs.families import ResolvedFamily
from kvkin.configs.loader import load_cluster
from kvkin.configs.profiles import Profile as ProfileFile
from kvkin.configs.profiles import profile_name, profiled_model, write_profile
from kvkin.kv.errors import ConfigError
from kvkin.tools.case_log import CaseLog
from kvkin.tools.eta import Eta, speaker
from kvkin.tools.model_pair import resolve_pair
from kvkin.tools.plots import check_plots
from kvkin.tools.profile_result import build_profile, divergences
from kvkin.tools.profile_search import Group, all_groups, grid, name, select

if TYPE_CHECKING:
    from kvkin.tools.model_pair import Pair
    from kvkin.tools.profile_measure import CaseWork
    from kvkin.tools.quality_cases import Case
    from kvkin.tools.scoring import EvaluationMetric

EXIT_INTERRUPTED = 130
TIMED_REPEATS = 3
ANSWERS_A_SEARCH = 4
RECORDED = "recorded"  # folder under the state directory


@dataclass(frozen=True)
class Profile:
    """Measure a pair of models: which layers must the receiver recompute so that its answers stay as good?"""

    sender: str
    """Model whose KV is reused."""

    receiver: str
    """Model that reuses it."""

    data: str = ""
    """SQuAD or HotpotQA JSON, LongBench, HumanEval or plain jsonl, a text file or folder, or 'stdlib' (see docs/operations.md)."""

    metric: str = "f1"
    """How answers are scored: f1, rouge_l, edit_similarity, exact_match, or loss (likelihood of the accepted answer)."""

    config: Path = Path("configs/clusters/local.yaml")
    """Cluster file that names the family."""

    samples: int = 50
    """Cases on which all groups are searched."""

    answer_samples: int = 0
    """Cases on which answers are scored, those of the search among them; 0: four times as many (or all that the data has)."""

    group_size: int = 2
    """Groups start and stop at every so many layers: 1 looks at all of them, 3 takes a ninth of the time."""

    max_loss: float = 0.05
    """Largest loss, as a share of the full prefill's mean score, at which a group is chosen."""

    split: Literal["train", "profile", "test", "all"] = "profile"
    """Part of the data: profile, train, test, or all (data on which nothing was trained)."""

    context_tokens: int = 0
    """Join paragraphs of other articles to contexts of up to so many tokens; 0: each example's own context."""

    exhaustive: bool = False
    """Generate answers for all groups, not only for those that may lie on the frontier."""

    refresh: bool = False
    """Measure on contexts that the cluster recorded (drift.record) in place of data: do answers agree with private ones?"""

    out: Path = Path("profiles")
    """Folder for the profile, its report and figures."""

    seed: int = 0
    """Seed of the bootstrap and of the distractors; the choice of cases does not depend on it."""

    threads: int = 0
    """CPU threads of torch; 0 leaves torch's own choice."""

    json: bool = False
    """Print the profile as JSON when it is done."""

    def run(self) -> int:
        """Measure, write the profile, its report and figures, print the frontier. Returns 0, or 130 after Ctrl-C."""
        self.check()
        say = speaker("profile")
        try:
            return self._run(say)
        except KeyboardInterrupt:
            say("stopped; what is measured is kept: the same command goes on from here")
            return EXIT_INTERRUPTED

    def _run(self, say: Callable[[str], None]) -> int:
        config = load_cluster(self.config)
        family = resolve_pair(config, self.sender, self.receiver)
        cases, metric, data = self._cases(family, config.state_path)
        searched = min(self.samples, len(cases))
        say(f"{data['name']}, split {data['split']}: {searched} cases to search, {len(cases)} to answer")
        starts, stops = grid(family.layout.num_layers, self.group_size)
        work_name = profile_name(self.sender, self.receiver).removesuffix(".json")
        log = CaseLog(config.state_path / "profiles" / f"{work_name}.jsonl", self._fingerprint(family, data, metric))
        if log.done:
            say(
                f"going on: {len(log.records('search'))} of {searched} cases are searched, "
                f"{len(log.records('answers'))} of {len(cases)} answered"
            )
        profile, extra = self._measure(family, cases, metric, data, log, starts, stops, say)
        path = self.out / profile_name(self.sender, self.receiver)
        write_profile(path, profile)
        from kvkin.tools.profile_report import summary, write_report

        files = write_report(path, profile, extra)
        print(json.dumps(json.loads(path.read_text()), indent=1) if self.json else summary(profile))
        say(f"wrote {path} and {', '.join(file.name for file in files)}")
        return 0

    def check(self) -> None:
        """ConfigError for a setting that cannot be used, naming it and what is allowed."""
        for key, value in (("samples", self.samples), ("group_size", self.group_size)):
            if value < 1:
                raise ConfigError(key, f"{value} is too small", "1 or more")
        if self.answer_samples and self.answer_samples < self.samples:
            raise ConfigError(
                "answer_samples", f"{self.answer_samples} is too small", f"{self.samples} (samples) or more"
            )
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError("out", f"{self.out} is no folder", "a folder, there or not")
        if not 0 <= self.max_loss < 1:
            raise ConfigError("max_loss", f"{self.max_loss}", "0 up to 1, such as 0.05")
        if self.context_tokens < 0 or self.threads < 0:
            raise ConfigError("context_tokens, threads", "negative", "0 or more")
        check_plots("the report has figures")  # before anything is measured
        if bool(self.data) == self.refresh:
            problem = "given together with refresh" if self.data else "missing"
            raise ConfigError("data", problem, "a data set, or --refresh for what the cluster recorded")

    def _cases(self, family: ResolvedFamily, state: Path) -> tuple[list[Case], EvaluationMetric, dict[str, str]]:
        """The cases, how they are scored, and what to call the data (``name``, ``digest``, ``split``)."""
        from transformers import AutoTokenizer

        from kvkin.tools.profile_measure import AGREEMENT
        from kvkin.tools.quality_cases import cases_digest, make_cases
        from kvkin.tools.quality_data import AnySplit, read_examples
        from kvkin.tools.scoring import metric_named

        metric = AGREEMENT if self.refresh else metric_named(self.metric)
        source = recorded(state, self.sender, self.receiver) if self.refresh else self.data
        if self.refresh and not Path(source).is_file():
            problem = f"the cluster has recorded nothing of this pair ({source})"
            raise ConfigError("refresh", problem, "a cluster that ran with drift.record: true, or --data")
        examples = read_examples(source)
        split: AnySplit = "all" if self.refresh else self.split
        tokenizer = AutoTokenizer.from_pretrained(family.model_tokenizer_path(self.receiver), local_files_only=True)
        tokenizer.chat_template = family.chat_template(self.receiver)
        cases = make_cases(
            examples.of_split(split),
            tokenizer,
            count=self.answer_samples or ANSWERS_A_SEARCH * self.samples,
            seed=self.seed,
            block_size=family.layout.block_size,
            context_tokens=self.context_tokens,
            metric=metric,
            max_tokens=family.model_max_context(self.receiver),
        )
        return cases, metric, {"name": examples.label, "digest": cases_digest(cases), "split": split}

    def _fingerprint(self, family: ResolvedFamily, data: Mapping[str, str], metric: EvaluationMetric) -> dict[str, Any]:
        """What decides the measured values: only records of the same are mixed."""
        return {
            "format": 1,
            "sender": family.models[self.sender].logits_digest.hex(),
            "receiver": family.models[self.receiver].logits_digest.hex(),
            "cases": data["digest"],
            "metric": metric.name,
            "group_size": self.group_size,
        }

    def _measure(
        self,
        family: ResolvedFamily,
        cases: Sequence[Case],
        metric: EvaluationMetric,
        data: Mapping[str, str],
        log: CaseLog,
        starts: Sequence[int],
        stops: Sequence[int],
        say: Callable[[str], None],
    ) -> tuple[ProfileFile, dict[str, Any]]:
        from kvkin.tools.model_pair import load_pair
        from kvkin.tools.profile_measure import CaseWork, NewestContext
        from kvkin.tools.quality_cases import by_context

        if self.threads:
            import torch

            torch.set_num_threads(self.threads)
        say(f"loading {self.sender} and {self.receiver}")
        pair: Pair = load_pair(family, self.sender, self.receiver)
        newest = NewestContext()
        works = {case.id: CaseWork(pair, case, metric, newest) for case in cases}
        began = time.monotonic()
        self._stage(
            "search",
            [works[case.id] for case in cases[: self.samples]],
            log,
            say,
            lambda work: work.search(starts, stops),
        )
        search = log.records("search")
        num_layers = family.layout.num_layers
        groups = select(divergences(search), num_layers, family.transition_layers)
        if self.exhaustive:
            groups = all_groups(starts, stops, num_layers)
        say(f"answers under {len(groups)} of {len(all_groups(starts, stops, num_layers))} groups")
        grouped = [works[case.id] for context in by_context(cases) for case in context]
        self._stage("answers", grouped, log, say, lambda work: work.answers(groups, search.get(work.case.id)), groups)
        say("timing the recompute of each group")
        middle = sorted(grouped, key=lambda work: len(work.case.context_ids))[len(works) // 2]
        seconds = middle.recompute_seconds(groups, TIMED_REPEATS)
        receiver = family.models[self.receiver]
        profile = build_profile(
            profiled_model(self.sender, family.models[self.sender].lineage),
            profiled_model(self.receiver, receiver.lineage, receiver.head_digest),
            search,
            log.records("answers"),
            seconds,
            metric=metric.name,
            data_name=data["name"],
            data_digest=data["digest"],
            split=data["split"],
            group_size=self.group_size,
            max_loss=self.max_loss,
            settings=self._settings(),
            versions=_versions(),
            seed=self.seed,
        )
        extra = {
            "sensitivities": [record["sensitivity"] for record in search.values()],
            "timed_tokens": len(middle.case.context_ids),
            "seconds": time.monotonic() - began,
            "metric": metric.title,
        }
        return profile, extra

    def _stage(
        self,
        stage: str,
        works: Sequence[CaseWork],
        log: CaseLog,
        say: Callable[[str], None],
        measure: Callable[[CaseWork], Mapping[str, Any]],
        groups: Sequence[Group] = (),
    ) -> None:
        """Measure the cases that the log lacks. A record of answers under other groups than these does not count."""
        wanted = {name(group) for group in groups}
        done = log.records(stage)
        left = [
            work for work in works if work.case.id not in done or wanted - set(done[work.case.id].get("scores", wanted))
        ]
        eta = Eta(stage, len(works), len(works) - len(left), say)
        for work in left:
            log.add(stage, work.case.id, measure(work))
            eta.step()

    def _settings(self) -> dict[str, str | int | float | bool | None]:
        kept = ("samples", "answer_samples", "context_tokens", "exhaustive", "refresh", "seed")
        return {key: value for key, value in asdict(self).items() if key in kept}


def recorded(state: Path, sender: str, receiver: str) -> Path:
    """Where the cluster records checked contexts of a pair."""
    return state / RECORDED / profile_name(sender, receiver).replace(".json", ".jsonl")


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"kvkin": version("kvkin"), "torch": version("torch"), "transformers": version("transformers")}
