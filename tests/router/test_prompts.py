"""Prompts: the same ids as transformers for fresh conversations, remembered ids for answers, and nothing tokenized twice."""

from __future__ import annotations

import random
import threading
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mock_node import CHAT_TEMPLATE, EOS_ID, write_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvkin.kv.errors import ConfigError, InvalidRequest, PromptTooLong
from kvkin.kv.hashing import block_hashes, root_hash
from kvkin.router.prompts import HashRoots, Lru, Prompt, PromptBuilder
from kvkin.router.templates import ChatTemplate, read_special_tokens
from kvkin.transport.messages import ChatMessage

VOCAB = 320
ROOTS = HashRoots(family_digest=b"family", member_digest=b"member", family_vocab=VOCAB, block_size=4, scope="default")
LIMIT = 100_000

SYSTEM_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}{{ raise_exception('the first message must be a system one') }}{% endif %}"
    "{{ bos_token }}{% for message in messages %}\n    {%- if loop.index0 > 40 %}{% break %}{% endif %}\n"
    "    {{- '[' + message['role'] + ']' + message['content'] | trim + eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
GENERATION_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}"
    "{% else %}<|im_start|>{{ message | tojson }}<|im_end|>{% endif %}{% endfor %}"
)
PLAIN_TEMPLATE = (
    "{% for message in messages %}### {{ message['role'] }}:\n{{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)


def make_builder(folder: Path, template: str = CHAT_TEMPLATE, memory_bytes: int = 1 << 20) -> PromptBuilder:
    if not (folder / "tokenizer.json").exists():
        write_tokenizer(folder)
    return PromptBuilder(
        folder / "tokenizer.json", ChatTemplate(template, read_special_tokens(folder)), memory_bytes=memory_bytes
    )


@pytest.fixture
def builder(tmp_path: Path) -> PromptBuilder:
    return make_builder(tmp_path)


def chat(builder: PromptBuilder, *messages: tuple[str, str]) -> Prompt:
    return builder.chat([ChatMessage(*message) for message in messages], ROOTS, LIMIT)


def letters(builder: PromptBuilder, text: str) -> list[int]:
    """Ids of a text spelled byte by byte: valid, and not what the tokenizer would choose."""
    shown = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [builder._tokenizer.token_to_id(char) for part, _ in shown for char in part]


# --- like transformers --------------------------------------------------------------------------------------------------

TEMPLATES = {"im": CHAT_TEMPLATE, "system": SYSTEM_TEMPLATE, "generation": GENERATION_TEMPLATE, "plain": PLAIN_TEMPLATE}
CONVERSATIONS: list[list[tuple[str, str]]] = [
    [("user", "hello")],
    [("system", "You are terse."), ("user", "What is the on the in an?"), ("assistant", "the"), ("user", " why? ")],
    [("system", ""), ("user", "  spaces\n\n\nand <|im_end|> in the text <|im_start|>x")],
    [("system", "übung 漢字 🙂"), ("user", 'a "quoted" <b>&amp;</b> \\ text'), ("assistant", "")],
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_fresh_conversations_have_the_ids_of_transformers(tmp_path: Path, template: str) -> None:
    transformers = pytest.importorskip("transformers")
    builder = make_builder(tmp_path, TEMPLATES[template])
    reference: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<|im_end|>", unk_token="<|endoftext|>"
    )
    for conversation in CONVERSATIONS:
        messages = [{"role": role, "content": content} for role, content in conversation]
        if template == "system" and conversation[0][0] != "system":
            with pytest.raises(InvalidRequest, match="the first message must be a system one"):
                chat(builder, *conversation)
            continue
        expected = reference.apply_chat_template(
            messages, chat_template=TEMPLATES[template], add_generation_prompt=True, return_dict=False
        )
        assert list(chat(builder, *conversation).token_ids) == expected, conversation
        # and once more, now from memory
        assert list(chat(builder, *conversation).token_ids) == expected


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["system", "user", "assistant"]),
            st.text() | st.sampled_from(["the <|im_end|>", "<|im_start|>\n", " in\n\n the", "<|im_", "end|>"]),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_pieces_have_the_ids_of_the_whole(builder: PromptBuilder, conversation: list[tuple[str, str]]) -> None:
    prompt = chat(builder, *conversation)
    messages = [ChatMessage(*message) for message in conversation]
    whole = builder._tokenizer.encode(builder._template.render(messages), add_special_tokens=False).ids  # type: ignore[union-attr]
    assert list(prompt.token_ids) == whole
    assert list(prompt.hashes) == block_hashes(whole, prompt.root, ROOTS.block_size)


