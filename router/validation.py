"""Checks of a request before anything is started: every field has a limit, every refusal names field, value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from kvkin.kv.errors import InvalidRequest, PromptTooLong, UnknownModel
from kvkin.router.settings import Limits, ModelSettings, RouterSettings
from kvkin.transport.messages import AskStatus, Cancel, Generate, ListModels, Ping, Sampling

MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
# Values are shown in errors up to this length: an error must not echo a megabyte.
SHOWN_CHARS = 64


def check_request(message: Generate | Cancel | ListModels | AskStatus | Ping, settings: RouterSettings) -> None:
    """Raise a RequestError unless the request may be worked on."""
    limits = settings.limits
    _require(1 <= len(message.id) <= limits.max_id_chars, "id", message.id, f"1 to {limits.max_id_chars} characters")
    if isinstance(message, Ping):
        most = limits.max_running
        _require(len(message.running) <= most, "running", len(message.running), f"up to {most} ids")
    elif isinstance(message, Generate):
        _check_generate(message, settings)


def token_limit(message: Generate, settings: RouterSettings) -> int:
    """Most prompt tokens that leave room for ``max_tokens``."""
    model = settings.models[message.model]
    return min(model.max_context_tokens - message.sampling.max_tokens, settings.limits.max_prompt_tokens)


def check_length(num_tokens: int, message: Generate, settings: RouterSettings) -> None:
    """Raise InvalidRequest for an empty prompt, PromptTooLong for one that does not fit."""
    if num_tokens == 0:
        raise InvalidRequest("the prompt is empty (allowed: at least one token)")
    if num_tokens > token_limit(message, settings):
        model = settings.models[message.model]
        raise PromptTooLong(
            f"{num_tokens} prompt tokens + max_tokens {message.sampling.max_tokens} exceed the context of "
            f"{message.model} (allowed: {model.max_context_tokens} in all, {settings.limits.max_prompt_tokens} in the prompt)"
        )


def _check_generate(message: Generate, settings: RouterSettings) -> None:
    limits = settings.limits
    model = settings.models.get(message.model)
    if model is None:
        raise UnknownModel(f"model: {_shown(message.model)} (allowed: {', '.join(sorted(settings.models))})")
    given = [name for name in ("prompt", "token_ids", "messages") if getattr(message, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(f"exactly one of prompt, token_ids, messages is given, not {', '.join(given) or 'none'}")
    _check_input(message, model, limits)
    _check_sampling(message.sampling, model, limits)
    loss, hint = message.max_loss, message.share_hint
    _require(math.isfinite(loss) and loss >= 0, "max_loss", loss, "a finite number, at least 0")
    _require(math.isfinite(hint), "share_hint", hint, "a finite number")
    for name, seconds in (("deadline_s", message.deadline_s), ("ttft_slo_s", message.ttft_slo_s)):
        _require(seconds is None or (math.isfinite(seconds) and seconds > 0), name, seconds, "above 0 seconds")


def _check_input(message: Generate, model: ModelSettings, limits: Limits) -> None:
    if message.messages is not None:
        if model.chat_template is None:
            raise InvalidRequest(f"messages: {model.name} has no chat template (allowed: prompt or token_ids)")
        count = len(message.messages)
        _require(1 <= count <= limits.max_messages, "messages", count, f"1 to {limits.max_messages} messages")
        for number, one in enumerate(message.messages):
            allowed = f"1 to {limits.max_role_chars} characters"
            _require(1 <= len(one.role) <= limits.max_role_chars, f"messages[{number}].role", one.role, allowed)
    if message.token_ids is not None:
        if not message.token_ids:
            raise InvalidRequest("token_ids is empty (allowed: at least one token)")
        _check_ids(message.token_ids, model)
    if message.prompt is not None and not message.prompt:
        raise InvalidRequest("prompt is empty (allowed: at least one character)")


def _check_ids(token_ids: tuple[int, ...], model: ModelSettings) -> None:
    # numpy: a loop over 100,000 ids would hold the event loop for milliseconds
    try:
        ids = np.array(token_ids, dtype=np.int64)
    except OverflowError:
        ids = np.array([-1])
    wrong = (ids < 0) | (ids >= model.vocab_size)
    if bool(wrong.any()):
        at = int(wrong.argmax())
        raise InvalidRequest(
            f"token_ids[{at}]: {token_ids[at]} (allowed: 0 to {model.vocab_size - 1} for {model.name})"
        )


def _check_sampling(sampling: Sampling, model: ModelSettings, limits: Limits) -> None:
    for name, value, allowed, fits in _sampling_rules(sampling, model, limits):
        _require(fits, f"sampling.{name}", value, allowed)


def _sampling_rules(
    sampling: Sampling, model: ModelSettings, limits: Limits
) -> Iterator[tuple[str, object, str, bool]]:
    heat, top_p, top_k, seed = sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed
    most_tokens = min(limits.max_new_tokens, model.max_context_tokens - 1)
    most_heat, most_stops, most_logprobs = limits.max_temperature, limits.max_stop_strings, limits.max_logprobs
    yield "temperature", heat, f"0 to {most_heat:g}", math.isfinite(heat) and 0 <= heat <= most_heat
    yield "top_p", top_p, "above 0, up to 1", math.isfinite(top_p) and 0 < top_p <= 1
    yield "top_k", top_k, f"0 (off) to {MAX_TOP_K}", 0 <= top_k <= MAX_TOP_K
    yield "seed", seed, f"0 to {MAX_SEED}", seed is None or 0 <= seed <= MAX_SEED
    yield "max_tokens", sampling.max_tokens, f"1 to {most_tokens}", 1 <= sampling.max_tokens <= most_tokens
    yield "logprobs", sampling.logprobs, f"0 to {most_logprobs}", sampling.logprobs in (None, *range(most_logprobs + 1))
    yield "stop", len(sampling.stop), f"up to {most_stops} strings", len(sampling.stop) <= most_stops
    for number, text in enumerate(sampling.stop):
        fits = 1 <= len(text) <= limits.max_stop_chars
        yield f"stop[{number}]", text, f"1 to {limits.max_stop_chars} characters", fits


def _require(fits: bool, field: str, value: object, allowed: str) -> None:
    if not fits:
        raise InvalidRequest(f"{field}: {_shown(value)} (allowed: {allowed})")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."
