"""What a form of the weights costs in quality: a fixed text, each token predicted from those before it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from importlib import resources

from engine.config import EngineConfig
from engine.llm import LLM
from engine.model import load_text
from engine.request import SamplingParams
from text.tokenizer import Tokenizer

PIECE_TOKENS = 1024
"""The text is cut into pieces that begin without context; no piece is longer than this, or than the model's context."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What a model says of each token of a text but the first of each piece."""

    logprobs: tuple[float, ...]
    """Of the text's own tokens."""
    likeliest: tuple[int, ...]
    """The token that greedy decoding would have taken in its place."""

    @property
    def perplexity(self) -> float:
        return math.exp(-math.fsum(self.logprobs) / len(self.logprobs))

    def agreement(self, other: Scores) -> float:
        """Share of places at which both would have taken the same token."""
        same = sum(a == b for a, b in zip(self.likeliest, other.likeliest, strict=True))
        return same / len(self.likeliest)


def sample_text() -> str:
    """The text that ships with the package: prose, dialogue, a recipe, figures, a program, a letter, questions."""
    return resources.files(__name__).joinpath("text.txt").read_text(encoding="utf-8")


def pieces_of(config: EngineConfig, text: str) -> list[list[int]]:
    """The tokens of a text, cut to pieces that the model can take."""
    bundle, _, context_len = load_text(config)
    tokens = list(Tokenizer(bundle).encode_prompt(text))
    size = min(PIECE_TOKENS, context_len)
    return [tokens[start : start + size] for start in range(0, len(tokens) - 1, size)]


def score(config: EngineConfig, text: str) -> Scores:
    """Load the model as `config` says and let it predict the text."""
    pieces = pieces_of(config, text)
    asked = SamplingParams(max_tokens=0, prompt_logprobs=1, temperature=0.0)
    logprobs: list[float] = []
    likeliest: list[int] = []
    with LLM(**{field.name: getattr(config, field.name) for field in fields(config)}) as llm:
        for output in llm.generate(pieces, asked):
            if output.error is not None:
                raise RuntimeError(output.error)
            for told in output.prompt_logprobs or ():
                if told is not None:
                    logprobs.append(told.logprob)
                    likeliest.append(told.top[0].token_id)
    return Scores(tuple(logprobs), tuple(likeliest))
