"""GET /v1/models, and the tokenizer over HTTP."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pagemill.errors import InvalidRequestError, ModelNotFoundError
from pagemill.sampling_params import SamplingParams
from router.generation import GenerationRequest, ModelCard
from router.http.errors import json_response
from router.http.schemas import DetokenizeRequest, TokenizeRequest, conversation, parse
from router.http.serving import Serving
from router.http.strict_json import read_object


class ModelRoutes:
    """Served models."""

    def __init__(self, serving: Serving) -> None:
        self._pipeline = serving.pipeline

    async def list(self, request: Request) -> Response:
        """All served names."""
        return json_response({"object": "list", "data": [_model_object(card) for card in self._pipeline.models()]})

    async def get(self, request: Request) -> Response:
        """One served name; ids may hold slashes."""
        wanted = request.path_params["model_id"]
        for card in self._pipeline.models():
            if card.id == wanted:
                return json_response(_model_object(card))
        raise ModelNotFoundError(f"model {wanted[:200]!r} is not served here", field="model")


class TokenizerRoutes:
    """Text or conversations to token ids, and back."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text, or of a conversation as the chat template renders it."""
        body = parse(TokenizeRequest, await self._read(request), {}).check_one_source()
        pipeline, model = self._serving.pipeline, body.model or ""
        if body.messages is not None:
            generation = GenerationRequest(
                SamplingParams(),
                model=model,
                messages=conversation(body.messages),
                tools=body.tools or None,
                add_generation_prompt=body.add_generation_prompt,
                chat_template_kwargs=body.chat_template_kwargs or {},
            )
            token_ids = await pipeline.tokenize_chat(generation)
        else:
            token_ids = await pipeline.tokenize(
                body.prompt or "", model=model, add_special_tokens=body.add_special_tokens
            )
        answer = {"tokens": token_ids, "count": len(token_ids), "max_model_len": pipeline.max_model_len}
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids."""
        body = parse(DetokenizeRequest, await self._read(request), {})
        try:
            text = await self._serving.pipeline.detokenize(
                body.tokens, model=body.model or "", skip_special_tokens=body.skip_special_tokens
            )
        except InvalidRequestError as error:
            raise InvalidRequestError(error.message, field="tokens") from error
        return json_response({"prompt": text})

    async def _read(self, request: Request) -> dict[str, Any]:
        return await read_object(request, self._serving.settings.max_request_bytes)


def _model_object(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "pagemill",
        "max_model_len": card.max_model_len,
    }
