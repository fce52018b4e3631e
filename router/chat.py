"""Chat templates in a sandboxed Jinja, with the names and rules that templates of Hugging Face models expect.

A template is code from the model's author, messages are data from strangers: neither can reach the process, and
neither's failure shows more than the template's own message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagemill.errors import ConfigError, InvalidRequestError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_MESSAGES = 4096
MAX_RENDERED_CHARS = 16 << 20


class _TemplateRefusal(jinja2.TemplateError):
    """What a template raises through raise_exception."""


class _GenerationTag(Extension):
    """`{% generation %}` marks what an assistant said, for training; rendering is that of its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> NoReturn:
    raise _TemplateRefusal(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(fmt: str) -> str:
    return datetime.now().strftime(fmt)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatRenderer:
    """The compiled chat templates of one model.

    Args:
        templates: source by name; "default" is used, "tool_use" where a request has tools and the model has one.
        special_tokens: bos_token, eos_token, ... as the templates see them.

    Raises:
        ConfigError: a template is no valid Jinja.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self._special_tokens = dict(special_tokens)
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in templates.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise ConfigError(
                    f"chat template {name!r} is no valid Jinja: {error.message} (line {error.lineno})",
                    field="chat_template",
                ) from error

    def __bool__(self) -> bool:
        return bool(self._templates)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as one text, special tokens by their names; tokenize it without adding more.

        Raises:
            InvalidRequestError: a message is malformed, the template refuses the conversation, or there is no template.
        """
        if not self._templates:
            raise InvalidRequestError(
                "no chat template is configured for this model; use completions, or give the router a chat template",
                field="messages",
            )
        conversation = normalize_messages(messages)
        template = self._pick(tools)
        variables: dict[str, Any] = {
            **self._special_tokens,
            **(template_kwargs or {}),
            "messages": conversation,
            "tools": tools or None,
            "documents": (template_kwargs or {}).get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = template.render(variables)
        except _TemplateRefusal as refusal:
            raise InvalidRequestError(f"the chat template refuses this: {refusal}", field="messages") from None
        except Exception as error:  # a template is foreign code: it may raise anything
            raise InvalidRequestError(
                f"the chat template cannot render these messages: {_one_line(error)}", field="messages"
            ) from None
        if len(text) > MAX_RENDERED_CHARS:
            raise InvalidRequestError(f"the rendered chat has {len(text)} characters, too many", field="messages")
        return text

    def _pick(self, tools: list[dict[str, Any]] | None) -> jinja2.Template:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates.get("default") or next(iter(self._templates.values()))


def _one_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def normalize_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages as templates expect them.

    Absent content becomes the empty text, text parts are joined by newlines, arguments of tool calls that are a JSON
    object are parsed. An empty text is a legal content.

    Raises:
        InvalidRequestError: `field` is the path of what is wrong.
    """
    if not isinstance(messages, list):
        raise InvalidRequestError("messages must be a list", field="messages")
    if not messages:
        raise InvalidRequestError("messages is empty: at least one message is needed", field="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(f"messages has {len(messages)} entries, at most {MAX_MESSAGES}", field="messages")
    return [_normalize_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _normalize_message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequestError(f"{path} must be an object with role and content", field=path)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequestError(f"{path}.role must be one of {', '.join(ROLES)}", field=f"{path}.role")
    normalized = {key: value for key, value in message.items() if value is not None}
    tool_calls = message.get("tool_calls")
    if tool_calls:
        normalized["tool_calls"] = _normalize_tool_calls(tool_calls, f"{path}.tool_calls")
    else:
        normalized.pop("tool_calls", None)
    content = message.get("content")
    if content is None and not tool_calls and role != "assistant":
        raise InvalidRequestError(f"{path}.content is missing", field=f"{path}.content")
    normalized["content"] = _normalize_content(content, f"{path}.content")
    return normalized


def _normalize_content(content: Any, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{path} must be a string or a list of text parts", field=path)
    texts: list[str] = []
    for i, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
            continue
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise InvalidRequestError(
            f"{path}[{i}] must be a text part, not {str(kind)[:40]}: this model reads text only", field=f"{path}[{i}]"
        )
    return "\n".join(texts)


def _normalize_tool_calls(tool_calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(tool_calls, list):
        raise InvalidRequestError(f"{path} must be a list", field=path)
    normalized: list[dict[str, Any]] = []
    for i, call in enumerate(tool_calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(f"{path}[{i}].function.name must be a string", field=f"{path}[{i}].function.name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments)
            except ValueError:
                parsed = None
            # Templates write arguments with tojson: a string would come out quoted twice.
            arguments = parsed if isinstance(parsed, dict) else arguments
        normalized.append({**call, "function": {**function, "arguments": arguments}})
    return normalized


def configured_templates(setting: str, model_templates: Mapping[str, str]) -> dict[str, str]:
    """The templates in force: the setting's, a file or the text itself, else the model's own.

    Raises:
        ConfigError: the setting names a file that is not there.
    """
    if not setting:
        return dict(model_templates)
    if "{" in setting or "\n" in setting:
        return {"default": setting}
    path = Path(setting).expanduser()
    if not path.is_file():
        raise ConfigError(f"chat template file {setting!r} does not exist", field="chat_template")
    return {"default": path.read_text(encoding="utf-8")}
