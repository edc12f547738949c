"""Chat templates: content forms, tools, errors, and the sandbox."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from octavo.chat_template import ChatTemplate, compile_template
from octavo.errors import RequestError

CHATML = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '</>' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
)
SYSTEM_IN_USER = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}<{{ m.role }}>{{ (first if loop.first else '') + m.content | trim }}</>{% endfor %}"
)
PARTS = (
    "{%- for m in messages %}<{{ m.role }}>"
    "{%- if m.content is string %}{{ m.content }}"
    "{%- else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}[{{ part.type }}]{% endif %}{% endfor %}{% endif %}</>"
    "{%- endfor %}"
)
PARTS_ONLY = "{% for m in messages %}{% for part in m['content'] %}{{ part['text'] }};{% endfor %}{% endfor %}"


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def render(source: str, messages: Any, **options: Any) -> str:
    return ChatTemplate(source, special_tokens={"bos_token": "<s>"}).render(messages, **options)


def test_what_a_template_raises_is_the_requests_error_with_its_text() -> None:
    with pytest.raises(RequestError, match="System role not supported") as caught:
        render(NO_SYSTEM, [{"role": "system", "content": "be kind"}, user("hi")])
    assert caught.value.field == "messages"


def test_a_template_may_fold_the_system_role_into_the_user_turn() -> None:
    assert render(SYSTEM_IN_USER, [{"role": "system", "content": "be kind"}, user("hi ")]) == "<user>be kind\n\nhi</>"


@pytest.mark.parametrize("assistant", [{"content": None}, {}], ids=["null", "missing"])
@pytest.mark.parametrize("source", [CHATML, PARTS])
def test_assistant_with_tool_calls_needs_no_content(source: str, assistant: dict[str, Any]) -> None:
    call = {"type": "function", "id": "c1", "function": {"name": "answer", "arguments": "{}"}}
    messages = [
        user("q"),
        {"role": "assistant", "tool_calls": [call], **assistant},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    assert render(source, messages).startswith("<user>q</><assistant></><tool>42</>")


def test_template_that_compares_content_with_none_gets_none() -> None:
    source = (
        "{% for m in messages %}{% if m['content'] is none %}[calls]{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    assert render(source, [user("q"), {"role": "assistant", "content": None}]) == "q[calls]"


def test_user_content_must_be_there() -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]\.content is missing"):
        render(CHATML, [user(None)])


@pytest.mark.parametrize("source", [CHATML, PARTS, PARTS_ONLY, SYSTEM_IN_USER])
@pytest.mark.parametrize("continued", [False, True])
def test_a_single_text_part_is_the_same_as_a_string(source: str, continued: bool) -> None:
    forms = [
        [user("hi"), {"role": "assistant", "content": content}]
        for content in ("Sure,", [{"type": "text", "text": "Sure,"}], [{"type": "output_text", "text": "Sure,"}])
    ]
    prompts = {render(source, messages, continue_final_message=continued) for messages in forms}
    assert len(prompts) == 1
    assert "Sure," in prompts.pop()


def test_several_parts_are_joined_by_a_newline_unless_the_template_iterates() -> None:
    messages = [user([{"type": "text", "text": "a"}, "b"])]
    assert render(CHATML, messages, add_generation_prompt=False) == "<user>a\nb</>"
    assert render(PARTS, messages) == "<user>ab</>"
    assert render(PARTS_ONLY, messages) == "a;b;"


def test_parts_that_are_not_text_reach_only_templates_that_iterate() -> None:
    messages = [user([{"type": "image", "url": "x"}, {"type": "text", "text": "a"}])]
    assert render(PARTS, messages) == "<user>[image]a</>"
    with pytest.raises(RequestError, match="no 'image' parts"):
        render(CHATML, messages)


def test_content_that_goes_through_a_variable_counts_as_iterated() -> None:
    source = "{% for m in messages %}{% set c = m.content %}{% for p in c | list %}{{ p.text }}{% endfor %}{% endfor %}"
    assert compile_template(source).takes_parts
    assert not compile_template(CHATML).takes_parts


def test_continued_message_ends_behind_its_content() -> None:
    messages = [user("hi"), {"role": "assistant", "content": "Sure, "}]
    assert render(CHATML, messages, continue_final_message=True) == "<user>hi</><assistant>Sure, "
    assert render(SYSTEM_IN_USER, messages, continue_final_message=True) == "<user>hi</><assistant>Sure,"


def test_continued_message_that_the_template_hides_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        render("{{ messages[0].content }}", [user("a"), user("b")], continue_final_message=True)
    assert caught.value.field == "continue_final_message"


TOOL = {"type": "function", "function": {"name": "add", "description": "a < b & 'c' é"}}


def test_tools_are_json_without_html_escapes() -> None:
    assert render("{{ tools | tojson }}", [user("q")], tools=[TOOL]) == (
        '[{"type": "function", "function": {"name": "add", "description": "a < b & \'c\' é"}}]'
    )
    assert render("{{ tools is none }}", [user("q")], tools=[]) == "True"


def call_messages(arguments: str) -> list[dict[str, Any]]:
    function = {"name": "add", "arguments": arguments}
    return [user("q"), {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}]


def test_tool_arguments_are_objects_or_text_as_the_template_needs() -> None:
    as_object = "{{ messages[1].tool_calls[0].function.arguments.a }}"
    as_text = "{{ 'args: ' + messages[1].tool_calls[0].function.arguments }}"
    assert render(as_object, call_messages('{"a": 7}')) == "7"
    assert render(as_text, call_messages('{"a": 7}')) == 'args: {"a": 7}'
    assert render(as_text, call_messages("not json")) == "args: not json"


def test_reasoning_is_seen_under_both_names() -> None:
    source = "{{ messages[0].reasoning_content }}{{ messages[0].reasoning }}"
    assert render(source, [{"role": "assistant", "content": "a", "reasoning": "x"}]) == "xx"


LLAMA_LIKE = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{%- set ns = namespace(calls=0) %}
{{- "<|system|>" + date_string + "\n" + system_message }}
{%- if tools %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|' + message['role'] + '|>\n' + message['content'] | trim + '<|end|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls|length > 1 %}
            {{- raise_exception("one tool call at a time") }}
        {%- endif %}
        {%- set ns.calls = ns.calls + 1 %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}" }}
    {%- else %}
        {{- "<|tool|>" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' + ns.calls | string }}
{%- endif %}
"""