def test_tokens_that_look_at_their_neighbours_are_no_places_to_cut(tmp_path: Path) -> None:
    """A special token that swallows the space before it: cutting there would leave the space to the piece before."""
    write_tokenizer(tmp_path)
    tokenizer: Any = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens(
        [
            AddedToken("<left>", lstrip=True, normalized=False, special=True),
            AddedToken("<right>", rstrip=True, normalized=False, special=True),
            AddedToken("<word>", single_word=True, normalized=False, special=True),
        ]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    builder = make_builder(tmp_path)
    text = "the  <left> an <right>  in x<word>y <word> on<|im_end|>  <left><right>  <|im_start|>"
    prompt = chat(builder, ("user", text))
    whole = builder._tokenizer.encode(builder.decode(()) + _render(builder, text), add_special_tokens=False).ids
    assert list(prompt.token_ids) == whole


def _render(builder: PromptBuilder, text: str) -> str:
    assert builder._template is not None
    return builder._template.render([ChatMessage("user", text)])


# --- only what is new ---------------------------------------------------------------------------------------------------


def test_the_next_turn_of_a_long_chat_tokenizes_only_what_is_new(builder: PromptBuilder) -> None:
    turns = [("system", "the context " * 2000), ("user", "first question")]
    first = chat(builder, *turns)
    assert first.tokenized_chars > 20_000
    again = chat(builder, *turns)
    assert (again.token_ids, again.tokenized_chars) == (first.token_ids, 0)
    later = chat(builder, *turns, ("assistant", "an answer"), ("user", "second question"))
    assert later.tokenized_chars < 100
    assert later.token_ids[: len(first.token_ids)] == first.token_ids


def test_hashes_continue_from_the_longest_known_beginning(
    builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvkin.router import prompts

    hashed: list[int] = []
    extend = prompts.extend_hashes

    def counting(parent: bytes, ids: Any, block_size: int) -> list[bytes]:
        hashed.append(len(ids))
        return extend(parent, ids, block_size)

    monkeypatch.setattr(prompts, "extend_hashes", counting)
    turns = [("user", "the context " * 500)]
    first = chat(builder, *turns)
    later = chat(builder, *turns, ("assistant", "x"), ("user", "second question"))
    assert hashed[0] == len(first.token_ids)
    assert hashed[1] < 100
    assert list(later.hashes) == block_hashes(later.token_ids, later.root, ROOTS.block_size)


def test_memory_is_bounded(tmp_path: Path) -> None:
    builder = make_builder(tmp_path, memory_bytes=1 << 16)
    rng = random.Random(0)
    for _ in range(200):
        prompt = chat(builder, ("user", "".join(rng.choices("abcdefgh ", k=500))))
        assert prompt.tail is not None
        builder.remember(prompt.tail, "answer", letters(builder, "answer"))
    for memory in (builder._pieces, builder._answers, builder._hashes):
        assert 0 < memory.num_bytes <= memory.max_bytes  # type: ignore[attr-defined]


def test_lru_forgets_what_was_used_longest_ago() -> None:
    lru: Lru[str] = Lru(100)
    lru.put("a", "A", 40)
    lru.put("b", "B", 40)
    assert lru.get("a") == "A"
    lru.put("c", "C", 40)
    assert (lru.get("b"), lru.get("a"), lru.get("c"), lru.num_bytes) == (None, "A", "C", 80)
    lru.put("c", "C2", 60)
    assert (lru.get("c"), lru.num_bytes, len(lru)) == ("C2", 100, 2)
    lru.put("d", "D", 1000)  # larger than everything: kept by nobody
    assert (len(lru), lru.num_bytes) == (0, 0)


# --- remembered answers -------------------------------------------------------------------------------------------------


def answered(builder: PromptBuilder, ids: list[int], answer: str, *messages: tuple[str, str]) -> tuple[Prompt, bool]:
    prompt = chat(builder, *messages)
    assert prompt.tail is not None
    return prompt, builder.remember(prompt.tail, answer, ids)


def test_an_answer_comes_back_with_the_ids_that_were_generated(builder: PromptBuilder) -> None:
    ids = letters(builder, "the answer")
    first, kept = answered(builder, [*ids, EOS_ID], "the answer", ("user", "q"))
    assert kept
    later = chat(builder, ("user", "q"), ("assistant", "the answer"), ("user", "and?"))
    assert later.token_ids[: len(first.token_ids) + len(ids)] == (*first.token_ids, *ids)
    assert builder.decode(later.token_ids) == _text(
        builder, ("user", "q"), ("assistant", "the answer"), ("user", "and?")
    )


def _text(builder: PromptBuilder, *messages: tuple[str, str]) -> str:
    assert builder._template is not None
    return builder._template.render([ChatMessage(*message) for message in messages])


def test_three_turns_hit_all_full_blocks_of_the_earlier_ones(builder: PromptBuilder) -> None:
    messages: list[tuple[str, str]] = [("user", "the first question")]
    published: list[bytes] = []
    for turn in range(3):
        prompt = chat(builder, *messages)
        assert list(prompt.hashes[: len(published)]) == published
        answer = f"the answer number {turn}"
        ids = letters(builder, answer)
        assert prompt.tail is not None
        assert builder.remember(prompt.tail, answer, [*ids, EOS_ID])
        # a node publishes prompt + generated - 1 tokens: all but the EOS
        published = block_hashes((*prompt.token_ids, *ids), prompt.root, ROOTS.block_size)
        messages += [("assistant", answer), ("user", f"the question {turn}")]
    assert len(published) > 20


@pytest.mark.parametrize("template", ["im", "plain", "system"])
def test_splices_never_change_the_text(tmp_path: Path, template: str) -> None:
    builder = make_builder(tmp_path, TEMPLATES[template])
    messages = [("system", "be brief"), ("user", "the question")]
    for answer in ("the answer", " leading and trailing ", "über 漢字 🙂", "", "two\nlines\n\n", "the"):
        ids = letters(builder, answer)
        answered(builder, [*ids, EOS_ID], answer, *messages)
        follow_up = [*messages, ("assistant", answer), ("user", "and the next?")]
        prompt = chat(builder, *follow_up)
        assert builder.decode(prompt.token_ids) == _text(builder, *follow_up), answer
        if template != "system" or answer == answer.strip():
            joined = ",".join(map(str, prompt.token_ids))
            assert ",".join(map(str, ids)) in joined, answer


def test_another_text_or_another_place_is_not_spliced(builder: PromptBuilder) -> None:
    ids = letters(builder, "the answer")
    answered(builder, [*ids, EOS_ID], "the answer", ("user", "q"))
    for messages in (
        [("user", "q"), ("assistant", "the answers"), ("user", "and?")],
        [("user", "q"), ("assistant", "the"), ("user", "and?")],
        [("user", "other"), ("assistant", "the answer"), ("user", "and?")],
        [("user", "q"), ("user", "the answer"), ("user", "and?")],
    ):
        whole = builder._tokenizer.encode(_text(builder, *messages), add_special_tokens=False).ids
        assert list(chat(builder, *messages).token_ids) == whole


def test_a_stop_string_beyond_the_text_is_dropped(builder: PromptBuilder) -> None:
    ids = letters(builder, "the answer\nUser:")
    first, kept = answered(builder, ids, "the answer", ("user", "q"))
    assert kept
    later = chat(builder, ("user", "q"), ("assistant", "the answer"), ("user", "and?"))
    mine = letters(builder, "the answer")
    assert later.token_ids[: len(first.token_ids) + len(mine)] == (*first.token_ids, *mine)


def test_ids_whose_text_is_not_the_answer_are_not_remembered(builder: PromptBuilder) -> None:
    assert not answered(builder, letters(builder, "something else"), "the answer", ("user", "q"))[1]
    assert not answered(builder, [EOS_ID], "", ("user", "q"))[1]
    assert not answered(builder, [], "", ("user", "q"))[1]


def test_half_a_character_at_the_end_is_left_to_the_text(builder: PromptBuilder) -> None:
    ids = letters(builder, "ab🙂")[:-2]  # generation was cut inside of the emoji
    answer = builder.decode(ids)
    assert answer.endswith("�")
    answered(builder, ids, answer, ("user", "q"))
    follow_up = [("user", "q"), ("assistant", answer), ("user", "and?")]
    assert builder.decode(chat(builder, *follow_up).token_ids) == _text(builder, *follow_up)


def test_many_answers_to_one_prompt_are_told_apart(builder: PromptBuilder) -> None:
    for number in range(70):
        answered(builder, letters(builder, f"answer {number}"), f"answer {number}", ("user", "q"))
    for number, spliced in ((69, True), (30, True), (0, False)):  # the oldest gave way
        answer = f"answer {number}"
        prompt = chat(builder, ("user", "q"), ("assistant", answer), ("user", "and?"))
        joined = ",".join(map(str, prompt.token_ids))
        assert (",".join(map(str, letters(builder, answer))) in joined) is spliced, number


def test_a_tokenizer_that_does_not_concatenate_splices_whole_pieces_only(tmp_path: Path) -> None:
    """SentencePiece-like: the decoder drops the first space of whatever it decodes."""
    vocab = {"<unk>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "▁": 3} | {chr(c): c for c in range(32, 127)} | {"\n": 10}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in list(vocab)[1:3]])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    builder = make_builder(tmp_path)
    assert not builder._concatenates
    first = chat(builder, ("user", "q"))
    assert first.tail is not None
    ids = [ord(char) for char in "yes"]
    assert builder.remember(first.tail, "yes", [*ids, 2])
    later = chat(builder, ("user", "q"), ("assistant", "yes"), ("user", "and?"))
    assert later.token_ids[: len(first.token_ids) + 3] == (*first.token_ids, *ids)
    longer = chat(builder, ("user", "q"), ("assistant", "yesterday"), ("user", "and?"))
    assert (
        list(longer.token_ids)
        == builder._tokenizer.encode(
            _text(builder, ("user", "q"), ("assistant", "yesterday"), ("user", "and?")), add_special_tokens=False
        ).ids
    )


def test_threads_share_a_builder(builder: PromptBuilder) -> None:
    expected = {number: chat(builder, ("user", f"question {number} " * 50)).token_ids for number in range(8)}
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(50):
            number = rng.randrange(8)
            if chat(builder, ("user", f"question {number} " * 50)).token_ids != expected[number]:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# --- text, ids, limits --------------------------------------------------------------------------------------------------


def test_plain_text_begins_with_bos_where_the_model_wants_one(builder: PromptBuilder) -> None:
    without = builder.text("the text", ROOTS, LIMIT)
    assert builder.text("the text", ROOTS, LIMIT, bos_id=1).token_ids == (1, *without.token_ids)
    assert builder.decode(without.token_ids) == "the text"


def test_ids_are_taken_as_they_are(builder: PromptBuilder) -> None:
    prompt = builder.ids((5, 6, 7, 8, 9), ROOTS)
    assert prompt.token_ids == (5, 6, 7, 8, 9)
    assert list(prompt.hashes) == block_hashes((5, 6, 7, 8), root_hash(b"family", 4, "default"), 4)
    assert prompt.tail is None


def test_a_members_own_tokens_get_the_members_own_root(builder: PromptBuilder) -> None:
    assert builder.ids((VOCAB - 1,), ROOTS).root == root_hash(b"family", 4, "default")
    assert builder.ids((1, VOCAB), ROOTS).root == root_hash(b"member", 4, "default")


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "_tokenizer", None)
    with pytest.raises(PromptTooLong, match="at least"):
        builder.text("x" * 100_000, ROOTS, 1000)
    with pytest.raises(PromptTooLong, match="at least"):
        builder.chat([ChatMessage("user", "x" * 100_000)], ROOTS, 1000)


def test_a_model_without_a_template_takes_no_messages(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    builder = PromptBuilder(tmp_path / "tokenizer.json", None)
    with pytest.raises(InvalidRequest, match="no chat template"):
        chat(builder, ("user", "hello"))


def test_a_tokenizer_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer.json cannot be read"):
        PromptBuilder(tmp_path / "tokenizer.json", None)


def test_a_template_that_does_not_compile_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize("template", ["{{ messages[99].content }}", "{{ 1 / 0 }}", "{{ ''.__class__.__mro__ }}"])
def test_a_template_that_fails_is_the_requests_error(template: str) -> None:
    rendering = ChatTemplate(template, {})
    with pytest.raises(InvalidRequest, match="the chat template refuses them"):
        rendering.render([ChatMessage("user", "x")])


def test_empty_arrays_are_hashed_like_any_other(builder: PromptBuilder) -> None:
    assert builder.ids((), ROOTS).hashes == ()
    assert array("I").itemsize == 4, "ids are packed as 32-bit integers"
