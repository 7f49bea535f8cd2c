"""Data of kvkin finetune: splits by article or module, prompts, what is learned, and which prompts are held out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tiny_tokenizer

from kvkin.kv.errors import ConfigError
from kvkin.tools.finetune_data import (
    CONTINUE,
    IGNORED,
    Corpus,
    Paragraph,
    Prompts,
    Sample,
    Source,
    ask,
    epoch_samples,
    read_qa,
    read_text,
    split_of,
)
from kvkin.tools.finetune_probes import probes, probes_digest


def _tokenizer(path: Path, **options: Any) -> Prompts:
    from transformers import AutoTokenizer

    return Prompts(AutoTokenizer.from_pretrained(str(make_tiny_tokenizer(path, **options))))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    return _tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def towns() -> Corpus:
    """Thirty articles whose every paragraph and question carries the article's own mark, [number]."""
    items = [
        Paragraph(
            f"Town {town}",
            f"[{town}] " + f"Town number {town} has bridges. " * 4,
            tuple((f"[{town}] Question {number}?", (f"answer {number}",)) for number in range(8)),
        )
        for town in range(30)
        for _ in range(2)
    ]
    groups = sorted({item.group for item in items})
    return Corpus(
        "towns", "0", tuple(items), {name: tuple(g for g in groups if split_of(g) == name) for name in _SPLITS}
    )


_SPLITS = ("train", "profile", "test")


def _learned(sample: Sample, prompts: Prompts) -> str:
    text: str = prompts.tokenizer.decode([label for label in sample.labels if label != IGNORED])
    return text


def _text(sample: Sample, prompts: Prompts) -> str:
    text: str = prompts.tokenizer.decode(list(sample.ids))
    return text


def _marks(corpus: Corpus, split: Any) -> set[str]:
    return {f"[{item.group.removeprefix('Town ')}]" for item in corpus.of(split)}


def test_split_depends_on_the_name_alone_and_is_stable() -> None:
    names = [f"article {number}" for number in range(2000)]
    shares = {part: sum(split_of(name) == part for name in names) / len(names) for part in _SPLITS}
    assert shares["train"] == pytest.approx(0.70, abs=0.04)
    assert shares["profile"] == pytest.approx(0.10, abs=0.03)
    # Committed cards list their splits: a changed rule would let tested articles be trained on.
    assert [split_of(name) for name in ("Oxygen", "Force", "Normans", "json", "ast")] == [
        "test",
        "train",
        "train",
        "train",
        "profile",
    ]


def test_articles_are_trained_on_or_tested_never_both(towns: Corpus, prompts: Prompts) -> None:
    groups = {part: set(towns.splits[part]) for part in _SPLITS}
    assert not groups["train"] & groups["test"]
    assert not (groups["train"] | groups["test"]) & groups["profile"]
    trained = "".join(
        _text(sample, prompts)
        for epoch in range(3)
        for sample in epoch_samples(towns, prompts, epoch=epoch, seed=epoch, seq_len=2000)
    )
    asked = "".join(probe.prompt for probe in probes(towns, prompts, count=200, seq_len=2000))
    assert all(mark in trained for mark in _marks(towns, "train"))
    assert not any(mark in trained for mark in _marks(towns, "test") | _marks(towns, "profile"))
    assert not any(mark in asked for mark in _marks(towns, "train") | _marks(towns, "profile"))


def test_only_answers_are_learned(towns: Corpus, prompts: Prompts) -> None:
    samples = list(epoch_samples(towns, prompts, epoch=0, seed=0, seq_len=4000))
    chats = [sample for sample in samples if "<|im_start|>" in _text(sample, prompts)]
    assert 0 < len(chats) < len(samples)
    for sample in samples:
        lines = _learned(sample, prompts).replace("<|im_end|>", "").strip().split("\n")
        assert all(line.strip().startswith("answer ") for line in lines)
        assert 1 <= len(lines) <= 10
        assert sample.num_targets <= sum(label != IGNORED for label in sample.labels)


