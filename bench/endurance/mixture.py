"""Requests of every kind, drawn from a seed: lengths, sampling, grammars, bad ones, and how each of them ends."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

from bench.endurance.random_model import BROKEN_CHAT, CONTEXT_TOKENS, REFUSED_CHAT
from engine.fake import END_ID
from engine.request import EngineRequest, SamplingParams

POISON = (END_ID + 5,) * 3
"""A prompt that begins with these tokens raises whenever a step computes any of it."""
_PREFIXES = 12
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 999}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0, "logit_bias": {97: 5.0, 98: -5.0}},
    {"temperature": 1.0, "logprobs": 3},
    {"temperature": 1.0, "bad_words": ["ab", "z"]},
    {"temperature": 1.0, "allowed_token_ids": list(range(97, 123))},
)
_ENDS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"stop": ["a", "zz", "e "]},
    {"stop": ["th"], "include_stop_str_in_output": True, "min_tokens": 3},
    {"ignore_eos": True, "stop_token_ids": [120]},
)


class Unspeakable(str):
    """A prompt on which the tokenizer fails."""

    __slots__ = ()

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        raise RuntimeError("the tokenizer fails")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and after how many of its deltas somebody drops it."""

    request: EngineRequest
    abort_after: int | None


class Mixture:
    """Draws requests; the same seed draws the same ones."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._prefixes = [
            bytes(self._draw.choices(range(32, 127), k=self._draw.randint(16, 160))) for _ in range(_PREFIXES)
        ]
        self._count = 0

    def next(self) -> Asked:
        """The next request. About one of 40 can't run, and one of 12 is dropped or has a deadline."""
        draw = self._draw
        self._count += 1
        name = f"r{self._count}"
        kind = draw.random()
        if kind < 0.02:
            return Asked(EngineRequest(name, SamplingParams(max_tokens=8), **self._unfit()), None)
        if kind < 0.023:
            poisoned = (*POISON, *self._prefixes[0], *range(97, 97 + draw.randint(1, 9)))
            return Asked(EngineRequest(name, SamplingParams(max_tokens=8), prompt=poisoned), None)
        request = EngineRequest(
            name,
            self._params(),
            **self._prompt(),
            priority=draw.choice((0, 0, 0, 1, 2)),
            tenant=draw.choice(("shop", "mail", "desk")),
            deadline_s=time.monotonic() + draw.uniform(0.01, 0.2) if draw.random() < 0.03 else None,
            namespace=draw.choice(("", "other")),
        )
        return Asked(request, draw.randint(0, 20) if draw.random() < 0.05 else None)

    def _params(self) -> SamplingParams:
        draw = self._draw
        grammar = self._grammar() if draw.random() < 0.05 else {}
        params = {**draw.choice(_SAMPLING), **({} if grammar else draw.choice(_ENDS)), **grammar}
        params["max_tokens"] = max(params.get("min_tokens", 0), int(draw.paretovariate(1.0) * 40) % 300)
        if draw.random() < 0.5:
            params["seed"] = draw.getrandbits(40)
        if draw.random() < 0.05:
            params["n"] = draw.randint(2, 4)
        if draw.random() < 0.02:
            params["prompt_logprobs"] = 2
        return SamplingParams(**params)

    def _grammar(self) -> dict[str, Any]:
        """A few that are kept compiled, and more that are used once than are kept."""
        draw = self._draw
        return draw.choice(
            (
                {"response_format": {"type": "json_schema", "json_schema": {"schema": _SCHEMA}}},
                {"response_format": {"type": "json_object"}},
                {"guided_regex": f"[a-z]{{1,{draw.randint(1, 400)}}}"},
                {"guided_choice": ["yes", "no", f"perhaps {draw.randint(0, 400)}"]},
                {"guided_grammar": 'start: "a" start | "b"'},
            )
        )

    def _prompt(self) -> dict[str, Any]:
        draw = self._draw
        kind = draw.random()
        prefix = draw.choice(self._prefixes)
        tail = bytes(draw.choices(range(32, 127), k=draw.randint(1, 60)))
        if kind < 0.1:
            return {"messages": ({"role": "user", "content": (prefix + tail).decode()},)}
        if kind < 0.2:
            return {"prompt": tuple(draw.choices(range(256), k=draw.randint(1, 120)))}
        if kind < 0.25:
            return {"prompt": "né🙂 " * draw.randint(1, 12)}
        return {"prompt": (prefix + tail).decode()}

    def _unfit(self) -> dict[str, Any]:
        """A prompt that is refused, for its chat, length, ids or text; or that the tokenizer fails on."""
        prompts: tuple[dict[str, Any], ...] = (
            {"messages": ({"role": "user", "content": REFUSED_CHAT},)},
            {"messages": ({"role": "user", "content": BROKEN_CHAT},)},
            {"prompt": tuple([97] * (CONTEXT_TOKENS + 1))},
            {"prompt": (97, 10**6)},
            {"prompt": "\ud800"},
            {"prompt": ""},
            {"prompt": Unspeakable("nothing")},
        )
        return self._draw.choice(prompts)
