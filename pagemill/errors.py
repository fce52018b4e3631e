"""Every error that Pagemill raises on purpose, with its gRPC code and HTTP status.

Services raise these; the edges (gRPC servicers, HTTP handlers, command line) translate them once. Anything else that
reaches an edge is a bug and becomes INTERNAL / 500 without its details.
"""

from __future__ import annotations

from typing import ClassVar


class PagemillError(Exception):
    """Base of all deliberate errors.

    Args:
        message: one sentence for a person.
        field: dotted path of the request field or setting at fault, empty where none is.
        retry_after_ms: when a retry has a chance, 0 where unknown.
    """

    grpc_code: ClassVar[int] = 13  # INTERNAL
    http_status: ClassVar[int] = 500
    openai_type: ClassVar[str] = "internal_error"
    openai_code: ClassVar[str | None] = None

    def __init__(self, message: str, *, field: str = "", retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms


class InvalidRequestError(PagemillError, ValueError):
    """The request can never succeed as it is; `field` names the culprit."""

    grpc_code = 3  # INVALID_ARGUMENT
    http_status = 400
    openai_type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """Prompt, or prompt plus max_tokens, exceeds the model's context length; the message has both numbers."""

    openai_code = "context_length_exceeded"


class ModelNotFoundError(PagemillError):
    """No such served model."""

    grpc_code = 5  # NOT_FOUND
    http_status = 404
    openai_type = "invalid_request_error"
    openai_code = "model_not_found"


class DuplicateRequestError(PagemillError):
    """A request with this id is running already."""

    grpc_code = 6  # ALREADY_EXISTS
    http_status = 409
    openai_type = "invalid_request_error"


class UnauthenticatedError(PagemillError):
    """Missing or wrong API key."""

    grpc_code = 16  # UNAUTHENTICATED
    http_status = 401
    openai_type = "invalid_request_error"
    openai_code = "invalid_api_key"


class RequestTooLargeError(PagemillError):
    """The request's body is over the limit."""

    grpc_code = 3  # INVALID_ARGUMENT: unlike RESOURCE_EXHAUSTED, nothing suggests a retry
    http_status = 413
    openai_type = "invalid_request_error"


class OverloadedError(PagemillError):
    """A bounded queue is full; retry later."""

    grpc_code = 8  # RESOURCE_EXHAUSTED
    http_status = 429
    openai_type = "rate_limit_error"
    openai_code = "overloaded"


class SlowConsumerError(PagemillError):
    """The client read its stream too slowly for the bounded buffer."""

    grpc_code = 8  # RESOURCE_EXHAUSTED
    http_status = 429
    openai_type = "rate_limit_error"
    openai_code = "slow_consumer"


class UnavailableError(PagemillError):
    """A peer that is needed is away or draining; a retry elsewhere has a chance."""

    grpc_code = 14  # UNAVAILABLE
    http_status = 503
    openai_type = "service_unavailable_error"


class DeadlineError(PagemillError):
    """The request's deadline passed."""

    grpc_code = 4  # DEADLINE_EXCEEDED
    http_status = 504
    openai_type = "timeout_error"


class AbortedError(PagemillError):
    """The request was ended by its client or an operator."""

    grpc_code = 10  # ABORTED
    http_status = 499
    openai_type = "aborted"


class DesyncError(PagemillError):
    """Epoch or step number is not the expected one; both sides must start over."""

    grpc_code = 9  # FAILED_PRECONDITION


class NumericalError(PagemillError):
    """The model produced NaN or infinite logits for this request."""

    openai_code = "numerical_error"


class ConfigError(PagemillError, ValueError):
    """A setting is unknown, malformed or contradicts another; a start ends with exit code 2."""

    grpc_code = 3  # INVALID_ARGUMENT


class ModelLoadError(PagemillError):
    """The model's files are missing, broken or of an unsupported kind; a start ends with exit code 1."""

    grpc_code = 9  # FAILED_PRECONDITION


class NativeLibraryError(PagemillError, ImportError):
    """The compiled kernels are missing or do not load; the message names the file and the command that builds it."""


def _subclasses(cls: type[PagemillError]) -> list[type[PagemillError]]:
    return [cls, *(s for c in cls.__subclasses__() for s in _subclasses(c))]


def from_grpc(code: int, message: str, *, field: str = "", retry_after_ms: int = 0) -> PagemillError:
    """The error that a peer put in-band or in a status.

    Where several classes share a code, the most general one is taken, so that HTTP statuses stay right.
    """
    preferred: dict[int, type[PagemillError]] = {3: InvalidRequestError, 8: OverloadedError, 9: DesyncError}
    cls = preferred.get(code) or next((c for c in _subclasses(PagemillError) if c.grpc_code == code), PagemillError)
    if cls is InvalidRequestError and "context length" in message:
        cls = ContextLengthError
    elif cls is PagemillError and "NaN" in message:
        cls = NumericalError
    return cls(message, field=field, retry_after_ms=retry_after_ms)
