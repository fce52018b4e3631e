"""POST /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from json.encoder import encode_basestring_ascii as json_string
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from router.generation import CompletedSequence, CompleteOutput, PreparedRequest, TextDelta
from router.http.disconnect import CancelOnDisconnect
from router.http.errors import json_response
from router.http.logprobs import ChatLogprobs
from router.http.schemas import REFUSED_CHAT, ChatCompletionRequest, conversation, parse
from router.http.serving import Call, Serving, prompt_logprobs_object, stream_all
from router.http.sse import ChunkWriter, EventStream, first_chunk, usage_object
from router.http.strict_json import read_object


class ChatChoices:
    """Chat choices as JSON text."""

    def __init__(self, logprobs: ChatLogprobs | None, *, return_token_ids: bool) -> None:
        self._logprobs = logprobs
        self._return_token_ids = return_token_ids

    def opening(self, index: int) -> list[str]:
        """The chunk that names the role."""
        delta = '{"role":"assistant","content":""}'
        return [f'{{"index":{index},"delta":{delta},"logprobs":null,"finish_reason":null}}']

    def frame(self, index: int) -> tuple[str, str]:
        """Around the text of a plain delta."""
        return f'{{"index":{index},"delta":{{"content":', '},"logprobs":null,"finish_reason":null}'

    def text(self, delta: TextDelta) -> str:
        """Text with its details."""
        content = f'{{"content":{json_string(delta.text)}}}'
        return f'{{"index":{delta.index},"delta":{content},{self._details(delta)},"finish_reason":null}}'

    def finish(self, delta: TextDelta) -> str:
        """The end of a sequence; the tokens that no text followed, such as an end-of-sequence id, are here."""
        return (
            f'{{"index":{delta.index},"delta":{{}},{self._details(delta)},"finish_reason":"{delta.finish_reason}",'
            f'"stop_reason":{json.dumps(delta.stop_reason)}}}'
        )

    def logprobs_json(self, token_ids: list[int], logprobs: Any) -> str:
        """The `logprobs` object of a choice."""
        if self._logprobs is None or logprobs is None or not token_ids:
            return "null"
        return f'{{"content":{self._logprobs.content_json(token_ids, logprobs)},"refusal":null}}'

    def whole(self, sequence: CompletedSequence) -> dict[str, Any]:
        """A choice of an answer that is not streamed."""
        choice = {
            "index": sequence.index,
            "message": {"role": "assistant", "content": sequence.text, "refusal": None},
            "logprobs": json.loads(self.logprobs_json(sequence.token_ids, sequence.logprobs)),
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
        }
        return choice | ({"token_ids": sequence.token_ids} if self._return_token_ids else {})

    def _details(self, delta: TextDelta) -> str:
        token_ids = f',"token_ids":{json.dumps(delta.token_ids)}' if self._return_token_ids else ""
        return f'"logprobs":{self.logprobs_json(delta.token_ids, delta.logprobs)}{token_ids}'


class ChatRoute:
    """The handler; holds no state between calls but caches."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._logprobs_by_skip = {
            skip: ChatLogprobs(serving.spelling, skip_special_tokens=skip) for skip in (True, False)
        }

    async def handle(self, request: Request) -> Response:
        """Continues a conversation; raises PagemillError and ClientDisconnected for the exception handlers."""
        serving = self._serving
        body = parse(
            ChatCompletionRequest, await read_object(request, serving.settings.max_request_bytes), REFUSED_CHAT
        )
        include_usage = body.include_usage()
        call = Call.of(request, "chatcmpl-")
        generation = call.generation(body, body.output_limit(), body.num_logprobs())
        generation.messages = conversation(body.messages)
        generation.tools = body.template_tools()
        generation.add_generation_prompt = body.add_generation_prompt
        generation.chat_template_kwargs = body.chat_template_kwargs or {}
        choices = self._choices(body)
        async with CancelOnDisconnect(request.receive):
            prepared = await serving.pipeline.prepare(generation)
            if not body.stream:
                output = await serving.pipeline.complete(prepared)
                return json_response(self._answer(call, body, choices, output))
            writer = ChunkWriter(
                call.envelope("chat.completion.chunk", prepared.model),
                choices,
                detailed=bool(body.logprobs or body.return_token_ids),
                include_usage=include_usage,
            )
            chunks = self._chunks(prepared, writer)
            first = await first_chunk(chunks)
        return EventStream(first, chunks, call.request_id)

    def _choices(self, body: ChatCompletionRequest) -> ChatChoices:
        logprobs = self._logprobs_by_skip[body.skip_special_tokens is not False] if body.logprobs else None
        return ChatChoices(logprobs, return_token_ids=bool(body.return_token_ids))

    def _answer(
        self, call: Call, body: ChatCompletionRequest, choices: ChatChoices, output: CompleteOutput
    ) -> dict[str, Any]:
        answer = call.envelope("chat.completion", output.model) | {
            "choices": [choices.whole(sequence) for sequence in output.sequences],
            "usage": usage_object(output.usage),
        }
        if body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs_object(
                self._serving.spelling, output.prompt_token_ids, output.prompt_logprobs
            )
        if body.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        return answer

    async def _chunks(self, prepared: PreparedRequest, writer: ChunkWriter) -> AsyncGenerator[bytes]:
        async with aclosing(stream_all(self._serving.pipeline, [prepared])) as events:
            async for _, event in events:
                if chunk := writer.write(event):
                    yield chunk
        yield writer.close()