@pytest.mark.parametrize("source", [LLAMA_LIKE, CHATML, PARTS, SYSTEM_IN_USER])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_prompts_are_those_of_transformers(source: str, add_generation_prompt: bool) -> None:
    function = {"name": "add", "arguments": {"a": 1, "b": "é<"}}
    messages = [
        {"role": "system", "content": " be kind "},
        user("what is <this> & that?\n"),
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "It is 42."},
    ]
    theirs: Any = render_jinja_template(
        [messages],
        tools=[TOOL],
        chat_template=source,
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
    )
    assert render(source, messages, tools=[TOOL], add_generation_prompt=add_generation_prompt) == theirs[0][0]


def test_messages_of_the_caller_are_left_as_they_were() -> None:
    messages = [*call_messages('{"a": 7}'), {"role": "assistant", "content": "x"}]
    before = repr(messages)
    render(CHATML, messages, continue_final_message=True)
    assert repr(messages) == before


def test_named_templates_are_chosen_by_tools_and_by_name() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools", "rag": "rag"})
    assert template.render([user("q")]) == "plain"
    assert template.render([user("q")], tools=[TOOL]) == "tools"
    assert template.render([user("q")], template="rag") == "rag"
    assert template.render([user("q")], template="{{ messages | length }}") == "1"
    with pytest.raises(RequestError, match="a, b"):
        ChatTemplate({"a": "x", "b": "y"}).render([user("q")])


def test_whitespace_loop_controls_generation_tag_and_special_tokens() -> None:
    source = (
        "{{ bos_token }}\n"
        "  {% for m in messages %}\n"
        "{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m.content }}{% endgeneration %}\n"
        "  {% endfor %}\n"
    )
    assert render(source, [user("a"), user("b")]) == "<s>\na"


def test_template_arguments_reach_the_template_but_cannot_replace_the_messages() -> None:
    assert render("{{ enable_thinking }}", [user("q")], template_kwargs={"enable_thinking": False}) == "False"
    with pytest.raises(RequestError) as caught:
        render(CHATML, [user("q")], template_kwargs={"messages": []})
    assert caught.value.field == "chat_template_kwargs"


def test_date_is_todays() -> None:
    assert render("{{ strftime_now('%Y') }}", [user("q")]) == str(datetime.now().year)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ missing.field }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_unsafe_and_failing_templates_are_request_errors(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(source, [user("q")])
    assert caught.value.field == "messages"


def test_syntax_error_names_the_template_and_the_line() -> None:
    with pytest.raises(RequestError, match="line 2") as caught:
        render("a\n{% if %}", [user("q")])
    assert caught.value.field == "chat_template"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list"),
        ("hi", "non-empty list"),
        (["hi"], "messages[0] must be an object with a role"),
        ([{"content": "hi"}], "messages[0] must be an object with a role"),
        ([user(3)], "messages[0].content must be a string or a list"),
        ([user([3])], "messages[0].content[0] must be a string or an object"),
        ([user([{"type": "text"}])], "messages[0].content[0].text must be a string"),
        ([user("q"), {"role": "assistant", "tool_calls": ["x"]}], "messages[1].tool_calls must hold objects"),
    ],
)
def test_ill_formed_messages_are_refused_by_place(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        render(CHATML, messages)
    assert caught.value.field == "messages"
