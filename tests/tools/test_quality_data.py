"""Examples from every format: what is read, how files are told apart, what is refused and with which words, splits."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkin.kv.errors import ConfigError
from kvkin.tools.finetune_data import SPLITS, read_qa, read_text, split_of
from kvkin.tools.quality_data import KINDS, PLACES_PER_FILE, Example, ExampleSet, read_examples
from kvkin.tools.quality_formats import last_line, linked

Writer = Callable[[str, Any], Path]


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    """Writes text, bytes, lines (a list of objects, for names in jsonl) or one JSON value."""

    def write(name: str, content: Any) -> Path:
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        elif name.endswith("jsonl"):
            path.write_text("".join(f"{json.dumps(each)}\n" for each in content), encoding="utf-8")
        else:
            path.write_text(json.dumps(content, indent=1), encoding="utf-8")
        return path

    return write


def _squad(**change: Any) -> dict[str, Any]:
    question = {"id": "q1", "question": " Who? ", "answers": [{"text": "Ada"}, {"text": "Ada"}, {"text": "Ada Wren"}]}
    without = {"id": "q2", "question": "Why?", "answers": [], "is_impossible": True}
    paragraph = {"context": " Ada Wren wrote it. ", "qas": [question, without]}
    return {"version": "1.1", "data": [{"title": "Wren", "paragraphs": [paragraph]}], **change}


HOTPOT = [
    {
        "_id": f"h{number}",
        "question": "Which is older?",
        "answer": "yes",
        "supporting_facts": [[title, 0] for title in titles],
        "context": [["Ada", ["Ada is old.", " Very."]], ["Bob", ["Bob is young."]]],
        "type": "comparison",
    }
    for number, titles in enumerate((["Bob", "Ada"], ["Cid", "Bob"], ["Dan"], []))
]
LONGBENCH = [
    {"input": "Who?", "context": "A report.", "answers": ["Ada", "Bob"], "dataset": "qasper", "_id": "x", "length": 2},
    {"input": "When?", "context": "A report.", "answers": ["1815"], "dataset": "qasper", "_id": "y", "length": 2},
    {"input": "", "context": "Minutes.", "answers": ["They met."], "dataset": "qmsum", "_id": "x", "length": 1},
    {"input": "", "context": "a = 1\nb = 2\n", "answers": ["c = 3"], "dataset": "lcc_e", "_id": "x", "length": 1},
]
HUMANEVAL = [
    {
        "task_id": f"Test/{number}",
        "prompt": f'\n\ndef f_{number}(x):\n    """Doc.\n    """\n',
        "canonical_solution": f"\n    y = x + {number}\n    return y\n\n",
        "entry_point": f"f_{number}",
        "test": "def check(candidate): pass",
    }
    for number in range(3)
]
PLAIN = [
    {"prompt": "One line", "answer": "a"},
    {"prompt": "Several\nlines\n", "answers": ["b", "c"], "group": "g", "id": "named"},
    {"context": "Text.", "question": "Who?", "answer": "d"},
    {"context": "Text.", "question": "What?", "answers": ["e"], "unknown field": 1},
]
RECORDED = [{"token_ids": [5, 6, 7, 8], "suffix_start": 3}, {"token_ids": [5, 6], "suffix_start": 1, "at": "noon"}]


def test_squad(write: Writer) -> None:
    path = write("wren.json", _squad())
    found = read_examples(path)
    assert (found.label, found.kind) == ("wren.json", "squad")
    assert found.digest == hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    assert found.examples == (Example("q1", "Wren", "Ada Wren wrote it.", "Who?", ("Ada", "Ada Wren")),)


def test_squad_on_one_line_is_no_jsonl(write: Writer) -> None:
    pretty, single = write("a.json", _squad()), write("b.json", json.dumps(_squad()))
    assert read_examples(pretty).examples == read_examples(single).examples


def test_hotpotqa(write: Writer) -> None:
    found = read_examples(write("hotpot.json", HOTPOT))
    assert found.kind == "hotpotqa"
    assert [example.id for example in found.examples] == ["h0", "h1", "h2", "h3"]
    # questions that need one and the same article are one group, under whatever name the others come
    assert [example.group for example in found.examples[:3]] == ["Ada", "Ada", "Dan"]
    assert found.examples[3].group not in ("Ada", "Dan", "")
    assert found.examples[0] == Example(
        "h0", "Ada", "Ada: Ada is old. Very.\n\nBob: Bob is young.", "Which is older?", ("yes",)
    )


def test_longbench(write: Writer) -> None:
    found = read_examples(write("bench.jsonl", LONGBENCH))
    assert found.kind == "longbench"
    first, second, third, code = found.examples
    assert (first.id, first.question, first.answers) == ("qasper:x", "Who?", ("Ada", "Bob"))
    assert first.group == second.group != third.group  # one document, one group
    assert (third.question, third.form) == ("", "ask")
    assert (code.form, code.context, code.question, code.answers) == ("continue", "a = 1\n", "b = 2", ("c = 3",))


def test_humaneval_plain_and_gzipped(write: Writer) -> None:
    plain = write("human.jsonl", HUMANEVAL)
    packed = write("human.jsonl.gz", gzip.compress(plain.read_bytes()))
    found = read_examples(plain)
    assert found.kind == "humaneval"
    assert found.examples[1] == Example(
        "Test/1",
        "Test/1",
        '\n\ndef f_1(x):\n    """Doc.\n',
        '    """',
        ("    y = x + 1\n    return y",),
        "continue",
    )
    assert read_examples(packed).examples == found.examples
    assert read_examples(packed).digest == found.digest


