"""Cases: prompts in the forms that were trained on, cut at a block; which examples are chosen; distractors; what is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_tiny_tokenizer

from kvkin.kv.errors import ConfigError
from kvkin.tools.finetune_data import CONTINUE, Prompts, ask
from kvkin.tools.quality_cases import Case, by_context, cases_digest, make_cases
from kvkin.tools.quality_data import Example, Kind, read_examples
from kvkin.tools.scoring import METRICS

BLOCK = 16
# a template that strips what it is given, as many do
TRIMMING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _tokenizer(path: Path, **options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(make_tiny_tokenizer(path, **options)))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        "chat": _tokenizer(root / "chat"),
        "raw": _tokenizer(root / "raw", chat_template=None),
        "trimming": _tokenizer(root / "trimming", chat_template=TRIMMING),
    }


@pytest.fixture(scope="module")
def tokenizer(tokenizers: dict[str, Any]) -> Any:
    return tokenizers["chat"]


@pytest.fixture(scope="module")
def towns() -> list[Example]:
    """Twelve towns of unequal numbers of questions; a paragraph carries its town's mark, [number]."""
    return [
        Example(
            f"{town}.{number}",
            f"Town {town}",
            f"[{town}] Paragraph {number // 2} of town {town}. " + "It has bridges and the river. " * (1 + town % 3),
            f"Question {number} of {town}?",
            (f"answer {number}", "another"),
        )
        for town in range(12)
        for number in range(2 + 3 * (town % 4))
    ]


def _make(examples: Any, tokenizer: Any, **change: Any) -> list[Case]:
    arguments: dict[str, Any] = {"count": 1000, "block_size": BLOCK, "metric": "f1", **change}
    return make_cases(examples, tokenizer, **arguments)


def _text(tokenizer: Any, case: Case) -> str:
    text: str = tokenizer.decode([*case.context_ids, *case.suffix_ids])
    return text


WORDS = st.text(st.sampled_from("the an in on er a b\n  ?!.é<|>"), min_size=1, max_size=120).filter(str.strip)


@settings(max_examples=150)
@given(
    template=st.sampled_from(["chat", "raw", "trimming"]),
    form=st.sampled_from(["ask", "continue", "plain"]),
    context=WORDS,
    question=WORDS | st.just(""),
    block_size=st.integers(1, 32),
)
def test_the_boundary_changes_no_token(
    tokenizers: dict[str, Any], template: str, form: Any, context: str, question: str, block_size: int
) -> None:
    """Context ids + suffix ids are what the tokenizer makes of the prompt; the context is whole blocks and another question
    about it begins with the very same ids."""
    tokenizer = tokenizers[template]
    example = Example("x", "x", context, question, ("a",), form)
    try:
        (case,) = _make([example], tokenizer, block_size=block_size)
    except ConfigError:
        assert len(tokenizer(context).input_ids) < 2 * block_size + 8  # no block lies wholly in so short a context
        return
    prompts = Prompts(tokenizer)
    if form == "ask":
        text = ask(question, context)
    else:
        text = context + question + (f"\n\n{CONTINUE}" if form == "continue" and template != "raw" else "")
    prompt = text if template == "raw" else prompts.chat([{"role": "user", "content": text}], answer_next=True)
    assert [*case.context_ids, *case.suffix_ids] == prompts.encode(prompt)
    assert len(case.context_ids) % block_size == 0
    assert case.context_ids
    assert case.suffix_ids
    (other,) = _make([replace(example, question="zzz?")], tokenizer, block_size=block_size)
    assert other.context_ids[: len(case.context_ids)] == case.context_ids or len(other.context_ids) < len(
        case.context_ids
    )
    shared = min(len(case.context_ids), len(other.context_ids))
    assert case.context_ids[:shared] == other.context_ids[:shared]


def test_chat_is_used_where_there_is_a_template(towns: list[Example], tokenizers: dict[str, Any]) -> None:
    (chat,) = _make(towns[:1], tokenizers["chat"])
    (asked_raw,) = _make(towns[:1], tokenizers["chat"], chat=False)
    (raw,) = _make(towns[:1], tokenizers["raw"])
    text = ask(towns[0].question, towns[0].context)
    assert _text(tokenizers["chat"], chat) == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert _text(tokenizers["raw"], raw) == text
    assert asked_raw == raw
    # what a likelihood is taken of: the answer as it follows the prompt
    decode = tokenizers["raw"].decode
    assert (decode(chat.answer_ids), decode(raw.answer_ids)) == ("answer 0", " answer 0")


