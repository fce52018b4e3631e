"""Request bodies: bounded in size, strict JSON, an object at the top."""

from __future__ import annotations

import json
import math
from typing import Any

from starlette.requests import Request

from pagemill.errors import InvalidRequestError, RequestTooLargeError


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        RequestTooLargeError: more than `max_bytes`; no more than that is ever held.
        InvalidRequestError: no JSON, no object, or a number that JSON does not have (NaN, Infinity), named by its path.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
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
        value = json.loads(raw, parse_constant=remember_constant)
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    except UnicodeDecodeError:
        raise InvalidRequestError("the body is not UTF-8") from None
    except ValueError as error:
        where = f" at line {error.lineno} column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InvalidRequestError(f"the body is not valid JSON{where}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    if constants:
        path = _path_of_nan(value) or ""
        raise InvalidRequestError(f"{path} is {constants[0]}, which is not a JSON number", field=path)
    return value


def _too_large(max_bytes: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"the request body is larger than {max_bytes} bytes")


def _path_of_nan(value: Any, path: str = "") -> str | None:
    if isinstance(value, float) and math.isnan(value):
        return path
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        items = [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{path}[{at}]", item) for at, item in enumerate(value)]
    return next((found for where, item in items if (found := _path_of_nan(item, where)) is not None), None)