def test_plain_jsonl(write: Writer) -> None:
    found = read_examples(write("plain.jsonl", PLAIN))
    assert found.kind == "jsonl"
    one, several, who, what = found.examples
    assert (one.context, one.question, one.answers, one.form) == ("One line", "", ("a",), "plain")
    assert several == Example("named", "g", "Several\n", "lines", ("b", "c"), "plain")
    assert (who.context, who.question, who.form) == ("Text.", "Who?", "ask")
    assert who.group == what.group
    assert len({example.id for example in found.examples}) == 4


def test_recorded(write: Writer) -> None:
    found = read_examples(write("recorded.jsonl", RECORDED))
    assert found.kind == "recorded"
    first, second = found.examples
    assert (first.token_ids, first.suffix_start, first.answers, first.form) == ((5, 6, 7, 8), 3, (), "recorded")
    assert first.id != second.id


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("modules")
    for number in range(20):
        folder = root / f"package_{number}" if number % 2 else root
        folder.mkdir(exist_ok=True)
        text = "\n".join(
            "" if line % 7 == 6 else f"value_{number}_{line} = {line * 7919}" for line in range(60 if number else 5)
        )
        (folder / f"module_{number}.py").write_text(text)
    return root


def test_text_continues_the_source(modules: Path) -> None:
    found = read_examples(modules)
    corpus = read_text(str(modules))
    assert (found.kind, found.label, found.digest) == ("text", corpus.label, corpus.digest)
    texts = {item.group: item.text for item in corpus.items}
    assert "module_0" not in {example.group for example in found.examples}  # shorter than what is shown of a text
    assert len(found.examples) == 19 * PLACES_PER_FILE
    for example in found.examples:
        (answer,) = example.answers
        text = texts[example.group]
        assert answer.count("\n") == 1
        assert example.question
        assert "\n" not in example.question
        shown = example.context + example.question
        # blank lines before the place and in the answer are left out
        assert text.startswith(shown)
        rest = [line for line in text.removeprefix(shown).split("\n") if line]
        assert answer == "\n".join(rest[:2])


def test_text_reads_the_same_twice_and_cuts_long_contexts(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"long_{number}.py").write_text("\n".join(f"x_{line} = '{'y' * 90}'" for line in range(600)))
    found = read_examples(tmp_path)
    assert found == read_examples(str(tmp_path))
    longest = max(len(example.context) for example in found.examples)
    assert 20_000 < longest <= 24_000
    assert all(example.context.startswith("x_") for example in found.examples)  # cut at a line


def test_one_text_file_and_the_standard_library(tmp_path: Path) -> None:
    path = tmp_path / "story.txt"
    path.write_text("\n".join(f"line {number}" for number in range(2000)))
    assert len({example.group for example in read_examples(path).examples}) == 20
    found = read_examples("stdlib")
    assert found.kind == "text"
    assert {"json", "asyncio", "textwrap"} <= {example.group for example in found.examples}
    assert all(found.of_split(split) for split in SPLITS)