def test_forms_and_answers(tokenizers: dict[str, Any]) -> None:
    answer = "    y = 1\n\n    return y\n    # end"
    code = Example("c", "c", "def f():\n" * 9, "    # the body", (answer,), "continue")
    (chat,) = _make([code], tokenizers["chat"], metric="edit_similarity")
    (raw,) = _make([code], tokenizers["raw"], metric="edit_similarity")
    (whole,) = _make([code], tokenizers["raw"], metric="loss")
    assert f"# the body\n\n{CONTINUE}<|im_end|>" in _text(tokenizers["chat"], chat)
    assert _text(tokenizers["raw"], raw).endswith("    # the body")
    assert chat.answers == ("    y = 1\n    return y",)  # as a generated text is cut
    assert (chat.num_lines, whole.num_lines) == (2, 0)
    assert whole.answers == (answer,)
    decode = tokenizers["raw"].decode
    assert decode(chat.answer_ids) == "    y = 1\n    return y"
    assert decode(raw.answer_ids) == "\n    y = 1\n    return y"
    assert decode(whole.answer_ids) == f"\n{answer}"
    plain = Example("p", "p", "A long enough text. " * 3, "Go on:", (" yes",), "plain")
    (case,) = _make([plain], tokenizers["raw"])
    assert decode(case.answer_ids) == " yes"


def test_an_answer_of_several_lines_counts_as_a_whole(tokenizer: Any) -> None:
    one = Example("1", "1", "A long enough text. " * 3, "What?", ("a", "b"))
    several = Example("2", "2", "A long enough text. " * 3, "What?", ("a", "b\n\nc"))
    assert _make([one], tokenizer)[0].num_lines == 1
    assert _make([several], tokenizer)[0].num_lines == 0
    assert _make([several], tokenizer, metric="rouge_l")[0].num_lines == 0


@pytest.mark.parametrize("name", METRICS)
def test_metric_and_override_decide_the_length(towns: list[Example], tokenizer: Any, name: str) -> None:
    metric = METRICS[name]
    assert {case.max_new_tokens for case in _make(towns, tokenizer, metric=name)} == {metric.max_new_tokens}
    assert _make(towns, tokenizer, metric=name) == _make(towns, tokenizer, metric=metric)
    assert {case.max_new_tokens for case in _make(towns, tokenizer, metric=name, max_new_tokens=7)} == {7}


def test_cases_depend_on_the_arguments_alone(towns: list[Example], tokenizer: Any) -> None:
    shuffled = list(towns)
    random.Random(0).shuffle(shuffled)
    for tokens in (0, 300):
        cases = _make(towns, tokenizer, context_tokens=tokens)
        assert len(cases) == len(towns)
        assert _make(shuffled, tokenizer, context_tokens=tokens) == cases
        assert _make(towns, tokenizer, context_tokens=tokens, count=7) == cases[:7]
        other = _make(towns, tokenizer, context_tokens=tokens, seed=1)
        assert [case.id for case in other] != [case.id for case in cases]
        # the seed chooses examples, it does not change them
        assert sorted(other, key=lambda case: case.id) == sorted(cases, key=lambda case: case.id)


def test_groups_take_turns(towns: list[Example], tokenizer: Any) -> None:
    cases = _make(towns, tokenizer)
    sizes = {group: sum(example.group == group for example in towns) for group in {case.group for case in cases}}
    assert len({case.group for case in cases[:12]}) == 12
    for count in range(1, len(cases) + 1):
        taken = {group: sum(case.group == group for case in cases[:count]) for group in sizes}
        open_groups = [taken[group] for group, size in sizes.items() if taken[group] < size]
        assert not open_groups or max(taken.values()) - min(open_groups) <= 1


def test_digest_names_the_cases(towns: list[Example], tokenizer: Any) -> None:
    cases = _make(towns, tokenizer)
    assert cases_digest(cases) == cases_digest(list(cases))
    others = [
        cases[:-1],
        cases[::-1],
        [replace(cases[0], answers=("x",)), *cases[1:]],
        [replace(cases[0], max_new_tokens=99), *cases[1:]],
        [replace(cases[0], num_lines=0), *cases[1:]],
        # a token that moves over the boundary is another case
        [
            replace(
                cases[0],
                context_ids=cases[0].context_ids[:-1],
                suffix_ids=cases[0].context_ids[-1:] + cases[0].suffix_ids,
            ),
            *cases[1:],
        ],
    ]
    assert len({cases_digest(each) for each in [cases, *others]}) == len(others) + 1


