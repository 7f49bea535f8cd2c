"""Tokenizer digests, templates, BOS rule and end tokens, as checkpoints in the wild spell them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoint_edits import copy, edit_json, identity
from tiny_models import CHAT_TEMPLATE, make_tiny, make_tiny_tokenizer

from kvkin.configs.prompt_files import TokenizerIdentity, read_chat_template, read_eos_ids, read_tokenizer
from kvkin.kv.errors import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer") / "base")


def read(folder: Path) -> TokenizerIdentity:
    tokenizer = read_tokenizer(folder, "k")
    assert tokenizer is not None
    return tokenizer


def edit_tokenizer(source: Path, target: Path, change: Any) -> Path:
    """A copy of a tokenizer with ``change(data)`` applied to tokenizer.json."""
    copy(source, target)
    data = json.loads((target / "tokenizer.json").read_text())
    change(data)
    (target / "tokenizer.json").write_text(json.dumps(data))
    return target


def old_spelling(data: dict[str, Any]) -> None:
    data["model"]["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]
    for key in ("ignore_merges", "byte_fallback", "dropout"):
        data["model"].pop(key, None)
    data["pre_tokenizer"].pop("use_regex", None)
    data["pre_tokenizer"]["trim_offsets"] = not data["pre_tokenizer"].get("trim_offsets", True)


def other_ends(data: dict[str, Any]) -> None:
    data["decoder"], data["truncation"], data["padding"] = None, {"max_length": 8}, {"pad_id": 0}
    data["added_tokens"].reverse()
    data["model"]["vocab"] = dict(reversed(data["model"]["vocab"].items()))


@pytest.mark.parametrize("change", [old_spelling, other_ends])
def test_the_same_tokens_have_the_same_digest(folder: Path, tmp_path: Path, change: Any) -> None:
    assert read(edit_tokenizer(folder, tmp_path / "t", change)).digest == read(folder).digest


def swap_ids(data: dict[str, Any]) -> None:
    vocab = data["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def drop_merge(data: dict[str, Any]) -> None:
    data["model"]["merges"].pop()


def lower_case(data: dict[str, Any]) -> None:
    data["normalizer"] = {"type": "Lowercase"}


def prefix_space(data: dict[str, Any]) -> None:
    data["pre_tokenizer"]["add_prefix_space"] = True


def strip_special(data: dict[str, Any]) -> None:
    data["added_tokens"][0]["lstrip"] = True


@pytest.mark.parametrize(
    ("change", "section"),
    [
        (swap_ids, "model"),
        (drop_merge, "model"),
        (lower_case, "normalizer"),
        (prefix_space, "pre_tokenizer"),
        (strip_special, "added_tokens"),
    ],
)
def test_another_way_to_ids_is_another_tokenizer(folder: Path, tmp_path: Path, change: Any, section: str) -> None:
    other = read(edit_tokenizer(folder, tmp_path / "t", change))
    assert other.digest != read(folder).digest
    assert other.difference(read(folder)) == section
    assert other.added_beyond(read(folder)) is None


def test_added_tokens_are_told_apart_from_changes(folder: Path, tmp_path: Path) -> None:
    base, more = read(folder), read(make_tiny_tokenizer(tmp_path / "more", ["<tool>", "<call>"]))
    assert more.num_ids == base.num_ids + 2
    assert more.added_beyond(base) is True
    assert base.added_beyond(base) is False
    assert base.added_beyond(more) is None, "a member may not lack tokens of its base"


def test_num_ids_is_what_the_library_says(folder: Path) -> None:
    from tokenizers import Tokenizer

    assert read(folder).num_ids == Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size(
        with_added_tokens=True
    )


def bos_template(data: dict[str, Any]) -> None:
    token = "<|im_start|>"
    data["post_processor"] = {
        "type": "Sequence",
        "processors": [
            {"type": "ByteLevel"},
            {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [],
                "special_tokens": {token: {"id": token, "ids": [1], "tokens": [token]}},
            },
        ],
    }


def test_the_bos_rule(folder: Path, tmp_path: Path) -> None:
    assert read(folder).bos_id is None
    by_template = edit_tokenizer(folder, tmp_path / "a", bos_template)
    assert read(by_template).bos_id == 1
    assert read(by_template).digest == read(folder).digest, "BOS is a rule of its own"
    assert read(edit_json(by_template, "tokenizer_config.json", add_bos_token=False)).bos_id is None
    told = edit_json(
        copy(folder, tmp_path / "b"), "tokenizer_config.json", add_bos_token=True, bos_token="<|im_start|>"
    )
    assert read(told).bos_id == 1
    assert read(edit_json(told, "tokenizer_config.json", bos_token={"content": "<|im_end|>"})).bos_id == 2


def test_tokenizers_in_other_forms(tmp_path: Path) -> None:
    assert read_tokenizer(tmp_path, "k") is None
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"tokenizer.model, but no tokenizer.json"):
        read_tokenizer(tmp_path, "k")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is damaged"):
        read_tokenizer(tmp_path, "k")


def test_unigram_tokenizers_are_counted(folder: Path, tmp_path: Path) -> None:
    def unigram(data: dict[str, Any]) -> None:
        data["model"] = {
            "type": "Unigram",
            "vocab": [["<unk>", 0.0], ["a", -1.0], ["b", -2.0], ["c", -3.0]],
            "unk_id": 0,
        }

    assert read(edit_tokenizer(folder, tmp_path / "t", unigram)).num_ids == 4


def test_where_chat_templates_are_found(folder: Path, tmp_path: Path) -> None:
    assert read_chat_template(folder, "k") == CHAT_TEMPLATE
    old = copy(folder, tmp_path / "old")
    (old / "chat_template.jinja").unlink()
    assert read_chat_template(old, "k") is None
    edit_json(old, "tokenizer_config.json", chat_template="{{ messages }}")
    assert read_chat_template(old, "k") == "{{ messages }}"
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert read_chat_template(edit_json(old, "tokenizer_config.json", chat_template=several), "k") == "D"
    assert read_chat_template(edit_json(old, "tokenizer_config.json", chat_template=several[:1]), "k") is None
    (old / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"chat_template.jinja cannot be read"):
        read_chat_template(old, "k")


def test_end_tokens_of_both_files_count(tmp_path: Path) -> None:
    assert read_eos_ids(tmp_path, {}, 100, "k") == ()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 3]}')
    assert read_eos_ids(tmp_path, {"eos_token_id": 5}, 100, "k") == (3, 5, 7)
    assert read_eos_ids(tmp_path, {"eos_token_id": [5, 100, -1]}, 100, "k") == (3, 5, 7)
    with pytest.raises(ConfigError, match="eos_token_id is '</s>'"):
        read_eos_ids(tmp_path, {"eos_token_id": "</s>"}, 100, "k")


def test_an_adapter_may_bring_its_own_files(tmp_path: Path) -> None:
    from tiny_models import make_tiny_lora

    base = make_tiny("llama", tmp_path / "base", num_layers=2)
    adapter = make_tiny_lora(base, tmp_path / "adapter", [1])
    plain = identity(base, adapter)
    assert (plain.chat_template, plain.tokenizer) == (CHAT_TEMPLATE, read(base))
    make_tiny_tokenizer(adapter, ["<tool>"], chat_template="own")
    own = identity(base, adapter)
    assert own.chat_template == "own"
    assert own.tokenizer == read(adapter)
    assert own.lineage == plain.lineage
