"""POST /v1/completions, and POST /generate, its smallest form."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from json.encoder import encode_basestring_ascii as json_string
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pagemill.errors import InvalidRequestError
from pagemill.step import TokenLogprobs
from router.generation import (
    CompletedSequence,
    CompleteOutput,
    GenerationRequest,
    PreparedRequest,
    StreamEvent,
    TextDelta,
    Usage,
)
from router.http.disconnect import CancelOnDisconnect
from router.http.errors import json_response
from router.http.logprobs import CompletionLogprobs, join_blocks
from router.http.schemas import REFUSED_COMPLETION, CompletionRequest, GenerateBody, parse
from router.http.serving import Call, Serving, complete_all, prepare_all, prompt_logprobs_object, stream_all
from router.http.sse import ChunkWriter, EventStream, first_chunk, usage_object
from router.http.strict_json import read_object


@dataclass(slots=True)
class EchoedPrompt:
    """One prompt of the call: what is repeated before its output, and what is known of its tokens."""

    text: str
    token_ids: Sequence[int]
    logprobs: TokenLogprobs | None = None


class CompletionChoices:
    """Completion choices as JSON text. Belongs to one call: text offsets run on from chunk to chunk.

    Args:
        serving: for the tokens' spelling.
        body: what was asked for.
        prompts: in the order of the call; sequence i of prompt p has index p * n + i.
    """

    def __init__(self, serving: Serving, body: CompletionRequest, prompts: Sequence[EchoedPrompt]) -> None:
        self._spelling = serving.spelling
        self._n = body.n or 1
        self._echo = bool(body.echo)
        self._with_logprobs = body.logprobs is not None
        self._skip_special = body.skip_special_tokens is not False
        self._return_token_ids = bool(body.return_token_ids)
        self._prompts = prompts
        self._trackers: dict[int, CompletionLogprobs] = {}

    def opening(self, index: int) -> list[str]:
        """The echoed prompt, where it was asked for."""
        if not self._echo:
            return []
        text, block = self._prompts[index // self._n].text, self._echo_block(index)
        return [f'{{"index":{index},"text":{json_string(text)},"logprobs":{json.dumps(block)},"finish_reason":null}}']

    def frame(self, index: int) -> tuple[str, str]:
        """Around the text of a plain delta."""
        return f'{{"index":{index},"text":', ',"logprobs":null,"finish_reason":null}'

    def text(self, delta: TextDelta) -> str:
        """Text with its details."""
        return f'{{"index":{delta.index},"text":{json_string(delta.text)},{self._details(delta)},"finish_reason":null}}'

    def finish(self, delta: TextDelta) -> str:
        """The end of a sequence."""
        return (
            f'{{"index":{delta.index},"text":"",{self._details(delta)},"finish_reason":"{delta.finish_reason}",'
            f'"stop_reason":{json.dumps(delta.stop_reason)}}}'
        )

    def whole(self, index: int, sequence: CompletedSequence) -> dict[str, Any]:
        """A choice of an answer that is not streamed."""
        prompt = self._prompts[index // self._n]
        block = self._echo_block(index) if self._echo else None
        if self._with_logprobs:
            block = join_blocks(block, self._output_block(index, sequence.token_ids, sequence.logprobs, last=True))
        choice: dict[str, Any] = {
            "index": index,
            "text": prompt.text + sequence.text if self._echo else sequence.text,
            "logprobs": block,
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
        }
        if self._return_token_ids:
            choice |= {"token_ids": sequence.token_ids, "prompt_token_ids": list(prompt.token_ids)}
        return choice

    def _tracker(self, index: int) -> CompletionLogprobs:
        if index not in self._trackers:
            self._trackers[index] = CompletionLogprobs(self._spelling, skip_special_tokens=self._skip_special)
        return self._trackers[index]

    def _echo_block(self, index: int) -> dict[str, Any] | None:
        prompt = self._prompts[index // self._n]
        if not self._with_logprobs:
            return None
        return self._tracker(index).echo(prompt.text, prompt.token_ids, prompt.logprobs or TokenLogprobs())

    def _output_block(
        self, index: int, token_ids: list[int], logprobs: TokenLogprobs | None, *, last: bool
    ) -> dict[str, Any]:
        return self._tracker(index).output(token_ids, logprobs or TokenLogprobs(), last=last)

    def _details(self, delta: TextDelta) -> str:
        block = None
        if self._with_logprobs:
            last = delta.finish_reason is not None
            block = self._output_block(delta.index, delta.token_ids, delta.logprobs, last=last)
        token_ids = f',"token_ids":{json.dumps(delta.token_ids)}' if self._return_token_ids else ""
        return f'"logprobs":{json.dumps(block, allow_nan=False)}{token_ids}'


class CompletionRoute:
    """The handler of /v1/completions; holds no state between calls."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def handle(self, request: Request) -> Response:
        """Continues one or several prompts; raises PagemillError and ClientDisconnected for the exception handlers."""
        serving = self._serving
        body = parse(
            CompletionRequest, await read_object(request, serving.settings.max_request_bytes), REFUSED_COMPLETION
        )
        include_usage = body.include_usage()
        call = Call.of(request, "cmpl-")
        generations = [self._generation(call, body, prompt) for prompt in self._prompts(body)]
        async with CancelOnDisconnect(request.receive):
            prepared = await prepare_all(serving.pipeline, generations)
            prompts = await self._echoed(body, prepared)
            choices = CompletionChoices(serving, body, prompts)
            if not body.stream:
                outputs = await complete_all(serving.pipeline, prepared)
                return json_response(self._answer(call, body, choices, prompts, outputs))
            writer = ChunkWriter(
                call.envelope("text_completion", prepared[0].model),
                choices,
                detailed=bool(body.logprobs is not None or body.return_token_ids),
                include_usage=include_usage,
            )
            chunks = self._chunks(body, prepared, prompts, writer)
            first = await first_chunk(chunks)
        return EventStream(first, chunks, call.request_id)

    def _prompts(self, body: CompletionRequest) -> list[str | list[int]]:
        prompts = body.prompts()
        most = self._serving.settings.max_inflight_requests
        if len(prompts) > most:
            raise InvalidRequestError(f"prompt has {len(prompts)} prompts, at most {most} fit", field="prompt")
        return prompts

    def _generation(self, call: Call, body: CompletionRequest, prompt: str | list[int]) -> GenerationRequest:
        # An echo without output still needs one step for the prompt; its token is thrown away.
        max_tokens = 1 if _echoes_only(body) else body.max_tokens
        generation = call.generation(body, max_tokens, body.logprobs)
        if body.echo and body.logprobs is not None:
            generation.sampling.prompt_logprobs = max(body.logprobs, body.prompt_logprobs or 0)
        if isinstance(prompt, str):
            generation.prompt_text = prompt
        else:
            generation.prompt_token_ids = prompt
        return generation

    async def _echoed(self, body: CompletionRequest, prepared: Sequence[PreparedRequest]) -> list[EchoedPrompt]:
        return [EchoedPrompt(await self._prompt_text(body, each), each.prompt_token_ids) for each in prepared]

    async def _prompt_text(self, body: CompletionRequest, prepared: PreparedRequest) -> str:
        request = prepared.request
        if request.prompt_text is not None or not body.echo:
            return request.prompt_text or ""
        return await self._serving.pipeline.detokenize(
            prepared.prompt_token_ids, skip_special_tokens=body.skip_special_tokens is not False
        )

    def _answer(
        self,
        call: Call,
        body: CompletionRequest,
        choices: CompletionChoices,
        prompts: Sequence[EchoedPrompt],
        outputs: Sequence[CompleteOutput],
    ) -> dict[str, Any]:
        spelled, usage, n = [], Usage(), body.n or 1
        for at, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            prompt.logprobs = output.prompt_logprobs
            output = _without_output(output) if _echoes_only(body) else output
            for sequence in output.sequences:
                choice = choices.whole(at * n + sequence.index, sequence)
                if body.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = prompt_logprobs_object(
                        self._serving.spelling, output.prompt_token_ids, output.prompt_logprobs
                    )
                spelled.append(choice)
            usage.prompt_tokens += output.usage.prompt_tokens
            usage.cached_tokens += output.usage.cached_tokens
            usage.completion_tokens += output.usage.completion_tokens
        envelope = call.envelope("text_completion", outputs[0].model)
        return envelope | {"choices": spelled, "usage": usage_object(usage)}

    async def _chunks(
        self,
        body: CompletionRequest,
        prepared: Sequence[PreparedRequest],
        prompts: Sequence[EchoedPrompt],
        writer: ChunkWriter,
    ) -> AsyncGenerator[bytes]:
        n, echoes_only = body.n or 1, _echoes_only(body)
        async with aclosing(stream_all(self._serving.pipeline, prepared)) as events:
            async for at, event in events:
                if event.prompt_logprobs is not None:
                    prompts[at].logprobs = event.prompt_logprobs
                if chunk := writer.write(_without_text(event) if echoes_only else event, at * n):
                    yield chunk
        yield writer.close()


