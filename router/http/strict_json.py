"""Request bodies: bounded in size, strict JSON, an object at the top."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from starlette.requests import Request

from pagemill.errors import InvalidRequestError, RequestTooLargeError


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        RequestTooLargeError: more than `max_bytes`; no more than that is ever held.
        InvalidRequestError: no JSON, no object, a number that JSON does not have (NaN, Infinity),
            or half a surrogate pair; the last two are named by their path.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    # What is not read here is thrown away by the server as it arrives: closing the connection instead would reset it
    # under a client that still sends, which then never sees the refusal.
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
    return parse_object(b"".join(parts))


def parse_object(raw: bytes) -> dict[str, Any]:
    """As `read_object`, of bytes at hand."""
    constants: list[str] = []

    def remember_constant(name: str) -> float:
        constants.append(name)
        return math.nan

    try:
        text = raw.decode()
        value = json.loads(text, parse_constant=remember_constant)
        if not isinstance(value, dict):
            raise InvalidRequestError("the body must be a JSON object")
        if constants:
            _refuse_leaf(value, _is_nan, f"is {constants[0]}, which is not a JSON number")
        if "\\ud" in text or "\\uD" in text:  # only an escape can bring half of a surrogate pair
            _refuse_leaf(value, _is_broken_text, "is no valid Unicode text")
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    except UnicodeDecodeError:
        raise InvalidRequestError("the body is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON at line {error.lineno} column {error.colno}") from None
    except ValueError as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError("the body holds a number with too many digits") from None
    return value


def _too_large(max_bytes: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"the request body is larger than {max_bytes} bytes")


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _is_broken_text(value: Any) -> bool:
    return isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value)


def _refuse_leaf(value: Any, is_bad: Callable[[Any], bool], complaint: str) -> None:
    path = _path_of(value, is_bad)
    if path is not None:
        raise InvalidRequestError(f"{path} {complaint}", field=path)


def _path_of(value: Any, is_bad: Callable[[Any], bool], path: str = "") -> str | None:
    if is_bad(value):
        return path
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        items = [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{path}[{at}]", item) for at, item in enumerate(value)]
    return next((found for where, item in items if (found := _path_of(item, is_bad, where)) is not None), None)
