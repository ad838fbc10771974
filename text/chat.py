"""Chat templates: Jinja in a sandbox, with the globals and filters that model authors rely on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateError(ValueError):
    """The chat can't be rendered: the model has no template, or the template refused; the message says which."""


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template and the special tokens that it may name."""

    def __init__(self, source: str | None, bos_token: str | None, eos_token: str | None) -> None:
        self._source = source
        self._tokens = {
            name: token for name, token in (("bos_token", bos_token), ("eos_token", eos_token)) if token is not None
        }
        self._template: jinja2.Template | None = None

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of the chat up to where the assistant's answer begins."""
        if self._source is None:
            raise TemplateError("the model has no chat template: send a prompt instead of messages")
        try:
            if self._template is None:
                self._template = _environment().from_string(self._source)
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._tokens,
            )
        except Exception as error:  # a template is the model author's program: it may raise anything
            raise TemplateError(f"the chat template refused the messages: {error}") from error
