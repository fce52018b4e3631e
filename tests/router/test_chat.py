from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from pagemill.errors import ConfigError, InvalidRequestError
from router.chat import ChatRenderer, configured_templates
from router.tokenizer import Tokenizer

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}\n\n{{ m['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n\n{% endif %}"
)
GEMMA = """
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- message['role'] + ': ' + message['content'] + '\\n' }}
{%- endfor %}
"""
TOOLS = """
{%- for tool in tools or [] %}{{ tool | tojson(indent=2) }}
{% endfor %}
{%- for m in messages %}
    {%- if m.tool_calls is defined and m.tool_calls %}
        {%- for call in m.tool_calls %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}
    {%- elif m.role == 'skip' %}{% continue %}
    {%- else %}{% generation %}{{ m.content }}{% endgeneration %}
    {%- endif %}
{% endfor %}
"""
USER = {"role": "user", "content": "Hi <b>&"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
TOOL_TURNS: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "42"},
]


def renderer(template: str, **special: str) -> ChatRenderer:
    return ChatRenderer({"default": template}, special)


@pytest.mark.parametrize("template", [LLAMA3, TOOLS])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_text_equals_that_of_transformers(template: str, add_generation_prompt: bool) -> None:
    conversation = [{"role": "system", "content": " sys "}, USER, {"role": "assistant", "content": "ok\n"}]
    tools = [{"type": "function", "function": {"name": "f", "description": "é"}}]
    expected, _ = render_jinja_template(
        conversations=[conversation],
        tools=tools,
        chat_template=template,
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
    )
    got = renderer(template, bos_token="<s>").render(
        conversation, tools=tools, add_generation_prompt=add_generation_prompt
    )
    assert got == expected[0]


def test_the_demo_models_template_equals_that_of_transformers(tokenizer: Tokenizer) -> None:
    template = tokenizer.chat_templates["default"]
    expected, _ = render_jinja_template(conversations=[[USER]], chat_template=template, add_generation_prompt=True)
    assert ChatRenderer(tokenizer.chat_templates, tokenizer.special_tokens).render([USER]) == expected[0]


def test_CT01_the_rendered_text_has_one_bos(tokenizer: Tokenizer) -> None:
    # A tokenizer that adds BOS to texts, and a template that writes it.
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer._backend, bos_token="<|im_start|>")
    text = renderer(LLAMA3, bos_token="<|im_start|>").render([USER])
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(1) == 1
    expected = fast.apply_chat_template([USER], chat_template=LLAMA3, add_generation_prompt=True, return_dict=False)
    assert ids == expected


def test_CT02_a_refusal_shows_the_templates_own_message_only() -> None:
    gemma = renderer(GEMMA)
    system = [{"role": "system", "content": "be nice"}, USER]
    for messages, message in [(system, "System role not supported"), ([USER, USER], "roles must alternate")]:
        with pytest.raises(InvalidRequestError, match=message) as error:
            gemma.render(messages)
        assert error.value.field == "messages"
        assert "{%" not in error.value.message and "Traceback" not in error.value.message
    assert gemma.render([USER]) == "user: Hi <b>&\n"


def test_CT05_without_a_template_the_error_says_so_and_a_configured_one_is_used(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no chat template is configured"):
        ChatRenderer({}, {}).render([USER])
    file = tmp_path / "chat.jinja"
    file.write_text("file: {{ messages[0].content }}")
    assert ChatRenderer(configured_templates(str(file), {"default": "own"}), {}).render([USER]) == "file: Hi <b>&"
    text = "text: {{ messages[0].content }}"
    assert ChatRenderer(configured_templates(text, {"default": "own"}), {}).render([USER]) == "text: Hi <b>&"
    assert configured_templates("", {"default": "own"}) == {"default": "own"}
    with pytest.raises(ConfigError, match=r"nowhere\.jinja.*does not exist"):
        configured_templates("nowhere.jinja", {})


def test_CT06_tool_turns_with_null_content_render(tokenizer: Tokenizer) -> None:
    assert 'f({"x": "é"})' in renderer(TOOLS).render(TOOL_TURNS)
    demo = ChatRenderer(tokenizer.chat_templates, tokenizer.special_tokens).render(TOOL_TURNS)
    assert "<|im_start|>tool\n42<|im_end|>" in demo


def test_CT06_empty_messages_are_refused_and_empty_content_is_a_text() -> None:
    with pytest.raises(InvalidRequestError, match="messages is empty") as error:
        renderer(LLAMA3).render([])
    assert error.value.field == "messages"
    assert "user\n\n<|eot|>" in renderer(LLAMA3, bos_token="").render([{"role": "user", "content": ""}])


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("hi", "messages[1]"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "pirate", "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[1].content[0]"),
        ({"role": "assistant", "tool_calls": {}, "content": {}}, "messages[1].content"),
        ({"role": "assistant", "tool_calls": "x"}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[1].tool_calls[0].function.name"),
    ],
)
def test_malformed_messages_are_named_by_their_path(message: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        renderer(LLAMA3).render([USER, message])
    assert error.value.field == field


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert renderer("{{ messages[0].content }}").render([{"role": "user", "content": parts}]) == "a\nb"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ undefined_function() }}",
        "{{ messages[0].content + 1 }}",
        "{% for i in range(10**9) %}x{% endfor %}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_an_error_of_one_line(template: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        renderer(template).render([USER])
    assert "\n" not in error.value.message


def test_a_template_that_is_no_jinja_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"no valid Jinja.*line 1"):
        renderer("{% for %}")


def test_the_tool_template_is_used_for_requests_with_tools() -> None:
    both = ChatRenderer({"default": "plain", "tool_use": "tools"}, {})
    assert (both.render([USER]), both.render([USER], tools=[{}])) == ("plain", "tools")
