"""Text while it comes: characters and stop strings that are split over tokens, whatever the tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import EOS_ID, make_tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models

from kvkin.engines.text import TextStream, load_tokenizer

TEXT = st.text(st.sampled_from("abc the\n.é€😀字"), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("abc the\n😀"), min_size=1, max_size=4), max_size=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def llama_like() -> Tokenizer:
    """As Llama's and Mistral's: word beginnings are marked, unknown characters are bytes, the first space is dropped."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁a", "a", "b", "c", "the"]
    made: Any = Tokenizer(
        models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[], byte_fallback=True)
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken("<s>", special=True)])
    return made


def stream(tokenizer: Tokenizer, ids: list[int], stop: list[str] | None = None) -> tuple[list[str], TextStream]:
    """The pieces as they come (the last one from ``finish``), and the stream."""
    out = TextStream(tokenizer, stop or [])
    pieces = []
    for token in ids:
        pieces.append(out.push(token))
        if out.stopped:
            break
    return [*pieces, out.finish()], out


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token a byte: the hardest split there is."""
    ids = [token for character in text for byte in character.encode() for token in _byte(tokenizer, byte)]
    assert tokenizer.decode(ids) == text
    return ids


def _byte(tokenizer: Tokenizer, byte: int) -> list[int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    found = tokenizer.token_to_id(bytes_to_unicode()[byte])
    assert found is not None
    return [found]


@given(text=TEXT)
def test_pieces_are_the_whole_text(tokenizer: Tokenizer, text: str) -> None:
    for ids in (tokenizer.encode(text).ids, byte_ids(tokenizer, text)):
        pieces, out = stream(tokenizer, ids)
        assert "".join(pieces) == out.text == text
        assert not out.stopped


@given(text=TEXT)
def test_no_half_character_is_shown(tokenizer: Tokenizer, text: str) -> None:
    """Nothing is shown that has to be taken back, and what is whole is shown at once."""
    out, sent = TextStream(tokenizer), b""
    for character in text:
        for token in byte_ids(tokenizer, character):
            piece = out.push(token)
            assert "\ufffd" not in piece
            sent += piece.encode()
        assert text.encode().startswith(sent)
        assert sent.endswith(character.encode())


def test_an_unfinished_character_ends_as_a_replacement(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, "a€")[:-1]
    pieces, out = stream(tokenizer, ids)
    assert pieces[:-1] == ["a", "", ""]
    assert out.text == tokenizer.decode(ids) == "a\ufffd"


def test_bytes_that_never_become_a_character_do_not_block(tokenizer: Tokenizer) -> None:
    ids = [*_byte(tokenizer, 0xE2), *byte_ids(tokenizer, "ab")]
    pieces, out = stream(tokenizer, ids)
    assert pieces == ["", "\ufffda", "b", ""]
    assert out.text == tokenizer.decode(ids)


@settings(max_examples=300)
@given(text=TEXT, stops=STOPS, whole=st.booleans())
def test_stop_strings(tokenizer: Tokenizer, text: str, stops: list[str], whole: bool) -> None:
    """The text ends before the first stop string, wherever tokens begin and end; a part of it never shows."""
    ids = tokenizer.encode(text).ids if whole else byte_ids(tokenizer, text)
    pieces, out = stream(tokenizer, ids, stops)
    found = [text.find(stop) for stop in stops if stop in text]
    assert out.stopped == bool(found)
    if not found:
        assert out.text == text
    elif whole:
        # tokens of several characters may complete two stop strings at once
        assert out.text in {text[:at] for at in found}
    else:
        first = min(text.find(stop) + len(stop) for stop in stops if stop in text)
        ending = [text.find(stop) for stop in stops if stop in text and text.find(stop) + len(stop) == first]
        assert out.text == text[: min(ending)]
    assert "".join(pieces) == out.text
    if found:
        assert (out.push(ids[0]), out.finish()) == ("", "")


def test_text_is_held_back_only_while_it_may_become_a_stop(tokenizer: Tokenizer) -> None:
    pieces, out = stream(tokenizer, byte_ids(tokenizer, "ab\n\nab"), ["\n\nc", "bb"])
    assert pieces == ["a", "", "b", "", "\n\na", "", "b"]
    assert not out.stopped
    pieces, out = stream(tokenizer, byte_ids(tokenizer, "xaab"), ["ab"])
    assert (pieces, out.text) == (["x", "", "a", "", ""], "xa")


def test_empty_stop_strings_are_none(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, byte_ids(tokenizer, "ab"), [""])[1].text == "ab"


def test_special_tokens_do_not_show(tokenizer: Tokenizer) -> None:
    ids = [*byte_ids(tokenizer, "a"), EOS_ID, *byte_ids(tokenizer, "b")]
    assert stream(tokenizer, ids)[1].text == "ab"


@given(data=st.data())
def test_word_marks_and_byte_fallback(llama_like: Tokenizer, data: st.DataObject) -> None:
    """Decoders that treat the beginning of a text otherwise than its middle: pieces still add up to the whole."""
    vocab = llama_like.get_vocab()
    words = st.sampled_from(["<s>", "▁", "▁the", "▁a", "a", "b", "the"]).map(lambda word: [vocab[word]])
    characters = st.sampled_from("é€😀\n ").map(lambda one: [vocab[f"<0x{byte:02X}>"] for byte in one.encode()])
    ids = [token for group in data.draw(st.lists(words | characters, max_size=10)) for token in group]
    pieces, out = stream(llama_like, ids)
    assert "".join(pieces) == out.text == llama_like.decode(ids, skip_special_tokens=True)


def test_a_special_token_does_not_swallow_a_space(llama_like: Tokenizer) -> None:
    word, special = llama_like.token_to_id("▁the"), llama_like.token_to_id("<s>")
    assert llama_like.decode([word, special, word]) == "the the"
    assert stream(llama_like, [word, special, word])[1].text == "the the"


def test_load_tokenizer_takes_a_folder_or_a_file(folder: Path) -> None:
    one, other = load_tokenizer(folder), load_tokenizer(folder / "tokenizer.json")
    assert one.encode("the cat").ids == other.encode("the cat").ids
