"""Request bodies of the HTTP API: types are strict, unknown fields are ignored, unsupported ones are refused by name.

A field that Pagemill does not know can not have been meant for it, so clients of neighbouring servers work unchanged. A
known field that would change the answer, and that Pagemill does not have, must not be ignored: it is in a `REFUSED_`
table with the values at which it has no effect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from pagemill.errors import InvalidRequestError
from pagemill.sampling_params import SamplingParams

RequestT = TypeVar("RequestT", bound="RequestBody")

_REFUSED_GENERATION: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "bad_words": ([],),
    "logits_processors": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "lora_request": (),
    "allowed_token_ids": (),
}
REFUSED_COMPLETION: dict[str, tuple[Any, ...]] = _REFUSED_GENERATION | {
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "add_special_tokens": (True,),
}
REFUSED_CHAT: dict[str, tuple[Any, ...]] = _REFUSED_GENERATION | {
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "echo": (False,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "documents": ([],),
}


# What pydantic's kinds of fault ask for.
_WANTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def parse(model: type[RequestT], body: dict[str, Any], refused: Mapping[str, tuple[Any, ...]]) -> RequestT:
    """A validated body.

    Raises:
        InvalidRequestError: of the first fault, with the dotted path of its field.
    """
    for name, neutral in refused.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise InvalidRequestError(f"{name} is not supported", field=name)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_context=False)[0]) from None


def _refusal(fault: Any) -> InvalidRequestError:
    """One fault that pydantic found, in the words of `SamplingParams.validate`: "x is 5, must be a string"."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]).lstrip(".")
    kind, message = fault["type"], fault["msg"]
    if kind == "missing":
        text = f"{path} is required"
    elif kind == "too_short":
        text = f"{path} is empty"
    elif kind == "value_error":  # our own: it goes on behind the name
        text = f"{path} {message.removeprefix('Value error, ')}"
    elif kind in _WANTED or message.startswith("Input should be "):
        wanted = _WANTED.get(kind) or message.removeprefix("Input should be ")
        text = f"{path} is {shown(fault['input'])}, must be {wanted}"
    else:
        text = f"{path}: {message}"
    return InvalidRequestError(text, field=path)


def shown(value: Any) -> str:
    """A value for an error message, cut where it is long."""
    text = json.dumps(value) if isinstance(value, bool) or value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_prompt(value: Any) -> Any:
    if value in ([], [[]]):
        raise ValueError("is empty")
    if isinstance(value, list) and all(isinstance(item, list) for item in value) and [] in value:
        raise ValueError(f"is empty at position {value.index([])}")
    if isinstance(value, str) or (isinstance(value, list) and _is_prompt_list(value)):
        return value
    raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")


def _check_stop(value: Any) -> Any:
    is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
    if value is None or isinstance(value, str) or is_list:
        return value
    raise ValueError(f"is {shown(value)}, must be a string or a list of strings")


def _is_prompt_list(value: list[Any]) -> bool:
    return (
        all(isinstance(item, str) for item in value)
        or _are_token_ids(value)
        or all(isinstance(item, list) and item and _are_token_ids(item) for item in value)
    )


def _are_token_ids(value: list[Any]) -> bool:
    return all(type(item) is int and 0 <= item < 1 << 32 for item in value)


def _read_logit_bias(value: Any) -> Any:
    """OpenAI keys are strings of token ids."""
    if value is None or not isinstance(value, dict):
        return value
    for key in value:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise ValueError(f"holds {key[:40]!r}, which is not a token id")
    return {int(key): bias for key, bias in value.items()}


Prompt = Annotated[Any, BeforeValidator(_check_prompt)]
LogitBias = Annotated[dict[int, float] | None, BeforeValidator(_read_logit_bias)]
StopStrings = Annotated[str | list[str] | None, BeforeValidator(_check_stop)]


class RequestBody(BaseModel):
    """Base of all bodies: "1" is no number, 1.0 is no integer, null is the default."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class StreamOptions(RequestBody):
    """What a stream holds besides text."""

    include_usage: bool | None = None


class SamplingBody(RequestBody):
    """What every generating route takes. None is the default of `SamplingParams`."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: StopStrings = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: LogitBias = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, max_length=1024)
    return_token_ids: bool | None = None
    user: str | None = None

    def include_usage(self) -> bool:
        """The stream ends with a chunk of token counts.

        Raises:
            InvalidRequestError: stream options without a stream.
        """
        if self.stream_options is None:
            return False
        if not self.stream:
            raise InvalidRequestError("stream_options is only allowed with stream=true", field="stream_options")
        return bool(self.stream_options.include_usage)

    def sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Sampling parameters; None is their default."""
        given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if max_tokens is not None:
            given["max_tokens"] = max_tokens
        return SamplingParams(**given, logprobs=logprobs)


_SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "logit_bias",
    "prompt_logprobs",
)


class CompletionRequest(SamplingBody):
    """Body of POST /v1/completions."""

    prompt: Prompt
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one entry each."""
        value = self.prompt
        return [value] if isinstance(value, str) or type(value[0]) is int else value


def conversation(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for the pipeline, which checks them; a tool turn that brought nothing has empty content."""
    return [
        message | {"content": ""} if message.get("role") == "tool" and message.get("content") is None else message
        for message in messages
    ]


class ChatCompletionRequest(SamplingBody):
    """Body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    def num_logprobs(self) -> int | None:
        """Alternatives per token; 0 reports the chosen tokens alone, None nothing.

        Raises:
            InvalidRequestError: alternatives without log-probabilities.
        """
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs=true", field="top_logprobs")
        return None

    def output_limit(self) -> int | None:
        """max_completion_tokens, or its older name max_tokens."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def template_tools(self) -> list[dict[str, Any]] | None:
        """Tools that the template shows to the model; none where the client forbids their use."""
        return None if self.tool_choice == "none" or not self.tools else self.tools


class GenerateBody(SamplingBody):
    """Body of POST /generate: one prompt, one answer."""

    prompt: str
    max_tokens: int | None = None


class TokenizeRequest(RequestBody):
    """Body of POST /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check_one_source(self) -> Self:
        """Raises InvalidRequestError unless exactly one of prompt and messages is there."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("give either prompt or messages", field="prompt")
        return self


class DetokenizeRequest(RequestBody):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=2**32)]]
    skip_special_tokens: bool = False