def test_no_group_crosses_splits(modules: Path) -> None:
    found = read_examples(modules)
    groups = {split: {example.group for example in found.of_split(split)} for split in SPLITS}
    assert not groups["train"] & groups["test"]
    assert not (groups["train"] | groups["test"]) & groups["profile"]
    assert sum(len(found.of_split(split)) for split in SPLITS) == len(found.examples)
    assert found.of_split("all") == found.examples
    for split, names in groups.items():
        assert {split_of(name) for name in names} == {split}


@given(st.lists(st.text(min_size=1), min_size=1))
def test_splits_are_a_partition_by_group(names: list[str]) -> None:
    found = ExampleSet(
        "x", "0", "jsonl", tuple(Example(str(number), name, "c", "q", ("a",)) for number, name in enumerate(names))
    )
    seen: list[Example] = []
    for split in SPLITS:
        if any(split_of(name) == split for name in names):
            part = found.of_split(split)
            assert {split_of(example.group) for example in part} == {split}
            seen += part
        else:
            with pytest.raises(ConfigError, match=rf"^split: none of x's \d+ group\(s\) is in {split} \(allowed: all"):
                found.of_split(split)
    assert sorted(seen, key=lambda example: int(example.id)) == list(found.examples)


def test_unknown_split_and_kind(write: Writer) -> None:
    found = read_examples(write("a.json", _squad()))
    with pytest.raises(ConfigError, match=r"^split: no split 'dev' \(allowed: train, profile, test, all\)"):
        found.of_split("dev")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^kind: no kind 'csv' \(allowed: auto, squad"):
        read_examples(write("b.json", _squad()), kind="csv")  # type: ignore[arg-type]


def test_an_example_that_occurs_twice_is_taken_once(write: Writer) -> None:
    twice = read_examples(write("a.jsonl", [PLAIN[0], PLAIN[0], PLAIN[2]]))
    assert len(twice.examples) == 2
    same = [{**PLAIN[1]}, {**PLAIN[1], "answers": ["other"]}]
    with pytest.raises(ConfigError, match=r"^data: .*b\.jsonl:2: a second example with the id 'named'"):
        read_examples(write("b.jsonl", same))


# --- what is refused -----------------------------------------------------------------------------------------------------

BAD = [
    # name, content, words of the problem, words of what is allowed
    ("a.json", "", r"a\.json is empty", "SQuAD"),
    ("a.json", " \n\n", r"a\.json is empty", "recorded|token_ids"),
    ("a.jsonl", "hello\n", r"a\.jsonl:1: .*malformed", "task_id"),
    ("a.jsonl", "\n\n{]\n", r"a\.jsonl:3: .*malformed", "task_id"),
    ("a.jsonl", '{"prompt": 1\n', r"a\.jsonl:1: ", "task_id"),
    ("a.jsonl", b'{"prompt": "\xff", "answer": "x"}\n', r"a\.jsonl:1: .*(UTF-8|utf-8)", '"prompt"'),
    ("a.jsonl", [{"text": "x", "label": 1}], r"a\.jsonl:1 has the fields label, text", "SQuAD"),
    ("a.jsonl", [{}], r"a\.jsonl:1 has the fields \(none\)", "SQuAD"),
    ("a.json", {"rows": []}, r"a\.json:1 has the fields rows", "SQuAD"),
    ("a.json", "5\n", r"a\.json:1: Expected `object`", "SQuAD"),
    # one format each, once it is known
    ("a.json", _squad(data=[{"paragraphs": []}]), r"a\.json: .*missing required field `title`.*\$\.data\[0\]", "SQuAD"),
    ("a.json", _squad(data=[{"title": 5, "paragraphs": []}]), r"a\.json: Expected `str`, got `int`", "SQuAD"),
    ("a.json", _squad(data=[]), r"a\.json holds no example with an answer", "SQuAD"),
    ("a.json", '{"data": [{"title": "x"', r"a\.json:1: .*truncated", "SQuAD"),
    (
        "a.json",
        _squad(
            data=[
                {"title": "x", "paragraphs": [{"context": " ", "qas": [{"question": "", "answers": [{"text": "a"}]}]}]}
            ]
        ),
        r"a\.json: context is empty",
        "SQuAD",
    ),
    ("a.json", [], r"a\.json holds no example", "HotpotQA"),
    ("a.json", "[{", r"a\.json: .*truncated", "HotpotQA"),
    ("a.json", [{"question": "x"}], r"a\.json: .*missing required field `answer`.*\$\[0\]", "HotpotQA"),
    ("a.json", [{**HOTPOT[0], "context": [["t"]]}], r"a\.json: Expected `array` of length 2", "HotpotQA"),
    ("a.json", [{**HOTPOT[0], "answer": ""}], r"a\.json: no answer that is not empty", "HotpotQA"),
    ("a.json", [{**HOTPOT[0], "question": " "}], r"a\.json: question is empty", "HotpotQA"),
    ("a.json", [{**HOTPOT[0], "context": []}], r"a\.json: context is empty", "HotpotQA"),
    ("a.jsonl", [LONGBENCH[0], {**LONGBENCH[1], "answers": "1815"}], r"a\.jsonl:2: Expected `array`", "LongBench"),
    ("a.jsonl", [{**LONGBENCH[0], "answers": [" "]}], r"a\.jsonl:1: no answer that is not empty", "LongBench"),
    ("a.jsonl", [{**LONGBENCH[0], "context": ""}], r"a\.jsonl:1: context is empty", "LongBench"),
    ("a.jsonl", [HUMANEVAL[0], {"task_id": "x", "prompt": "y"}], r"a\.jsonl:2: .*`canonical_solution`", "HumanEval"),
    ("a.jsonl", [{**HUMANEVAL[0], "prompt": "\n"}], r"a\.jsonl:1: prompt is empty", "HumanEval"),
    ("a.jsonl", [PLAIN[0], PLAIN[1], {"prompt": "x"}], r"a\.jsonl:3: needs one of answer and answers", '"prompt"'),
    ("a.jsonl", [{**PLAIN[0], "answers": ["x"]}], r"a\.jsonl:1: needs one of answer and answers", '"prompt"'),
    ("a.jsonl", [{**PLAIN[0], "context": "x"}], r"a\.jsonl:1: has a prompt and a context", '"prompt"'),
    ("a.jsonl", [PLAIN[0], {"context": "x", "answer": "y"}], r"a\.jsonl:2: has no question", '"prompt"'),
    ("a.jsonl", [PLAIN[0], {"question": "x", "answer": "y"}], r"a\.jsonl:2: has no context", '"prompt"'),
    ("a.jsonl", [{**PLAIN[2], "question": ""}], r"a\.jsonl:1: question is empty", '"prompt"'),
    ("a.jsonl", [PLAIN[0], "x"], r"a\.jsonl:2: Expected `object`, got `str`", '"prompt"'),
    ("a.jsonl", [{"token_ids": [], "suffix_start": 0}], r"a\.jsonl:1: suffix_start is 0 of 0", "suffix_start"),
    ("a.jsonl", [{"token_ids": [1, 2], "suffix_start": 2}], r"a\.jsonl:1: suffix_start is 2 of 2", "suffix_start"),
    ("a.jsonl", [{"token_ids": [1, -2], "suffix_start": 1}], r"a\.jsonl:1: token id -2 is negative", "suffix_start"),
    ("a.jsonl", [{"token_ids": [1, "2"], "suffix_start": 1}], r"a\.jsonl:1: Expected `int`", "suffix_start"),
    ("a.jsonl", [{"token_ids": [1, 2]}], r"a\.jsonl:1: .*`suffix_start`", "suffix_start"),
    (
        "a.jsonl.gz",
        gzip.compress(b'{"prompt": "x", "answer": "y"}')[:-9],
        r"a\.jsonl\.gz is no whole gzip file",
        "whole",
    ),
    ("a.jsonl.gz", b"\x1f\x8bnonsense", r"a\.jsonl\.gz is no whole gzip file", "whole"),
]


@pytest.mark.parametrize(
    ("name", "content", "problem", "allowed"), BAD, ids=[str(number) for number in range(len(BAD))]
)
def test_a_bad_file_is_refused_with_its_place(
    write: Writer, name: str, content: Any, problem: str, allowed: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^data: .*{problem}") as caught:
        read_examples(write(name, content))
    assert any(words in caught.value.allowed for words in allowed.split("|"))


def test_a_missing_file_and_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data: cannot read .*none\.json: No such file"):
        read_examples(tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"^data: .*holds no text"):
        read_examples(tmp_path)
    (tmp_path / "short.txt").write_text("\n".join(f"line {number}" for number in range(1000)))
    assert read_examples(tmp_path / "short.txt").examples
    with pytest.raises(ConfigError, match=r"^data: .*leave the (train|test) split empty"):
        read_examples(tmp_path)


def test_a_named_kind_is_what_the_file_must_be(write: Writer) -> None:
    path = write("a.jsonl", HUMANEVAL)
    assert read_examples(path, kind="humaneval").kind == "humaneval"
    for kind in KINDS:
        if kind not in ("humaneval", "text"):
            with pytest.raises(ConfigError, match=r"^data: .*a\.jsonl"):
                read_examples(path, kind=kind)


def test_a_byte_order_mark_and_line_separators_inside_of_strings(write: Writer) -> None:
    line = json.dumps({"prompt": "a\u2028b\x85c", "answer": "x"}, ensure_ascii=False)
    found = read_examples(write("a.jsonl", b"\xef\xbb\xbf" + line.encode() + b"\r\n\r\n" + line.encode()))
    assert [example.context for example in found.examples] == ["a\u2028b\x85c"]


# --- round trips ---------------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)


@given(st.lists(st.tuples(TEXT, TEXT, st.lists(TEXT, min_size=1)), min_size=1, max_size=4))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, entries: list[tuple[str, str, list[str]]]
) -> None:
    """The same questions in every format that can hold them come back alike."""
    folder = tmp_path_factory.mktemp("trip")
    entries = list(
        {
            (context.strip(), question.strip()): (context, question, answers) for context, question, answers in entries
        }.values()
    )
    squad = [
        {
            "title": str(n),
            "paragraphs": [{"context": c, "qas": [{"question": q, "answers": [{"text": a} for a in aa]}]}],
        }
        for n, (c, q, aa) in enumerate(entries)
    ]
    plain = [{"context": c, "question": q, "answers": aa} for c, q, aa in entries]
    bench = [{"context": c, "input": q, "answers": aa} for c, q, aa in entries]
    (folder / "squad.json").write_text(json.dumps({"data": squad}))
    (folder / "plain.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in plain))
    (folder / "bench.jsonl").write_text(
        "".join(f"{json.dumps(each, ensure_ascii=False)}\n" for each in bench), encoding="utf-8"
    )
    expected = [(c.strip(), q.strip(), tuple(dict.fromkeys(aa))) for c, q, aa in entries]
    for name in ("squad.json", "plain.jsonl", "bench.jsonl"):
        found = read_examples(folder / name).examples
        assert [(example.context, example.question, example.answers) for example in found] == expected, name


@given(TEXT)
def test_last_line_parts_a_text_and_loses_only_its_end(text: str) -> None:
    context, question = last_line(text)
    assert context + question == text.rstrip("\n")
    assert context.strip()
    assert "\n" not in question


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=3), max_size=6))
def test_linked_names_are_those_reachable_over_shared_sets(sets: list[list[str]]) -> None:
    group_of = linked(sets)
    assert set(group_of) == {name for names in sets for name in names}
    for start in group_of:
        reached = {start}
        while new := {name for names in sets if reached & set(names) for name in names} - reached:
            reached |= new
        assert group_of[start] == min(reached)


def test_xquad_is_read_as_finetune_reads_it() -> None:
    folder = Path(os.environ.get("KVKIN_SHARED_DATA") or Path(__file__).parents[3] / "shared" / "data")
    path = folder / "xquad.en.json"
    if not path.is_file():
        pytest.skip(f"XQuAD is not at {path} (set KVKIN_SHARED_DATA to its folder)")
    found, corpus = read_examples(path), read_qa(path)
    assert (found.label, found.digest) == (corpus.label, corpus.digest)
    assert len(found.examples) == 1190
    for split in SPLITS:
        examples = found.of_split(split)
        assert {example.group for example in examples} == set(corpus.splits[split])
        asked = [
            (paragraph.context, question, answers)
            for paragraph in corpus.of(split)
            for question, answers in paragraph.questions
        ]
        assert [(example.context, example.question, example.answers) for example in examples] == asked
