"""How a request wants its tokens chosen, reported and ended. No torch here."""

from __future__ import annotations

import copy
import math
import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from text.grammar import GrammarError, grammar_of

MOST_CHOICES = 16
MOST_LOGPROBS = 20


class RequestRefused(ValueError):
    """The request can't run on this model; the message says why, `code` is a reason of the job contract."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Names and meanings as in vLLM and OpenAI's API.

    `temperature` under 1e-5 and `top_k=1` are greedy. `top_k` -1 and 0 keep every token; `top_p=0`
    keeps the likeliest token; `max_tokens=0` gives an empty text with reason `length`. Nothing stops
    a request before `min_tokens`. `ignore_eos` leaves the user's own `stop_token_ids` in force.

    Of parameters that leave no token between them a grammar is the strongest, then
    `allowed_token_ids`, then `min_tokens`, then `bad_words`.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    n: int = 1
    """Completions of the prompt, each with a seed of its own (`kernels.sampling.choice_seed`)."""
    repetition_penalty: float = 1.0
    """Over 1 makes tokens of the prompt and the output less likely."""
    presence_penalty: float = 0.0
    """Over 0 makes tokens of the output less likely."""
    frequency_penalty: float = 0.0
    """The same, once for each time that they occur."""
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    """Added to the logits of these token ids, from -100 to 100."""
    bad_words: tuple[str, ...] = ()
    """Never generated, in the tokens that they are encoded to."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Nothing else is generated."""
    logprobs: int | None = None
    """Report each token's logprob, and those of so many of the likeliest (0 to 20)."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, from the second on; with `max_tokens=0` nothing else is computed."""
    response_format: Mapping[str, Any] | None = field(default=None, hash=False)
    """As OpenAI's: `{"type": "json_object"}`, or `{"type": "json_schema", "json_schema": {"schema": {...}}}`."""
    guided_regex: str | None = None
    """The whole text matches this regular expression (the syntax of Rust's `regex`, without anchors)."""
    guided_choice: tuple[str, ...] | None = None
    """The text is one of these."""
    guided_grammar: str | None = None
    """The text follows this Lark grammar from its rule `start`."""

    def __post_init__(self) -> None:
        """Raise `RequestRefused` for values without a meaning. `stop` may be one string, and every tuple any list."""
        stop: object = self.stop
        self._set("stop", (stop,) if isinstance(stop, str) else self._listed("stop"))
        for name in ("stop_token_ids", "bad_words"):
            self._set(name, self._listed(name))
        for name in ("allowed_token_ids", "guided_choice"):
            if getattr(self, name) is not None:
                self._set(name, self._listed(name))
        self._check_numbers()
        self._check_flags()
        self._check_lists()
        self._check_bias()
        self._check_grammar()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _listed(self, name: str) -> tuple[Any, ...]:
        value = getattr(self, name)
        self._require(name, isinstance(value, Sequence) and not isinstance(value, str | bytes), "a list")
        return tuple(value)

    def _check_numbers(self) -> None:
        self._whole("max_tokens", 0)
        self._whole("min_tokens", 0, self.max_tokens, f"from 0 to max_tokens={_shown(self.max_tokens)}")
        self._whole("top_k", -1)
        self._whole("n", 1, MOST_CHOICES)
        self._number("temperature", 0)
        self._number("top_p", 0, 1)
        self._number("min_p", 0, 1)
        self._number("repetition_penalty", 0.01, 100)
        self._number("presence_penalty", -2, 2)
        self._number("frequency_penalty", -2, 2)
        if self.seed is not None:
            self._whole("seed", 0, 2**63 - 1, "from 0 to 2**63 - 1")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._whole(name, 0, MOST_LOGPROBS)

    def _check_flags(self) -> None:
        for name in ("include_stop_str_in_output", "ignore_eos"):
            self._require(name, isinstance(getattr(self, name), bool), "True or False")

    def _check_lists(self) -> None:
        for name in ("stop", "bad_words"):
            self._require(name, all(_is_text(text) for text in getattr(self, name)), "valid strings that are not empty")
        self._require("bad_words", all(word.strip() for word in self.bad_words), "words, not only spaces")
        self._require("stop_token_ids", all(map(_is_id, self.stop_token_ids)), "token ids, at least 0")
        allowed = self.allowed_token_ids
        self._require("allowed_token_ids", allowed is None or (allowed and all(map(_is_id, allowed))), "token ids")

    def _check_bias(self) -> None:
        bias = self.logit_bias
        if bias is None:
            return
        self._require("logit_bias", isinstance(bias, Mapping), "a mapping from token ids to numbers")
        held = all(_is_id(token) and _is_number(value) and -100 <= value <= 100 for token, value in bias.items())
        self._require("logit_bias", held, "a mapping from token ids to numbers from -100 to 100")
        self._set("logit_bias", dict(bias))

    def _check_grammar(self) -> None:
        for name in ("guided_regex", "guided_grammar"):
            self._require(
                name, getattr(self, name) is None or _is_text(getattr(self, name)), "valid text that is not empty"
            )
        choices = self.guided_choice
        held = choices is None or (choices and all(map(_is_text, choices)))
        self._require("guided_choice", held, "valid strings that are not empty")
        self._require("response_format", isinstance(self.response_format, Mapping | None), "a mapping")
        self._set("response_format", copy.deepcopy(self.response_format))
        try:
            grammar_of(self)
        except GrammarError as error:
            raise RequestRefused("invalid_request", f"{error.param}: {error}", error.param) from error

    def _whole(self, name: str, least: int, most: int | None = None, what: str | None = None) -> None:
        value = getattr(self, name)
        what = what or (
            f"a whole number, at least {least}" if most is None else f"a whole number from {least} to {most}"
        )
        self._require(name, _is_whole(value) and value >= least and (most is None or value <= most), what)

    def _number(self, name: str, least: float, most: float = math.inf) -> None:
        value = getattr(self, name)
        what = f"a finite number, at least {least}" if math.isinf(most) else f"a number from {least} to {most}"
        self._require(name, _is_number(value) and least <= value <= most, what)

    def _require(self, name: str, holds: object, what: str) -> None:
        if not holds:
            raise RequestRefused("invalid_request", f"{name} must be {what}, got {_shown(getattr(self, name))}", name)


def _shown(value: object) -> str:
    """A value as a message tells it: cut where it is long."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python writes no whole number of more than some thousand digits
        return f"a {type(value).__name__} of too many digits"


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_id(value: object) -> bool:
    return _is_whole(value) and value >= 0  # type: ignore[operator]


def _is_text(value: object) -> bool:
    """Whether it is text that has an encoding, and not empty: half a surrogate pair has none."""
    return isinstance(value, str) and bool(value) and not any("\ud800" <= char <= "\udfff" for char in value)
