"""Chat templates: messages to text, exactly as transformers' ``apply_chat_template`` renders them, without transformers.

The same sandbox, the same whitespace rules, filters and globals, and the special tokens as variables: a router that hashed
another text than the engine runs would never hit. The template writes BOS itself, so the text
is tokenized without special tokens afterwards. Called by ``prompts.py`` on the router's worker threads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from kvkin.kv.errors import ConfigError, InvalidRequest
from kvkin.transport.messages import ChatMessage

# The names under which transformers hands a tokenizer's special tokens to its template.
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _GenerationTag(jinja2.ext.Extension):  # type: ignore[misc] # jinja2 is untyped here (pyproject.toml)
    """``{% generation %}`` marks an assistant's text for training masks; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which would change the prompt
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class ChatTemplate:
    """One compiled template. Thread-safe: rendering has no state."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError("chat_template", f"does not compile: {error}") from None
        self._special_tokens = special_tokens

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt's text, ending where the assistant's answer begins.

        Raises InvalidRequest with the template's own words if it refuses the messages (roles out of order, ...).
        """
        try:
            text: str = self._template.render(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except Exception as error:  # noqa: BLE001
            # whatever a template does with messages that it was not written for is the request's fault, never the router's
            raise InvalidRequest(f"messages: the chat template refuses them: {error}") from None
        return text


def read_special_tokens(folder: Path) -> dict[str, str]:
    """The named special tokens of a checkpoint folder, as the template's variables."""
    found: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / file
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        for name in SPECIAL_TOKEN_NAMES:
            value = content.get(name)
            if isinstance(value, dict):  # an AddedToken
                value = value.get("content")
            if isinstance(value, str):
                found[name] = value
    return found