# --- long contexts -------------------------------------------------------------------------------------------------------


def _marks(text: str) -> set[str]:
    return {part.split("]")[0] for part in text.split("[")[1:]}


@pytest.mark.parametrize("tokens", [200, 500])
def test_distractors_come_from_other_groups_and_fill_the_context(
    towns: list[Example], tokenizer: Any, tokens: int
) -> None:
    by_id = {example.id: example for example in towns}
    places = set()
    for case in _make(towns, tokenizer, context_tokens=tokens):
        example = by_id[case.id]
        text = _text(tokenizer, case)
        context = text.partition("Context: ")[2].partition("\nQuestion:")[0]
        paragraphs = context.split("\n\n")
        own = [paragraph for paragraph in paragraphs if paragraph.startswith(f"[{example.group.split()[1]}]")]
        assert own == [example.context]  # exactly its own paragraph of its own group
        assert len(set(paragraphs)) == len(paragraphs) == len(_marks_of(paragraphs))
        assert tokens * 0.6 < len(tokenizer(context).input_ids) <= tokens
        places.add(paragraphs.index(example.context) / (len(paragraphs) - 1))
    assert {0.0, 1.0} < places  # at either end and between


def test_questions_about_one_paragraph_share_the_joined_context(towns: list[Example], tokenizer: Any) -> None:
    cases = _make(towns, tokenizer, context_tokens=300)
    paragraphs: dict[str, list[str]] = {}
    for example in towns:
        paragraphs.setdefault(example.context, []).append(example.id)
    grouped = by_context(cases)
    assert sorted(sorted(case.id for case in each) for each in grouped) == sorted(map(sorted, paragraphs.values()))
    assert max(map(len, grouped)) > 1
    assert len({case.suffix_ids for case in grouped[0]}) == len(grouped[0])
    assert len({case.context_key for case in cases}) == len(grouped)


def _marks_of(paragraphs: list[str]) -> list[str]:
    return [mark for paragraph in paragraphs for mark in _marks(paragraph)]


def test_a_long_context_of_its_own_stays_alone(tokenizer: Any) -> None:
    long = Example("x", "x", "the river " * 80, "What?", ("a",))
    other = Example("y", "y", "Something else. " * 3, "What?", ("a",))
    cases = {case.id: case for case in _make([long, other], tokenizer, context_tokens=100)}
    assert "else" not in _text(tokenizer, cases["x"])
    assert "the river" not in _text(tokenizer, cases["y"])  # too long to be lent


def test_the_same_text_under_another_group_is_no_distractor(tokenizer: Any) -> None:
    one = Example("x", "x", "The same paragraph. " * 3, "What?", ("a",))
    twin = replace(one, id="y", group="y")
    for case in _make([one, twin], tokenizer, context_tokens=1000):
        assert _text(tokenizer, case).count(one.context) == 1


def _code(number: int, num_lines: int = 40) -> Example:
    text = "\n".join(f"value_{number}_{line} = {line}" for line in range(num_lines))
    return Example(f"m{number}", f"m{number}", f"{text}\n", f"last_{number} = 1", (f"next_{number} = 2",), "continue")


def test_texts_keep_their_end_and_get_others_only_before_it(tokenizer: Any) -> None:
    examples = [_code(number, 6 + number) for number in range(12)]
    for case in _make(examples, tokenizer, context_tokens=600, metric="edit_similarity"):
        text = _text(tokenizer, case).partition("user\n")[2]
        example = next(example for example in examples if example.id == case.id)
        shown = text.partition(f"\n\n{CONTINUE}")[0]
        assert shown.endswith(example.context + example.question)
        before = shown.removesuffix(example.context + example.question)
        numbers = {part.split("_")[0] for part in before.split("value_")[1:]}
        assert numbers
        assert example.id.removeprefix("m") not in numbers
        assert len(tokenizer(shown).input_ids) <= 600 + len(tokenizer(example.question).input_ids)


def test_long_texts_are_cut_at_a_line(tokenizer: Any) -> None:
    examples = [_code(number, 200) for number in range(3)]
    for tokens, most in ((0, 512), (100, 100)):
        for case in _make(examples, tokenizer, context_tokens=tokens, metric="edit_similarity", chat=False):
            text = _text(tokenizer, case)
            assert text.startswith("value_")
            assert most - 30 < case.num_tokens <= most + 20
            assert text.endswith(f"last_{case.id[1:]} = 1")


# --- what is left out, what is refused -----------------------------------------------------------------------------------


