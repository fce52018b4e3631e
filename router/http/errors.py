"""Errors as OpenAI clients know them: one JSON body, one status, `Retry-After` where a retry has a chance."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pagemill.errors import PagemillError

logger = logging.getLogger(__name__)

_RETRY_LATER = (429, 503)


class ClientDisconnected(Exception):
    """The client hung up; nobody reads an answer any more."""


def error_object(error: PagemillError) -> dict[str, Any]:
    """The body: message, type, param (the field at fault or null), code (or null)."""
    return {
        "error": {
            "message": error.message,
            "type": error.openai_type,
            "param": error.field or None,
            "code": error.openai_code,
        }
    }


def error_response(error: PagemillError) -> Response:
    """The whole answer. A refusal for load says after how many seconds to come back, at least 1."""
    headers = {}
    if error.http_status in _RETRY_LATER:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_ms / 1000)))
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(error_object(error), error.http_status, headers)


def unexpected_error(request_id: str) -> PagemillError:
    """What a client sees of a bug: where to find it in the log, nothing of its inside."""
    return PagemillError(f"internal error; the server's log has it under request id {request_id}")


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Strict JSON in ASCII: a non-finite number would raise rather than travel."""
    body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    return Response(body, status_code=status, headers=headers, media_type="application/json")


async def on_pagemill_error(request: Request, error: Exception) -> Response:
    """Exception handler of the application for deliberate errors."""
    assert isinstance(error, PagemillError)
    if error.http_status >= 500:
        logger.warning("%s %s failed: %s", request.method, request.url.path, error.message)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Exception handler for unknown routes and methods."""
    assert isinstance(error, HTTPException)
    body = {
        "message": f"{request.method} {request.url.path}: {error.detail}",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }
    return json_response({"error": body}, error.status_code, dict(error.headers or {}))


async def on_disconnect(request: Request, error: Exception) -> Response:
    """Exception handler for clients that hung up; the status is only for the log."""
    return Response(status_code=499)
