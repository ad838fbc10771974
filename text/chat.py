"""Chat templates: Jinja in a sandbox, with the globals and filters that model authors rely on."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import FrameType
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_LINES = 1_000_000
"""That a template may run for one chat: a hundred for each of ten thousand messages, in about a second."""
MOST_SIZE = 1_000_000
"""Characters, entries or bits of a product or a power within a template."""


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


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox without products and powers that take all memory or all time."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        for one, other in ((left, right), (right, left)):
            if isinstance(other, int):
                size = len(one) if hasattr(one, "__len__") else one.bit_length() if isinstance(one, int) else 0
                if size * (other.bit_length() if operator == "*" and isinstance(one, int) else other) > MOST_SIZE:
                    raise jinja2.TemplateError(f"the result of {operator} would be too large")
        return super().call_binop(context, operator, left, right)


class _Lines:
    """Counts the lines that a template runs, while it is entered, and ends one that doesn't come to an end."""

    def __init__(self) -> None:
        self._left = MOST_LINES
        self._before: Any = None

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        return self._line if frame.f_code.co_filename == "<template>" else None

    def _line(self, _frame: FrameType, _event: str, _argument: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise jinja2.TemplateError(f"it runs more than {MOST_LINES} lines")
        return self._line


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
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
            with _Lines():
                return self._template.render(
                    messages=[dict(message) for message in messages],
                    tools=None,
                    documents=None,
                    add_generation_prompt=True,
                    **self._tokens,
                )
        except Exception as error:  # a template is the model author's program: it may raise anything
            raise TemplateError(f"the chat template refused the messages: {error}") from error