def test_contexts_below_a_block_and_prompts_beyond_the_limit_are_left_out(tokenizer: Any) -> None:
    short = Example("short", "g", "Hi.", "What?", ("a",))
    middle = Example("middle", "h", "the river " * 10, "What?", ("a",))
    long = Example("long", "i", "the river " * 100, "What?", ("a",))
    cases = _make([short, middle, long], tokenizer, block_size=32)
    assert {case.id for case in cases} == {"middle", "long"}
    size = {case.id: case.num_tokens + case.max_new_tokens for case in cases}
    for limit, ids in (
        (size["long"], {"middle", "long"}),
        (size["long"] - 1, {"middle"}),
        (size["middle"], {"middle"}),
    ):
        assert {case.id for case in _make([short, middle, long], tokenizer, block_size=32, max_tokens=limit)} == ids
    assert len(_make([short, middle, long], tokenizer, block_size=32, max_tokens=size["middle"], count=1)) == 1
    with pytest.raises(
        ConfigError, match=r"^data: no prompt of 3 example\(s\) has a context of one block \(32 tokens\) and f"
    ):
        _make([short, middle, long], tokenizer, block_size=32, max_tokens=20)
    with pytest.raises(ConfigError, match=r"^data: no prompt of 1 .* \(allowed: longer contexts: --context-tokens"):
        _make([short], tokenizer, block_size=32)
    with pytest.raises(ConfigError, match=r"^data: no prompt of 0"):
        _make([], tokenizer)


def test_recorded_prompts_are_taken_as_they_are(tokenizer: Any) -> None:
    ids = tuple(range(3, 53))
    recorded = Example("r", "r", "", "", (), "recorded", ids, 40)
    (case,) = _make([recorded], tokenizer)
    assert (case.context_ids, case.suffix_ids) == (ids[:32], ids[32:])
    assert (case.answers, case.answer_ids) == ((), ())
    all_but_one = replace(recorded, token_ids=ids[:32], suffix_start=31)
    assert [len(each.context_ids) for each in _make([all_but_one], tokenizer)] == [16]
    with pytest.raises(ConfigError, match=r"^data: recorded prompt r has token 9999 \(allowed: ids below \d+"):
        _make([replace(recorded, token_ids=(*ids, 9999))], tokenizer)
    with pytest.raises(ConfigError, match=r"^context_tokens: recorded prompts are used as they are"):
        _make([recorded], tokenizer, context_tokens=100)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 0}, r"^count: 0 is too small \(allowed: 1 or more\)"),
        ({"context_tokens": -1}, r"^context_tokens: -1 is too small \(allowed: 0 or more\)"),
        ({"block_size": 0}, r"^block_size: 0 is too small"),
        ({"max_new_tokens": 0}, r"^max_new_tokens: 0 is too small"),
        ({"metric": "bleu"}, r"^metric: no metric 'bleu' \(allowed: f1, exact_match, rouge_l, edit_similarity, loss\)"),
    ],
)
def test_bad_arguments(towns: list[Example], tokenizer: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _make(towns, tokenizer, **change)


def test_whole_prompts_are_not_lengthened(tokenizer: Any) -> None:
    plain = Example("p", "p", "A long enough text. " * 3, "Go on:", ("a",), "plain")
    with pytest.raises(ConfigError, match=r"^context_tokens: prompts that are given as a whole .*\(allowed: 0\)"):
        _make([plain], tokenizer, context_tokens=100)


def test_from_file_to_cases(tmp_path: Path, tokenizer: Any) -> None:
    """HumanEval's shape all the way: the last line of a prompt and what follows it are never part of the context."""
    path = tmp_path / "human.jsonl"
    entries = [
        f'{{"task_id": "T/{n}", "prompt": "def f_{n}(x):\\n    \\"\\"\\"Return x and {n}.\\n    \\"\\"\\"\\n", '
        f'"canonical_solution": "    y = x\\n    return y, {n}\\n"}}'
        for n in range(6)
    ]
    path.write_text("\n".join(entries))
    kind: Kind = "humaneval"
    found = read_examples(path, kind=kind)
    cases = _make(found.of_split("all"), tokenizer, metric="edit_similarity")
    assert {case.group for case in cases} == {f"T/{n}" for n in range(6)}
    for case in cases:
        suffix = tokenizer.decode(list(case.suffix_ids))
        assert suffix.endswith(f'    """\n\n{CONTINUE}<|im_end|>\n<|im_start|>assistant\n')
        assert case.answers == (f"    y = x\n    return y, {case.id[2:]}",)
