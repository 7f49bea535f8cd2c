"""Every error that kvkin raises on purpose, in one tree.

::

    KvkinError                     code + retryable, what a client sees
    ├── ConfigError                a configuration or checkpoint that cannot be used (names the key, says what is allowed)
    ├── RequestError               the client's fault, never retryable
    │   ├── InvalidRequest         a field is wrong
    │   ├── UnknownModel           no such model in this cluster
    │   ├── PromptTooLong          prompt + max_tokens exceed the model's context
    │   └── DuplicateRequest       the client reuses the id of a running request
    ├── Cancelled                  the client or an operator ended the request
    ├── DeadlineExceeded           the request's own deadline, or the cluster's limit, passed
    ├── CapacityError              no room now (queue, blocks, nodes); retryable
    │   └── NodeUnavailable        the node that serves the model is not there
    ├── SourceError                a KV source cannot serve: costs a private prefill, never the request
    │   ├── SourceLost             peer dead or disconnected
    │   ├── SourceTimeout          a deadline passed (frozen peer, slow link)
    │   ├── SourceRefused          handshake or layout or lineage does not match, or the blocks are gone
    │   └── LeaseExpired           the data came too late to be trusted
    ├── LocalTransportError        this side's fault: registration, arena, address
    └── ProtocolError              a message that cannot be read or comes out of order

``SourceError`` is remote, ``LocalTransportError`` is ours; backends map every library error to one of them.
"""

from __future__ import annotations

from typing import ClassVar


class KvkinError(Exception):
    """Base of all. ``code`` is stable and goes over the wire; ``retryable`` says whether the same request may succeed."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False


class ConfigError(KvkinError):
    """A configuration that cannot be used. ``key`` is the path of the key, ``allowed`` what would be accepted."""

    code = "config"

    def __init__(self, key: str, problem: str, allowed: str = "") -> None:
        self.key, self.problem, self.allowed = key, problem, allowed
        super().__init__(f"{key}: {problem}" + (f" (allowed: {allowed})" if allowed else ""))


class RequestError(KvkinError):
    """The request cannot be served as it is, now or later."""

    code = "invalid_request"


class InvalidRequest(RequestError):
    """A field of the request is wrong; the message names it and says what is allowed."""


class UnknownModel(RequestError):
    code = "unknown_model"


class PromptTooLong(RequestError):
    code = "prompt_too_long"


class DuplicateRequest(RequestError):
    code = "duplicate_request"


class Cancelled(KvkinError):
    code = "cancelled"


class DeadlineExceeded(KvkinError):
    code = "deadline"
    retryable = True


class CapacityError(KvkinError):
    code = "capacity"
    retryable = True


class NodeUnavailable(CapacityError):
    code = "node_unavailable"


class SourceError(KvkinError):
    """A holder of KV failed us. The consumer falls back to a private prefill."""

    code = "source"
    retryable = True


class SourceLost(SourceError):
    code = "source_lost"


class SourceTimeout(SourceError):
    code = "source_timeout"


class SourceRefused(SourceError):
    code = "source_refused"


class LeaseExpired(SourceError):
    code = "lease_expired"


class LocalTransportError(KvkinError):
    code = "transport_local"


class ProtocolError(KvkinError):
    code = "protocol"
