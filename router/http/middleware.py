"""What surrounds every route: request id, log line, counter, API key. Plain ASGI, so that streams pass untouched."""

from __future__ import annotations

import logging
import re
import time
import uuid

from prometheus_client import CollectorRegistry, Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagemill.api_keys import ApiKeys
from pagemill.errors import UnauthenticatedError
from router.http.errors import error_response, unexpected_error

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
_QUIET_PATHS = OPEN_PATHS | {"/metrics"}
# Key of scope["state"]: sends messages of type http.response.body once the response has started.
SEND_BODY = "send_body"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestScopeMiddleware:
    """Names each request, answers with the name, logs one line, and hides the inside of bugs.

    The name is the client's X-Request-Id where it is 1 to 128 visible ASCII characters, else a drawn one. It need not
    be unique and identifies nothing inside the server.
    """

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._requests = Counter(
            "pagemill:http_requests", "HTTP requests by route and status", ["route", "status"], registry=registry
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        # What follows the head of a response may pass by all that looks at heads alone, here and further inside: a
        # stream sends hundreds of bodies.
        state[SEND_BODY] = send
        header = (b"x-request-id", request_id.encode())
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        started_ns = time.monotonic_ns()
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s failed", request_id)
            if status:
                raise  # the answer has begun: only a cut connection can tell the client
            await error_response(unexpected_error(request_id))(scope, receive, send_with_id)
        finally:
            self._record(scope, status, request_id, time.monotonic_ns() - started_ns)

    def _record(self, scope: Scope, status: int, request_id: str, duration_ns: int) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        self._requests.labels(route, str(status)).inc()
        # The raw path is still percent-encoded, so that it can not forge lines of the log.
        path = scope.get("raw_path", b"").decode("latin-1")
        level = logging.DEBUG if scope["path"] in _QUIET_PATHS else logging.INFO
        logger.log(level, "%s %s %d %.1f ms %s", scope["method"], path, status, duration_ns / 1e6, request_id)


class ApiKeyMiddleware:
    """Refuses everything but health without a key, whether a route exists or not, and notes whose key it was."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI call."""
        if scope["type"] in ("http", "websocket") and scope["path"] not in OPEN_PATHS:
            try:
                scope.setdefault("state", {})["tenant"] = self._keys.tenant(_header(scope, b"authorization"))
            except UnauthenticatedError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _header(scope: Scope, wanted: bytes) -> str:
    """The first header of that name, "" where there is none."""
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), "")


def _request_id(scope: Scope) -> str:
    given = _header(scope, b"x-request-id")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