class GenerateRoute:
    """The handler of /generate: {"prompt": ...} to {"text": ...}."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def handle(self, request: Request) -> Response:
        """Continues one prompt; raises PagemillError and ClientDisconnected for the exception handlers."""
        serving = self._serving
        raw = await read_object(request, serving.settings.max_request_bytes)
        body = parse(GenerateBody, raw, REFUSED_COMPLETION)
        if (body.n or 1) != 1:
            raise InvalidRequestError("n must be 1 here; use /v1/completions for more", field="n")
        if body.stream:
            raise InvalidRequestError("stream is not supported here; use /v1/completions", field="stream")
        generation = Call.of(request, "gen-").generation(body, body.max_tokens, None)
        generation.prompt_text = body.prompt
        async with CancelOnDisconnect(request.receive):
            output = await serving.pipeline.complete(await serving.pipeline.prepare(generation))
        sequence = output.sequences[0]
        return json_response(
            {
                "text": sequence.text,
                "token_ids": sequence.token_ids,
                "finish_reason": sequence.finish_reason,
                "usage": usage_object(output.usage),
            }
        )


def _echoes_only(body: CompletionRequest) -> bool:
    return bool(body.echo) and body.max_tokens == 0


def _without_output(output: CompleteOutput) -> CompleteOutput:
    empty = [CompletedSequence(sequence.index, finish_reason="length") for sequence in output.sequences]
    return replace(output, sequences=empty, usage=replace(output.usage, completion_tokens=0))


def _without_text(event: StreamEvent) -> StreamEvent:
    deltas = [TextDelta(delta.index, finish_reason="length") for delta in event.deltas if delta.finish_reason]
    usage = event.usage and replace(event.usage, completion_tokens=0)
    return replace(event, deltas=deltas, usage=usage)