def test_samples_join_paragraphs_of_several_articles(towns: Corpus, prompts: Prompts) -> None:
    contexts = [
        _text(sample, prompts).split("Question:")[0]
        for sample in epoch_samples(towns, prompts, epoch=0, seed=0, seq_len=2000)
    ]
    sizes = [context.count("[") for context in contexts]
    assert min(sizes) == 1
    assert max(sizes) >= 3
    assert sum(sizes) == len(towns.of("train"))  # every paragraph exactly once an epoch


def test_samples_depend_on_epoch_and_seed_alone(towns: Corpus, prompts: Prompts) -> None:
    def draw(epoch: int, seed: int) -> list[Sample]:
        return list(epoch_samples(towns, prompts, epoch=epoch, seed=seed, seq_len=500))

    assert draw(0, 1) == draw(0, 1)
    assert draw(0, 1) != draw(1, 1)
    assert draw(0, 1) != draw(0, 2)
    assert max(len(sample.ids) for sample in draw(0, 1)) <= 500


def test_chat_pieces_spell_the_whole_conversation(prompts: Prompts) -> None:
    turns = [(ask("Who?", "A context."), "the king"), (ask("When?"), "1066")]
    pieces = prompts.chat_pieces(turns)
    messages = [
        {"role": role, "content": text}
        for user, assistant in turns
        for role, text in (("user", user), ("assistant", assistant))
    ]
    whole = prompts.chat(messages, answer_next=False)
    assert "".join(text for text, _ in pieces) == whole
    sample = prompts.join(pieces, 10_000)
    assert list(sample.ids) == prompts.encode(whole)  # cut into pieces, the text still becomes the same tokens
    assert _learned(sample, prompts) == "the king<|im_end|>\n1066<|im_end|>\n"


def test_a_chat_template_that_rewrites_history_is_refused(tmp_path: Path) -> None:
    forgetful = "{{ messages[-1]['content'] }}"
    with pytest.raises(ConfigError, match=r"^base: its chat template rewrites earlier turns"):
        _tokenizer(tmp_path, chat_template=forgetful).chat_pieces([("a", "b"), ("c", "d")])


def test_without_a_chat_template_everything_is_raw(towns: Corpus, tmp_path: Path) -> None:
    plain = _tokenizer(tmp_path, chat_template=None)
    assert {probe.kind for probe in probes(towns, plain, count=40, seq_len=1000)} == {"raw", "joined"}
    for sample in epoch_samples(towns, plain, epoch=0, seed=0, seq_len=1000):
        assert _text(sample, plain).startswith("Context: ")


def test_qa_probes_mix_kinds_and_end_where_the_answer_begins(towns: Corpus, prompts: Prompts) -> None:
    chosen = probes(towns, prompts, count=40, seq_len=2000)
    assert chosen == probes(towns, prompts, count=40, seq_len=2000)
    assert chosen[:8] == probes(towns, prompts, count=8, seq_len=2000)
    kinds = [probe.kind for probe in chosen]
    assert (kinds.count("raw"), kinds.count("joined"), kinds.count("chat")) == (20, 10, 10)
    for probe in chosen:
        mark = f"[{probe.group.removeprefix('Town ')}]"
        assert probe.prompt.count(f"Question: {mark}") == 1
        assert probe.prompt.endswith("<|im_start|>assistant\n" if probe.kind == "chat" else "\nAnswer:")
        assert mark in probe.prompt.split("Question:")[0]
    assert max(probe.prompt.count("Town number") for probe in chosen if probe.kind == "joined") >= 8
    assert probes_digest(chosen) != probes_digest(chosen[:-1])


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    root = tmp_path_factory.mktemp("modules")
    for number in range(14):
        folder = root / f"package_{number}" if number % 2 else root
        folder.mkdir(exist_ok=True)
        text = "\n".join(f"value_{number}_{line} = {line * 7919}" for line in range(60))
        (folder / f"module_{number}.py").write_text(text)
    (root / "picture.bin").write_bytes(b"\x00")
    return read_text(str(root))


