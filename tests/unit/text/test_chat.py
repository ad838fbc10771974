from __future__ import annotations

import sys
from datetime import datetime

import pytest

from text.chat import ChatTemplate, TemplateError

TEMPLATES = {
    "chatml with a default system turn": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "blocks on lines of their own": (
        "{{- bos_token }}\n{%- if messages[0].role == 'system' %}\n    {%- set system = messages[0].content | trim %}\n"
        "    {%- set messages = messages[1:] %}\n{%- else %}\n    {%- set system = '' %}\n{%- endif %}\n"
        "  {% if system %}\n[{{ system }}]\n  {% endif %}\n"
        "{% for m in messages %}\n    {{ m.role | upper }}: {{ m.content }}{{ eos_token }}\n{% endfor %}\n"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    ),
    "loop controls, namespaces and tojson": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{{ ns.n }}:{{ m | tojson }};{% if ns.n == 2 %}{% break %}{% endif %}{% endfor %}"
        "{% if tools is not none %}T{% endif %}{{ pad_token }}"
    ),
}
CHATS = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": " be <brief> & kind "}, {"role": "user", "content": 'naïve 你好 "q" {{ 1 + 1 }}'}],
    [
        {"role": "user", "content": "a\n\nb"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "\tc  "},
    ],
]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_renders_what_transformers_renders(source: str, chat: list[dict[str, str]]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        [chat], chat_template=source, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    assert ChatTemplate(source, "<s>", "</s>").render(chat) == rendered[0]


def test_no_template_is_an_error_that_says_so() -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        ChatTemplate(None, None, None).render(CHATS[0])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages[7].content }}", "has no element 7"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ range(999999999) }}", "Range too big"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 1000000 lines"),
        ("{% macro m(n) %}{% if n %}{{ m(n - 1) ~ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}", "1000000 lines"),
        ("{{ 'a' * 10000000000 }}", "too large"),
        ("{{ 10000000000 * ['a'] }}", "too large"),
        ("{{ 9 ** (9 ** 9) }}", "too large"),
        ("{% set n = namespace(x=9) %}{% for i in range(90) %}{% set n.x = n.x * n.x %}{% endfor %}", "too large"),
    ],
)
def test_a_template_that_raises_gives_its_message(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(source, "<s>", "</s>").render(CHATS[0])


def test_products_and_long_chats_are_rendered_as_ever() -> None:
    assert ChatTemplate("{{ 3 * 4 }}{{ 'ab' * 2 }}{{ 2 ** 10 }}{{ 2.5 * 2 }}", None, None).render([]) == "12abab10245.0"
    chat, before = [{"role": "user", "content": "hi"}] * 10_000, sys.gettrace()
    text = ChatTemplate("{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}", None, None).render(chat)
    assert text == "userhi" * 10_000
    assert sys.gettrace() is before


def test_a_missing_special_token_is_undefined_and_not_the_word_none() -> None:
    assert ChatTemplate("[{{ bos_token }}]", None, None).render(CHATS[0]) == "[]"


def test_the_template_can_ask_for_the_date() -> None:
    before = datetime.now().year
    assert int(ChatTemplate("{{ strftime_now('%Y') }}", None, None).render(CHATS[0])) in (before, before + 1)


def test_a_template_cannot_change_the_callers_messages() -> None:
    chat = [{"role": "user", "content": "hi"}]
    with pytest.raises(TemplateError):
        ChatTemplate("{% set _ = messages[0].update({'content': 'x'}) %}", None, None).render(chat)
    assert chat == [{"role": "user", "content": "hi"}]
