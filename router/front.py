"""The front: frames of clients to checked events, and prompts on worker threads.

``node.py`` owns the socket and the core; this module knows what a good message is and how long work stays off the event
loop. A bad message is answered with an error and harms nobody else.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from pathlib import Path

from kvkin.kv.errors import KvkinError, ProtocolError, RequestError
from kvkin.router.events import ClientAsked, ClientSentGarbage, PromptFailed, PromptReady, RememberAnswer
from kvkin.router.prompts import HashRoots, Prompt, PromptBuilder
from kvkin.router.settings import ModelSettings, RouterSettings
from kvkin.router.templates import ChatTemplate, read_special_tokens
from kvkin.router.validation import check_length, check_request, token_limit
from kvkin.transport.codec import client_requests, peek_id
from kvkin.transport.messages import Generate


class Front:
    """Reads and checks what clients send."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._codec = client_requests(settings.limits.max_request_bytes)

    def read(self, client: bytes, frames: list[bytes]) -> ClientAsked | ClientSentGarbage:
        """The event that a message of ``client`` is. Never raises."""
        if len(frames) != 1:
            problem = f"a message is one frame of MessagePack, not {len(frames)}"
            return ClientSentGarbage(client, "", ProtocolError.code, problem)
        try:
            message = self._codec.decode(frames[0])
            check_request(message, self._settings)
        except (ProtocolError, RequestError) as error:
            # of a frame that is over the limit nothing is read at all, not even its id
            readable = len(frames[0]) <= self._settings.limits.max_request_bytes
            return ClientSentGarbage(client, peek_id(frames[0]) if readable else "", error.code, str(error))
        return ClientAsked(client, message)


class PromptWorkers:
    """Prepares prompts on a few threads: rendering, tokenizing and hashing take milliseconds that the event loop has not."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._builders = _builders(settings)
        self._roots = {name: _roots(settings, model) for name, model in settings.models.items()}
        self._pool = concurrent.futures.ThreadPoolExecutor(settings.prompt_threads, thread_name_prefix="prompt")
        self._remembering: list[concurrent.futures.Future[None]] = []

    def prepare(self, request_id: str, request: Generate, report: Callable[[PromptReady | PromptFailed], None]) -> None:
        """Start preparing; ``report`` is called with the outcome, on a worker thread."""
        # the next turn must find the answer that it splices; these jobs stand before it in the same queue
        before = self._remembering = [future for future in self._remembering if not future.done()]
        self._pool.submit(self._prepare, request_id, request, before, report)

    def remember(self, command: RememberAnswer) -> None:
        """Keep an answer's ids for prompts that are prepared from now on."""
        unfinished = [future for future in self._remembering if not future.done()]
        # a new list: those that were handed to a worker must not change under its hands
        self._remembering = [*unfinished, self._pool.submit(self._remember, command)]

    def close(self) -> None:
        """Drop what is queued and wait for what runs."""
        self._pool.shutdown(cancel_futures=True)

    def build(self, request: Generate) -> Prompt:
        """The prompt of a checked request. Raises RequestError."""
        builder, roots = self._builders[request.model], self._roots[request.model]
        limit = token_limit(request, self._settings)
        if request.messages is not None:
            prompt = builder.chat(request.messages, roots, limit)
        elif request.prompt is not None:
            bos_id = self._settings.models[request.model].bos_id
            prompt = builder.text(request.prompt, roots, limit, bos_id)
        else:
            assert request.token_ids is not None, "the front checks that one of the three is given"
            prompt = builder.ids(request.token_ids, roots)
        check_length(len(prompt.token_ids), request, self._settings)
        return prompt

    def _prepare(
        self,
        request_id: str,
        request: Generate,
        before: list[concurrent.futures.Future[None]],
        report: Callable[[PromptReady | PromptFailed], None],
    ) -> None:
        concurrent.futures.wait(before)
        try:
            report(PromptReady(request_id, self.build(request)))
        except KvkinError as error:
            report(PromptFailed(request_id, error.code, str(error), error.retryable))
        except Exception as error:  # noqa: BLE001 - one request's strange prompt must not cost it its answer
            report(PromptFailed(request_id, KvkinError.code, f"the prompt could not be prepared: {error!r}"))

    def _remember(self, command: RememberAnswer) -> None:
        self._builders[command.model].remember(command.tail, command.answer, command.token_ids)


def _builders(settings: RouterSettings) -> dict[str, PromptBuilder]:
    """A builder for each model; models with the same tokenizer and template share one, and so its memory."""
    shared: dict[tuple[str, str | None], PromptBuilder] = {}
    found: dict[str, PromptBuilder] = {}
    for model in settings.models.values():
        key = (model.tokenizer_dir, model.chat_template)
        if key not in shared:
            shared[key] = _builder(model, settings.prompt_memory_bytes)
        found[model.name] = shared[key]
    return found


def _builder(model: ModelSettings, memory_bytes: int) -> PromptBuilder:
    folder = Path(model.tokenizer_dir)
    template = None
    if model.chat_template is not None:
        template = ChatTemplate(model.chat_template, read_special_tokens(folder))
    return PromptBuilder(folder / "tokenizer.json", template, memory_bytes)


def _roots(settings: RouterSettings, model: ModelSettings) -> HashRoots:
    family = settings.families[model.family]
    return HashRoots(
        family_digest=family.tokenizer_digest,
        member_digest=model.own_digest or family.tokenizer_digest,
        family_vocab=family.vocab_size,
        block_size=family.layout.block_size,
        scope=settings.scope,
    )