def test_text_splits_by_top_level_module(modules: Corpus, prompts: Prompts) -> None:
    assert {item.group for item in modules.items} == {
        f"package_{number}" if number % 2 else f"module_{number}" for number in range(14)
    }
    trained = "".join(
        _text(sample, prompts) for sample in epoch_samples(modules, prompts, epoch=0, seed=0, seq_len=400)
    )
    numbers = {part: {group.split("_")[1] for group in modules.splits[part]} for part in ("train", "test")}
    assert all(f"value_{number}_" in trained for number in numbers["train"])
    assert not any(f"value_{number}_" in trained for number in numbers["test"])


def test_chats_about_text_continue_it_a_few_lines_a_turn(modules: Corpus, prompts: Prompts) -> None:
    samples = list(epoch_samples(modules, prompts, epoch=0, seed=0, seq_len=500))
    chats = [text for text in (_text(sample, prompts) for sample in samples) if "<|im_start|>" in text]
    assert 0 < len(chats) < len(samples)
    whole = "".join(item.text for item in modules.items if isinstance(item, Source))
    for chat in chats:
        spoken = chat.replace("<|im_end|>\n<|im_start|>assistant\n", "").replace(f"\n\n{CONTINUE}", "\n")
        spoken = spoken.replace("<|im_end|>\n<|im_start|>user", "").removeprefix("<|im_start|>user\n")
        spoken = spoken.split("<|im_")[0]  # the end of the last turn, where the sample was not cut before it
        assert spoken.split(f"\n\n{CONTINUE[:8]}")[0] in whole  # the turns together are the source
    for sample in samples:
        assert CONTINUE not in _learned(sample, prompts)
        assert "<|im_start|>" not in _learned(sample, prompts)


def test_text_probes_continue_the_source(modules: Corpus, prompts: Prompts) -> None:
    texts = {item.group: item.text for item in modules.items if isinstance(item, Source)}
    chosen = probes(modules, prompts, count=24, seq_len=600)
    assert len(chosen) == 24
    assert {probe.kind for probe in chosen} == {"raw", "chat"}
    assert {probe.group for probe in chosen} == set(modules.splits["test"])
    for probe in chosen:
        (answer,) = probe.answers
        assert answer.count("\n") == 1
        before = probe.prompt
        if probe.kind == "chat":
            before = before.partition("user\n")[2].partition(f"\n\n{CONTINUE}")[0]
        assert not before.endswith("\n")
        assert f"{before}\n{answer}" in texts[probe.group]
        assert len(prompts.encode(before)) <= 300


def test_one_file_is_split_by_blocks(tmp_path: Path) -> None:
    path = tmp_path / "story.txt"
    path.write_text("\n".join(f"line {number}" for number in range(2000)))
    corpus = read_text(str(path))
    assert len(corpus.items) == 20
    assert all(corpus.splits[part] for part in ("train", "test"))


def test_standard_library_without_tests_and_generated_files() -> None:
    corpus = read_text("stdlib")
    names = {item.name for item in corpus.items if isinstance(item, Source)}
    assert {"json/decoder.py", "textwrap.py", "asyncio/queues.py"} <= names
    assert not any(part in ("test", "tests", "site-packages") for name in names for part in name.split("/"))
    assert "encodings/cp1252.py" not in names
    assert all(len(groups) >= 10 for groups in corpus.splits.values())


def test_too_little_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "only.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match=r"^data: .*1 group\(s\) leave the (train|test) split empty.*more data"):
        read_text(str(tmp_path))
    (tmp_path / "only.py").rename(tmp_path / "only.bin")
    with pytest.raises(ConfigError, match=r"^data: .*holds no text.*\.py"):
        read_text(str(tmp_path))
    (tmp_path / "empty.json").write_text(json.dumps({"data": []}))
    with pytest.raises(ConfigError, match=r"^data: empty\.json: 0 group"):
        read_qa(tmp_path / "empty.json")


def test_xquad_reads() -> None:
    folder = Path(os.environ.get("KVKIN_SHARED_DATA") or Path(__file__).parents[3] / "shared" / "data")
    path = folder / "xquad.en.json"
    if not path.is_file():
        pytest.skip(f"XQuAD is not at {path} (set KVKIN_SHARED_DATA to its folder)")
    corpus = read_qa(path)
    assert len(corpus.items) == 240
    assert {part: len(groups) for part, groups in corpus.splits.items()} == {"train": 32, "profile": 5, "test": 11}
