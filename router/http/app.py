"""The HTTP application: routes, exception handlers and what surrounds them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from pagemill import __version__
from pagemill.api_keys import ApiKeys
from pagemill.config import RouterSettings
from pagemill.errors import PagemillError
from router.http.chat_completions import ChatRoute
from router.http.completions import CompletionRoute, GenerateRoute
from router.http.errors import ClientDisconnected, on_disconnect, on_http_exception, on_pagemill_error
from router.http.health import HealthRoutes, OperatorRoutes
from router.http.logprobs import TokenSpelling
from router.http.middleware import ApiKeyMiddleware, RequestScopeMiddleware
from router.http.models import ModelRoutes, TokenizerRoutes
from router.http.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateBody,
    TokenizeRequest,
)
from router.http.serving import Serving
from router.pipeline import Pipeline

Handler = Callable[[Request], Awaitable[Response]]


def create_app(
    pipeline: Pipeline, settings: RouterSettings, registry: CollectorRegistry, spelling: TokenSpelling
) -> FastAPI:
    """The application of one router.

    Args:
        pipeline: started and stopped by the caller.
        settings: api_key and max_request_bytes are read here.
        registry: what /metrics shows; the application adds its own counter.
        spelling: bytes of the model's tokens, for log-probabilities.
    """
    # The pages for browsers load scripts from elsewhere, so there is only the description itself.
    app = FastAPI(title="Pagemill", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    serving = Serving(pipeline, settings, spelling)
    _add_api_routes(app, serving)
    _add_operator_routes(app, pipeline, registry)
    app.add_exception_handler(PagemillError, on_pagemill_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(ClientDisconnected, on_disconnect)
    app.add_middleware(ApiKeyMiddleware, keys=ApiKeys(settings.api_key))
    app.add_middleware(RequestScopeMiddleware, registry=registry)  # added last: the outermost
    return app


def _add_api_routes(app: FastAPI, serving: Serving) -> None:
    models, tokenizer = ModelRoutes(serving), TokenizerRoutes(serving)
    _post(app, "/v1/completions", CompletionRoute(serving).handle, CompletionRequest)
    _post(app, "/v1/chat/completions", ChatRoute(serving).handle, ChatCompletionRequest)
    _post(app, "/generate", GenerateRoute(serving).handle, GenerateBody)
    _post(app, "/tokenize", tokenizer.tokenize, TokenizeRequest)
    _post(app, "/detokenize", tokenizer.detokenize, DetokenizeRequest)
    _get(app, "/v1/models", models.list)
    _get(app, "/v1/models/{model_id:path}", models.get)


def _add_operator_routes(app: FastAPI, pipeline: Pipeline, registry: CollectorRegistry) -> None:
    health, operator = HealthRoutes(pipeline), OperatorRoutes(registry)
    _get(app, "/health", health.ready)
    _get(app, "/health/ready", health.ready)
    _get(app, "/health/live", health.live)
    _get(app, "/metrics", operator.metrics)
    _get(app, "/version", operator.version)


def _get(app: FastAPI, path: str, handler: Handler) -> None:
    app.add_api_route(path, handler, methods=["GET"], response_class=Response)


def _post(app: FastAPI, path: str, handler: Handler, body: type[BaseModel]) -> None:
    # Bodies are read and checked by the handlers, whose errors have the OpenAI form; the schema is for readers.
    schema: dict[str, Any] = body.model_json_schema(ref_template="#/components/schemas/{model}")
    content = {"application/json": {"schema": schema}}
    app.add_api_route(
        path,
        handler,
        methods=["POST"],
        response_class=Response,
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )
